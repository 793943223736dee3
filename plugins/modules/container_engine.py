#!/usr/bin/python
# Copyright: the llmops.ascend authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: container_engine
short_description: Look at a machine's dockerd, and configure it if it is ours
description:
  - Says whether dockerd is installed, runs, starts at boot, and whose it is.
  - An engine is ours if its C(daemon.json) carries our mark, a label of the daemon. Where none is installed yet, the
    file is written before it is, so that dockerd's first start already follows it. An engine that is not ours is
    never changed.
  - A change is applied by reload. What only a restart of dockerd would apply is reported, and waits for its next start.
options:
  configuration:
    description: What C(daemon.json) should say, beside our mark.
    type: dict
    required: true
  path:
    description: The configuration file.
    type: path
    default: /etc/docker/daemon.json
  socket:
    description: dockerd's socket.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    support: full
  diff_mode:
    description: Shows C(daemon.json) before and after.
    support: full
  idempotent:
    support: full
author:
  - The llmops.ascend authors
"""

EXAMPLES = r"""
- name: Look at the engine
  llmops.ascend.container_engine:
    configuration: {live-restore: true, insecure-registries: ["198.51.100.1:5000"]}
"""

RETURN = r"""
installed:
  description: Whether dockerd is installed.
  returned: success
  type: bool
ours:
  description: Whether its configuration is ours.
  returned: success
  type: bool
running:
  description: Whether dockerd answers.
  returned: success
  type: bool
enabled:
  description: Whether it starts at boot.
  returned: success
  type: bool
version:
  description: dockerd's version; null where it does not run.
  returned: success
  type: str
distribution:
  description: What the machine runs, as C(ID-VERSION_ID), C(ID) and C(ID_LIKE) of os-release name it, the most exact first.
  returned: success
  type: list
  elements: str
  sample: [debian-12, debian]
findings:
  description: What is wrong and not ours to change, or waits for dockerd's next start, one line each.
  returned: success
  type: list
  elements: str
"""

import json
import shutil
import socket
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import docker_engine
from ansible_collections.llmops.ascend.plugins.module_utils.atomic_files import read_text, write_text
from ansible_collections.llmops.ascend.plugins.module_utils.docker_engine import Engine, EngineAbsent, EngineError


def engine_info(engine: Engine) -> dict | None:
    """dockerd's /info, or None where it does not run."""
    try:
        return engine.info()
    except (EngineAbsent, EngineError):
        return None


def distribution() -> list[str]:
    """ID-VERSION_ID, ID and ID_LIKE of os-release(5), in small letters."""
    found = {}
    for line in (read_text("/etc/os-release") or "").splitlines():
        key, _, value = line.partition("=")
        found[key] = value.strip("\"'")
    name = found.get("ID", "linux")
    names = [f"{name}-{found.get('VERSION_ID', '')}", name, *found.get("ID_LIKE", "").split()]
    return [item.lower() for item in names]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "configuration": {"type": "dict", "required": True},
            "path": {"type": "path", "default": "/etc/docker/daemon.json"},
            "socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    module.run_command_environ_update = {"LC_ALL": "C", "LANGUAGE": "C"}
    path, host = module.params["path"], socket.gethostname()
    text = read_text(path)
    try:
        current = json.loads(text) if text and text.strip() else None
    except ValueError as error:
        module.fail_json(msg=f"{host}: {path} is not JSON ({error}): repair it or move it away")
    if not isinstance(current, (dict, type(None))):
        module.fail_json(msg=f"{host}: {path} holds no JSON object: repair it or move it away")

    installed = shutil.which("dockerd", path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin") is not None
    info = engine_info(Engine(module.params["socket"], 30)) if installed else None
    ours = docker_engine.is_ours(current) or (not installed and current is None)
    wanted = docker_engine.marked(module.params["configuration"])
    findings, after, changed = [], text or "", False

    if ours:
        after = docker_engine.render(wanted)
        stale = docker_engine.not_applied(info, wanted) if info else []
        changed = after != text or bool(stale)
        if installed and after != text:
            waiting = docker_engine.waits_for_start(current or {}, wanted)
            findings += ["{}: {} of {} waits for dockerd's next start".format(host, ", ".join(waiting), path)] if waiting else []
        if changed and not module.check_mode:
            write_text(path, after, 0o644)
            if info:
                reload_engine(module, wanted, host)
    elif installed:
        findings += docker_engine.foreign_findings(info, module.params["configuration"].get("insecure-registries") or [], host)
    else:
        findings.append(f"{host}: {path} is there and not ours: dockerd will start with it")

    for finding in findings:
        module.warn(finding)
    module.exit_json(
        changed=changed,
        installed=installed,
        ours=ours,
        running=info is not None,
        enabled=installed and module.run_command(["systemctl", "is-enabled", "docker.service"])[0] == 0,
        version=(info or {}).get("ServerVersion"),
        distribution=distribution(),
        findings=findings,
        diff={"before": text or "", "after": after, "before_header": path, "after_header": path},
    )


def reload_engine(module: AnsibleModule, wanted: dict, host: str) -> None:
    """Let dockerd read its file again, and see that it did."""
    module.run_command(["systemctl", "reload", "docker.service"], check_rc=True)
    # SIGHUP is taken note of in its own time; the first answer after it may still be the old one.
    stale: list[str] = []
    for _ in range(50):
        stale = docker_engine.not_applied(engine_info(Engine(module.params["socket"], 30)) or {}, wanted)
        if not stale:
            return
        time.sleep(0.1)
    module.fail_json(msg="{}: dockerd did not take {} over on reload: see journalctl -u docker".format(host, ", ".join(stale)))


if __name__ == "__main__":
    main()
