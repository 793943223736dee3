"""Filters of the switch phase: doors to module_utils.switching."""

from __future__ import annotations

from typing import Any

from ansible_collections.llmops.ascend.plugins.module_utils import load_balancer, switching
from ansible_collections.llmops.ascend.plugins.module_utils.plain import plain


def machines_to_roll(machines: list[str], hostvars: Any) -> list[str]:
    """The machines of this run whose plan changes something that serves, in their order."""
    found = []
    for machine in machines:
        plan = hostvars[machine].get("instances_plan") if machine in hostvars else None
        if plan and switching.needs_roll(plan["steps"]):
            found.append(machine)
    return found


def needs_roll(steps: list[dict[str, Any]]) -> bool:
    """Whether the steps touch something that serves."""
    return switching.needs_roll(steps)


def offers(placement: dict[str, Any], known: list[dict[str, Any]], plan: list[dict[str, Any]], deployments: dict[str, Any],
           machine: str, address: str, done: list[str] | None = None, gone: list[str] | None = None) -> list[dict[str, Any]]:
    """What a machine registers at this moment: [{service, backends}]; see module_utils.switching.serving."""
    instances = switching.serving(plain(placement["instances"]), plain(known), plain(plan), done or [], gone or [])
    known_deployments = {item["deployment"]: {"service": item.get("service")} for item in instances}
    return load_balancer.registrations(instances, {**known_deployments, **plain(deployments)}, str(machine), str(address))


def plan_lines(planned: dict[str, Any], check_mode: bool = False) -> list[str]:
    """What happens to each instance and why, a line each; `planned` is what the module instance_plan returns."""
    return switching.plan_lines(planned["plan"], planned["steps"], check_mode)


def backend_ids(step: dict[str, Any], known: list[dict[str, Any]], machine: str) -> list[str]:
    """The ids of the backends that a step concerns."""
    return switching.backend_ids(step, known, machine)


def merged_rows(brief: list[dict[str, Any]], full: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Verification rows, full ones in place of brief ones."""
    return switching.merged_rows(brief, full)


def unfinished(machines: list[str], hostvars: Any, groups: dict[str, list[str]]) -> list[str]:
    """One line for everything this run leaves undone."""
    names = ("switch_finished", "placement", "load_balancer_failures")
    variables = {machine: {name: plain(hostvars[machine].get(name)) for name in names} for machine in machines}
    return switching.unfinished(machines, variables, groups.get("workers", []))


class FilterModule:
    """Ansible's door."""

    def filters(self) -> dict[str, Any]:
        return {"machines_to_roll": machines_to_roll, "needs_roll": needs_roll, "offers": offers, "backend_ids": backend_ids,
                "merged_rows": merged_rows, "plan_lines": plan_lines, "unfinished": unfinished}
