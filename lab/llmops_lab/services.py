"""What the lab serves to its machines on the host's management address: the apt repository and an image registry."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from . import host, model, packages
from .cgroup import Group
from .settings import CACHE, PROJECT, Lab, LabError

PORTS = {"apt": 8081, "registry": 5000}

REGISTRY_CONFIGURATION = """\
version: 0.1
log: {{level: warn}}
storage:
  filesystem: {{rootdirectory: {storage}}}
  delete: {{enabled: true}}
http: {{addr: "{address}"}}
"""


def ensure(lab: Lab, engine: str) -> None:
    """Start what does not answer, build what is not built: apt repository, registry with the engine's image, driver packages.

    `engine` names a recipe of lab/images/build.py. All labs share one image store: pushing is for whoever comes first.
    """
    repository, program = packages.ensure(), registry_program()
    configuration = lab.state / "registry.yml"
    configuration.write_text(REGISTRY_CONFIGURATION.format(storage=CACHE / "registry", address=lab.registry))
    python = [sys.executable, "-m", "http.server", "--protocol", "HTTP/1.1", "--bind", lab.host_address]
    _start(lab, "apt", [*python, "--directory", str(repository), str(PORTS["apt"])])
    _start(lab, "registry", [str(program), "serve", str(configuration)])
    _link_artifacts(lab)
    with host.lock("images"):
        _project_tool("lab/images/build.py", engine, "--registry", lab.registry)


def models(engine: str) -> dict[str, Path]:
    """The models, by name, that the highest machine is delivered with: what the engine of this kind serves."""
    if engine == "vllm":
        from images import tiny_model  # lab/images stands on this package, and only the real engine needs its model

        return {tiny_model.NAME: tiny_model.ensure()}
    return {model.NAME: model.ensure()}


def status(lab: Lab) -> dict[str, bool]:
    """Whether each service answers."""
    return {name: _answers(lab, name) for name in PORTS}


def registry_program() -> Path:
    """Debian's docker-registry, unpacked and not installed: installed it would start, on a port of its own choice."""

    def build(directory: Path) -> None:
        host.run("apt-get", "-oAPT::Sandbox::User=root", "download", "docker-registry", cwd=directory)
        host.run("dpkg-deb", "--extract", *directory.glob("docker-registry_*.deb"), directory)

    return host.cached("registry-program", host.codename(), build) / "usr/bin/docker-registry"


def _link_artifacts(lab: Lab) -> None:
    """Build the .run packages of the simulated driver once per state of their sources, and link them into the lab."""
    sources = sorted(path for path in (PROJECT / "lab/silicon").rglob("*") if path.is_file() and path.suffix != ".pyc")
    recipe = [[str(path.relative_to(PROJECT)), path.read_text()] for path in sources]
    artifacts = host.cached("artifacts", recipe, lambda directory: _project_tool("lab/silicon/build.py", directory))
    lab.artifacts.unlink(missing_ok=True)
    lab.artifacts.symlink_to(artifacts)


def _project_tool(tool: str, *arguments: str | Path) -> None:
    host.run(sys.executable, PROJECT / tool, *arguments)


def _start(lab: Lab, name: str, argv: list[str]) -> None:
    group = Group(lab.name, name)
    if _answers(lab, name) and group.populated():
        return
    group.kill()
    group.create()
    with (lab.state / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=group.enter,
            env={"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}, cwd="/",
        )
    deadline = time.monotonic() + 10
    while not _answers(lab, name):
        if process.poll() is not None or time.monotonic() > deadline:
            last = (Path(log.name).read_text().strip().splitlines() or ["it says nothing"])[-1]
            raise LabError(f"the lab's {name} service does not come up on {lab.host_address}:{PORTS[name]}: {last}")
        time.sleep(0.05)


def _answers(lab: Lab, name: str) -> bool:
    try:
        socket.create_connection((lab.host_address, PORTS[name]), timeout=1).close()
    except OSError:
        return False
    return True
