"""What parsers of tools' outputs have in common."""

from __future__ import annotations


class OutputError(ValueError):
    """An output that cannot be believed, in one line. `line` counts from 1, None when the reason is no single line."""

    def __init__(self, command: str, reason: str, line: int | None = None, text: str = "") -> None:
        where = command if line is None else f"{command}, line {line}"
        shown = " ".join(text.split())
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(f"{where}: {reason}" + (f": {shown!r}" if shown else ""))
        self.line = line
