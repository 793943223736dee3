"""What changes a fingerprint, what does not, and how a change is told."""
from __future__ import annotations

import json

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils.fingerprint import (
    REACHING,
    changes,
    fingerprint,
    secret_digests,
)
from hypothesis import given
from hypothesis import strategies as st
from instance_machine import SALT, specification

KEY = {"VLLM_API_KEY": "SK-12345678-@aaa"}


def test_the_order_of_keys_does_not_matter():
    forwards = specification()
    backwards = dict(reversed(list(forwards.items())))
    assert fingerprint(forwards, {}) == fingerprint(backwards, {})


@pytest.mark.parametrize("key", REACHING)
def test_all_that_reaches_the_engine_counts(key):
    assert fingerprint(specification(), {}) != fingerprint(specification() | {key: "other"}, {})


@pytest.mark.parametrize("key", ["deployment", "service", "index", "image", "start_timeout_s", "stop_timeout_s", "state"])
def test_what_does_not_reach_the_engine_does_not(key):
    assert fingerprint(specification(), {}) == fingerprint(specification() | {key: "other"}, {})


def test_it_survives_json():
    spec = specification()
    assert fingerprint(json.loads(json.dumps(spec)), {}) == fingerprint(spec, {})


def test_a_secret_counts_and_stays_secret():
    digests = secret_digests(KEY, SALT)
    assert "SK-1234" not in json.dumps(digests)
    assert fingerprint(specification(), digests) != fingerprint(specification(), secret_digests({"VLLM_API_KEY": "x"}, SALT))
    assert digests != secret_digests(KEY, "another machine's salt")


@given(st.dictionaries(st.sampled_from(["VLLM_API_KEY", "HF_TOKEN"]), st.text(min_size=8)),
       st.dictionaries(st.sampled_from(["VLLM_API_KEY", "HF_TOKEN"]), st.text(min_size=8)))
def test_changes_of_secrets_never_show_them(before, after):
    lines = changes({"secrets": secret_digests(before, SALT)}, {"secrets": secret_digests(after, SALT)})
    assert all(line.split()[0] == "secret" and line.split()[2] in ("added", "removed", "changed") for line in lines)
    assert len(lines) == len({key for key in before | after if before.get(key) != after.get(key)})


@pytest.mark.parametrize(("change", "line"), [
    ({"arguments": ["vllm", "serve", "/data/models/Qwen", "--max-num-seqs", "16", "--trust-remote-code"]},
     "arguments: --max-num-seqs 32 -> 16"),
    ({"arguments": ["vllm", "serve", "/data/models/Qwen", "--max-num-seqs", "32"]},
     "arguments: --trust-remote-code removed"),
    ({"arguments": [*specification()["arguments"], "--seed=1"]}, "arguments: --seed 1 added"),
    ({"env": {"OMP_NUM_THREADS": "10"}}, "environment: OMP_NUM_THREADS=1 -> 10"),
    ({"env": {}}, "environment: OMP_NUM_THREADS=1 removed"),
    ({"volumes": ["/data/models/Qwen:/data/models/Qwen:ro", "/a:/b"]}, "volumes: /a:/b added"),
    ({"devices": [4, 5]}, "devices: 0,1 -> 4,5"),
    ({"cpus": None}, "cpus: 0-31,64-95 -> none"),
    ({"shm_size": "2g"}, "shm size: 1g -> 2g"),
    ({"options": ["--cap-add", "SYS_NICE"]}, "options: --cap-add added"),
    ({"image_id": "sha256:cc"}, "image: quay.io/ascend/vllm-ascend:qwen3.8-a2 (aa) -> "
                                "quay.io/ascend/vllm-ascend:qwen3.8-a2 (cc)"),
    ({"model_manifest": None}, "model files: manifest bb -> none"),
])
def test_a_change_is_told_in_one_line(change, line):
    assert line in changes(specification(), specification() | change)


def test_no_change_is_no_line():
    assert changes(specification(), specification() | {"start_timeout_s": 1, "deployment": "renamed"}) == []


def test_order_alone_is_a_change():
    before, after = specification(options=["--ulimit", "nofile=1"]), specification(options=["nofile=1", "--ulimit"])
    assert changes(before, after) == ["options: order changed"]


@given(st.sampled_from(REACHING), st.sampled_from([None, [], ["--x", "1"], ["vllm", "serve", "--y"], "text", "1"]))
def test_a_different_fingerprint_has_a_reason(key, value):
    """Whatever changes the fingerprint is told, so that no restart is without a reason."""
    value = {"A": value} if key == "env" else value
    if key in ("arguments", "volumes", "driver_volumes", "device_nodes", "options") and isinstance(value, str):
        value = [value]
    before, after = specification(), specification() | {key: value}
    different = fingerprint(before, {}) != fingerprint(after, {})
    emptiness = (before[key] or None) == (value or None)
    assert different == bool(changes(before, after)) or emptiness
