#!/usr/bin/python
"""Find what stands in the way of a machine's instances."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: machine_preflight
short_description: Find what stands in the way of a machine's instances
description:
  - Compares what is wanted of a machine with what is there, and returns all findings at once. It changes nothing and does not
    fail over a finding.
  - Looks at the processor, the machine's addresses, free disk space, who listens on wanted ports, units and containers that
    already bear an instance's name, and device nodes.
  - What this project made itself is known by the mark in its unit files, by its containers' labels and by its record.
author: llmops.ascend authors
options:
  architectures:
    description: The processors that will do, as C(uname -m) says them; empty to not ask.
    type: list
    elements: str
    default: []
  addresses:
    description: Addresses that must be this machine's own.
    type: list
    elements: dict
    default: []
    suboptions:
      variable:
        description: The inventory variable that holds it.
        type: str
        required: true
      address:
        description: The address.
        type: str
        required: true
  disk:
    description: Room that is wanted. What is wanted of one file system adds up.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Where it is wanted; need not exist yet.
        type: path
        required: true
      free_mb:
        description: How much, in MiB.
        type: int
        required: true
      purpose:
        description: For what, in a few words.
        type: str
        required: true
      settled_by:
        description: A path. Once it exists what needs the room is there, and too little room is a warning.
        type: path
        required: true
  names:
    description: Names instances may get, which no foreign unit or container may bear.
    type: list
    elements: str
    default: []
  ports:
    description: Ports that must be free or held by their own unit.
    type: list
    elements: dict
    default: []
    suboptions:
      port:
        description: The port.
        type: int
        required: true
      address:
        description: The address it will be listened on.
        type: str
        required: true
      purpose:
        description: For what, in a few words.
        type: str
        required: true
      unit:
        description: The unit that may hold it.
        type: str
        required: true
  models:
    description: Directories of models. Those that are there are read without their weights, to see whether they fit.
    type: list
    elements: path
    default: []
  instances:
    description: Instances as they were placed. Their names, ports and device nodes are looked at.
    type: list
    elements: dict
    default: []
attributes:
  check_mode:
    description: Whether it can run in check mode.
    support: full
  diff_mode:
    description: Whether it returns what would change.
    support: N/A
  idempotent:
    description: Whether a second run changes nothing.
    support: full
"""

EXAMPLES = r"""
- name: Look at the machine
  llmops.ascend.machine_preflight:
    architectures: [aarch64, x86_64]
    addresses:
      - {variable: service_address, address: 198.18.254.66}
    disk:
      - path: /data/models/Qwen3.8-27B-W8A8
        free_mb: 65536
        purpose: the model of qwen38-tp2
        settled_by: /data/models/Qwen3.8-27B-W8A8/.llmops-manifest.json
    names: [qwen38-tp2-0, qwen38-tp2-1]

- name: Look at what the placed instances need
  llmops.ascend.machine_preflight:
    instances: "{{ placement.instances }}"
"""

RETURN = r"""
models:
  description: >-
    The models that are there, by directory, with C(config) (their config.json), C(tensors) (names, types and shapes, alike ones in one row),
    C(total_bytes) and C(missing).
  returned: always
  type: dict
findings:
  description: What stands in the way.
  returned: always
  type: list
  elements: dict
  sample:
    - level: error
      check: port
      message: port 8000 of qwen38-tp2-0 is held by python3 (pid 4711, unit minimax-h3.service) on 0.0.0.0
      remedy: stop it, or choose another port in the inventory (first_port of a deployment, listen_port of a service)
"""

import ipaddress
import json
import os
import platform
import sys
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import model_files, preflight
from ansible_collections.llmops.ascend.plugins.module_utils.ownership import LABEL_MANAGED_BY, MANAGER, Paths, is_marked
from ansible_collections.llmops.ascend.plugins.module_utils.processes import open_files

UNIT_DIRECTORIES = tuple(map(Path, ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")))
DOCKER_SOCKET = "/var/run/docker.sock"
DOCKER_TIMEOUT_S = 20

ADDRESS = {"variable": {"type": "str", "required": True}, "address": {"type": "str", "required": True}}
DISK = {
    "path": {"type": "path", "required": True},
    "free_mb": {"type": "int", "required": True},
    "purpose": {"type": "str", "required": True},
    "settled_by": {"type": "path", "required": True},
}
PORT = {
    "port": {"type": "int", "required": True},
    "address": {"type": "str", "required": True},
    "purpose": {"type": "str", "required": True},
    "unit": {"type": "str", "required": True},
}


def read(path: str | Path) -> str:
    """The text of a file of /proc or /etc; empty where it is not there (any more)."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def unit_files(names: list[str]) -> tuple[dict[str, str], set[str]]:
    """Which of the names have a unit file that is not ours (name to path), and the units of those that are ours."""
    foreign, ours = {}, set()
    for name in names:
        for directory in UNIT_DIRECTORIES:
            path = directory / (name + ".service")
            if not (path.exists() or path.is_symlink()):
                continue
            if is_marked(read(path)):
                ours.add(path.name)
            else:
                foreign[name] = str(path)
            break
    return foreign, ours


def recorded_units() -> set[str]:
    """The units in the record of this machine's instances. An unreadable record is for those to report who write it."""
    try:
        instances = json.loads(read(Paths().record))["instances"]
        return {entry["unit"] for entry in instances.values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()


def containers(module: AnsibleModule) -> tuple[dict[str, str], dict[str, bool], list[dict[str, str]]]:
    """Docker's containers: id to name, name to whether it is ours; and a finding where docker does not answer.

    No docker is no finding: it may not be installed yet.
    """
    docker = module.get_bin_path("docker")
    if docker is None or not Path(DOCKER_SOCKET).exists():
        return {}, {}, []
    layout = '{{.ID}}\t{{.Names}}\t{{.Label "' + LABEL_MANAGED_BY + '"}}'
    # dockerd answers slowly or never when its storage is in trouble
    command = ["timeout", str(DOCKER_TIMEOUT_S), docker, "ps", "--all", "--no-trunc", "--format", layout]
    code, out, err = module.run_command(command, environ_update={"LC_ALL": "C"})
    if code != 0:
        reason = err.strip().splitlines()[-1] if err.strip() else f"no answer within {DOCKER_TIMEOUT_S} s"
        remedy = "see `systemctl status docker`; containers were not looked at"
        return {}, {}, [preflight.finding("warning", "container", f"docker does not answer: {reason}", remedy)]
    rows = [line.split("\t") for line in out.splitlines()]
    return {row[0]: row[1] for row in rows}, {row[1]: row[2] == MANAGER for row in rows}, []


def holders(inodes: set[int], names: dict[str, str]) -> dict[int, preflight.Process]:
    """The processes that have the given sockets open, by inode (`socket:[INODE]` in /proc/PID/fd).

    `names` maps container ids to names. Looks no further once all are found.
    """
    found: dict[int, preflight.Process] = {}
    for process in Path("/proc").glob("[0-9]*"):
        if len(found) == len(inodes):
            break
        held = {int(link[8:-1]) for link in open_files(process) if link.startswith("socket:[")} & inodes
        if held:
            unit, container = preflight.cgroup_place(read(process / "cgroup"))
            name = read(process / "comm").strip() or "a process"
            shown = names.get(container, container[:12]) if container else None
            found.update(dict.fromkeys(held, preflight.Process(int(process.name), name, unit, shown)))
    return found


def free_space(path: str) -> tuple[str, int]:
    """The mount point that a path is or will be on, and its free MiB for everyone but root's reserve."""
    there = Path(path)
    while not there.exists():
        there = there.parent
    space = os.statvfs(there)
    there = there.resolve()
    while not there.is_mount():
        there = there.parent
    return str(there), space.f_bavail * space.f_frsize // (1024 * 1024)


def find(module: AnsibleModule) -> list[dict[str, str]]:
    """All findings of this machine."""
    wanted = module.params
    placed = [instance for instance in wanted["instances"] if instance.get("state", "placed") == "placed"]
    names = wanted["names"] + [instance["name"] for instance in wanted["instances"]]
    ports = wanted["ports"] + [
        {"port": i["port"], "address": i["address"], "purpose": i["name"], "unit": i["name"] + ".service"} for i in placed
    ]
    findings = []
    if wanted["architectures"]:
        findings += preflight.architecture_findings(platform.machine(), wanted["architectures"])
    if wanted["addresses"]:
        present = preflight.local_addresses(read("/proc/net/fib_trie"), read("/proc/net/if_inet6"))
        findings += preflight.address_findings(wanted["addresses"], present)
    disk = [dict(want, settled=Path(want["settled_by"]).exists()) for want in wanted["disk"]]
    findings += preflight.disk_findings(disk, {want["path"]: free_space(want["path"]) for want in disk})
    if names or ports:
        by_id, ours, faults = containers(module)
        foreign, our_units = unit_files(names)
        findings += faults + preflight.name_findings(names, foreign, ours)
        findings += preflight.port_findings(
            ports, listening({want["port"] for want in ports}, by_id),
            our_units | recorded_units() | {name for name, is_ours in ours.items() if is_ours},
        )
    nodes = {node for instance in placed for node in instance["device_nodes"] if Path(node).exists()}
    return findings + preflight.node_findings(placed, nodes)


def listening(ports: set[int], names: dict[str, str]) -> dict[preflight.Listener, preflight.Process | None]:
    """Who listens on these ports of this machine."""
    order = "<" if sys.byteorder == "little" else ">"
    sockets = [
        listener
        for family in ("tcp", "tcp6")
        for listener in preflight.listeners(read(f"/proc/net/{family}"), order)
        if listener.port in ports
    ]
    processes = holders({listener.inode for listener in sockets}, names)
    return {listener: processes.get(listener.inode) for listener in sockets}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "architectures": {"type": "list", "elements": "str", "default": []},
            "addresses": {"type": "list", "elements": "dict", "options": ADDRESS, "default": []},
            "disk": {"type": "list", "elements": "dict", "options": DISK, "default": []},
            "names": {"type": "list", "elements": "str", "default": []},
            "ports": {"type": "list", "elements": "dict", "options": PORT, "default": []},
            "models": {"type": "list", "elements": "path", "default": []},
            "instances": {"type": "list", "elements": "dict", "default": []},
        },
        supports_check_mode=True,
    )
    for want in module.params["addresses"]:
        try:
            ipaddress.ip_address(want["address"])
        except ValueError:
            module.fail_json(msg=f"{want['variable']} {want['address']!r} is no IP address; set it to one of the machine's")
    models = {path: model_files.read_model(path) for path in module.params["models"] if Path(path).is_dir()}
    module.exit_json(changed=False, findings=find(module), models=models)


if __name__ == "__main__":
    main()
