"""The fingerprint of what reaches an engine, and in words what changed between two of them.

The fingerprint is worn by what runs (a container label). An instance restarts when it differs from the wanted one and
for no other reason. It is computed on the machine, because secrets enter it as an HMAC with a salt that never leaves
the machine.
"""
from __future__ import annotations

import hashlib
import hmac
import json

# What the engine can notice. A name, a timeout or the image's tag is not among it.
REACHING = ("runtime", "image_id", "arguments", "env", "devices", "device_nodes", "cpus", "numa_nodes", "volumes",
            "driver_volumes", "shm_size", "options", "model_manifest")
_LONGEST = 100


def secret_digests(secrets: dict, salt: str) -> dict:
    """{"VLLM_API_KEY": hex HMAC-SHA256}: tells a changed secret, tells nothing else without the root-only salt."""
    return {key: hmac.new(salt.encode(), str(value).encode(), hashlib.sha256).hexdigest()
            for key, value in sorted(secrets.items())}


def fingerprint(specification: dict, digests: dict) -> str:
    """SHA-256 in hex over the canonical JSON of all that reaches the engine.

    `specification` is an instance specification, `digests` the HMACs of its secrets by variable name.
    """
    reaching = {key: specification.get(key) for key in REACHING}
    reaching["secrets"] = digests
    canonical = json.dumps(reaching, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def changes(previous: dict, wanted: dict) -> list[str]:
    """What differs between two documents (specification plus `secrets` digests), one readable line each.

    For example "arguments: --max-num-seqs 32 -> 16" or "secret VLLM_API_KEY changed". Values of secrets never appear.
    """
    lines = _mapping_changes("arguments", _options(previous.get("arguments")), _options(wanted.get("arguments")))
    lines += _mapping_changes("environment", previous.get("env") or {}, wanted.get("env") or {}, joint="=")
    for key in ("volumes", "driver_volumes", "device_nodes", "options"):
        lines += _list_changes(key.replace("_", " "), previous.get(key) or [], wanted.get(key) or [])
    for key in ("runtime", "devices", "cpus", "numa_nodes", "shm_size"):
        if previous.get(key) != wanted.get(key):
            lines.append("{}: {} -> {}".format(key.replace("_", " "), _text(previous.get(key)), _text(wanted.get(key))))
    if previous.get("image_id") != wanted.get("image_id"):
        lines.append(f"image: {_image(previous)} -> {_image(wanted)}")
    if previous.get("model_manifest") != wanted.get("model_manifest"):
        lines.append("model files: manifest {} -> {}".format(
            _short(previous.get("model_manifest")), _short(wanted.get("model_manifest"))))
    before, after = previous.get("secrets") or {}, wanted.get("secrets") or {}
    for key in sorted(set(before) | set(after)):
        if before.get(key) != after.get(key):
            lines.append("secret {} {}".format(key, "added" if key not in before else
                                                 "removed" if key not in after else "changed"))
    return lines


def _options(arguments: list | None) -> dict:
    """argv as {"vllm serve /path": None, "--max-num-seqs": "32", "--trust-remote-code": None}.

    An option takes all words up to the next one, so that lists compare whole.
    """
    options: dict = {}
    option, values = "", []
    for word in list(arguments or []) + ["--"]:
        if not str(word).startswith("--"):
            values.append(str(word))
            continue
        if option:
            options[option] = " ".join(values) if values else None
        elif values:
            options[" ".join(values)] = None
        option, _, value = str(word).partition("=")
        values = [value] if value else []
    return options


def _mapping_changes(title: str, before: dict, after: dict, joint: str = " ") -> list[str]:
    lines = []
    for key in sorted(set(before) | set(after)):
        if key not in before:
            lines.append(f"{title}: {_pair(key, after[key], joint)} added")
        elif key not in after:
            lines.append(f"{title}: {_pair(key, before[key], joint)} removed")
        elif before[key] != after[key]:
            lines.append(f"{title}: {_pair(key, before[key], joint)} -> {_text(after[key])}")
    return lines


def _list_changes(title: str, before: list, after: list) -> list[str]:
    added = [f"{title}: {_text(item)} added" for item in after if item not in before]
    removed = [f"{title}: {_text(item)} removed" for item in before if item not in after]
    if not added and not removed and before != after:
        return [f"{title}: order changed"]
    return removed + added


def _pair(key: str, value: object, joint: str) -> str:
    return key if value is None else f"{key}{joint}{_text(value)}"


def _text(value: object) -> str:
    if value is None:
        return "none"
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST - 3] + "..."


def _short(identity: str | None) -> str:
    return "none" if not identity else str(identity).rsplit(":", 1)[-1][:12]


def _image(document: dict) -> str:
    return "{} ({})".format(document.get("image"), _short(document.get("image_id")))
