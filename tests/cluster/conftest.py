"""A cluster in a lab of its own, driven by ansible-runner as an operator would drive it, and looked at from outside.

The tests of a module run in order and tell one story; each says what must be seen working. `LAB` names the lab, tests/run.py sets it.
"""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import ansible_runner
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAB = str(ROOT / "lab" / "lab")
MACHINES = ["machine66", "machine67", "machine68", "machine69"]
BALANCER = "machine69"
SERVICE = "qwen3.8-27b"
MODEL = "Qwen3.8-27B-W8A8"
# Actions that run on the controller alone; every other action is a remote task.
CONTROLLER_ACTIONS = {"add_host", "assert", "debug", "fail", "group_by", "import_playbook", "include_role", "include_tasks",
                      "include_vars", "import_role", "import_tasks", "meta", "pause", "set_fact", "set_stats", "validate_argument_spec"}


def lab(*arguments: str, check: bool = True, timeout: float = 600) -> str:
    """One lab command; its output."""
    done = subprocess.run([LAB, *arguments], capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL)
    assert not check or done.returncode == 0, f"lab {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def on(machine: str, command: str, check: bool = True) -> str:
    """A shell command as root on a machine, past its network; its output without the last newline."""
    return lab("exec", machine, "--", "sh", "-c", command, check=check).rstrip("\n")


@dataclass
class Run:
    """One finished ansible-playbook: its events and what they say."""

    rc: int
    events: list
    output: str

    def _results(self, *names: str) -> list:
        return [event for event in self.events if event["event"] in names]

    @property
    def stats(self) -> dict:
        return self._results("playbook_on_stats")[-1]["event_data"]

    @property
    def changed(self) -> dict:
        """{host: number of changed tasks}, hosts without any left out."""
        return {host: count for host, count in self.stats["changed"].items() if count}

    @property
    def failures(self) -> str:
        """All that failed tasks said, in one text."""
        found = self._results("runner_on_failed", "runner_on_unreachable")
        return "\n".join(str(event["event_data"]["res"].get("msg", event["event_data"]["res"])) for event in found)

    def _remote(self) -> list:
        """(host that was reached, event) of every task that went over the wire; a loop counts once per item."""
        found = []
        for event in self._results("runner_on_ok", "runner_on_failed", "runner_on_unreachable", "runner_item_on_ok", "runner_item_on_failed"):
            data = event["event_data"]
            if data.get("event_loop") or data["task_action"].rsplit(".", 1)[-1] in CONTROLLER_ACTIONS:
                continue
            result = data["res"] if isinstance(data["res"], dict) else {}
            delegated = result.get("_ansible_delegated_vars") or {}
            found.append((delegated.get("ansible_delegated_host", data["host"]), event))
        return found

    def remote_tasks(self, host: str) -> list:
        """The names of the tasks that reached a host, its own and those delegated to it."""
        return [event["event_data"]["task"] for reached, event in self._remote() if reached == host]

    def contacted(self) -> set:
        """The hosts that were reached over the wire."""
        return {reached for reached, _ in self._remote()}


class Cluster:
    """The lab's machines as one service: playbooks to run on them, and what an operator or a client sees."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.environment = dict(line.removeprefix("export ").split("=", 1) for line in lab("env").splitlines())
        self.management = self.environment["LLMOPS_LAB_MANAGEMENT"]
        self.key = yaml.safe_load((ROOT / "inventory/lab/hosts.yml").read_text())["all"]["vars"]["services"][SERVICE]["api_key"]
        self.url = f"http://{self.management}.69:2219"

    # what an operator does
    def playbook(self, playbook: str = "site.yml", inventory: Path = ROOT / "inventory/lab", limit: str | None = None, check: bool = False,
                 cancel=None, until: str | None = None, **extra) -> Run:
        """Run a playbook to its end, or until `cancel()` is true or a task of the name `until` starts: then it is killed, with SIGKILL."""
        reached = threading.Event()

        def look(event: dict) -> bool:
            if until and event["event"] == "playbook_on_task_start" and until in event["event_data"]["task"]:
                reached.set()
            return True

        arguments = " ".join(filter(None, [f"--limit {limit}" if limit else "", "--check --diff" if check else ""]))
        private = self.scratch / f"run-{time.monotonic_ns()}"
        private.mkdir()
        result = ansible_runner.run(
            private_data_dir=str(private), project_dir=str(ROOT), playbook=playbook, inventory=str(inventory), quiet=True, cmdline=arguments or None,
            extravars=extra or None, envvars={**self.environment, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            event_handler=look, cancel_callback=lambda: reached.is_set() or bool(cancel and cancel()),
            settings={"suppress_env_files": True, "idle_timeout": 900})
        run = Run(result.rc, list(result.events), Path(result.stdout.name).read_text())
        shutil.rmtree(private, ignore_errors=True)
        return run

    def inventory(self, change) -> Path:
        """A copy of the lab's inventory, changed by `change(data)`, as an operator would edit it."""
        data = yaml.safe_load((ROOT / "inventory/lab/hosts.yml").read_text())
        change(data)
        directory = self.scratch / f"inventory-{time.monotonic_ns()}"
        directory.mkdir()
        (directory / "group_vars").symlink_to(ROOT / "inventory/lab/group_vars")
        (directory / "hosts.yml").write_text(yaml.safe_dump(data, sort_keys=False))
        return directory

    # what runs
    def containers(self, machine: str) -> dict:
        """{name: (container id, start time, pid of its init)} of the running instances of a machine."""
        script = "docker ps -q --filter label=llmops.instance | xargs -r docker inspect -f '{{.Name}} {{.Id}} {{.State.StartedAt}} {{.State.Pid}}'"
        rows = [line.split() for line in on(machine, script).splitlines()]
        return {name.lstrip("/"): (identity, started, pid) for name, identity, started, pid in rows}

    def engine_pids(self, machine: str) -> set:
        """The pids of every engine process of a machine."""
        names = " ".join(self.containers(machine))
        return set(on(machine, f"for name in {names}; do docker top $name -o pid | tail -n +2; done").split())

    def running(self) -> dict:
        return {machine: self.containers(machine) for machine in MACHINES}

    def backends(self) -> dict:
        """{backend id: row} as the load balancer's own admin interface shows them."""
        text = on(BALANCER, "python3 -c '" + ADMIN + "'")
        return {row["id"]: row for service in json.loads(text)["services"].values() for row in service["backends"].values()}

    def active(self) -> list:
        return sorted(name for name, row in self.backends().items() if row["state"] == "active")

    def wait(self, condition, seconds: float, what: str):
        """Poll until `condition()` is true; its value. Fails with `what` after `seconds`."""
        end, value = time.monotonic() + seconds, None
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            time.sleep(0.5)
        raise AssertionError(f"not within {seconds:.0f} s: {what} (last seen: {value!r})")

    def wait_active(self, count: int, seconds: float = 120) -> None:
        self.wait(lambda: len(self.active()) == count, seconds, f"{count} active backends")

    # what a client does
    def ask(self, path: str = "/v1/chat/completions", key: str | None = None, session: str | None = None, timeout: float = 30, url: str | None = None,
            **body):
        """One request through the load balancer: (status, headers, JSON or None). Connection errors raise."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key if key is None else key}"}
        if session:
            headers["X-Session-ID"] = session
        request = urllib.request.Request((url or self.url) + path, data=json.dumps(body).encode() if body else None, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.headers, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, error.headers, None

    def chat(self, session: str | None = None, text: str = "hello", max_tokens: int = 8, **more):
        return self.ask(session=session, model=MODEL, max_tokens=max_tokens, messages=[{"role": "user", "content": text}], **more)


ADMIN = ("import http.client, socket\n"
         "class C(http.client.HTTPConnection):\n"
         "  def connect(self):\n"
         "    self.sock = socket.socket(socket.AF_UNIX); self.sock.connect(\"/run/llmops/load_balancer/admin.sock\")\n"
         "c = C(\"lb\"); c.request(\"GET\", \"/status\"); print(c.getresponse().read().decode())")


class Traffic:
    """Sessions that keep talking while something happens; what they saw is kept."""

    def __init__(self, cluster: Cluster, sessions: int = 12, pause: float = 0.1) -> None:
        self.cluster, self.pause = cluster, pause
        self.seen: dict = {f"traffic-{number}": [] for number in range(sessions)}
        self.errors: list = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=(session,), daemon=True) for session in self.seen]

    def _talk(self, session: str) -> None:
        while not self._stop.is_set():
            try:
                status, headers, _ = self.cluster.chat(session)
                if status == 200:
                    self.seen[session].append(headers["X-Upstream-Addr"])
                else:
                    self.errors.append((session, status))
            except OSError as error:
                self.errors.append((session, str(error)))
            self._stop.wait(self.pause)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)

    @property
    def requests(self) -> int:
        return sum(map(len, self.seen.values()))


@pytest.fixture(scope="session")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="session")
def cluster(scratch) -> Cluster:
    """Four bare machines with the simulated engine's image in the lab's registry; LLMOPS_KEEP=1 takes a lab as it is, for work on a test."""
    lab("up", *([] if os.environ.get("LLMOPS_KEEP") else ["--fresh"]), "--machines", "machine66-69", timeout=1200)
    return Cluster(scratch)
