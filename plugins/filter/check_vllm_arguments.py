"""Filter: what is wrong with the engine arguments of a machine's deployments."""

from __future__ import annotations

DOCUMENTATION = r"""
---
name: check_vllm_arguments
short_description: Findings on the engine arguments of deployments
description:
  - Checks the C(args) of resolved deployments against what the vLLM version in use accepts, without facts and without an
    engine. Unknown options and parsers are reported with the names they resemble.
  - An unknown version is a warning, and its arguments are checked against the nearest older one for warnings only.
positional: _input
options:
  _input:
    description: Resolved deployments by name, see P(llmops.ascend.resolve_deployments#filter).
    type: dict
    required: true
  machine:
    description: Name of the machine, for messages.
    type: str
    default: ""
author: llmops.ascend authors
"""

EXAMPLES = r"""
- name: Refuse arguments the engine would refuse
  ansible.builtin.assert:
    that: resolved | llmops.ascend.check_vllm_arguments | selectattr('level', 'eq', 'error') | length == 0
"""

RETURN = r"""
_value:
  description: Findings, each with C(level) V(error) or V(warning), and C(message).
  type: list
  elements: dict
"""

from ansible_collections.llmops.ascend.plugins.module_utils.plain import plain
from ansible_collections.llmops.ascend.plugins.module_utils.vllm_cli import check_arguments


def check_vllm_arguments(deployments, machine=""):
    """See DOCUMENTATION."""
    return [finding for deployment in plain(deployments or {}).values()
            for finding in check_arguments(deployment, str(machine))]


class FilterModule:
    """Ansible's door."""

    def filters(self):
        return {"check_vllm_arguments": check_vllm_arguments}
