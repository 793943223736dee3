"""Where a model comes from, and what a person has to decide first."""

from __future__ import annotations

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import model_sources

PATH = "/data/models/X"
WORKERS = ["m66", "m67", "m68", "m69"]


def states(**by_machine: str) -> dict:
    """{machine: {PATH: state}}, each given as "status" or "status id"."""
    return {
        machine: {PATH: {"status": text.split()[0], "id": text.partition(" ")[2] or None, "edited": [], "missing": []}}
        for machine, text in by_machine.items()
    }


def machines(machine: str, known: dict, source: str | None = None, hints: tuple = ()) -> list[str]:
    return [item["machine"] for item in model_sources.candidates(machine, PATH, source, known, hints, WORKERS)]


def test_machines_of_this_run_come_first_then_hints_then_the_rest():
    assert machines("m66", states(m66="absent", m68="whole a"), hints=("m69",)) == ["m68", "m69", "m67"]
    assert machines("m66", states(m66="absent"), hints=("m69", "m67")) == ["m69", "m67", "m68"]


def test_a_machine_of_this_run_that_lacks_it_is_not_asked():
    assert machines("m66", states(m66="absent", m67="absent", m68="damaged a", m69="incomplete")) == []


def test_machines_that_lack_a_model_are_spread_over_those_that_have_it():
    known = states(m66="absent", m67="absent", m68="whole a", m69="unmanifested")
    known["m69"] = states(m69="whole a")["m69"]
    assert machines("m66", known)[0] == "m68"
    assert machines("m67", known)[0] == "m69"


def test_the_model_that_most_machines_have():
    assert machines("m66", states(m66="absent", m67="whole b", m68="whole a", m69="whole a")) == ["m68", "m69"]


@pytest.mark.parametrize(
    "source,place",
    [
        ("m69", {"machine": "m69", "path": PATH}),
        ("/mnt/models/X", {"machine": "m66", "path": "/mnt/models/X"}),
        ("m69:/mnt/models/X", {"machine": "m69", "path": "/mnt/models/X"}),
        ("store:/mnt/models/X", {"machine": "store", "path": "/mnt/models/X"}),
    ],
)
def test_a_named_source_is_the_only_one(source, place):
    assert model_sources.candidates("m66", PATH, source, states(m66="absent", m68="whole a"), (), WORKERS) == [place]


@pytest.mark.parametrize("source", ["Qwen/Qwen3-8B", "m70", "m69:relative"])
def test_a_source_that_is_none(source):
    with pytest.raises(ValueError, match="is neither a machine of the inventory, nor a directory"):
        model_sources.candidates("m66", PATH, source, {}, (), WORKERS)


def test_givers_and_not_found():
    answer = {"models": {PATH: {"status": "whole", "id": "a"}}, "rsync": True}
    asked = [
        {"machine": "m67", "path": PATH, "answer": {}},
        {"machine": "m68", "path": PATH, "answer": {"models": {PATH: {"status": "absent"}}, "rsync": True}},
        {"machine": "m69", "path": PATH, "answer": answer},
    ]
    assert model_sources.givers(asked) == [{"status": "whole", "id": "a", "machine": "m69", "path": PATH, "rsync": True}]
    line = model_sources.not_found("m66", PATH, asked[:2])
    assert line == (
        f"m66: {PATH} is on no machine (m67:{PATH} (no answer), m68:{PATH} (absent)): put the model there on one of them, or set model_source"
    )
    assert "there is no other worker to ask" in model_sources.not_found("m66", PATH, [])


def test_obstacles():
    incomplete = {"status": "incomplete", "missing": ["a", "b", "c", "d"], "edited": []}
    edited = {"status": "damaged", "missing": [], "edited": ["config.json"]}
    rotten = {"status": "damaged", "missing": ["model-1.safetensors"], "edited": []}
    found = model_sources.obstacles("m66", {"/i": incomplete, "/e": edited, "/r": rotten}, "fail")
    assert len(found) == 2
    assert found[0].startswith("m66: /i lacks a, b, c and 1 more, which its index names")
    assert "m66: /e: config.json differs from the manifest: run with -e model_edited_files=accept" in found[1]
    assert len(model_sources.obstacles("m66", {"/i": incomplete, "/e": edited}, "repair")) == 1
    assert model_sources.lacking({"/i": incomplete, "/e": edited, "/r": rotten, "/a": {"status": "absent"}}) == ["/e", "/r", "/a"]


def test_different_models_are_said():
    assert model_sources.differing(PATH, states(m66="whole a", m67="whole a", m68="absent")) is None
    line = model_sources.differing(PATH, states(m66="whole a", m67="whole b", m68="whole a"))
    assert "not the same model everywhere (m66, m68: a; m67: b)" in line


def test_facts():
    deployments = {
        "one": {"model_path": PATH, "image": "x:1", "runtime": "container"},
        "two": {"model_path": "/other", "image": None, "runtime": "venv"},
    }
    assert model_sources.model_ids(deployments, {PATH: {"id": "a"}}) == {"one": "a", "two": None}
    image = {"id": "sha256:1", "digest": None, "architecture": "amd64", "vllm_version": "0.23.0", "env": {}}
    assert model_sources.image_facts(deployments, {"x:1": image}) == {
        "one": {"id": "sha256:1", "digest": None, "architecture": "amd64", "vllm_version": "0.23.0"}
    }
    assert model_sources.image_facts(deployments, {}) == {"one": {"id": None, "digest": None, "architecture": None, "vllm_version": None}}
