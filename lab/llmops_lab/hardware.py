"""The hardware every lab machine pretends to have: one table, read by everything that simulates a part of it.

The default machine is the cluster report's: 8 x 910B4-1 with 64 GB of HBM each, two NUMA nodes of 64 CPUs, PHB links inside a
node and SYS links across. The table reaches a machine twice, and both come from here:

* as /usr/share/llmops-lab/hardware.json, which the simulated npu-smi prints from;
* as the sysfs trees /sys/devices/system/node and /sys/bus/pci/devices, bound over the real ones.

What cannot exist on a host of two CPUs and one NUMA node, and what happens instead:

* CPUs 2 to 127 and NUMA node 1 are only told, never there. `docker run --cpuset-cpus` and `--cpuset-mems` are refused or
  ignored by the kernel, systemd's `CPUAffinity=` keeps what exists. The `numa` scenario has real nodes.
* /sys/devices/system/cpu is the host's own, so `nproc`, `lscpu` and Ansible's `processor_*` facts say what is really there.
* PCI devices have attributes (vendor, device, class, numa_node, local_cpulist) but no function: nothing is on a bus.
"""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

PATH_IN_MACHINE = "/usr/share/llmops-lab/hardware.json"

#: PCI vendor 0x19e5 is Huawei, device 0xd802 is Ascend 910B, class 0x1200 is "processing accelerator" (pci.ids).
VENDOR, DEVICE, CLASS = "0x19e5", "0xd802", "0x120000"

#: CPUs of each NUMA node, as /sys/devices/system/node/nodeN/cpulist writes them.
NUMA_NODES = {0: "0-31,64-95", 1: "32-63,96-127"}

#: phy id -> (bus id, NUMA node). Bus ids are in no order on real machines, and so they are here.
DEVICES = {
    0: ("0000:C1:00.0", 0),
    1: ("0000:01:00.0", 0),
    2: ("0000:C2:00.0", 0),
    3: ("0000:02:00.0", 0),
    4: ("0000:81:00.0", 1),
    5: ("0000:41:00.0", 1),
    6: ("0000:82:00.0", 1),
    7: ("0000:42:00.0", 1),
}


def default_machine() -> dict[str, Any]:
    """Return the table of the default machine.

    {"schema": 1, "cpu_count": 128, "numa_nodes": [{"id", "cpus"}],
     "devices": [{"phy_id", "logic_id", "npu_id", "chip_id", "name", "bus_id", "numa_node", "hbm_total_mb"}],
     "links": {"0": {"1": "PHB", "4": "SYS", ...}}}
    """
    return {
        "schema": 1,
        "cpu_count": 128,
        "numa_nodes": [{"id": node, "cpus": cpus} for node, cpus in NUMA_NODES.items()],
        "devices": [
            {
                "phy_id": phy_id,
                "logic_id": phy_id,
                "npu_id": phy_id,
                "chip_id": 0,
                "name": "910B4-1",
                "bus_id": bus_id,
                "numa_node": node,
                "hbm_total_mb": 65536,
            }
            for phy_id, (bus_id, node) in DEVICES.items()
        ],
        "links": {
            str(one): {
                str(other): "PHB" if node == other_node else "SYS"
                for other, (_, other_node) in DEVICES.items()
                if other != one
            }
            for one, (_, node) in DEVICES.items()
        },
    }


def write(directory: Path, machine: dict[str, Any] | None = None) -> None:
    """Write hardware.json and the sysfs trees `node/` and `pci/` of a machine into a directory, replacing what is there."""
    machine = machine or default_machine()
    shutil.rmtree(directory, ignore_errors=True)
    _write_tree(directory, {
        "hardware.json": json.dumps(machine, indent=1),
        "node": _node_tree(machine),
        "pci": _pci_tree(machine),
    })


def _node_tree(machine: dict[str, Any]) -> dict[str, Any]:
    """/sys/devices/system/node (Documentation/ABI/stable/sysfs-devices-node), as far as numactl, lscpu and the like read it."""
    nodes = [node["id"] for node in machine["numa_nodes"]]
    present = f"{nodes[0]}-{nodes[-1]}" if len(nodes) > 1 else str(nodes[0])
    tree: dict[str, Any] = dict.fromkeys(("online", "possible", "has_cpu", "has_memory", "has_normal_memory"), present)
    for node in machine["numa_nodes"]:
        number = node["id"]
        tree[f"node{number}"] = {
            "cpulist": node["cpus"],
            "cpumap": _cpu_map(node["cpus"], machine["cpu_count"]),
            "distance": " ".join("10" if other == number else "21" for other in nodes),
            "meminfo": f"Node {number} MemTotal: {512 << 20} kB\nNode {number} MemFree: {500 << 20} kB",
        }
    return tree


def _pci_tree(machine: dict[str, Any]) -> dict[str, Any]:
    """/sys/bus/pci/devices, holding the accelerators only. sysfs writes bus ids in lower case, npu-smi in upper case."""
    cpus = {node["id"]: node["cpus"] for node in machine["numa_nodes"]}
    return {
        device["bus_id"].lower(): {
            "vendor": VENDOR,
            "device": DEVICE,
            "class": CLASS,
            "irq": "0",
            "resource": "\n".join(["0x0000000000000000 0x0000000000000000 0x0000000000000000"] * 7),
            "numa_node": str(device["numa_node"]),
            "local_cpulist": cpus.get(device["numa_node"], f"0-{machine['cpu_count'] - 1}"),
        }
        for device in machine["devices"]
    }


def _cpu_map(cpulist: str, cpu_count: int) -> str:
    """"0-3,8" -> "00000000,...,0000010f": the kernel's bitmap form, words of 32 bits, the highest first."""
    bits = 0
    for part in cpulist.split(","):
        first, _, last = part.partition("-")
        for cpu in range(int(first), int(last or first) + 1):
            bits |= 1 << cpu
    return ",".join(f"{bits >> shift & 0xFFFFFFFF:08x}" for shift in range(cpu_count - 32, -1, -32))


def _write_tree(directory: Path, tree: dict[str, Any]) -> None:
    """Write a tree of {name: text or sub-tree}; every text gets the newline that sysfs ends its values with."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in tree.items():
        if isinstance(content, dict):
            _write_tree(directory / name, content)
        else:
            (directory / name).write_text(content + "\n")
