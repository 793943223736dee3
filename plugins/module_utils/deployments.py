"""Deployments as the operator writes them, made whole: preset, deployment and overrides merged and checked.

The result is what every later stage reads, with every key present (see FIELDS and `resolve_deployments`).
"""

from __future__ import annotations

import copy
import re
from typing import Any, Callable, NamedTuple

from ansible_collections.llmops.ascend.plugins.module_utils.vllm_cli import either, nearest

REQUIRED = object()
_UNIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*$")


class Field(NamedTuple):
    """A key of a deployment: its default, and what is wrong with a value (None: nothing)."""

    default: Any
    fault: Callable[[Any], str | None]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(least: int, most: int = 2 ** 31 - 1, none: bool = False) -> Callable[[Any], str | None]:
    def fault(value: Any) -> str | None:
        if (none and value is None) or (_is_int(value) and least <= value <= most):
            return None
        upper = f" and at most {most}" if most < 2 ** 31 - 1 else ""
        return f"a whole number of at least {least}{upper}"
    return fault


def _text(none: bool = False) -> Callable[[Any], str | None]:
    def fault(value: Any) -> str | None:
        if (none and value is None) or (isinstance(value, str) and value.strip()):
            return None
        return "a text"
    return fault


def _path(value: Any) -> str | None:
    return None if isinstance(value, str) and value.startswith("/") else "an absolute path"


def _one_of(*choices: str) -> Callable[[Any], str | None]:
    return lambda value: None if value in choices else either(choices)


def _names(value: Any) -> str | None:
    names = value if isinstance(value, list) else [value]
    if names and all(isinstance(name, str) and name.strip() for name in names) and len(set(names)) == len(names):
        return None
    return "a name, or a list of different names (aliases)"


def _count(value: Any) -> str | None:
    return None if value == "all" or (_is_int(value) and value >= 0) else "a number or `all`"


def _device_ids(value: Any) -> str | None:
    if value == "all":
        return None
    if isinstance(value, list) and value and all(_is_int(item) and item >= 0 for item in value):
        return None if len(set(value)) == len(value) else "a list in which no device comes twice"
    return "`all` or a list of device ids"


def _dictionary(value: Any) -> str | None:
    return None if isinstance(value, dict) and all(isinstance(key, str) for key in value) else "a dictionary"


def _text_list(value: Any) -> str | None:
    good = isinstance(value, list) and all(isinstance(item, str) and item for item in value)
    return None if good else "a list of texts"


def _positive(value: Any) -> str | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    return None if good else "a number above 0"


CONTAINER_FIELDS: dict[str, Field] = {
    "shm_size": Field("1g", _text()),
    "volumes": Field([], _text_list),
    "devices": Field([], _text_list),
    "options": Field([], _text_list),
}

FIELDS: dict[str, Field] = {
    "preset": Field(None, _text(none=True)),
    "service": Field(None, _text(none=True)),
    "model": Field(REQUIRED, _names),
    "model_path": Field(REQUIRED, _path),
    "model_source": Field(None, _text(none=True)),
    "runtime": Field("container", _one_of("container", "venv")),
    "image": Field(None, _text(none=True)),
    "vllm_version": Field(None, _text(none=True)),
    "vllm_ascend_version": Field(None, _text(none=True)),
    "cann_version": Field(None, _text(none=True)),
    "tensor_parallel_size": Field(1, _integer(1)),
    "pipeline_parallel_size": Field(1, _integer(1)),
    "data_parallel_size": Field(1, _integer(1)),
    "instances": Field("all", _count),
    "devices": Field("all", _device_ids),
    "expected_devices": Field(None, _integer(1, none=True)),
    "first_port": Field(8000, _integer(1, 65535)),
    "numa_binding": Field("node", _one_of("node", "cores", "none")),
    "args": Field({}, _dictionary),
    "args_check": Field("error", _one_of("error", "warn", "off")),
    "env": Field({}, _dictionary),
    "container": Field({}, _dictionary),
    "start_timeout_s": Field(3600, _integer(1)),
    "stop_timeout_s": Field(60, _integer(1)),
    "weight": Field(1, _positive),
}
# Variables this project sets itself, each with what decides it.
RESERVED_ENV: dict[str, str] = {
    "VLLM_API_KEY": "services.<service>.api_key",
    "ASCEND_RT_VISIBLE_DEVICES": "`devices`",
    "ASCEND_VISIBLE_DEVICES": "`devices`",
}
# Dictionaries that are merged key by key; a null there takes a key of the preset away.
_MERGED = ("args", "env", "container")


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Later layers win; args, env and container are merged key by key, and a null in them removes the key."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if key in _MERGED and isinstance(value, dict) and isinstance(merged.get(key, {}), dict):
                merged[key] = {**merged.get(key, {}), **value}
            else:
                merged[key] = value
    for key in _MERGED:
        if isinstance(merged.get(key), dict):
            merged[key] = {name: value for name, value in merged[key].items() if value is not None}
    return copy.deepcopy(merged)


def with_registry(image: str, registry: str) -> str:
    """The image as a closed site has it: the host part replaced (``quay.io/a/b:c`` → ``REGISTRY/a/b:c``)."""
    first, slash, rest = image.partition("/")
    has_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
    return f"{registry.rstrip('/')}/{rest if has_host else image}" if registry else image


def resolve_deployments(deployments: dict[str, dict], overrides: dict[str, dict], presets: dict[str, dict],
                        services: dict[str, dict] | None, image_registry: str = "",
                        machine: str = "") -> tuple[dict[str, dict], list[dict]]:
    """The machine's deployments by name with every key present, and what is wrong: ``({NAME: {...}}, findings)``.

    `presets` maps a preset's name to its ``deployment`` part; `services` is the inventory's (None: not checked). A finding is
    ``{"level": "error", "message"}``, one line naming machine, deployment, key, value and remedy; a deployment with an
    error is left out. Beside the operator's keys a resolved deployment has `name`, `served_names` (list), `model` (the
    first of them), `devices_per_instance` and `max_concurrent` (``args.max_num_seqs`` or None).
    """
    where = machine + ": " if machine else ""
    messages: list[str] = []
    resolved: dict[str, dict] = {}
    for name in sorted(set(overrides) - set(deployments)):
        messages.append(f"deployment_overrides.{name}: no such deployment here; {_suggest(name, deployments)}")
    for name, written in deployments.items():
        faults: list[str] = []
        layers = [written or {}, overrides.get(name) or {}]
        if not all(isinstance(layer, dict) for layer in layers):
            messages.append(f"deployments.{name}: write a dictionary")
            continue
        chosen = merge(*layers).get("preset")
        if chosen is not None:
            if chosen in presets:
                layers.insert(0, presets[chosen])
            else:
                # What the preset would have given is not missing besides.
                messages.append(f"deployments.{name}.preset: there is no preset {chosen!r}; {_suggest(chosen, presets)}")
                continue
        whole = merge(*layers)
        if not _UNIT_NAME.match(name):
            faults.append(": its name becomes that of systemd units; use letters, digits, '.', '_' and '-'")
        faults += _faults(whole, FIELDS, "")
        if isinstance(whole.get("env"), dict):
            faults += _environment_faults(whole["env"])
        if isinstance(whole.get("container"), dict):
            faults += _faults(whole["container"], CONTAINER_FIELDS, ".container")
        if not faults:
            whole = _complete(name, whole, image_registry)
            faults = _contradictions(whole, services)
        messages += [f"deployments.{name}{fault}" for fault in faults]
        if not faults:
            resolved[name] = whole
    return resolved, [{"level": "error", "message": where + message} for message in messages]


def _suggest(name: Any, known: dict[str, Any]) -> str:
    like = nearest(str(name), map(str, known))
    if like:
        return f"did you mean {either(like)}?"
    return f"there is {', '.join(sorted(map(str, known)))}" if known else "there is none"


def _faults(given: dict[str, Any], fields: dict[str, Field], path: str) -> list[str]:
    faults = []
    for key, value in given.items():
        if key not in fields:
            faults.append(f"{path}.{key}: no such key; {_suggest(key, fields)}")
            continue
        wanted = fields[key].fault(value)
        if wanted:
            faults.append(f"{path}.{key} is {_shown(value)}; write {wanted}")
    for key, field in fields.items():
        if field.default is REQUIRED and key not in given:
            faults.append(f"{path}.{key} is missing; set it, or name a preset that has it")
    return faults


def _environment_faults(env: dict[str, Any]) -> list[str]:
    """Values are not shown: they may be secret."""
    faults = []
    for name, value in env.items():
        if name in RESERVED_ENV:
            faults.append(f".env.{name} is set by the project; use {RESERVED_ENV[name]} instead")
        elif not re.match(r"[A-Za-z_][A-Za-z0-9_]*$", name):
            faults.append(f".env.{name} is no name of a variable; use letters, digits and '_'")
        elif isinstance(value, bool) or not isinstance(value, (str, int, float)):
            faults.append(f".env.{name} is neither text nor number; quote it")
        elif "\n" in str(value):
            faults.append(f".env.{name} has several lines; an environment file holds one for each variable")
    return faults


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def _complete(name: str, given: dict[str, Any], image_registry: str) -> dict[str, Any]:
    whole = {key: copy.deepcopy(given.get(key, field.default)) for key, field in FIELDS.items()}
    whole["container"] = {key: copy.deepcopy(whole["container"].get(key, field.default))
                          for key, field in CONTAINER_FIELDS.items()}
    names = whole["model"] if isinstance(whole["model"], list) else [whole["model"]]
    whole["env"] = {key: str(value) for key, value in whole["env"].items()}
    whole.update(
        name=name,
        model=names[0],
        served_names=names,
        image=with_registry(whole["image"], image_registry) if whole["image"] else None,
        devices_per_instance=(whole["tensor_parallel_size"] * whole["pipeline_parallel_size"]
                              * whole["data_parallel_size"]),
        max_concurrent=whole["args"].get("max_num_seqs"),
    )
    return whole


def _contradictions(deployment: dict[str, Any], services: dict[str, dict] | None) -> list[str]:
    faults = []
    size, count = deployment["devices_per_instance"], deployment["instances"]
    if deployment["runtime"] == "container" and not deployment["image"]:
        faults.append(".image is missing; a container needs one")
    if services is not None and deployment["service"] is not None and deployment["service"] not in services:
        hint = _suggest(deployment["service"], services)
        faults.append(f".service: {deployment['service']!r} is not among the services; {hint}, or define it under `services`")
    limits = [("devices", len(deployment["devices"]))] if deployment["devices"] != "all" else []
    if deployment["expected_devices"] is not None:
        limits.append(("expected_devices", deployment["expected_devices"]))
    for key, limit in limits:
        wanted = size * (count if count != "all" else 1)
        if wanted > limit:
            asked = f"an instance of {size}" if count in ("all", 1) else f"{count} instances of {size} each"
            faults.append(f".{key}: {limit} are too few for {asked} ({wanted}); lower instances or the parallel sizes")
    if count != "all" and deployment["first_port"] + count - 1 > 65535:
        faults.append(f".first_port is {deployment['first_port']}; {count} instances do not fit below port 65536")
    return faults
