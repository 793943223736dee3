"""What the lab needs from the machine it runs on: root, tools, Debian's mirrors, one builder at a time."""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .settings import CACHE, RUN, LabError

#: tool -> Debian package. Services that would start by themselves are not here: see services.registry_program.
TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "apt-ftparchive": "apt-utils",
    "dpkg-deb": "dpkg",
    "skopeo": "skopeo",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}


def run(*argv: str | Path, input: str | None = None, check: bool = True, cwd: Path | None = None) -> str:
    """Run a tool and return its standard output. Raises LabError with the tool's last line when it fails."""
    done = subprocess.run(
        [str(part) for part in argv], input=input, cwd=cwd, env=os.environ | {"LC_ALL": "C"},
        stdin=subprocess.DEVNULL if input is None else None, capture_output=True, text=True,
    )
    if check and done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        errors = [line for line in lines if line.startswith(("E:", "error", "Error"))] or lines
        raise LabError(f"{argv[0]} failed with status {done.returncode}: {errors[-1]}")
    return done.stdout


def say(message: str) -> None:
    """Tell what is going on, on standard error: standard output belongs to answers."""
    print(f"lab: {message}", file=sys.stderr, flush=True)


def require_root() -> None:
    """Raises LabError where machines cannot be booted at all."""
    if platform.system() != "Linux":
        raise LabError(f"the lab boots Linux machines with systemd-nspawn and needs a Linux host, not {platform.system()}")
    if os.geteuid() != 0:
        raise LabError("the lab makes network namespaces, mounts and cgroups and needs root: run it with sudo")


def require_tools() -> None:
    """Install what is missing. Raises LabError on a host that is not Debian."""
    codename()
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if missing:
        say(f"installing {' '.join(missing)}")
        os.environ["DEBIAN_FRONTEND"] = "noninteractive"
        run("apt-get", "update")
        run("apt-get", "install", "--yes", "--no-install-recommends", *missing)


def codename() -> str:
    """The release that host and machines share: "bookworm" or "trixie". Raises LabError elsewhere."""
    release = platform.freedesktop_os_release()
    name = release.get("VERSION_CODENAME", "")
    if release.get("ID") != "debian" or name not in ("bookworm", "trixie"):
        raise LabError(f"the lab is made for Debian 12 and 13; this is {release.get('PRETTY_NAME', 'unknown')}")
    return name


def apt_sources() -> str:
    """The host's own mirrors of its release as lines of a sources.list: "deb URI SUITE COMPONENT".

    Asked from apt itself, which knows every format and place of its configuration. Raises LabError when there are none.
    """
    lines = _debian_mirrors()
    if not lines:  # what apt calls the origin of a mirror is in the lists that it fetches
        run("apt-get", "update")
        lines = _debian_mirrors()
    if not lines:
        raise LabError(f"apt knows no mirror of Debian {codename()}: see `apt-get indextargets`")
    return "\n".join(lines) + "\n"


def _debian_mirrors() -> list[str]:
    suites = {codename(), f"{codename()}-updates", f"{codename()}-security"}
    fields = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)"
    rows = run("apt-get", "indextargets", "--format", fields, "Created-By: Packages", "Origin: Debian").splitlines()
    mirrors = [row.split("|") for row in dict.fromkeys(rows)]
    return [f"deb {uri} {suite} {component}" for uri, suite, component in mirrors if suite in suites]


def apt_options() -> list[str]:
    """The host's apt settings about transport (proxies, dates) as "Key "value"" lines, for an apt that does not read them."""
    wanted = ("Acquire::http", "Acquire::https", "Acquire::Check-", "Acquire::Retries")
    return [line.rstrip(";") for line in run("apt-config", "dump").splitlines() if line.startswith(wanted)]


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold a lock of this host; wait, and say so, while another has it. The kernel frees it when the holder dies."""
    RUN.mkdir(parents=True, exist_ok=True)
    with (RUN / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another lab command to finish ({name})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cached(kind: str, recipe: object, build: Callable[[Path], None]) -> Path:
    """Return the directory CACHE/<kind>-<key of the recipe>, built if it is not there.

    `build` fills a temporary directory that is renamed in place when it is whole, so a killed build leaves nothing that counts.
    """
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    path = CACHE / f"{kind}-{key}"
    if not path.exists():
        with lock(path.name):
            if not path.exists():
                say(f"building {path}")
                CACHE.mkdir(parents=True, exist_ok=True)
                for stale in CACHE.glob(f".{path.name}.*"):
                    shutil.rmtree(stale)
                temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=CACHE))
                temporary.chmod(0o755)
                build(temporary)
                temporary.rename(path)
    return path
