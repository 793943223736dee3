"""Filter: the command line of one vLLM instance."""

from __future__ import annotations

DOCUMENTATION = r"""
---
name: vllm_arguments
short_description: Command line of a vLLM instance
description:
  - Renders the argument vector of an instance from its resolved deployment. Options stand in alphabetical order, dictionaries as
    compact JSON, so that the same settings always give the same words. The API key is never among them.
positional: _input, instance
options:
  _input:
    description: A resolved deployment, see P(llmops.ascend.resolve_deployments#filter).
    type: dict
    required: true
  instance:
    description: The instance; its C(address) and C(port) are used.
    type: dict
    required: true
author: llmops.ascend authors
"""

EXAMPLES = r"""
- name: Show what an instance would run with
  ansible.builtin.debug:
    msg: "{{ resolved['qwen38-tp2'] | llmops.ascend.vllm_arguments({'address': '10.255.254.66', 'port': 8000}) | join(' ') }}"
"""

RETURN = r"""
_value:
  description: The words of the command, beginning with C(vllm serve).
  type: list
  elements: str
"""

from ansible_collections.llmops.ascend.plugins.module_utils.plain import plain
from ansible_collections.llmops.ascend.plugins.module_utils.vllm_cli import render_arguments


def vllm_arguments(deployment, instance):
    """See DOCUMENTATION."""
    return render_arguments(plain(deployment), plain(instance))


class FilterModule:
    """Ansible's door."""

    def filters(self):
        return {"vllm_arguments": vllm_arguments}
