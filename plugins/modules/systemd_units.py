#!/usr/bin/python
"""Bring up, change or take away this machine's instances."""
from __future__ import annotations

DOCUMENTATION = r"""
module: systemd_units
short_description: Bring up, change or take away this machine's instances
description:
  - With O(state=present), writes specification, environment and unit of the named instances, enables and starts them
    together and waits until each answers. Those whose fingerprint differs from what runs are stopped before any starts.
  - An instance whose container already wears the wanted fingerprint is only registered, not restarted.
  - If a changed instance does not come up, its previous files are put back and it is started as it was; a new one is
    removed again. Then the module fails with one line.
  - With O(state=absent), the named instances are stopped, and nothing of them stays behind.
  - Only units, containers and files that carry our mark are ever changed.
author: [llmops.ascend contributors]
options:
  instances:
    description: The wanted instances of this machine, from the filter P(llmops.ascend.instance_specs#filter).
    type: list
    elements: dict
    default: []
  names:
    description:
      - The instances this call is about. All of O(instances) if left out.
      - Required with O(state=absent).
    type: list
    elements: str
  replaces:
    description: Instances to take away in the same step, before any of O(names) starts.
    type: list
    elements: str
    default: []
  secrets:
    description: >-
      Secret environment variables by instance name, as in V({"qwen38-tp2-0": {"VLLM_API_KEY": "..."}}).
    type: dict
    default: {}
  state:
    description: Whether the named instances should serve or be gone.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    description: Predicts what would change, without touching anything.
    support: full
  diff_mode:
    description: Shows specifications and units; of secrets only that they change.
    support: full
  idempotent:
    description: Nothing changes when the instances are as wanted.
    support: full
notes:
  - How long a start may take is each instance's own C(start_timeout_s), and longer while its load shows progress.
seealso:
  - module: llmops.ascend.instance_plan
"""

EXAMPLES = r"""
- name: Start two instances together
  llmops.ascend.systemd_units:
    instances: "{{ instances_specifications }}"
    secrets: "{{ instances_secrets }}"
    names: [qwen38-tp2-0, qwen38-tp2-1]

- name: Two instances of four devices in place of four of two
  llmops.ascend.systemd_units:
    instances: "{{ instances_specifications }}"
    secrets: "{{ instances_secrets }}"
    names: [qwen38-tp4-0, qwen38-tp4-1]
    replaces: [qwen38-tp2-0, qwen38-tp2-1, qwen38-tp2-2, qwen38-tp2-3]

- name: Remove an instance
  llmops.ascend.systemd_units:
    names: [qwen38-tp2-3]
    state: absent
"""

RETURN = r"""
instances:
  description: What happened to each instance.
  type: list
  elements: dict
  returned: always
  contains:
    name: {type: str, description: The instance.}
    action:
      type: str
      description: >-
        V(none), V(registered) (files only), V(started), V(restarted), V(removed), V(failed), V(undone) (put back as it
        was, because another instance of the step failed).
    seconds: {type: float, description: From the order to start until it answered.}
    log: {type: list, elements: str, description: "The last lines of the journal, for V(failed) only."}
failed_instances:
  description: The names of those that did not come up.
  type: list
  elements: str
  returned: failure
"""

import secrets as random_secrets
import socket
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import instance_planning, ownership, units
from ansible_collections.llmops.ascend.plugins.module_utils.atomic_files import read_text, remove, write_text
from ansible_collections.llmops.ascend.plugins.module_utils.journal import failure_reason

POLL_SECONDS = 1.0
LOG_LINES = 20
GRACE_SECONDS = 10      # for the kernel to reap the processes of a removed container


class Failure(Exception):
    """The step cannot be done or was undone; the message is for the operator."""

    def __init__(self, message, **details):
        super().__init__(message)
        self.details = details


class Step:
    """One step: `replaces` go, `names` come up, all or (each on its own) nothing."""

    def __init__(self, run, docker, paths, instances, secrets, names, replaces, check_mode=False, sleep=time.sleep):
        self.run, self.docker, self.paths, self.secrets, self.sleep = run, docker, paths, secrets, sleep
        self.check_mode = check_mode
        placed = {specification["name"]: specification for specification in instances}
        self.names, self.replaces = list(names), list(replaces)
        missing = sorted(set(self.names) - set(placed))
        if missing:
            raise Failure("names: {} not among instances".format(", ".join(missing)))
        blocked = ["{} ({})".format(name, placed[name].get("reason")) for name in self.names
                   if placed[name].get("state") == "blocked"]
        if blocked:
            raise Failure("blocked instances are not started: {}".format(", ".join(blocked)))
        self.record = ownership.parse_record(read_text(paths.record), paths.record)
        self.record_before = {name: self.record["instances"].get(name) for name in self.names + self.replaces}
        self.salt = read_text(paths.salt) or random_secrets.token_hex(32)
        rendered = {name: units.render(placed[name], secrets.get(name) or {}, self.salt) for name in self.names}
        self.documents = {name: document for name, (document, _files) in rendered.items()}
        self.files = {name: files for name, (_document, files) in rendered.items()}
        self.seen, unknown = units.observe(run, docker, paths, self.names + self.replaces)
        if unknown and not check_mode:
            raise Failure(f"docker does not tell what runs: {unknown}")
        if docker is None and self.names and not check_mode:
            raise Failure("there is no docker command: the role container_engine installs it")
        foreign = sorted(instance.foreign for instance in self.seen.values() if instance.foreign)
        if foreign:
            raise Failure("{} not ours: adopt or retire it first".format(", ".join(foreign)))
        self.results = {}

    # -- what is to do ------------------------------------------------------------------------------------------------

    def _stale(self, name):
        """Whether something runs under this name that is not what is wanted."""
        seen = self.seen[name]
        return seen.running and seen.container.fingerprint != self.documents[name]["fingerprint"]

    def _idle(self, name):
        """Whether it neither serves nor is to be restarted: it has to be started."""
        seen = self.seen[name]
        return not self._stale(name) and not (seen.active and seen.running)

    def _present(self, name):
        seen = self.seen[name]
        return (seen.unit.exists or seen.container is not None or name in self.record["instances"]
                or any(text is not None for text in seen.files.values()))

    def actions(self):
        """{name: none|registered|started|restarted|removed}: what the step is going to do."""
        actions = {}
        for name in self.names:
            seen, entry = self.seen[name], ownership.record_entry(self.documents[name])
            registered = (not seen.differing(self.files[name]) and seen.unit.file_state == "enabled"
                          and self.record["instances"].get(name) == entry)
            actions[name] = ("restarted" if self._stale(name) else "started" if self._idle(name)
                             else "none" if registered else "registered")
        for name in self.replaces:
            actions[name] = "removed" if self._present(name) else "none"
        return actions

    def diff(self):
        """Ansible's diff: one entry for each file that changes. Of secrets it shows only which differ."""
        entries = []
        for name in self.names + self.replaces:
            for kind, path in units.file_paths(self.paths, name).items():
                before = self.seen[name].files.get(kind)
                after = self.files[name][kind] if name in self.files else None
                if before == after or kind == "environment":
                    continue
                entries.append({"before_header": str(path), "after_header": str(path),
                                "before": before or "", "after": after or ""})
            old = (self.seen[name].document or {}).get("secrets") or {}
            new = self.documents[name]["secrets"] if name in self.documents else {}
            if old != new:
                path = str(self.paths.environment(name))
                entries.append({
                    "before_header": path, "after_header": path,
                    "before": "".join(key + "=(secret)\n" for key in sorted(old)),
                    "after": "".join(key + ("=(secret)\n" if old.get(key) == new[key] else "=(secret, changed)\n")
                                     for key in sorted(new))})
        return entries

    # -- doing it -----------------------------------------------------------------------------------------------------

    def apply(self):
        """Do the step. Raises Failure after undoing what could not be done."""
        actions = self.actions()
        if not self.check_mode and any(action != "none" for action in actions.values()):
            # The record first and for removals last: what is ours is never missing from it.
            for name in self.names:
                self.record["instances"][name] = ownership.record_entry(self.documents[name])
            self._write_record()
            write_text(self.paths.salt, self.salt, 0o600)
            self._stop([name for name in self.names if actions[name] == "restarted"])
            self._remove([name for name in self.replaces if actions[name] == "removed"])
            self._write({name: self.files[name] for name in self.names})
            self._enable(self.names)
            ongoing = [name for name in self.names if actions[name] == "started" and self.seen[name].running
                       and self.seen[name].unit.sub_state == "start"]
            starting = {name: action for name, action in actions.items() if action in ("started", "restarted")}
            failed = self._start(starting, ongoing)
            if failed:
                self._undo(failed, actions)
        for name, action in actions.items():
            self.results.setdefault(name, {"name": name, "action": action})
        return any(action != "none" for action in actions.values())

    def _start(self, actions, ongoing=()):
        """Start all names in `actions` together and wait for each to answer; those `ongoing` are only waited for.

        Returns {name: log lines} of those that failed.
        """
        since, started = int(time.time()), time.monotonic()
        fresh = sorted(set(actions) - set(ongoing))
        if fresh:
            # Not "start": a unit that waits for its own restart would let the job wait with it.
            self._systemctl("restart", "--no-block", *_services(fresh))
        pending, failed = set(actions), {}
        while pending:
            for name, unit in units.show_units(self.run, sorted(pending)).items():
                if unit.active_state == "active" and not unit.job:
                    self.results[name] = {"name": name, "action": actions[name],
                                          "seconds": round(time.monotonic() - started, 1)}
                    pending.discard(name)
                elif not unit.job and (unit.sub_state == "auto-restart" or unit.active_state in ("failed", "inactive")):
                    failed[name] = self._log(name, since)
                    pending.discard(name)
            if pending:
                self.sleep(POLL_SECONDS)
        return failed

    def _undo(self, failed, actions):
        """Put back what was there before: for the failed, or for the whole step where its instances share devices."""
        present = {name: seen.document for name, seen in self.seen.items() if seen.document}
        entangled = bool(self.replaces) or any(instance_planning.conflicts(
            dict.fromkeys(self.names, instance_planning.RESTART), self.documents, present).values())
        undone = sorted(self.names) if entangled else sorted(failed)
        undone = [name for name in undone if actions[name] != "none" and self._changed(name)]
        returning = undone + (self.replaces if undone else [])
        revived = [name for name in returning if self.seen[name].active or self.seen[name].running]
        outcome = "it is as it was before, systemd tries again"
        if undone:
            self._stop(undone)
            gone = [name for name in undone if self.seen[name].document is None]
            self._remove(gone)
            self._write({name: self.seen[name].files for name in returning if name not in gone})
            self._enable([name for name in returning if name not in gone])
            for name in returning:
                if self.record_before[name] is None:
                    self.record["instances"].pop(name, None)
                else:
                    self.record["instances"][name] = self.record_before[name]
            self._write_record()
            outcome = "removed again"
        if revived:
            dead = self._start(dict.fromkeys(revived, "undone"))
            outcome = ("the previous version of {} does not come up either".format(", ".join(sorted(dead))) if dead
                       else "undone, the previous version serves again")
        for name, log in failed.items():
            self.results[name] = {"name": name, "action": "failed", "log": log[-LOG_LINES:]}
        first = sorted(failed)[0]
        others = " (also {})".format(", ".join(sorted(failed)[1:])) if len(failed) > 1 else ""
        raise Failure(f"{first}{others} did not start: {failure_reason(failed[first])}; {outcome}. "
                      f"Its log: journalctl -u {first}", failed_instances=sorted(failed))

    def _changed(self, name):
        """Whether this step gave the instance something new, so that there is something to undo."""
        before = self.seen[name].document
        return before is None or before.get("fingerprint") != self.documents[name]["fingerprint"]

    def _write(self, files_by_name):
        reload = False
        for name, files in files_by_name.items():
            for kind, path in units.file_paths(self.paths, name).items():
                if files.get(kind) is not None:
                    written = write_text(path, files[kind], units.MODES[kind])
                    reload = reload or (written and kind == "unit")
        if reload or any(seen.unit.needs_reload for seen in self.seen.values()):
            self._systemctl("daemon-reload")

    def _write_record(self):
        write_text(self.paths.record, units.render_document(self.record), 0o644)

    def _enable(self, names):
        states = units.show_units(self.run, names)
        disabled = [name for name in names if states[name].file_state != "enabled"]
        if disabled:
            self._systemctl("enable", *_services(disabled))

    def _stop(self, names):
        """Stop units and, where a supervisor was not there to do it, containers; then see that nothing lives on."""
        if not names:
            return
        seen, _unknown = units.observe(self.run, self.docker, self.paths, names)
        processes = {name: container_processes(instance.container.id)
                     for name, instance in seen.items() if instance.running}
        existing = [name for name in names if seen[name].unit.exists]
        if existing:
            self._systemctl("stop", *_services(existing))
            self.run(["systemctl", "reset-failed"] + _services(existing))
        left, _unknown = units.show_containers(self.run, self.docker, names)
        for container in left.values():
            if container.running:
                self._command([self.docker, "stop", container.id])
            self._command([self.docker, "rm", "--force", "--volumes", container.id])
        self._see_them_gone(processes)

    def _see_them_gone(self, processes):
        """A process stuck in the driver outlives its container and holds the device: say so, start nothing on it."""
        deadline = time.monotonic() + GRACE_SECONDS
        while True:
            alive = sorted((name, pid) for name, pids in processes.items() for pid, born in pids.items()
                           if start_time(pid) == born)
            if not alive:
                return
            if time.monotonic() > deadline:
                name, pid = alive[0]
                raise Failure(f"{name} was stopped, but its process {pid} still lives and holds its devices: see "
                              f"`ps -o pid,stat,wchan,cmd {pid}`; a process in state D needs a reboot")
            self.sleep(0.2)

    def _remove(self, names):
        """Stop, and leave nothing behind."""
        if not names:
            return
        self._stop(names)
        states = units.show_units(self.run, names)
        enabled = [name for name in names if states[name].exists]
        if enabled:
            self._systemctl("disable", *_services(enabled))
        for name in names:
            for path in units.file_paths(self.paths, name).values():
                remove(path)
            for suffix in (".failures", ".log-position"):
                remove(self.paths.runtime / (name + suffix))
            self.record["instances"].pop(name, None)
        if enabled:
            self._systemctl("daemon-reload")
        self._write_record()

    def _log(self, name, since):
        _, out, _ = self.run(["journalctl", "--unit", name + ".service", "--since", f"@{since}",
                              "--output", "cat", "--no-pager", "--lines", "200"])
        return out.splitlines()

    def _systemctl(self, *arguments):
        self._command(["systemctl"] + list(arguments))

    def _command(self, argv):
        code, _, err = self.run(argv)
        if code:
            raise Failure("`{}` failed: {}".format(" ".join(argv), err.strip().replace("\n", " ")))


def _services(names):
    return [name + ".service" for name in names]


def container_processes(container):
    """{pid: start time} of the processes in a container, by their cgroup's name."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    born = {pid: start_time(pid) for pid in pids if container in read_process(pid, "cgroup")}
    return {pid: ticks for pid, ticks in born.items() if ticks is not None}


def start_time(pid):
    """When the process started, in clock ticks since boot; None where it is gone or only a zombie is left."""
    fields = read_process(pid, "stat").rpartition(")")[2].split()
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else None


def read_process(pid, name):
    """A file of /proc/PID, empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def main():
    module = AnsibleModule(
        argument_spec={
            "instances": {"type": "list", "elements": "dict", "default": []},
            "names": {"type": "list", "elements": "str"},
            "replaces": {"type": "list", "elements": "str", "default": []},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "absent", ("names",))],
        supports_check_mode=True,
    )
    parameters = module.params

    def run(argv):
        return module.run_command(argv, environ_update={"LC_ALL": "C"})

    absent = parameters["state"] == "absent"
    names = parameters["names"]
    if names is None:
        names = [specification["name"] for specification in parameters["instances"]]
    step = None
    try:
        step = Step(run, module.get_bin_path("docker"), ownership.Paths(), parameters["instances"],
                    parameters["secrets"], [] if absent else names, names if absent else parameters["replaces"],
                    module.check_mode)
        diff = step.diff()
        changed = step.apply()
    except (Failure, ValueError, OSError) as error:
        details = getattr(error, "details", {})
        module.fail_json(msg=f"{socket.gethostname()}: {error}",
                         instances=sorted(step.results.values(), key=lambda result: result["name"]) if step else [],
                         **details)
    module.exit_json(changed=changed, diff=diff,
                     instances=sorted(step.results.values(), key=lambda result: result["name"]))


if __name__ == "__main__":
    main()
