"""A model server: what it lets in, what it serves, and that nothing of it is left."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import manifest as manifests
from ansible_collections.llmops.ascend.plugins.module_utils import model_copy, rsync_daemon
from ansible_collections.llmops.ascend.plugins.module_utils.model_copy import CopyError, Source
from ansible_collections.llmops.ascend.plugins.module_utils.rsync_daemon import ServerError

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None or os.getuid() != 0, reason="the daemon takes on root's id, and needs rsync")


class Systemd:
    """Enough of systemd-run and systemctl to run one daemon as a child."""

    def __init__(self) -> None:
        self.units: dict[str, subprocess.Popen] = {}
        self.tasks = "1"
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str]) -> tuple[int, str, str]:
        self.commands.append(command)
        unit = next(word for word in command if rsync_daemon.UNIT_PREFIX in word).replace("--unit=", "")
        if command[0] == "systemd-run":
            rsync = next(index for index, word in enumerate(command) if word.endswith("/rsync"))
            self.units[unit] = subprocess.Popen(command[rsync:], stdin=subprocess.DEVNULL)
            return 0, "", ""
        running = unit in self.units and self.units[unit].poll() is None
        if command[1] == "show":
            return 0, f"ActiveState={'active' if running else 'inactive'}\nTasksCurrent={self.tasks}\n", ""
        if running:
            self.units[unit].terminate()
            self.units.pop(unit).wait()
        return (0 if running else 5), "", ""


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    monkeypatch.setattr(rsync_daemon, "RUNTIME", tmp_path / "run" / "model_server")
    fake = Systemd()
    yield fake
    for process in fake.units.values():
        process.kill()
        process.wait()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A snapshot of a Hugging Face cache: links to files outside the served directory, one of them absolute."""
    root, blobs = tmp_path / "hub" / "snapshots" / "my model", tmp_path / "hub" / "blobs"
    root.mkdir(parents=True)
    blobs.mkdir()
    for name in ("config.json", "model-1.safetensors", "empty", "文件 name.txt"):
        (blobs / name).write_bytes(os.urandom(50_000) if "1" in name else b"" if name == "empty" else b"text")
        (root / name).symlink_to(Path("../../blobs") / name)
    (root / "config.json").unlink()
    (root / "config.json").symlink_to(blobs / "config.json")
    (root / "sub dir").mkdir()
    (root / "sub dir" / "secret").write_text("0600")
    (root / "sub dir" / "secret").chmod(0o600)
    return root


def serve(systemd: Systemd, model: Path, **options) -> Source:
    arguments = {"name": "m66", "root": str(model), "address": "127.0.0.1", "allow": "127.0.0.1", "secret": "s3cret"}
    port = rsync_daemon.start(**{**arguments, **options}, lifetime_s=60, run=systemd)
    return Source("machine69", "127.0.0.1", port, bind_address="127.0.0.1")


@needs_rsync
def test_a_model_travels_and_nothing_is_left(systemd, model, tmp_path):
    wanted = manifests.settle(str(model))[0].id
    source = serve(systemd, model)
    target = tmp_path / "there" / "NAME"
    report = model_copy.receive(target, wanted, "machine69", model_copy.rsync_fetch(source, "s3cret", 0), 2)
    assert report.files == 5
    state = manifests.inspect(str(target), full=True)
    assert (state.status, state.id) == ("whole", wanted)
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert rsync_daemon.stop("m66", systemd)
    assert list(rsync_daemon.RUNTIME.iterdir()) == []
    assert not rsync_daemon.greets("127.0.0.1", source.port, 0.2)
    assert not rsync_daemon.stop("m66", systemd)


@needs_rsync
def test_a_copy_that_was_cut_in_a_file_goes_on_in_it(systemd, model, tmp_path):
    wanted = manifests.settle(str(model))[0].id
    partial = model_copy.partial_path(tmp_path / "NAME") / model_copy.PARTIAL_DIR
    partial.mkdir(parents=True)
    (partial / "model-1.safetensors").write_bytes((model / "model-1.safetensors").read_bytes()[:40_000])
    fetch = model_copy.rsync_fetch(serve(systemd, model), "s3cret", 0)
    model_copy.receive(tmp_path / "NAME", wanted, "machine69", fetch, 2)
    assert manifests.inspect(str(tmp_path / "NAME"), full=True).status == "whole"
    assert not list((tmp_path / "NAME").rglob(model_copy.PARTIAL_DIR))


@needs_rsync
@pytest.mark.parametrize("options,secret", [({}, "wrong"), ({"allow": "192.0.2.1"}, "s3cret")])
def test_who_is_not_let_in(systemd, model, tmp_path, options, secret):
    fetch = model_copy.rsync_fetch(serve(systemd, model, **options), secret, 0)
    with pytest.raises(CopyError, match=r"machine69 \(127.0.0.1\) refused the copy"):
        model_copy.receive(tmp_path / "NAME", "id", "machine69", fetch, 1)
    assert not (tmp_path / "NAME").exists()


@needs_rsync
def test_nothing_can_be_written_or_listed(systemd, model, tmp_path):
    source = serve(systemd, model)
    environment = {**os.environ, "RSYNC_PASSWORD": "s3cret"}
    (tmp_path / "evil").write_text("x")
    put = subprocess.run(["rsync", str(tmp_path / "evil"), source.url], env=environment, capture_output=True, check=False)
    assert put.returncode != 0 and b"read only" in put.stderr
    modules = subprocess.run(["rsync", f"rsync://127.0.0.1:{source.port}/"], capture_output=True, check=True)
    assert modules.stdout == b""


@needs_rsync
def test_the_secret_is_root_s_alone_and_in_no_command(systemd, model):
    serve(systemd, model)
    directory = rsync_daemon.RUNTIME / "m66"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (directory, directory / "secrets", directory / "rsyncd.conf")] == [
        0o700,
        0o600,
        0o600,
    ]
    assert not any("s3cret" in word for command in systemd.commands for word in command)
    assert f"--property=ExecStopPost={shutil.which('rm')} -rf {directory}" in systemd.commands[1]
    assert "--property=RuntimeMaxSec=60" in systemd.commands[1]


@needs_rsync
def test_a_server_of_the_same_name_is_replaced(systemd, model):
    first = serve(systemd, model)
    second = serve(systemd, model)
    assert not rsync_daemon.greets("127.0.0.1", first.port, 0.2) or first.port == second.port
    assert rsync_daemon.greets("127.0.0.1", second.port, 2)


@needs_rsync
def test_leftovers_are_old_and_serve_nobody(systemd, model):
    serve(systemd, model)
    assert rsync_daemon.leftovers(systemd) == []
    old = time.time() - rsync_daemon.IDLE_S - 5
    os.utime(rsync_daemon.RUNTIME / "m66", (old, old))
    systemd.tasks = "3"
    assert rsync_daemon.leftovers(systemd) == []
    systemd.tasks = "1"
    assert rsync_daemon.leftovers(systemd) == ["m66"]


def test_no_leftovers_where_no_server_ever_was(systemd):
    assert rsync_daemon.leftovers(systemd) == [] and systemd.commands == []


def test_an_address_of_another_machine(systemd, model):
    with pytest.raises(ServerError, match="cannot listen on 192.0.2.1: .*; set data_address"):
        serve(systemd, model, address="192.0.2.1")


def test_a_daemon_that_does_not_come_up(systemd, model, monkeypatch):
    monkeypatch.setattr(rsync_daemon, "greets", lambda *_: False)
    with pytest.raises(ServerError, match=r"does not come up at 127.0.0.1:\d+: exec format error"):
        rsync_daemon.start("m66", str(model), "127.0.0.1", "127.0.0.1", "s", 60, lambda command: (1, "", "exec format error\n"))
    assert not rsync_daemon.exists("m66")


@pytest.mark.parametrize("root", ["/data/100%/m", "/data/back\\slash", "/data/m ", "/data/new\nline"])
def test_paths_that_rsyncd_cannot_name(root):
    with pytest.raises(ServerError, match="cannot be served: rename it"):
        rsync_daemon.configuration(root, "127.0.0.1", 1, "127.0.0.1", "/run/s")
