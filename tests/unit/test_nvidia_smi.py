"""nvidia-smi's outputs: real layouts are read back exactly, whatever is cut or contradictory is refused with its line."""
from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import nvidia_smi
from ansible_collections.llmops.ascend.plugins.module_utils.accelerators import Output, describe, read_gpus
from ansible_collections.llmops.ascend.plugins.module_utils.nvidia_smi import NvidiaSmiError, explain_failure, parse_gpus, parse_processes, parse_topo
from hypothesis import given, settings
from hypothesis import strategies as st

FIXTURES = Path(__file__).parent / "fixtures" / "nvidia_smi"


def text(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text()


def test_gpus():
    gpus = parse_gpus(text("gpus-4x4090"))
    assert gpus[0] == {
        "index": 0, "uuid": "GPU-00000000-1f2e-4c3b-9a70-0123456789ab", "name": "NVIDIA GeForce RTX 4090", "bus_id": "00000000:01:00.0",
        "memory_total_mb": 24564, "memory_used_mb": 21802, "temperature_c": 61, "power_w": 312.44, "utilization_pct": 98,
        "driver_version": "550.90.07", "mig": False}
    assert [gpu["power_w"] for gpu in gpus] == [312.44, 21.33, None, 19.85]


@pytest.mark.parametrize("unknown", ["[N/A]", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]", "ERR!"])
def test_what_the_tool_cannot_tell_is_none(unknown):
    line = f"0, GPU-0123abcd-1, 00000000:01:00.0, {', '.join([unknown] * 5)}, 550.90.07, Enabled, NVIDIA A100\n"
    gpu, = parse_gpus(line)
    assert (gpu["memory_total_mb"], gpu["memory_used_mb"], gpu["temperature_c"], gpu["power_w"], gpu["utilization_pct"]) == (None,) * 5
    assert gpu["mig"] is True


@pytest.mark.parametrize(("change", "reason"), [
    (lambda lines: lines[:1] + ["1, GPU-0000"] + lines[2:], "line 2: 2 fields"),
    (lambda lines: lines + [lines[0]], "line 5: 0 stands there twice"),
    (lambda lines: [lines[0].replace("21802", "99999")], "99999 MiB used of 24564"),
    (lambda lines: [lines[0].replace("24564", "24 GB")], "'24 GB' is no number"),
    (lambda lines: [lines[0].replace("GPU-", "XPU-")], "no UUID"),
    (lambda lines: [], "no GPU"),
])
def test_gpus_that_cannot_be_believed(change, reason):
    with pytest.raises(NvidiaSmiError, match=reason):
        parse_gpus("\n".join(change(text("gpus-4x4090").splitlines())))


def test_processes():
    assert parse_processes(text("processes")) == [
        {"uuid": "GPU-00000000-1f2e-4c3b-9a70-0123456789ab", "pid": 41822, "name": "/opt/venv/bin/python3", "memory_mb": 21780},
        {"uuid": "GPU-00000001-1f2e-4c3b-9a70-0123456789ab", "pid": 900, "name": "a, name with commas", "memory_mb": None}]
    assert parse_processes("") == []


def test_topology_of_two_sockets():
    topo = parse_topo(text("topo-4x4090"))
    assert topo["links"][0] == {1: "PHB", 2: "SYS", 3: "SYS"}
    assert topo["cpus"] == {0: "0-31,64-95", 1: "0-31,64-95", 2: "32-63,96-127", 3: "32-63,96-127"}
    assert topo["numa_nodes"] == {0: 0, 1: 0, 2: 1, 3: 1}


def test_nvlinks_network_cards_and_an_underlined_header():
    topo = parse_topo(text("topo-8xH100-nics-ansi"))
    assert set(topo["links"]) == set(range(8)) and set(topo["links"][3].values()) == {"NV18"}
    assert topo["cpus"][7] == "48-95,144-191"


def test_an_older_header_and_an_unknown_node():
    assert parse_topo(text("topo-2xA100-old-no-numa-id")) == {
        "links": {0: {1: "NV4"}, 1: {0: "NV4"}}, "cpus": {0: "0-63", 1: "0-63"}, "numa_nodes": {0: None, 1: None}}


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("GPU1\tPHB", "GPU1\tSYS", "GPU0 to GPU1 is PHB, and back SYS"),
    ("\nGPU3\t", "\nGPU4\t", "columns for GPU"),
    ("GPU1\tPHB\t X ", "GPU1\tPHB\tPHB", "GPU1 is PHB to GPU1"),
    ("GPU1\tPHB\t X \tSYS", "GPU1\tPHB\t X \tWHAT", "line 3: 'WHAT' is no link"),
    ("0-31,64-95", "0-31,64-9", "runs backwards"),
    ("GPU0\tGPU1", "GPU0\tGPU0", "twice"),
])
def test_topologies_that_cannot_be_believed(old, new, reason):
    with pytest.raises(NvidiaSmiError, match=reason):
        parse_topo(text("topo-4x4090").replace(old, new))


@pytest.mark.parametrize(("code", "said", "meaning"), [
    (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "not loaded"),
    (18, "Failed to initialize NVML: Driver/library version mismatch", "different versions"),
    (255, "Failed to initialize NVML: Unknown Error", "does not answer"),
    (6, "No devices were found", "sees no GPU"),
    (0, "No devices were found", "sees no GPU"),
    (15, "", "fallen off the bus"),
    (77, "something", "exit code 77"),
])
def test_failures_are_explained(code, said, meaning):
    failure = explain_failure(code, said)
    assert meaning in failure.meaning and failure.remedy


def test_success_is_no_failure():
    assert explain_failure(0, text("gpus-4x4090")) is None


@st.composite
def machines(draw):
    """Any machine as `topo -m` prints it: (text, links, cpus, nodes)."""
    count, nics = draw(st.integers(1, 16)), draw(st.integers(0, 4))
    link = st.sampled_from(["NV1", "NV4", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"])
    links = {one: {} for one in range(count)}
    for one in range(count):
        for other in range(one):
            links[one][other] = links[other][one] = draw(link)
    cpus = {gpu: draw(st.sampled_from([None, "0-7", "0-31,64-95", "5"])) for gpu in range(count)}
    nodes = {gpu: draw(st.sampled_from([None, 0, 1, 7])) for gpu in range(count)}
    titles = draw(st.sampled_from([["CPU Affinity"], ["CPU Affinity", "NUMA Affinity"], ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]]))
    between = draw(st.sampled_from(["\t", "  "]))
    names = [f"GPU{gpu}" for gpu in range(count)] + [draw(st.sampled_from(["NIC{}", "mlx5_{}"])).format(nic) for nic in range(nics)]
    lines = [between + between.join(names + titles)]
    if draw(st.booleans()):
        lines = [between + "\x1b[4m" + between.join(names + titles) + "\x1b[0m"]
    for row, name in enumerate(names):
        cells = [" X " if column == row else links[row][column] if row < count and column < count else "SYS" for column in range(len(names))]
        values = [cpus.get(row) or "N/A", str(nodes[row]) if nodes.get(row) is not None else "N/A", "N/A"][:len(titles)]
        lines.append(between.join([name, *cells, *(values if row < count else [])]))
    end = draw(st.sampled_from(["\n", "\r\n", " \n"]))
    return end.join(lines + ["", "Legend:", "", "  X    = Self"]), links, cpus, nodes if len(titles) > 1 else dict.fromkeys(nodes)


@settings(max_examples=150, deadline=None)
@given(machines())
def test_any_topology_is_read_back(machine):
    said, links, cpus, nodes = machine
    assert parse_topo(said) == {"links": links, "cpus": cpus, "numa_nodes": nodes}


@settings(max_examples=150, deadline=None)
@given(machines(), st.data())
def test_a_topology_without_one_of_its_rows_is_refused(machine, data):
    lines = machine[0].splitlines()
    gone = data.draw(st.integers(1, len(machine[1])))
    with pytest.raises(NvidiaSmiError):
        parse_topo("\n".join(lines[:gone] + lines[gone + 1:]))


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text("GPUX0123 \tNVSY\n,[]/A-"))
def test_no_text_makes_a_parser_crash(said):
    for parse in (parse_gpus, parse_processes, parse_topo):
        try:
            parse(said)
        except NvidiaSmiError as error:
            assert str(error)
    nvidia_smi.parse_minor(said)
    explain_failure(1, said)


MINORS = {"0000:01:00.0": 0, "0000:25:00.0": 1, "0000:c1:00.0": 3, "0000:e1:00.0": 2}
NODES = [{"id": 0, "cpus": "0-31,64-95", "cores": None, "memory_mb": 1}, {"id": 1, "cpus": "32-63,96-127", "cores": None, "memory_mb": 1}]


def facts(minors=MINORS, numbers=(0, 1, 2, 3), **outputs):
    said = {"gpus": Output(0, text("gpus-4x4090")), "processes": Output(0, text("processes")), "topo": Output(0, text("topo-4x4090")), **outputs}
    return describe(read_gpus(said, minors, list(numbers)), NODES, lambda bus_id: 0 if bus_id in ("0000:01:00.0", "0000:25:00.0") else 1,
                    lambda pid: {"name": "python3", "unit": "vllm-0.service", "container": None}, {}, [], [])


def test_facts_are_those_of_any_machine_and_minors_are_mapped():
    known = facts()
    assert (known["vendor"], known["reason"], known["driver_version"], known["warnings"]) == ("nvidia", None, "550.90.07", [])
    assert [(device["phy_id"], device["logic_id"], device["node"]) for device in known["devices"]] == [
        (0, 0, "/dev/nvidia0"), (1, 1, "/dev/nvidia1"), (2, 3, "/dev/nvidia2"), (3, 2, "/dev/nvidia3")]
    assert known["links"]["0"] == {"1": "PHB", "2": "SYS", "3": "SYS"} and known["links"]["2"]["3"] == "PHB"
    assert [node["devices"] for node in known["numa_nodes"]] == [[0, 1], [2, 3]]
    assert known["devices"][0]["holders"] == [{"pid": 41822, "name": "/opt/venv/bin/python3", "memory_mb": 21780, "unit": "vllm-0.service",
                                               "container": None, "instance": None, "ours": False}]


def test_without_the_driver_s_files_indices_stand_for_minors_only_where_the_nodes_agree():
    assert [device["phy_id"] for device in facts(minors={})["devices"]] == [0, 1, 2, 3]
    lost = facts(minors={}, numbers=(0, 2))
    assert [device["phy_id"] for device in lost["devices"]] == [None] * 4
    assert len([line for line in lost["warnings"] if "number is not known" in line]) == 4


def test_a_dead_driver_is_a_reason():
    known = facts(gpus=Output(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."))
    assert known["devices"] == [] and "the driver is not loaded" in known["reason"]


def test_a_broken_topology_is_a_warning_and_sysfs_still_places():
    known = facts(topo=Output(0, "garbage"))
    assert known["links"] == {} and [device["numa_node"] for device in known["devices"]] == [0, 0, 1, 1]
    assert any("topo -m" in line for line in known["warnings"])
