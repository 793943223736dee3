"""The offline apt repository: the packages that the roles install, with everything they depend on, and nothing more."""
from __future__ import annotations

from pathlib import Path

from . import host, rootfs

#: What a closed site mirrors for this project: the one list. Dependencies follow by themselves, recommendations do not.
PACKAGES = [
    "ca-certificates",
    "curl",
    "docker.io",
    "iproute2",
    "iptables",
    "kmod",
    "libnginx-mod-http-lua",
    "lua-cjson",
    "lua-resty-core",
    "lua-resty-lrucache",
    "nginx",
    "numactl",
    "openssl",
    "pciutils",
    "procps",
    "python3-apt",
    "python3-venv",
    "rsync",
    "skopeo",
    "util-linux",
    "xz-utils",
]
#: Packages that a release has besides.
PACKAGES_OF_RELEASE = {"trixie": ["docker-cli"]}


def ensure() -> Path:
    """Return the repository (flat: .deb files, Packages, Release), made of what apt would install into a bare machine."""
    root, names = rootfs.ensure(), PACKAGES + PACKAGES_OF_RELEASE.get(host.codename(), [])
    return host.cached("apt", [root.parent.name, names], lambda directory: _build(directory, root, names))


def _build(directory: Path, root: Path, names: list[str]) -> None:
    """Download with the host's apt, standing on the machines' own package database, so that the closure is exact."""
    apt = directory / ".apt"
    for part in ("lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True)
    (apt / "sources.list").write_text(host.apt_sources())
    options = [
        f"-oDir::State::status={root}/var/lib/dpkg/status",
        f"-oDir::State::lists={apt}/lists",
        f"-oDir::Cache={apt}/cache",
        f"-oDir::Etc::sourcelist={apt}/sources.list",
        "-oDir::Etc::sourceparts=-",
        "-oDir::Etc::preferencesparts=-",
        "-oAPT::Sandbox::User=root",
    ]
    host.run("apt-get", *options, "update")
    host.run("apt-get", *options, "--yes", "--download-only", "--no-install-recommends", "install", *names)
    for package in (apt / "cache/archives").glob("*.deb"):
        # %3a, an escaped colon, would be unescaped once more on its way through HTTP.
        package.rename(directory / package.name.replace("%3a", "."))
    host.run("rm", "-r", apt)
    (directory / "Packages").write_text(host.run("apt-ftparchive", "packages", ".", cwd=directory))
    (directory / "Release").write_text(host.run("apt-ftparchive", "release", ".", cwd=directory))
