"""A model server: an rsync daemon that gives one model to one machine for the length of one copy.

It is a transient systemd unit, so that it ends itself after its time even if nobody ever comes back to end it. It
listens on one address and one free port, knows one read-only module, one user with a secret made for this copy, and
one client address. Its configuration and its secret lie in a root-only directory below ``/run`` that goes with it.

Formats: rsyncd.conf(5), systemd-run(1).
"""

from __future__ import annotations

import re
import shutil
import socket
import time
from pathlib import Path
from typing import Callable, List, Tuple

from ansible_collections.llmops.ascend.plugins.module_utils.atomic_files import write_text

RUNTIME = Path("/run/llmops/model_server")
CONFIGURATION_FILE = "rsyncd.conf"
SECRETS_FILE = "secrets"
USER = "llmops"
MODULE = "model"
UNIT_PREFIX = "llmops-model-server-"

# A server without a connection that is older than this was forgotten: between start and first connection lie seconds.
IDLE_S = 120
_START_S = 10

# What the daemon needs: to read every file, to bind, and to take on the user of its module. Nothing else, and no
# writing anywhere.
_CONFINEMENT = (
    "CapabilityBoundingSet=CAP_DAC_READ_SEARCH CAP_DAC_OVERRIDE CAP_SETUID CAP_SETGID",
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    # Links are followed: none shall lead to a secret.
    "InaccessiblePaths=-/etc/shadow -/etc/gshadow -/etc/ssh -/etc/llmops -/root/.ssh",
    "PrivateDevices=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
)

Run = Callable[[List[str]], Tuple[int, str, str]]


class ServerError(Exception):
    """A server cannot be started; the message is one line for the operator."""


def configuration(root: str, address: str, port: int, allow: str, secrets_file: str) -> str:
    """The daemon's rsyncd.conf: one read-only module for one client."""
    if re.search(r"[%\\\n]", root) or root != root.strip():
        # rsyncd.conf knows no quoting: % starts a variable, a backslash continues a line, blanks at the ends are cut.
        raise ServerError(f"{root!r} cannot be served: rename it without percent signs, backslashes and outer blanks")
    return (
        "# One model for one machine, for the length of one copy.\n"
        f"address = {address}\nport = {port}\nuse chroot = no\nlog file = /dev/null\n"
        f"[{MODULE}]\npath = {root}\nread only = yes\nlist = no\nuid = 0\ngid = 0\n"
        # Files of a Hugging Face snapshot are links that lead out of it. (rsync before 3.5 follows them unasked.)
        "insecure links = yes\n"
        f"auth users = {USER}\nsecrets file = {secrets_file}\nstrict modes = yes\n"
        f"hosts allow = {allow}\nhosts deny = *\n"
    )


def unit_name(name: str) -> str:
    """The systemd unit of the server called name (letters, digits, dots, dashes and underscores)."""
    return UNIT_PREFIX + name + ".service"


def start_command(name: str, directory: Path, lifetime_s: int) -> list[str]:
    """The command that starts the server as a transient unit: after lifetime_s it ends, and its secret goes with it."""
    rsync = shutil.which("rsync") or "/usr/bin/rsync"
    rm = shutil.which("rm") or "/bin/rm"
    properties = [
        f"RuntimeMaxSec={lifetime_s}",
        f"ReadWritePaths={directory.parent}",
    ]
    properties += [f"ExecStopPost={rm} -rf {directory}", *_CONFINEMENT]
    command = ["systemd-run", "--quiet", "--collect", "--unit=" + unit_name(name)]
    command += ["--property=" + item for item in properties]
    return [*command, rsync, "--daemon", "--no-detach", f"--config={directory / CONFIGURATION_FILE}"]


def start(name: str, root: str, address: str, allow: str, secret: str, lifetime_s: int, run: Run) -> int:
    """Serve the directory root to the client address allow; returns the port. A server of that name is replaced.

    Raises ServerError when the address is not this machine's or the daemon does not come up.
    """
    stop(name, run)
    directory = RUNTIME / name
    port = free_port(address)
    text = configuration(str(Path(root).resolve()), address, port, allow, str(directory / SECRETS_FILE))
    directory.mkdir(mode=0o700, parents=True)
    write_text(directory / SECRETS_FILE, f"{USER}:{secret}\n", 0o600)
    write_text(directory / CONFIGURATION_FILE, text, 0o600)
    code, _, error = run(start_command(name, directory, lifetime_s))
    if code == 0 and greets(address, port, _START_S):
        return port
    stop(name, run)
    raise ServerError(
        "rsync daemon does not come up at {}:{}: {}".format(
            address, port, error.strip() or f"no greeting within {_START_S} s; see journalctl -u {unit_name(name)}"
        )
    )


def stop(name: str, run: Run) -> bool:
    """End the server and remove its files; returns whether there was one."""
    code, _, _ = run(["systemctl", "stop", unit_name(name)])
    directory = RUNTIME / name
    existed = directory.is_dir()
    shutil.rmtree(directory, ignore_errors=True)
    return existed or code == 0


def exists(name: str) -> bool:
    """Whether a server of that name was started and not ended here."""
    return (RUNTIME / name).is_dir()


def leftovers(run: Run) -> list[str]:
    """Names of servers that an interrupted run left here: not running, or without a connection for too long to be in
    use."""
    try:
        names = sorted(entry.name for entry in RUNTIME.iterdir())
    except OSError:
        return []
    return [name for name in names if _is_leftover(name, run)]


def _is_leftover(name: str, run: Run) -> bool:
    try:
        age_s = time.time() - (RUNTIME / name).stat().st_mtime
    except OSError:
        return False
    _, text, _ = run(["systemctl", "show", "--property=ActiveState,TasksCurrent", unit_name(name)])
    shown: dict[str, str] = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    serving = shown.get("ActiveState") in ("active", "activating") and shown.get("TasksCurrent", "1") != "1"
    return age_s > IDLE_S and not serving


def free_port(address: str) -> int:
    """A port that is free on that address now; raises ServerError when the address is not this machine's."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.bind(target)
            return server.getsockname()[1]
    except OSError as error:
        raise ServerError(f"cannot listen on {address}: {error}; set data_address to an address of this machine") from error


def greets(address: str, port: int, within_s: float) -> bool:
    """Whether an rsync daemon answers there within that time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((address, port), timeout=2) as connection:
                if connection.recv(64).startswith(b"@RSYNCD:"):
                    return True
        except OSError:
            pass
        time.sleep(0.05)
    return False
