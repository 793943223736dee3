"""Container images written by hand: an OCI image layout is a directory of blobs named by their digests.

Format: https://github.com/opencontainers/image-spec (image-layout.md, manifest.md, config.md, layer.md).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llmops_lab import host

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CREATED = "2026-01-01T00:00:00Z"  # fixed: equal contents give equal images


def architecture() -> str:
    """This machine's architecture in the words of image configurations."""
    return ARCHITECTURES[platform.machine()]


@dataclass(frozen=True)
class Layer:
    """A compressed layer: the digest names the blob, the diff id what is in it."""

    path: Path
    digest: str
    diff_id: str
    size: int  # bytes

    def to_json(self) -> dict[str, Any]:
        return {"blob": self.path.name, "digest": self.digest, "diff_id": self.diff_id, "size": self.size}

    @classmethod
    def load(cls, description: Path) -> Layer:
        values = json.loads(description.read_text())
        return cls(description.parent / values["blob"], values["digest"], values["diff_id"], values["size"])


class _Hashed(io.RawIOBase):
    """Passes writes on and hashes them."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target
        self.hash = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self.size += len(data)
        self._target.write(data)
        return len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self.hash.hexdigest()}"


@contextmanager
def _tar(path: Path, level: int) -> Iterator[tuple[tarfile.TarFile, Callable[[], Layer]]]:
    with path.open("wb") as file:
        blob = _Hashed(file)
        with gzip.GzipFile(fileobj=blob, mode="wb", compresslevel=level, mtime=0, filename="") as compressed:
            content = _Hashed(compressed)
            with tarfile.open(fileobj=content, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                yield tar, lambda: Layer(path, blob.digest, content.digest, blob.size)


def make_layer(path: Path, fill: Callable[[tarfile.TarFile], None], level: int = 6) -> Layer:
    """Writes a gzipped layer; `fill` adds its entries. A description for Layer.load is put beside it as PATH.json."""
    with _tar(path, level) as (tar, finish):
        fill(tar)
    layer = finish()
    path.with_suffix(".json").write_text(json.dumps(layer.to_json()))
    return layer


def add_tree(tar: tarfile.TarFile, root: Path, prefix: str = "", skip: Callable[[str], bool] = lambda _: False) -> None:
    """Adds a directory tree, owned by root and without times. `skip` sees paths relative to the root."""
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if not skip(name) and (path.is_symlink() or path.is_dir() or path.is_file()):
            tar.add(path, f"{prefix}{name}", recursive=False, filter=_anonymous)


def add_file(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def write_image(
    directory: Path,
    layers: list[Layer],
    environment: list[str],
    labels: dict[str, str],
    command: list[str] | None = None,
    architecture: str = architecture(),
) -> None:
    """Writes an image layout whose one image is tagged `image`. The layers' blobs are linked, not copied."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for layer in layers:
        blobs.joinpath(layer.digest.removeprefix("sha256:")).hardlink_to(layer.path)

    def add(value: dict[str, Any], media_type: str) -> dict[str, Any]:
        data = json.dumps(value, sort_keys=True).encode()
        digest = hashlib.sha256(data).hexdigest()
        blobs.joinpath(digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    config = {
        "architecture": architecture,
        "os": "linux",
        "created": CREATED,
        "config": {"Env": [PATH, *environment], "Labels": labels, "Cmd": command, "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": CREATED, "created_by": f"lab/images ({layer.path.stem})"} for layer in layers],
    }
    manifest_type = "application/vnd.oci.image.manifest.v1+json"
    layer_type = "application/vnd.oci.image.layer.v1.tar+gzip"
    manifest = {
        "schemaVersion": 2,
        "mediaType": manifest_type,
        "config": add(config, "application/vnd.oci.image.config.v1+json"),
        "layers": [{"mediaType": layer_type, "digest": layer.digest, "size": layer.size} for layer in layers],
    }
    reference = add(manifest, manifest_type) | {"annotations": {"org.opencontainers.image.ref.name": "image"}}
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [reference]}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def push(layout: Path, reference: str) -> None:
    """Copies an image into a registry that speaks plain HTTP; blobs that are there already are not sent again.

    reference: HOST:PORT/NAME:TAG. Raises LabError.
    """
    host.run(
        "skopeo", "copy", "--quiet", "--format", "v2s2", "--dest-tls-verify=false",
        f"oci:{layout}:image", f"docker://{reference}",
    )  # fmt: skip
