#!/usr/bin/python
# Copyright: the llmops.ascend authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_server
short_description: Give one model to one machine for the length of one copy
description:
  - Starts an rsync daemon as a transient systemd unit that serves one model directory, read only, on one address and
    a free port, to one client address that knows a secret made for this copy.
  - It ends when told, or by itself after O(lifetime); its configuration and secret go with it. One that an
    interrupted run left behind is ended by the next M(llmops.ascend.model_manifest) on that machine.
options:
  name:
    description: What the server is for, such as C(machine66-qwen). A server of that name is replaced.
    type: str
    required: true
  state:
    description: Whether the server should run.
    type: str
    choices: [started, stopped]
    default: started
  path:
    description: The model directory. Required with O(state=started).
    type: path
  address:
    description: The address of this machine to listen on. Required with O(state=started).
    type: str
  allow:
    description: The address of the only client. Required with O(state=started).
    type: str
  secret:
    description: The secret that the client must know. Required with O(state=started).
    type: str
  lifetime:
    description: Seconds after which the server ends by itself.
    type: int
    default: 14400
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
  idempotent:
    description: A start always makes a new server.
    support: partial
author:
  - The llmops.ascend authors
"""

EXAMPLES = r"""
- name: Serve the model to machine66
  llmops.ascend.model_server:
    name: machine66-qwen
    path: /data/models/Qwen3.8-27B-W8A8
    address: 198.51.100.69
    allow: 198.51.100.66
    secret: "{{ secret }}"
  delegate_to: machine69

- name: End it
  llmops.ascend.model_server:
    name: machine66-qwen
    state: stopped
  delegate_to: machine69
"""

RETURN = r"""
port:
  description: Where the server listens.
  returned: O(state=started), not in check mode
  type: int
  sample: 40213
unit:
  description: The systemd unit.
  returned: success
  type: str
  sample: llmops-model-server-machine66-qwen.service
"""

import re
import shutil

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import rsync_daemon


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["started", "stopped"], "default": "started"},
            "path": {"type": "path"},
            "address": {"type": "str"},
            "allow": {"type": "str"},
            "secret": {"type": "str", "no_log": True},
            "lifetime": {"type": "int", "default": 14400},
        },
        required_if=[("state", "started", ("path", "address", "allow", "secret"))],
        supports_check_mode=True,
    )
    options = module.params
    name = re.sub(r"[^A-Za-z0-9._-]", "-", options["name"])
    unit = rsync_daemon.unit_name(name)
    if options["state"] == "stopped":
        existed = rsync_daemon.exists(name)
        if existed and not module.check_mode:
            rsync_daemon.stop(name, module.run_command)
        module.exit_json(changed=existed, unit=unit)
    if module.check_mode:
        module.exit_json(changed=True, unit=unit)
    if shutil.which("rsync") is None:
        module.fail_json(msg="rsync is not installed here: install it, or name another model_source")
    try:
        port = rsync_daemon.start(
            name,
            options["path"],
            options["address"],
            options["allow"],
            options["secret"],
            options["lifetime"],
            module.run_command,
        )
    except rsync_daemon.ServerError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=True, port=port, unit=unit)


if __name__ == "__main__":
    main()
