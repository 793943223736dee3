"""Runs one machine for as long as it is on. Started by machine.start as `unshare --mount python3 runner.py LAB MACHINE`.

It lives in a mount namespace of its own, so the machine's mounts vanish with its processes, however they end. It boots the machine
again when that was rebooted from inside, and ends when it was powered off.
"""
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmops_lab import hardware, model, network  # noqa: E402
from llmops_lab.cgroup import Group  # noqa: E402
from llmops_lab.settings import USER, Lab, Machine  # noqa: E402

CGROUPS = Path("/sys/fs/cgroup")
#: How systemd-nspawn --keep-unit says "boot me again" (RestartForceExitStatus= of systemd-nspawn@.service).
REBOOT = 133


def main(lab: Lab, machine: Machine) -> None:
    if not (CGROUPS / "cgroup.controllers").exists():  # a host with cgroup v1 or both: machines see the unified hierarchy only
        mount("-t", "cgroup2", "cgroup2", CGROUPS)
    Group(lab.name, str(machine), "runner", root=CGROUPS).create().enter()
    root = mount_root(lab, machine)
    while boot(lab, machine, root) == REBOOT:
        print(f"lab: {machine} boots again", flush=True)


def mount_root(lab: Lab, machine: Machine) -> Path:
    """Mount the machine's own layer over the shared root file system and, the first time, give it its identity."""
    directory = lab.directory(machine)
    upper, work, root = (directory / name for name in ("upper", "work", "root"))
    # What `volatile` (no fsync: a power cut of a machine is none of the host) leaves behind would refuse the next mount.
    shutil.rmtree(work, ignore_errors=True)
    for path in (upper, work, root, directory / "docker", directory / "containerd"):
        path.mkdir(exist_ok=True)
    upper.chmod(0o755)
    lower = (directory / "rootfs").resolve(strict=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={work},volatile"
    mount("-t", "overlay", f"{lab.name}-{machine}", root, "-o", options)
    if not (upper / "etc/hostname").exists():
        for name, content in identity(lab, machine).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            path.chmod(0o600 if name.endswith("_key") else 0o644)
    model.deliver(directory, root)
    return root


def identity(lab: Lab, machine: Machine) -> dict[str, str]:
    """What tells this machine from the others; /etc/hostname comes last and says that the rest is there."""
    keys = lab.state / "ssh"
    return {
        "etc/hosts": f"127.0.0.1 localhost\n127.0.1.1 {machine}\n",
        "etc/machine-id": hashlib.md5(f"{lab.name} {machine}".encode()).hexdigest() + "\n",
        "etc/apt/sources.list": f"deb [trusted=yes] {lab.apt_url} ./\n",
        "etc/ssh/ssh_host_ed25519_key": (keys / str(machine)).read_text(),
        "etc/ssh/ssh_host_ed25519_key.pub": (keys / f"{machine}.pub").read_text(),
        f"etc/ssh/authorized_keys/{USER}": lab.ssh_key.with_suffix(".pub").read_text(),
        "etc/hostname": f"{machine}\n",
    }


def boot(lab: Lab, machine: Machine, root: Path) -> int:
    """Boot the machine and return systemd-nspawn's exit status once it is down."""
    directory = lab.directory(machine)
    system = Group(lab.name, str(machine), "system", root=CGROUPS)
    system.kill()  # whatever the previous boot left
    system.create()
    table = directory / "hardware"
    namespace = f"/run/netns/{network.namespace(lab, machine)}"
    return subprocess.run(
        [
            # Entered before, too: the machine's /sys shows the interfaces of whoever mounts it.
            "nsenter", f"--net={namespace}",
            "systemd-nspawn", "--quiet", "--keep-unit", "--register=no", "--boot", "--link-journal=no", "--timezone=off",
            "--resolv-conf=off", "--console=pipe", f"--directory={root}", f"--machine={lab.name}-{machine}",
            f"--network-namespace-path={namespace}",
            "--private-users=no", "--capability=all", "--system-call-filter=add_key keyctl bpf",
            f"--bind={directory}/docker:/var/lib/docker",
            f"--bind={directory}/containerd:/var/lib/containerd",
            f"--bind-ro={table}/hardware.json:{hardware.PATH_IN_MACHINE}",
            f"--bind-ro={table}/node:/sys/devices/system/node",
            f"--bind-ro={table}/pci:/sys/bus/pci/devices",
        ],
        env={"PATH": os.environ["PATH"], "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "1", "SYSTEMD_NSPAWN_LOCK": "0"},
        preexec_fn=system.enter, stdin=subprocess.DEVNULL,
    ).returncode


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


if __name__ == "__main__":
    main(Lab(sys.argv[1]), Machine.named(sys.argv[2]))
