"""Values from templates as plain Python data."""

from __future__ import annotations

from typing import Any


def plain(value: Any) -> Any:
    """The same value in plain dicts, lists, texts and numbers.

    What Ansible hands to a filter are subclasses of these that template lazily and carry tags; pure logic and JSON should
    see none of that.
    """
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value
