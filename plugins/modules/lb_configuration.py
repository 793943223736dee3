#!/usr/bin/python
# Copyright (c) llmops.ascend authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

DOCUMENTATION = r"""
module: lb_configuration
short_description: Give a load balancer its configuration, proven before it replaces the running one
description:
  - C(nginx -t) does not run Lua. A changed configuration is therefore first started as a candidate, on sockets of its
    own and with a backend of its own, and asked over every service, through to that backend. Only then are the files put
    in place and the load balancer is started, or reloaded so that no stream is cut.
  - Where the reloaded load balancer does not report the new configuration, the previous files are put back and loaded.
  - What runs is compared too, not only what lies on disk, so that an interrupted run leaves no reload undone.
author:
  - llmops.ascend authors
attributes:
  check_mode:
    support: full
    description: Nothing is written, tried or loaded; C(changed) and the difference are what a run would make.
  diff_mode:
    support: full
    description: Shows the files before and after.
  idempotent:
    support: full
    description: Nothing changes where files, unit and the running configuration are as asked for.
options:
  binary:
    description: The nginx or OpenResty program.
    type: path
    required: true
  directory:
    description: Where the configuration lies. Files in it that are not in I(files) are removed, but for backend files.
    type: path
    required: true
  files:
    description: Content by path below I(directory).
    type: dict
    required: true
  unit:
    description: Content of the systemd unit llmops-load-balancer.service.
    type: str
    required: true
  user:
    description: The user worker processes run as.
    type: str
    required: true
  owned_directories:
    description: Directories worker processes write to, created 0750 for I(user).
    type: list
    elements: path
    default: []
  directories:
    description: Directories of root, created 0755.
    type: list
    elements: path
    default: []
  ports:
    description: Ports the services listen on.
    type: list
    elements: int
    required: true
  candidate:
    description: How to try the configuration.
    type: dict
    required: true
    suboptions:
      directory:
        description: A directory for the candidate alone, emptied before and removed after.
        type: path
        required: true
      files:
        description: Files that differ from I(files), with the candidate's own sockets and directories in them.
        type: dict
        required: true
      sockets:
        description: The candidate's unix socket by service.
        type: dict
        required: true
  distribution_units:
    description: Units of the distribution that may run an nginx of somebody else; they are looked at, never touched.
    type: list
    elements: str
    default: [nginx.service, openresty.service]
  timeout_s:
    description: Seconds to wait for the candidate, and for the load balancer to report the new configuration.
    type: int
    default: 20
"""

EXAMPLES = r"""
- name: Configure and run the load balancer
  llmops.ascend.lb_configuration:
    binary: /usr/sbin/nginx
    directory: /etc/llmops/load_balancer
    files: {nginx.conf: "...", services.json: "..."}
    unit: "..."
    user: llmops-lb
    ports: [2219]
    candidate:
      directory: /run/llmops/load_balancer.candidate
      files: {nginx.conf: "...", services.json: "..."}
      sockets: {qwen3.8-27b: /run/llmops/load_balancer.candidate/0.sock}
"""

RETURN = r"""
configuration:
  description: Fingerprint of the configuration.
  type: str
  returned: always
action:
  description: What was done to the load balancer (would be, in check mode).
  type: str
  returned: always
  sample: one of none, start, reload
findings:
  description: What an operator should know, one line each.
  type: list
  elements: str
  returned: always
"""

import hashlib
import http.server
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import atomic_files, preflight
from ansible_collections.llmops.ascend.plugins.module_utils.load_balancer import (
    ADMIN_SOCKET,
    Balancer,
    BalancerUnreachable,
    LoadBalancerError,
    backend_file,
    file_name,
    render,
)
from ansible_collections.llmops.ascend.plugins.module_utils.processes import open_files
from ansible_collections.llmops.ascend.plugins.module_utils.unix_http import UnixConnection

UNIT = "llmops-load-balancer.service"
UNIT_PATH = "/etc/systemd/system/" + UNIT
FINGERPRINT = "fingerprint"
BACKENDS = "backends"
ENVIRONMENT = {"LC_ALL": "C"}


class ConfigurationError(Exception):
    """One line: what is wrong and what to do."""


class _FakeEngine(http.server.BaseHTTPRequestHandler):
    """The candidate's backend: says yes to everything."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_args: Any) -> None:
        """Says nothing: a module's output is its result."""


def fingerprint(files: dict[str, str]) -> str:
    """Fingerprint of a configuration: the same files, the same 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def files_in(directory: str) -> dict[str, str]:
    """The configuration as it lies on disk, by relative path, without backend files."""
    root = Path(directory)
    return {
        str(path.relative_to(root)): path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] != BACKENDS
    }


def put(directory: str, files: dict[str, str]) -> None:
    """Makes the directory hold these files and no others, but for backend files."""
    root = Path(directory)
    for name, text in files.items():
        atomic_files.write_text(str(root / name), text, 0o644)
    for name in set(files_in(directory)) - set(files):
        atomic_files.remove(str(root / name))


def complaint(log: str, since: int = 0) -> str:
    """The last error in an nginx error log after byte `since`, without its time stamp; "" when there is none."""
    try:
        with Path(log).open(encoding="utf-8", errors="replace") as stream:
            stream.seek(since)
            lines = re.findall(r"\[(?:error|crit|alert|emerg)\] (?:\d+#\d+: )?(?:\*\d+ )?(.*)", stream.read())
    except OSError:
        return ""
    return lines[-1] if lines else ""


def size(path: str) -> int:
    """Size of a file in bytes; 0 when there is none."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def holder(port: int) -> str:
    """Who listens on a port, for a message."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        text = atomic_files.read_text(table) or ""
        sockets |= {f"socket:[{entry.inode}]" for entry in preflight.listeners(text) if entry.port == port}
    for process in Path("/proc").glob("[0-9]*"):
        if any(link in sockets for link in open_files(process)):
            return f"{(atomic_files.read_text(str(process / 'comm')) or 'a process').strip()} (pid {process.name})"
    return "another process"


class Candidate:
    """A throw-away nginx with the new configuration, a fake engine behind it, and a few questions."""

    def __init__(self, options: dict[str, Any], files: dict[str, str]) -> None:
        candidate = options["candidate"]
        self.binary = options["binary"]
        self.timeout_s = options["timeout_s"]
        self.user = pwd.getpwnam(options["user"])
        self.root = Path(candidate["directory"])
        self.sockets = candidate["sockets"]
        self.files = {**files, **candidate["files"]}
        self.log = str(self.root / "log" / "error.log")

    def prove(self) -> None:
        """Raises ConfigurationError when the configuration does not start or does not answer as it should."""
        engine = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _FakeEngine)
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        process = None
        try:
            self._lay(engine.server_port)
            # `timeout` ends it also when this module is killed and cannot.
            argv = ["timeout", str(self.timeout_s + 10), self.binary, "-p", str(self.root), "-e", self.log]
            process = subprocess.Popen(
                [*argv, "-c", "nginx.conf", "-g", "daemon off;"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **ENVIRONMENT},
            )
            self._await_start(process)
            for service, path in self.sockets.items():
                self._ask(service, path, engine.server_port)
        finally:
            if process is not None:
                process.terminate()
                process.communicate()
            engine.shutdown()
            engine.server_close()
            shutil.rmtree(self.root, ignore_errors=True)

    def _lay(self, port: int) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        for name in ("", "log", "run", BACKENDS, "state"):
            (self.root / name).mkdir(mode=0o755, parents=True)
        os.chown(str(self.root / "state"), self.user.pw_uid, self.user.pw_gid)
        put(str(self.root), self.files)
        for service in self.sockets:
            backend = {"id": f"candidate:{port}", "address": "127.0.0.1", "port": port, "instance": "candidate"}
            content = backend_file("candidate", service, "candidate", [backend])
            atomic_files.write_text(str(self.root / BACKENDS / file_name(content)), render(content), 0o644)

    def _await_start(self, process: subprocess.Popen) -> None:
        balancer = Balancer(str(self.root / "run" / "admin.sock"))
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                balancer.status()
                return
            except BalancerUnreachable as problem:
                if process.poll() is not None:
                    said = process.stderr.read().decode("utf-8", "replace").strip().splitlines()
                    raise ConfigurationError(complaint(self.log) or (said[-1] if said else "it exits")) from None
                if time.monotonic() > deadline:
                    raise ConfigurationError(complaint(self.log) or str(problem)) from None
            time.sleep(0.1)

    def _ask(self, service: str, path: str, port: int) -> None:
        """/health and a request through to the fake engine."""
        for target in ("/health", "/v1/models"):
            connection = UnixConnection(path, self.timeout_s)
            try:
                connection.request("GET", target)
                response = connection.getresponse()
                response.read()
            except OSError as error:
                raise ConfigurationError(f"service {service}: {target}: {error}") from None
            finally:
                connection.close()
            if response.status != 200:
                reason = complaint(self.log) or "no reason in its log"
                raise ConfigurationError(f"service {service}: {target} answers {response.status}: {reason}")
        if response.getheader("X-Upstream-Addr") != f"127.0.0.1:{port}":
            raise ConfigurationError(f"service {service}: a request did not reach its backend")


class Configuration:
    """The work of one module call."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.options = module.params
        self.files = dict(self.options["files"])
        self.name = fingerprint(self.files)
        self.files[FINGERPRINT] = self.name + "\n"
        self.present = files_in(self.options["directory"])
        self.unit = atomic_files.read_text(UNIT_PATH)
        self.running = self.systemctl("is-active", UNIT) == "active"
        self.enabled = self.systemctl("is-enabled", UNIT) == "enabled"
        self.shown = self._status()
        self.log = str(Path(self.options["directories"][0]) / "error.log") if self.options["directories"] else ""

    def systemctl(self, *arguments: str) -> str:
        """What systemctl prints, also where it says no."""
        _rc, out, _err = self.module.run_command(["systemctl", *arguments], environ_update=ENVIRONMENT)
        return out.strip()

    def act(self, *arguments: str) -> None:
        """Runs systemctl; a failure is ours."""
        rc, _out, err = self.module.run_command(["systemctl", *arguments], environ_update=ENVIRONMENT)
        if rc != 0:
            raise ConfigurationError(f"systemctl {' '.join(arguments)}: {err.strip().splitlines()[0] if err else rc}")

    def _status(self) -> dict[str, Any] | None:
        try:
            return Balancer(ADMIN_SOCKET).status()
        except LoadBalancerError:
            return None

    @property
    def action(self) -> str:
        """What the load balancer needs: none, start or reload."""
        if not self.running:
            return "start"
        if self.shown and self.shown["configuration"] == self.name and self.files == self.present:
            return "none"
        return "reload"

    def diff(self) -> list[dict[str, str]]:
        """The files that differ."""
        root = Path(self.options["directory"])
        pairs = [
            (str(root / name), self.present.get(name, ""), self.files.get(name, ""))
            for name in sorted({*self.present, *self.files})
        ]
        pairs.append((UNIT_PATH, self.unit or "", self.options["unit"]))
        return [
            {"before_header": name, "after_header": name, "before": before, "after": after}
            for name, before, after in pairs
            if before != after
        ]

    def findings(self) -> list[str]:
        """What an operator should know."""
        found = [
            f"{unit} is running and not ours: it was left alone"
            for unit in self.options["distribution_units"]
            if self.systemctl("is-active", unit) == "active"
        ]
        if self.running and self.unit not in (None, self.options["unit"]):
            found.append(f"{UNIT} changed: that counts from its next restart, which would cut open streams")
        return found

    def check_ports(self) -> None:
        """Raises ConfigurationError for the first port that somebody else listens on."""
        ours = {service["listen_port"] for service in (self.shown or {"services": {}})["services"].values()}
        for port in self.options["ports"]:
            if port in ours:
                continue
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("0.0.0.0", port))  # noqa: S104  only to see whether it could be had
                except OSError:
                    raise ConfigurationError(
                        f"port {port} is held by {holder(port)}: stop that, or give the service another listen_port"
                    ) from None

    def make_directories(self) -> None:
        """Creates what the load balancer writes to."""
        owner = pwd.getpwnam(self.options["user"])
        for name in [*self.options["directories"], str(Path(self.options["directory"]) / BACKENDS)]:
            Path(name).mkdir(mode=0o755, parents=True, exist_ok=True)
        for name in self.options["owned_directories"]:
            Path(name).mkdir(mode=0o750, parents=True, exist_ok=True)
            os.chown(name, owner.pw_uid, owner.pw_gid)

    def apply(self) -> None:
        """Proves, puts in place, loads; puts the previous files back where the new ones do not come up."""
        options, action = self.options, self.action
        self.make_directories()
        if action != "none":
            self.check_ports()
            try:
                Candidate(options, self.files).prove()
            except ConfigurationError as problem:
                kept = "the running one is untouched" if self.running else "nothing was started"
                raise ConfigurationError(f"the new configuration does not work, {kept}: {problem}") from None
        if self.unit != options["unit"]:
            atomic_files.write_text(UNIT_PATH, options["unit"], 0o644)
            self.act("daemon-reload")
        if not self.enabled:
            self.act("enable", UNIT)
        if action == "none":
            return
        since = size(self.log)
        put(options["directory"], self.files)
        try:
            self.act(action, UNIT)
            self.await_configuration(since)
        except ConfigurationError as problem:
            if action == "reload" and self.present:
                put(options["directory"], self.present)
                self.act("reload", UNIT)
                raise ConfigurationError(
                    f"the load balancer did not take the new configuration, the previous one is back: {problem}"
                ) from None
            raise

    def await_configuration(self, since: int) -> None:
        """Waits until the load balancer reports this configuration."""
        deadline = time.monotonic() + self.options["timeout_s"]
        while time.monotonic() < deadline:
            status = self._status()
            if status and status["configuration"] == self.name:
                return
            time.sleep(0.1)
        raise ConfigurationError(complaint(self.log, since) or f"see journalctl -u {UNIT}")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "binary": {"type": "path", "required": True},
            "directory": {"type": "path", "required": True},
            "files": {"type": "dict", "required": True},
            "unit": {"type": "str", "required": True},
            "user": {"type": "str", "required": True},
            "owned_directories": {"type": "list", "elements": "path", "default": []},
            "directories": {"type": "list", "elements": "path", "default": []},
            "ports": {"type": "list", "elements": "int", "required": True},
            "candidate": {
                "type": "dict",
                "required": True,
                "options": {
                    "directory": {"type": "path", "required": True},
                    "files": {"type": "dict", "required": True},
                    "sockets": {"type": "dict", "required": True},
                },
            },
            "distribution_units": {
                "type": "list",
                "elements": "str",
                "default": ["nginx.service", "openresty.service"],
            },
            "timeout_s": {"type": "int", "default": 20},
        },
        supports_check_mode=True,
    )
    configuration = Configuration(module)
    diff = configuration.diff()
    result = {
        "configuration": configuration.name,
        "action": configuration.action,
        "findings": configuration.findings(),
        "changed": bool(diff) or configuration.action != "none" or not configuration.enabled,
        "diff": diff,
    }
    if not module.check_mode:
        try:
            if not Path(module.params["binary"]).exists():
                raise ConfigurationError(f"{module.params['binary']} is not there: see load_balancer_package")
            configuration.apply()
        except (ConfigurationError, LoadBalancerError, OSError, KeyError) as problem:
            module.fail_json(msg=f"{socket.gethostname()}: {problem}", **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
