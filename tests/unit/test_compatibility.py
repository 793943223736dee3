"""Which versions work together: what the table refuses, what it does not speak of, and that it says where it knows from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible_collections.llmops.ascend.plugins.module_utils import compatibility
from ansible_collections.llmops.ascend.plugins.module_utils.compatibility import covers, family_of, judge, version_key
from hypothesis import given
from hypothesis import strategies as st

TABLE = yaml.safe_load((Path(__file__).resolve().parents[2] / "presets" / "compatibility.yml").read_text())


@pytest.mark.parametrize("ordered", [
    ["8.0.RC1.alpha002", "8.0.RC1", "8.0.RC2", "8.0.0", "8.0.1", "8.1.RC1"],
    ["9.1.0-beta.1", "9.1.0-beta.2", "9.1.0", "9.1.0.post1", "9.1.1"],
    ["24.1.rc3", "24.1.0", "25.0.rc1", "25.0.rc1.1", "25.0.0", "25.5.1"],
    ["0.18.0rc1", "0.18.0", "0.22.1rc1", "0.22.1", "v0.23.0rc1", "v0.23.0"],
    ["3.9", "3.10", "3.12.7", "3.13"],
])
def test_versions_have_an_order(ordered):
    keys = [version_key(version) for version in ordered]
    assert keys == sorted(keys) and len(set(keys)) == len(keys)


@pytest.mark.parametrize("text", ["", "latest", "qwen3.8-a2", "main"])
def test_what_is_no_version(text):
    with pytest.raises(ValueError, match="is no version"):
        version_key(text)


@given(st.lists(st.integers(0, 99), min_size=2, max_size=4))
def test_a_version_equals_itself_with_zeros(numbers):
    text = ".".join(map(str, numbers))
    assert version_key(text) == version_key("v" + text) and covers(text, text + ".1") and covers(text, text)


@pytest.mark.parametrize(("written", "version", "covered"), [
    ("9.1", "9.1.0-beta.1", True), ("9.1", "9.10.0", False), ("25.0", "25.0.rc1.1", True), ("25.0", "25.5.1", False), ("9.2.0", "9.2", False),
])
def test_a_written_version_stands_for_all_below_it(written, version, covered):
    assert covers(written, version) is covered


@pytest.mark.parametrize(("name", "family"), [
    ("910B4-1", "A2"), ("910B3", "A2"), ("Ascend910", "A3"), ("910A", "910"), ("910B", "910"), ("910ProB", "910"), ("310P3", "310P"),
    ("310B4", "310B"), ("310", "310"), ("Ascend950DT", "950"),
])
def test_families(name, family):
    assert family_of(name, TABLE)["family"] == family


@pytest.mark.parametrize(("known", "said"), [
    ({"chip": "910A"}, "does not run on 910A"),
    ({"chip": "910ProB"}, "does not run on 910ProB"),
    ({"chip": "310B4"}, "does not run on 310B4"),
    ({"cann": "9.1.0", "hdk": "25.0.rc1"}, "CANN 9.1.0 does not work with driver 25.0.rc1"),
    ({"cann": "9.2.0", "hdk": "25.2.1"}, "CANN 9.2.0 does not work with driver 25.2.1"),
    ({"vllm_ascend": "0.7.3", "cann": "9.1.0-beta.1"}, "was built for CANN 8.1.RC1, not 9.1.0-beta.1"),
    ({"vllm_ascend": "0.22.1", "vllm": "0.23.0"}, "vllm-ascend 0.22.1 is for vLLM 0.22.1, not 0.23.0"),
    ({"vllm_ascend": "0.22.1rc1", "vllm": "0.23.0"}, "is for vLLM 0.22.1, not 0.23.0"),
    ({"vllm_ascend": "0.18.0", "python": "3.12.3"}, "needs Python >=3.10,<3.12, not 3.12.3"),
    ({"vllm_ascend": "0.23.0", "torch": "2.9.0"}, "needs torch 2.10.0, not 2.9.0"),
    ({"vllm_ascend": "0.23.0", "torch_npu": "2.9.0.post1"}, "needs torch_npu 2.10.0.post4"),
])
def test_what_cannot_work_is_refused(known, said):
    errors = [finding for finding in judge(known, TABLE) if finding["level"] == "error"]
    assert len(errors) == 1 and said in errors[0]["message"] and errors[0]["remedy"]


@pytest.mark.parametrize("known", [
    {"chip": "910B4-1", "hdk": "25.5.1", "cann": "9.1.0", "vllm": "0.23.0", "vllm_ascend": "0.23.0", "python": "3.11.9", "torch": "2.10.0"},
    {"vllm": "0.18.0", "vllm_ascend": "v0.18.0", "cann": "9.0.0", "hdk": "26.0.rc1"},
    {"vllm": "0.14.1", "vllm_ascend": "0.14.0rc1", "cann": "8.5.0"},
    {"vllm_ascend": "0.13.0", "cann": "8.5.1"},
    {}, {"chip": None, "hdk": "25.0.rc1"}, {"cann": "9.1.0"}, {"vllm": "0.30.0"},
])
def test_what_works_or_is_not_known_says_nothing(known):
    assert judge(known, TABLE) == []


@pytest.mark.parametrize(("known", "said"), [
    ({"cann": "8.2.RC1", "hdk": "24.1.0"}, "no statement on CANN 8.2.RC1"),
    ({"cann": "9.1.0", "hdk": "27.0.0"}, "with driver 27.0.0"),
    ({"chip": "NextChip"}, "runs on NextChip"),
    ({"vllm_ascend": "0.26.0rc1", "vllm": "0.26.0"}, "no statement on vllm-ascend 0.26.0rc1; the newest release known here is 0.23.0"),
])
def test_what_nobody_says_is_a_warning(known, said):
    finding, = judge(known, TABLE)
    assert finding["level"] == "warning" and said in finding["message"]


def test_a_pair_can_be_allowed_by_name_with_a_reason():
    pair = "vllm-ascend 0.22.1 + vLLM 0.23.0"
    findings = judge({"vllm_ascend": "0.22.1", "vllm": "0.23.0"}, TABLE, {pair: "the report ran it for a week"})
    assert {finding["level"] for finding in findings} == {"warning"}
    assert any("allowed: the report ran it for a week" in finding["message"] for finding in findings)
    assert any(finding["level"] == "error" for finding in judge({"vllm_ascend": "0.22.1", "vllm": "0.24.0"}, TABLE, {pair: "x"}))


def test_every_row_can_be_read_and_says_where_it_is_from():
    assert all(row["source"] for part in ("families", "cann") for row in TABLE[part])
    assert all(row.get("instead") for row in TABLE["families"] if row["engine"] is False)
    for row in TABLE["vllm_ascend"]:
        assert judge({"vllm_ascend": row["vllm_ascend"], "vllm": row["vllm"], "cann": row["cann"][0], "torch": row["torch"],
                      "torch_npu": row.get("torch_npu")}, TABLE) == []
        assert all(version_key(version) for version in row["cann"])
        assert compatibility._within("3.11", row.get("python", ">=3"))
