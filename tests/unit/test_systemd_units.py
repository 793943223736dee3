"""Steps carried out on a played machine: what is written, started, undone, and what stays behind."""
from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.modules.systemd_units import (
    Failure,
    Step,
    container_processes,
    start_time,
)
from instance_machine import Machine, specification

NAMES = ["qwen38-tp2-0", "qwen38-tp2-1", "qwen38-tp2-2", "qwen38-tp2-3"]
SIXTEEN = ["vllm", "serve", "/data/models/Qwen", "--max-num-seqs", "16", "--trust-remote-code"]
SECRETS = {name: {"VLLM_API_KEY": "a$b%c\"d'e"} for name in NAMES}


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def step(machine, instances, names=None, replaces=(), secrets=None, check_mode=False):
    names = [spec["name"] for spec in instances] if names is None else names
    return Step(machine.run, "docker", machine.paths, instances, secrets or {}, names, list(replaces), check_mode,
                sleep=lambda _seconds: None)


def test_a_first_start_writes_enables_and_starts_all_together(machine):
    started = step(machine, [specification(name) for name in NAMES], secrets=SECRETS)
    assert started.apply()
    assert {name: result["action"] for name, result in started.results.items()} == dict.fromkeys(NAMES, "started")
    services = " ".join(name + ".service" for name in NAMES)
    assert machine.changes() == ["systemctl daemon-reload", "systemctl enable " + services,
                                 "systemctl restart --no-block " + services]
    environment = machine.paths.environment(NAMES[0])
    assert environment.read_text().splitlines()[1] == "VLLM_API_KEY=a$b%c\"d'e"
    assert stat.S_IMODE(environment.stat().st_mode) == 0o600
    assert machine.recorded() == set(NAMES)
    again = step(machine, [specification(name) for name in NAMES], secrets=SECRETS)
    before = machine.changes()
    assert not again.apply()
    assert machine.changes() == before
    assert again.diff() == []


def test_check_mode_tells_and_touches_nothing(machine):
    machine.install(specification(), {"VLLM_API_KEY": "old-key"})
    changed = step(machine, [specification(arguments=SIXTEEN)], secrets=SECRETS, check_mode=True)
    assert changed.apply()
    assert changed.results[NAMES[0]]["action"] == "restarted"
    assert machine.changes() == []
    shown = json.dumps(changed.diff())
    assert "(secret, changed)" in shown
    assert "old-key" not in shown
    assert "a$b" not in shown


def test_a_running_container_is_registered_not_restarted(machine):
    machine.install(specification(), recorded=False)
    machine.enabled.clear()
    registered = step(machine, [specification(stop_timeout_s=90)])
    assert registered.apply()
    assert registered.results[NAMES[0]]["action"] == "registered"
    assert not any("restart" in command or "stop" in command for command in machine.changes())
    assert machine.recorded() == {NAMES[0]}


def test_a_load_under_way_is_waited_for(machine):
    machine.install(specification(), state=("activating", "start"))
    waiting = step(machine, [specification()])
    machine.states[NAMES[0]] = ("active", "running")
    assert waiting.apply()
    assert machine.changes() == []


def test_only_the_named_are_touched(machine):
    for name in NAMES:
        machine.install(specification(name))
    changed = step(machine, [specification(name, arguments=SIXTEEN) for name in NAMES], names=[NAMES[1]])
    assert changed.apply()
    assert set(changed.results) == {NAMES[1]}
    assert all(NAMES[1] in command or command == "systemctl daemon-reload" for command in machine.changes())


def test_a_failed_change_is_undone(machine):
    before = machine.install(specification(), {"VLLM_API_KEY": "old-key"})
    files = {path: path.read_text() for path in machine.paths.specifications.iterdir()}
    machine.failing[NAMES[0]] = "ValueError: max_num_seqs must be odd"
    changed = step(machine, [specification(arguments=SIXTEEN)], secrets=SECRETS)
    with pytest.raises(Failure, match="max_num_seqs must be odd; undone, the previous version serves again"):
        changed.apply()
    assert {path: path.read_text() for path in machine.paths.specifications.iterdir()} == files
    assert machine.containers[NAMES[0]]["fingerprint"] == before["fingerprint"]
    assert machine.states[NAMES[0]] == ("active", "running")
    assert changed.results[NAMES[0]]["action"] == "failed"


def test_a_failed_new_instance_leaves_nothing_and_spares_the_others(machine):
    machine.failing[NAMES[1]] = "RuntimeError: device is used. ret is -8020"
    started = step(machine, [specification(NAMES[0]), specification(NAMES[1], arguments=SIXTEEN)])
    with pytest.raises(Failure, match="qwen38-tp2-1 did not start: RuntimeError.*-8020; removed again") as failure:
        started.apply()
    assert failure.value.details == {"failed_instances": [NAMES[1]]}
    assert machine.recorded() == {NAMES[0]}
    assert machine.states[NAMES[0]] == ("active", "running")
    assert not machine.paths.unit(NAMES[1]).exists()
    assert not machine.paths.environment(NAMES[1]).exists()
    assert NAMES[1] not in machine.enabled


def test_a_failed_replacement_brings_all_old_ones_back(machine):
    for name in NAMES:
        machine.install(specification(name))
    old = {name: container["fingerprint"] for name, container in machine.containers.items()}
    wide = [specification(f"qwen38-tp4-{index}", devices=list(range(4 * index, 4 * index + 4)), arguments=SIXTEEN)
            for index in (0, 1)]
    machine.failing["qwen38-tp4-1"] = "ValueError: 64 heads do not divide"
    replacing = step(machine, wide, replaces=NAMES)
    with pytest.raises(Failure, match="qwen38-tp4-1 did not start.*the previous version serves again"):
        replacing.apply()
    assert {name: container["fingerprint"] for name, container in machine.containers.items()} == old
    assert machine.recorded() == set(NAMES)
    assert not machine.paths.unit("qwen38-tp4-0").exists()


def test_a_replacement_stops_all_before_it_starts_any(machine):
    for name in NAMES[:2]:
        machine.install(specification(name))
    wide = specification("qwen38-tp4-0", devices=[0, 1, 2, 3])
    replacing = step(machine, [wide], replaces=NAMES[:2])
    assert replacing.apply()
    changes = machine.changes()
    stop = next(index for index, command in enumerate(changes) if command.startswith("systemctl stop"))
    start = next(index for index, command in enumerate(changes) if command.startswith("systemctl restart"))
    assert stop < start
    assert all(name in changes[stop] for name in NAMES[:2])
    assert machine.recorded() == {"qwen38-tp4-0"}


def test_absent_leaves_nothing(machine):
    for name in NAMES[:2]:
        machine.install(specification(name))
    machine.paths.runtime.mkdir(parents=True)
    (machine.paths.runtime / (NAMES[0] + ".failures")).write_text("2")
    removing = step(machine, [], names=[], replaces=[NAMES[0], "never-there-0"])
    assert removing.apply()
    assert {name: result["action"] for name, result in removing.results.items()} == {
        NAMES[0]: "removed", "never-there-0": "none"}
    left = [path.name for path in machine.paths.record.parents[2].rglob("*") if NAMES[0] in path.name]
    assert left == []
    assert machine.recorded() == {NAMES[1]}
    assert not step(machine, [], names=[], replaces=[NAMES[0]]).apply()


def test_a_container_without_a_supervisor_is_stopped_too(machine):
    machine.install(specification(), state=("activating", "auto-restart"))
    machine._stop = lambda names: (0, "", "")       # nobody is there to stop the container
    step(machine, [], names=[], replaces=[NAMES[0]]).apply()
    assert f"docker stop {NAMES[0]}-id" in machine.changes()
    assert machine.containers == {}


@pytest.mark.parametrize("what", ["unit", "container"])
def test_what_is_not_ours_is_refused(machine, what):
    if what == "unit":
        machine.paths.units.mkdir(parents=True)
        machine.paths.unit(NAMES[0]).write_text("[Service]\n")
    else:
        machine.containers[NAMES[0]] = {"fingerprint": None, "running": True, "ours": False}
    with pytest.raises(Failure, match="not ours: adopt or retire it first"):
        step(machine, [specification()])
    with pytest.raises(Failure, match="not ours: adopt or retire it first"):
        step(machine, [], names=[], replaces=[NAMES[0]])


@pytest.mark.parametrize(("spec", "names", "message"), [
    (specification(state="blocked", reason="device 1 is in Alarm"), [NAMES[0]], "blocked.*device 1 is in Alarm"),
    (specification(), ["other-0"], "other-0 not among instances")])
def test_what_cannot_be_started_is_refused(machine, spec, names, message):
    with pytest.raises(Failure, match=message):
        step(machine, [spec], names=names)


def test_dockerd_away_stops_the_step(machine):
    machine.docker_error = "Cannot connect to the Docker daemon"
    with pytest.raises(Failure, match="docker does not tell what runs"):
        step(machine, [specification()])


def test_no_docker_is_said_at_once(machine):
    with pytest.raises(Failure, match="there is no docker command"):
        Step(machine.run, None, machine.paths, [specification()], {}, [NAMES[0]], [])
    assert Step(machine.run, None, machine.paths, [specification()], {}, [NAMES[0]], [], check_mode=True).apply()


def test_processes_of_a_container_are_those_of_its_cgroup():
    assert container_processes("0" * 64) == {}
    born = start_time(os.getpid())
    assert born > 0
    own_cgroup = Path("/proc/self/cgroup").read_text().strip()
    assert container_processes(own_cgroup)[os.getpid()] == born
    assert start_time(2 ** 22 + 1) is None
