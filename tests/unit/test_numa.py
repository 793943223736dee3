"""CPU lists, sysfs and the comparison of its affinity with the tool's."""

from __future__ import annotations

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import numa
from hypothesis import given
from hypothesis import strategies as st


@given(st.sets(st.integers(0, 1023)))
def test_cpu_list_round_trip(cpus):
    assert numa.parse_cpu_list(numa.format_cpu_list(cpus)) == sorted(cpus)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_formatted_lists_are_the_shortest(cpus):
    parts = numa.format_cpu_list(cpus).split(",")
    assert len(parts) == sum(cpu - 1 not in cpus for cpu in cpus)


@pytest.mark.parametrize(("text", "cpus"), [
    ("", []), ("\n", []), ("0", [0]), ("0-3", [0, 1, 2, 3]), ("0-1,64-65\n", [0, 1, 64, 65]), ("5,0-1", [0, 1, 5]),
])
def test_cpu_lists(text, cpus):
    assert numa.parse_cpu_list(text) == cpus


@pytest.mark.parametrize(("text", "reason"), [
    ("3-1", "backwards"), ("0-3,2", "twice"), ("0,,1", "neither"), ("a", "neither"), ("0-", "neither"), ("-1", "neither"),
    ("0-3-5", "neither"),
])
def test_wrong_cpu_lists(text, reason):
    with pytest.raises(ValueError, match=reason):
        numa.parse_cpu_list(text)


@pytest.mark.parametrize(("text", "address"), [
    ("0000:C1:00.0", "0000:c1:00.0"), ("c1:00.0", "0000:c1:00.0"), ("00000000:0E:00.0", "0000:0e:00.0"), ("NA", None), ("", None),
])
def test_bus_ids(text, address):
    assert numa.normalise_bus_id(text) == address


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_nodes_from_sysfs(tmp_path):
    siblings = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}
    write(tmp_path, {
        "sys/devices/system/node/node0/cpulist": "0-1,4-5\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       16384000 kB\nNode 0 MemFree: 1 kB\n",
        "sys/devices/system/node/node10/cpulist": "2-3,6-7\n",
        "sys/devices/system/node/node2/cpulist": "\n",
        "sys/devices/system/node/node0/distance": "10 17 21\n",
        "sys/devices/system/node/node2/distance": "17 10\n",
        "sys/devices/system/node/has_cpu": "0,10\n",
        **siblings,
    })
    assert numa.read_nodes(tmp_path) == [
        {"id": 0, "cpus": "0-1,4-5", "cores": ["0,4", "1,5"], "memory_mb": 16000, "distances": {"0": 10, "2": 17, "10": 21}},
        {"id": 2, "cpus": "", "cores": [], "memory_mb": None, "distances": None},
        {"id": 10, "cpus": "2-3,6-7", "cores": ["2,6", "3,7"], "memory_mb": None, "distances": None},
    ]


def test_cores_are_unknown_where_the_kernel_names_none(tmp_path):
    write(tmp_path, {"sys/devices/system/node/node0/cpulist": "0-3\n"})
    assert numa.read_nodes(tmp_path)[0]["cores"] is None


def test_a_kernel_without_numa_has_no_nodes(tmp_path):
    assert numa.read_nodes(tmp_path) == []


@pytest.mark.parametrize(("content", "node"), [("1\n", 1), ("-1\n", -1), ("", None), ("none\n", None)])
def test_node_of_a_device(tmp_path, content, node):
    write(tmp_path, {"sys/bus/pci/devices/0000:c1:00.0/numa_node": content})
    assert numa.read_device_node("0000:C1:00.0", tmp_path) == node
    assert numa.read_device_node("0000:c2:00.0", tmp_path) is None
    assert numa.read_device_node(None, tmp_path) is None


NODES = [{"id": 0, "cpus": "0-31,64-95"}, {"id": 1, "cpus": "32-63,96-127"}, {"id": 2, "cpus": ""}]


@pytest.mark.parametrize(("sysfs", "table", "node", "cpus", "warning"), [
    (0, "0-31,64-95", 0, "0-31,64-95", None),
    (1, None, 1, "32-63,96-127", None),
    (1, "0-31,64-95", 1, "32-63,96-127", "sysfs says NUMA node 1 (CPUs 32-63,96-127), the topology table says CPUs 0-31,64-95"),
    (2, None, 2, None, None),
    (7, "0-31", None, "0-31", "NUMA node 7, which this machine does not have"),
    (-1, "0-31,64-95", None, None, "are a guess"),
    (-1, None, None, None, "(-1)"),
    (None, "32-63,96-127", 1, "32-63,96-127", None),
    (None, "32-39", 1, "32-39", None),
    (None, "0-40", None, "0-40", "NUMA nodes 0, 1"),
    (None, "500-510", None, "500-510", "no NUMA node of this machine"),
    (None, None, None, None, None),
])
def test_both_sources_of_affinity(sysfs, table, node, cpus, warning):
    found, found_cpus, warnings = numa.locate("device 3", sysfs, table, NODES)
    assert (found, found_cpus) == (node, cpus)
    if warning is None:
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert warnings[0].startswith("device 3: ")
        assert warning in warnings[0]


def test_a_machine_of_one_node_leaves_no_doubt():
    assert numa.locate("device 0", -1, None, NODES[:1]) == (0, "0-31,64-95", [])


CPU_FILES = {
    "sys/devices/system/cpu/online": "0-7\n", "sys/devices/system/cpu/offline": "8-9\n", "sys/devices/system/cpu/isolated": "3\n",
    "sys/devices/system/cpu/nohz_full": "(null)\n", "proc/self/status": "Name:\tpython3\nCpus_allowed_list:\t0-6\nMems_allowed_list:\t0\n",
    **{f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id": f"{cpu % 4 // 2}\n" for cpu in range(8)},
}
TWO_NODES = [{"id": 0, "cpus": "0-1,4-5", "cores": ["0,4", "1,5"]}, {"id": 1, "cpus": "2-3,6-7", "cores": ["2,6", "3,7"]}]


def test_processors_in_short(tmp_path):
    write(tmp_path, CPU_FILES)
    assert numa.read_cpu(TWO_NODES, tmp_path, "aarch64") == {
        "architecture": "aarch64", "online": "0-7", "offline": "8-9", "isolated": "3", "allowed": "0-6", "sockets": 2, "cores": 4,
        "threads_per_core": 2}


def test_the_cpuset_of_services_goes_before_that_of_this_process(tmp_path):
    write(tmp_path, {**CPU_FILES, "sys/fs/cgroup/system.slice/cpuset.cpus.effective": "0-3\n"})
    assert numa.read_cpu(TWO_NODES, tmp_path)["allowed"] == "0-3"


def test_a_cpuset_that_does_not_know_the_nodes_cpus_counts_for_nothing(tmp_path):
    """A lab's machine sees nodes that the kernel below does not have."""
    write(tmp_path, {**CPU_FILES, "sys/devices/system/cpu/online": "0-1\n"})
    cpu = numa.read_cpu(TWO_NODES, tmp_path)
    assert (cpu["allowed"], cpu["isolated"]) == (None, None)


def test_a_machine_without_any_of_these_files(tmp_path):
    assert set(numa.read_cpu([], tmp_path).values()) == {None}
