"""`vllm serve` arguments, parsed by the catalogue of the real version.

The catalogue is a JSON file made from the real parser: every option with its aliases, whether it takes a value, how many,
and its choices, and the names of the tool and reasoning parsers. What the real parser refuses is refused here, with the
words of argparse or of vLLM.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Options that are numbers although the catalogue shows no number as their default.
INTEGERS = {
    "--api-server-count",
    "--block-size",
    "--data-parallel-rank",
    "--data-parallel-rpc-port",
    "--data-parallel-size-local",
    "--data-parallel-start-rank",
    "--distributed-timeout-seconds",
    "--max-cpu-loras",
    "--max-cudagraph-capture-size",
    "--max-log-len",
    "--max-num-seqs",
    "--max-parallel-loading-workers",
    "--num-gpu-blocks-override",
    "--spec-tokens",
}
READABLE_INTEGERS = {"--kv-cache-memory-bytes", "--max-model-len", "--max-num-batched-tokens"}

# Real, but nothing in the lab would behave differently: better refused than quietly ignored.
NOT_SIMULATED = ("config", "grpc", "headless", "ssl_certfile", "ssl_keyfile", "uds")


class ArgumentsError(Exception):
    """Refused after parsing, as vLLM does it: a traceback's last line and exit code 1."""


@dataclass(frozen=True)
class Config:
    """What the simulated engine needs of its command line, with defaults filled in."""

    version: str
    model: str  # the model's directory
    served_names: list[str]
    host: str
    port: int
    api_keys: list[str]
    world_size: int  # devices: tensor x pipeline x data parallel size
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks_override: int | None
    prefix_caching: bool
    load_format: str
    auto_tools: bool
    tool_parser: str | None
    reasoning_parser: str | None
    prompt_tokens_details: bool
    force_include_usage: bool
    shutdown_timeout_s: int  # 0: requests in flight are aborted, as in vLLM
    access_log: bool


def readable_integer(text: str) -> int:
    """`262144`, `256k` (thousands) or `256K` (units of 1024), as vLLM reads them; -1 means: derive it."""
    if text == "auto":
        return -1
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to <function human_readable_int>.")
    number, suffix = match.groups()
    base = 1000 if suffix.islower() else 1024
    return int(float(number) * base ** " kmgt".index(suffix.lower() or " "))


def json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to <function loads>.") from None


def value_type(name: str, option: dict[str, Any]) -> Any:
    """The `type` argparse gets for an option of the catalogue, or None for text."""
    default = option["default"]
    if option["choices"]:
        return None
    if name in READABLE_INTEGERS:
        return readable_integer
    if isinstance(default, float) or name.endswith("-gb"):
        return float
    if name in INTEGERS or (isinstance(default, int) and not isinstance(default, bool)):
        return int
    takes_json = name.endswith(("-config", "-kwargs")) and name not in ("--config", "--generation-config")
    return json_value if takes_json or isinstance(default, dict) else None


def make_parser(catalogue: dict[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm serve", usage="vllm serve [model_tag] [options]")
    parser.add_argument("model_tag", nargs="?")
    for name, option in catalogue["options"].items():
        if name == "--help":
            continue
        negation = f"--no-{name[2:]}"
        aliases = [alias for alias in option["aliases"] if alias != negation]
        if option["takes_value"]:
            parser.add_argument(
                name,
                *aliases,
                nargs=option["nargs"],
                choices=option["choices"],
                metavar=option["metavar"],
                type=value_type(name, option),
            )
        elif negation in option["aliases"]:
            parser.add_argument(name, *aliases, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(name, *aliases, action="store_true", default=None)
    return parser


def normalise(arguments: list[str]) -> list[str]:
    """Underscores in option names become dashes, and `--a-config.b.c 1` becomes `--a-config '{"b": {"c": 1}}'`."""
    plain: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            plain.append(argument)
            continue
        name, equals, value = argument.partition("=")
        name, *keys = name.split(".")
        name = name.replace("_", "-")
        if not keys:
            plain.append(name + equals + value)
            continue
        value = value if equals else next(rest, "")
        place = nested.setdefault(name, {})
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        try:
            place[keys[-1]] = json.loads(value)
        except ValueError:
            place[keys[-1]] = value
    for name, value in nested.items():
        plain += [name, json.dumps(value)]
    return plain


def model_length(model: Path, wanted: int | None) -> int:
    """max_model_len: what the model's config.json says, or the smaller number asked for.

    Raises ArgumentsError for a directory without config.json and for a number the model does not allow.
    """
    try:
        config = json.loads((model / "config.json").read_text())
    except OSError:
        raise ArgumentsError(
            f"OSError: Can't load the configuration of '{model}'. If you were trying to load it from "
            f"'https://huggingface.co/models', make sure you don't have a local directory with the same name. Otherwise, "
            f"make sure '{model}' is the correct path to a directory containing a config.json file"
        ) from None
    except ValueError as error:
        raise ArgumentsError(f"OSError: It looks like the config file at '{model}/config.json' is not a valid JSON file: {error}") from None
    derived = config.get("text_config", config).get("max_position_embeddings", 262144)
    if wanted is None or wanted == -1:
        return derived
    if wanted > derived:
        raise ArgumentsError(
            f"ValueError: User-specified max_model_len ({wanted}) is greater than the derived max_model_len "
            f"(max_position_embeddings={derived} in model's config.json). To allow overriding this maximum, "
            f"set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1."
        )
    return wanted


def parse_serve(arguments: list[str], catalogue: dict[str, Any], environment: dict[str, str]) -> Config:
    """A Config from what follows `vllm serve`.

    Ends the process with code 2 where argparse would; raises ArgumentsError where vLLM raises after parsing.
    """
    parser = make_parser(catalogue)
    values, unknown = parser.parse_known_args(normalise(arguments))
    if unknown:
        sys.stderr.write("usage: vllm [-h] [-v] {chat,complete,serve,launch,bench,collect-env,run-batch} ...\n")
        sys.stderr.write(f"vllm: error: unrecognized arguments: {' '.join(unknown)}\n")
        raise SystemExit(2)

    def get(name: str, default: Any = None) -> Any:
        value = getattr(values, name, None)
        return default if value is None else value

    for name in NOT_SIMULATED:
        if get(name):
            raise ArgumentsError(f"NotImplementedError: the simulated engine has no --{name.replace('_', '-')}")

    auto_tools = get("enable_auto_tool_choice", False)
    tool_parser = get("tool_call_parser")
    if auto_tools and not tool_parser:
        raise ArgumentsError("TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser")
    if auto_tools and tool_parser not in catalogue["tool_parsers"]:
        known = ",".join(catalogue["tool_parsers"])
        raise ArgumentsError(f"KeyError: 'invalid tool call parser: {tool_parser} (chose from {{ {known} }})'")
    reasoning_parser = get("reasoning_parser") or None
    if reasoning_parser and reasoning_parser not in catalogue["reasoning_parsers"]:
        known = ",".join(catalogue["reasoning_parsers"])
        raise ArgumentsError(f"KeyError: 'invalid reasoning parser: {reasoning_parser} (chose from {{ {known} }})'")

    model = get("model_tag") or get("model") or catalogue["options"]["--model"]["default"]
    max_model_len = model_length(Path(model), get("max_model_len"))
    parallel = [get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data")]
    keys = get("api_key") or [environment.get("VLLM_API_KEY", "")]
    return Config(
        version=catalogue["vllm"],
        model=model,
        served_names=get("served_model_name") or [model],
        host=get("host", "0.0.0.0"),
        port=int(get("port", 8000)),
        api_keys=[key for key in keys if key],
        world_size=parallel[0] * parallel[1] * parallel[2],
        max_model_len=max_model_len,
        max_num_seqs=get("max_num_seqs", 256),
        max_num_batched_tokens=get("max_num_batched_tokens", 8192),
        block_size=get("block_size", 16),
        num_blocks_override=get("num_gpu_blocks_override"),
        prefix_caching=get("enable_prefix_caching", True),
        load_format=get("load_format", "auto"),
        auto_tools=auto_tools,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        prompt_tokens_details=get("enable_prompt_tokens_details", False),
        force_include_usage=get("enable_force_include_usage", False),
        shutdown_timeout_s=get("shutdown_timeout", 0),
        access_log=not get("disable_uvicorn_access_log", False),
    )
