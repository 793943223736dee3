"""What processes have open, read from /proc while they go on working."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Iterator


def open_files(process: Path) -> Iterator[str]:
    """What the descriptors of a process point to, as `/dev/davinci0` or `socket:[4711]`; `process` is its directory in /proc.

    A server opens and closes connections while one looks: a descriptor that is gone is passed over, and the others still
    count. Nothing for a process that ended or that is not ours to look at.
    """
    with contextlib.suppress(OSError):
        for entry in os.scandir(str(process / "fd")):
            with contextlib.suppress(OSError):
                yield os.readlink(entry.path)
