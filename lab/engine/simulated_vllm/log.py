"""Lines in vLLM's format: `(EngineCore pid=42) INFO 08-29 20:49:01 [core.py:58] ...`."""

from __future__ import annotations

import os
import sys
import time


class Logger:
    """Logs for one process of the engine; `process` is the name vLLM gives it."""

    def __init__(self, process: str) -> None:
        self.process = process

    def info(self, where: str, message: str) -> None:
        self._write("INFO", where, message)

    def error(self, where: str, message: str) -> None:
        self._write("ERROR", where, message)

    def raw(self, line: str) -> None:
        """A line that does not come from vLLM's logger: progress bars, tracebacks, uvicorn."""
        sys.stderr.write(f"{self._prefix()} {line}\n")
        sys.stderr.flush()

    def _prefix(self) -> str:
        return f"({self.process} pid={os.getpid()})"

    def _write(self, level: str, where: str, message: str) -> None:
        stamp = time.strftime("%m-%d %H:%M:%S")
        for line in message.splitlines():
            sys.stderr.write(f"{self._prefix()} {level} {stamp} [{where}] {line}\n")
        sys.stderr.flush()
