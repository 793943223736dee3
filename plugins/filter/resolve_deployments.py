"""Filter: deployments made whole from preset, inventory and overrides."""

from __future__ import annotations

DOCUMENTATION = r"""
---
name: resolve_deployments
short_description: Deployments of a machine with every key present
description:
  - Merges the preset a deployment names, the deployment, and its override, in this order. RV(ignore:args), RV(ignore:env) and
    RV(ignore:container) are merged key by key, a null in them takes a key away.
  - Fails with one line for each mistake, naming deployment, key, value and remedy.
positional: _input
options:
  _input:
    description: The C(deployments) of the machine, by name.
    type: dict
    required: true
  overrides:
    description: The machine's C(deployment_overrides), by deployment.
    type: dict
    default: {}
  services:
    description: The C(services) of the inventory; deployments must name one of them. Not checked when left out.
    type: dict
  image_registry:
    description: Replaces the host part of images, for sites that cannot reach public registries.
    type: str
    default: ""
  machine:
    description: Name of the machine, for messages.
    type: str
    default: ""
author: llmops.ascend authors
"""

EXAMPLES = r"""
- name: Resolve this machine's deployments
  ansible.builtin.set_fact:
    resolved: >-
      {{ deployments | llmops.ascend.resolve_deployments(overrides=deployment_overrides | default({}), services=services,
                                                         machine=inventory_hostname) }}
"""

RETURN = r"""
_value:
  description: Resolved deployments by name, each with every key.
  type: dict
"""

from pathlib import Path

import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.llmops.ascend.plugins.module_utils import deployments as logic
from ansible_collections.llmops.ascend.plugins.module_utils.plain import plain

PRESETS = Path(__file__).resolve().parents[2] / "presets"


def load_presets(directory=PRESETS):
    """The deployment part of every preset, by the preset's name (that of its file)."""
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["deployment"]
            for path in sorted(directory.glob("*.yml")) if path.stem != "compatibility"}


def resolve_deployments(deployments, overrides=None, services=None, image_registry="", machine=""):
    """See DOCUMENTATION."""
    resolved, findings = logic.resolve_deployments(
        plain(deployments or {}), plain(overrides or {}), load_presets(), plain(services), str(image_registry or ""),
        str(machine))
    if findings:
        raise AnsibleFilterError("\n".join(finding["message"] for finding in findings))
    return resolved


class FilterModule:
    """Ansible's door."""

    def filters(self):
        return {"resolve_deployments": resolve_deployments}
