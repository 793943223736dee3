#!/usr/bin/python
# Copyright (c) llmops.ascend authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

DOCUMENTATION = r"""
module: lb_backends_info
short_description: Show what a load balancer knows
description:
  - Shows backend files as they lie on disk, and the services, backends, health and drains as the running load balancer
    sees them.
  - Also reads a machine's own copies of its backend files, with I(directory) set and I(admin_socket) empty.
author:
  - llmops.ascend authors
attributes:
  check_mode:
    support: full
    description: Changes nothing.
  diff_mode:
    support: none
    description: Changes nothing.
  idempotent:
    support: full
    description: Changes nothing.
options:
  cluster:
    description: Only what belongs to this cluster.
    type: str
  directory:
    description: Where the backend files are.
    type: path
    default: /etc/llmops/load_balancer/backends
  admin_socket:
    description: The load balancer's admin socket. Empty where no load balancer is meant to run.
    type: str
    default: /run/llmops/load_balancer/admin.sock
"""

EXAMPLES = r"""
- name: See which backends are drained
  llmops.ascend.lb_backends_info:
  register: known

- name: Print them
  ansible.builtin.debug:
    msg: "{{ known.backends | selectattr('state', 'in', ['draining', 'drained']) | map(attribute='id') }}"
"""

RETURN = r"""
running:
  description: Whether the load balancer answered on its admin socket.
  type: bool
  returned: always
files:
  description: >-
    Backend files. C(content) is null and C(error) a line where a file cannot be read; C(modified) is in seconds since 1970.
  type: list
  elements: dict
  returned: always
  sample: [{path: /etc/llmops/load_balancer/backends/prod--qwen--machine66.json, content: {}, error: null, modified: 1.7}]
services:
  description: Services by name with C(status) (ok, degraded, down), C(listen_port), C(policy) and C(counts) of backends.
  type: dict
  returned: when the load balancer is running
backends:
  description: All backends; C(state) is active, down, draining or drained, C(drained_since) in seconds since 1970.
  type: list
  elements: dict
  returned: when the load balancer is running
  sample: [{id: "machine66:8000", service: qwen3.8-27b, machine: machine66, state: active, in_flight: 3}]
models:
  description: Machines by the model they serve, as the backend files say.
  type: dict
  returned: always
  sample: {Qwen3.8-27B-W8A8: [machine66, machine67]}
findings:
  description: What an operator should look at, one line each.
  type: list
  elements: str
  returned: always
configuration:
  description: Fingerprint of the configuration the load balancer runs with.
  type: str
  returned: when the load balancer is running
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils.load_balancer import (
    ADMIN_SOCKET,
    BACKENDS_DIRECTORY,
    Balancer,
    BalancerUnreachable,
    read_directory,
)


def look(directory: str, admin_socket: str, cluster: Any) -> dict[str, Any]:
    """Everything that is known, as described in RETURN."""
    files = [
        file
        for file in read_directory(directory)
        if not (cluster and file.content) or file.content["cluster"] == cluster
    ]
    models: dict[str, set[str]] = {}
    for file in files:
        for backend in file.content["backends"] if file.content else []:
            models.setdefault(backend.get("model", "unknown"), set()).add(file.content["machine"])
    findings = [f"{file.path}: {file.error}" for file in files if file.error]
    known: dict[str, Any] = {
        "running": False,
        "files": [{**file._asdict(), "path": str(file.path)} for file in files],
        "models": {model: sorted(machines) for model, machines in sorted(models.items())},
        "findings": findings,
    }
    if not admin_socket:
        return known
    try:
        status = Balancer(admin_socket).status()
    except BalancerUnreachable as problem:
        findings.append(f"{problem}; start llmops-load-balancer.service")
        return known
    backends: list[dict[str, Any]] = [
        {**backend, "service": name}
        for name, service in sorted(status["services"].items())
        for backend in sorted(service["backends"].values(), key=lambda backend: (backend["machine"], backend["port"]))
        if cluster in (None, backend["cluster"])
    ]
    for backend in backends:
        place = f"{backend['service']}: {backend['id']}"
        if backend.get("reason"):
            findings.append(f"{place} is down: {backend['reason']}")
        if backend.get("drained_since"):
            findings.append(f"{place} is {backend['state']}")
    findings += [f"{name}: {report['error']}" for name, report in status["files"].items() if report.get("error")]
    findings += list(status["errors"].values())
    known.update(
        running=True,
        configuration=status["configuration"],
        services={
            name: {key: value for key, value in service.items() if key != "backends"}
            for name, service in status["services"].items()
        },
        backends=backends,
    )
    return known


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "cluster": {"type": "str"},
            "directory": {"type": "path", "default": BACKENDS_DIRECTORY},
            "admin_socket": {"type": "str", "default": ADMIN_SOCKET},
        },
        supports_check_mode=True,
    )
    options = module.params
    module.exit_json(changed=False, **look(options["directory"], options["admin_socket"], options["cluster"]))


if __name__ == "__main__":
    main()
