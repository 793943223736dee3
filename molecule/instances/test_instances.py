"""Instances on a machine: what runs is what was asked for, and it survives what machines do to it."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
MACHINE = "machine69"
NAMES = [f"qwen38-tp2-{index}" for index in range(4)]
KEY = "SK-12345678-@aaa"



def run(script: str, check: bool = True) -> str:
    """A shell script on the machine as root, its output. Not through Ansible: these are many, and each would take seconds."""
    command = [str(PROJECT / "lab/lab"), "exec", MACHINE, "--", "sh", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert not check or result.returncode == 0, result.stderr
    return result.stdout


def play(*arguments: str) -> subprocess.CompletedProcess:
    """The role again, as `molecule converge` runs it."""
    command = ["ansible-playbook", "-i", str(PROJECT / "inventory/lab"), str(Path(__file__).with_name("converge.yml"))]
    return subprocess.run([*command, *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=600, check=False)


def overriding(**keys) -> str:
    """The option that changes keys of the deployment."""
    return "--extra-vars=" + json.dumps({"deployment_overrides": {"qwen38-tp2": keys}})


def containers() -> dict[str, dict]:
    """What dockerd says of each of our containers, by name."""
    found = run("docker inspect $(docker ps --all --quiet --filter label=llmops.managed-by=llmops.ascend)", check=False)
    return {entry["Name"].lstrip("/"): entry for entry in json.loads(found)}


def ids() -> dict[str, str]:
    """Container ids by name: who has another one was restarted."""
    return {name: entry["Id"] for name, entry in containers().items()}


def show(unit_property: str) -> dict[str, str]:
    """One property of each unit, by instance."""
    units = " ".join(f"{name}.service" for name in NAMES)
    return dict(zip(NAMES, run(f"systemctl show --property={unit_property} --value {units}").split("\n\n")))


def active() -> set[str]:
    """The states the units are in."""
    return {state.strip() for state in show("ActiveState").values()}


def journal(name: str) -> str:
    """The whole journal of a unit."""
    return run(f"journalctl --no-pager --output cat --unit {name}")


def wait_until_active(seconds: int = 120) -> None:
    """All four serve; if not in time, show why."""
    deadline = time.monotonic() + seconds
    while active() != {"active"}:
        if time.monotonic() > deadline:
            pytest.fail(str(show("StatusText")) + run("journalctl --no-pager --lines 80 --unit 'qwen38-tp2-*'"))
        time.sleep(1)


def test_each_instance_has_its_devices_and_nothing_more():
    found = containers()
    for index, name in enumerate(NAMES):
        settings = found[name]["HostConfig"]
        assert [device["PathOnHost"] for device in settings["Devices"]] == [
            f"/dev/davinci{2 * index}", f"/dev/davinci{2 * index + 1}",
            "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
        assert settings["Privileged"] is False
        assert settings["Init"] is True
        assert settings["NetworkMode"] == "host"
        assert settings["RestartPolicy"]["Name"] in ("", "no")
        assert all(bind.endswith(":ro") for bind in settings["Binds"])


def test_units_serve_and_start_at_boot():
    wait_until_active()
    assert {state.strip() for state in show("UnitFileState").values()} == {"enabled"}
    assert all(status.strip().startswith("serving Qwen3.8-27B-W8A8 on ") for status in show("StatusText").values())
    assert set(json.loads(run("cat /var/lib/llmops/instances.json"))["instances"]) == set(NAMES)


def test_the_key_is_nowhere_but_in_its_file():
    assert run("stat --format %a:%U /etc/llmops/instances/*.env").split() == ["600:root"] * 4
    places = "/etc/llmops /etc/systemd /usr/local/lib/llmops /var/lib/llmops /run/llmops"
    assert sorted(run(f"grep --recursive --files-with-matches -- {KEY} {places}").split()) == [
        f"/etc/llmops/instances/{name}.env" for name in NAMES]
    assert KEY not in run("journalctl --no-pager --boot")
    arguments = run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", check=False)
    assert "vllm serve" in arguments
    assert arguments.count(KEY) <= 1, "only the command that looked for it has it"


def test_kills():
    """SIGKILL of API server, engine core, container init and supervisor: all return, the last without a reload."""
    before = ids()
    inits = [entry["State"]["Pid"] for _name, entry in sorted(containers().items())]
    run(f"""
        api_server=$(pgrep --parent {inits[0]})
        engine_core=$(pgrep --parent $(pgrep --parent {inits[1]}) | head -n 1)
        kill -KILL $api_server $engine_core {inits[2]} {show("MainPID")[NAMES[3]].strip()}
    """)
    time.sleep(5)
    assert "active" not in active(), "each death is noticed"
    wait_until_active()
    after = ids()
    assert [before[name] == after[name] for name in NAMES] == [False, False, False, True]
    log = journal(NAMES[3])
    assert log.count("[supervisor] adopted running container") == 1
    assert log.count("Application startup complete") == 1, "what the first supervisor logged is not logged again"


def test_a_restart_of_dockerd_is_not_noticed():
    before, supervisors = ids(), show("MainPID")
    run("systemctl restart docker")
    time.sleep(3)
    assert active() == {"active"}
    assert (ids(), show("MainPID")) == (before, supervisors)
    address = json.loads(run("cat /var/lib/llmops/instances.json"))["instances"][NAMES[0]]["address"]
    marker = f"/after-{int(time.time())}"
    urllib.request.urlopen(urllib.request.Request(f"http://{address}:8000/health"), timeout=5).read()
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://{address}:8000{marker}", timeout=5)
    time.sleep(2)
    assert journal(NAMES[0]).count(marker) == 1, "the log goes on in the journal, each line once"


def test_a_container_stopped_by_hand_starts_again():
    before = ids()
    run(f"docker stop {NAMES[2]}")
    time.sleep(1)
    wait_until_active()
    assert {name for name, identity in ids().items() if before[name] != identity} == {NAMES[2]}


def test_a_reboot_brings_all_back():
    subprocess.run([str(PROJECT / "lab/lab"), "reboot", MACHINE], check=True, timeout=180)
    wait_until_active()
    assert "changed=0" in play().stdout


def test_a_change_is_predicted_and_made_one_at_a_time():
    before = ids()
    change = overriding(args={"max_num_seqs": 16})
    predicted = play(change, "--check", "--diff")
    assert predicted.returncode == 0, predicted.stdout
    assert ids() == before
    made = play(change)
    assert made.returncode == 0, made.stdout
    assert made.stdout.count("Carry out: restart") == 4
    assert not set(ids().values()) & set(before.values())
    assert "changed=0" in play(change).stdout


def test_a_change_that_does_not_start_is_undone():
    settled = ids()
    failed = play(overriding(args={"max_num_seqs": 16}, container={"options": ["--no-such-option"]}))
    said = " ".join(failed.stdout.split())
    assert failed.returncode != 0
    assert "qwen38-tp2-0 did not start" in said
    assert "unknown flag: --no-such-option" in said
    assert "undone, the previous version serves again" in said
    assert active() == {"active"}
    assert {name for name, identity in ids().items() if settled[name] != identity} == {NAMES[0]}
    assert "changed=0" in play(overriding(args={"max_num_seqs": 16})).stdout


def test_fewer_and_wider_instances():
    """Shrinking leaves nothing behind; what is not ours stops us; tensor parallel 2 -> 4 and back is one step each."""
    change = {"args": {"max_num_seqs": 16}}
    settled = ids()
    assert play(overriding(instances=3, **change)).returncode == 0
    assert ids() == {name: settled[name] for name in NAMES[:3]}
    assert run(f"find /etc /var/lib/llmops /run/llmops -name '{NAMES[3]}*'") == ""

    run(f"docker create --name {NAMES[3]} {containers()[NAMES[0]]['Config']['Image']}")
    refused = play(overriding(**change))
    run(f"docker rm {NAMES[3]}")
    assert refused.returncode != 0
    assert f"container {NAMES[3]} is not ours" in " ".join(refused.stdout.split())
    assert ids() == {name: settled[name] for name in NAMES[:3]}

    for arguments, expected in (([overriding(tensor_parallel_size=4)], NAMES[:2]), ([], NAMES)):
        replaced = play(*arguments, "--extra-vars=replace_placement=true")
        assert replaced.returncode == 0, replaced.stdout
        assert "Carry out: replace" in replaced.stdout
        assert sorted(ids()) == expected
    wait_until_active()
