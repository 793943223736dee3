"""What can be done to a machine: boot, power cut, reboot, wipe, look inside."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from . import hardware, rootfs
from .cgroup import Group
from .host import run
from .settings import USER, Lab, LabError, Machine

BOOT_TIMEOUT_S = 90


def prepare(lab: Lab, machine: Machine) -> None:
    """Make a machine's directory, its hardware and its ssh host key, and let the lab's clients know that key.

    The root file system that a machine was made of stays its own until it is wiped, whatever the recipe says by then.
    """
    directory = lab.directory(machine)
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "hardware").exists():
        hardware.write(directory / "hardware")
    if not (directory / "rootfs").is_symlink():
        (directory / "rootfs").symlink_to(rootfs.ensure())
    key = lab.state / "ssh" / str(machine)
    if not key.exists():
        make_key(key, str(machine))
    algorithm, public, *_ = key.with_suffix(".pub").read_text().split()
    line = f"{lab.management}.{machine.number},{lab.data}.{machine.number},{machine} {algorithm} {public}\n"
    known = lab.known_hosts.read_text() if lab.known_hosts.exists() else ""
    if line not in known:
        lab.known_hosts.write_text(known + line)


def make_key(path: Path, comment: str) -> None:
    """Make an ed25519 key pair without a passphrase."""
    path.parent.mkdir(parents=True, exist_ok=True)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path)


def start(lab: Lab, machine: Machine) -> None:
    """Switch a machine on, if it is off; wait_until_up waits for it."""
    group = Group(lab.name, str(machine))
    if group.populated():
        return
    group.kill()
    group.create()
    with (lab.directory(machine) / "console.log").open("w") as console:
        subprocess.Popen(
            ["unshare", "--mount", sys.executable, "-B", Path(__file__).with_name("runner.py"), lab.name, str(machine)],
            stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True, cwd="/", preexec_fn=group.enter,
        )


def kill(lab: Lab, machine: Machine) -> None:
    """A power cut: every process of the machine is gone at once, its disks stay as they are."""
    Group(lab.name, str(machine)).kill()


def wipe(lab: Lab, machine: Machine) -> None:
    """Kill a machine and make its disks anew: it boots bare. Keys and hardware stay."""
    kill(lab, machine)
    for name in ("upper", "work", "docker", "containerd", "delivered"):
        shutil.rmtree(lab.directory(machine) / name, ignore_errors=True)
    (lab.directory(machine) / "rootfs").unlink(missing_ok=True)
    prepare(lab, machine)


def remove_traces(lab: Lab) -> None:
    """Remove the directories that a killed systemd-nspawn leaves below /run."""
    for path in Path("/run/systemd/nspawn").glob(f"*/{lab.name}-machine*"):
        shutil.rmtree(path)


def reboot(lab: Lab, machine: Machine) -> None:
    """Reboot a machine the orderly way, from inside, and return when its old init is gone."""
    init = init_pid(lab, machine)
    if init is None:
        raise LabError(f"{machine} is off: `lab/lab start {machine}` switches it on")
    # Its status says nothing: systemd may be gone before systemctl has its answer.
    subprocess.run([*enter(lab, machine), "systemctl", "reboot"], capture_output=True)
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    while init_pid(lab, machine) == init:
        if time.monotonic() > deadline:
            raise LabError(f"{machine} does not go down within {BOOT_TIMEOUT_S} s: see {lab.directory(machine)}/console.log")
        time.sleep(0.1)


def init_pid(lab: Lab, machine: Machine) -> int | None:
    """The host's number of the machine's PID 1; None while it is off."""
    for pid in Group(lab.name, str(machine), "system", "payload", "init.scope").pids():
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        numbers = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
        if len(numbers) > 1 and numbers[-1] == "1":
            return pid
    return None


def state(lab: Lab, machine: Machine) -> str:
    """"on" (its sshd lets people in, as far as the network allows), "booting" or "off"."""
    if not Group(lab.name, str(machine)).populated():
        return "off"
    init = init_pid(lab, machine)
    booted = init and Path(f"/proc/{init}/root/run/sshd.pid").exists() and not Path(f"/proc/{init}/root/run/nologin").exists()
    return "on" if booted else "booting"


def wait_until_up(lab: Lab, machines: list[Machine]) -> None:
    """Return when ssh works on all of them. Raises LabError that names the first that stays away and where its console is."""
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    for machine in machines:
        while state(lab, machine) != "on" or subprocess.run(ssh(lab, machine, "true"), capture_output=True).returncode:
            console = lab.directory(machine) / "console.log"
            if state(lab, machine) == "off":
                last = (console.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
                raise LabError(f"{machine} does not boot; the last line of {console}: {last}")
            if time.monotonic() > deadline:
                raise LabError(f"{machine} has no ssh after {BOOT_TIMEOUT_S} s: see {console}")
            time.sleep(0.1)


def ssh(lab: Lab, machine: Machine, *command: str) -> list[str]:
    """The command line that reaches a machine the way Ansible does."""
    return [
        "ssh", "-i", str(lab.ssh_key), "-o", "IdentitiesOnly=yes", "-o", f"UserKnownHostsFile={lab.known_hosts}",
        "-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR", f"{USER}@{lab.management}.{machine.number}", *command,
    ]


def enter(lab: Lab, machine: Machine) -> list[str]:
    """The prefix of a command line that runs as root inside a machine, without its network or sshd."""
    init = init_pid(lab, machine)
    if init is None:
        raise LabError(f"{machine} is off: `lab/lab start {machine}` switches it on")
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    terminal = f"TERM={os.environ.get('TERM', 'dumb')}"
    return ["nsenter", f"--target={init}", "--all", "--root", "--wd", "env", "-i", path, "HOME=/root", "LANG=C.UTF-8", terminal]
