"""NUMA nodes, CPU lists and device affinity, read from Linux.

sysfs is the first source of affinity. A topology table printed by a vendor's tool is the second: it is derived from
the same files, but turns "unknown" (-1) into node 0 and is silent on some machines. The two are compared here.

CPU lists are the kernel's own format (Documentation/admin-guide/cputopology.rst): ``0-31,64-95``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Iterable

_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")
_BUS_ID = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])$")


def parse_cpu_list(text: str) -> list[int]:
    """CPU numbers of a kernel CPU list, ascending. An empty list is valid: a node may have memory only.

    Raises ValueError with the offending part for anything else, also for reversed and overlapping ranges.
    """
    text = text.strip()
    cpus: list[int] = []
    for part in text.split(",") if text else []:
        match = _RANGE.match(part.strip())
        if not match:
            raise ValueError(f"{part!r} in CPU list {text!r} is neither a number nor a range")
        first = int(match.group(1))
        last = first if match.group(2) is None else int(match.group(2))
        if last < first:
            raise ValueError(f"range {part!r} in CPU list {text!r} runs backwards")
        cpus.extend(range(first, last + 1))
    if len(set(cpus)) != len(cpus):
        raise ValueError(f"CPU list {text!r} names a CPU twice")
    return sorted(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The shortest kernel CPU list of these CPUs: ``[0, 1, 2, 5]`` gives ``0-2,5``."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def normalise_bus_id(bus_id: str) -> str | None:
    """A PCI address as sysfs writes it (``0000:c1:00.0``), or None where the text is not one (``NA``)."""
    match = _BUS_ID.match(bus_id.strip())
    if not match:
        return None
    domain, bus, slot, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus.lower()}:{slot.lower()}.{function}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_nodes(root: Path = Path("/")) -> list[dict]:
    """The machine's NUMA nodes, ascending by id.

    Each is ``{"id": 0, "cpus": "0-31,64-95", "cores": ["0,64", ...] | None, "memory_mb": 128000 | None, "distances": {"0": 10,
    "1": 21} | None}``. ``cpus`` holds online CPUs only and is empty for a memory-only node; ``cores`` lists the hardware threads of
    each physical core and ``distances`` the firmware's to each node (ACPI SLIT, 10 is the node itself); both are None where the
    kernel does not say. `root` is another root directory, for tests.
    """
    directories = {int(path.name[4:]): path for path in (root / "sys/devices/system/node").glob("node*")
                   if path.name[4:].isdigit()}
    nodes = []
    for number, directory in sorted(directories.items()):
        text = _read(directory / "cpulist")
        if text is not None:
            cpus = parse_cpu_list(text)
            nodes.append({"id": number, "cpus": format_cpu_list(cpus), "cores": _read_cores(cpus, root),
                          "memory_mb": _read_memory(directory / "meminfo"),
                          "distances": _read_distances(directory / "distance", sorted(directories))})
    return nodes


def _read_distances(path: Path, nodes: list[int]) -> dict[str, int] | None:
    """Distances by node id; the file has one for each online node, in their order."""
    values = (_read(path) or "").split()
    if len(values) != len(nodes) or not all(value.isdigit() for value in values):
        return None
    return {str(node): int(value) for node, value in zip(nodes, values)}


def _read_cores(cpus: list[int], root: Path) -> list[str] | None:
    cores = set()
    for cpu in cpus:
        text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        if text is None:
            return None
        cores.add(tuple(sorted(set(parse_cpu_list(text)) & set(cpus))))
    return [format_cpu_list(core) for core in sorted(cores)]


def _read_memory(path: Path) -> int | None:
    match = re.search(r"MemTotal:\s*(\d+)\s*kB", _read(path) or "")
    return int(match.group(1)) // 1024 if match else None


def read_cpu(nodes: list[dict], root: Path = Path("/"), architecture: str | None = None) -> dict:
    """The machine's processors in short, as lscpu tells them, and which of them a service may use.

    ``{"architecture": "aarch64", "online": "0-127", "offline": "", "isolated": "2-3", "allowed": "0-127", "sockets": 2, "cores": 64,
    "threads_per_core": 2}``. `isolated` (isolcpus= or nohz_full=) are left alone by the scheduler, `allowed` is the cpuset that services
    already live in (system.slice, else this process); what the kernel does not say is None. `nodes` is the answer of `read_nodes`:
    a cpuset that knows none of their CPUs speaks of another machine than they do (a container with its own view of the nodes) and
    counts for nothing.
    """
    base = root / "sys/devices/system/cpu"
    online = _read_list(base / "online")
    cpus = [cpu for node in nodes for cpu in parse_cpu_list(node["cpus"])] or (parse_cpu_list(online) if online else [])
    special = [_read_list(base / name) for name in ("isolated", "nohz_full")]
    allowed = _read_list(root / "sys/fs/cgroup/system.slice/cpuset.cpus.effective") or _allowed(root / "proc/self/status")
    believed = online is not None and set(cpus) <= set(parse_cpu_list(online))
    cores = [core for node in nodes for core in node["cores"] or []]
    packages = {_read(base / f"cpu{cpu}/topology/physical_package_id") for cpu in cpus} - {None}
    return {
        "architecture": architecture,
        "online": online,
        "offline": _read_list(base / "offline"),
        "isolated": format_cpu_list(cpu for text in special if text for cpu in parse_cpu_list(text)) if believed and any(
            text is not None for text in special) else None,
        "allowed": allowed if believed else None,
        "sockets": len(packages) or None,
        "cores": len(cores) or None,
        "threads_per_core": max(len(parse_cpu_list(core)) for core in cores) if cores else None,
    }


def _read_list(path: Path) -> str | None:
    """A file with a CPU list; None where it is not there or holds something else, such as (null)."""
    text = _read(path)
    try:
        return None if text is None else format_cpu_list(parse_cpu_list(text))
    except ValueError:
        return None


def _allowed(path: Path) -> str | None:
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", _read(path) or "", re.MULTILINE)
    return match.group(1) if match else None


def read_device_node(bus_id: str | None, root: Path = Path("/")) -> int | None:
    """NUMA node of a PCI device: a node id, -1 where the firmware told the kernel none, None where sysfs is silent."""
    address = normalise_bus_id(bus_id or "")
    text = _read(root / "sys/bus/pci/devices" / address / "numa_node") if address else None
    return int(text) if text and re.match(r"-?\d+$", text) else None


def locate(device: str, sysfs_node: int | None, table_cpus: str | None,
           nodes: list[dict]) -> tuple[int | None, str | None, list[str]]:
    """NUMA node and CPUs of a device from both sources: ``(node, cpus, warnings)``.

    `device` is its name in warnings, `sysfs_node` what `read_device_node` said, `table_cpus` the affinity printed in
    the topology table, `nodes` the answer of `read_nodes`. sysfs wins; a table that says otherwise is a warning that
    names both. Without sysfs the table's CPUs are believed, and give the node when they lie within exactly one.
    """
    cpus_of = {node["id"]: node["cpus"] for node in nodes}
    if sysfs_node is None:
        return _locate_by_table(device, table_cpus, cpus_of)
    if sysfs_node < 0:
        if len(cpus_of) == 1:                       # there is nowhere else to be
            (node, cpus), = cpus_of.items()
            return node, cpus or None, []
        # The tool prints the CPUs of node 0 for "unknown", so the table cannot be believed here.
        table = f", the topology table's CPUs {table_cpus} are a guess" if table_cpus else ""
        return None, None, [f"{device}: sysfs knows no NUMA node for it (-1){table}; its instance is not bound"]
    if sysfs_node not in cpus_of:
        return None, table_cpus, [f"{device}: sysfs says NUMA node {sysfs_node}, which this machine does not have"]
    cpus = cpus_of[sysfs_node]
    warnings = []
    if table_cpus and parse_cpu_list(table_cpus) != parse_cpu_list(cpus):
        warnings.append(f"{device}: sysfs says NUMA node {sysfs_node} (CPUs {cpus or 'none'}), "
                        f"the topology table says CPUs {table_cpus}; sysfs is used")
    return sysfs_node, cpus or None, warnings


def _locate_by_table(device: str, table_cpus: str | None,
                     cpus_of: dict[int, str]) -> tuple[int | None, str | None, list[str]]:
    if not table_cpus:
        return None, None, []
    wanted = set(parse_cpu_list(table_cpus))
    homes = [node for node, cpus in sorted(cpus_of.items()) if wanted & set(parse_cpu_list(cpus))]
    if len(homes) == 1:
        return homes[0], table_cpus, []
    where = f"NUMA nodes {', '.join(map(str, homes))}" if homes else "no NUMA node of this machine"
    return None, table_cpus, [f"{device}: its CPUs {table_cpus} in the topology table lie in {where}"]
