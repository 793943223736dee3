"""What is read of a model directory: config.json and the headers of weight files, and never a weight."""

from __future__ import annotations

import json
import os
import struct

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import model_files
from hypothesis import given
from hypothesis import strategies as st

BITS = {"BF16": 16, "I8": 8, "F32": 32}


def write_weights(path, tensors):
    """A safetensors file of these ``(name, dtype, shape)``, its weights a hole in the file."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in tensors:
        size = BITS[dtype] // 8
        for edge in shape:
            size *= edge
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)


LAYERS = [(f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", "I8", [4, 8]) for layer in (1, 2) for expert in range(3)]


def test_layers_and_experts_are_folded(tmp_path):
    write_weights(tmp_path / "model-00001-of-00002.safetensors", [("model.embed_tokens.weight", "BF16", [10, 8]), *LAYERS[:4]])
    write_weights(tmp_path / "model-00002-of-00002.safetensors", [("model.layers.0.mlp.up_proj.weight", "I8", [6, 8]), *LAYERS[4:]])
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    assert model_files.read_model(str(tmp_path)) == {
        "path": str(tmp_path), "config": {"model_type": "x"}, "total_bytes": 10 * 8 * 2 + 6 * 8 + 6 * 4 * 8, "missing": [],
        "tensors": [
            {"name": "model.embed_tokens.weight", "dtype": "BF16", "shape": [10, 8], "count": 1, "layers": None},
            {"name": "model.layers.*.mlp.experts.*.up_proj.weight", "dtype": "I8", "shape": [4, 8], "count": 3, "layers": "1-2"},
            {"name": "model.layers.*.mlp.up_proj.weight", "dtype": "I8", "shape": [6, 8], "count": 1, "layers": "0"},
        ]}


def test_a_weight_file_of_32_gb_is_read_by_its_header(tmp_path):
    write_weights(tmp_path / "model.safetensors", [("lm_head.weight", "F32", [1 << 20, 8192])])
    assert model_files.read_model(str(tmp_path))["total_bytes"] == 1 << 35


def test_only_what_an_index_names_counts(tmp_path):
    write_weights(tmp_path / "model-1.safetensors", [("lm_head.weight", "BF16", [2, 2])])
    write_weights(tmp_path / "consolidated.safetensors", [("output.weight", "BF16", [2, 2])])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "model-1.safetensors"}}))
    assert model_files.read_model(str(tmp_path))["total_bytes"] == 8


def test_an_index_without_its_files_still_says_the_sum(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 70}, "weight_map": {"a": "m.safetensors"}}))
    model = model_files.read_model(str(tmp_path))
    assert (model["tensors"], model["total_bytes"]) == (None, 70)


def test_a_missing_weight_file_is_named(tmp_path):
    write_weights(tmp_path / "a.safetensors", [("x", "BF16", [1])])
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    model = model_files.read_model(str(tmp_path))
    assert model["missing"] == [f"{tmp_path} lacks 1 of 2 weight files that its index names, the first is b.safetensors"]
    assert model["tensors"] is None


def test_an_interrupted_copy_is_seen(tmp_path):
    path = tmp_path / "a.safetensors"
    write_weights(path, [("x", "BF16", [100])])
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(model_files.Unreadable, match=r"a\.safetensors is cut short"):
        model_files.read_header(str(path))


@pytest.mark.parametrize("content", [
    b"", b"\0" * 7, b"<html>not found</html>", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]",
    *(struct.pack("<Q", len(text)) + text for text in (b'{"x": {"dtype": "I8", "shape": [-1], "data_offsets": [0, 0]}}',
                                                       b'{"x": {"dtype": "I8", "shape": [Infinity], "data_offsets": [0, 0]}}',
                                                       b'{"x": {"dtype": "I8", "shape": [1], "data_offsets": [0, "1"]}}')),
    struct.pack("<Q", 12) + b'{"x": {"a":1}}'[:12], struct.pack("<Q", 8) + b'{"x": 1}', struct.pack("<Q", 4) + b"null",
])
def test_what_is_no_safetensors_file(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(model_files.Unreadable, match=r"a\.safetensors is no safetensors file"):
        model_files.read_header(str(path))
    [said] = [line for line in model_files.read_model(str(tmp_path))["missing"] if "a.safetensors" in line]
    assert "\n" not in said


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "[" * 100000])
def test_a_broken_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    model = model_files.read_model(str(tmp_path))
    assert model["config"] is None
    [said] = model["missing"]
    assert str(tmp_path / "config.json") in said


def test_no_directory():
    assert model_files.read_model("/nonexistent/model") == {
        "path": "/nonexistent/model", "config": None, "tensors": None, "total_bytes": None,
        "missing": ["/nonexistent/model has no config.json"]}


@given(st.sets(st.integers(0, 200)))
def test_ranges_come_back(numbers):
    assert model_files.numbers(model_files.ranges(numbers)) == sorted(numbers)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.sampled_from(sorted(BITS)), st.integers(1, 4)),
                unique_by=lambda entry: entry[:2]))
def test_folding_loses_no_byte(entries):
    tensors = [(f"model.layers.{layer}.experts.{expert}.w", dtype, [edge, 3]) for layer, expert, dtype, edge in entries]
    rows = model_files.fold(tensors)
    assert sum(map(model_files.row_bytes, rows)) == sum(edge * 3 * BITS[dtype] // 8 for _layer, _expert, dtype, edge in entries)


@given(st.binary(max_size=80), st.one_of(st.none(), st.integers(0, 90)))
def test_no_file_is_a_traceback(tmp_path_factory, content, length):
    path = tmp_path_factory.mktemp("model") / "a.safetensors"
    path.write_bytes(content if length is None else struct.pack("<Q", length) + content)
    try:
        assert isinstance(model_files.read_header(str(path)), dict)
    except model_files.Unreadable as error:
        assert "\n" not in str(error)
