"""Messages between the API server and its engine core: length-prefixed marshal over a socket pair.

marshal is fit here and nowhere else: both ends are forks of one interpreter, and the messages are plain tuples.

API server to core:  ("add", id, prompt: bytes, output: bytes, salt: str)   ("abort", id)   ("fault", fault | None)
core to API server:  ("ready", blocks)   ("step", outputs, stats)

An output is (id, new tokens, cached prompt tokens, times | None); times come with the last one, as monotonic seconds
(arrived, scheduled, first token, last token). Stats are those of the scheduler, see core.Core._stats.
"""

from __future__ import annotations

import marshal
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("!I")


def pack(message: tuple[Any, ...]) -> bytes:
    body = marshal.dumps(message)
    return HEADER.pack(len(body)) + body


class Unpacker:
    """Whole messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Any, ...]]:
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer)
            end = HEADER.size + size
            if len(self._buffer) < end:
                return
            message = marshal.loads(memoryview(self._buffer)[HEADER.size : end].tobytes())
            del self._buffer[:end]
            yield message


class Channel:
    """The core's end: blocking sends, and receives that wait as long as the caller allows."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._unpacker = Unpacker()

    def send(self, *message: Any) -> None:
        self._socket.sendall(pack(message))

    def receive(self, timeout_s: float | None) -> list[tuple[Any, ...]]:
        """What arrives within the time, at once if something is there. Raises EOFError when the API server is gone."""
        if not self._poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000):
            return []
        data = self._socket.recv(1 << 20)
        if not data:
            raise EOFError
        return list(self._unpacker.feed(data))
