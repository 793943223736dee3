"""The lab's settings of every simulated engine on a machine, and the faults that tests switch on.

The file lies in the driver directory because that is mounted into every engine container, read-only. It may change at any
time; whoever asks gets the newest reading, at the cost of one `stat` a second.

    {"load_s": 3, "prefill_us_per_token": 125, "faults": {"8000": "hang", "*": {"slow_prefill_s": 5}}}
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

DRIVER_LAB_DIRECTORY = Path(os.environ.get("LLMOPS_LAB_DRIVER", "/usr/local/Ascend/driver/lab"))

# name -> does it take a value?
FAULTS = {
    "hang": False,  # connections are accepted, nothing is answered, /health included
    "hang_engine": False,  # /health says 200, requests are taken, no token ever comes
    "slow_prefill_s": True,  # every prefill takes this many seconds longer, silently
    "error_503": False,  # /v1 answers 503, /health 200
    "reset": False,  # /v1 connections are reset (RST), /health answers 200
    "crash_on_load": False,  # the engine core dies while it loads; only from the file
}

Fault = dict[str, float]  # {name: value}; the value is 1 for faults that take none


def parse_fault(value: Any) -> Fault | None:
    """A fault as tests write it: None, "hang" or {"slow_prefill_s": 5}.

    Raises ValueError that names the known ones.
    """
    if value is None:
        return None
    if isinstance(value, str) and FAULTS.get(value) is False:
        return {value: 1}
    if isinstance(value, dict) and len(value) == 1:
        [(name, amount)] = value.items()
        if FAULTS.get(name) and isinstance(amount, (int, float)) and not isinstance(amount, bool) and amount >= 0:
            return {name: amount}
    known = ", ".join(f'{{"{name}": SECONDS}}' if amount else f'"{name}"' for name, amount in FAULTS.items())
    raise ValueError(f"unknown fault {value!r}: use null or one of {known}")


@dataclass(frozen=True)
class Settings:
    """How a simulated engine behaves. The defaults are near what one 27B model on two 910B4 does, made a little quicker."""

    load_s: float = 3.0
    prefill_us_per_token: float = 125.0  # per token that the prefix cache does not have
    decode_ms_per_step: float = 10.0  # one token for every running sequence
    decode_ms_per_sequence: float = 0.2  # added to a step for each sequence in it
    kv_cache_tokens: int = 524288
    answer_tokens: int = 64  # about how long an answer gets that max_tokens does not cut
    faults: dict[str, Any] = field(default_factory=dict)  # port as text, or "*" for all -> fault

    def fault(self, port: int) -> Fault | None:
        return parse_fault(self.faults.get(str(port), self.faults.get("*")))


class SettingsFile:
    """The newest readable settings. A broken file keeps the last good ones and is reported once."""

    CHECK_EVERY_S = 1.0

    def __init__(self, path: Path = DRIVER_LAB_DIRECTORY / "engine.json") -> None:
        self.path = path
        self._settings = Settings()
        self._stamp: tuple[int, int] | None = None
        self._next_check = 0.0

    def current(self) -> Settings:
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + self.CHECK_EVERY_S
            self._reload()
        return self._settings

    def _reload(self) -> None:
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
        except OSError:
            stamp = None
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if stamp is None:
            self._settings = Settings()
            return
        try:
            wanted = json.loads(self.path.read_text())
            unknown = wanted.keys() - {entry.name for entry in fields(Settings)}
            if unknown:
                raise ValueError(f"unknown settings {sorted(unknown)}")
            settings = Settings(**wanted)
            for fault in settings.faults.values():
                parse_fault(fault)
            self._settings = settings
        except (OSError, ValueError, TypeError, AttributeError) as error:
            print(f"WARNING {self.path} is not used: {error}", flush=True)
