"""/metrics in Prometheus' text format, under the names vLLM V1 uses (vllm/v1/metrics/loggers.py)."""

from __future__ import annotations

from bisect import bisect_left

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
    + (1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
)  # fmt: skip
INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


def one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to the limit."""
    steps = (mantissa * 10**exponent for exponent in range(12) for mantissa in (1, 2, 5))
    return tuple(step for step in steps if step <= limit)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Metrics:
    """The values of one engine. Attributes of the scheduler are set by the client that hears the core."""

    def __init__(self, model: str, max_model_len: int, block_size: int, blocks: int) -> None:
        self.labels = f'engine="0",model_name="{model}"'
        self.info = f'block_size="{block_size}",num_gpu_blocks="{blocks}"'
        self.running = 0
        self.waiting = 0
        self.usage = 0.0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISHED_REASONS, 0)
        tokens = one_two_five(max_model_len)
        self.first_token = Histogram(FIRST_TOKEN)
        self.inter_token = Histogram(INTER_TOKEN)
        self.per_output_token = Histogram(INTER_TOKEN)
        self.iteration_tokens = Histogram(ITERATION)
        self.end_to_end = Histogram(LATENCY)
        self.queue = Histogram(LATENCY)
        self.inference = Histogram(LATENCY)
        self.prefill = Histogram(LATENCY)
        self.decode = Histogram(LATENCY)
        self.prompt_lengths = Histogram(tokens)
        self.generation_lengths = Histogram(tokens)
        self.params_max_tokens = Histogram(tokens)
        self.params_n = Histogram((1, 2, 5, 10, 20))

    def render(self) -> str:
        lines: list[str] = []
        for name, help_, value in (
            ("num_requests_running", "Number of requests in model execution batches.", self.running),
            ("num_requests_waiting", "Number of requests waiting to be processed.", self.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", self.usage),
        ):
            lines += _head(name, help_, "gauge") + [f"vllm:{name}{{{self.labels}}} {float(value)}"]
        lines += _head("cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
        lines.append(f'vllm:cache_config_info{{{self.info},engine="0"}} 1.0')
        for name, help_, value in (
            ("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", self.queried_tokens),
            ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", self.hit_tokens),
            ("num_preemptions", "Cumulative number of preemption from the engine.", 0),
            ("prompt_tokens", "Number of prefill tokens processed.", self.prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", self.generation_tokens),
        ):
            lines += _head(f"{name}_total", help_, "counter") + [f"vllm:{name}_total{{{self.labels}}} {float(value)}"]
        lines += _head("request_success_total", "Count of successfully processed requests.", "counter")
        for reason, value in self.finished.items():
            lines.append(f'vllm:request_success_total{{{self.labels},finished_reason="{reason}"}} {float(value)}')
        for name, help_, histogram in (
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", self.first_token),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", self.inter_token),
            (
                "request_time_per_output_token_seconds",
                "Histogram of time_per_output_token_seconds per request.",
                self.per_output_token,
            ),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", self.end_to_end),
            ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", self.queue),
            ("request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", self.inference),
            ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", self.prefill),
            ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", self.decode),
            ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", self.iteration_tokens),
            ("request_prompt_tokens", "Number of prefill tokens processed.", self.prompt_lengths),
            ("request_generation_tokens", "Number of generation tokens processed.", self.generation_lengths),
            ("request_params_max_tokens", "Histogram of the max_tokens request parameter.", self.params_max_tokens),
            ("request_params_n", "Histogram of the n request parameter.", self.params_n),
        ):
            lines += _head(name, help_, "histogram") + self._render_histogram(name, histogram)
        return "\n".join(lines) + "\n"

    def _render_histogram(self, name: str, histogram: Histogram) -> list[str]:
        lines, total = [], 0
        for bound, number in zip((*map(float, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            total += number
            lines.append(f'vllm:{name}_bucket{{{self.labels},le="{bound}"}} {float(total)}')
        lines.append(f"vllm:{name}_count{{{self.labels}}} {float(total)}")
        lines.append(f"vllm:{name}_sum{{{self.labels}}} {histogram.sum}")
        return lines


def _head(name: str, help_: str, kind: str) -> list[str]:
    return [f"# HELP vllm:{name} {help_}", f"# TYPE vllm:{name} {kind}"]
