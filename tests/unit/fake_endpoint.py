"""An OpenAI-compatible endpoint in this process, whose faults can be switched on one by one."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Iterator

KEY = "SK-12345678-@aaa"
MODEL = "Qwen3.8-27B-W8A8"
BACKENDS = ("198.18.254.66:8000", "198.18.254.66:8001", "198.18.254.67:8000")


class FakeEndpoint(ThreadingHTTPServer):
    """Answers as vLLM does behind a session-affine load balancer, save for its `faults` (a set of names)."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, faults: set[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults = faults
        self.requests = 0

    def handle_error(self, *_args: Any) -> None:
        """A client that gave up is what some tests are about."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def fake_endpoint(*faults: str) -> Iterator[FakeEndpoint]:
    """An endpoint with these faults, for as long as the context lasts."""
    server = FakeEndpoint(set(faults))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeEndpoint

    def log_message(self, *_args: Any) -> None:
        """Say nothing."""

    def _has(self, fault: str) -> bool:
        return fault in self.server.faults

    def do_GET(self) -> None:  # noqa: N802 - the name is the base class's
        """Health and models."""
        if self._has("hangs"):
            time.sleep(1)
        if self.path == "/health":
            self._send(503 if self._has("unhealthy") else 200, None)
        elif self._is_allowed():
            names = ["Other"] if self._has("other model") else [MODEL]
            length = 4096 if self._has("short context") else 262144
            self._send(200, {"object": "list", "data": [{"id": name, "max_model_len": length} for name in names]})

    def do_POST(self) -> None:  # noqa: N802
        """Completions and chat completions."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests += 1
        if not self._is_allowed():
            return
        if self._has("slow to wake") and self.server.requests < 3:
            self._send(503, {"error": {"message": "no backend"}})
        elif self._has("errors"):
            self._send(500, {"error": {"message": "EngineCore died"}})
        elif self.path == "/v1/completions":
            warmth = 0 if self._has("ignores temperature") else body["temperature"]
            self._answer(body, {"text": f"words at {warmth}"})
        elif body.get("stream"):
            self._stream(body)
        else:
            self._answer(body, {"message": self._message(body)})

    def _is_allowed(self) -> bool:
        given = self.headers.get("Authorization")
        allowed = given == f"Bearer {KEY}" and not self._has("refuses its key")
        allowed = allowed or (self._has("takes any key") and given is not None)
        allowed = allowed or (self._has("takes no key") and given is None)
        if not allowed:
            self._send(401, {"error": {"message": "Unauthorized"}})
        return allowed

    def _message(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("tools"):
            if self._has("no tool call"):
                return {"role": "assistant", "content": "<tool_call>get_weather</tool_call>"}
            arguments = "{city: Paris" if self._has("broken arguments") else '{"city": "Paris"}'
            function = {"name": "get_weather", "arguments": arguments}
            return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        if self._has("reasoning in content"):
            return {"role": "assistant", "content": "<think>9.9 is 9.90</think>9.9"}
        field = "reasoning_content" if self._has("old vllm") else "reasoning"
        return {"role": "assistant", "content": "9.9", field: "9.9 is 9.90, which is more."}

    def _usage(self, body: dict[str, Any]) -> dict[str, int]:
        completion = body["max_tokens"] + (1 if self._has("one token more") else 0)
        return {
            "prompt_tokens": 10,
            "completion_tokens": completion,
            "total_tokens": 10 + completion + (1 if self._has("wrong sum") else 0),
        }

    def _answer(self, body: dict[str, Any], choice: dict[str, Any]) -> None:
        called = bool(choice.get("message", {}).get("tool_calls"))
        reason = "tool_calls" if called else "stop" if self._has("never says length") else "length"
        self._send(200, {"choices": [{"index": 0, "finish_reason": reason, **choice}], "usage": self._usage(body)})

    def _stream(self, body: dict[str, Any]) -> None:
        if self._has("does not stream"):
            self._answer(body, {"message": {"content": "Monday"}})
            return
        deltas = [{"choices": [{"delta": {"content": day}}]} for day in ("Monday, ", "Tuesday")]
        events = [json.dumps(chunk) for chunk in deltas]
        if not self._has("no usage in stream"):
            events.append(json.dumps({"choices": [], "usage": self._usage(body)}))
        if self._has("broken stream"):
            events[1] = events[1][:-5]
        if not self._has("stream cut off"):
            events.append("[DONE]")
        text = "".join(f"data: {event}\n\n" for event in [*events])
        self._send_raw(200, "text/event-stream; charset=utf-8", (": ping\n\n" + text).encode())

    def _send(self, status: int, body: Any) -> None:
        self._send_raw(status, "application/json", b"" if body is None else json.dumps(body).encode())

    def _send_raw(self, status: int, kind: str, raw: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw) + (10 if self._has("cut off") else 0)))
        self.send_header("Connection", "close")
        session = self.headers.get("X-Session-ID")
        if session and not self._has("unmarked"):
            self.send_header("X-Upstream-Addr", self._backend(session))
        self.end_headers()
        self.wfile.write(raw)
        self.close_connection = True

    def _backend(self, session: str) -> str:
        if self._has("one backend"):
            return BACKENDS[0]
        number = self.server.requests if self._has("forgets sessions") else int(session[:8], 16)
        place = BACKENDS[number % len(BACKENDS)]
        return f"198.18.254.99:8000, {place}" if self._has("tries another first") else place
