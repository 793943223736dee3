"""What is ours on a machine, and where it lies.

Units and environment files carry MARK in their first line, containers carry it as a label, and a record lists every
instance. Only what is marked is ever changed or removed; anything else of the same name is somebody's work.
"""
from __future__ import annotations

import json
import socket
from pathlib import Path

MARK = "Managed by llmops.ascend"
HEADER = "# " + MARK + ": do not edit"
MANAGER = "llmops.ascend"

LABEL_MANAGED_BY = "llmops.managed-by"
LABEL_INSTANCE = "llmops.instance"
LABEL_FINGERPRINT = "llmops.fingerprint"
LABEL_DEVICES = "llmops.devices"

RECORD_SCHEMA = 1
RECORD_KEYS = ("deployment", "service", "index", "runtime", "devices", "port", "cpus", "numa_nodes", "address")


class Paths:
    """The files of instances below one root directory ("/" on a machine, a temporary directory in tests)."""

    def __init__(self, root: str | Path = "/") -> None:
        self.specifications = Path(root, "etc/llmops/instances")
        self.units = Path(root, "etc/systemd/system")
        self.record = Path(root, "var/lib/llmops/instances.json")
        self.salt = Path(root, "var/lib/llmops/fingerprint.salt")
        self.runtime = Path(root, "run/llmops/instances")

    def specification(self, name: str) -> Path:
        """The instance's specification: JSON, world-readable, no secrets."""
        return self.specifications / f"{name}.json"

    def environment(self, name: str) -> Path:
        """The instance's secrets in docker's --env-file syntax, readable by root only."""
        return self.specifications / f"{name}.env"

    def unit(self, name: str) -> Path:
        """The instance's systemd unit."""
        return self.units / f"{name}.service"


def is_marked(text: str | None) -> bool:
    """Whether a unit or environment file is ours: its first line says so."""
    return text is not None and MARK in text.split("\n", 1)[0]


def empty_record() -> dict:
    """A record without instances."""
    return {"schema": RECORD_SCHEMA, "managed_by": MANAGER, "instances": {}}


def parse_record(text: str | None, path: str | Path) -> dict:
    """Read the record of a machine's instances.

    `text` is the file's content or None where there is no file.
    Returns {"schema": 1, "managed_by": "llmops.ascend", "instances": {NAME: {deployment, service, index, ...}}}.
    Raises ValueError where the file is not such a record: guessing here could remove somebody else's instances.
    """
    if text is None:
        return empty_record()
    advice = "repair it or move it away; instances are found again by their specifications"
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{socket.gethostname()}: {path} is not JSON ({error}): {advice}") from error
    if not (isinstance(record, dict) and record.get("schema") == RECORD_SCHEMA
            and record.get("managed_by") == MANAGER and isinstance(record.get("instances"), dict)):
        raise ValueError(
            f"{socket.gethostname()}: {path} is not a record of {MANAGER}, schema {RECORD_SCHEMA}: {advice}")
    return record


def record_entry(specification: dict) -> dict:
    """What the record keeps of an instance's specification."""
    entry = {key: specification.get(key) for key in RECORD_KEYS}
    entry["unit"] = specification["name"] + ".service"
    return entry
