"""The root file system that all machines share: a minimal Debian with systemd, sshd, sudo and python3, and nothing else of substance.

What a role needs, dockerd included, it must install itself, from the lab's offline repository.
"""
from __future__ import annotations

import shutil
from pathlib import Path

from . import host
from .settings import USER

INCLUDE = ["systemd", "systemd-sysv", "dbus", "iproute2", "openssh-server", "python3", "sudo"]

#: Written into every machine. dpkg does not wait for disks.
FILES = {
    "etc/ssh/sshd_config.d/lab.conf": "\n".join([
        "HostKey /etc/ssh/ssh_host_ed25519_key",
        "PermitRootLogin no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "AuthorizedKeysFile /etc/ssh/authorized_keys/%u",
        "MaxStartups 100",
        "",
    ]),
    f"etc/sudoers.d/{USER}": f"{USER} ALL=(ALL:ALL) NOPASSWD: ALL\n",
    "etc/dpkg/dpkg.cfg.d/lab": "force-unsafe-io\n" + "".join(f"path-exclude=/usr/share/{name}/*\n" for name in ("doc", "man", "locale")),
    "etc/apt/apt.conf.d/99lab": 'Acquire::Languages "none";\n',
    "etc/resolv.conf": "# a closed network: no name server\n",
    "etc/fstab": "",
}
#: Timers that would take apt's lock at their own time, and what a machine that shares the host's kernel and disk has no use for.
MASKED = ["apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer",
          "systemd-modules-load.service"]
#: What Debian's packages made at build time and every machine must make, or be given, for itself.
REMOVED = ["etc/ssh/ssh_host_*", "etc/machine-id", "etc/hostname", "etc/apt/sources.list", "etc/apt/sources.list.d/*",
           "etc/apt/apt.conf.d/99mmdebstrap", "var/lib/apt/lists/*", "var/lib/dbus/machine-id", "var/log/*.log",
           "usr/share/doc/*", "usr/share/man/*", "usr/share/locale/*", "var/cache/apt/*.bin"]


def ensure() -> Path:
    """Return the root file system, built with mmdebstrap where it is not in the cache (half a minute, 0.3 GB)."""
    suite = host.codename()
    return host.cached("rootfs", [suite, INCLUDE, FILES, MASKED, REMOVED], _build) / "root"


def _build(directory: Path) -> None:
    suite, root, sources = host.codename(), directory / "root", directory / "sources.list"
    sources.write_text(host.apt_sources())
    host.run(
        "unshare", "--mount",  # what it mounts goes with it, also when it is killed
        "mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(INCLUDE)}",
        *(f"--aptopt={option}" for option in host.apt_options()), suite, root, sources,
    )
    sources.unlink()
    for pattern in REMOVED:
        for path in root.glob(pattern):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, content in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(content)
    (root / f"etc/sudoers.d/{USER}").chmod(0o440)
    host.run("chroot", root, "useradd", "--create-home", "--shell", "/bin/bash", USER)
    host.run("chroot", root, "systemctl", "mask", *MASKED)
