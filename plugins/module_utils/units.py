"""An instance's files (specification, environment, unit) and what a machine has of it.

Rendering is pure. Observing takes a function that runs a command, so that it needs no Ansible and can be tested.
"""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Callable

from ansible_collections.llmops.ascend.plugins.module_utils import ownership
from ansible_collections.llmops.ascend.plugins.module_utils.atomic_files import mode_of, read_text
from ansible_collections.llmops.ascend.plugins.module_utils.fingerprint import fingerprint, secret_digests

SUPERVISOR = "/usr/local/lib/llmops/supervisor.py"
SPECIFICATION_SCHEMA = 1
RESTART_SECONDS = 15
STOP_MARGIN_SECONDS = 60    # for docker itself, on top of what the engine gets to finish its requests
MODES = {"specification": 0o644, "environment": 0o600, "unit": 0o644}
_NAME = re.compile(r"^[a-z0-9][a-z0-9_.-]*$")
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
# Decided by placement and this run, not part of what is written down.
_TRANSIENT = ("state", "reason", "blocked_by")

Run = Callable[[list], tuple]   # argv -> (return code, stdout, stderr), with LC_ALL=C


# -- rendering --------------------------------------------------------------------------------------------------------

def document(specification: dict, secrets: dict, salt: str) -> dict:
    """What stands in /etc/llmops/instances/NAME.json: the specification with its fingerprint and secrets' digests.

    Raises ValueError for a name that cannot be a unit or container name, and for a runtime that has no units yet.
    """
    name = specification["name"]
    if not _NAME.match(name):
        raise ValueError(f"instance name {name!r}: use lower-case letters, digits, '-', '_' and '.'")
    if specification["runtime"] != "container":
        raise ValueError("{}: runtime {!r} has no units: use 'container'".format(name, specification["runtime"]))
    digests = secret_digests(secrets, salt)
    kept = {key: value for key, value in specification.items() if key not in _TRANSIENT}
    return dict(kept, schema=SPECIFICATION_SCHEMA, managed_by=ownership.MANAGER, secrets=digests,
                fingerprint=fingerprint(specification, digests))


def render_document(value: dict) -> str:
    """A document as the text of its file."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def render_environment(secrets: dict) -> str:
    """docker's --env-file: KEY=value, the value literal to the end of the line.

    Raises ValueError where the syntax cannot carry a value. The message names the variable, never its value.
    """
    lines = [ownership.HEADER]
    for key, value in sorted(secrets.items()):
        if not _VARIABLE.match(key):
            raise ValueError(f"secret {key!r}: not a name of an environment variable")
        if re.search("[\r\n\0]", str(value)):
            raise ValueError(f"secret {key}: docker's environment files cannot carry line breaks or NUL")
        lines.append(f"{key}={value}")
    return "\n".join(lines) + "\n"


def render_unit(specification: dict) -> str:
    """The systemd unit of an instance.

    * It wants docker but does not require it: a restart of dockerd must not stop instances.
    * Restart=always: `systemctl stop` never restarts, and whatever else ends the container should.
    * No start limit: a device that recovers after an hour brings its instance back. The supervisor waits longer after
      each failure, up to five minutes.
    * KillMode=mixed: SIGTERM goes to the supervisor alone, which stops the container. The container lives in dockerd's
      part of the cgroup tree, so the supervisor's own death never reaches it.
    """
    name = specification["name"]
    description = "vLLM instance {}: {} on devices {}, {}:{}".format(
        name, specification["model"], ",".join(map(str, specification["devices"])),
        specification["address"], specification["port"])
    return "\n".join([
        ownership.HEADER,
        "[Unit]",
        "Description=" + description.replace("%", "%%").replace("\n", " "),
        "Wants=docker.service network-online.target",
        "After=docker.service network-online.target",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=notify",
        f"ExecStart=/usr/bin/python3 {SUPERVISOR} {ownership.Paths().specification(name)}",
        "Restart=always",
        f"RestartSec={RESTART_SECONDS}",
        "TimeoutStartSec={}".format(specification["start_timeout_s"]),
        "TimeoutStopSec={}".format(specification["stop_timeout_s"] + STOP_MARGIN_SECONDS),
        "KillMode=mixed",
        "SyslogIdentifier=" + name,
        "NoNewPrivileges=true",
        "ProtectSystem=full",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ])


def render(specification: dict, secrets: dict, salt: str) -> tuple[dict, dict]:
    """An instance's document and its files: {"specification": text, "environment": text, "unit": text}."""
    value = document(specification, secrets, salt)
    return value, {"specification": render_document(value), "environment": render_environment(secrets),
                   "unit": render_unit(specification)}


# -- observing --------------------------------------------------------------------------------------------------------

@dataclass
class Unit:
    """A unit as systemd sees it (systemctl show)."""

    load_state: str = "not-found"
    active_state: str = "inactive"
    sub_state: str = "dead"
    fragment: str = ""
    file_state: str = ""
    restarts: int = 0
    job: int = 0                # id of the job that is still to be done, 0 for none
    status: str = ""
    needs_reload: bool = False

    @property
    def exists(self) -> bool:
        return self.load_state != "not-found"


@dataclass
class Container:
    """A container as dockerd sees it (docker inspect)."""

    id: str
    running: bool
    ours: bool
    fingerprint: str | None


@dataclass
class Instance:
    """What the machine has under one instance name."""

    name: str
    unit: Unit = field(default_factory=Unit)
    files: dict = field(default_factory=dict)       # kind -> text, or None where there is no file
    modes: dict = field(default_factory=dict)       # kind -> permission bits, or None
    document: dict | None = None                    # what the specification on disk says
    container: Container | None = None

    @property
    def active(self) -> bool:
        """Whether systemd has the unit active: started and answering when it was."""
        return self.unit.active_state == "active"

    def differing(self, files: dict) -> list[str]:
        """The kinds of files whose text or mode is not as wanted."""
        return sorted(kind for kind, text in files.items()
                      if self.files.get(kind) != text or self.modes.get(kind) != MODES[kind])

    @property
    def running(self) -> bool:
        """Whether the container runs, whatever its unit says."""
        return self.container is not None and self.container.running

    @property
    def foreign(self) -> str | None:
        """What of this name is somebody else's work, or None."""
        if self.unit.exists and not ownership.is_marked(self.files.get("unit")):
            return "unit {}".format(self.unit.fragment or self.name + ".service")
        if self.container is not None and not self.container.ours:
            return f"container {self.name}"
        return None


def file_paths(paths: ownership.Paths, name: str) -> dict:
    """Where the instance's files lie, by kind."""
    return {"specification": paths.specification(name), "environment": paths.environment(name),
            "unit": paths.unit(name)}


def names_on_disk(paths: ownership.Paths) -> set:
    """The names that have a specification file, recorded or not."""
    return {path.stem for path in paths.specifications.glob("*.json")}


def parse_units(text: str, names: list) -> dict:
    """{name: Unit} from `systemctl show` of several units: blocks of Key=value lines with a blank line between."""
    units = {name: Unit() for name in names}
    for block in text.strip().split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines())
        name = values.get("Id", "")[:-len(".service")]
        if name in units:
            units[name] = Unit(
                load_state=values.get("LoadState", ""), active_state=values.get("ActiveState", ""),
                sub_state=values.get("SubState", ""), fragment=values.get("FragmentPath", ""),
                file_state=values.get("UnitFileState", ""), restarts=int(values.get("NRestarts") or 0),
                job=int((values.get("Job") or "0").split()[0]), status=values.get("StatusText", ""),
                needs_reload=values.get("NeedDaemonReload") == "yes")
    return units


def show_units(run: Run, names: list) -> dict:
    """{name: Unit} of all names, in one call."""
    if not names:
        return {}
    properties = ("Id", "LoadState", "ActiveState", "SubState", "FragmentPath", "UnitFileState", "NRestarts", "Job",
                  "StatusText", "NeedDaemonReload")
    _, out, _ = run(["systemctl", "show", "--property=" + ",".join(properties)] + [name + ".service" for name in names])
    return parse_units(out, names)


def parse_containers(text: str) -> dict:
    """{name: Container} from `docker container inspect` of several: a JSON list of those that exist."""
    containers = {}
    for entry in json.loads(text or "[]"):
        labels = entry["Config"].get("Labels") or {}
        containers[entry["Name"].lstrip("/")] = Container(
            id=entry["Id"], running=bool(entry["State"]["Running"]),
            ours=labels.get(ownership.LABEL_MANAGED_BY) == ownership.MANAGER,
            fingerprint=labels.get(ownership.LABEL_FINGERPRINT))
    return containers


def show_containers(run: Run, docker: str | None, names: list) -> tuple[dict, str | None]:
    """({name: Container}, why they are unknown or None). `docker` is the docker command's path, None without one."""
    if not names or docker is None:
        return {}, None
    code, out, err = run([docker, "container", "inspect"] + names)
    if code and not re.search("no such container", err, re.IGNORECASE):
        return {}, (err.strip().splitlines() or ["docker does not answer"])[-1]
    return parse_containers(out), None


def observe(run: Run, docker: str | None, paths: ownership.Paths, names: list) -> tuple[dict, str | None]:
    """({name: Instance}, why containers are unknown or None), in two commands whatever the number of names.

    Without a docker command there are no containers: a machine before its container engine is simply empty.
    """
    units = show_units(run, names)
    containers, unknown = show_containers(run, docker, names)
    instances = {}
    for name in names:
        where = file_paths(paths, name)
        files = {kind: read_text(path) for kind, path in where.items()}
        modes = {kind: mode_of(path) for kind, path in where.items()}
        if units[name].fragment and files["unit"] is None:
            files["unit"] = read_text(units[name].fragment)     # installed elsewhere, by a package or by hand
        instances[name] = Instance(name, units[name], files, modes, _parse_document(files["specification"]),
                                   containers.get(name))
    return instances, unknown


def _parse_document(text: str | None) -> dict | None:
    """A specification on disk; None where there is none, it is broken or not ours (it is then written anew)."""
    try:
        value = json.loads(text or "null")
    except ValueError:
        return None
    return value if isinstance(value, dict) and value.get("managed_by") == ownership.MANAGER else None
