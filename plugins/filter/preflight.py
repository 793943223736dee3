"""Filters of the role preflight: doors to module_utils.inventory_rules and to what the module machine_preflight is asked.

inventory_findings is the first gate; machine_wants and placed_wants say what machine_preflight looks for in the second and third;
placement_findings adds what placement found, fit_findings and compatibility_findings what devices and versions allow;
finding_lines, finding_table and of_machines show it all.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

import yaml
from ansible.errors import AnsibleError
from ansible_collections.llmops.ascend.plugins.filter.resolve_deployments import load_presets
from ansible_collections.llmops.ascend.plugins.module_utils import compatibility, inventory_rules
from ansible_collections.llmops.ascend.plugins.module_utils.inventory_rules import Machine
from ansible_collections.llmops.ascend.plugins.module_utils.plain import plain
from ansible_collections.llmops.ascend.plugins.module_utils.tables import table
from jinja2 import UndefinedError

ROLES = Path(__file__).resolve().parents[2] / "roles"
BALANCER_UNIT = "llmops-load-balancer.service"


def inventory_findings(
    groups: Mapping[str, list[str]], hostvars: Mapping[str, Any], machines: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """What is wrong with the inventory: findings on the cluster, and on these machines (default: all of them).

    Every machine of the groups workers and load_balancers is read, whatever the run is limited to: they must agree.
    """
    workers, balancers = groups.get("workers", []), groups.get("load_balancers", [])
    inventory = {}
    for name in dict.fromkeys([*workers, *balancers]):
        machine = _machine(hostvars[name])
        machine.worker, machine.balancer = name in workers, name in balancers
        inventory[name] = machine
    findings = inventory_rules.inventory_findings(inventory, load_presets(), _role_variables())
    return [f for f in findings if machines is None or f["machine"] is None or f["machine"] in machines]


def service_addresses(machines: Iterable[str], hostvars: Mapping[str, Any]) -> dict[str, str]:
    """Where each machine is reached by clients and load balancers: {machine: address}; without those that do not say."""
    found = {name: inventory_rules.service_address(_machine(hostvars[name]).vars) for name in machines}
    return {name: address for name, address in found.items() if address is not None}


def machine_wants(
    variables: Mapping[str, Any],
    deployments: Mapping[str, Mapping[str, Any]],
    groups: Iterable[str],
    model_free_mb: int,
    engine_free_mb: int,
) -> dict[str, list[Any]]:
    """What the module machine_preflight is to look for before anything is installed: {addresses, disk, names, ports}.

    `variables` are the machine's hostvars, `groups` its groups.
    """
    machine, deployments = _machine(variables), plain(deployments)
    worker, balancer = "workers" in groups, "load_balancers" in groups
    address, data = inventory_rules.service_address(machine.vars), machine.vars.get("data_address")
    named = "service_address" if machine.vars.get("service_address") is not None else "ansible_host (as service_address)"
    wants: dict[str, list[Any]] = {"addresses": [], "disk": [], "names": [], "ports": []}
    if worker:
        wants["addresses"].append({"variable": named, "address": address})
        wants["names"] = inventory_rules.possible_names(deployments)
        paths = {deployment["model_path"]: name for name, deployment in deployments.items()}
        wants["disk"] += [
            {
                "path": path,
                "free_mb": model_free_mb,
                "purpose": f"the model of {name}",
                "settled_by": f"{path}/.llmops-manifest.json",
            }
            for path, name in paths.items()
        ]
        if any(deployment["runtime"] == "container" for deployment in deployments.values()):
            wants["disk"].append(
                {
                    "path": "/var/lib/docker",
                    "free_mb": engine_free_mb,
                    "purpose": "engine images",
                    "settled_by": "/var/lib/docker/image/overlay2/imagedb/content/sha256",
                }
            )
        if data is not None and data != address:
            wants["addresses"].append({"variable": "data_address", "address": data})
    if balancer:
        wants["ports"] = [
            {
                "port": service["listen_port"],
                "address": "0.0.0.0",  # noqa: S104 - whoever holds the port on one address is in the way
                "purpose": f"service {name}",
                "unit": BALANCER_UNIT,
            }
            for name, service in (machine.vars.get("services") or {}).items()
        ]
    return wants


def placed_wants(placement: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The instances of a placement as machine_preflight wants them. Assumed devices have no nodes to look for."""
    placement = plain(placement)
    return [
        {
            "name": instance["name"],
            "address": instance["address"],
            "port": instance["port"],
            "state": instance["state"],
            "device_nodes": [] if placement["assumed"] else instance["device_nodes"],
        }
        for instance in placement["instances"]
    ]


def placement_findings(
    placement: Mapping[str, Any], accelerators: Mapping[str, Any], machine: str, check_mode: bool
) -> list[dict[str, str]]:
    """What placement and the facts it rests on have to say, as findings of preflight.

    Devices that were only assumed are an error, save in check mode, where the driver may be what is missing yet. (Placement says
    that it assumed something wherever something was to be placed.)
    """
    placement, accelerators = plain(placement), plain(accelerators)
    said = [(finding["level"], finding["message"]) for finding in placement["findings"]]
    said += [("warning", warning) for warning in accelerators.get("warnings") or []]
    if placement["assumed"] and placement["findings"] and not check_mode:
        reason = accelerators.get("reason") or "the module accelerator_facts has not run"
        said.append(("error", f"no device is shown: {reason}"))
    prefix = f"{machine}: "
    return [
        {
            "level": level,
            "check": "devices",
            "message": message[len(prefix) :] if message.startswith(prefix) else message,
            "remedy": "",
        }
        for level, message in said
    ]


def known_models(own: Mapping[str, Any], wanted: Iterable[str], machines: Iterable[str], hostvars: Mapping[str, Any]) -> dict[str, Any]:
    """The models of the wanted directories: this machine's `own`, else as the first of the machines has read them, which it will get."""
    known = {path: model for path, model in plain(own).items() if model["config"]}
    machines = list(machines)
    for path in set(wanted) - set(known):
        read = (((hostvars[name].get("preflight_devices") or {}).get("models") or {}).get(path) for name in machines)
        model = next((plain(model) for model in read if model and model["config"]), None)
        if model:
            known[path] = model
    return known


def fit_findings(verdicts: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What verdicts of fit have against a start, as findings; what is only information is left to the table."""
    return [
        {
            "level": finding["level"],
            "check": "fit",
            "message": f"deployment {verdict['deployment']}: {finding['message']}",
            "remedy": finding["remedy"],
        }
        for verdict in plain(list(verdicts))
        for finding in verdict["findings"]
        if finding["level"] != "info"
    ]


def compatibility_findings(
    deployments: Mapping[str, Mapping[str, Any]], accelerators: Mapping[str, Any], allow: Mapping[str, str]
) -> list[dict[str, str]]:
    """What presets/compatibility.yml has against a machine's chips and driver and the versions its deployments name."""
    deployments, accelerators = plain(deployments), plain(accelerators)
    if accelerators.get("vendor") != "huawei":
        return []
    chips = sorted({device["name"] for device in accelerators["devices"] if device.get("name")})
    found: list[dict[str, str]] = []
    for deployment in deployments.values():
        for chip in chips:
            known = {
                "chip": chip,
                "hdk": accelerators.get("driver_version"),
                "cann": deployment["cann_version"],
                "vllm": deployment["vllm_version"],
                "vllm_ascend": deployment["vllm_ascend_version"],
            }
            for item in compatibility.judge(known, _compatibility(), plain(allow)):
                line = {"level": item["level"], "check": "compatibility", "message": item["message"], "remedy": item["remedy"]}
                if line not in found:
                    found.append(line)
    return found


def finding_lines(findings: Iterable[Mapping[str, Any]], level: str) -> list[str]:
    """The findings of one level, a line each: where, what is wrong, what to do."""
    return inventory_rules.lines(plain(findings), level)


def finding_table(findings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Findings as a table, errors first."""
    columns = {"machine": "machine", "level": "level", "check": "check", "message": "finding", "remedy": "what to do"}
    return table(sorted(plain(findings), key=lambda finding: finding["level"]), columns)


def of_machines(machines: Iterable[str], hostvars: Mapping[str, Any], variable: str) -> list[dict[str, Any]]:
    """The lists that machines hold in a fact, as one list of dictionaries that name their `machine`."""
    return [
        dict(plain(item), machine=name) for name in machines for item in hostvars[name].get(variable, [])
    ]


def _machine(variables: Mapping[str, Any]) -> Machine:
    """What the rules read of one machine; a variable that refers to an undefined one is noted, not raised."""
    machine = Machine(names=tuple(variables))
    for name in inventory_rules.READ:
        if name not in variables:
            continue
        try:
            machine.vars[name] = plain(variables[name])
        except (AnsibleError, UndefinedError) as error:
            machine.unreadable[name] = " ".join(str(error).split())
    return machine


@functools.lru_cache(maxsize=None)
def _compatibility() -> dict[str, Any]:
    return yaml.safe_load((ROLES.parent / "presets" / "compatibility.yml").read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=None)
def _role_variables() -> tuple[str, ...]:
    """The variables of all roles, from their argument specifications."""
    names = set()
    for path in ROLES.glob("*/meta/argument_specs.yml"):
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]
        for entry in entries.values():
            names.update(entry.get("options") or {})
    return tuple(sorted(names))


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "inventory_findings": inventory_findings,
            "service_addresses": service_addresses,
            "machine_wants": machine_wants,
            "placed_wants": placed_wants,
            "placement_findings": placement_findings,
            "known_models": known_models,
            "fit_findings": fit_findings,
            "compatibility_findings": compatibility_findings,
            "finding_lines": finding_lines,
            "finding_table": finding_table,
            "of_machines": of_machines,
        }
