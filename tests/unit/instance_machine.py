"""A machine for tests of instances: files in a temporary directory, and systemd and docker played by one object.

Not a simulation of a lab: just enough of `systemctl` and `docker` to answer the commands that the modules give.
"""
from __future__ import annotations

import json

from ansible_collections.llmops.ascend.plugins.module_utils import ownership, units

SALT = "5a" * 32


def specification(name="qwen38-tp2-0", **changes):
    """An instance specification as filter instance_specs makes it."""
    index = int(name.rsplit("-", 1)[-1])
    devices = changes.pop("devices", [2 * index, 2 * index + 1])
    return {
        "name": name, "deployment": name.rsplit("-", 1)[0], "service": "qwen3.8-27b", "index": index,
        "runtime": "container", "address": "198.18.254.66", "port": 8000 + index, "model": "Qwen3.8-27B-W8A8",
        "devices": devices, "device_nodes": [f"/dev/davinci{device}" for device in devices] + ["/dev/davinci_manager"],
        "cpus": "0-31,64-95", "numa_nodes": [0], "image": "quay.io/ascend/vllm-ascend:qwen3.8-a2", "image_id": "sha256:aa",
        "arguments": ["vllm", "serve", "/data/models/Qwen", "--max-num-seqs", "32", "--trust-remote-code"],
        "env": {"OMP_NUM_THREADS": "1"}, "volumes": ["/data/models/Qwen:/data/models/Qwen:ro"], "driver_volumes": [],
        "shm_size": "1g", "options": [], "model_manifest": "sha256:bb", "start_timeout_s": 3600, "stop_timeout_s": 60,
        "state": "placed", "reason": None, "blocked_by": None, **changes}


class Machine:
    """systemd and dockerd. `failing` names instances whose wanted version never comes up: {name: log line}."""

    def __init__(self, root):
        self.paths = ownership.Paths(root)
        self.states = {}            # name -> (active state, sub state)
        self.enabled = set()
        self.containers = {}        # name -> {"fingerprint", "running", "ours"}
        self.failing = {}
        self.commands = []
        self.docker_error = ""
        self.paths.salt.parent.mkdir(parents=True)
        self.paths.salt.write_text(SALT)

    def install(self, spec, secrets=None, state=("active", "running"), running=True, recorded=True):
        """Put an instance there as an earlier run left it."""
        name = spec["name"]
        document, files = units.render(spec, secrets or {}, SALT)
        for kind, path in units.file_paths(self.paths, name).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[kind])
            path.chmod(units.MODES[kind])
        self.states[name] = state
        self.enabled.add(name)
        if running:
            self.containers[name] = {"fingerprint": document["fingerprint"], "running": True, "ours": True}
        if recorded:
            record = ownership.parse_record(
                self.paths.record.read_text() if self.paths.record.exists() else None, self.paths.record)
            record["instances"][name] = ownership.record_entry(document)
            self.paths.record.write_text(units.render_document(record))
        return document

    def recorded(self):
        """Names in the record."""
        return set(json.loads(self.paths.record.read_text())["instances"]) if self.paths.record.exists() else set()

    def changes(self):
        """The commands that were not mere questions."""
        return [" ".join(command) for command in self.commands
                if command[1] not in ("show", "container", "inspect") and command[0] != "journalctl"]

    def run(self, argv):
        """Answer a command: (return code, stdout, stderr)."""
        self.commands.append(argv)
        names = [word[:-len(".service")] for word in argv if word.endswith(".service")]
        if argv[0] == "journalctl":
            return 0, self.failing.get(names[0], "") + "\n", ""
        if argv[0] == "systemctl":
            return getattr(self, "_" + argv[1].replace("-", "_"))(names)
        if argv[1:3] == ["container", "inspect"]:
            return self._inspect(argv[3:])
        if argv[1] == "rm":
            self.containers.pop(argv[-1][:-len("-id")])
            return 0, "", ""
        if argv[1] == "stop":
            self.containers[argv[-1][:-len("-id")]]["running"] = False
            return 0, "", ""
        raise AssertionError(argv)

    def _inspect(self, names):
        if self.docker_error:
            return 1, "[]", self.docker_error
        found = [{"Id": name + "-id", "Name": "/" + name, "State": {"Running": self.containers[name]["running"]},
                  "Config": {"Labels": {"llmops.managed-by": "llmops.ascend",
                                        "llmops.fingerprint": self.containers[name]["fingerprint"]}
                             if self.containers[name]["ours"] else None}}
                 for name in names if name in self.containers]
        missing = len(found) < len(names)
        return int(missing), json.dumps(found), "Error: No such container: x" if missing else ""

    def _show(self, names):
        blocks = []
        for name in names:
            there = self.paths.unit(name).exists()
            active, sub = self.states.get(name, ("inactive", "dead"))
            blocks.append("\n".join([
                f"Id={name}.service", f"LoadState={'loaded' if there else 'not-found'}", f"ActiveState={active}",
                f"SubState={sub}", f"FragmentPath={self.paths.unit(name) if there else ''}",
                f"UnitFileState={'enabled' if name in self.enabled else 'disabled'}", "NRestarts=0", "StatusText=",
                "NeedDaemonReload=no"]))
        return 0, "\n\n".join(blocks) + "\n", ""

    def _restart(self, names):
        for name in names:
            document = json.loads(self.paths.specification(name).read_text())
            if name in self.failing and document["arguments"] != specification(name)["arguments"]:
                self.states[name] = ("activating", "auto-restart")
                continue
            self.containers[name] = {"fingerprint": document["fingerprint"], "running": True, "ours": True}
            self.states[name] = ("active", "running")
        return 0, "", ""

    def _stop(self, names):
        for name in names:
            self.states[name] = ("inactive", "dead")
            self.containers.pop(name, None)
        return 0, "", ""

    def _enable(self, names):
        self.enabled.update(names)
        return 0, "", ""

    def _disable(self, names):
        self.enabled.difference_update(names)
        return 0, "", ""

    def _daemon_reload(self, _names):
        return 0, "", ""

    _reset_failed = _daemon_reload
