"""Reading files that may be missing, and writing them so that nobody ever sees half of one."""
from __future__ import annotations

import os
import tempfile
from pathlib import Path


def read_text(path: str | Path) -> str | None:
    """The file's content, or None where there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None


def mode_of(path: str | Path) -> int | None:
    """The file's permission bits, or None where there is no such file."""
    try:
        return Path(path).stat().st_mode & 0o7777
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_text(path: str | Path, content: str, mode: int) -> bool:
    """Write a file whole: a temporary file beside it, synced, then renamed over it.

    The temporary file is created 0600, so a secret is never readable to others, not even for a moment.
    Missing directories are made. Returns whether anything changed.
    """
    path = Path(path)
    if read_text(path) == content and mode_of(path) == mode:
        return False
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(content)
            handle.flush()
            os.fchmod(handle.fileno(), mode)
            os.fsync(handle.fileno())
        Path(temporary).rename(path)
    except BaseException:
        Path(temporary).unlink()
        raise
    _sync_directory(path.parent)
    return True


def remove(path: str | Path) -> bool:
    """Remove a file. Returns whether there was one."""
    path = Path(path)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    _sync_directory(path.parent)
    return True


def _sync_directory(directory: Path) -> None:
    """A rename survives a power cut only once its directory is on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
