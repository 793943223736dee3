"""Receive a model so that it is right or not there.

A model arrives in a hidden directory beside its place (``/data/models/.NAME.partial`` for ``/data/models/NAME``),
every file is compared with the manifest, and only then one rename puts it in its place, manifest included. What an
interrupted copy left in the hidden directory is used by the next one. A damaged model is mended the same way: its
good files are linked into the hidden directory, the others are fetched, and the two directories change places in one
step, so that an engine that runs on the old files keeps them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Iterable, Iterator, List, Sequence

from ansible_collections.llmops.ascend.plugins.module_utils import manifest as manifests
from ansible_collections.llmops.ascend.plugins.module_utils.manifest import MANIFEST_NAME, Manifest, ManifestError
from ansible_collections.llmops.ascend.plugins.module_utils.rsync_daemon import MODULE, USER

PARTIAL_DIR = manifests.OUR_PREFIX + "partial"
MARGIN = 0.05

# rsync(1), EXIT VALUES: what a second try may cure: socket, protocol stream, signal and timeout errors.
_CURABLE = frozenset({10, 12, 20, 30, 35})
_RETRY_PAUSE_S = 3
_STALLED_S = 60
_CONNECT_S = 15

# linux/fs.h and asm/unistd.h: renameat2(2) swaps two directories in one step.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

Fetch = Callable[[List[str], Path], None]
"""Bring the files of these relative paths from the source into a directory; raises CopyError."""


class CopyError(Exception):
    """A copy did not come about; the message is one line for the operator."""


@dataclass(frozen=True)
class Source:
    """Where the files come from: a model server's address and port, or (address None) the directory path on this
    machine."""

    name: str
    address: str | None = None
    port: int = 0
    path: str = ""
    bind_address: str | None = None

    @property
    def url(self) -> str:
        """The source as rsync names it."""
        if self.address is None:
            return self.path.rstrip("/") + "/"
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"rsync://{USER}@{host}:{self.port}/{MODULE}/"


@dataclass
class Report:
    """What a copy did: files and bytes that came from the source, seconds, files that arrived damaged and were
    fetched again."""

    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    fetched_again: list[str] = field(default_factory=list)


def partial_path(target: Path) -> Path:
    """The hidden directory in which the model for target arrives."""
    return target.with_name(f".{target.name}.partial")


def bytes_there(target: Path) -> int:
    """Bytes on disk that an interrupted copy left for target."""
    return _bytes_on_disk(partial_path(target).rglob("*"))


def _bytes_on_disk(paths: Iterable[Path]) -> int:
    return sum(path.lstat().st_blocks * 512 for path in paths)


def check_space(target: Path, needed: int) -> None:
    """Raise CopyError when the file system of target has less than needed bytes and 5 % more."""
    parent = next(path for path in target.parents if path.is_dir())
    status = os.statvfs(parent)
    free, wanted = status.f_bavail * status.f_frsize, int(needed * (1 + MARGIN))
    if free < wanted:
        raise CopyError(
            f"not enough disk for {target}: {gigabytes(wanted)} needed, {gigabytes(free)} free on the file system of "
            f"{parent}: make room there, or set model_path to a larger one"
        )


def gigabytes(count: int) -> str:
    """A size as operators speak of it: 27.3 GB, 8.4 MB, 512 bytes (powers of ten, as disks and links count)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def rsync_fetch(source: Source, secret: str | None, retries: int) -> Fetch:
    """A Fetch that takes files from source with rsync; the secret goes by environment, the file names by stdin."""
    command = [
        "rsync",
        "--recursive",
        "--times",
        "--copy-links",
        "--chmod=D0755,F0644",
        "--whole-file" if source.address is None else "--no-whole-file",
        "--from0",
        "--files-from=-",
        "--partial-dir=" + PARTIAL_DIR,
        f"--timeout={_STALLED_S}",
    ]
    if source.address is not None:
        command += [f"--contimeout={_CONNECT_S}", "--no-motd"]
        command += ["--address=" + source.bind_address] if source.bind_address else []
    environment = dict(os.environ, LC_ALL="C", LANGUAGE="C", **({"RSYNC_PASSWORD": secret} if secret else {}))

    def fetch(paths: list[str], directory: Path) -> None:
        names = b"\0".join(os.fsencode(path) for path in paths)
        for attempt in range(retries + 1):
            done = subprocess.run([*command, source.url, f"{directory}/"], input=names, env=environment, capture_output=True, check=False)
            if done.returncode == 0:
                return
            if done.returncode not in _CURABLE:
                break
            if attempt < retries:
                time.sleep(_RETRY_PAUSE_S)
        raise CopyError(explain(done.returncode, done.stderr.decode(errors="replace"), source, directory))

    return fetch


def explain(code: int, error: str, source: Source, directory: Path) -> str:
    """rsync's exit code and words as one line for the operator."""
    words = next((line.strip() for line in error.splitlines() if line.strip()), "no message")
    if "No space left on device" in error:
        return f"disk full under {directory}: make room there and run again, the copy resumes"
    # To a client that is not allowed, an unlisted module is an unknown one.
    if any(refusal in error for refusal in ("auth failed", "access denied", "Unknown module")):
        return f"{source.name} ({source.address}) refused the copy: {words}; does this machine reach it from its own data_address?"
    if code in _CURABLE:
        return f"the copy from {source.name} ({source.address or source.path}) broke off: {words}; run again, it resumes"
    return f"the copy from {source.name} failed: {words} (rsync exit {code})"


def receive(target: Path, wanted_id: str, source_name: str, fetch: Fetch, threads: int, damaged: Sequence[str] = ()) -> Report:
    """Make the model of manifest id wanted_id appear at target, whole; files that are there already do not travel.

    damaged names files at target that are known to be bad although their size and time look right.
    Raises CopyError, and ManifestError where the disk does not let us. A second call for the same target waits for
    the first.
    """
    began = time.monotonic()
    report = Report()
    with _arriving(target) as partial:
        if not damaged and is_whole(target, wanted_id):
            shutil.rmtree(partial)
            return report
        manifest = _fetch_manifest(wanted_id, source_name, fetch, partial)
        _remove_strangers(partial, manifest)
        if target.is_dir():
            _link_good_files(target, partial, manifest, damaged)
        lacking = _lacking(partial, manifest)
        check_space(target, sum(manifest.files[path].size for path in lacking) - _bytes_on_disk(partial.rglob(PARTIAL_DIR + "/*")))
        _fetch(lacking, manifest, partial, fetch, report)
        report.fetched_again = _damaged(partial, manifest, threads)
        if report.fetched_again:
            _fetch(report.fetched_again, manifest, partial, fetch, report)
            still = _damaged(partial, manifest, threads)
            if still:
                raise CopyError(
                    "{} arrived damaged twice from {}: check the model there with -e model_verify=full, or name another model_source".format(
                        ", ".join(still), source_name
                    )
                )
        _finish(partial, manifest)
        _put_in_place(partial, target)
    report.seconds = round(time.monotonic() - began, 1)
    return report


def is_whole(target: Path, wanted_id: str) -> bool:
    """Whether the model of that manifest id is at target."""
    try:
        state = manifests.inspect(target)
    except ManifestError:
        return False
    return state.status == "whole" and state.id == wanted_id


@contextmanager
def _arriving(target: Path) -> Iterator[Path]:
    """The hidden directory for target, made and locked."""
    partial = partial_path(target)
    try:
        while True:
            partial.mkdir(mode=0o755, parents=True, exist_ok=True)
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Who had the lock before us may have put the directory in its place: then this is no longer the one.
            if partial.is_dir() and os.path.samestat(os.fstat(descriptor), partial.stat()):
                break
            os.close(descriptor)
    except OSError as error:
        raise CopyError(f"cannot write {partial}: {error.strerror}") from error
    try:
        yield partial
    finally:
        os.close(descriptor)


def _fetch_manifest(wanted_id: str, source_name: str, fetch: Fetch, partial: Path) -> Manifest:
    fetch([MANIFEST_NAME], partial)
    manifest = manifests.load(partial)
    if manifest is None or manifest.id != wanted_id:
        raise CopyError(f"the model on {source_name} changed while it was asked for: run again")
    return manifest


def _remove_strangers(partial: Path, manifest: Manifest) -> None:
    """An older copy may have left files that this model does not have."""
    for path in manifests.scan(partial).keys() - manifest.files.keys():
        (partial / path).unlink()


def _link_good_files(target: Path, partial: Path, manifest: Manifest, damaged: Sequence[str]) -> None:
    """Files of target that look right need not travel: link them (their content is compared with the others' before
    the end)."""
    state = manifests.inspect(target)
    doubtful = {*damaged, *state.missing, *state.changed, *state.touched}
    for path, status in manifests.scan(target).items():
        goal = partial / path
        entry = manifest.files.get(path)
        if entry and path not in doubtful and status.st_size == entry.size and not os.path.lexists(goal):
            goal.parent.mkdir(parents=True, exist_ok=True)
            os.link((target / path).resolve(), goal)


def _lacking(partial: Path, manifest: Manifest) -> list[str]:
    found = manifests.scan(partial)
    return sorted(path for path, entry in manifest.files.items() if path not in found or found[path].st_size != entry.size)


def _fetch(paths: list[str], manifest: Manifest, partial: Path, fetch: Fetch, report: Report) -> None:
    if not paths:
        return
    fetch(paths, partial)
    absent = [path for path in paths if not (partial / path).is_file()]
    if absent:
        raise CopyError("{} did not arrive: the source no longer has it".format(", ".join(absent)))
    report.files += len(paths)
    report.bytes += sum(manifest.files[path].size for path in paths)


def _damaged(partial: Path, manifest: Manifest, threads: int) -> list[str]:
    """Files whose content is not the manifest's; they are removed. The others are on the disk for good."""
    hashes = manifests.hash_files(partial, {path: entry.size for path, entry in manifest.files.items()}, threads, sync=True)
    damaged = sorted(path for path in hashes if hashes[path] != manifest.files[path].sha256)
    for path in damaged:
        (partial / path).unlink()
    return damaged


def _finish(partial: Path, manifest: Manifest) -> None:
    """Remove what only the copy needed and write the manifest with the times the files have here."""
    for remains in list(partial.rglob(PARTIAL_DIR)):
        shutil.rmtree(remains)
    found = manifests.scan(partial)
    files: dict[str, manifests.Entry] = {path: replace(entry, mtime_ns=found[path].st_mtime_ns) for path, entry in manifest.files.items()}
    manifests.save(partial, Manifest(files))
    for directory in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
        _sync_directory(directory)


def _put_in_place(partial: Path, target: Path) -> None:
    """One rename; where something is there already, one exchange, and the old goes."""
    try:
        partial.rename(target)  # also replaces an empty directory
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise CopyError(f"cannot rename {partial} to {target}: {error.strerror}") from error
        _exchange(partial, target)
        shutil.rmtree(partial)
    _sync_directory(target.parent)


def _exchange(one: Path, other: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        raise CopyError(f"cannot exchange {one} and {other}: {os.strerror(ctypes.get_errno())}")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
