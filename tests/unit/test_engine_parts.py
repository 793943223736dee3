"""The simulated engine's parts that can be tested without a process: arguments, cache, replies, tokens."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "lab" / "engine"))

from simulated_vllm import tokens
from simulated_vllm.arguments import ArgumentsError, parse_serve
from simulated_vllm.cache import KVCache
from simulated_vllm.replies import Sampling, compose, tool_arguments
from simulated_vllm.settings import Settings, SettingsFile, parse_fault

REPORT_ARGUMENTS = shlex.split("""
    --served-model-name Qwen3.8-27B-W8A8 --tensor-parallel-size 2 --max-model-len 262144 --max-num-seqs 32
    --max-num-batched-tokens 4096 --disable-custom-all-reduce --distributed-executor-backend mp --reasoning-parser qwen3
    --enable-auto-tool-choice --tool-call-parser qwen3_coder --block-size 16 --trust-remote-code --dtype bfloat16
    --speculative-config '{"method":"mtp","num_speculative_tokens":4}'
""")


def catalogue(version: str) -> dict:
    return json.loads((ROOT / "presets" / "vllm" / f"{version}.json").read_text())


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 262144}')
    return str(tmp_path)


def parse(model: str, *arguments: str, version: str = "0.23.0", environment: dict | None = None):
    return parse_serve([model, *arguments], catalogue(version), environment or {})


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.18.0", "0.23.0", "0.30.0"])
def test_the_report_s_command_line_is_accepted(model, version):
    config = parse(model, *REPORT_ARGUMENTS, version=version, environment={"VLLM_API_KEY": "secret"})
    assert (config.served_names, config.world_size, config.max_model_len) == (["Qwen3.8-27B-W8A8"], 2, 262144)
    assert (config.block_size, config.max_num_seqs, config.api_keys) == (16, 32, ["secret"])


def test_forms_of_one_option(model):
    forms = [["--max-model-len", "32000"], ["--max_model_len=32000"], ["--max-model-len", "32k"]]
    assert {parse(model, *form).max_model_len for form in forms} == {32000}
    assert parse(model, "-tp", "4", "-pp=2").world_size == 8
    assert parse(model, "--no-enable-prefix-caching").prefix_caching is False
    parse(model, "--speculative-config.method", "mtp", "--speculative_config.num_speculative_tokens=4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--enable-mtp"], "vllm: error: unrecognized arguments: --enable-mtp"),
        (["--dtype", "bf16"], "argument --dtype: invalid choice: 'bf16' (choose from"),
        (["--max-num-seqs"], "argument --max-num-seqs: expected one argument"),
        (["--max-num-seqs", "many"], "argument --max-num-seqs: invalid int value: 'many'"),
        (["--speculative-config", "{'method'}"], "Value {'method'} cannot be converted to <function loads>"),
        (["--trust-remote-code=yes"], "ignored explicit argument 'yes'"),
    ],
)
def test_what_the_real_parser_refuses_ends_with_code_2(model, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        parse(model, *arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "version", "message"),
    [
        (
            ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3"],
            "0.18.0",
            r"call parser: qwen3 \(chose.*qwen3_coder,qwen3_xml",
        ),
        (["--reasoning-parser", "qwen9"], "0.23.0", r"invalid reasoning parser: qwen9 \(chose from \{ .*qwen3"),
        (["--enable-auto-tool-choice"], "0.23.0", "requires --tool-call-parser"),
        (["--max-model-len", "300000"], "0.23.0", r"\(300000\) is greater than the derived max_model_len"),
    ],
)
def test_what_vllm_refuses_after_parsing(model, arguments, version, message):
    with pytest.raises(ArgumentsError, match=message):
        parse(model, *arguments, version=version)


def test_a_directory_without_config_is_no_model(tmp_path):
    with pytest.raises(ArgumentsError, match=r"containing a config\.json"):
        parse(str(tmp_path))


# -- tokens and replies ------------------------------------------------------------------------------------------------


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_text_survives_tokens_that_arrive_one_by_one(text):
    encoded = tokens.encode(text)
    decoder = tokens.Decoder()
    pieces = [decoder.decode(encoded[at : at + tokens.TOKEN_BYTES]) for at in range(0, len(encoded), tokens.TOKEN_BYTES)]
    assert "".join(pieces) == text


@given(st.integers(1, 200), st.booleans(), st.booleans())
def test_max_tokens_is_exact_while_there_is_more_to_say(max_tokens, thinks, apart):
    reply = compose(b"what", Sampling(max_tokens, ignore_eos=True), 64, thinks, apart)
    assert tokens.count(reply.tokens) == max_tokens
    assert reply.finish_reason == "length"


def test_temperature_and_seed():
    def said(temperature: float, seed: int | None = None) -> bytes:
        return compose(b"question", Sampling(16, temperature=temperature, seed=seed), 64).tokens

    assert said(0) == said(0, seed=7)
    assert len({said(0), said(0.5), said(1)}) == 3
    assert said(1, seed=7) == said(1, seed=7) != said(1, seed=8)


def test_a_stop_string_is_not_shown_and_ends_the_reply():
    whole = tokens.Decoder().decode(compose(b"q", Sampling(500, temperature=0), 64).parts[0].tokens)
    stop = whole[50:56]
    reply = compose(b"q", Sampling(500, temperature=0, stop=(stop, "never")), 64)
    shown = "".join(tokens.Decoder().decode(part.tokens) for part in reply.parts if part.kind == "content")
    assert (reply.finish_reason, reply.stop_reason) == ("stop", stop)
    assert shown == whole[: whole.index(stop)]


def test_tool_arguments_satisfy_the_schema():
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "integer"}},
        "required": ["city", "unit"],
    }
    assert json.loads(tool_arguments(schema, "What is the weather in Hangzhou?")) == {"city": "Hangzhou", "unit": "celsius"}


# -- cache -------------------------------------------------------------------------------------------------------------


def prompt(*words: str) -> bytes:
    return b"".join(tokens.encode(word * 16) for word in words)  # 16 tokens: one block a word of four letters


def served(cache: KVCache, text: bytes, salt: str = "") -> int:
    """Runs a prompt through the cache; returns the tokens it found there."""
    sequence = cache.open(text, 1, salt)
    sequence.computed(text)
    sequence.close()
    return sequence.cached_tokens


def test_a_shared_beginning_is_found_in_whole_blocks():
    cache = KVCache(100, 16, prefix_caching=True)
    assert served(cache, prompt("aaaa", "bbbb", "cccc")) == 0
    assert served(cache, prompt("aaaa", "bbbb", "dddd")) == 32
    assert served(cache, prompt("bbbb", "cccc", "dddd")) == 0  # the same blocks, but after other ones
    assert served(cache, prompt("aaaa", "bbbb", "cccc")) == 32  # the last token is always computed
    assert served(cache, prompt("aaaa", "bbbb", "cccc"), salt="another tenant") == 0


def test_the_least_recently_used_blocks_go_first():
    cache = KVCache(5, 16, prefix_caching=True)
    served(cache, prompt("aaaa", "bbbb"))
    served(cache, prompt("cccc", "dddd"))
    served(cache, prompt("aaaa", "bbbb"))
    served(cache, prompt("eeee"))
    assert served(cache, prompt("aaaa", "bbbb")) == 16
    assert served(cache, prompt("cccc", "dddd")) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 60)), max_size=40))
def test_blocks_are_neither_lost_nor_made(requests):
    """However sequences come and go, usage is within 0 and 1, and 0 when all are gone."""
    cache = KVCache(20, 16, prefix_caching=True)
    running = []
    for slot, words, output in requests:
        if len(running) > slot:
            running.pop(slot).close()
            continue
        text = prompt(*["aaaa", "bbbb", "cccc", "dddd", "eeee"][:words])
        sequence = cache.open(text, output, "")
        if sequence:
            if output % 2:
                sequence.computed(text)
            running.append(sequence)
        assert 0 <= cache.usage <= 1
    for sequence in running:
        sequence.close()
    assert cache.usage == 0
    assert served(cache, prompt("ffff")) == 0


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_are_read_again_and_broken_ones_are_not_used(tmp_path, capsys):
    path = tmp_path / "engine.json"
    settings = SettingsFile(path)
    settings.CHECK_EVERY_S = 0
    assert settings.current() == Settings()
    path.write_text('{"load_s": 1, "faults": {"8001": "hang", "*": {"slow_prefill_s": 2}}}')
    assert settings.current().load_s == 1
    assert settings.current().fault(8001) == {"hang": 1}
    assert settings.current().fault(8000) == {"slow_prefill_s": 2}
    path.write_text('{"load_seconds": 100}')
    assert settings.current().load_s == 1
    assert "unknown settings ['load_seconds']" in capsys.readouterr().out
    path.unlink()
    assert settings.current() == Settings()


@pytest.mark.parametrize("fault", ["fire", "slow_prefill_s", {"slow_prefill_s": "5"}, {"hang": 1}, {}, ["hang"], 3])
def test_unknown_faults_are_refused(fault):
    with pytest.raises(ValueError, match="unknown fault"):
        parse_fault(fault)
