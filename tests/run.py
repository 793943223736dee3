#!/usr/bin/env python3
"""Run the project's tests in order: lint, unit, role scenarios, cluster scenarios; print one closing line.

    tests/run.py [STAGE ...]

A STAGE is `lint`, `unit`, `roles`, `cluster`, `vllm`, `long`, or the name of one molecule scenario. Without any: all that CI runs.
What a stage boots is taken down when it ends, also after a crash or an interrupt: each works in a lab of its own. Role scenarios and
cluster scenarios run beside each other; what they print is in build/tests, and shown stage by stage.
"""
from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
REPORTS = ROOT / "build" / "tests"
LAB = ROOT / "lab" / "lab"
ROLES = ["preflight", "driver", "container_engine", "engine_image", "model", "instances", "load_balancer", "verify"]
APT = ["lua-check", "nginx-light", "libnginx-mod-http-lua", "lua-resty-core", "lua-cjson", "rsync"]
FIRST = ["lint", "unit"]
# What waits for machines most of the time, so that two can share two cores; a stage that needs more joins the second.
LANES = [ROLES, ["cluster", "vllm", "long"]]
STAGES = [*FIRST, *ROLES, "cluster", "vllm"]


@dataclass
class Tally:
    """Counts over all stages; `failures` names what failed, for the closing lines."""

    passed: int = 0
    failed: int = 0
    failures: list = field(default_factory=list)

    def add(self, name: str, ok: bool, passed: int = 1, failed: int = 0) -> None:
        self.passed += passed
        self.failed += failed
        if not ok:
            self.failed += 0 if failed else 1
            self.failures.append(name)


def environment(lab: str | None = None) -> dict:
    """The environment of every test: the project's own tools first, Ansible's files inside the tree, a lab of its own."""
    env = dict(os.environ, PATH=f"{BIN}:{os.environ['PATH']}", ANSIBLE_HOME=str(ROOT / ".ansible"),
               ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), PYTHONDONTWRITEBYTECODE="1", LC_ALL="C.UTF-8")
    if lab:
        env["LAB"] = lab
    return env


class Runner(threading.local):
    """Runs the commands of a stage. Each lane has its own `output`, a file; None is this program's own."""

    output = None

    def run(self, argv: list, lab: str | None = None) -> bool:
        """Run one command with its output shown; True when it exits with 0."""
        print(f"\n=== {' '.join(map(str, argv))}", file=self.output, flush=True)
        process = subprocess.Popen(list(map(str, argv)), cwd=ROOT, env=environment(lab), start_new_session=True, stdin=subprocess.DEVNULL,
                                   stdout=self.output, stderr=self.output and subprocess.STDOUT)
        PROCESSES.add(process)
        try:
            return process.wait() == 0
        except BaseException:
            stop(process)
            raise
        finally:
            PROCESSES.discard(process)


PROCESSES: set[subprocess.Popen] = set()
RUNNER = Runner()
run = RUNNER.run


def stop(process: subprocess.Popen) -> None:
    """End a command with its whole process group."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass


def pytest(tally: Tally, name: str, *arguments: str, lab: str | None = None) -> bool:
    """Run pytest on `arguments` and count what its own report says. A run without a single test is a failure."""
    report = REPORTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    ok = run([BIN / "pytest", f"--junitxml={report}", "--durations=12", *arguments], lab=lab)
    passed = failed = 0
    if report.exists():
        suite = ElementTree.parse(report).getroot().find("testsuite")
        failed = int(suite.get("failures")) + int(suite.get("errors"))
        passed = int(suite.get("tests")) - failed - int(suite.get("skipped"))
    tally.add(name, ok and passed > 0, passed, failed)
    return ok


def lint(tally: Tally) -> None:
    for name, argv in {
        "ansible-lint": [BIN / "ansible-lint", "--strict"],
        "ruff": [BIN / "ruff", "check", "."],
        "yamllint": [BIN / "yamllint", "--strict", "."],
        "luacheck": ["luacheck", "--quiet", "roles/load_balancer/files/lua", "tests/lua"],
        "syntax": [BIN / "ansible-playbook", "--syntax-check", "-i", "inventory/lab", "site.yml"],
    }.items():
        ok = run(argv)
        tally.add(name, ok, passed=int(ok))


def scenario(tally: Tally, name: str) -> None:
    """One molecule scenario: machines bare at the start, check before converge, idempotence, testinfra."""
    lab = os.environ.get("LAB", "molecule")
    ok = False
    try:
        ok = run([BIN / "molecule", "test", "--scenario-name", name, "--destroy", "always"], lab=lab)
    finally:
        run([LAB, "down"], lab=lab)
    tally.add(f"molecule {name}", ok, passed=int(ok))


def cluster(tally: Tally, name: str, *arguments: str) -> None:
    """Cluster scenarios: ansible-runner drives the whole path on a lab of its own, pytest looks."""
    try:
        # A cold machine builds the real engine's image first, from wheels of two gigabytes.
        pytest(tally, name, "tests/cluster", "--timeout=3600", *arguments, lab="cluster")
    finally:
        run([LAB, "down"], lab="cluster")


def needed_packages() -> None:
    """Install what the tests themselves need from Debian; the lab and the roles install the rest on their own."""
    def missing(package: str) -> bool:
        query = subprocess.run(["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True, text=True)
        return "install ok installed" not in query.stdout

    wanted = [package for package in APT if missing(package)]
    if wanted:
        # A package's own service must not start: the tests run their own instances on their own ports.
        env = dict(environment(), DEBIAN_FRONTEND="noninteractive", RUNLEVEL="1")
        subprocess.run(["apt-get", "update", "-qq"], check=True, env=env)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *wanted], check=True, env=env)


def carry_out(tally: Tally, stage: str) -> None:
    """One stage, timed."""
    since = time.monotonic()
    if stage == "lint":
        lint(tally)
    elif stage == "unit":
        pytest(tally, stage, "tests/unit", "tests/lab", lab="unit")
    elif stage == "cluster":
        cluster(tally, stage, "-m", "not vllm and not long")
    elif stage in ("vllm", "long"):
        cluster(tally, stage, "-m", stage)
    else:
        scenario(tally, stage)
    print(f"=== {stage}: {time.monotonic() - since:.0f} s", file=RUNNER.output, flush=True)


def lane(tally: Tally, stages: list[str], stopping: threading.Event) -> None:
    """Stages one after another, each with a file for what it prints, which is shown when it ends."""
    for stage in stages:
        if stopping.is_set():
            return
        log = REPORTS / f"{stage}.log"
        print(f"=== {stage} goes on in {log.relative_to(ROOT)}", flush=True)
        with log.open("w") as RUNNER.output:
            try:
                carry_out(tally, stage)
            except Exception as error:  # a fault of this program must not pass for a stage that ran
                tally.add(f"{stage}: {error!r}", ok=False)
        with PRINTING:
            print(log.read_text(errors="replace"), flush=True)


PRINTING = threading.Lock()


def side_by_side(tally: Tally, lanes: list[list[str]]) -> None:
    """Run lanes beside each other; an interrupt ends what they run, and each still takes its lab down."""
    stopping = threading.Event()
    threads = [threading.Thread(target=lane, args=(tally, stages, stopping)) for stages in lanes]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        stopping.set()
        for process in list(PROCESSES):
            stop(process)
        for thread in threads:
            thread.join()
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE")
    stages = [stage for name in parser.parse_args().stages or STAGES for stage in (ROLES if name == "roles" else [name])]
    unknown = sorted(set(stages) - {*STAGES, "long"})
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join([*STAGES, 'long'])}")
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        parser.error("the tests boot machines and need root on Linux")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    needed_packages()
    tally, began = Tally(), time.monotonic()
    for stage in stages:
        if stage in FIRST:
            carry_out(tally, stage)
    lanes = [chosen for among in LANES if (chosen := [stage for stage in stages if stage in among])]
    if sum(map(len, lanes)) == 1:
        carry_out(tally, lanes[0][0])
    else:
        side_by_side(tally, lanes)
    for name in tally.failures:
        print(f"FAILED {name}")
    print(f"=== all stages: {time.monotonic() - began:.0f} s")
    print(f"{tally.passed} passed, {tally.failed} failed")
    return 1 if tally.failed or not tally.passed else 0


if __name__ == "__main__":
    sys.exit(main())
