"""Placement: stable first, then the best cut; one clear line for what cannot be."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import deployments as resolving
from ansible_collections.llmops.ascend.plugins.module_utils import npu_smi, placement
from ansible_collections.llmops.ascend.plugins.module_utils.numa import parse_cpu_list
from ansible_collections.llmops.ascend.plugins.module_utils.placement import LINK_RANKS, Cut, Device
from hypothesis import given, settings
from hypothesis import strategies as st

TOPOLOGIES = Path(__file__).parent / "fixtures/npu_smi/topo"
ADDRESS = "198.18.254.66"


def resolved(**written):
    """Resolved deployments by name; each is written as the operator would."""
    found, findings = resolving.resolve_deployments(
        {name.replace("_", "-"): {"model": "m", "model_path": "/m", "image": "i", "vllm_version": "0.23.0", **given_}
         for name, given_ in written.items()}, {}, {}, None)
    assert findings == []
    return found


def machine(topology="910b4-epyc-report", instances=(), **devices):
    """Facts of a machine with this topology; `devices` changes single ones: d3={"health": "Alarm"}, d5=None takes it away."""
    table = npu_smi.parse_topo((TOPOLOGIES / topology / "input.txt").read_text())
    lists = sorted({cpus for cpus in table["cpus"].values() if cpus}, key=lambda cpus: parse_cpu_list(cpus)[0])
    found = []
    for number, cpus in table["cpus"].items():
        changed = devices.get(f"d{number}", {})
        if changed is not None:
            found.append({"phy_id": number, "logic_id": number, "node": f"/dev/davinci{number}", "health": "OK", "holders": [],
                          "numa_node": lists.index(cpus) if cpus else None, "cpus": cpus, **changed})
    return {
        "vendor": "huawei", "reason": None, "devices": found,
        "links": {str(one): {str(other): link for other, link in row.items()} for one, row in table["links"].items()},
        "numa_nodes": [{"id": number, "cpus": cpus, "cores": None, "devices": []} for number, cpus in enumerate(lists)],
        "instances": list(instances),
    }


def present(name, devices, **changed):
    """An instance as the facts have it."""
    return {"name": name, "devices": list(devices), "recorded": True, "running": True, **changed}


def place(deployments, facts, **options):
    plan = placement.place_instances(deployments, facts, ADDRESS, "machine66", **options)
    assert json.dumps(plan)
    owners = [device for instance in plan["instances"] for device in instance["devices"]]
    assert len(set(owners)) == len(owners), "no device has two owners"
    ports = [port for instance in plan["instances"] for port in instance["hccl_ports"].values()]
    assert len(set(ports)) == len(ports), "no neighbours meet on a port"
    assert all(line.startswith("machine66: ") and "\n" not in line for line in plan["explain"])
    assert all(finding["message"].startswith("machine66: ") and "\n" not in finding["message"] for finding in plan["findings"])
    return plan


def devices_of(plan):
    return {instance["name"]: instance["devices"] for instance in plan["instances"]}


def messages(plan, level="error"):
    return [finding["message"].partition("machine66: ")[2] for finding in plan["findings"] if finding["level"] == level]


TP2 = resolved(qwen38_tp2={"tensor_parallel_size": 2, "service": "qwen3.8-27b"})
PAIRS = {"qwen38-tp2-0": [0, 1], "qwen38-tp2-1": [2, 3], "qwen38-tp2-2": [4, 5], "qwen38-tp2-3": [6, 7]}


# ----------------------------------------------------------------------------------------------------- the first cut

def test_the_cluster_reports_machine():
    plan = place(TP2, machine())
    assert devices_of(plan) == PAIRS
    assert plan["findings"] == []
    assert plan["assumed"] is False
    last = plan["instances"][3]
    arguments, env = last.pop("arguments"), last.pop("env")
    assert last == {
        "name": "qwen38-tp2-3", "deployment": "qwen38-tp2", "service": "qwen3.8-27b", "index": 3, "devices": [6, 7],
        "visible_devices": "0,1", "address": ADDRESS, "port": 8003, "numa_nodes": [1], "cpus": "32-63,96-127", "link": "PHB",
        "hccl_ports": {"host": "60096-60111", "npu": "16762-16777"},
        "device_nodes": ["/dev/davinci6", "/dev/davinci7", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"],
        "state": "placed", "reason": None, "blocked_by": None}
    assert arguments[:2] == ["vllm", "serve"]
    assert arguments[arguments.index("--port") + 1] == "8003"
    assert env == {"ASCEND_RT_VISIBLE_DEVICES": "0,1", "VLLM_ENGINE_READY_TIMEOUT_S": "3600", "HCCL_IF_BASE_PORT": "60096",
                   "HCCL_NPU_SOCKET_PORT_RANGE": "16762-16777"}
    assert plan["explain"][3] == ("machine66: qwen38-tp2-3: devices 6,7 (PHB), NUMA node 1, CPUs 32-63,96-127, port 8003: new")


@pytest.mark.parametrize(("topology", "size", "groups", "link"), [
    ("910b4-epyc-report", 1, [[0], [1], [2], [3], [4], [5], [6], [7]], None),
    ("910b4-epyc-report", 4, [[0, 1, 2, 3], [4, 5, 6, 7]], "PHB"),
    ("910b4-epyc-report", 8, [[0, 1, 2, 3, 4, 5, 6, 7]], "SYS"),
    ("910b3-kunpeng-pairs", 2, [[0, 1], [2, 3], [4, 5], [6, 7]], "HCCS"),
    ("910b-kunpeng-interleaved", 2, [[0, 2], [1, 3], [4, 6], [5, 7]], "HCCS"),
    ("910b-x86-two-nodes-from-source", 2, [[0, 1], [2, 3], [4, 5], [6, 7]], "HCCS"),
    ("910b-x86-two-nodes-from-source", 4, [[0, 1, 2, 3], [4, 5, 6, 7]], "HCCS"),
    ("950-pcie", 2, [[0, 1], [2, 3], [4, 5], [6, 7]], "SYS"),
    ("950-ub-pairs", 2, [[0, 1], [2, 3], [4, 5], [6, 7]], "UB"),
    ("950-ub-pairs", 4, [[0, 1, 2, 3], [4, 5, 6, 7]], "SYS"),
    ("a3-container-two-dies", 2, [[12, 13]], "SIO"),
    ("a3-16-dies-from-source", 2, [[number, number + 1] for number in range(0, 16, 2)], "SIO"),
    ("a3-16-dies-from-source", 4, [[number, number + 1, number + 2, number + 3] for number in range(0, 16, 4)], "HCCS_SW"),
    ("a3-16-dies-from-source", 8, [list(range(8)), list(range(8, 16))], "HCCS_SW"),
    ("910b4-epyc-report", 3, [[0, 1, 2], [4, 5, 6]], "PHB"),
])
def test_every_kind_of_machine(topology, size, groups, link):
    plan = place(resolved(d={"tensor_parallel_size": size}), machine(topology))
    assert [instance["devices"] for instance in plan["instances"]] == groups
    assert {instance["link"] for instance in plan["instances"]} == {link}


def test_machines_without_links_go_by_numa_nodes():
    facts = {**machine("910b-kunpeng-interleaved"), "links": {}}
    plan = place(resolved(d={"tensor_parallel_size": 2}), facts)
    assert [instance["devices"] for instance in plan["instances"]] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert plan["instances"][0]["link"] is None


def cost_of(groups, links, nodes):
    """The documented order, computed the plain way: worst links of all groups from the worst on, splits, all links."""
    ranks = [[LINK_RANKS[links[one][other]] for one, other in itertools.combinations(group, 2)] for group in groups]
    splits = sum(len({nodes[device] for device in group} - {None}) > 1 for group in groups)
    return sorted(map(max, ranks), reverse=True), splits, sum(map(sum, ranks))


def partitions(pool, size, count):
    if count == 0:
        yield []
        return
    for first in range(len(pool) - size * count + 1):
        for rest in itertools.combinations(pool[first + 1:], size - 1):
            group = (pool[first], *rest)
            left = [device for device in pool[first + 1:] if device not in group]
            for others in partitions(left, size, count - 1):
                yield [group, *others]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_cut_is_the_best_there_is(data):
    size = data.draw(st.sampled_from([2, 2, 3, 4]))
    number = data.draw(st.integers(size, 8))
    count = data.draw(st.integers(1, number // size))
    kinds = data.draw(st.sampled_from([["PHB", "SYS"], ["HCCS"], ["SIO", "HCCS_SW", "PIX", "PHB", "SYS", "NA"]]))
    ids = sorted(data.draw(st.lists(st.integers(0, 63), min_size=number, max_size=number, unique=True)))
    links = {one: {} for one in ids}
    for one, other in itertools.combinations(ids, 2):
        links[one][other] = links[other][one] = data.draw(st.sampled_from(kinds))
    nodes = {one: data.draw(st.sampled_from([0, 1, None])) for one in ids}
    cut = Cut({one: Device(one, nodes[one], None, "", one, None, None) for one in ids}, links, ids, size)
    groups = cut.best(count)
    assert not cut.limited
    assert len(groups) == count
    best = min((cost_of(other, links, nodes), other) for other in partitions(ids, size, count))
    assert (cost_of(groups, links, nodes), groups) == best


def test_links_without_any_pattern_are_cut_in_bounded_work():
    links = {one: {other: ["SIO", "HCCS", "PIX", "PHB", "SYS"][(one * other + one + other) ** 2 % 5] for other in range(24) if other != one}
             for one in range(24)}
    cut = Cut({one: Device(one, one % 3, None, "", one, None, None) for one in range(24)}, links, range(24), 4)
    assert len(cut.best(6)) == 6
    assert cut.limited
    assert cut._seen < 2 * placement.SEARCH_LIMIT


def test_the_usual_machine_takes_no_search():
    """What keeps 1,000 machines under a second: interchangeable devices are tried once."""
    for topology, size in (("910b4-epyc-report", 2), ("a3-16-dies-from-source", 2), ("a3-16-dies-from-source", 4)):
        table = npu_smi.parse_topo((TOPOLOGIES / topology / "input.txt").read_text())
        cut = Cut({one: Device(one, None, None, "", one, None, None) for one in table["links"]}, table["links"], table["links"], size)
        cut.best(len(table["links"]) // size)
        assert cut._seen <= 400


# ------------------------------------------------------------------------------------------------------------ stability

def test_what_exists_keeps_its_devices():
    odd = [present("qwen38-tp2-0", [3, 4]), present("qwen38-tp2-2", [7, 0])]
    plan = place(TP2, machine(instances=odd))
    assert devices_of(plan) == {"qwen38-tp2-0": [3, 4], "qwen38-tp2-1": [1, 2], "qwen38-tp2-2": [0, 7], "qwen38-tp2-3": [5, 6]}
    assert [line.rpartition(": ")[2] for line in plan["explain"]] == ["kept", "new", "kept", "new"]


def test_the_second_run_answers_as_the_first():
    first = place(TP2, machine())
    again = place(TP2, machine(instances=[present(one["name"], one["devices"], cpus=one["cpus"], numa_nodes=one["numa_nodes"])
                                          for one in first["instances"]]))
    assert again["instances"] == first["instances"]


def test_replace_placement_cuts_anew():
    plan = place(TP2, machine(instances=[present("qwen38-tp2-0", [3, 4])]), replace=True)
    assert devices_of(plan) == PAIRS
    assert plan["explain"][0].endswith("placed anew")


def test_growing_moves_nobody_and_shrinking_takes_the_last():
    two = [present("qwen38-tp2-0", [2, 3]), present("qwen38-tp2-1", [4, 5])]
    grown = place(resolved(qwen38_tp2={"tensor_parallel_size": 2, "instances": 3}), machine(instances=two))
    assert devices_of(grown) == {"qwen38-tp2-0": [2, 3], "qwen38-tp2-1": [4, 5], "qwen38-tp2-2": [0, 1]}
    shrunk = place(resolved(qwen38_tp2={"tensor_parallel_size": 2, "instances": 1}), machine(instances=two))
    assert devices_of(shrunk) == {"qwen38-tp2-0": [2, 3]}
    assert devices_of(place(resolved(qwen38_tp2={"instances": 0}), machine(instances=two))) == {}


def test_another_size_is_cut_anew():
    plan = place(resolved(qwen38_tp2={"tensor_parallel_size": 4}), machine(instances=[present(*item) for item in PAIRS.items()]))
    assert devices_of(plan) == {"qwen38-tp2-0": [0, 1, 2, 3], "qwen38-tp2-1": [4, 5, 6, 7]}


def test_instances_of_other_names_leave_their_devices():
    plan = place(TP2, machine(instances=[present("old-0", [0, 1]), present("qwen38-tp2-x", [2, 3]), present("qwen38-tp2-3", [0, 1])]))
    assert devices_of(plan) == {"qwen38-tp2-0": [2, 3], "qwen38-tp2-1": [4, 5], "qwen38-tp2-2": [6, 7], "qwen38-tp2-3": [0, 1]}


def test_a_record_that_contradicts_itself():
    plan = place(TP2, machine(instances=[present("qwen38-tp2-0", [0, 1]), present("qwen38-tp2-1", [1, 2])]))
    assert devices_of(plan)["qwen38-tp2-0"] == [0, 1]
    assert messages(plan, "warning") == ["instance qwen38-tp2-1 is recorded on devices of qwen38-tp2-0; it is placed anew"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_trouble_with_devices_moves_nobody(data):
    """Whatever falls sick, is quarantined, held or gone: instances keep their devices, and only those concerned are blocked."""
    size = data.draw(st.sampled_from([1, 2, 4]))
    deployments = resolved(d={"tensor_parallel_size": size})
    first = place(deployments, machine())["instances"]
    known = [present(one["name"], one["devices"], cpus=one["cpus"], numa_nodes=one["numa_nodes"]) for one in first]
    troubles = {f"d{number}": data.draw(st.sampled_from([{}, {}, {"health": "Critical"}, None, {"holders": [{"pid": 1, "name": "x"}]}]))
                for number in range(8)}
    quarantined = data.draw(st.sets(st.integers(0, 7), max_size=2))
    plan = place(deployments, machine(instances=known, **troubles), quarantined=quarantined)
    assert devices_of(plan) == {one["name"]: one["devices"] for one in first}
    for instance, before in zip(plan["instances"], first):
        concerned = any(device in quarantined or troubles[f"d{device}"] != {} for device in instance["devices"])
        assert (instance["state"] == "blocked") == concerned
        assert instance["port"] == before["port"]
        assert instance["hccl_ports"] == before["hccl_ports"]
        assert instance["cpus"] == before["cpus"]


# --------------------------------------------------------------------------------------------------------- blocked ones

@pytest.mark.parametrize(("trouble", "kind", "reason"), [
    ({"d3": {"health": "Alarm"}}, "health", "device 3 is in Alarm"),
    ({"d3": {"health": "Critical"}}, "health", "device 3 is in Critical"),
    ({"d3": {"holders": [{"pid": 4711, "name": "python3", "container": "minimax-h3", "unit": None, "ours": False}]}}, "held",
     "device 3 is held by pid 4711 (python3) in minimax-h3"),
    ({"d3": {"holders": [{"pid": 4711, "name": None, "container": None, "unit": "sd35-npu@3.service", "ours": False}]}}, "held",
     "device 3 is held by pid 4711 (name unknown) in sd35-npu@3.service"),
    ({"d3": {"holders": [{"pid": 4711, "name": "", "container": None, "unit": None, "ours": False}]}}, "held",
     "device 3 is held by pid 4711 (name unknown)"),
    ({"d2": {"health": "Alarm"}, "d3": {"holders": [{"pid": 1, "name": "x"}]}}, "held",
     "device 2 is in Alarm; device 3 is held by pid 1 (x)"),
])
def test_reasons(trouble, kind, reason):
    plan = place(TP2, machine(**trouble))
    assert devices_of(plan) == PAIRS
    states = {instance["name"]: (instance["state"], instance["blocked_by"], instance["reason"]) for instance in plan["instances"]}
    assert states.pop("qwen38-tp2-1") == ("blocked", kind, reason)
    assert set(states.values()) == {("placed", None, None)}
    assert messages(plan, "warning") == [f"instance qwen38-tp2-1 is blocked: {reason}"]


def test_our_own_instances_and_lesser_ills_block_nothing():
    plan = place(TP2, machine(d0={"holders": [{"pid": 1, "name": "VLLMWorker_TP", "ours": True, "instance": "old-0"}]},
                              d1={"health": "Warning"}, d2={"health": "UNKNOWN"}))
    assert {instance["state"] for instance in plan["instances"]} == {"placed"}


def test_a_choice_goes_to_healthy_devices():
    """Three of four: the pair with the sick device is the one left out."""
    plan = place(resolved(d={"tensor_parallel_size": 2, "instances": 3}), machine("910b3-kunpeng-pairs", d0={"health": "Alarm"}))
    assert [instance["devices"] for instance in plan["instances"]] == [[2, 3], [4, 5], [6, 7]]
    assert plan["explain"][-1] == "machine66: devices 0,1: without an instance"


def test_a_quarantined_device():
    plan = place(TP2, machine(), quarantined=[6])
    assert devices_of(plan) == PAIRS
    assert (plan["instances"][3]["blocked_by"], plan["instances"][3]["reason"]) == ("quarantined", "device 6 is in quarantined_devices")
    assert messages(plan) == []


def test_quarantining_a_device_that_is_not_there():
    plan = place(TP2, machine(), quarantined=[60])
    assert devices_of(plan) == PAIRS
    assert messages(plan, "warning") == [
        "quarantined_devices names device 60, this machine has 0-7; correct it, or the device you mean stays in use"]


def test_a_device_gone_from_a_running_machine_blocks_its_instance():
    known = [present(*item) for item in PAIRS.items()]
    for deployments in (TP2, resolved(qwen38_tp2={"tensor_parallel_size": 2, "expected_devices": 8})):
        plan = place(deployments, machine(instances=known, d5=None))
        assert devices_of(plan) == PAIRS
        assert (plan["instances"][2]["blocked_by"], plan["instances"][2]["reason"]) == ("absent", "device 5 is not there")
        assert messages(plan) == []


def test_a_dead_driver_removes_nothing():
    facts = {"vendor": "huawei", "reason": "npu-smi info: the driver or its devices do not answer; check dmesg", "devices": [],
             "instances": [present(*item, cpus="0-31,64-95", numa_nodes=[0]) for item in PAIRS.items()]}
    plan = place(TP2, facts)
    assert devices_of(plan) == PAIRS
    assert {instance["blocked_by"] for instance in plan["instances"]} == {"driver"}
    assert plan["instances"][0]["cpus"] == "0-31,64-95"
    assert plan["assumed"] is False
    assert messages(plan)[0].startswith("no device is shown: npu-smi info: the driver or its devices do not answer")


# ------------------------------------------------------------------------------------------------ several deployments

def test_deployments_share_a_machine_and_no_device():
    plan = place(resolved(big={"tensor_parallel_size": 4, "instances": 1}, small={"first_port": 9000}), machine())
    assert devices_of(plan) == {"big-0": [0, 1, 2, 3], "small-0": [4], "small-1": [5], "small-2": [6], "small-3": [7]}
    assert [instance["port"] for instance in plan["instances"]] == [8000, 9000, 9001, 9002, 9003]


def test_fixed_lists_take_their_devices_out():
    plan = place(resolved(a={"tensor_parallel_size": 2}, b={"devices": [0, 5], "first_port": 9000}), machine())
    assert devices_of(plan) == {"a-0": [1, 2], "a-1": [3, 4], "a-2": [6, 7], "b-0": [0], "b-1": [5]}


def test_a_new_deployment_takes_from_all_only_the_last():
    known = [present(*item) for item in PAIRS.items()]
    plan = place(resolved(qwen38_tp2={"tensor_parallel_size": 2}, other={"instances": 1, "first_port": 9000}), machine(instances=known))
    kept = devices_of(plan)
    assert kept.pop("other-0") == [6]
    assert kept == {name: devices for name, devices in PAIRS.items() if name != "qwen38-tp2-3"}


@pytest.mark.parametrize(("written", "message"), [
    ({"a": {"instances": 5, "tensor_parallel_size": 2}},
     "deployment a: devices for 5 instances of 2 each are asked, there are 8 on the machine, room for 4; lower instances"),
    ({"a": {"tensor_parallel_size": 16}}, "deployment a: devices for an instance of 16 are asked, there are 8 on the machine, room for 0;"),
    ({"a": {"instances": 6}, "b": {"instances": 3, "first_port": 9000}},
     "deployment b: devices for 3 instances of 1 each are asked, there are 8 on the machine, 2 of them left by other deployments, room"),
    ({"a": {}, "b": {"first_port": 9000}},
     "deployment b: devices for an instance of 1 are asked, there are 8 on the machine, 0 of them left by other deployments, room for 0;"),
    ({"a": {"devices": [0, 1]}, "b": {"devices": [1, 2], "first_port": 9000}},
     "deployment b: device 1 is also claimed by deployment a; give each device to one deployment"),
    ({"a": {"devices": [7, 8]}}, "deployment a: device 8 is not on this machine, it has 0-7; correct `devices`"),
    ({"a": {"instances": 2}, "b": {"instances": 2, "first_port": 8001}}, "port 8001 is asked for by a-1 and b-0; give their deployments"),
    ({"a": {"instances": 1, "first_port": 60010}}, "port 60010 of a-0 is one of HCCL's host ports (60000-60127); choose another"),
    ({"a": {"first_port": 65534}}, "port 65536 of a-2 does not exist; lower first_port"),
    ({"a": {"expected_devices": 9}}, "8 of 9 expected devices are there, missing: 8; repair the machine, list the missing in quarantined"),
])
def test_what_cannot_be(written, message):
    assert any(found.startswith(message) for found in messages(place(resolved(**written), machine())))


def test_expected_devices_that_are_missing():
    deployments = resolved(d={"tensor_parallel_size": 2, "expected_devices": 8})
    assert messages(place(deployments, machine(d5=None)))[0].startswith("7 of 8 expected devices are there, missing: 5;")
    plan = place(deployments, machine(d5=None), quarantined=[5])
    assert messages(plan) == []
    assert devices_of(plan) == {"d-0": [0, 1], "d-1": [2, 3], "d-2": [4, 5], "d-3": [6, 7]}
    assert plan["instances"][2]["state"] == "blocked"
    assert messages(place(deployments, machine())) == []


def test_expected_devices_where_ids_say_nothing_of_the_missing():
    plan = place(resolved(d={"expected_devices": 4}), machine("a3-container-two-dies"))
    assert messages(plan)[0].startswith("2 of 4 expected devices are there; repair")


# ------------------------------------------------------------------------------------------------- planned without facts

def test_a_virgin_machine_is_planned_from_expected_devices():
    plan = place(resolved(d={"tensor_parallel_size": 2, "expected_devices": 8}),
                 {"vendor": None, "reason": "npu-smi is not there: the driver is not installed", "devices": [], "instances": []})
    assert plan["assumed"] is True
    assert [instance["devices"] for instance in plan["instances"]] == list(PAIRS.values())
    assert plan["instances"][0]["cpus"] is None
    assert plan["instances"][0]["state"] == "placed"
    assert messages(plan) == []
    assert messages(plan, "warning") == ["npu-smi is not there: the driver is not installed; placement assumes 8 devices"]


@pytest.mark.parametrize(("written", "number"), [
    ({"instances": 3, "tensor_parallel_size": 2}, 3), ({"devices": [2, 3, 5]}, 3), ({}, 0),
])
def test_a_virgin_machine_of_unknown_size(written, number):
    plan = place(resolved(d=written), {})
    assert plan["assumed"] is True
    assert len(plan["instances"]) == number
    assert messages(plan) == []
    assert "expected_devices" in messages(plan, "warning")[0]


def test_no_deployments_need_nothing():
    assert place({}, {}) == {"instances": [], "findings": [], "explain": [], "assumed": True}
    assert place({}, machine())["instances"] == []


# -------------------------------------------------------------------------------------------------------- cores, runtimes

def test_instances_may_be_left_unbound():
    plan = place(resolved(d={"numa_binding": "none"}), machine())
    assert {(tuple(instance["numa_nodes"]), instance["cpus"]) for instance in plan["instances"]} == {((), None)}
    assert plan["explain"][0] == "machine66: d-0: device 0, NUMA node 0, not bound (numa_binding: none), port 8000: new"


def test_unknown_affinity_binds_nothing():
    plan = place(TP2, machine("a3-16-dies-from-source"))
    assert {(tuple(instance["numa_nodes"]), instance["cpus"]) for instance in plan["instances"]} == {((), None)}


def test_a_split_instance_has_both_nodes():
    plan = place(resolved(d={"tensor_parallel_size": 8}), machine())
    assert (plan["instances"][0]["numa_nodes"], plan["instances"][0]["cpus"]) == ([0, 1], "0-127")


def with_cores(facts):
    """The report's machine with its hardware threads: CPU n and n + 64 are one core."""
    for node in facts["numa_nodes"]:
        first = parse_cpu_list(node["cpus"])[0]
        node["cores"] = [f"{core},{core + 64}" for core in range(first, first + 32)]
    return facts


@pytest.mark.parametrize("size", [1, 2, 4])
def test_own_cores_are_disjoint_whole_and_leave_some(size):
    plan = place(resolved(d={"tensor_parallel_size": size, "numa_binding": "cores"}), with_cores(machine()))
    owned = [set(parse_cpu_list(instance["cpus"])) for instance in plan["instances"]]
    assert sum(map(len, owned)) == len(set().union(*owned)) == 2 * 4 * 7 * 2
    for instance, cpus in zip(plan["instances"], owned):
        assert {cpu ^ 64 for cpu in cpus} == cpus, "siblings stay together"
        assert cpus <= set(parse_cpu_list(["0-31,64-95", "32-63,96-127"][instance["numa_nodes"][0]]))


def test_own_cores_follow_devices_and_not_the_number_of_instances():
    facts = with_cores(machine())
    four = place(resolved(d={"tensor_parallel_size": 2, "numa_binding": "cores"}), facts)["instances"]
    one = place(resolved(d={"tensor_parallel_size": 2, "numa_binding": "cores", "instances": 1}), facts)["instances"]
    assert one[0]["cpus"] == four[0]["cpus"]


def test_own_cores_where_the_kernel_names_none():
    plan = place(resolved(d={"numa_binding": "cores"}), machine())
    assert plan["instances"][0]["cpus"] == "1-15"


def test_a_venv_sees_logic_ids():
    deployments = resolved(d={"tensor_parallel_size": 2, "runtime": "venv"})
    facts = machine("a3-container-two-dies", d12={"logic_id": 0}, d13={"logic_id": 1})
    [instance] = place(deployments, facts)["instances"]
    assert (instance["devices"], instance["visible_devices"]) == ([12, 13], "0,1")
    assert place(deployments, machine())["instances"][1]["visible_devices"] == "2,3"


def test_what_the_operator_says_wins():
    deployments = resolved(d={"tensor_parallel_size": 2, "env": {"HCCL_IF_BASE_PORT": 50000, "X": "y"},
                              "container": {"devices": ["/dev/infiniband/uverbs0"]}})
    instance = place(deployments, machine())["instances"][0]
    assert (instance["env"]["HCCL_IF_BASE_PORT"], instance["env"]["X"]) == ("50000", "y")
    assert instance["device_nodes"][-1] == "/dev/infiniband/uverbs0"


# ------------------------------------------------------------------------------------------------------- cards of two dies

def a3(instances=(), gone=(), cards=8):
    """An Atlas A3: two dies a card, phy id = 2 * card + chip."""
    dies = {f"d{number}": {"npu_id": number // 2, "name": "Ascend910"} for number in range(2 * cards)}
    return machine("a3-16-dies-from-source", instances=instances, **{**dies, **{f"d{number}": None for number in gone}})


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_an_instance_takes_whole_cards(size):
    plan = place(resolved(glm={"tensor_parallel_size": size}), a3())
    assert plan["findings"] == [] and len(plan["instances"]) == 16 // size
    for devices in devices_of(plan).values():
        assert sorted({device // 2 for device in devices}) == [device // 2 for device in devices][::2]


@pytest.mark.parametrize("size", [1, 3])
def test_an_instance_that_would_split_a_card_is_refused(size):
    plan = place(resolved(glm={"tensor_parallel_size": size}), a3())
    assert plan["instances"] == [] and "would split a card, whose 2 dies only work together" in messages(plan)[0]


def test_a_list_that_splits_a_card_is_refused():
    plan = place(resolved(glm={"tensor_parallel_size": 2, "devices": [0, 1, 2]}), a3())
    assert devices_of(plan) == {"glm-0": [0, 1]}
    assert "device 2 of 0-2 without the other" in messages(plan)[0]


def test_a_die_that_is_gone_blocks_its_instance_and_moves_nobody():
    before = place(resolved(glm={"tensor_parallel_size": 4}), a3())
    ran = [present(name, devices) for name, devices in devices_of(before).items()]
    for gone in range(16):
        plan = place(resolved(glm={"tensor_parallel_size": 4}), a3(ran, gone=[gone]))
        assert devices_of(plan) == devices_of(before)
        assert [instance["name"] for instance in plan["instances"] if instance["state"] == "blocked"] == [f"glm-{gone // 4}"]


def test_a_card_that_lost_a_die_gets_nothing_new():
    plan = place(resolved(glm={"tensor_parallel_size": 2}), a3(gone=[5]))
    assert len(plan["instances"]) == 7 and not {4, 5} & {device for devices in devices_of(plan).values() for device in devices}


def test_two_chips_of_a_duo_card_are_independent():
    facts = machine("910b4-epyc-report", **{f"d{number}": {"npu_id": number // 2, "name": "310P3"} for number in range(8)})
    assert len(place(resolved(small={"tensor_parallel_size": 1}), facts)["instances"]) == 8


def test_more_nvlinks_are_tighter():
    facts = machine("910b4-epyc-report")
    pairs = {frozenset(pair) for pair in ((0, 5), (1, 4), (2, 7), (3, 6))}
    facts["links"] = {str(one): {str(other): "NV4" if {one, other} in pairs else "NV1" for other in range(8) if other != one} for one in range(8)}
    for device in facts["devices"]:
        device["numa_node"] = 0
    plan = place(TP2, facts)
    assert sorted(devices_of(plan).values()) == [[0, 5], [1, 4], [2, 7], [3, 6]]
    assert {instance["link"] for instance in plan["instances"]} == {"NV4"}


# ------------------------------------------------------------------------------------------- CPUs that may not be used

def with_cpu(facts, **cpu):
    facts["cpu"] = {"architecture": "x86_64", "isolated": None, "allowed": None, **cpu}
    return facts


def explained(plan, words):
    return any(words in line for line in plan["explain"])


def test_isolated_cpus_are_left_alone():
    plan = place(TP2, with_cpu(machine(), isolated="0-3,64-67"))
    assert plan["instances"][0]["cpus"] == "4-31,68-95" and plan["instances"][3]["cpus"] == "32-63,96-127"
    assert explained(plan, "CPUs 0-3,64-67 are isolated")


def test_a_cpuset_that_services_live_in_is_kept():
    plan = place(TP2, with_cpu(machine(), allowed="16-47"))
    assert [instance["cpus"] for instance in plan["instances"]] == ["16-31", "16-31", "32-47", "32-47"]
    assert explained(plan, "confined to CPUs 16-47")


def test_a_node_none_of_whose_cpus_may_be_used_binds_nothing_and_says_so():
    plan = place(TP2, with_cpu(machine(), allowed="0-31"))
    assert plan["instances"][3]["cpus"] is None
    assert explained(plan, "qwen38-tp2-3: devices 6,7 (PHB), NUMA node 1, not bound (no CPU there may be used)")


def test_own_cores_are_whole_and_usable():
    facts = with_cpu(with_cores(machine()), isolated="1")
    plan = place(resolved(one={"tensor_parallel_size": 1, "numa_binding": "cores"}), facts)
    threads = {cpu for node in facts["numa_nodes"] for core in node["cores"] if 1 in parse_cpu_list(core) for cpu in parse_cpu_list(core)}
    used = [cpu for instance in plan["instances"] for cpu in parse_cpu_list(instance["cpus"])]
    assert len(used) == len(set(used)) and not threads & set(used)


def test_too_few_cores_are_said():
    plan = place(resolved(one={"tensor_parallel_size": 1, "numa_binding": "cores"}), with_cpu(with_cores(machine()), allowed="0-1,32-63,96-127"))
    assert "NUMA node 0 has" in messages(plan, "warning")[0] and "cannot give each its own" in messages(plan, "warning")[0]


def test_nodes_without_cpus_or_memory_lend_from_the_nearest():
    facts = machine()
    facts["numa_nodes"] = [
        {"id": 0, "cpus": "", "cores": [], "memory_mb": 1000, "distances": {"0": 10, "1": 21, "2": 12}},
        {"id": 1, "cpus": "32-63,96-127", "cores": None, "memory_mb": 0, "distances": {"0": 21, "1": 10, "2": 31}},
        {"id": 2, "cpus": "0-31,64-95", "cores": None, "memory_mb": 1000, "distances": {"0": 12, "1": 31, "2": 10}}]
    plan = place(TP2, facts)
    assert [(instance["numa_nodes"], instance["cpus"]) for instance in plan["instances"]] == [
        ([0], "0-31,64-95"), ([0], "0-31,64-95"), ([0], "32-63,96-127"), ([0], "32-63,96-127")]
    assert explained(plan, "NUMA node 1, which has no memory: that of node 0")


# ------------------------------------------------------------------------------------------- the engine's own CPU binding

def additional(plan):
    arguments = plan["instances"][0]["arguments"]
    return json.loads(arguments[arguments.index("--additional-config") + 1]) if "--additional-config" in arguments else None


@pytest.mark.parametrize(("facts", "written", "config"), [
    (machine(), {"numa_binding": "cores"}, {"enable_cpu_binding": False}),
    (machine(), {"numa_binding": "node"}, None),
    (machine(), {"numa_binding": "none"}, None),
    (a3(), {"numa_binding": "none"}, None),
    (machine(), {"numa_binding": "cores", "vllm_version": "0.17.1"}, None),
    (machine(), {"numa_binding": "cores", "args": {"additional_config": {"weight_prefetch": True}}},
     {"enable_cpu_binding": False, "weight_prefetch": True}),
])
def test_the_engine_binds_only_where_we_do_not(facts, written, config):
    plan = place(resolved(one={"tensor_parallel_size": 2, **written}), with_cpu(facts, architecture="aarch64"))
    assert additional(plan) == config and messages(plan, "warning") == []


def test_the_engine_never_binds_in_the_cpuset_of_a_card_of_two_dies():
    facts = with_cpu(a3(), architecture="aarch64")
    for device in facts["devices"]:
        device["numa_node"] = 0
    facts["numa_nodes"] = [{"id": 0, "cpus": "0-159", "cores": None, "devices": []}]
    assert additional(place(resolved(one={"tensor_parallel_size": 2}), facts)) == {"enable_cpu_binding": False}


def test_on_x86_the_engine_does_not_bind_and_is_told_nothing():
    assert additional(place(resolved(one={"tensor_parallel_size": 2, "numa_binding": "cores"}), with_cpu(machine()))) is None


def test_two_bindings_at_once_are_said():
    deployments = resolved(one={"tensor_parallel_size": 2, "numa_binding": "cores", "args": {"additional_config": {"enable_cpu_binding": True}}})
    plan = place(deployments, with_cpu(machine(), architecture="aarch64"))
    assert additional(plan) == {"enable_cpu_binding": True} and "both bind its CPUs" in messages(plan, "warning")[0]
