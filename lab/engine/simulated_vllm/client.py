"""The API server's side of the engine core: hands requests over, gives tokens back, notices when the core dies."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from simulated_vllm.channel import Unpacker, pack
from simulated_vllm.metrics import Metrics
from simulated_vllm.settings import Fault
from simulated_vllm.tokens import count

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class EngineDeadError(Exception):
    """The engine core is gone; nothing can be answered any more."""

    def __init__(self) -> None:
        super().__init__(ENGINE_DEAD)


class AbortedError(Exception):
    """The request was ended by a shutdown before its reply was complete."""


@dataclass
class Stream:
    """A request under way."""

    prompt_tokens: int
    wanted: int
    sent: float = field(default_factory=time.monotonic)
    last_token: float = 0.0
    produced: int = 0
    cached_tokens: int = 0
    events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)


class EngineClient(asyncio.Protocol):
    """Speaks with the core over a socket pair; see channel.py for the messages."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.dead = asyncio.Event()
        self._streams: dict[str, Stream] = {}
        self._unpacker = Unpacker()
        self._transport: asyncio.Transport

    @classmethod
    async def connect(cls, connection: socket.socket, metrics: Metrics) -> EngineClient:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(metrics), sock=connection)
        return client

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    async def generate(self, id_: str, prompt: bytes, reply: bytes, salt: str, finish_reason: str) -> AsyncIterator[Stream]:
        """Yields after every step that brought tokens; the stream says how many there are by now.

        Leaving the iterator early aborts the request. Raises EngineDeadError and AbortedError.
        """
        if self.dead.is_set():
            raise EngineDeadError
        stream = self._streams[id_] = Stream(count(prompt), count(reply))
        self._transport.write(pack(("add", id_, prompt, reply, salt)))
        complete = False
        try:
            while not complete:
                event = await stream.events.get()
                if isinstance(event, Exception):
                    raise event
                produced, stream.cached_tokens, times = event
                stream.produced += produced
                self._observe(stream, times)
                complete = times is not None
                yield stream
            self.metrics.finished[finish_reason] += 1
        finally:
            self._streams.pop(id_, None)
            if not complete:
                self.metrics.finished["abort"] += 1
                self._transport.write(pack(("abort", id_)))

    def set_fault(self, fault: Fault | None) -> None:
        self._transport.write(pack(("fault", fault)))

    def abort_all(self) -> None:
        for stream in self._streams.values():
            stream.events.put_nowait(AbortedError())

    def close(self) -> None:
        """Lets the core go: it ends when its connection does."""
        self._transport.close()

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for kind, *values in self._unpacker.feed(data):
            if kind == "step":
                self._step(*values)

    def connection_lost(self, exc: Exception | None) -> None:
        self.dead.set()
        for stream in self._streams.values():
            stream.events.put_nowait(EngineDeadError())

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def _step(self, outputs: list[tuple[str, int, int, Any]], stats: dict[str, float]) -> None:
        metrics = self.metrics
        metrics.running = int(stats["running"])
        metrics.waiting = int(stats["waiting"])
        metrics.usage = stats["usage"]
        metrics.queried_tokens = int(stats["queried"])
        metrics.hit_tokens = int(stats["hit"])
        metrics.generation_tokens += int(stats["produced"])
        if stats["prefilled"] or stats["produced"]:
            metrics.iteration_tokens.observe(stats["prefilled"] + stats["produced"])
        for id_, *event in outputs:
            if id_ in self._streams:
                self._streams[id_].events.put_nowait(event)

    def _observe(self, stream: Stream, times: tuple[float, float, float, float] | None) -> None:
        metrics, now = self.metrics, time.monotonic()
        if not stream.last_token:
            metrics.first_token.observe(now - stream.sent)
            metrics.prompt_tokens += stream.prompt_tokens
        else:
            metrics.inter_token.observe(now - stream.last_token)
        stream.last_token = now
        if times is None:
            return
        arrived, scheduled, first_token, last_token = times
        metrics.queue.observe(scheduled - arrived)
        metrics.prefill.observe(first_token - scheduled)
        metrics.decode.observe(last_token - first_token)
        metrics.inference.observe(last_token - scheduled)
        metrics.end_to_end.observe(now - stream.sent)
        metrics.prompt_lengths.observe(stream.prompt_tokens)
        metrics.generation_lengths.observe(stream.produced)
        if stream.produced > 1:
            metrics.per_output_token.observe((last_token - first_token) / (stream.produced - 1))
