#!/usr/bin/python
"""Ask OpenAI-compatible endpoints the questions of an acceptance test."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: endpoint_answers
short_description: Ask OpenAI-compatible endpoints the questions of an acceptance test
description:
  - Asks every endpoint for its health and models and, at level V(full), for answers at three temperatures, an exact number
    of tokens, a stream, reasoning, a tool call, and what it says to a wrong key and to none. With O(endpoints[].sessions) it
    also opens sessions through a load balancer and notes which backend answers.
  - All endpoints are asked at the same time, so that the instances of a machine cost one task.
  - The answers are returned as they came, cut short. Judging them is left to expectations, which are data.
  - An endpoint that does not answer is an answer, not a failure of the module.
author: llmops.ascend authors
options:
  endpoints:
    description: What to ask.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Under which name the answers are returned; unique.
        type: str
        required: true
      url:
        description: Where it listens, without a path.
        type: str
        required: true
      model:
        description: The served name to ask for.
        type: str
        required: true
      level:
        description: V(brief) asks for health and models, V(full) for everything.
        type: str
        choices: [brief, full]
        default: full
      reasoning:
        description: Whether the endpoint separates reasoning from content.
        type: bool
        default: false
      tools:
        description: Whether the endpoint calls tools on its own choice.
        type: bool
        default: false
      sessions:
        description: How many sessions of two requests to open; only of use through a load balancer.
        type: int
        default: 0
      timeout_s:
        description: Seconds one request may take.
        type: float
        default: 120
      wait_s:
        description: Seconds in which the endpoint may still refuse to name its models before that counts.
        type: float
        default: 0
  api_keys:
    description: The key of each endpoint, by its name. An endpoint without one is asked without a key.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Whether it can run in check mode.
    support: full
    details: Asking changes nothing, so it asks in check mode too.
  diff_mode:
    description: Whether it returns what would change.
    support: N/A
  idempotent:
    description: Whether a second run changes nothing.
    support: full
"""

EXAMPLES = r"""
- name: Ask the first two instances of this machine
  llmops.ascend.endpoint_answers:
    endpoints:
      - {name: qwen38-tp2-0, url: "http://198.18.254.66:8000", model: Qwen3.8-27B-W8A8, reasoning: true, tools: true}
      - {name: qwen38-tp2-1, url: "http://198.18.254.66:8001", model: Qwen3.8-27B-W8A8, level: brief}
    api_keys:
      qwen38-tp2-0: "{{ vault_qwen_key }}"
      qwen38-tp2-1: "{{ vault_qwen_key }}"
"""

RETURN = r"""
answers:
  description:
    - The answers of each endpoint by its name. RV(answers.*.seconds) are seconds of wall time.
    - Every single answer has C(status) (HTTP status, or null), C(error) (in words, or null) and C(seconds).
  returned: always
  type: dict
  sample:
    qwen38-tp2-0:
      level: full
      seconds: 4.2
      health: {status: 200, error: null, seconds: 0.002}
      models: {status: 200, error: null, seconds: 0.003, names: [Qwen3.8-27B-W8A8], max_model_len: 262144}
      max_tokens:
        status: 200
        error: null
        seconds: 0.2
        finish_reason: length
        usage: {prompt_tokens: 18, completion_tokens: 8, total_tokens: 26}
      wrong_key: {status: 401, error: Unauthorized, seconds: 0.002}
"""

from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils.endpoint_questions import THREADS, ask

ENDPOINT = {
    "name": {"type": "str", "required": True},
    "url": {"type": "str", "required": True},
    "model": {"type": "str", "required": True},
    "level": {"type": "str", "choices": ["brief", "full"], "default": "full"},
    "reasoning": {"type": "bool", "default": False},
    "tools": {"type": "bool", "default": False},
    "sessions": {"type": "int", "default": 0},
    "timeout_s": {"type": "float", "default": 120},
    "wait_s": {"type": "float", "default": 0},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "endpoints": {"type": "list", "elements": "dict", "options": ENDPOINT, "required": True},
            "api_keys": {"type": "dict", "default": {}, "no_log": True},
        },
        supports_check_mode=True,
    )
    endpoints, keys = module.params["endpoints"], module.params["api_keys"]
    with ThreadPoolExecutor(min(max(len(endpoints), 1), THREADS)) as pool:
        try:
            answers = list(pool.map(lambda endpoint: ask(endpoint, keys.get(endpoint["name"])), endpoints))
        except ValueError as error:
            module.fail_json(msg=f"An endpoint's url cannot be asked: {error}. Give http://ADDRESS:PORT.")
    module.exit_json(changed=False, answers={e["name"]: a for e, a in zip(endpoints, answers)})


if __name__ == "__main__":
    main()
