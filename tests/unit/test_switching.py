"""Who serves at which moment of the switch, who has to roll, what is left undone."""
from __future__ import annotations

from ansible_collections.llmops.ascend.plugins.module_utils import switching


def instance(name: str, port: int, **more) -> dict:
    return {"name": name, "port": port, "service": "chat", "deployment": "d", "state": "placed", "address": "198.18.0.1", **more}


PLACED = [instance("i-0", 8000), instance("i-1", 8001), instance("i-2", 8002), instance("i-3", 8003, state="blocked", reason="sick")]
KNOWN = [instance("i-0", 8000, running=True), instance("i-1", 7001, running=True), instance("old", 8004, running=True),
         instance("i-3", 8003, running=True)]
PLAN = [{"name": name, "action": action, "reasons": []} for name, action in
        {"i-0": "none", "i-1": "restart", "i-2": "start", "i-3": "blocked", "old": "remove"}.items()]


def ports(**moment) -> dict:
    return {item["name"]: item["port"] for item in switching.serving(PLACED, KNOWN, PLAN, **moment)}


def test_before_its_turn_an_instance_serves_as_it_runs_and_a_new_one_not_yet():
    assert ports() == {"i-0": 8000, "i-1": 7001, "old": 8004}


def test_what_was_started_serves_as_it_is_placed():
    assert ports(done=["i-1", "i-2"]) == {"i-0": 8000, "i-1": 8001, "i-2": 8002, "old": 8004}


def test_what_goes_is_out_before_it_stops_and_blocked_ones_are_never_offered():
    assert ports(done=["i-1", "i-2"], gone=["old"]) == {"i-0": 8000, "i-1": 8001, "i-2": 8002}


def test_a_restarting_instance_that_was_taken_out_and_is_done_is_back():
    assert ports(done=["i-1"], gone=["i-1"])["i-1"] == 8001


def test_an_instance_that_does_not_run_is_not_offered_before_its_restart():
    known = [dict(item, running=False) for item in KNOWN]
    assert [item["name"] for item in switching.serving(PLACED, known, PLAN)] == ["i-0"]


def test_backends_of_a_step_are_named_by_the_port_they_have_now():
    step = {"kind": "replace", "names": ["i-1", "i-2"], "remove": ["old"]}
    assert switching.backend_ids(step, KNOWN, "m1") == ["m1:7001", "m1:8004"]


def test_only_steps_that_take_something_away_roll():
    assert not switching.needs_roll([{"kind": "update"}, {"kind": "start"}])
    assert all(switching.needs_roll([{"kind": "start"}, {"kind": kind}]) for kind in ("restart", "replace", "remove"))


def test_the_plan_is_told_with_its_reasons():
    plan = [{"name": "i-0", "action": "none", "reasons": []}, {"name": "i-1", "action": "restart", "reasons": ["arguments: --x 1 -> 2"]},
            {"name": "i-3", "action": "blocked", "reasons": ["device 6 is Critical"]}]
    assert switching.plan_lines(plan, [], True) == ["would restart i-1: arguments: --x 1 -> 2", "blocked: i-3: device 6 is Critical"]
    assert switching.plan_lines(plan, [], False)[0].startswith("will restart i-1")


def test_what_stops_together_is_told_first():
    steps = [{"kind": "start", "names": ["x"], "remove": []}, {"kind": "replace", "names": ["i-0"], "remove": ["i-2", "i-1"]}]
    assert switching.plan_lines([], steps, True) == [
        "would stop i-0, i-1, i-2 together before i-0 start: they pass on devices or ports"]


def test_full_answers_take_the_place_of_brief_ones_unless_those_found_a_fault():
    brief = [{"instance": "a", "unmet": [], "asked": 2}, {"instance": "b", "unmet": ["x"], "asked": 2}, {"instance": "c", "unmet": [], "asked": 2}]
    full = [{"instance": "a", "unmet": [], "asked": 14}, {"instance": "b", "unmet": [], "asked": 14}]
    assert [row["asked"] for row in switching.merged_rows(brief, full)] == [14, 2, 2]


def test_everything_left_undone_has_a_line():
    variables = {
        "m1": {"switch_finished": True, "placement": {"instances": [
            instance("i-0", 8000), instance("i-1", 8001, state="blocked", blocked_by="health", reason="device 3 is Critical"),
            instance("i-2", 8002, state="blocked", blocked_by="quarantined", reason="quarantined")]}, "load_balancer_failures": None},
        "m2": {"switch_finished": None, "placement": None, "load_balancer_failures": ["m2 on load balancer lb1: timed out"]},
        "lb1": {"switch_finished": None, "placement": None, "load_balancer_failures": None},
    }
    lines = switching.unfinished(["m1", "m2", "lb1"], variables, ["m1", "m2"])
    assert len(lines) == 3
    assert "m1: i-1 is blocked: device 3 is Critical" in lines[0]
    assert lines[1].startswith("m2: not converged")
    assert lines[2] == "m2 on load balancer lb1: timed out"
