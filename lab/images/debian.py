"""The layer that both engine images stand on: a Debian with python3 and next to nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

from llmops_lab import host

from images import oci

# Nobody reads, configures or installs inside the container.
DROPPED = (
    "dev/", "var/lib/apt/", "var/cache/", "var/log/", "var/lib/dpkg/info/", "usr/share/doc/", "usr/share/man/",
    "usr/share/info/", "usr/share/locale/", "usr/share/zoneinfo/", "usr/share/perl", "usr/lib/x86_64-linux-gnu/perl",
    "usr/lib/aarch64-linux-gnu/perl",
)  # fmt: skip


def layer(*packages: str) -> oci.Layer:
    """The host's own release with python3 and the given packages; half a minute to build."""
    included = ["python3", *packages]

    def build(directory: Path) -> None:
        root, sources = directory / "root", directory / "sources.list"
        sources.write_text(host.apt_sources())
        host.run(
            "unshare", "--mount",  # what it mounts goes with it, also when it is killed
            "mmdebstrap", "--quiet", "--variant=essential", f"--include={','.join(included)}", "--format=directory",
            *(f"--aptopt={option}" for option in host.apt_options()), host.codename(), root, sources,
        )  # fmt: skip
        oci.make_layer(directory / "debian.layer", lambda tar: oci.add_tree(tar, root, skip=lambda name: name.startswith(DROPPED)))
        shutil.rmtree(root)
        sources.unlink()

    recipe = [host.codename(), oci.architecture(), included, DROPPED]
    return oci.Layer.load(host.cached("image-base", recipe, build) / "debian.json")
