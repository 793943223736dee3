"""A simulated vLLM: the real command line and HTTP interface around an engine that only keeps time.

Lab code: it stands where `vllm` stands in an image for Ascend NPUs, so that roles, load balancer and tests meet
what they will meet on real machines. It knows no model: answers are words drawn from a generator seeded by the prompt.
"""
