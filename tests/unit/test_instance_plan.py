"""What happens to which instance, why, and in which order."""
from __future__ import annotations

import random

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import instance_planning, ownership, units
from ansible_collections.llmops.ascend.plugins.modules.instance_plan import make_plan
from hypothesis import given
from hypothesis import strategies as st
from instance_machine import Machine, specification

NAMES = ["qwen38-tp2-0", "qwen38-tp2-1", "qwen38-tp2-2", "qwen38-tp2-3"]
SIXTEEN = ["vllm", "serve", "/data/models/Qwen", "--max-num-seqs", "16", "--trust-remote-code"]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def plan(machine, instances, secrets=None, max_unavailable=1, docker="docker"):
    before = sorted((path, path.read_bytes()) for path in machine.paths.record.parents[2].rglob("*") if path.is_file())
    result = make_plan(machine.run, docker, machine.paths, instances, secrets or {}, max_unavailable)
    after = sorted((path, path.read_bytes()) for path in machine.paths.record.parents[2].rglob("*") if path.is_file())
    assert before == after, "planning changes nothing"
    assert machine.changes() == []
    return {entry["name"]: entry for entry in result["plan"]}, result["steps"], result["findings"]


def actions(entries):
    return {name: entry["action"] for name, entry in entries.items()}


def test_a_bare_machine_starts_everything_at_once(machine):
    machine.paths.salt.unlink()
    entries, steps, findings = plan(machine, [specification(name) for name in NAMES], docker=None)
    assert actions(entries) == dict.fromkeys(NAMES, "start")
    assert entries[NAMES[0]]["reasons"] == ["new"]
    assert steps == [{"kind": "start", "names": NAMES, "remove": []}]
    assert findings == []


def test_what_is_as_wanted_stays(machine):
    for name in NAMES:
        machine.install(specification(name), {"VLLM_API_KEY": "key-of-all"})
    secrets = {name: {"VLLM_API_KEY": "key-of-all"} for name in NAMES}
    entries, steps, findings = plan(machine, [specification(name) for name in NAMES], secrets)
    assert actions(entries) == dict.fromkeys(NAMES, "none")
    assert (steps, findings) == ([], [])
    assert len(machine.commands) == 2, "two commands, however many instances"


@pytest.mark.parametrize(("max_unavailable", "batches"), [(1, 4), (2, 2), (3, 2), (9, 1)])
def test_a_changed_argument_restarts_in_batches(machine, max_unavailable, batches):
    for name in NAMES:
        machine.install(specification(name))
    wanted = [specification(name, arguments=SIXTEEN) for name in NAMES]
    entries, steps, _ = plan(machine, wanted, max_unavailable=max_unavailable)
    assert entries[NAMES[0]] == {"name": NAMES[0], "action": "restart", "active": True,
                                 "reasons": ["arguments: --max-num-seqs 32 -> 16"]}
    assert [step["kind"] for step in steps] == ["restart"] * batches
    assert [name for step in steps for name in step["names"]] == NAMES


def test_a_changed_key_is_told_without_the_key(machine):
    machine.install(specification(), {"VLLM_API_KEY": "old-secret"})
    entries, _, _ = plan(machine, [specification()], {NAMES[0]: {"VLLM_API_KEY": "new-secret"}})
    assert entries[NAMES[0]]["reasons"] == ["secret VLLM_API_KEY changed"]


def test_an_interrupted_run_loses_no_restart(machine):
    """Files are new, the container is old: what runs decides."""
    old = machine.install(specification())
    machine.install(specification(arguments=SIXTEEN))
    machine.containers[NAMES[0]]["fingerprint"] = old["fingerprint"]
    entries, _, _ = plan(machine, [specification(arguments=SIXTEEN)])
    assert entries[NAMES[0]]["action"] == "restart"
    assert entries[NAMES[0]]["reasons"] == ["what runs was started from an earlier specification"]


@pytest.mark.parametrize(("state", "running"), [
    (("failed", "failed"), False), (("inactive", "dead"), False), (("activating", "auto-restart"), True),
    (("activating", "start"), True)])
def test_a_unit_that_matches_but_is_not_active_starts(machine, state, running):
    machine.install(specification(), state=state, running=running)
    entries, steps, _ = plan(machine, [specification()])
    assert actions(entries) == {NAMES[0]: "start"}
    assert state[0] in entries[NAMES[0]]["reasons"][0]
    assert steps[0]["kind"] == "start"


def test_what_the_engine_does_not_notice_is_an_update(machine):
    machine.install(specification())
    entries, steps, _ = plan(machine, [specification(stop_timeout_s=90)])
    assert entries[NAMES[0]]["action"] == "update"
    assert entries[NAMES[0]]["reasons"] == ["specification file differs", "unit file differs"]
    assert steps == [{"kind": "update", "names": [NAMES[0]], "remove": []}]


def test_a_key_that_others_can_read_is_an_update(machine):
    machine.install(specification())
    machine.paths.environment(NAMES[0]).chmod(0o644)
    entries, _, _ = plan(machine, [specification()])
    assert entries[NAMES[0]]["reasons"] == ["environment file differs"]


def test_a_lost_record_and_a_disabled_unit_are_updates(machine):
    machine.install(specification(), recorded=False)
    machine.enabled.clear()
    entries, _, _ = plan(machine, [specification()])
    assert entries[NAMES[0]]["reasons"] == ["not enabled at boot", "not in the record"]


def test_shrinking_and_renaming_remove(machine):
    for name in NAMES[:2]:
        machine.install(specification(name))
    machine.install(specification(NAMES[2]), recorded=False)      # the record lost it, its specification is ours
    entries, steps, _ = plan(machine, [specification(NAMES[0])])
    assert actions(entries) == {NAMES[0]: "none", NAMES[1]: "remove", NAMES[2]: "remove"}
    assert steps == [{"kind": "remove", "names": [], "remove": NAMES[1:3]}]


def test_wider_instances_replace_narrower_ones(machine):
    for name in NAMES:
        machine.install(specification(name))
    wanted = [specification(f"qwen38-tp2-{index}", devices=list(range(4 * index, 4 * index + 4))) for index in (0, 1)]
    _, steps, _ = plan(machine, wanted)
    assert steps == [{"kind": "replace", "names": NAMES[:2], "remove": NAMES[2:]}]


def test_independent_replacements_are_steps_of_their_own(machine):
    for name in NAMES:
        machine.install(specification(name))
    wanted = [specification("wide-0", devices=[0, 1, 2, 3], port=8000), specification("wide-1", devices=[4, 5, 6, 7], port=8002)]
    _, steps, _ = plan(machine, wanted)
    assert steps == [{"kind": "replace", "names": ["wide-0"], "remove": NAMES[:2]},
                     {"kind": "replace", "names": ["wide-1"], "remove": NAMES[2:]}]


def test_a_hand_made_container_is_never_overwritten(machine):
    machine.containers[NAMES[0]] = {"fingerprint": None, "running": True, "ours": False}
    entries, steps, findings = plan(machine, [specification()])
    assert actions(entries) == {NAMES[0]: "blocked"}
    assert steps == []
    assert findings[0]["level"] == "error"
    assert f"container {NAMES[0]} is not ours" in findings[0]["message"]
    assert "adopt or retire" in findings[0]["message"]


def test_a_hand_made_unit_that_nobody_wants_is_left_alone(machine):
    machine.install(specification())
    machine.paths.unit(NAMES[0]).write_text("[Service]\n")
    entries, steps, _ = plan(machine, [])
    assert (entries, steps) == ({}, [])


def blocked(by):
    return specification(arguments=SIXTEEN, state="blocked", reason="device 1 is in Alarm", blocked_by=by)


def test_a_sick_device_stops_nothing_that_answers(machine):
    machine.install(specification())
    entries, steps, findings = plan(machine, [blocked("health")])
    assert entries[NAMES[0]] == {"name": NAMES[0], "action": "blocked", "reasons": ["device 1 is in Alarm"], "active": True}
    assert (steps, findings) == ([], [])


def test_quarantine_takes_an_instance_away(machine):
    machine.install(specification())
    entries, steps, _ = plan(machine, [blocked("quarantined")])
    assert actions(entries) == {NAMES[0]: "remove"}
    assert steps == [{"kind": "remove", "names": [], "remove": [NAMES[0]]}]
    assert actions(plan(Machine(machine.paths.record.parents[2] / "bare"), [blocked("quarantined")])[0]) == {
        NAMES[0]: "blocked"}


def test_a_device_of_an_instance_that_stays_blocks(machine):
    machine.install(specification(NAMES[1]))
    entries, steps, findings = plan(machine, [specification(NAMES[0], devices=[1, 2]), specification(NAMES[1])])
    assert actions(entries) == {NAMES[0]: "blocked", NAMES[1]: "none"}
    assert steps == []
    assert "device 2 belongs to qwen38-tp2-1, which stays" in findings[0]["message"]


def test_dockerd_away_changes_nothing_by_guess(machine):
    for name in NAMES[:2]:
        machine.install(specification(name))
    machine.docker_error = "Cannot connect to the Docker daemon"
    entries, _, findings = plan(machine, [specification(NAMES[0]), specification(NAMES[1], arguments=SIXTEEN)])
    assert actions(entries) == {NAMES[0]: "none", NAMES[1]: "restart"}
    assert findings[0]["level"] == "warning"


ACTIONS = st.sampled_from(["none", "update", "start", "restart", "remove", "blocked"])


@given(st.dictionaries(st.sampled_from([f"a-{index}" for index in range(8)]), ACTIONS), st.integers(1, 4), st.randoms())
def test_every_action_is_in_exactly_one_step(chosen, max_unavailable, chance: random.Random):
    wanted = {name: specification(name, devices=chance.sample(range(8), 2)) for name in chosen}
    present = {name: specification(name) for name, action in chosen.items() if action in ("restart", "remove")}
    steps = instance_planning.order(chosen, wanted, present, max_unavailable)
    named = sorted(name for step in steps for name in step["names"] + step["remove"])
    assert named == sorted(name for name, action in chosen.items() if action not in ("none", "blocked"))
    for step in steps:
        assert all(chosen[name] == "remove" for name in step["remove"])
        if step["kind"] == "restart":
            assert len(step["names"]) <= max_unavailable
        if step["kind"] in ("start", "restart"):
            others = [resource for name in present if name not in step["names"]
                      for resource in instance_planning.resources(present[name])]
            needs = [resource for name in step["names"] for resource in instance_planning.resources(wanted[name])]
            assert not set(needs) & set(others), "nothing starts on what another one holds"


def test_a_foreign_label_is_not_ours():
    seen = units.parse_containers('[{"Id": "1", "Name": "/x", "State": {"Running": true}, '
                                  '"Config": {"Labels": {"llmops.managed-by": "somebody"}}}]')
    assert not seen["x"].ours
    assert ownership.MANAGER != "somebody"
