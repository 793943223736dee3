"""The engine core: the process that holds the devices and, instead of computing, keeps time.

It schedules as vLLM V1 does: every step gives one token to each sequence that decodes and spends what is left of
`max_num_batched_tokens` on prefills, first come first served, at most `max_num_seqs` sequences at once. A sequence
reserves the cache blocks of its whole answer when it starts (its length is known here), so nothing is ever preempted.
"""

from __future__ import annotations

import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from simulated_vllm import devices
from simulated_vllm.arguments import Config
from simulated_vllm.cache import KVCache, Sequence
from simulated_vllm.channel import Channel
from simulated_vllm.log import Logger
from simulated_vllm.settings import Fault, SettingsFile
from simulated_vllm.tokens import TOKEN_BYTES

LOG = Logger("EngineCore")
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32)


@dataclass
class Request:
    """A sequence in the scheduler. Times are monotonic seconds."""

    id: str
    prompt: bytes
    output: bytes
    salt: str
    arrived: float
    blocks: Sequence | None = None
    scheduled: float = 0.0
    not_before: float = 0.0  # the fault slow_prefill_s
    to_prefill: int = 0
    produced: int = 0
    first_token: float = 0.0

    @property
    def wanted(self) -> int:
        return len(self.output) // TOKEN_BYTES


class Core:
    """The scheduler and its clock."""

    def __init__(self, config: Config, settings: SettingsFile, channel: Channel) -> None:
        self.config = config
        self.settings = settings
        self.channel = channel
        self.cache = KVCache(
            config.num_blocks_override or max(1, settings.current().kv_cache_tokens // config.block_size),
            config.block_size,
            config.prefix_caching,
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.switched_fault: Fault | None = None
        self.queried_tokens = 0
        self.hit_tokens = 0

    def run(self) -> None:
        """Serves until the API server is gone (EOFError)."""
        while True:
            self._receive(None if not (self.waiting or self.running) else 0)
            admitted = self._admit()
            if self._hangs():
                # What was admitted is counted as running, and then nothing moves: a device that never comes back.
                if admitted:
                    self.channel.send("step", [], self._stats(0, 0))
                self._receive(0.2)
            elif self.running:
                self._step()
            elif self.waiting:
                self._receive(0.05)

    # -- what the API server asks --------------------------------------------------------------------------------

    def _receive(self, timeout_s: float | None) -> None:
        for kind, *values in self.channel.receive(timeout_s):
            if kind == "add":
                self.waiting.append(Request(*values, arrived=time.monotonic()))
            elif kind == "abort":
                self._abort(values[0])
            elif kind == "fault":
                self.switched_fault = values[0]

    def _abort(self, id_: str) -> None:
        before = len(self.waiting) + len(self.running)
        self.waiting = deque(request for request in self.waiting if request.id != id_)
        for request in self.running:
            if request.id == id_:
                request.blocks.close()
        self.running = [request for request in self.running if request.id != id_]
        if before and not (self.waiting or self.running):
            self.channel.send("step", [], self._stats(0, 0))

    def _fault(self) -> Fault:
        return self.switched_fault or self.settings.current().fault(self.config.port) or {}

    def _hangs(self) -> bool:
        return bool({"hang", "hang_engine"} & self._fault().keys())

    # -- scheduling ----------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Moves requests from the queue to the batch while there are slots and blocks; true if any moved."""
        admitted = False
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            request.blocks = self.cache.open(request.prompt, request.wanted, request.salt)
            if request.blocks is None:
                break
            self.waiting.popleft()
            prompt_tokens = len(request.prompt) // TOKEN_BYTES
            request.scheduled = time.monotonic()
            request.not_before = request.scheduled + self._fault().get("slow_prefill_s", 0)
            request.to_prefill = prompt_tokens - request.blocks.cached_tokens
            if self.cache.prefix_caching:
                self.queried_tokens += prompt_tokens
                self.hit_tokens += request.blocks.cached_tokens
            self.running.append(request)
            admitted = True
        return admitted

    def _step(self) -> None:
        now = time.monotonic()
        active = [request for request in self.running if request.not_before <= now]
        if not active:
            self._receive(min(request.not_before for request in self.running) - now)
            return
        budget = self.config.max_num_batched_tokens - sum(not request.to_prefill for request in active)
        prefilled = 0
        decoding = []
        for request in active:
            if request.to_prefill:
                share = max(0, min(budget, request.to_prefill))
                budget -= share
                prefilled += share
                request.to_prefill -= share
            if not request.to_prefill:
                decoding.append(request)

        settings = self.settings.current()
        milliseconds = settings.decode_ms_per_step + settings.decode_ms_per_sequence * len(active)
        self._sleep_until(now + milliseconds / 1e3 + prefilled * settings.prefill_us_per_token / 1e6)

        in_batch = {request.id for request in self.running}  # aborts may have come meanwhile
        outputs = [self._produce(request) for request in decoding if request.id in in_batch]
        self.running = [request for request in self.running if request.produced < request.wanted]
        self.channel.send("step", outputs, self._stats(prefilled, len(outputs)))

    def _sleep_until(self, end: float) -> None:
        """A step takes its time; what arrives meanwhile is for the next one."""
        while (left := end - time.monotonic()) > 0:
            self._receive(left)

    def _produce(self, request: Request) -> tuple[str, int, int, tuple[float, ...] | None]:
        now = time.monotonic()
        if not request.produced:
            request.first_token = now
            request.blocks.computed(request.prompt)
        request.produced += 1
        cached = request.blocks.cached_tokens
        if request.produced < request.wanted:
            return request.id, 1, cached, None
        # The last token has not been through the model, so its place in the cache is still empty.
        request.blocks.computed(request.prompt + request.output[:-TOKEN_BYTES])
        request.blocks.close()
        return request.id, 1, cached, (request.arrived, request.scheduled, request.first_token, now)

    def _stats(self, prefilled: int, produced: int) -> dict[str, float]:
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "usage": self.cache.usage,
            "queried": self.queried_tokens,
            "hit": self.hit_tokens,
            "prefilled": prefilled,
            "produced": produced,
        }


def load(config: Config, load_s: float, sleep: Callable[[float], object]) -> None:
    """Prints what vLLM prints while it loads, and takes `load_s` seconds for it."""
    shards = len(list(Path(config.model).glob("*.safetensors"))) if config.load_format != "dummy" else 0
    LOG.info("model_runner_v1.py:2612", f"Starting to load model {config.model}...")
    started = time.monotonic()
    weights_s = load_s * 0.7
    pause = weights_s / max(1, shards)
    for shard in range(shards + 1 if shards else 0):
        elapsed = round(shard * pause)
        left = round((shards - shard) * pause)
        rate = f"{pause:5.2f}s/it" if shard else "?it/s"
        LOG.raw(
            f"Loading safetensors checkpoint shards: {100 * shard // shards:3d}% Completed | {shard}/{shards} "
            f"[{elapsed // 60:02d}:{elapsed % 60:02d}<{left // 60:02d}:{left % 60:02d}, {rate}]"
        )
        if shard < shards:
            sleep(pause)
    if not shards:
        sleep(weights_s)
    LOG.info("default_loader.py:291", f"Loading weights took {weights_s:.2f} seconds")
    LOG.info("model_runner_v1.py:2640", f"Loading model weights took 14.2100 GB and {weights_s:.6f} seconds")
    for done, size in enumerate(GRAPH_SIZES, 1):
        sleep(load_s * 0.3 / len(GRAPH_SIZES))
        LOG.raw(
            f"Capturing CUDA graphs (decode, FULL): {100 * done // len(GRAPH_SIZES):3d}%| {done}/{len(GRAPH_SIZES)} (batch size {size})"
        )
    took = time.monotonic() - started
    LOG.info("core.py:272", f"init engine (profile, create kv cache, warmup model) took {took:.2f} seconds")


def start(config: Config, settings: SettingsFile, channel: Channel) -> Core:
    """Takes the devices and loads. Raises DeviceError, ValueError, RuntimeError, and EOFError when the API server is gone."""
    chosen = devices.visible(config.world_size)
    devices.hold(chosen)
    LOG.info("parallel_state.py:1203", f"world size {config.world_size}, devices {chosen}")
    if "crash_on_load" in (settings.current().fault(config.port) or {}):
        raise RuntimeError("NPU out of memory (simulated)")
    load(config, settings.current().load_s, channel.receive)  # a sleep that ends when the API server does
    core = Core(config, settings, channel)
    LOG.info("kv_cache_utils.py:1087", f"GPU KV cache size: {core.cache.tokens:,} tokens")
    if core.cache.tokens < config.max_model_len:
        raise ValueError(
            f"To serve at least one request with the models's max seq len ({config.max_model_len}), more KV cache is needed than is "
            f"available: {core.cache.tokens} tokens. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
            f"initializing the engine."
        )
    return core


def main(config: Config, connection: socket.socket) -> int:
    """The life of the core process; returns its exit code."""
    # As long as the API server lives, stopping is its decision: a control group that is told to stop tells both.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path("/proc/self/comm").write_text("VLLM::EngineCore")
    channel = Channel(connection)
    try:
        try:
            core = start(config, SettingsFile(), channel)
        except (RuntimeError, ValueError) as error:
            kind = "ValueError" if isinstance(error, ValueError) else "RuntimeError"
            LOG.error("core.py:866", f"EngineCore failed to start.\n{kind}: {error}")
            return 1
        channel.send("ready", core.cache.blocks)
        core.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        LOG.info("core.py:1302", "the API server is gone: shutting down")
    return 0
