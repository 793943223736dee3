"""What the load balancer's tests stand on: its template and Lua in a real nginx on loopback, and small engines behind it.

Needs nginx with the Lua module, lua-resty-core and lua-cjson on this machine; installs nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable

import jinja2
import yaml
from ansible_collections.llmops.ascend.plugins.module_utils import load_balancer

ROLE = Path(__file__).resolve().parents[2] / "roles" / "load_balancer"
LUA = ROLE / "files" / "lua"
NGINX = shutil.which("nginx", path="/usr/local/openresty/nginx/sbin:/usr/sbin:/usr/bin") or "nginx"
MODULES = [
    str(path)
    for path in (
        Path("/usr/lib/nginx/modules/ndk_http_module.so"),
        Path("/usr/lib/nginx/modules/ngx_http_lua_module.so"),
    )
    if path.exists()
]
CLUSTER, SERVICE = "test", "qwen"
WORKERS = 2


def free_port() -> int:
    """A TCP port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def eventually(check: Callable[[], Any], timeout_s: float = 10, every_s: float = 0.02) -> Any:
    """Returns check()'s first true answer; fails when there is none within the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = check()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {check}"
        time.sleep(every_s)


class Engine:
    """A small engine: /health, /v1/models, and /v1/chat/completions that answers as the request's JSON body asks:
    {"chunks": n, "pause_s": s} streams n chunks. `fault` is None, "503", "500", "reset" or "hang"."""

    def __init__(self, machine: str = "machine66", port: int | None = None) -> None:
        self.machine = machine
        self.port = port or free_port()
        self.fault: str | None = None
        self.requests: list[dict[str, Any]] = []
        self.aborted = threading.Event()
        self.server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def id(self) -> str:
        return f"{self.machine}:{self.port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def backend(self, **fields: Any) -> dict[str, Any]:
        """This engine as a backend file says it."""
        return {"id": self.id, "instance": "i", "address": "127.0.0.1", "port": self.port, "model": "Qwen", **fields}

    def start(self) -> None:
        """Listens (again)."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                engine.serve(self, b"")

            def do_POST(self) -> None:
                engine.serve(self, self.rfile.read(int(self.headers["Content-Length"])))

        ThreadingHTTPServer.allow_reuse_address = True
        ThreadingHTTPServer.daemon_threads = True
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Refuses connections."""
        if self.server:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def serve(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if handler.path != "/health":
            self.requests.append({"path": handler.path, "headers": dict(handler.headers), "bytes": len(body)})
        if self.server is None or self.fault == "reset":
            handler.close_connection = True
            return
        if self.fault == "hang":
            time.sleep(30)
        if self.fault in ("500", "503"):
            self.answer(handler, int(self.fault), b"{}")
            return
        wish = json.loads(body) if 0 < len(body) < 10_000 else {}
        if "chunks" in wish:
            self.stream(handler, wish["chunks"], wish["pause_s"])
        else:
            self.answer(handler, 200, json.dumps({"engine": self.id, "bytes": len(body)}).encode())

    @staticmethod
    def answer(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("Access-Control-Allow-Origin", "http://engine")
        handler.end_headers()
        handler.wfile.write(body)

    def stream(self, handler: BaseHTTPRequestHandler, chunks: int, pause_s: float) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        try:
            for number in range(chunks):
                event = f"data: {number}\n\n".encode()
                handler.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                handler.wfile.flush()
                time.sleep(pause_s)
            handler.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.aborted.set()
            handler.close_connection = True


class Balancer:
    """The load balancer in a directory of its own, with the role's defaults and `changes` to them."""

    def __init__(self, directory: Path, services: tuple[str, ...] = (SERVICE,), **changes: Any) -> None:
        self.directory = directory
        self.ports = {name: free_port() for name in services}
        self.changes = changes
        self.process: subprocess.Popen[bytes] | None = None
        for name in ("state", "log", "run", "backends"):
            (directory / name).mkdir()
        directory.chmod(0o755)
        self.admin = load_balancer.Balancer(str(directory / "run" / "admin.sock"))
        self.configure()

    def configure(self) -> None:
        """Writes configuration and Lua as the role does."""
        defaults = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
        here = str(self.directory)
        settings = {
            **defaults,
            "load_balancer_nginx_modules": MODULES,
            "load_balancer_user": "root" if os.geteuid() == 0 else "nobody",
            "load_balancer_worker_processes": WORKERS,
            "load_balancer_worker_connections": 1024,
            "load_balancer_open_files": 2048,
            "load_balancer_directory": here,
            "load_balancer_backends_directory": f"{here}/backends",
            "load_balancer_state_directory": f"{here}/state",
            "load_balancer_log_directory": f"{here}/log",
            "load_balancer_run_directory": f"{here}/run",
            "load_balancer_listen": {name: f"127.0.0.1:{port}" for name, port in self.ports.items()},
            "load_balancer_served": {
                name: {"listen_port": port, "policy": "session"} for name, port in self.ports.items()
            },
            "services": {name: {"listen_port": port} for name, port in self.ports.items()},
            **self.changes,
        }
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(ROLE / "templates"), trim_blocks=True, undefined=jinja2.StrictUndefined
        )
        environment.filters["to_nice_json"] = lambda value: json.dumps(value, indent=4)
        for name in ("nginx.conf", "services.json"):
            (self.directory / name).write_text(environment.get_template(name + ".j2").render(settings))
        shutil.copytree(LUA, self.directory / "lua", dirs_exist_ok=True)

    def start(self) -> Balancer:
        """Starts nginx and waits until it answers."""
        argv = [NGINX, "-p", str(self.directory), "-e", str(self.directory / "log" / "error.log"), "-c", "nginx.conf"]
        (self.directory / "run" / "admin.sock").unlink(missing_ok=True)
        self.process = subprocess.Popen([*argv, "-g", "daemon off;"], stderr=subprocess.PIPE)
        eventually(self.answers)
        return self

    def answers(self) -> bool:
        """Whether nginx answers; fails when it has ended."""
        assert self.process.poll() is None, self.process.stderr.read().decode() + self.log("error")
        with contextlib.suppress(load_balancer.BalancerUnreachable):
            return bool(self.admin.status())
        return False

    def stop(self, how: int = signal.SIGTERM) -> None:
        """Ends nginx, with its workers."""
        if self.process:
            workers = self.workers()
            self.process.send_signal(how)
            self.process.wait(timeout=10)
            for pid in workers:  # a killed master leaves them
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.stderr.close()
            self.process = None

    def workers(self) -> list[int]:
        """The process ids of its workers."""
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def reload(self) -> None:
        """Reloads the configuration and waits until new workers serve."""
        old = set(self.workers())
        self.process.send_signal(signal.SIGHUP)
        eventually(lambda: len(set(self.workers()) - old) == WORKERS and self.answers())
        time.sleep(0.1)

    def log(self, name: str) -> str:
        """The text of its access or error log."""
        path = self.directory / "log" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def offer(self, machine: str, engines: list[Engine], service: str = SERVICE) -> Path:
        """Writes the backend file of a machine."""
        backends = [engine.backend() for engine in engines]
        content = load_balancer.backend_file(CLUSTER, service, machine, backends)
        path = self.directory / "backends" / load_balancer.file_name(content)
        temporary = path.with_name("." + path.name)
        temporary.write_text(load_balancer.render(content))
        temporary.rename(path)
        return path

    def states(self, service: str = SERVICE) -> dict[str, str]:
        """State of every backend by id."""
        return {name: entry["state"] for name, entry in self.admin.backends(service).items()}

    def in_flight(self, service: str = SERVICE) -> int:
        """Requests in flight on all backends together."""
        return sum(entry["in_flight"] for entry in self.admin.backends(service).values())

    def connect(self, service: str = SERVICE, timeout_s: float = 20) -> http.client.HTTPConnection:
        """A client's connection."""
        return http.client.HTTPConnection("127.0.0.1", self.ports[service], timeout=timeout_s)

    def ask(
        self, session: str | None = None, body: Any = None, path: str = "/v1/chat/completions", **headers: str
    ) -> Answer:
        """One request on a connection of its own."""
        connection = self.connect()
        if session is not None:
            headers["X-Session-ID"] = session
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        answer = Answer(response.status, dict(response.getheaders()), response.read())
        connection.close()
        return answer

    def homes(self, sessions: list[str]) -> dict[str, str]:
        """The address of the backend that answers each session."""
        answers = {session: self.ask(session) for session in sessions}
        assert {answer.status for answer in answers.values()} == {200}
        return {session: answer.headers["X-Upstream-Addr"] for session, answer in answers.items()}


class Answer:
    """What a client got."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@contextlib.contextmanager
def cluster(directory: Path, count: int, **changes: Any) -> Iterator[tuple[Balancer, list[Engine]]]:
    """A running balancer with `count` engines, one machine each, all active."""
    engines = [Engine(f"machine{60 + number}") for number in range(count)]
    balancer = Balancer(directory, **changes)
    for engine in engines:
        balancer.offer(engine.machine, [engine])
    try:
        balancer.start()
        eventually(lambda: set(balancer.states().values()) == {"active"} or not count)
        yield balancer, engines
    finally:
        balancer.stop()
        for engine in engines:
            engine.stop()
