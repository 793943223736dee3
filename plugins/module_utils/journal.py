"""Finding the reason of a failed start in the lines an instance left in the journal."""
from __future__ import annotations

import re

# The last line of a Python traceback, then whatever calls itself an error.
_PATTERNS = (
    re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b:? .+)$"),
    re.compile(r"(start operation timed out).*"),
    re.compile(r"\b((?:error|ERROR|Error)\b.*)$"),
    re.compile(r"^\[supervisor\] (?!the container ended|started container|adopted|waiting)(.+)$"),
)
_NOISE = re.compile(r"Engine core initialization failed|See root cause above|cancelled|^\s*File ")


def failure_reason(lines: list[str]) -> str:
    """The line that best says why a start failed.

    The engine's own last exception comes first, but for those that only point to another one above; then lines that
    call themselves errors, then what the supervisor says, then the last line there is.
    """
    lines = [line.strip() for line in lines if line.strip()]
    for pattern in _PATTERNS:
        for line in reversed(lines):
            found = pattern.search(line)
            if found and not _NOISE.search(line):
                return found.group(1).strip()
    return lines[-1] if lines else "it left no line in its log"
