"""The simulated engine's image, named as the real one of the cluster report: ascend/vllm-ascend:qwen3.8-a2."""

from __future__ import annotations

import json
import py_compile
import shutil
import tarfile
from pathlib import Path

from llmops_lab import host
from llmops_lab.settings import PROJECT

from images import debian, oci

NAME = "ascend/vllm-ascend:qwen3.8-a2"
WRONG_ARCHITECTURE_NAME = "ascend/vllm-ascend:wrong-arch"

ENGINE = PROJECT / "lab" / "engine" / "simulated_vllm"
CATALOGUE = PROJECT / "presets" / "vllm" / "0.23.0.json"
HOME = "usr/local/lib/simulated-vllm"
LAUNCHER = f"""#!/usr/bin/python3
import sys

sys.path.insert(0, "/{HOME}")
from simulated_vllm.cli import main

raise SystemExit(main())
"""

# As in the real image's configuration; the paths exist in none of its lab copies, and nothing here reads them.
ENVIRONMENT = [
    "ASCEND_TOOLKIT_HOME=/usr/local/Ascend/ascend-toolkit/latest",
    "LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64/driver:/usr/local/Ascend/driver/lib64/common",
    "TASK_QUEUE_ENABLE=1",
    "PYTHONUNBUFFERED=1",
    "PYTHONDONTWRITEBYTECODE=1",
    "MALLOC_MMAP_THRESHOLD_=1000000",  # of the lab: memory of big requests goes back to the system
]


def ensure() -> Path:
    """The image as an OCI layout, built if the cache does not have it."""
    base = debian.layer()
    recipe = [base.digest, _sources(), LAUNCHER, ENVIRONMENT, CATALOGUE.read_text()]
    return host.cached("image-simulated", recipe, lambda directory: _build(directory, base)) / "layout"


def ensure_wrong_architecture() -> Path:
    """A tiny image for a machine of the other architecture, to be refused."""
    other = "amd64" if oci.architecture() == "arm64" else "arm64"

    def build(directory: Path) -> None:
        layer = oci.make_layer(directory / "vllm.layer", lambda tar: oci.add_file(tar, "vllm", b"not for this machine\n"))
        oci.write_image(directory / "layout", [layer], ENVIRONMENT, _labels(), ["vllm"], architecture=other)

    return host.cached("image-wrong-architecture", [other, ENVIRONMENT, _labels()], build) / "layout"


def _build(directory: Path, base: oci.Layer) -> None:
    package = directory / "package" / "simulated_vllm"
    shutil.copytree(ENGINE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CATALOGUE, package / "catalogue.json")
    for source in package.glob("*.py"):
        # Unchecked: the container's clock and file times play no part. Of use when both Pythons are of one version.
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(source), dfile=f"/{HOME}/simulated_vllm/{source.name}", invalidation_mode=mode, doraise=True)

    def fill(tar: tarfile.TarFile) -> None:
        oci.add_tree(tar, package.parent, f"{HOME}/")
        oci.add_file(tar, "usr/local/bin/vllm", LAUNCHER.encode(), 0o755)

    layer = oci.make_layer(directory / "engine.layer", fill)
    oci.write_image(directory / "layout", [base, layer], ENVIRONMENT, _labels(), ["vllm", "serve"])
    shutil.rmtree(package.parent)


def _labels() -> dict[str, str]:
    """`llmops.vllm-version` is of the lab: real images do not say their vLLM version, `vllm --version` in them does."""
    version = json.loads(CATALOGUE.read_text())["vllm"]
    return {
        "org.opencontainers.image.title": "Simulated vllm-ascend",
        "org.opencontainers.image.description": "Lab only: vLLM's interfaces without a model or an accelerator",
        "org.opencontainers.image.version": "qwen3.8-a2",
        "llmops.vllm-version": version,
    }


def _sources() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(ENGINE.glob("*.py"))}


IMAGES = {NAME: ensure, WRONG_ARCHITECTURE_NAME: ensure_wrong_architecture}
