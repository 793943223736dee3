"""Facts: npu-smi, sysfs, /proc and docker put together."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import accelerators
from ansible_collections.llmops.ascend.plugins.module_utils.accelerators import Output, Reading

FIXTURES = Path(__file__).parent / "fixtures/npu_smi"
NODES = [{"id": 0, "cpus": "0-31,64-95", "cores": None, "memory_mb": 1}, {"id": 1, "cpus": "32-63,96-127", "cores": None, "memory_mb": 1}]


def output(name, exit_code=0):
    return Output(exit_code, (FIXTURES / name / "input.txt").read_text())


def mapping(rows, columns=("NPU ID", "Chip ID", "Chip Logic ID", "Chip Phy-ID", "Chip Name")):
    return Output(0, "\n".join("\t" + "".join(f"{cell!s:<31}" for cell in row) for row in [columns, *rows]))


def numbered(count):
    """`info -m` of as many cards, all of whose ids are the same."""
    return mapping([(number, 0, number, number, "910B4") for number in range(count)])


A2 = {"info": output("info/910b4-24.1.rc3-holders-without-name"), "map": numbered(8), "topo": output("topo/910b4-epyc-report"),
      "board": output("board/910-23.0.5")}


def ids(reading):
    return [tuple(device[key] for key in ("npu_id", "chip_id", "logic_id", "phy_id", "node")) for device in reading.devices]


def test_the_reports_machine():
    reading = accelerators.read_npus(A2, list(range(8)))
    assert (reading.vendor, reading.reason, reading.warnings) == ("huawei", None, [])
    assert reading.versions == {"tool_version": "24.1.rc3", "driver_version": "23.0.5", "firmware_version": "7.1.0.7.220"}
    assert ids(reading)[7] == (7, 0, 7, 7, "/dev/davinci7")
    assert reading.devices[0] == {
        "npu_id": 0, "chip_id": 0, "logic_id": 0, "phy_id": 0, "node": "/dev/davinci0", "name": "910B4", "health": "OK",
        "bus_id": "0000:c1:00.0", "hbm_total_mb": 32768, "hbm_used_mb": 22283, "temperature_c": 36, "power_w": 85.0,
        "utilization_pct": 0}
    assert reading.links[0][3] == "PHB"
    assert reading.links[0][4] == "SYS"
    assert reading.cpus[4] == "32-63,96-127"
    assert reading.processes[0] == (0, 582939, "", 19502)


def test_ids_that_are_all_different():
    """Four cards of two chips, NPU ids 1536 to 2304: everything goes by phy id."""
    reading = accelerators.read_npus({
        "info": output("info/310p3-24.1.0.1-sparse-npu-ids"),
        "map": mapping([(1536 + 256 * (number // 2), number % 2, number, number, "310P3") for number in range(8)]),
        "topo": Output(193, "This device does not support querying topo.")}, list(range(8)))
    assert ids(reading)[2] == (1792, 0, 2, 2, "/dev/davinci2")
    assert reading.devices[0]["hbm_total_mb"] == 44280
    assert reading.warnings == ["npu-smi info -t topo: not supported on this device"]
    assert reading.links == {}


def test_two_dies_to_a_card_seen_from_a_container():
    lines = (FIXTURES / "info/a3-24.1.rc3.3/input.txt").read_text().splitlines()
    info = "\n".join(lines[:5] + [line for line in lines if line.startswith("| 6     Asc") or "0000:85" in line or "0000:87" in line])
    reading = accelerators.read_npus({
        "info": Output(0, info),
        "map": mapping([(6, 0, 0, 12, "Ascend910"), (6, 1, 1, 13, "Ascend910"), (6, 2, "-", "-", "Mcu")]),
        "topo": output("topo/a3-container-two-dies")}, [12, 13])
    assert ids(reading) == [(6, 0, 0, 12, "/dev/davinci12"), (6, 1, 1, 13, "/dev/davinci13")]
    assert reading.links == {12: {13: "SIO"}, 13: {12: "SIO"}}
    assert reading.warnings == []


NINE = Output(0, "\n".join(
    f"| {npu}     910B3               | OK            | 90.0        40                0    / 0             |\n"
    f"| 0                         | 0000:C{npu - 7}:00.0  | 0           0    / 0          3314 / 65536         |" for npu in (8, 9)))


def test_an_old_driver_names_no_phy_ids():
    """NPU ids 8 and 9 are logic ids 0 and 1, and so are the device nodes; the table of links counts NPU ids."""
    topo = Output(0, "NPU8 X HCCS 0-31,64-95\nNPU9 HCCS X 32-63,96-127\n")
    outputs = {"info": NINE, "map": output("map/910b-four-columns"), "topo": topo}
    reading = accelerators.read_npus(outputs, [0, 1])
    assert ids(reading) == [(8, 0, 0, 0, "/dev/davinci0"), (9, 0, 1, 1, "/dev/davinci1")]
    assert (reading.links, reading.cpus) == ({0: {1: "HCCS"}, 1: {0: "HCCS"}}, {0: "0-31,64-95", 1: "32-63,96-127"})

    reading = accelerators.read_npus(outputs, [4, 5])
    assert [device["phy_id"] for device in reading.devices] == [None, None]
    assert reading.warnings[0] == "chip 0 of NPU 8: its /dev/davinci number is not known, so it is not used"


def test_the_950_counts_npu_ids_as_logic_ids():
    reading = accelerators.read_npus({"info": output("info/950"), "map": output("map/950")}, [0])
    assert ids(reading) == [(0, 0, 0, 0, "/dev/davinci0")]
    assert reading.devices[0]["hbm_total_mb"] == 86016


@pytest.mark.parametrize(("changed", "warning"), [
    ({"map": Output(187, "dcmi module initialize failed. ret is -8005")}, "npu-smi info -m: the driver or its devices do not answer"),
    ({"map": numbered(7)}, "chip 0 of NPU 7 is missing in npu-smi info -m"),
    ({"map": numbered(9)}, "chip 0 of NPU 8 is missing in npu-smi info"),
    ({"topo": output("topo/a3-container-two-dies")}, "shows Phy-ID 12, 13, which are not the devices of npu-smi info"),
    ({"topo": Output(0, "NPU0 X\nNPU0 X\n")}, "npu-smi info -t topo, line 2: row NPU0 comes twice"),
    ({"topo": Output(0, "This command cannot be executed on a VM.\n")}, "npu-smi info -t topo: not available on a virtual machine"),
    ({"board": Output(1, "npu get board type failed. ret is -8012")}, "npu-smi info -t board: the device is not ready"),
    ({"board": Output(0, A2["board"].text.replace(": OK", ": NOK"))}, "firmware 7.1.0.7.220 does not fit it"),
    ({"info": Output(0, A2["info"].text.replace("| 7       0                 | 99976", "| 9       0                 | 99976"))},
     "names pid 99976 on NPU 9, which is not in its table"),
])
def test_doubts_are_warnings(changed, warning):
    reading = accelerators.read_npus({**A2, **changed}, list(range(8)))
    assert reading.reason is None
    assert any(warning in said for said in reading.warnings)


def test_a_missing_device_node_is_a_warning():
    reading = accelerators.read_npus(A2, list(range(7)))
    assert reading.warnings == ["chip 0 of NPU 7: /dev/davinci7 is not there; reboot, or load the driver again"]


@pytest.mark.parametrize(("outputs", "reason"), [
    ({"info": Output(187, "dcmi module initialize failed. ret is -8005\n")},
     "npu-smi info: the driver or its devices do not answer; check"),
    ({"info": Output(0, "There is no NPU card on this server.")}, "npu-smi info: the machine shows no NPU; check `lspci"),
    ({"info": Output(0, "| broken")}, "npu-smi info, line 1: row without its right border"),
    ({"info": output("info/a3-24.1.rc3.3"), "map": mapping([(0, 0, 0, 5, "Ascend910")])}, "has phy id 0 in `info` and 5 in `info -m`"),
])
def test_tables_are_believed_whole_or_not_at_all(outputs, reason):
    reading = accelerators.read_npus(outputs, list(range(16)))
    assert reason in reading.reason
    assert reading.devices == []


# ------------------------------------------------------------------------------------------------- processes, containers

ID = "4f" * 32


@pytest.mark.parametrize(("text", "home"), [
    (f"0::/system.slice/docker-{ID}.scope\n", (None, ID)),
    (f"0::/lab-machine66/payload/system.slice/docker-{ID}.scope/init\n", (None, ID)),
    (f"12:devices:/docker/{ID}\n0::/system.slice/containerd.service\n", (None, ID)),
    (f"0::/machine.slice/libpod-{ID}.scope/container\n", (None, ID)),
    (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n", (None, ID)),
    ("0::/system.slice/sd35-npu@3.service\n", ("sd35-npu@3.service", None)),
    ("0::/user.slice/user-0.slice/user@0.service/app.slice/x.service\n", ("x.service", None)),
    ("0::/user.slice/user-0.slice/session-4.scope\n", (None, None)),
    ("", (None, None)),
])
def test_where_a_process_lives(text, home):
    assert accelerators.parse_cgroup(text) == home


def containers(*rows):
    return accelerators.parse_containers("".join("\t".join(row) + "\n" for row in rows))


OURS = (ID, "qwen38-tp2-0", "llmops.ascend", "qwen38-tp2-0", "abcd", "0,1")
FOREIGN = ("77" * 32, "minimax-h3", "", "", "", "")


def test_containers():
    assert containers(OURS, FOREIGN) == [
        {"id": ID, "name": "qwen38-tp2-0", "instance": "qwen38-tp2-0", "fingerprint": "abcd", "devices": [0, 1]},
        {"id": "77" * 32, "name": "minimax-h3", "instance": None, "fingerprint": None, "devices": []}]
    assert containers((ID, "x", "someone", "qwen38-tp2-0", "abcd", "0"))[0]["instance"] is None
    assert accelerators.parse_containers("\n") == []
    with pytest.raises(ValueError, match="expected 6 fields, not 1"):
        accelerators.parse_containers("Cannot connect to the Docker daemon")


RECORD = {"qwen38-tp2-1": {"deployment": "qwen38-tp2", "service": "s", "index": 1, "runtime": "container", "devices": [2, 3], "port": 8001,
                           "cpus": "0-31,64-95", "numa_nodes": [0], "address": "198.18.254.66", "unit": "qwen38-tp2-1.service"}}


def test_instances_are_recorded_or_run():
    running, recorded = accelerators.present_instances(RECORD, containers(OURS, FOREIGN))
    assert running == {
        "name": "qwen38-tp2-0", "deployment": "qwen38-tp2", "service": None, "index": 0, "runtime": "container", "devices": [0, 1],
        "port": None, "cpus": None, "numa_nodes": [], "address": None, "unit": "qwen38-tp2-0.service", "recorded": False,
        "running": True, "container": ID, "fingerprint": "abcd"}
    assert recorded == {"name": "qwen38-tp2-1", **RECORD["qwen38-tp2-1"], "recorded": True, "running": False, "container": None,
                        "fingerprint": None}


def facts(reading, node_of=lambda bus_id: None, homes=None, **changed):
    return accelerators.describe(**{
        "reading": reading, "nodes": NODES, "node_of": node_of, "home_of": lambda pid: (homes or {}).get(pid, {}), "record": {},
        "containers": [], "warnings": [], **changed})


def test_facts_of_the_reports_machine():
    found = facts(accelerators.read_npus(A2, list(range(8))), node_of=lambda bus_id: 0 if bus_id and bus_id[5] in "c0" else 1)
    assert found["vendor"] == "huawei"
    assert found["links"]["0"]["3"] == "PHB"
    assert [device["phy_id"] for device in found["devices"]] == list(range(8))
    assert found["devices"][0]["cpus"] == "0-31,64-95"
    assert found["devices"][0]["holders"] == [
        {"pid": 582939, "name": None, "memory_mb": 19502, "unit": None, "container": None, "instance": None, "ours": False}]
    assert found["numa_nodes"][0]["devices"] == [0, 1, 2, 3]
    # NPU 4 to 7 are at 81, 41, 82 and 42: this sysfs and that table agree
    assert found["warnings"] == []


def test_sysfs_and_table_disagree():
    found = facts(accelerators.read_npus(A2, list(range(8))), node_of=lambda bus_id: 1)
    assert found["warnings"][0] == ("device 0: sysfs says NUMA node 1 (CPUs 32-63,96-127), the topology table says CPUs 0-31,64-95; "
                                    "sysfs is used")
    assert found["numa_nodes"][1]["devices"] == list(range(8))


def test_holders_are_ours_or_named():
    reading = Reading("huawei", devices=[{"phy_id": number, "bus_id": None} for number in range(4)], processes=[
        (0, 11, "VLLMWorker_TP", 100), (1, 12, "", 100), (2, 13, "python3", 100), (3, 14, "gone", 100)])
    found = facts(reading, homes={
        11: {"container": ID}, 12: {"container": "77" * 32, "name": "python"}, 13: {"unit": "qwen38-tp2-1.service"}},
        record=RECORD, containers=containers(OURS, FOREIGN))
    holders = [device["holders"][0] for device in found["devices"]]
    assert [(holder["container"], holder["unit"], holder["instance"], holder["ours"]) for holder in holders] == [
        ("qwen38-tp2-0", None, "qwen38-tp2-0", True), ("minimax-h3", None, None, False),
        (None, "qwen38-tp2-1.service", "qwen38-tp2-1", True), (None, None, None, False)]
    assert holders[1]["name"] == "python"


def test_a_bare_machine_says_why_it_has_nothing():
    found = facts(Reading(None, "npu-smi is not there: the driver is not installed"), warnings=["from gathering"])
    assert (found["vendor"], found["devices"], found["links"], found["instances"]) == (None, [], {}, [])
    assert found["reason"].startswith("npu-smi is not there")
    assert found["warnings"] == ["from gathering"]
    assert found["numa_nodes"][0] == {**NODES[0], "devices": []}
