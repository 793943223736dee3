"""The command line of ``vllm serve``: rendered from a deployment's `args`, and checked before anything is loaded.

What an engine accepts is data: presets/vllm/<version>.json lists every option as vLLM's own parser knows it
(`{"vllm", "options": {"--max-model-len": {"aliases", "takes_value", "nargs", "type", "choices", "metavar", "default"}},
"tool_parsers", "reasoning_parsers"}`, written by presets/vllm/make_catalogue.py; `type` is int, size, float, json or text, null for a
switch, and nargs is argparse's). A mistake found here costs a second, one found by the engine a ten-minute load.

Controller only: machines never need the catalogues.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from pathlib import Path
from typing import Any, Iterable, NamedTuple

CATALOGUES = Path(__file__).resolve().parents[2] / "presets" / "vllm"

# Options this project sets itself, each with the variable that decides it.
RESERVED: dict[str, str] = {
    "help": "nothing: it prints the options and exits",
    "config": "args: a second source of options would hide what an instance runs with",
    "host": "service_address of the machine",
    "port": "first_port of the deployment",
    "uds": "service_address of the machine and first_port of the deployment",
    "api_key": "services.<service>.api_key",
    "model": "model_path of the deployment",
    "served_model_name": "model of the deployment (a list gives aliases)",
    "tensor_parallel_size": "tensor_parallel_size of the deployment",
    "pipeline_parallel_size": "pipeline_parallel_size of the deployment",
    "data_parallel_size": "data_parallel_size of the deployment",
    "device_ids": "devices of the deployment",
    "numa_bind": "numa_binding of the deployment",
    "numa_bind_nodes": "numa_binding of the deployment",
    "numa_bind_cpus": "numa_binding of the deployment",
    "ssl_keyfile": "the load balancer: backends speak plain HTTP",
    "ssl_certfile": "the load balancer: backends speak plain HTTP",
}

# What numbers may be, where vLLM's configuration says it (vllm/config/cache.py, model.py, scheduler.py): least, most.
RANGES: dict[str, tuple[float, float]] = {
    "block_size": (1, math.inf),
    "gpu_memory_utilization": (0.01, 1),
    "max_model_len": (-1, math.inf),
    "max_num_batched_tokens": (1, math.inf),
    "max_num_seqs": (1, math.inf),
}
# vllm/utils/argparse_utils.py and arg_utils.py, human_readable_int: k is 1000, K is 1024.
_SIZE = re.compile(r"\d+(?:\.\d+)?[kKmMgGtT]?|-?\d+")


class Choice(NamedTuple):
    """A catalogue chosen for a version; `exact` is False where that version has none of its own."""

    catalogue: dict
    exact: bool


def _version(text: str) -> tuple[int, ...] | None:
    match = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    return tuple(int(part) for part in match.group(1).split(".")) if match else None


@functools.lru_cache(maxsize=None)
def load_catalogues(directory: Path = CATALOGUES) -> dict[str, dict]:
    """All catalogues by version."""
    catalogues = {}
    for path in sorted(directory.glob("*.json")):
        catalogue = json.loads(path.read_text(encoding="utf-8"))
        catalogues[catalogue["vllm"]] = catalogue
    return catalogues


def choose_catalogue(version: str | None, directory: Path = CATALOGUES) -> Choice:
    """The catalogue of a vLLM version; else the nearest older one, else the oldest, else (version unknown) the newest.

    A local suffix (``0.18.0+empty``) does not change what the parser knows; a pre-release (``0.18.0rc1``) may.
    """
    catalogues = load_catalogues(directory)
    wanted = (version or "").strip().partition("+")[0].lstrip("v")
    if wanted in catalogues:
        return Choice(catalogues[wanted], True)
    ordered = sorted(catalogues.values(), key=lambda catalogue: _version(catalogue["vllm"]) or ())
    number = _version(wanted)
    if number is None:
        return Choice(ordered[-1], False)
    older = [catalogue for catalogue in ordered if (_version(catalogue["vllm"]) or ()) <= number]
    return Choice(older[-1] if older else ordered[0], False)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like this one, best first; empty when none is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
    return close or [other for other in known if name and (other.startswith(name) or name.startswith(other))][:count]


def either(names: Iterable[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def _json(value: Any) -> str:
    """Compact and in one order, so that the same setting is always the same argument."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def _word(value: Any) -> str:
    return _json(value) if isinstance(value, (dict, list, bool)) else str(value)


def render_arguments(deployment: dict, instance: dict, directory: Path = CATALOGUES) -> list[str]:
    """The argument vector of one instance.

    `deployment` is a resolved deployment, `instance` needs `address` and `port`. The API key is never among the arguments:
    it reaches the engine as VLLM_API_KEY. Options stand in alphabetical order, so that reordering an inventory restarts
    nothing. Values: True gives ``--flag``, False ``--no-flag`` where that exists, a dict compact JSON, a list several
    words or a JSON list, whichever the option takes.
    """
    return ["vllm", "serve", deployment["model_path"], "--served-model-name", *deployment["served_names"],
            "--host", instance["address"], "--port", str(instance["port"]), *render_options(deployment, directory)]


def render_options(deployment: dict, directory: Path = CATALOGUES) -> list[str]:
    """The part of the argument vector that all instances of a deployment share; see `render_arguments`."""
    options = choose_catalogue(deployment["vllm_version"], directory).catalogue["options"]
    argv = ["--tensor-parallel-size", str(deployment["tensor_parallel_size"])]
    for key in ("pipeline_parallel_size", "data_parallel_size"):
        if deployment[key] != 1:
            argv += [_option(key), str(deployment[key])]
    for key, value in sorted(deployment["args"].items()):
        name = _option(key)
        known = options.get(name)
        if value is True and not (known and known["takes_value"] and known["nargs"] != "?"):
            argv.append(name)
        elif value is False and not (known and known["takes_value"]):
            if known is None or "--no-" + name[2:] in known["aliases"]:
                argv.append("--no-" + name[2:])
        elif isinstance(value, list) and not (known and known["nargs"] is None):
            argv += [name, *map(_word, value)]
        else:
            word = _word(value)
            # argparse takes a word that begins with a dash for an option
            argv += [f"{name}={word}"] if word.startswith("-") else [name, word]
    return argv


def check_arguments(deployment: dict, where: str = "", directory: Path = CATALOGUES) -> list[dict]:
    """What is wrong with a resolved deployment's `args`: ``[{"level": "error" | "warning", "message"}]``.

    `where` begins every message (the machine). `args_check: warn` and an unknown vLLM version make warnings of errors, `off`
    leaves out all but the options that are set by other variables.
    """
    prefix = f"{where + ': ' if where else ''}deployment {deployment['name']}: "
    args = deployment["args"]
    choice = choose_catalogue(deployment["vllm_version"], directory)
    reserved = {key: name for key in sorted(args) for name in [_reserved(key, choice.catalogue["options"])] if name}
    findings = [
        {"level": "error", "message": f"{prefix}args.{key} is set by the project; use {RESERVED[name]} instead"}
        for key, name in reserved.items()
    ]
    if deployment["args_check"] == "off":
        return findings
    args = {key: value for key, value in args.items() if key not in reserved}
    version = choice.catalogue["vllm"]
    if not choice.exact:
        said = deployment["vllm_version"]
        findings.append({"level": "warning", "message": prefix + (
            f"no argument catalogue for vLLM {said}, checked against {version}; set args_check: off to skip the check"
            if said else
            f"vllm_version is not set, arguments were checked against vLLM {version}; set it to the version of the image")})
    level = "error" if choice.exact and deployment["args_check"] == "error" else "warning"
    for message in _mistakes(args, choice.catalogue):
        findings.append({"level": level, "message": prefix + message.replace("\n", "\\n")})
    return findings


def _reserved(key: str, options: dict[str, dict]) -> str | None:
    """The reserved option that a key means: by its name, by a short name of it, or cut short (argparse completes what is unambiguous)."""
    plain = _plain(key)
    if plain in RESERVED:
        return plain
    if _option(plain) in options:
        return None
    for name in RESERVED:
        if "-" + plain in options.get(_option(name), {}).get("aliases", ()):
            return name
    completed = [_plain(name) for name in options if name.startswith(_option(plain))]
    return completed[0] if len(completed) == 1 and completed[0] in RESERVED else None


def _mistakes(args: dict[str, Any], catalogue: dict) -> Iterable[str]:
    options, version = catalogue["options"], catalogue["vllm"]
    for key, value in sorted(args.items()):
        known = options.get(_option(key))
        if known is None or "-" in key:
            yield _unknown_option(key, options, version)
        elif known["takes_value"]:
            yield from _wrong_value(key, value, known)
        elif not isinstance(value, bool):
            yield f"args.{key} is a switch, {value!r} is no value for it; use true or false"
        elif value is False and "--no-" + _option(key)[2:] not in known["aliases"]:
            yield f"args.{key} cannot be switched off, vLLM {version} has no --no-{_option(key)[2:]}; leave it out (null)"
    for kind in ("tool", "reasoning"):
        key = "tool_call_parser" if kind == "tool" else "reasoning_parser"
        name, parsers = args.get(key), catalogue[kind + "_parsers"]
        # A plugin brings parsers that no catalogue can know.
        if name and name not in parsers and not args.get(f"{kind}_parser_plugin"):
            like = nearest(str(name), parsers)
            hint = f"did you mean {either(like)}?" if like else f"it has {', '.join(parsers)}"
            yield f"args.{key}: vLLM {version} has no {kind} parser {name!r}; {hint}"
    if args.get("enable_auto_tool_choice") and not args.get("tool_call_parser"):
        yield f"args.enable_auto_tool_choice needs args.tool_call_parser; vLLM {version} has {', '.join(catalogue['tool_parsers'])}"


def _unknown_option(key: str, options: dict[str, dict], version: str) -> str:
    plain = _plain(key)
    if plain != key and _option(plain) in options:
        return f"args.{key}: write {plain}, with underscores"
    if plain.startswith("no_") and _option(plain[3:]) in options:
        return f"args.{key}: write {plain[3:]}: false"
    short = [name for name, option in options.items() if "-" + plain in option["aliases"]]
    if short:
        return f"args.{key}: write {_plain(short[0])}, the whole name"
    like = nearest(plain, [name[2:].replace("-", "_") for name in options])
    hint = f"did you mean {either(like)}?" if like else f"see presets/vllm/{version}.json"
    return f"args.{key}: vLLM {version} has no option {_option(plain)}; {hint}"


def _wrong_value(key: str, value: Any, known: dict) -> Iterable[str]:
    several = known["nargs"] in ("+", "*")
    if value is True and known["nargs"] == "?":
        return
    if isinstance(value, bool):
        yield f"args.{key} takes a value, {str(value).lower()} is none; write the value, or null to leave it out"
        return
    if known["nargs"] == "+" and value == []:
        yield f"args.{key} takes at least one value, the list is empty; write one, or null to leave it out"
        return
    items = value if isinstance(value, list) and several else [value]
    wanted = [_wrong_type(item, known) for item in items]
    for item, want in zip(items, wanted):
        if want:
            yield f"args.{key}: {item!r} is not {want}"
        elif known["choices"] and str(item) not in known["choices"]:
            like = nearest(str(item), known["choices"])
            hint = f"did you mean {either(like)}?" if like else f"use {either(known['choices'])}"
            yield f"args.{key}: {item!r} is not one of its values; {hint}"
        elif key in RANGES:
            yield from _out_of_range(key, item)
    if not any(wanted) and isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            json.loads(value)
        except ValueError as error:
            yield f"args.{key}: {value!r} is not valid JSON ({error}); write it as a YAML dictionary"


def _wrong_type(value: Any, known: dict) -> str | None:
    """What a value should be; None for one that is it. Texts are taken as the command line takes them, ``None`` as vLLM's null."""
    kind = known["type"]
    if value == "None":
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float, dict, list)):
        return "a text, a number, a list or a dictionary; quote it"
    if kind == "json":
        # A text that looks like an object is checked for its form below.
        wrong = isinstance(value, str) and not _is_json(value) and value.lstrip()[:1] != "{"
        return "a YAML dictionary or JSON" if wrong else None
    if isinstance(value, list) and not isinstance(known["default"], list):
        return "a single value"
    if kind == "int":
        good = isinstance(value, int) or (isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip()))
        return None if good else "a whole number"
    if kind == "size":
        good = isinstance(value, int) or (isinstance(value, str) and (_SIZE.fullmatch(value) or value == "auto"))
        return None if good else "a whole number, as 32768, 32k (32000) or 32K (32768)"
    if kind == "float":
        return None if _number(value) is not None else "a number"
    return None


def _out_of_range(key: str, value: Any) -> Iterable[str]:
    least, most = RANGES[key]
    number = _number(value)
    if number is not None and not least <= number <= most:
        yield f"args.{key}: {value!r} is not {f'between {least} and {most}' if most < math.inf else f'at least {least}'}"


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
