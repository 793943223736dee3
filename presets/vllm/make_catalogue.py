"""Writes down what the installed vLLM's `vllm serve` accepts, as a catalogue for this directory.

Run it with the Python of the engine, in its image or environment, and keep what it prints as <version>.json here:

    docker run --rm -i --entrypoint python3 IMAGE - < presets/vllm/make_catalogue.py > presets/vllm/VERSION.json

It asks vLLM's own parser, so plugins of the image (vllm-ascend) are in it. The form is described in plugins/module_utils/vllm_cli.py.
Nothing is loaded and no device is needed: the parser is built for the platform of the plugin, or for the CPU. A vLLM that is built for
another platform and older than 0.30 wants its device. Standard library and vLLM only.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys


def main():
    """Prints the catalogue; what vLLM itself prints goes to the standard error."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    with contextlib.redirect_stdout(sys.stderr):
        import vllm
        catalogue = describe(serve_parser(), vllm.__version__.partition("+")[0], parsers("tool"), parsers("reasoning"))
    json.dump(catalogue, sys.stdout, indent=1)
    sys.stdout.write("\n")


def serve_parser():
    """The parser of `vllm serve`, built by its own subcommand."""
    serve = importlib.import_module("vllm.entrypoints.cli.serve")
    flexible = first("FlexibleArgumentParser", "vllm.utils.argparse_utils", "vllm.utils")
    commands = flexible().add_subparsers(dest="subparser")
    return [command.subparser_init(commands) for command in serve.cmd_init()][0]


def parsers(kind):
    """The registered parsers of tool calls or of reasoning, ordered by name."""
    if kind == "tool":
        manager = first("ToolParserManager", "vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers")
    else:
        manager = first("ReasoningParserManager", "vllm.reasoning")
    return sorted(manager.list_registered())


def first(name, *modules):
    """The object of this name in the first of the modules that has it: they moved between versions."""
    for module in modules:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise SystemExit(f"this vLLM has no {name} in {' or '.join(modules)}; say where it is in this script")


def describe(parser, version, tool_parsers, reasoning_parsers):
    """The catalogue of an argparse parser: its options in the parser's order."""
    options = {}
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if not names:
            continue
        options[names[0]] = {
            "aliases": [name for name in action.option_strings if name != names[0]],
            "takes_value": action.nargs != 0,
            "nargs": action.nargs,
            "type": None if action.nargs == 0 else kind_of(action.type),
            # The order of literals is that of a set in some versions.
            "choices": sorted(map(str, action.choices)) if action.choices is not None else None,
            "metavar": None if action.metavar is None else str(action.metavar),
            "default": plain(action.default),
        }
    return {"vllm": version, "options": options, "tool_parsers": tool_parsers, "reasoning_parsers": reasoning_parsers}




def kind_of(convert):
    """int, size (an int that may be written 32k), float, json or text, told by what the converter makes of samples.

    vLLM's converters are closures whose names say nothing. Text takes anything, also where a JSON object would be understood.
    """
    def made(sample):
        try:
            return convert(sample)
        except (argparse.ArgumentTypeError, ValueError, TypeError):
            return None

    if convert is None or made("no number") is not None:
        return "text"
    if made("{}") is None and type(made("7")) is int:
        return "size" if made("32k") == 32000 else "int"
    return "float" if made("{}") is None and type(made("7.5")) is float else "json"


def plain(value):
    """A default as JSON can say it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value)


if __name__ == "__main__":
    main()
