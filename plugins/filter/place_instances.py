"""Filter: which devices, port and cores each instance of a machine gets."""

from __future__ import annotations

DOCUMENTATION = r"""
---
name: place_instances
short_description: Instances of a machine on its devices
description:
  - A pure function of deployments, accelerator facts and the instances that exist. Existing instances keep their devices, new
    ones get the tightest links, and none is split across NUMA nodes when it can be avoided.
  - A device that is sick, quarantined, absent or held by others blocks its own instance only.
positional: _input
options:
  _input:
    description: Resolved deployments by name, see P(llmops.ascend.resolve_deployments#filter).
    type: dict
    required: true
  facts:
    description: RV(ignore:ansible_facts.accelerators), see M(llmops.ascend.accelerator_facts). Empty before the driver is in.
    type: dict
    default: {}
  address:
    description: Address the instances listen on.
    type: str
    required: true
  quarantined:
    description: Ids of devices to keep out.
    type: list
    elements: int
    default: []
  replace:
    description: Place all instances anew, whatever runs.
    type: bool
    default: false
  machine:
    description: Name of the machine, for messages.
    type: str
    default: ""
author: llmops.ascend authors
"""

EXAMPLES = r"""
- name: Place this machine's instances
  ansible.builtin.set_fact:
    placement: >-
      {{ resolved | llmops.ascend.place_instances(facts=ansible_facts['accelerators'] | default({}), address=service_address,
                                                  quarantined=quarantined_devices, machine=inventory_hostname) }}
"""

RETURN = r"""
_value:
  description: The placement.
  type: dict
  contains:
    instances:
      description: Instances with devices, port, cores, arguments, environment, and C(state) V(placed) or V(blocked).
      type: list
      elements: dict
    findings:
      description: What is wrong, each with C(level) V(error) or V(warning), and C(message).
      type: list
      elements: dict
    explain:
      description: One line for each instance saying where it goes and why.
      type: list
      elements: str
    assumed:
      description: Whether devices were assumed because the machine shows none yet.
      type: bool
"""

from ansible_collections.llmops.ascend.plugins.module_utils import placement
from ansible_collections.llmops.ascend.plugins.module_utils.plain import plain


def place_instances(deployments, facts=None, address=None, quarantined=None, replace=False, machine=""):
    """See DOCUMENTATION."""
    return placement.place_instances(plain(deployments or {}), plain(facts or {}), str(address), str(machine),
                                     [int(device) for device in quarantined or []], bool(replace))


class FilterModule:
    """Ansible's door."""

    def filters(self):
        return {"place_instances": place_instances}
