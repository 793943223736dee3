"""The client of dockerd's API against a server on a socket that answers as dockerd does, and the rules for daemon.json."""

from __future__ import annotations

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import docker_engine
from ansible_collections.llmops.ascend.plugins.module_utils.docker_engine import Engine, EngineAbsent, EngineError

INFO = {
    "LiveRestoreEnabled": True,
    "RegistryConfig": {
        "InsecureRegistryCIDRs": ["127.0.0.0/8", "198.18.0.0/15"],
        "IndexConfigs": {"docker.io": {"Secure": True}, "registry.site:5000": {"Secure": False}},
    },
}


class Dockerd(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers by method and path; notes what it was asked."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, Handler)
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[tuple[str, str | None, bytes]] = []


class Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((f"{self.command} {self.path}", self.headers.get("X-Registry-Auth"), body))
        status, content = self.server.answers.get(f"{self.command} {self.path}", (404, b'{"message": "no such thing"}'))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, *_) -> None:
        """Say nothing."""

    def address_string(self) -> str:
        return "socket"


@pytest.fixture
def dockerd(tmp_path: Path):
    server = Dockerd(str(tmp_path / "docker.sock"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(str(tmp_path / "docker.sock"), 10)


def test_nobody_there(engine):
    with pytest.raises(EngineAbsent, match="no dockerd answers at .*docker.sock"):
        engine.info()


def test_images(dockerd, engine):
    dockerd.answers["GET /images/r:5000/a/b:1/json"] = (200, b'{"Id": "sha256:1"}')
    dockerd.answers["GET /images/broken/json"] = (500, b"not json")
    assert engine.image("r:5000/a/b:1") == {"Id": "sha256:1"}
    assert engine.image("other") is None
    with pytest.raises(EngineError, match="not json"):
        engine.image("broken")


def test_what_the_registry_has(dockerd, engine):
    platforms = [{"architecture": "arm64"}, {"architecture": "amd64"}, {"architecture": "unknown"}]
    answer = {"Descriptor": {"digest": "sha256:9"}, "Platforms": platforms}
    dockerd.answers["GET /distribution/r:5000/a/b:1/json"] = (200, json.dumps(answer).encode())
    assert engine.registry_image("r:5000/a/b:1", "creds") == ("sha256:9", ["arm64", "amd64"])
    assert dockerd.asked[-1][1] == "creds"


def test_pull(dockerd, engine):
    url = "POST /images/create?fromImage=r%3A5000%2Fa%2Fb&tag=1"
    dockerd.answers[url] = (200, b'{"status": "Pulling"}\r\n{"status": "Done"}\r\n')
    engine.pull("r:5000/a/b:1", "creds")
    assert dockerd.asked[-1][:2] == (url, "creds")
    dockerd.answers[url] = (200, b'{"status": "Pulling"}\r\n{"errorDetail": {}, "error": "no space left on device"}\r\n')
    with pytest.raises(EngineError, match="no space left"):
        engine.pull("r:5000/a/b:1")


def test_pull_by_digest(dockerd, engine):
    url = "POST /images/create?fromImage=docker.io%2Flibrary%2Fx&tag=sha256%3A" + "a" * 64
    dockerd.answers[url] = (200, b"")
    engine.pull("x@sha256:" + "a" * 64)


def test_load_sends_the_file(dockerd, engine, tmp_path):
    (tmp_path / "image.tar").write_bytes(b"tar" * 100_000)
    dockerd.answers["POST /images/load?quiet=1"] = (200, b'{"stream": "Loaded"}\n')
    engine.load(str(tmp_path / "image.tar"))
    assert dockerd.asked[-1][2] == b"tar" * 100_000


def test_remove_what_is_used(dockerd, engine):
    dockerd.answers["DELETE /images/x:1"] = (409, b'{"message": "container abc is using it"}')
    with pytest.raises(EngineError, match="container abc is using it"):
        engine.remove("x:1")


def test_the_mark():
    assert not docker_engine.is_ours(None)
    assert not docker_engine.is_ours({"labels": None})
    marked = docker_engine.marked({"live-restore": True, "labels": ["site=a"]})
    assert marked["labels"] == ["llmops.managed-by=llmops.ascend", "site=a"]
    assert docker_engine.is_ours(marked) and docker_engine.marked(marked) == marked
    assert json.loads(docker_engine.render(marked)) == marked


def test_what_waits_for_a_start():
    before = {"live-restore": True, "log-opts": {"max-size": "10m"}, "debug": True}
    after = {"live-restore": False, "log-opts": {"max-size": "20m"}, "data-root": "/data"}
    assert docker_engine.waits_for_start(before, after) == ["data-root", "log-opts"]


@pytest.mark.parametrize("registry,plain", [("registry.site:5000", True), ("198.18.254.1:5000", True), ("quay.io", False), ("docker.io", False)])
def test_plain_http(registry, plain):
    assert docker_engine.accepts_plain_http(INFO, registry) is plain


def test_what_a_running_dockerd_does_not_follow():
    follow = {"live-restore": True, "insecure-registries": ["registry.site:5000", "198.18.0.0/15"]}
    assert docker_engine.not_applied(INFO, follow) == []
    assert docker_engine.not_applied(INFO, {"insecure-registries": ["quay.io"]}) == ["live-restore", "insecure-registries"]


def test_findings_on_an_engine_that_is_not_ours():
    assert docker_engine.foreign_findings(INFO, ["198.18.254.1:5000"], "m67") == []
    lacking = docker_engine.foreign_findings({"LiveRestoreEnabled": False}, ["198.18.254.1:5000"], "m67")
    assert len(lacking) == 2
    assert lacking[0].startswith("m67: restarting dockerd will stop every instance (no live-restore); it is not ours to change: set")
    assert "m67: dockerd does not accept 198.18.254.1:5000 over plain HTTP" in lacking[1]
    assert "does not run" in docker_engine.foreign_findings(None, [], "m67")[0]
