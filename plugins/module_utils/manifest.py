"""What a model is made of: the manifest of a model directory.

A manifest lists every file of a model with its size, its sha256 and the modification time it had when it was read::

    {"schema": 1, "id": "<sha256>", "files": {"model-00001-of-00004.safetensors":
        {"size": 8388608, "sha256": "<hex>", "mtime_ns": 1767225600000000000}}}

It lies in the model directory as ``.llmops-manifest.json``. Its ``id`` is the sha256 over the sorted (path, size,
sha256) of all files: two copies of a model have the same id wherever and whenever they were made. Modification times
are no part of it; they only make the everyday check cheap: a file whose size and time are those of the manifest is
taken as unchanged.

Symbolic links are followed, so that a snapshot in a Hugging Face cache and a plain directory of the same files are
the same model. Paths are relative, with ``/``; bytes that are not UTF-8 survive as surrogates, as everywhere in Python.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Iterable, Iterator

from ansible_collections.llmops.ascend.plugins.module_utils.atomic_files import write_text

MANIFEST_NAME = ".llmops-manifest.json"
OUR_PREFIX = ".llmops-"
# Ours too: a manifest that was being written when the machine died.
_OURS = (OUR_PREFIX, "." + OUR_PREFIX)
SCHEMA = 1

# Bookkeeping of git and of the download clients of Hugging Face and ModelScope: no part of the model.
BOOKKEEPING = frozenset({".git", ".cache", "._____temp"})

# Nobody edits weights by hand: a weight file that differs is damage, any other that differs may be somebody's intent.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".onnx")

_BLOCK_BYTES = 1 << 20


class ManifestError(Exception):
    """A model or its manifest cannot be read or written; the message is one line for the operator."""


@dataclass(frozen=True)
class Entry:
    """One file of a model: size in bytes, sha256 in hex, modification time in ns when it was read."""

    size: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True)
class Manifest:
    """The files of a model, by relative path."""

    files: dict[str, Entry]

    @property
    def id(self) -> str:
        """sha256 (hex) over the sorted path, size and sha256 of all files."""
        digest = hashlib.sha256()
        for path in sorted(self.files, key=os.fsencode):
            entry = self.files[path]
            digest.update(b"%s\0%d\0%s\n" % (os.fsencode(path), entry.size, entry.sha256.encode()))
        return digest.hexdigest()

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry.size for entry in self.files.values())

    def to_json(self) -> str:
        """The text of a manifest file."""
        files = {path: asdict(self.files[path]) for path in sorted(self.files)}
        return json.dumps({"schema": SCHEMA, "id": self.id, "files": files}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read the text of a manifest file; raises ValueError when it is not one, or when its id is not that of its
        files."""
        try:
            document = json.loads(text)
            if document["schema"] != SCHEMA:
                raise ValueError("schema {!r}, not {}".format(document["schema"], SCHEMA))
            manifest = cls({_inside(path): Entry(**entry) for path, entry in document["files"].items()})
            if document["id"] != manifest.id:
                raise ValueError("its id is not that of its files")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error
        return manifest


def _inside(path: str) -> str:
    """The path itself, refused where it would lead out of the model directory (a manifest also arrives from other
    machines)."""
    if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"path {path!r} leads out of the model")
    return path


@dataclass
class State:
    """What is at a model's path.

    status: absent       nothing there, or an empty directory
            incomplete   no manifest, and the model's own index names files that are missing
            unmanifested a model without a manifest: somebody copied it by hand
            touched      sizes are right, but modification times moved: only reading tells whether the content did
            damaged      files are missing or have other content than the manifest says
            whole        as the manifest says
    """

    path: str
    status: str
    id: str | None = None
    files: int = 0
    bytes: int = 0
    missing: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    @property
    def edited(self) -> list[str]:
        """Files of other content that somebody may have edited on purpose: all but weights."""
        return [path for path in self.changed if not path.endswith(WEIGHT_SUFFIXES)]


def scan(root: str | Path) -> dict[str, os.stat_result]:
    """All regular files of the model directory root, links followed: {relative path: stat}.

    Raises ManifestError for a link that leads nowhere or in a circle, and for what cannot be read.
    """
    found: dict[str, os.stat_result] = {}
    _scan(root, "", set(), found)
    return found


def _scan(root: str | Path, prefix: str, above: set[tuple[int, int]], found: dict[str, os.stat_result]) -> None:
    directory = Path(root, prefix)
    try:
        here = directory.stat()
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise ManifestError(f"cannot read {directory}: {error.strerror}") from error
    identity = (here.st_dev, here.st_ino)
    if identity in above:
        raise ManifestError(f"{directory} is a link that leads back above itself: remove it")
    for name in names:
        if name in BOOKKEEPING or name.startswith(_OURS):
            continue
        relative = prefix + name
        try:
            status = (directory / name).stat()
        except OSError as error:
            raise ManifestError(
                f"{directory / name} leads nowhere: complete the model, or remove the link"
                if error.errno in (errno.ENOENT, errno.ELOOP)
                else f"cannot read {directory / name}: {error.strerror}"
            ) from error
        if stat.S_ISDIR(status.st_mode):
            _scan(root, relative + "/", above | {identity}, found)
        elif stat.S_ISREG(status.st_mode):
            found[relative] = status


def sha256(path: str | Path, sync: bool = False) -> str:
    """sha256 (hex) of a file; sync also puts it on the disk for good, so that a later rename never outlives its
    content."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK_BYTES))
    with Path(path).open("rb", buffering=0) as file:
        count = file.readinto(block)
        while count:
            digest.update(block[:count])
            count = file.readinto(block)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


def hash_files(root: str | Path, sizes: dict[str, int], threads: int, sync: bool = False) -> dict[str, str]:
    """sha256 of the files named by sizes ({relative path: bytes}), in parallel, large ones first: {relative path:
    hex}."""
    order = sorted(sizes, key=lambda path: -sizes[path])
    try:
        with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
            return dict(zip(order, pool.map(lambda path: sha256(Path(root, path), sync), order)))
    except OSError as error:
        raise ManifestError(f"cannot read {error.filename}: {error.strerror}") from error


def load(root: str | Path) -> Manifest | None:
    """The manifest of a model directory; None where there is none or it is not readable as one."""
    try:
        return Manifest.from_json(Path(root, MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def save(root: str | Path, manifest: Manifest) -> None:
    """Write the manifest into the model directory, atomically; raises ManifestError where that is not possible."""
    path = Path(root, MANIFEST_NAME)
    try:
        write_text(path, manifest.to_json(), 0o644)
    except OSError as error:
        raise ManifestError(f"cannot write {path}: {error.strerror}") from error


def missing_shards(root: str | Path, files: Iterable[str]) -> list[str]:
    """Files that the model's own index (``*.safetensors.index.json``: {"weight_map": {tensor: file}}) names but are
    not there."""
    present = set(files)
    wanted: set[str] = set()
    for path in present:
        if not path.endswith(".index.json"):
            continue
        try:
            shards = set(json.loads(Path(root, path).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue
        wanted |= {str(PurePosixPath(path).parent / shard) for shard in shards}
    return sorted(wanted - present)


def inspect(root: str | Path, full: bool = False, threads: int = 1) -> State:
    """Say what is at a model's path; changes nothing. Cheap (a stat of each file), unless full: then every file is
    read.

    Raises ManifestError when the path is not a directory or cannot be read.
    """
    if not os.path.lexists(root):
        return State(str(root), "absent")
    if not Path(root).is_dir():
        raise ManifestError(f"{root} is not a directory: a model path names a model's directory")
    found = scan(root)
    manifest = load(root)
    if manifest is None:
        size = sum(status.st_size for status in found.values())
        missing = missing_shards(root, found)
        status = "incomplete" if missing else "unmanifested" if found else "absent"
        return State(str(root), status, files=len(found), bytes=size, missing=missing)
    return _compare(root, manifest, found, full, threads)


def _compare(root: str | Path, manifest: Manifest, found: dict[str, os.stat_result], full: bool, threads: int) -> State:
    state = State(str(root), "whole", manifest.id, len(manifest.files), manifest.bytes)
    state.missing = sorted(manifest.files.keys() - found.keys())
    state.extra = sorted(found.keys() - manifest.files.keys())
    for path in sorted(manifest.files.keys() & found.keys()):
        entry, status = manifest.files[path], found[path]
        if status.st_size != entry.size:
            state.changed.append(path)
        elif status.st_mtime_ns != entry.mtime_ns:
            state.touched.append(path)
    if full:
        unread = {path: manifest.files[path].size for path in manifest.files.keys() & found.keys() - set(state.changed)}
        hashes = hash_files(root, unread, threads)
        state.changed = sorted(state.changed + [path for path in hashes if hashes[path] != manifest.files[path].sha256])
        state.touched = [path for path in state.touched if path not in state.changed]
    if state.missing or state.changed:
        state.status = "damaged"
    elif state.touched:
        state.status = "touched"
    return state


def settle(root: str | Path, accept: bool = False, full: bool = False, threads: int = 1) -> tuple[State, bool]:
    """Leave the model with a manifest that says what is there; returns (state, whether the manifest was written).

    A model without a manifest gets one. Where modification times moved, the files are read: the manifest takes the
    new times if their content is the same, else the state is damaged. accept takes what is there as the model, edited
    and added files included. Raises ManifestError when files change while they are read (a download may still be
    running).
    """
    with _locked(root):
        state = inspect(root, full, threads)
        manifest = load(root)
        known = manifest.files if manifest else {}
        if state.status == "unmanifested" or (accept and known and (state.status != "whole" or state.extra)):
            kept = {path: entry for path, entry in known.items() if path not in state.missing + state.changed + state.touched}
            found = {path: status for path, status in scan(root).items() if path not in kept}
            save(root, Manifest({**kept, **_read(root, found, threads)}))
            return inspect(root), True
        if not state.touched:
            return state, False
        read = _read(root, {path: Path(root, path).stat() for path in state.touched}, threads)
        same = {path: entry for path, entry in read.items() if entry.sha256 == known[path].sha256}
        state.changed = sorted(state.changed + [path for path in read if path not in same])
        state.touched = []
        state.status = "damaged" if state.missing or state.changed else "whole"
        if same:
            save(root, Manifest({**known, **same}))
        return state, bool(same)


def _read(root: str | Path, found: dict[str, os.stat_result], threads: int) -> dict[str, Entry]:
    """Entries of the files found, read in full. What changed while it was read has no sha256 worth writing down."""
    hashes = hash_files(root, {path: status.st_size for path, status in found.items()}, threads)
    for path, before in found.items():
        after = Path(root, path).stat()
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise ManifestError(f"{Path(root, path)} changed while it was read: run again when the model is complete")
    return {path: Entry(status.st_size, hashes[path], status.st_mtime_ns) for path, status in found.items()}


@contextmanager
def _locked(root: str | Path) -> Iterator[None]:
    """One process reads a model in full at a time; a second one then finds the manifest made."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield  # nothing there: nothing to read either
        return
    try:
        with suppress(OSError):  # a network file system may not lock directories: then both read, and write the same
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
