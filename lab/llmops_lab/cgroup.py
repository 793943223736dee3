"""Control groups: every process of a lab is in /llmops-lab/<lab>/..., which is how all of them, and only they, are found."""
from __future__ import annotations

import contextlib
import os
import time
from functools import cache
from pathlib import Path

from .host import run
from .settings import RUN, LabError

TOP = "llmops-lab"


@cache
def mount_point() -> Path:
    """Where the unified hierarchy (cgroup2) is mounted; on a host that has none it is mounted for the lab."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 ") and fields.split()[3] == "/":
            return Path(fields.split()[4])
    path = RUN / "cgroup"
    path.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "cgroup2", "cgroup2", path)
    return path


class Group:
    """A control group below the lab's top one, for example Group("lab", "machine66")."""

    def __init__(self, *names: str, root: Path | None = None) -> None:
        self.names = names
        self.root = root or mount_point()
        self.path = self.root.joinpath(TOP, *names)

    def create(self) -> Group:
        """Make the group and hand it every controller that its parents can give; a host with cgroup v1 beside v2 gives few.

        cpuset is held back: dockerd would refuse CPUs that a lab machine only pretends to have. Without it, it warns and goes on.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for parent in reversed(self.path.parents):
            if parent.is_relative_to(self.root):
                for controller in {*(parent / "cgroup.controllers").read_text().split()} - {"cpuset"}:
                    with contextlib.suppress(OSError):
                        (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        return self

    def enter(self) -> None:
        """Move the calling process in."""
        (self.path / "cgroup.procs").write_text("0")

    def children(self) -> list[str]:
        """The names of the groups directly below."""
        return sorted(path.name for path in self.path.iterdir() if path.is_dir()) if self.path.exists() else []

    def populated(self) -> bool:
        """Whether a process lives in it or below."""
        try:
            return "populated 1" in (self.path / "cgroup.events").read_text()
        except FileNotFoundError:
            return False

    def pids(self) -> list[int]:
        """The processes directly in it, as this host numbers them."""
        try:
            return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]
        except FileNotFoundError:
            return []

    def kill(self) -> None:
        """SIGKILL everything in it and below, at once, and remove it. Raises LabError when something does not die in 20 s."""
        if not self.path.exists():
            return
        (self.path / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + 20
        while self.populated():
            if time.monotonic() > deadline:
                raise LabError(f"processes in {self.path} survive SIGKILL (stuck in the kernel): see `cat {self.path}/cgroup.procs`")
            time.sleep(0.02)
        for directory, _, _ in os.walk(self.path, topdown=False):
            Path(directory).rmdir()
