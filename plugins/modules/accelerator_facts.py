#!/usr/bin/python
"""Facts on a machine's accelerators: devices, links, NUMA nodes, who uses them, and our instances."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: accelerator_facts
short_description: Facts on the accelerators of a machine
description:
  - Reads what C(npu-smi) or C(nvidia-smi), sysfs, C(/proc) and docker say of the machine's accelerators and puts it together.
  - Before the driver is there, and when it does not answer, the facts are empty and RV(ansible_facts.accelerators.reason) says why.
  - What is unknown is null. What sources disagree on is a warning that names both.
  - Run it as root; without, holders and instances may be incomplete, which the warnings say.
attributes:
  check_mode:
    description: It only reads.
    support: full
  diff_mode:
    description: It changes nothing.
    support: none
  idempotent:
    description: It changes nothing.
    support: full
options:
  timeout:
    description: Seconds to wait for one call of a tool. A driver in trouble may never answer.
    type: int
    default: 60
  vendor:
    description: Whose accelerators are meant on a machine that has both. Without it, and where both tools are, NPUs are shown with a warning.
    type: str
    choices: [huawei, nvidia]
author: llmops.ascend authors
"""

EXAMPLES = r"""
- name: Learn what the machine has
  llmops.ascend.accelerator_facts:
  become: true

- name: Show how its devices are connected
  ansible.builtin.debug:
    var: ansible_facts['accelerators']['links']
"""

RETURN = r"""
ansible_facts:
  description: Facts, under C(accelerators).
  returned: always
  type: dict
  contains:
    accelerators:
      description: The machine's accelerators.
      type: dict
      contains:
        vendor:
          description: V(huawei) or V(nvidia), or null when the machine has no driver.
          type: str
        reason:
          description: Why RV(ansible_facts.accelerators.devices) is empty; null when it is not.
          type: str
        driver_version:
          description: Version of the driver.
          type: str
        firmware_version:
          description: Version of the firmware of the first device; null with NVIDIA, where the driver brings it.
          type: str
        tool_version:
          description: Version of npu-smi; null with NVIDIA, whose tool has its driver's.
          type: str
        devices:
          description:
            - Devices by phy id, with C(npu_id), C(chip_id), C(logic_id), C(phy_id), C(node), C(name), C(health), C(bus_id),
              C(hbm_total_mb), C(hbm_used_mb), C(temperature_c), C(power_w), C(utilization_pct), C(numa_node), C(cpus) and C(holders).
            - The phy id is the N of C(/dev/davinciN) or C(/dev/nvidiaN). NVIDIA's tool knows no C(health), which is null there.
            - A holder has C(pid), C(name), C(memory_mb), C(unit), C(container), C(instance) and C(ours).
          type: list
          elements: dict
        links:
          description: Kind of link from device to device as the tool names it (V(HCCS), V(PHB), V(NV4), V(SYS)), by phy ids as texts.
          type: dict
        numa_nodes:
          description:
            - NUMA nodes with C(id), C(cpus), C(cores) (threads of each physical core), C(memory_mb) (MiB), C(distances) (by node id, as
              the firmware says them; 10 is the node itself) and C(devices).
          type: list
          elements: dict
        cpu:
          description:
            - The processors in short, with C(architecture), C(online), C(offline), C(isolated), C(allowed) (the cpuset services live in),
              C(sockets), C(cores) and C(threads_per_core). CPU lists are the kernel's.
          type: dict
        instances:
          description:
            - Instances of this project that are recorded or run here, with C(name), C(deployment), C(service), C(index), C(runtime),
              C(devices), C(port), C(cpus), C(numa_nodes), C(address), C(unit), C(recorded), C(running), C(container) and C(fingerprint).
          type: list
          elements: dict
        warnings:
          description: What is unknown or contradictory.
          type: list
          elements: str
"""

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import accelerators, npu_smi, numa, nvidia_smi

# A module's PATH is that of a non-login shell, which seldom has these.
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"])


def run(argv, timeout):
    """Run a tool; what it printed on both streams, in order. A tool that hangs is an exit code like any other."""
    environment = {**os.environ, "PATH": SEARCH, "LC_ALL": "C", "LANG": "C"}
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env=environment, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return accelerators.Output(124, f"{' '.join(argv)} gave no answer in {timeout} s")
    except OSError as error:
        return accelerators.Output(126, f"{argv[0]}: {error.strerror}")
    return accelerators.Output(done.returncode, done.stdout.decode("utf-8", "replace"))


def read_devices(vendor, timeout, warnings):
    """The vendor's view of the machine. Where both vendors' tools are, Ascend is meant unless `vendor` says otherwise."""
    npu, gpu = (shutil.which(tool, path=SEARCH) for tool in ("npu-smi", "nvidia-smi"))
    if npu and gpu and vendor is None:
        warnings.append("npu-smi and nvidia-smi are both there: the NPUs are shown; say vendor: nvidia for the GPUs")
    if vendor == "nvidia" or (gpu and not npu and vendor is None):
        return read_gpus(gpu, timeout)
    return read_npus(npu, timeout)


def device_numbers(prefix):
    """The numbers N of the nodes /dev/PREFIXN, ascending."""
    return sorted(int(path.name[len(prefix):]) for path in Path("/dev").glob(prefix + "*") if path.name[len(prefix):].isdigit())


def read_gpus(tool, timeout):
    """GPUs, as nvidia-smi and the driver's files in /proc say."""
    if tool is None:
        return accelerators.Reading(None, "nvidia-smi is not there: the driver is not installed")
    outputs = {"gpus": run([tool, "--query-gpu=" + ",".join(nvidia_smi.QUERY), nvidia_smi.FORMAT], timeout)}
    if outputs["gpus"].exit_code == 124:
        return accelerators.Reading("nvidia", outputs["gpus"].text + ": the driver hangs; see dmesg")
    outputs["processes"] = run([tool, "--query-compute-apps=" + ",".join(nvidia_smi.QUERY_PROCESSES), nvidia_smi.FORMAT], timeout)
    outputs["topo"] = run([tool, "topo", "-m"], timeout)
    minors = {}
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        try:
            minors[numa.normalise_bus_id(path.parent.name)] = nvidia_smi.parse_minor(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
    return accelerators.read_gpus(outputs, minors, device_numbers("nvidia"))


def read_npus(tool, timeout):
    """NPUs, as npu-smi says."""
    numbers = device_numbers("davinci")
    if tool is None:
        return accelerators.Reading(None, "npu-smi is not there: the driver is not installed" + (
            f", though /dev/davinci{numbers[0]} is" if numbers else ""))
    outputs = {"info": run([tool, "info"], timeout)}
    if outputs["info"].exit_code == 124:
        return accelerators.Reading("huawei", outputs["info"].text + ": the driver hangs; see dmesg")
    outputs["map"] = run([tool, "info", "-m"], timeout)
    outputs["topo"] = run([tool, "info", "-t", "topo"], timeout)
    first = first_npu(outputs["info"])
    if first is not None:
        outputs["board"] = run([tool, "info", "-t", "board", "-i", str(first)], timeout)
    return accelerators.read_npus(outputs, numbers)


def first_npu(output):
    """NPU id of the first device; None when there is none to ask."""
    try:
        return npu_smi.parse_info(output.text)["devices"][0]["npu_id"]
    except npu_smi.NpuSmiError:
        return None


def read_containers(timeout, warnings):
    """Running containers, none where docker is not."""
    docker = shutil.which("docker", path=SEARCH)
    if docker is None:
        return []
    output = run([docker, "ps", "--no-trunc", "--format", accelerators.CONTAINER_FORMAT], timeout)
    try:
        if output.exit_code:
            raise ValueError((output.text.strip().splitlines() or [f"exit code {output.exit_code}"])[-1])
        return accelerators.parse_containers(output.text)
    except ValueError as error:
        warnings.append(f"docker ps failed, containers are not known: {error}")
        return []


def read_record(warnings):
    """Recorded instances by name."""
    try:
        record = json.loads(Path(accelerators.RECORD).read_text(encoding="utf-8"))["instances"]
        if not isinstance(record, dict) or not all(isinstance(entry, dict) for entry in record.values()):
            raise ValueError("`instances` is not a dictionary of instances")
        return record
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.append(f"{accelerators.RECORD} cannot be read, its instances are not known: {error}")
        return {}


def home_of(pid):
    """Name, systemd unit and container id of a process; empty when it is gone or hidden."""
    def text(name):
        try:
            return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    unit, container = accelerators.parse_cgroup(text("cgroup"))
    return {"name": text("comm").strip() or None, "unit": unit, "container": container}


def main():
    """Module entry."""
    module = AnsibleModule(argument_spec={"timeout": {"type": "int", "default": 60}, "vendor": {"type": "str", "choices": ["huawei", "nvidia"]}},
                           supports_check_mode=True)
    timeout = module.params["timeout"]
    warnings = []
    nodes = numa.read_nodes()
    facts = accelerators.describe(
        reading=read_devices(module.params["vendor"], timeout, warnings),
        nodes=nodes,
        cpu=numa.read_cpu(nodes, architecture=platform.machine()),
        node_of=numa.read_device_node,
        home_of=home_of,
        record=read_record(warnings),
        containers=read_containers(timeout, warnings),
        warnings=warnings,
    )
    if os.geteuid() != 0:
        facts["warnings"].append("not run as root: holders, containers and instances may be incomplete")
    module.exit_json(changed=False, ansible_facts={"accelerators": facts})


if __name__ == "__main__":
    main()
