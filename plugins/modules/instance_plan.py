#!/usr/bin/python
"""Say what has to happen to this machine's instances."""
from __future__ import annotations

DOCUMENTATION = r"""
module: instance_plan
short_description: Say what has to happen to this machine's instances
description:
  - Compares the wanted instances with what runs, with the files on disk and with the record, and says for each instance
    what has to happen and why, and in which steps.
  - An instance restarts only when the fingerprint its container wears differs from the wanted one. What reaches the
    engine is in it (arguments, environment, devices, CPUs, image id, mounts, model manifest, secrets as a salted HMAC),
    a name, a timeout or a unit's wording is not.
  - Instances in the record, or with a specification on disk, that are not wanted any more are removed. A unit or
    container of a wanted name that is not marked as ours is a finding of level C(error), never overwritten.
  - A blocked instance that still runs goes on running, unless the operator quarantined its device.
  - Works before docker or a driver is there; everything is then to be started.
author: [llmops.ascend contributors]
options:
  instances:
    description: The wanted instances of this machine, from the filter P(llmops.ascend.instance_specs#filter).
    type: list
    elements: dict
    required: true
  secrets:
    description: >-
      Secret environment variables by instance name, as in V({"qwen38-tp2-0": {"VLLM_API_KEY": "..."}}).
    type: dict
    default: {}
  max_unavailable:
    description: How many instances one restart step may hold.
    type: int
    default: 1
attributes:
  check_mode:
    description: This module does not modify state, in check mode or out of it.
    support: full
  diff_mode:
    description: This module does not modify state.
    support: none
  idempotent:
    description: This module does not modify state.
    support: full
notes:
  - Without the salt of this machine (before the first run) a random one is used, which no running instance can match.
seealso:
  - module: llmops.ascend.systemd_units
"""

EXAMPLES = r"""
- name: Plan this machine's instances
  llmops.ascend.instance_plan:
    instances: "{{ instances_specifications }}"
    secrets: "{{ instances_secrets }}"
    max_unavailable: 1
  register: instances_plan
"""

RETURN = r"""
plan:
  description: What happens to each instance, sorted by name.
  type: list
  elements: dict
  returned: success
  contains:
    name: {type: str, description: The instance.}
    action:
      type: str
      description: >-
        V(none); V(update) (files change, the process does not); V(start); V(restart); V(remove); V(blocked).
    reasons: {type: list, elements: str, description: "Why, one line each; values of secrets never appear."}
    active: {type: bool, description: Whether its unit is active now.}
  sample: [{name: qwen38-tp2-0, action: restart, reasons: ["arguments: --max-num-seqs 32 -> 16"], active: true}]
steps:
  description: >-
    How to get there, in order. C(names) are brought up together after C(remove) and all of C(names) that change have
    stopped.
  type: list
  elements: dict
  returned: success
  contains:
    kind:
      type: str
      description: >-
        V(update), V(start) (nothing that serves is touched), V(restart), V(replace) (new instances need devices or
        ports that old ones hold), V(remove).
    names: {type: list, elements: str, description: Instances to bring up.}
    remove: {type: list, elements: str, description: Instances to take away first.}
  sample: [{kind: restart, names: [qwen38-tp2-0], remove: []}]
findings:
  description: What an operator has to look at.
  type: list
  elements: dict
  returned: success
  contains:
    level: {type: str, description: V(error) or V(warning).}
    check: {type: str, description: What was checked.}
    message: {type: str, description: One line.}
"""

import secrets as random_secrets
import socket

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import instance_planning, ownership, units
from ansible_collections.llmops.ascend.plugins.module_utils.atomic_files import read_text


def make_plan(run, docker, paths, instances, secrets, max_unavailable):
    """Observe the machine and plan. Returns {plan, steps, findings}; raises ValueError for what cannot be planned."""
    record = ownership.parse_record(read_text(paths.record), paths.record)
    salt = read_text(paths.salt) or random_secrets.token_hex(32)
    placed = {specification["name"]: specification for specification in instances}
    rendered = {name: units.render(specification, secrets.get(name) or {}, salt)
                for name, specification in placed.items()}
    names = sorted(set(placed) | set(record["instances"]) | units.names_on_disk(paths))
    seen, unknown = units.observe(run, docker, paths, names)
    plan, steps, findings = instance_planning.plan(
        {name: document for name, (document, _files) in rendered.items()},
        {name: files for name, (_document, files) in rendered.items()},
        placed, seen, set(record["instances"]), max_unavailable, unknown)
    return {"plan": plan, "steps": steps, "findings": findings}


def main():
    module = AnsibleModule(
        argument_spec={
            "instances": {"type": "list", "elements": "dict", "required": True},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "max_unavailable": {"type": "int", "default": 1},
        },
        supports_check_mode=True,
    )
    if module.params["max_unavailable"] < 1:
        module.fail_json(msg="max_unavailable is {}: give 1 or more".format(module.params["max_unavailable"]))

    def run(argv):
        return module.run_command(argv, environ_update={"LC_ALL": "C"})

    try:
        result = make_plan(run, module.get_bin_path("docker"), ownership.Paths(), module.params["instances"],
                           module.params["secrets"], module.params["max_unavailable"])
    except ValueError as error:
        module.fail_json(msg=f"{socket.gethostname()}: {error}")
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
