"""A dockerd for tests of the supervisor: its API on a unix socket for one container, a `docker` command, and a journal.

Only what the supervisor asks for is there, in the formats of docker's API. "Restarting" drops all connections, as a dockerd
with live-restore does: what it knows of the container stays.
"""
from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

SUPERVISOR = Path(__file__).parents[2] / "roles/instances/files/supervisor.py"

# The command talks to the same socket: `docker run` is a request of our own.
DOCKER = f"""#!{sys.executable}
import http.client, json, os, socket, sys
connection = http.client.HTTPConnection("docker")
connection.sock = socket.socket(socket.AF_UNIX)
try:
    connection.sock.connect(os.environ["DOCKER_HOST"][len("unix://"):])
    connection.request("POST", "/run", json.dumps(sys.argv[1:]))
    answer = json.loads(connection.getresponse().read())
except OSError:
    answer = {{"error": "docker: Cannot connect to the Docker daemon."}}
if "error" in answer:
    sys.exit(answer["error"])
print(answer["id"])
"""
SYSTEMCTL = "#!/bin/sh\ncat \"$SYSTEMCTL_RESTARTS\"\n"


class Dockerd:
    """One container's state, and the API that tells it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "docker.sock"
        self.container: dict | None = None
        self.messages: list[tuple[str, bytes]] = []
        self.commands: list[list[str]] = []
        self.refusal: str | None = None
        self.calls: list[str] = []
        self.changed = threading.Condition()
        self.generation = 0
        self.connections: set[socket.socket] = set()
        self.start()

    def start(self) -> None:
        """Listen."""
        dockerd = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                dockerd.connections.add(self.connection)

            def address_string(self) -> str:
                return "unix"

            def log_message(self, *_arguments) -> None:
                """Quiet."""

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                with contextlib.suppress(OSError):
                    dockerd.answer(self, self.rfile.read(length))
                self.close_connection = True

            do_GET = do_POST = do_DELETE = answer       # noqa: N815

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_arguments) -> None:
                """A connection that the supervisor dropped."""

        self.server = Server(str(self.path), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Drop everything."""
        self.server.shutdown()
        self.server.server_close()
        self.path.unlink()
        with self.changed:
            self.generation += 1
            self.changed.notify_all()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def answer(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        """One request."""
        path, _, query = handler.path.partition("?")
        self.calls.append(f"{handler.command} {path}")
        if path == "/run":
            self._run(handler, json.loads(body))
        elif path.startswith("/images/"):
            self._json(handler, 200, {"Id": "sha256:aa"})
        elif self.container is None:
            self._json(handler, 404, {"message": "No such container"})
        elif path.endswith("/json"):
            self._json(handler, 200, self.container)
        elif path.endswith("/wait"):
            self._wait(handler)
        elif path.endswith("/stop"):
            self.end(0)
            self._json(handler, 204, None)
        elif path.endswith("/logs"):
            self._logs(handler, dict(pair.split("=") for pair in query.split("&")))
        elif handler.command == "DELETE":
            self.container = None
            self._json(handler, 204, None)

    def appear(self, fingerprint: str, running: bool = True, ours: bool = True) -> dict:
        """A container that is there before the supervisor."""
        self.container = {
            "Id": f"{len(self.commands):02}" * 32, "State": {"Running": running, "ExitCode": 0},
            "Config": {"Labels": {"llmops.managed-by": "llmops.ascend", "llmops.fingerprint": fingerprint} if ours else None}}
        return self.container

    def log(self, text: str, stamp: str | None = None) -> None:
        """A message of the container."""
        now = time.time()
        stamp = stamp or time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e9):09}Z"
        with self.changed:
            self.messages.append((stamp, text.encode()))
            self.changed.notify_all()

    def end(self, code: int) -> None:
        """The container ends."""
        with self.changed:
            self.container["State"] = {"Running": False, "ExitCode": code}
            self.changed.notify_all()

    def _run(self, handler, arguments: list[str]) -> None:
        self.commands.append(arguments)
        if self.refusal:
            self._json(handler, 200, {"error": self.refusal})
            return
        labels = dict(arguments[index + 1].split("=", 1) for index, word in enumerate(arguments) if word == "--label")
        self._json(handler, 200, {"id": self.appear(labels["llmops.fingerprint"])["Id"]})

    def _wait(self, handler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.flush()
        generation = self.generation
        with self.changed:
            self.changed.wait_for(lambda: self.generation != generation or not self.container["State"]["Running"])
        # A dockerd that shuts down ends a wait as if the container had ended.
        body = json.dumps({"StatusCode": self.container["State"]["ExitCode"]}).encode()
        handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))

    def _logs(self, handler, query: dict) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        sent, generation = 0, self.generation
        seconds, _, fraction = query["since"].partition(".")
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(int(seconds))) + "." + fraction.ljust(9, "0") + "Z"
        while self.generation == generation:
            with self.changed:
                new = self.messages[sent:]
                sent += len(new)
                running = self.container["State"]["Running"]
                if not new and running and query["follow"] == "1":
                    self.changed.wait(0.2)
                    continue
            for stamp, text in new:
                if stamp >= since:
                    frame = stamp.encode() + b" " + text
                    frame = b"\x01\0\0\0" + len(frame).to_bytes(4, "big") + frame
                    handler.wfile.write(b"%x\r\n%s\r\n" % (len(frame), frame))
            if not new:
                handler.wfile.write(b"0\r\n\r\n")
                return

    @staticmethod
    def _json(handler, status: int, answer: object) -> None:
        body = b"" if answer is None else json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


class Engine:
    """The /health of an engine on a free port of the loopback address."""

    def __init__(self) -> None:
        self.healthy = False
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:                   # noqa: N802
                self.send_response(200 if engine.healthy else 503)
                self.end_headers()

            def log_message(self, *_arguments) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


class Supervision:
    """The supervisor as systemd runs it: a process with a notify socket and a journal."""

    def __init__(self, directory: Path, specification: Path) -> None:
        self.directory, self.specification = directory, specification
        commands = directory / "bin"
        commands.mkdir()
        for name, text in (("docker", DOCKER), ("systemctl", SYSTEMCTL)):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.restarts = directory / "restarts"
        self.restarts.write_text("0\n")
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel.bind(str(directory / "notify"))
        self.channel.settimeout(10)
        self.runtime = directory / "run"
        self.processes: list[subprocess.Popen] = []
        self.notified: list[str] = []

    def start(self) -> subprocess.Popen:
        """Run it."""
        program = ("import importlib.util, pathlib, sys; "
                   f"spec = importlib.util.spec_from_file_location('supervisor', {str(SUPERVISOR)!r}); "
                   "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
                   f"module.RUNTIME_DIRECTORY = pathlib.Path({str(self.runtime)!r}); module.RETRY_SECONDS = 0.1; "
                   "sys.exit(module.main())")
        environment = {**os.environ, "PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}",
                       "DOCKER_HOST": f"unix://{self.directory / 'docker.sock'}", "SYSTEMCTL_RESTARTS": str(self.restarts),
                       "NOTIFY_SOCKET": str(self.directory / "notify")}
        with (self.directory / "journal").open("ab") as journal:
            process = subprocess.Popen([sys.executable, "-c", program, str(self.specification)],
                                       env=environment, stdout=journal, stderr=journal)
        self.processes.append(process)
        return process

    def journal(self) -> str:
        """Everything it and its predecessors said."""
        return (self.directory / "journal").read_text()

    def until_notified(self, text: str) -> str:
        """Wait for a notification that contains a text."""
        while True:
            message = self.channel.recv(4096).decode()
            self.notified.append(message)
            if text in message:
                return message

    def until_journal(self, text: str, seconds: float = 10) -> None:
        """Wait for a text in the journal."""
        deadline = time.monotonic() + seconds
        while text not in self.journal():
            assert time.monotonic() < deadline, self.journal()
            time.sleep(0.02)

    def close(self) -> None:
        """No process stays."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.channel.close()
