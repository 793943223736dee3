"""The accelerators of a machine as facts: everything the tools, sysfs and /proc say, put together and compared.

`gather` of the module accelerator_facts reads, `describe` here thinks: it gets all texts and answers with the facts.
Nothing is guessed: ids that cannot be mapped, unknown NUMA nodes and unreadable tables are null and a warning. Vendors differ
only in how `Reading` is filled (`read_npus` for Ascend, `read_gpus` for NVIDIA); the facts are the same.
"""

from __future__ import annotations

import re
from typing import Any, Callable, NamedTuple

from ansible_collections.llmops.ascend.plugins.module_utils import npu_smi, nvidia_smi
from ansible_collections.llmops.ascend.plugins.module_utils.numa import locate, normalise_bus_id
from ansible_collections.llmops.ascend.plugins.module_utils.tool_output import OutputError

RECORD = "/var/lib/llmops/instances.json"

# What `docker ps` is asked to print, one line for each running container.
CONTAINER_FORMAT = "\t".join(("{{.ID}}", "{{.Names}}", '{{.Label "llmops.managed-by"}}', '{{.Label "llmops.instance"}}',
                              '{{.Label "llmops.fingerprint"}}', '{{.Label "llmops.devices"}}'))
MANAGED_BY = "llmops.ascend"


class Output(NamedTuple):
    """A finished command: its exit code and all it printed."""

    exit_code: int
    text: str


class Reading(NamedTuple):
    """What a vendor's tool says. `devices` are facts without affinity and holders; `links` and `cpus` are by phy id;
    `processes` are ``(phy id, pid, name, memory MB)``."""

    vendor: str | None = None
    reason: str | None = None
    versions: dict[str, str | None] = {}
    devices: list[dict] = []
    links: dict[int, dict[int, str]] = {}
    cpus: dict[int, str | None] = {}
    processes: list[tuple[int, int, str, int]] = []
    warnings: list[str] = []


def _parsed(command: str, output: Output | None, parse: Callable[[str], Any], explain: Callable[[int, str], Any],
            warnings: list[str]) -> Any:
    """An output as its parser reads it; None where it was not asked for, and where it cannot be read, which is a warning."""
    if output is None:
        return None
    try:
        return parse(output.text)
    except OutputError as error:
        failure = explain(*output)
        warnings.append(f"{command}: {failure.meaning}" if failure else str(error))
        return None


# ------------------------------------------------------------------------------------------------------------- Ascend

def read_npus(outputs: dict[str, Output], device_numbers: list[int]) -> Reading:
    """The machine's NPUs from the outputs of npu-smi: ``info``, ``map`` (info -m), ``topo`` and ``board``.

    `device_numbers` are the N of the /dev/davinciN nodes: where an old tool prints no phy id they decide whether logic ids
    can stand for them.
    """
    answer = outputs["info"]
    failure = npu_smi.explain_failure(*answer)
    try:
        info = npu_smi.parse_info(answer.text)
    except npu_smi.NpuSmiError as error:
        return Reading("huawei", f"npu-smi info: {failure.meaning}; {failure.remedy}" if failure else str(error))
    warnings = [f"npu-smi info ended with: {failure.meaning}; {failure.remedy}"] if failure else []

    try:
        devices = _identify(info["devices"], outputs.get("map"), device_numbers, warnings)
    except npu_smi.NpuSmiError as error:
        return Reading("huawei", str(error), warnings=warnings)
    links, cpus = _topology(outputs.get("topo"), devices, warnings)
    versions = _versions(info, outputs.get("board"), warnings)

    by_chip = {(device["npu_id"], device["chip_id"]): device["phy_id"] for device in devices}
    processes = []
    for process in info["processes"]:
        phy_id = by_chip.get((process["npu_id"], process["chip_id"] or 0))
        if phy_id is None:
            warnings.append(f"npu-smi info names pid {process['pid']} on NPU {process['npu_id']}, "
                            "which is not in its table of devices")
        else:
            processes.append((phy_id, process["pid"], process["name"], process["memory_mb"]))
    return Reading("huawei", None, versions, devices, links, cpus, processes, warnings)


def _identify(chips: list[dict], map_output: Output | None, device_numbers: list[int], warnings: list[str]) -> list[dict]:
    mapped: dict[tuple[int, int], dict] = {}
    if map_output is not None:
        try:
            mapped = {(row["npu_id"], row["chip_id"]): row for row in npu_smi.parse_map(map_output.text)}
        except npu_smi.NpuSmiError as error:
            failure = npu_smi.explain_failure(*map_output)
            warnings.append(f"npu-smi info -m: {failure.meaning}; {failure.remedy}" if failure else str(error))
    for npu_id, chip_id in sorted(set(mapped) - {(chip["npu_id"], chip["chip_id"]) for chip in chips}):
        warnings.append(f"chip {chip_id} of NPU {npu_id} is missing in npu-smi info")
    # A driver that names no phy ids numbers its nodes like the logic ids, if it has as many of the same numbers.
    logic_ids = sorted(row["logic_id"] for row in mapped.values() if row["logic_id"] is not None)
    alike = bool(logic_ids) and logic_ids == sorted(device_numbers)
    devices = []
    for chip in chips:
        row = mapped.get((chip["npu_id"], chip["chip_id"]), {})
        where = f"chip {chip['chip_id']} of NPU {chip['npu_id']}"
        if mapped and not row:
            warnings.append(f"{where} is missing in npu-smi info -m")
        phy_id = chip["phy_id"]
        if phy_id is None:
            phy_id = row.get("phy_id")
        elif row.get("phy_id") not in (None, phy_id):
            raise npu_smi.NpuSmiError("npu-smi", f"{where} has phy id {phy_id} in `info` and {row['phy_id']} in `info -m`")
        if phy_id is None and alike:
            phy_id = row.get("logic_id")
        if phy_id is None:
            warnings.append(f"{where}: its /dev/davinci number is not known, so it is not used")
        elif phy_id not in device_numbers:
            warnings.append(f"{where}: /dev/davinci{phy_id} is not there; reboot, or load the driver again")
        total = "hbm_total_mb" if chip["hbm_total_mb"] else "memory_total_mb"
        devices.append({
            "npu_id": chip["npu_id"], "chip_id": chip["chip_id"], "logic_id": row.get("logic_id"), "phy_id": phy_id,
            "node": None if phy_id is None else f"/dev/davinci{phy_id}",
            "name": chip["name"], "health": chip["health"],
            "bus_id": chip["bus_id"] and normalise_bus_id(chip["bus_id"]),
            "hbm_total_mb": chip[total],
            "hbm_used_mb": chip[total.replace("total", "used")],
            "temperature_c": chip["temperature_c"], "power_w": chip["power_w"], "utilization_pct": chip["utilization_pct"],
        })
    return sorted(devices, key=lambda device: (device["phy_id"] is None, device["phy_id"], device["npu_id"], device["chip_id"]))


def _topology(output: Output | None, devices: list[dict],
              warnings: list[str]) -> tuple[dict[int, dict[int, str]], dict[int, str | None]]:
    topo = _parsed("npu-smi info -t topo", output, npu_smi.parse_topo, npu_smi.explain_failure, warnings)
    if topo is None:
        return {}, {}
    shown = set(topo["cpus"])
    single = len({device["npu_id"] for device in devices}) == len(devices)      # one chip to a card
    keys = ["phy_id"] if topo["kind"] == "Phy-ID" else ["npu_id", "logic_id"] if single else ["logic_id"]
    for key in keys:
        ids = {device[key]: device["phy_id"] for device in devices if device["phy_id"] is not None}
        if set(ids) == shown:
            return ({ids[one]: {ids[other]: link for other, link in row.items()} for one, row in topo["links"].items()},
                    {ids[one]: cpus for one, cpus in topo["cpus"].items()})
    warnings.append(f"npu-smi info -t topo shows {topo['kind']} {', '.join(map(str, sorted(shown)))}, which are not the "
                    "devices of npu-smi info; its links are not used")
    return {}, {}


def _versions(info: dict, output: Output | None, warnings: list[str]) -> dict[str, str | None]:
    versions = {"tool_version": info["tool_version"], "driver_version": info["driver_version"], "firmware_version": None}
    board = _parsed("npu-smi info -t board", output, npu_smi.parse_board, npu_smi.explain_failure, warnings)
    if board is not None:
        versions["driver_version"] = board["driver_version"] or versions["driver_version"]
        versions["firmware_version"] = board["firmware_version"]
        if board["compatible"] is False:
            warnings.append(f"the driver ({board['driver_version']}) says that firmware {board['firmware_version']} does not "
                            "fit it; install the firmware of the same release")
    return versions


# ------------------------------------------------------------------------------------------------------------- NVIDIA

def read_gpus(outputs: dict[str, Output], minors: dict[str, int], device_numbers: list[int]) -> Reading:
    """The machine's GPUs from the outputs of nvidia-smi: ``gpus`` (--query-gpu), ``processes`` (--query-compute-apps), ``topo``.

    `minors` are the N of /dev/nvidiaN by normalised PCI address, as the driver says them in /proc; where it does not (in some
    containers), indices stand for them if the /dev/nvidiaN nodes have the same numbers, `device_numbers`.
    """
    answer = outputs["gpus"]
    failure = nvidia_smi.explain_failure(*answer)
    try:
        gpus = nvidia_smi.parse_gpus(answer.text)
    except nvidia_smi.NvidiaSmiError as error:
        return Reading("nvidia", f"nvidia-smi: {failure.meaning}; {failure.remedy}" if failure else str(error))
    warnings = [f"nvidia-smi ended with: {failure.meaning}; {failure.remedy}"] if failure else []
    alike = [gpu["index"] for gpu in gpus] == sorted(device_numbers)

    devices, by_uuid = [], {}
    for gpu in gpus:
        bus_id = gpu["bus_id"] and normalise_bus_id(gpu["bus_id"])
        minor = minors.get(bus_id, gpu["index"] if alike and not minors else None)
        where = f"GPU {gpu['index']}"
        if minor is None:
            warnings.append(f"{where}: its /dev/nvidia number is not known, so it is not used")
        elif minor not in device_numbers:
            warnings.append(f"{where}: /dev/nvidia{minor} is not there; run nvidia-modprobe -u -c={minor}, or in a container give it the device")
        if gpu["mig"]:
            warnings.append(f"{where}: it is cut in MIG slices, which cannot be used here: nvidia-smi -i {gpu['index']} -mig 0")
        by_uuid[gpu["uuid"]] = minor
        devices.append({
            "npu_id": gpu["index"], "chip_id": 0, "logic_id": gpu["index"], "phy_id": minor,
            "node": None if minor is None else f"/dev/nvidia{minor}", "name": gpu["name"], "health": None, "bus_id": bus_id,
            "hbm_total_mb": gpu["memory_total_mb"], "hbm_used_mb": gpu["memory_used_mb"],
            "temperature_c": gpu["temperature_c"], "power_w": gpu["power_w"], "utilization_pct": gpu["utilization_pct"],
        })
    devices.sort(key=lambda device: (device["phy_id"] is None, device["phy_id"], device["logic_id"]))
    links, cpus = _gpu_topology(outputs.get("topo"), devices, warnings)
    return Reading("nvidia", None, {"driver_version": gpus[0]["driver_version"]}, devices, links, cpus,
                   _gpu_processes(outputs.get("processes"), by_uuid, warnings), warnings)


def _gpu_topology(output: Output | None, devices: list[dict],
                  warnings: list[str]) -> tuple[dict[int, dict[int, str]], dict[int, str | None]]:
    topo = _parsed("nvidia-smi topo -m", output, nvidia_smi.parse_topo, nvidia_smi.explain_failure, warnings)
    if topo is None:
        return {}, {}
    ids = {device["logic_id"]: device["phy_id"] for device in devices}
    if set(topo["links"]) != set(ids):
        warnings.append(f"nvidia-smi topo -m shows GPU {', '.join(map(str, topo['links']))}, which are not all there are; its links are not used")
        return {}, {}
    known = {index: minor for index, minor in ids.items() if minor is not None}
    return ({known[one]: {known[other]: link for other, link in topo["links"][one].items() if other in known} for one in known},
            {known[one]: topo["cpus"][one] for one in known})


def _gpu_processes(output: Output | None, by_uuid: dict[str, int | None], warnings: list[str]) -> list[tuple]:
    processes = _parsed("nvidia-smi --query-compute-apps", output, nvidia_smi.parse_processes, nvidia_smi.explain_failure, warnings) or []
    return [(by_uuid[process["uuid"]], process["pid"], process["name"], process["memory_mb"])
            for process in processes if by_uuid.get(process["uuid"]) is not None]


# -------------------------------------------------------------------------------------------------- instances, holders

def parse_containers(text: str) -> list[dict]:
    """``docker ps --no-trunc --format CONTAINER_FORMAT``: running containers, ours with instance, fingerprint and devices."""
    containers = []
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) != 6:
            raise ValueError(f"docker ps: expected 6 fields, not {len(fields)}: {line!r}")
        identity, names, managed_by, instance, fingerprint, devices = fields
        ours = managed_by == MANAGED_BY and bool(instance)
        containers.append({
            "id": identity, "name": names.split(",")[0], "instance": instance if ours else None,
            "fingerprint": fingerprint or None,
            "devices": [int(item) for item in devices.split(",") if item.strip().isdigit()],
        })
    return containers


def parse_cgroup(text: str) -> tuple[str | None, str | None]:
    """Where a process lives, from /proc/PID/cgroup: ``(systemd unit, container id)``.

    Understands the paths of docker, podman and containerd under cgroup v1 and v2. A container's own scope is no unit.
    """
    unit = container = None
    for line in text.splitlines():
        for part in line.split(":", 2)[-1].split("/"):
            found = re.match(r"(?:docker-|libpod-|cri-containerd-|crio-)?([0-9a-f]{64})(?:\.scope)?$", part)
            if found:
                container = found.group(1)
            elif part.endswith(".service"):
                unit = part
    return (None, container) if container else (unit, None)


def present_instances(record: dict[str, dict], containers: list[dict]) -> list[dict]:
    """The instances that exist here, recorded or running, by name.

    `record` is the ``instances`` part of /var/lib/llmops/instances.json. A container that wears our labels and is not recorded
    (an interrupted run) counts: what runs is the truth.
    """
    running = {container["instance"]: container for container in containers if container["instance"]}
    instances = []
    for name in sorted(set(record) | set(running)):
        entry, container = record.get(name) or {}, running.get(name)
        instances.append({
            "name": name,
            "deployment": entry.get("deployment") or name.rpartition("-")[0],
            "service": entry.get("service"),
            "index": entry.get("index", int(name.rpartition("-")[2]) if name.rpartition("-")[2].isdigit() else None),
            "runtime": entry.get("runtime") or "container",
            "devices": entry.get("devices") or (container["devices"] if container else []),
            "port": entry.get("port"),
            "cpus": entry.get("cpus"),
            "numa_nodes": entry.get("numa_nodes") or [],
            "address": entry.get("address"),
            "unit": entry.get("unit") or name + ".service",
            "recorded": name in record,
            "running": container is not None,
            "container": container["id"] if container else None,
            "fingerprint": container["fingerprint"] if container else None,
        })
    return instances


# -------------------------------------------------------------------------------------------------------------- facts

def describe(reading: Reading, nodes: list[dict], node_of: Callable[[str | None], int | None],
             home_of: Callable[[int], dict], record: dict[str, dict], containers: list[dict],
             warnings: list[str], cpu: dict | None = None) -> dict[str, Any]:
    """The facts.

    `cpu` is the machine's processors (numa.read_cpu), `nodes` are its NUMA nodes (numa.read_nodes), `node_of` gives a PCI device's
    node, `home_of` a process's ``{"name", "unit", "container"}`` (container id), `record` and `containers` what `present_instances`
    takes, `warnings` come from gathering.
    """
    warnings = list(warnings) + list(reading.warnings)
    instances = present_instances(record, containers)
    names = {container["id"]: container for container in containers}
    units = {instance["unit"]: instance["name"] for instance in instances}

    holders: dict[int, list[dict]] = {}
    for phy_id, pid, name, memory_mb in reading.processes:
        home = home_of(pid)
        container = names.get(home.get("container"), {})
        instance = container.get("instance") or units.get(home.get("unit"))
        holders.setdefault(phy_id, []).append({
            "pid": pid, "name": name or home.get("name"), "memory_mb": memory_mb, "unit": home.get("unit"),
            "container": container.get("name") or home.get("container"), "instance": instance, "ours": instance is not None,
        })

    devices = []
    for device in reading.devices:
        where = f"device {device['phy_id']}"
        node, cpus, said = locate(where, node_of(device["bus_id"]), reading.cpus.get(device["phy_id"]), nodes)
        warnings += said
        devices.append({**device, "numa_node": node, "cpus": cpus, "holders": holders.get(device["phy_id"], [])})
    return {
        "vendor": reading.vendor,
        "reason": reading.reason,
        "driver_version": reading.versions.get("driver_version"),
        "firmware_version": reading.versions.get("firmware_version"),
        "tool_version": reading.versions.get("tool_version"),
        "devices": devices,
        "links": {str(one): {str(other): link for other, link in sorted(row.items())}
                  for one, row in sorted(reading.links.items())},
        "numa_nodes": [{**node, "devices": [device["phy_id"] for device in devices if device["numa_node"] == node["id"]]}
                       for node in nodes],
        "cpu": cpu or {},
        "instances": instances,
        "warnings": warnings,
    }
