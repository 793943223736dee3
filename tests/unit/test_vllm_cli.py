"""Engine arguments: rendered, and checked against what real vLLM releases accept."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import vllm_cli
from hypothesis import given
from hypothesis import strategies as st

INSTANCE = {"address": "198.18.254.66", "port": 8001}


def deployment(version="0.23.0", args_check="error", **changed):
    args = changed.pop("args", {})
    return {
        "name": "qwen", "model_path": "/data/models/Q", "served_names": ["Q"], "vllm_version": version, "args_check": args_check,
        "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1, "args": args, **changed,
    }


def options(args, version="0.23.0"):
    """The words that follow the project's own."""
    argv = vllm_cli.render_arguments(deployment(version, args=args), INSTANCE)
    assert argv[:11] == ["vllm", "serve", "/data/models/Q", "--served-model-name", "Q", "--host", "198.18.254.66", "--port", "8001",
                         "--tensor-parallel-size", "2"]
    return argv[11:]


def messages(args, version="0.23.0", level="error", **changed):
    found = vllm_cli.check_arguments(deployment(version, args=args, **changed), "machine66")
    assert all(finding["message"].startswith("machine66: deployment qwen: ") for finding in found)
    assert all("\n" not in finding["message"] for finding in found)
    return [finding["message"].partition("qwen: ")[2] for finding in found if finding["level"] == level]


# ------------------------------------------------------------------------------------------------------------ rendering

@pytest.mark.parametrize(("args", "words"), [
    ({"max_model_len": 262144, "block_size": 16}, ["--block-size", "16", "--max-model-len", "262144"]),
    ({"trust_remote_code": True}, ["--trust-remote-code"]),
    ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
    ({"headless": False}, []),
    ({"gpu_memory_utilization": 0.95}, ["--gpu-memory-utilization", "0.95"]),
    ({"speculative_config": {"num_speculative_tokens": 4, "method": "mtp"}},
     ["--speculative-config", '{"method":"mtp","num_speculative_tokens":4}']),
    ({"speculative_config": '{"method": "mtp"}'}, ["--speculative-config", '{"method": "mtp"}']),
    ({"allowed_origins": ["https://a", "https://b"]}, ["--allowed-origins", '["https://a","https://b"]']),
    ({"middleware": ["a.b"]}, ["--middleware", '["a.b"]']),
    ({"cudagraph_capture_sizes": [1, 2, 4]}, ["--cudagraph-capture-sizes", "1", "2", "4"]),
    ({"lora_modules": [{"name": "a", "path": "/a"}]}, ["--lora-modules", '{"name":"a","path":"/a"}']),
    ({"seed": -1}, ["--seed=-1"]),
    ({"hf_token": True}, ["--hf-token"]),
    ({"hf_overrides": {"größe": 1}}, ["--hf-overrides", '{"größe":1}']),
])
def test_values(args, words):
    assert options(args) == words


def test_parallel_sizes_are_said_when_they_are_not_one():
    argv = vllm_cli.render_arguments(deployment(pipeline_parallel_size=2, data_parallel_size=4), INSTANCE)
    assert argv[9:] == ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--data-parallel-size", "4"]


def test_aliases_follow_the_first_name():
    argv = vllm_cli.render_arguments(deployment(served_names=["Q", "q", "latest"]), INSTANCE)
    assert argv[3:7] == ["--served-model-name", "Q", "q", "latest"]


def test_the_order_of_an_inventory_changes_nothing():
    args = {"max_model_len": 1, "dtype": "auto", "seed": 3, "hf_overrides": {"b": 1, "a": {"d": 1, "c": 2}}}
    turned = {key: args[key] for key in reversed(args)}
    turned["hf_overrides"] = {"a": {"c": 2, "d": 1}, "b": 1}
    assert options(args) == options(turned)


# ------------------------------------------------------------------------------------------------------------- checking

def test_the_clusters_own_arguments_are_fine():
    assert messages({
        "max_model_len": 262144, "max_num_seqs": 32, "max_num_batched_tokens": 4096, "disable_custom_all_reduce": True,
        "distributed_executor_backend": "mp", "reasoning_parser": "qwen3", "enable_auto_tool_choice": True,
        "tool_call_parser": "qwen3_coder", "speculative_config": {"method": "mtp", "num_speculative_tokens": 4}, "block_size": 16,
        "trust_remote_code": True, "dtype": "bfloat16"}) == []


def test_a_parser_that_does_not_exist_names_those_that_do():
    assert messages({"tool_call_parser": "qwen3", "enable_auto_tool_choice": True}, version="0.18.0") == [
        "args.tool_call_parser: vLLM 0.18.0 has no tool parser 'qwen3'; did you mean qwen3_xml or qwen3_coder?"]
    assert messages({"reasoning_parser": "quen3"}) == [
        "args.reasoning_parser: vLLM 0.23.0 has no reasoning parser 'quen3'; did you mean qwen3?"]
    [message] = messages({"tool_call_parser": "zzzz"}, version="0.18.0")
    assert "it has deepseek_v3, deepseek_v31" in message


def test_a_plugin_may_bring_a_parser():
    assert messages({"tool_call_parser": "mine", "tool_parser_plugin": "/opt/mine.py"}) == []


@pytest.mark.parametrize(("args", "message"), [
    ({"max_model_length": 1}, "args.max_model_length: vLLM 0.23.0 has no option --max-model-length; did you mean max_model_len"),
    ({"xyzzy": 1}, "args.xyzzy: vLLM 0.23.0 has no option --xyzzy; see presets/vllm/0.23.0.json"),
    ({"max-model-len": 1}, "args.max-model-len: write max_model_len, with underscores"),
    ({"--max-model-len": 1}, "args.--max-model-len: write max_model_len, with underscores"),
    ({"no_enable_prefix_caching": True}, "args.no_enable_prefix_caching: write enable_prefix_caching: false"),
    ({"dtype": "bf16"}, "args.dtype: 'bf16' is not one of its values; did you mean bfloat16?"),
    ({"kv_offloading_backend": "x"}, "args.kv_offloading_backend: 'x' is not one of its values; use lmcache or native"),
    ({"max_lora_rank": 17}, "args.max_lora_rank: 17 is not one of its values"),
    ({"enforce_eager": "yes"}, "args.enforce_eager is a switch, 'yes' is no value for it; use true or false"),
    ({"headless": False}, "args.headless cannot be switched off, vLLM 0.23.0 has no --no-headless; leave it out (null)"),
    ({"max_num_seqs": True}, "args.max_num_seqs takes a value, true is none"),
    ({"speculative_config": '{"method": mtp}'}, "args.speculative_config: '{\"method\": mtp}' is not valid JSON"),
    ({"enable_auto_tool_choice": True}, "args.enable_auto_tool_choice needs args.tool_call_parser"),
])
def test_mistakes(args, message):
    [found] = messages(args)
    assert found.startswith(message)


@pytest.mark.parametrize(("args", "message"), [
    ({"block_size": "large"}, "args.block_size: 'large' is not a whole number"),
    ({"block_size": 16.5}, "args.block_size: 16.5 is not a whole number"),
    ({"block_size": [16]}, "args.block_size: [16] is not a single value"),
    ({"block_size": 0}, "args.block_size: 0 is not at least 1"),
    ({"seed": {"a": 1}}, "args.seed: {'a': 1} is not a whole number"),
    ({"max_model_len": "256 K"}, "args.max_model_len: '256 K' is not a whole number, as 32768, 32k (32000) or 32K (32768)"),
    ({"max_model_len": 1e5}, "args.max_model_len: 100000.0 is not a whole number"),
    ({"gpu_memory_utilization": "high"}, "args.gpu_memory_utilization: 'high' is not a number"),
    ({"gpu_memory_utilization": 95}, "args.gpu_memory_utilization: 95 is not between 0.01 and 1"),
    ({"gpu_memory_utilization": float("nan")}, "args.gpu_memory_utilization: nan is not a number"),
    ({"speculative_config": "mtp"}, "args.speculative_config: 'mtp' is not a YAML dictionary or JSON"),
    ({"chat_template": ["a", "b"]}, "args.chat_template: ['a', 'b'] is not a single value"),
    ({"cudagraph_capture_sizes": []}, "args.cudagraph_capture_sizes takes at least one value"),
    ({"cudagraph_capture_sizes": [1, "two"]}, "args.cudagraph_capture_sizes: 'two' is not a whole number"),
    ({"revision": datetime.date(2026, 8, 29)}, "args.revision: datetime.date(2026, 8, 29) is not a text, a number, a list or a dictionary"),
    ({"q": "ascend"}, "args.q: write quantization, the whole name"),
    ({"sc": {"method": "mtp"}}, "args.sc: write speculative_config, the whole name"),
])
def test_wrong_types(args, message):
    [found] = messages(args)
    assert found.startswith(message)


@pytest.mark.parametrize("args", [
    {"max_model_len": "256K"}, {"max_model_len": "auto"}, {"max_model_len": -1}, {"max_num_batched_tokens": "1.5k"}, {"seed": "-1"},
    {"gpu_memory_utilization": "0.95"}, {"gpu_memory_utilization": 1}, {"speculative_config": '{"method": "mtp"}'}, {"hf_token": True},
    {"allowed_origins": ["https://a"]}, {"cudagraph_capture_sizes": 8}, {"mm_processor_kwargs": "null"}, {"seed": 0},
    {"hf_overrides": {"a": 1}}, {"additional_config": {"enable_cpu_binding": False}}, {"middleware": ["a.b"]}, {"block_size": "None"},
])
def test_right_types(args):
    assert messages(args) == []


def test_good_values_of_every_kind():
    assert messages({"max_lora_rank": 16, "collect_detailed_traces": ["model", "worker"], "hf_token": "x", "seed": 0,
                     "optimization_level": 2, "limit_mm_per_prompt": {"image": 1}, "enable_prefix_caching": False}) == []


@pytest.mark.parametrize(("key", "variable"), [
    ("port", "first_port"), ("host", "service_address"), ("api_key", "services.<service>.api_key"),
    ("api-key", "services.<service>.api_key"),
    ("--api-key", "services.<service>.api_key"), ("tensor_parallel_size", "tensor_parallel_size"), ("served_model_name", "model"),
    ("model", "model_path"), ("data_parallel_size", "data_parallel_size"), ("uds", "service_address"), ("config", "args"),
    ("tp", "tensor_parallel_size"), ("-tp", "tensor_parallel_size"), ("dp", "data_parallel_size"), ("tensor_parallel", "tensor_parallel_size"),
    ("served", "model"), ("numa_bind", "numa_binding"), ("device_ids", "devices"),
])
@pytest.mark.parametrize("args_check", ["error", "warn", "off"])
def test_options_of_the_project_are_always_refused(key, variable, args_check):
    [message] = messages({key: "SK-12345678-@aaa"}, args_check=args_check)
    assert message.startswith(f"args.{key} is set by the project; use {variable}")
    assert "SK-" not in message


def test_args_check():
    assert messages({"xyzzy": 1}, args_check="off") == []
    assert messages({"xyzzy": 1}, args_check="warn") == []
    assert len(messages({"xyzzy": 1}, args_check="warn", level="warning")) == 1


@pytest.mark.parametrize(("version", "catalogue", "exact"), [
    ("0.23.0", "0.23.0", True), ("v0.23.0", "0.23.0", True), ("0.18.0+empty", "0.18.0", True), ("0.18.0rc1", "0.18.0", False),
    ("0.22.1", "0.18.0", False), ("0.24", "0.23.0", False), ("1.2.3", "0.30.0", False), ("0.7.3", "0.18.0", False),
    ("main", "0.30.0", False), (None, "0.30.0", False), ("", "0.30.0", False),
])
def test_the_catalogue_of_a_version(version, catalogue, exact):
    choice = vllm_cli.choose_catalogue(version)
    assert (choice.catalogue["vllm"], choice.exact) == (catalogue, exact)


def test_an_unknown_version_only_warns():
    assert messages({"xyzzy": 1}, version="0.22.1") == []
    assert messages({"xyzzy": 1}, version="0.22.1", level="warning") == [
        "no argument catalogue for vLLM 0.22.1, checked against 0.18.0; set args_check: off to skip the check",
        "args.xyzzy: vLLM 0.18.0 has no option --xyzzy; see presets/vllm/0.18.0.json"]
    assert messages({}, version=None, level="warning") == [
        "vllm_version is not set, arguments were checked against vLLM 0.30.0; set it to the version of the image"]


SAMPLES = {None: True, "text": "x", "int": 1, "size": "32k", "float": 0.5, "json": {"a": 1}}


@pytest.mark.parametrize("version", sorted(vllm_cli.load_catalogues()))
def test_every_option_of_a_catalogue_is_accepted_back(version):
    """What a catalogue lists is rendered into words it lists."""
    catalogue = vllm_cli.load_catalogues()[version]
    known = set(catalogue["options"]) | {alias for option in catalogue["options"].values() for alias in option["aliases"]}
    for name, option in catalogue["options"].items():
        key = name[2:].replace("-", "_")
        if key in vllm_cli.RESERVED or key in ("tool_call_parser", "reasoning_parser"):
            continue
        value = option["choices"][0] if option["choices"] else SAMPLES[option["type"]]
        args = {key: value, "tool_call_parser": catalogue["tool_parsers"][0]}
        assert messages(args, version=version) == []
        assert {word for word in options(args, version) if word.startswith("--")} <= known


def test_catalogues_are_whole():
    newest = vllm_cli.choose_catalogue(None).catalogue
    for version, catalogue in vllm_cli.load_catalogues().items():
        assert json.dumps(catalogue)
        assert catalogue["vllm"] == version
        assert set(vllm_cli.RESERVED) <= {name[2:].replace("-", "_") for name in newest["options"]}
        assert {option["type"] for option in catalogue["options"].values()} == set(SAMPLES)
        assert set(vllm_cli.RANGES) <= {name[2:].replace("-", "_") for name in catalogue["options"]}
        assert catalogue["tool_parsers"] == sorted(catalogue["tool_parsers"])
        assert "qwen3" in catalogue["reasoning_parsers"]


# ------------------------------------------------------------------------------------------------- writing a catalogue

SCRIPT = Path(vllm_cli.CATALOGUES) / "make_catalogue.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_catalogue", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def optional(convert):
    """What vLLM wraps around the converter of an option that may be null."""
    return lambda text: None if text in ("", "None") else convert(text)


def size(text):
    return int(text[:-1]) * 1000 if text.endswith("k") else int(text)


def dictionary_or_text(text):
    return json.loads(text) if text.startswith("{") else text


def with_a_method(text):
    """A dataclass that wants a field."""
    try:
        return {"method": json.loads(text)["method"]}
    except (KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(repr(error)) from error


@pytest.mark.parametrize(("convert", "kind"), [
    (None, "text"), (str, "text"), (optional(str), "text"), (dictionary_or_text, "text"), (int, "int"), (optional(int), "int"),
    (size, "size"), (float, "float"), (optional(float), "float"), (json.loads, "json"), (optional(json.loads), "json"),
    (with_a_method, "json"),
])
def test_the_type_of_an_option_is_told_by_samples(script, convert, kind):
    assert script.kind_of(convert) == kind


def test_a_parser_becomes_a_catalogue(script, tmp_path):
    parser = argparse.ArgumentParser()
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--max-model-len", type=optional(size))
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--dtype", choices=["float16", "auto"], default="auto")
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--sizes", nargs="+", type=int, default={3, 4}, metavar="N")
    catalogue = script.describe(parser, "9.9.9", ["hermes"], ["qwen3"])
    assert list(catalogue["options"]) == ["--help", "--max-model-len", "--tensor-parallel-size", "--dtype", "--enforce-eager", "--sizes"]
    assert catalogue["options"]["--tensor-parallel-size"] == {
        "aliases": ["-tp"], "takes_value": True, "nargs": None, "type": "int", "choices": None, "metavar": None, "default": 1}
    assert catalogue["options"]["--enforce-eager"] == {
        "aliases": ["--no-enforce-eager"], "takes_value": False, "nargs": 0, "type": None, "choices": None, "metavar": None, "default": False}
    assert catalogue["options"]["--dtype"]["choices"] == ["auto", "float16"]
    assert catalogue["options"]["--sizes"]["default"] == "{3, 4}"
    (tmp_path / "9.9.9.json").write_text(json.dumps(catalogue), encoding="utf-8")
    found = vllm_cli.check_arguments(deployment("9.9.9", args={"max_model_len": "long", "enforce_eager": False}), directory=tmp_path)
    assert [finding["message"].partition("qwen: ")[2] for finding in found] == [
        "args.max_model_len: 'long' is not a whole number, as 32768, 32k (32000) or 32K (32768)"]


def test_every_option_has_the_same_keys():
    for catalogue in vllm_cli.load_catalogues().values():
        assert {tuple(option) for option in catalogue["options"].values()} == {
            ("aliases", "takes_value", "nargs", "type", "choices", "metavar", "default")}


ODD = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates()),
                   lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)), max_leaves=5)
NAMES = sorted({name[2:].replace("-", "_") for catalogue in vllm_cli.load_catalogues().values() for name in catalogue["options"]})


@given(st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=12)), ODD, max_size=3),
       st.sampled_from(["0.18.0", "0.23.0", "0.30.0", None]))
def test_whatever_is_written_is_judged_in_lines_and_rendered_in_words(args, version):
    found = vllm_cli.check_arguments(deployment(version, args=args))
    assert all("\n" not in finding["message"] for finding in found)
    assert all(isinstance(word, str) for word in vllm_cli.render_arguments(deployment(version, args=args), INSTANCE))
