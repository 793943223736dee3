"""Filters of the role load_balancer: doors to module_utils.load_balancer, and sieves for results of delegated loops."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.llmops.ascend.plugins.module_utils import load_balancer
from ansible_collections.llmops.ascend.plugins.module_utils.plain import plain


def backend_registrations(
    instances: list[dict[str, Any]], deployments: dict[str, dict[str, Any]], machine: str, address: str
) -> list[dict[str, Any]]:
    """What a machine offers, [{service, backends}], from placed instances and resolved deployments by name."""
    try:
        return load_balancer.registrations(plain(instances), plain(deployments), str(machine), str(address))
    except KeyError as missing:
        raise AnsibleFilterError(f"{machine}: an instance or its deployment lacks {missing}") from missing


def load_balancer_failures(results: list[dict[str, Any]], machine: str) -> list[str]:
    """One line per load balancer that was unreachable or failed, from results of a loop over load balancers."""
    lines = []
    for result in results:
        if result.get("unreachable") or (result.get("msg") and not result.get("skipped")):
            item = result["item"]
            balancer = item if isinstance(item, str) else item[0]
            reason = " ".join(str(result["msg"]).removeprefix("Task failed: ").split())
            lines.append(f"{machine} on load balancer {balancer}: {reason}")
    return lines


def load_balancer_files(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The readable backend files, {content, modified}, in results of a loop of lb_backends_info."""
    return [
        {"content": file["content"], "modified": file["modified"]}
        for result in results
        for file in result.get("files", [])
        if file["content"]
    ]


class FilterModule:
    """Ansible's door."""

    def filters(self) -> dict[str, Any]:
        return {
            "backend_registrations": backend_registrations,
            "load_balancer_failures": load_balancer_failures,
            "load_balancer_files": load_balancer_files,
        }
