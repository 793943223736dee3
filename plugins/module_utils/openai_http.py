"""A small client for OpenAI-compatible endpoints, on the standard library alone.

It asks and records; it never judges and never raises for what an endpoint does: every outcome, a refused connection
included, is an `Answer`. It knows nothing of proxies in the environment, so that `http_proxy` set for package downloads
cannot lead a question about the machine next door out of the house.

Sources of the formats: the OpenAI API reference (chat completions, streaming as server-sent events that end in
`data: [DONE]`) and the server-sent events chapter of the HTML standard (`data:` lines, comments that start with a colon).
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator
from urllib.parse import urlsplit

MAX_BODY_BYTES = 4 * 1024 * 1024
"""An answer to one of our short questions is far smaller; more than this is not an answer."""


class TooLong(Exception):
    """An answer that does not end where an answer to a short question ends."""


@dataclass
class Stream:
    """What a streamed answer consisted of.

    `chunks` are the decoded `data:` payloads, `malformed` counts the lines that are no server-sent event or whose payload
    is no JSON, `done` says whether `data: [DONE]` was the last of them.
    """

    chunks: list[dict[str, Any]] = field(default_factory=list)
    malformed: int = 0
    done: bool = False


@dataclass
class Answer:
    """The outcome of one request.

    `status` is the HTTP status or None when there was none; `error` then says why in a few words. `headers` have lower-case
    names. `body` is the decoded JSON object, else None. `seconds` is the wall time of the whole request, `first_byte_s` the
    time until the headers were there.
    """

    status: int | None
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    stream: Stream | None = None
    seconds: float = 0.0
    first_byte_s: float | None = None
    error: str | None = None


class Client:
    """Requests to one endpoint, e.g. `Client("http://198.18.254.66:8000", api_key="...", timeout_s=60)`.

    One connection per request: each question must stand on its own, and a server that closes idle connections (uvicorn
    after 5 s) is not to blame for it. `timeout_s` limits each silence, and with it the request as a whole: once it is over, the
    next piece that comes ends the request.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is no http or https address")
        self._https = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._https else 80)
        self._prefix = parts.path.rstrip("/")
        self._api_key = api_key
        self._timeout_s = timeout_s

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        """Ask for `path` (e.g. `/v1/models`)."""
        return self._request("GET", path, None, headers)

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
        """Send `body` as JSON; with `"stream": true` in it the answer's `stream` is filled instead of its `body`."""
        return self._request("POST", path, body, headers)

    def _request(self, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None) -> Answer:
        sent = {"Accept": "text/event-stream" if body and body.get("stream") else "application/json"}
        if body is not None:
            sent["Content-Type"] = "application/json"
        if self._api_key is not None:
            sent["Authorization"] = "Bearer " + self._api_key
        sent.update(headers or {})

        answer = Answer(status=None)
        started = time.monotonic()
        connection = self._connection()
        try:
            payload = None if body is None else json.dumps(body).encode("utf-8")
            connection.request(method, self._prefix + path, payload, sent)
            response = connection.getresponse()
            answer.first_byte_s = round(time.monotonic() - started, 3)
            answer.status = response.status
            answer.headers = {name.lower(): value for name, value in response.getheaders()}
            deadline = started + self._timeout_s
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                answer.stream = read_events(_lines(response, deadline))
            else:
                answer.body = _decoded(_read(response, deadline))
        except ValueError:  # its text would repeat the header, and with it the key
            answer.error = "not asked: the key cannot stand in an HTTP header"
        except (OSError, http.client.HTTPException, TooLong) as error:
            answer.error = _reason(error, self._timeout_s)
        finally:
            connection.close()
        answer.seconds = round(time.monotonic() - started, 3)
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)


def read_events(lines: Iterable[bytes]) -> Stream:
    """Read server-sent events from an iterable of lines (bytes), as far as OpenAI's API uses them.

    Nothing may follow `[DONE]`: what does makes the stream not done.
    """
    stream = Stream()
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line or line.startswith(":"):
            continue
        name, _colon, value = line.partition(":")
        if name != "data":
            stream.malformed += name not in ("event", "id", "retry")
            continue
        value = value.strip()
        stream.done = value == "[DONE]"
        if stream.done:
            continue
        chunk = _decoded(value.encode("utf-8"))
        if isinstance(chunk, dict):
            stream.chunks.append(chunk)
        else:
            stream.malformed += 1
    return stream


def _lines(response: http.client.HTTPResponse, deadline: float) -> Iterator[bytes]:
    """The lines of a response as they come, until its end or the deadline (a clock of time.monotonic)."""
    size = 0
    while True:
        line = response.readline()
        if not line:
            _check_end(response)
            return
        size += len(line)
        _check_limits(size, deadline)
        yield line


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body of a response. `read1` hands out what is there, so that the deadline is seen between the pieces."""
    pieces, size = [], 0
    while True:
        piece = response.read1(65536)
        if not piece:
            _check_end(response)
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
        _check_limits(size, deadline)


def _check_end(response: http.client.HTTPResponse) -> None:
    """Reading piece by piece ends silently where the connection does; `length` is what Content-Length promised beyond it."""
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)


def _check_limits(size: int, deadline: float) -> None:
    if size > MAX_BODY_BYTES:
        raise TooLong(f"more than {MAX_BODY_BYTES} bytes of answer")
    if time.monotonic() > deadline:
        raise socket.timeout("timed out")


def _decoded(raw: bytes) -> Any:
    """JSON, or None for anything else: what an endpoint should have said is for the expectations to say."""
    try:
        return json.loads(raw.decode("utf-8"))
    except ValueError:
        return None


def _reason(error: BaseException, timeout_s: float) -> str:
    """An error in words an operator knows."""
    if isinstance(error, TooLong):
        return str(error)
    if isinstance(error, socket.timeout):
        return f"no complete answer within {timeout_s:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if isinstance(error, (ConnectionResetError, http.client.RemoteDisconnected, http.client.IncompleteRead)):
        return "connection closed in the middle of the answer"
    return f"{type(error).__name__}: {error}"
