#!/usr/bin/python
# Copyright (c) llmops.ascend authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

DOCUMENTATION = r"""
module: lb_backends
short_description: Put one machine's backends on a load balancer, take them out, drain them
description:
  - Runs on a load balancer, usually delegated from the play of the machine whose backends these are.
  - Membership is a backend file per (cluster, service, machine), written whole; the load balancer reads it within a
    second. Drains are the load balancer's own persisted state and are changed through its admin socket only.
  - Where the load balancer is not running, files are still written; there is nothing to drain or to wait for, and a
    warning says so.
  - Also keeps a machine's own copy of its backend files, with I(directory) set and I(admin_socket) empty.
author:
  - llmops.ascend authors
attributes:
  check_mode:
    support: full
    description: Nothing is written, drained or waited for; C(changed) and the difference are what a run would make.
  diff_mode:
    support: full
    description: Shows backend files and states before and after.
  idempotent:
    support: full
    description: Nothing changes where the file and the states are as asked for.
options:
  cluster:
    description: The cluster the backends belong to.
    type: str
    required: true
  machine:
    description: The machine the backends run on. Required by all states but C(purged) and C(imported).
    type: str
  service:
    description: The service of the backends. Required by C(present); otherwise all services of the machine.
    type: str
  backends:
    description: What the machine offers to the service, for C(present). Whatever else its file holds is removed.
    type: list
    elements: dict
    suboptions:
      id:
        description: Name of the backend, C(<machine>:<port>).
        type: str
        required: true
      instance:
        description: The instance behind it.
        type: str
      address:
        description: IP address the instance listens on.
        type: str
        required: true
      port:
        description: Port the instance listens on.
        type: int
        required: true
      model:
        description: The first served model name.
        type: str
      weight:
        description: Share of sessions in relation to other backends.
        type: float
        default: 1
      max_concurrent:
        description: Requests the engine works on at a time.
        type: int
  ids:
    description: Only these backends, for C(absent), C(drained) and C(active); all of the machine's otherwise.
    type: list
    elements: str
  state:
    description:
      - C(present) writes the file and waits until the load balancer shows every backend as answering (or drained).
      - C(absent) drains, waits until nothing is in flight, then removes entries or file.
      - C(drained) sends new requests elsewhere and waits until nothing is in flight.
      - C(active) ends a drain and waits until the load balancer shows the backend as answering.
      - C(purged) does C(absent) for every machine of the cluster that is not among I(machines).
      - C(imported) writes those of I(files) that are missing here or were written later elsewhere.
    type: str
    choices: [present, absent, drained, active, purged, imported]
    default: present
  by:
    description: >-
      Who drains, for C(drained) and C(absent). C(active) with it ends only drains of that one, and C(present) with it ends
      them too, as after a run that was interrupted between drain and return. Without it C(drained) is an operator's drain,
      C(active) ends every drain, and C(present) none.
    type: str
  max_unavailable:
    description: >-
      For C(drained) and C(absent), refuse when more backends of the service than this would be unavailable, counting
      those that are down or drained already. Backends that are out already are always drained. Default is no limit.
    type: int
  slot_timeout_s:
    description: Seconds to keep asking while I(max_unavailable) refuses, so that machines take turns.
    type: int
    default: 0
  timeout_s:
    description: Seconds to wait for requests in flight, or for backends to answer.
    type: int
    default: 60
  machines:
    description: The machines of the cluster that stay, for C(purged).
    type: list
    elements: str
  confirm:
    description: Let C(purged) remove more than half of the cluster's files.
    type: bool
    default: false
  files:
    description: Backend files of other machines, for C(imported), as lb_backends_info returns them.
    type: list
    elements: dict
    suboptions:
      content:
        description: Content of the file.
        type: dict
        required: true
      modified:
        description: When it was last written, in seconds since 1970.
        type: float
        required: true
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
- name: Offer this machine's instances on a load balancer
  llmops.ascend.lb_backends:
    cluster: prod
    service: qwen3.8-27b
    machine: machine66
    backends:
      - {id: "machine66:8000", instance: qwen38-tp2-0, address: 10.255.254.66, port: 8000, model: Qwen3.8-27B-W8A8}
  delegate_to: machine69

- name: Take one of them out for a restart, never more than one of the service at a time
  llmops.ascend.lb_backends:
    cluster: prod
    machine: machine66
    ids: ["machine66:8000"]
    state: drained
    max_unavailable: 1
    slot_timeout_s: 600
    timeout_s: 300
  delegate_to: machine69

- name: Forget machines that left the inventory
  llmops.ascend.lb_backends:
    cluster: prod
    state: purged
    machines: "{{ groups['workers'] }}"
"""

RETURN = r"""
running:
  description: Whether the load balancer answered on its admin socket.
  type: bool
  returned: always
files:
  description: Paths of the backend files this call is about.
  type: list
  elements: str
  returned: always
backends:
  description: >-
    The backends this call is about, as the load balancer shows them in the end. C(state) is active, down, draining or
    drained, C(in_flight) a number of requests.
  type: list
  elements: dict
  returned: when the load balancer is running
  sample: [{id: "machine66:8000", service: qwen3.8-27b, state: drained, in_flight: 0}]
other_services:
  description: Services that still have a file of this cluster and machine, besides I(service).
  type: list
  elements: str
  returned: when state is present
waited_s:
  description: Seconds spent waiting for a slot, for requests in flight or for answers.
  type: float
  returned: always
"""

import os
import time
from pathlib import Path
from typing import Any, Callable

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import atomic_files
from ansible_collections.llmops.ascend.plugins.module_utils.load_balancer import (
    ADMIN_SOCKET,
    BACKENDS_DIRECTORY,
    BackendFile,
    Balancer,
    BalancerUnreachable,
    LoadBalancerError,
    Refused,
    backend_file,
    file_name,
    newer,
    purgeable,
    read_directory,
    render,
    without,
)

POLL_S = 0.25


class Backends:
    """The work of one module call. `before` and `after` collect the difference, file by file and drain by drain."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.options = module.params
        self.balancer = Balancer(self.options["admin_socket"]) if self.options["admin_socket"] else None
        self.files = read_directory(self.options["directory"])
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}
        self.touched: list[str] = []
        self.waited_s = 0.0
        self.services = self._services()
        self.running = self.services is not None

    # --- looking ---

    def _services(self) -> Any:
        """{service: {id: backend}} as the balancer shows them, or None where it is not running."""
        if self.balancer is None:
            return None
        try:
            services = self.balancer.status()["services"]
        except BalancerUnreachable as problem:
            self.module.warn(f"{problem}; start llmops-load-balancer.service. Files are written all the same")
            return None
        return {name: dict(service["backends"]) for name, service in services.items()}

    def own(self) -> list[BackendFile]:
        """The readable files of this cluster and machine, of one service where one is given."""
        options = self.options
        return [
            file
            for file in self.files
            if file.content
            and file.content["cluster"] == options["cluster"]
            and file.content["machine"] == options["machine"]
            and options["service"] in (None, file.content["service"])
        ]

    def chosen(self, file: BackendFile) -> list[str]:
        """The ids of a file's backends that the call is about."""
        ids = [backend["id"] for backend in file.content["backends"]]
        return ids if self.options["ids"] is None else [name for name in ids if name in self.options["ids"]]

    def shown(self, service: str, ids: list[str]) -> dict[str, dict[str, Any]]:
        """Those of `ids` the balancer knows."""
        return {name: entry for name, entry in (self.services or {}).get(service, {}).items() if name in ids}

    def wait(self, timeout_s: float, done: Callable[[], bool]) -> bool:
        """Looks again until done() or the time is over; tells which."""
        started = time.monotonic()
        try:
            while not done():
                if time.monotonic() - started >= timeout_s:
                    return False
                time.sleep(POLL_S)
                self.services = self._services()
                if self.services is None:
                    self.running = False
                    return True
            return True
        finally:
            self.waited_s += time.monotonic() - started

    # --- acting ---

    def write(self, content: dict[str, Any], modified: Any = None) -> None:
        """Puts a backend file in place, if it is not there like that; a file without backends is removed."""
        path = Path(self.options["directory"]) / file_name(content)
        text = render(content) if content["backends"] else None
        self.touched.append(str(path))
        present = atomic_files.read_text(str(path))
        if text == present:
            return
        self.before[str(path)], self.after[str(path)] = present or "", text or ""
        if self.module.check_mode:
            return
        if text is None:
            atomic_files.remove(str(path))
            return
        atomic_files.write_text(str(path), text, 0o644)
        if modified is not None:
            os.utime(str(path), (modified, modified))

    def drain(self, service: str, ids: list[str]) -> None:
        """Drains backends and waits until they have nothing in flight."""
        entries = self.shown(service, ids)
        active = [name for name, entry in entries.items() if entry["state"] not in ("draining", "drained")]
        for name in active:
            self.before[f"{service}/{name}"], self.after[f"{service}/{name}"] = entries[name]["state"], "drained"
        if self.module.check_mode or not entries:
            return
        if active:
            self.take(service, active)

        def is_idle() -> bool:
            return all(entry["in_flight"] == 0 for entry in self.shown(service, ids).values())

        self.services = self._services()
        if self.running and not self.wait(self.options["timeout_s"], is_idle):
            busy = ", ".join(
                f"{name} ({entry['in_flight']})"
                for name, entry in self.shown(service, ids).items()
                if entry["in_flight"]
            )
            raise LoadBalancerError(
                f"service {service} still has requests in flight on {busy} after {self.options['timeout_s']} s; "
                "they stay drained: wait longer with timeout_s, or activate them again"
            )

    def take(self, service: str, ids: list[str]) -> None:
        """Asks for the drain until max_unavailable allows it or slot_timeout_s is over."""
        refusal = []

        def is_taken() -> bool:
            try:
                self.balancer.drain(service, ids, self.options["max_unavailable"], self.options["by"])
            except Refused as problem:
                refusal[:] = [str(problem)]
                return False
            return True

        if not self.wait(self.options["slot_timeout_s"], is_taken):
            raise LoadBalancerError(f"{refusal[0]}; bring those back or raise max_unavailable")

    def await_answers(self, service: str, ids: list[str], states: Any) -> None:
        """Waits until the balancer shows every backend in one of the states."""

        def is_shown() -> bool:
            entries = self.shown(service, ids)
            return len(entries) == len(ids) and all(entry["state"] in states for entry in entries.values())

        if self.wait(self.options["timeout_s"], is_shown):
            return
        entries = self.shown(service, ids)
        missing = [
            f"{name} is {entries[name]['state']} ({entries[name].get('reason', 'no reason given')})"
            if name in entries
            else f"{name} is not shown"
            for name in ids
            if name not in entries or entries[name]["state"] not in states
        ]
        raise LoadBalancerError(
            f"the load balancer does not have every backend of service {service} in service after "
            f"{self.options['timeout_s']} s: {'; '.join(missing)}. See its error log and the instance's own"
        )

    def end_drains(self, service: str, ids: list[str]) -> None:
        """Ends the drains among ids, those of one maker where I(by) names it."""
        by = self.options["by"]
        out = {
            name: entry
            for name, entry in self.shown(service, ids).items()
            if entry["state"] in ("draining", "drained") and by in (None, entry.get("drained_by"))
        }
        for name, entry in out.items():
            self.before[f"{service}/{name}"], self.after[f"{service}/{name}"] = entry["state"], "active"
        if out and self.running and not self.module.check_mode:
            self.balancer.activate(service, list(out), by)
            self.services = self._services()

    # --- states ---

    def present(self) -> None:
        """Writes the machine's file of one service."""
        options = self.options
        offered = [{key: value for key, value in entry.items() if value is not None} for entry in options["backends"]]
        content = backend_file(options["cluster"], options["service"], options["machine"], offered)
        self.write(content)
        if self.module.check_mode or not self.running:
            return
        if options["service"] not in self.services:
            raise LoadBalancerError(
                f"service {options['service']} is not served by this load balancer: add it to services and run "
                "site.yml on the load balancers"
            )
        ids = [backend["id"] for backend in content["backends"]]
        self.await_answers(options["service"], ids, ("active", "draining", "drained"))
        if options["by"] is not None:
            self.end_drains(options["service"], ids)

    def absent(self) -> None:
        """Drains and removes the chosen backends of the machine."""
        for file in self.own():
            self.remove(file, self.chosen(file))

    def remove(self, file: BackendFile, ids: list[str]) -> None:
        """Drains the named backends of a file, then takes them out of it."""
        self.drain(file.content["service"], ids)
        self.write(without(file.content, ids))

    def drained(self) -> None:
        """Drains the chosen backends of the machine."""
        for file in self.own():
            self.touched.append(str(file.path))
            self.drain(file.content["service"], self.chosen(file))

    def active(self) -> None:
        """Ends the drains of the chosen backends of the machine."""
        for file in self.own():
            self.touched.append(str(file.path))
            service, ids = file.content["service"], self.chosen(file)
            self.end_drains(service, ids)
            if self.running and not self.module.check_mode:
                kept = {name for name, entry in self.shown(service, ids).items() if entry["state"] in ("draining", "drained")}
                self.await_answers(service, list(set(self.shown(service, ids)) - kept), ("active",))

    def purged(self) -> None:
        """Removes what belongs to machines that left the cluster."""
        options = self.options
        self.options["max_unavailable"] = None
        for file in purgeable(self.files, options["cluster"], options["machines"], options["confirm"]):
            self.remove(file, [backend["id"] for backend in file.content["backends"]])

    def imported(self) -> None:
        """Takes newer or missing files over from elsewhere."""
        for offer in newer(self.files, self.options["files"], self.options["cluster"]):
            self.write(offer["content"], offer["modified"])

    # --- result ---

    def result(self) -> dict[str, Any]:
        """What the module returns."""
        changed = self.before != self.after
        result = {
            "changed": changed,
            "running": self.running,
            "files": self.touched,
            "waited_s": round(self.waited_s, 1),
            "diff": [
                {"before_header": name, "after_header": name, "before": _line(old), "after": _line(self.after[name])}
                for name, old in self.before.items()
            ],
        }
        if self.running:
            machine, ids = self.options["machine"], self.options["ids"]
            result["backends"] = [
                {"service": service, **{key: entry[key] for key in ("id", "state", "in_flight")}}
                for service, backends in sorted((self._services() or {}).items())
                for entry in sorted(backends.values(), key=lambda entry: (entry["machine"], entry["port"]))
                if entry["machine"] == machine
                and self.options["service"] in (None, service)
                and (ids is None or entry["id"] in ids)
            ]
        if self.options["state"] == "present":
            result["other_services"] = sorted(
                file.content["service"]
                for file in self.files
                if file.content
                and file.content["cluster"] == self.options["cluster"]
                and file.content["machine"] == self.options["machine"]
                and file.content["service"] != self.options["service"]
            )
        return result


def _line(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "cluster": {"type": "str", "required": True},
            "machine": {"type": "str"},
            "service": {"type": "str"},
            "backends": {
                "type": "list",
                "elements": "dict",
                "options": {
                    "id": {"type": "str", "required": True},
                    "instance": {"type": "str"},
                    "address": {"type": "str", "required": True},
                    "port": {"type": "int", "required": True},
                    "model": {"type": "str"},
                    "weight": {"type": "float", "default": 1},
                    "max_concurrent": {"type": "int"},
                },
            },
            "ids": {"type": "list", "elements": "str"},
            "state": {
                "type": "str",
                "choices": ["present", "absent", "drained", "active", "purged", "imported"],
                "default": "present",
            },
            "by": {"type": "str"},
            "max_unavailable": {"type": "int"},
            "slot_timeout_s": {"type": "int", "default": 0},
            "timeout_s": {"type": "int", "default": 60},
            "machines": {"type": "list", "elements": "str"},
            "confirm": {"type": "bool", "default": False},
            "files": {
                "type": "list",
                "elements": "dict",
                "options": {
                    "content": {"type": "dict", "required": True},
                    "modified": {"type": "float", "required": True},
                },
            },
            "directory": {"type": "path", "default": BACKENDS_DIRECTORY},
            "admin_socket": {"type": "str", "default": ADMIN_SOCKET},
        },
        required_if=[
            ("state", "present", ["machine", "service", "backends"]),
            ("state", "absent", ["machine"]),
            ("state", "drained", ["machine"]),
            ("state", "active", ["machine"]),
            ("state", "purged", ["machines"]),
            ("state", "imported", ["files"]),
        ],
        supports_check_mode=True,
    )
    backends = Backends(module)
    try:
        getattr(backends, module.params["state"])()
    except (LoadBalancerError, OSError) as problem:
        module.fail_json(msg=str(problem), **backends.result())
    module.exit_json(**backends.result())


if __name__ == "__main__":
    main()
