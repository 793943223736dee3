"""A small HTTP/1.1 server that behaves as uvicorn does towards a load balancer.

Keep-alive for 5 s, one request at a time on a connection, `Content-Length` and chunked bodies, `Expect: 100-continue`,
chunked responses, and a handler that is cancelled the moment its client goes away.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

KEEP_ALIVE_S = 5.0
MAX_HEAD_BYTES = 4 << 20  # --h11-max-incomplete-event-size
MAX_BODY_BYTES = 512 << 20


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    client: str
    keep_alive: bool

    def json(self) -> Any:
        """The body as JSON; raises ValueError."""
        return json.loads(self.body)


class BadRequestError(Exception):
    """What arrived is not HTTP."""


Handler = Callable[[Request, "Response"], Awaitable[None]]


class Response:
    """The answer to one request, whole (`send`) or in pieces (`start`, `write`, `end`)."""

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self.status = 0
        self.headers: dict[str, str] = {}  # added to every answer

    async def send(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        head = self._head(status, {"content-length": str(len(body)), "content-type": content_type})
        await self._connection.write(head if self._request.method == "HEAD" else head + body)

    async def send_json(self, status: int, value: Any) -> None:
        await self.send(status, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())

    async def start(self, status: int, content_type: str) -> None:
        await self._connection.write(self._head(status, {"content-type": content_type, "transfer-encoding": "chunked"}))

    async def write(self, data: bytes) -> None:
        await self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self._connection.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """Drops the connection with RST instead of FIN."""
        self._connection.reset()

    def _head(self, status: int, headers: dict[str, str]) -> bytes:
        self.status = status
        headers = {"date": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()), "server": "uvicorn", **headers, **self.headers}
        if not self._request.keep_alive:
            headers["connection"] = "close"
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join((*lines, "", "")).encode("latin-1")


class Connection(asyncio.Protocol):
    """One client connection."""

    transport: asyncio.Transport

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._buffer = bytearray()
        self._parser = RequestParser()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def idle(self) -> bool:
        return self._task is None

    async def write(self, data: bytes) -> None:
        self.transport.write(data)
        await self._writable.wait()

    def reset(self) -> None:
        peer = self.transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._stop_timer()
        self._writable.set()
        if self._task:
            self._task.cancel()

    def eof_received(self) -> None:
        """A client that closes its side is gone, as for uvicorn: the transport closes and the handler is cancelled."""

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self.idle:
            self._next_request()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _next_request(self) -> None:
        self._stop_timer()
        try:
            request = self._parser.parse(self._buffer, self.transport)
        except BadRequestError:
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                b"content-length: 30\r\n\r\nInvalid HTTP request received."
            )
            self.transport.close()
            return
        if request:
            self._task = asyncio.get_running_loop().create_task(self._serve(request))

    async def _serve(self, request: Request) -> None:
        response = Response(self, request)
        try:
            await self._handler(request, response)
        except asyncio.CancelledError:
            return
        finally:
            self._task = None
        if self.transport.is_closing():
            return
        if not request.keep_alive:
            self.transport.close()
            return
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self.transport.close)
        if self._buffer:
            self._next_request()

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


class RequestParser:
    """Requests out of a buffer; remembers where it is in a body that is not complete yet."""

    def __init__(self) -> None:
        self._head: tuple[str, str, dict[str, str], bool] | None = None
        self._body = bytearray()  # what is decoded of a chunked body

    def parse(self, buffer: bytearray, transport: asyncio.Transport) -> Request | None:
        """The next whole request, taken off the buffer; None if it is not whole. Raises BadRequestError."""
        if self._head is None:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(buffer) > MAX_HEAD_BYTES:
                    raise BadRequestError
                return None
            self._head = parse_head(bytes(buffer[:end]))
            del buffer[: end + 4]
            if self._head[2].get("expect", "").lower() == "100-continue":
                transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        method, target, headers, keep_alive = self._head
        body = self._take_body(headers, buffer)
        if body is None:
            return None
        self._head = None
        client = transport.get_extra_info("peername") or ("", 0)
        path = unquote(target.partition("?")[0])
        return Request(method, path, headers, body, f"{client[0]}:{client[1]}", keep_alive)

    def _take_body(self, headers: dict[str, str], buffer: bytearray) -> bytes | None:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return self._take_chunks(buffer)
        try:
            length = int(headers.get("content-length", 0))
        except ValueError:
            raise BadRequestError from None
        if not 0 <= length <= MAX_BODY_BYTES:
            raise BadRequestError
        if len(buffer) < length:
            return None
        body = bytes(buffer[:length])
        del buffer[:length]
        return body

    def _take_chunks(self, buffer: bytearray) -> bytes | None:
        while (end := buffer.find(b"\r\n")) >= 0:
            try:
                size = int(buffer[:end].split(b";")[0], 16)
            except ValueError:
                raise BadRequestError from None
            after = end + 2 + size + 2
            if len(buffer) < after:
                return None
            self._body += buffer[end + 2 : after - 2]
            del buffer[:after]
            if len(self._body) > MAX_BODY_BYTES:
                raise BadRequestError
            if size == 0:
                body, self._body = bytes(self._body), bytearray()
                return body
        return None


def parse_head(head: bytes) -> tuple[str, str, dict[str, str], bool]:
    """Method, target, headers and whether the connection stays open. Raises BadRequestError."""
    try:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, version = first.split(" ")
        pairs = (line.split(":", 1) for line in lines)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
    except ValueError:
        raise BadRequestError from None
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequestError
    connection = headers.get("connection", "").lower()
    keep_alive = "keep-alive" in connection if version == "HTTP/1.0" else "close" not in connection
    return method, target, headers, keep_alive


class Server:
    """Listens on a bound socket and keeps count of its connections."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._handler, self._connections), sock=listener, backlog=2048
        )

    def stop_listening(self) -> None:
        if self._server:
            self._server.close()

    @property
    def busy(self) -> int:
        """Connections in the middle of a request."""
        return sum(not connection.idle for connection in self._connections)

    def close_connections(self) -> None:
        for connection in list(self._connections):
            connection.transport.close()
