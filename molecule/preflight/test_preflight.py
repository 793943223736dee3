"""Each planted fault is named, in one line and before anything else is done, and nothing else is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
KEY = "SK-12345678-@aaa"

testinfra_hosts = ["ansible://machine66?force_ansible=True"]


def lab(*arguments: str) -> str:
    """What a command of the lab prints."""
    command = [str(PROJECT / "lab/lab"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def on(machine: str, script: str) -> str:
    """Run a script as root on a machine."""
    return lab("exec", machine, "--", "bash", "-ec", script)


def play(limit: str = "machine66,machine69", **variables) -> tuple[int, str]:
    """The gates again, as converge runs them: exit code and output with its lines joined."""
    command = ["ansible-playbook", "-i", str(PROJECT / "inventory/lab"), str(Path(__file__).with_name("converge.yml"))]
    command += ["--limit", limit, "--extra-vars", json.dumps(variables)]
    run = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    return run.returncode, " ".join((run.stdout + run.stderr).split())


@contextlib.contextmanager
def foreign(machine: str, port: int):
    """A service of somebody else's on that port."""
    on(machine, f"systemd-run --quiet --unit=minimax-h3 -- python3 -m http.server {port}; for _ in $(seq 50); do "
                f"python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}))' 2>/dev/null && break; sleep 0.1; done")
    try:
        yield
    finally:
        on(machine, "systemctl stop minimax-h3")


def test_nothing_is_found_where_nothing_is_wrong():
    code, output = play()
    assert code == 0
    assert "Show the findings" not in output and "Show what is doubtful" not in output


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"services": {"qwen3.8-27b": {"listen_port": 2219}}}, "services.qwen3.8-27b.api_key is missing"),
        ({"services": {"qwen3.8-27b": {"listen_port": 2219, "api_key": "{{ vault_key }}"}}}, "'vault_key' is undefined"),
        ({"service_adress": "198.18.0.1"}, "no variable is called service_adress; did you mean service_address?"),
        ({"deployment_overrides": {"qwen38-tp2": {"service": "qwen"}}}, "'qwen' is not among the services"),
        (
            {"deployment_overrides": {"qwen38-tp2": {"vllm_version": "0.18.0", "args": {"tool_call_parser": "qwen3"}}}},
            "did you mean qwen3_xml or qwen3_coder?",
        ),
    ],
)
def test_the_inventory_is_refused_before_any_machine_is_asked(variables, line):
    code, output = play(**variables)
    assert code != 0
    assert line in output
    assert KEY not in output
    assert "TASK [llmops.ascend.preflight : Look at the machine]" not in output


def test_a_port_held_by_a_foreign_process_names_it():
    with foreign("machine66", 8001):
        code, output = play()
    assert code != 0
    assert "machine66: port 8001 of qwen38-tp2-1 is held by python3 (pid " in output
    assert "unit minimax-h3.service) on 0.0.0.0; stop it, or choose another port" in output


def test_a_port_of_the_load_balancer_held_by_a_foreign_process():
    with foreign("machine69", 2219):
        code, output = play()
    assert code != 0
    assert "machine69: port 2219 of service qwen3.8-27b is held by python3 (pid " in output
    assert "machine66: " not in output


def test_a_hand_made_unit_of_our_name():
    unit = "/etc/systemd/system/qwen38-tp2-0.service"
    on("machine66", f"printf '[Service]\\nExecStart=/bin/true\\n' > {unit}")
    try:
        code, output = play()
        assert code != 0
        assert f"machine66: unit qwen38-tp2-0.service exists and is not ours: {unit}; adopt or retire it" in output
        on("machine66", f"sed -i '1i # Managed by llmops.ascend: do not edit' {unit}")
        assert play()[0] == 0
    finally:
        on("machine66", f"rm {unit}")


def test_an_address_that_is_not_the_machines():
    code, output = play(limit="machine66", data_address="198.18.99.66")
    assert code != 0
    assert "machine66: data_address 198.18.99.66 is not an address of this machine, which has " in output


def test_not_enough_disk():
    code, output = play(limit="machine66", preflight_model_free_mb=1 << 40)
    assert code != 0
    assert "MiB wanted for the model of qwen38-tp2 (/data/models/Qwen3.8-27B-W8A8)" in output


def test_a_device_held_by_a_foreign_process_blocks_its_instance_only():
    on("machine66", "systemd-run --quiet --unit=sd35 -- bash -c 'exec 9<>/dev/davinci5; exec flock "
                    "/usr/local/Ascend/driver/lab/locks/davinci5 sleep 1000'; sleep 0.5")
    try:
        code, output = play()
    finally:
        on("machine66", "systemctl stop sd35")
    assert code == 0
    assert re.search(r"machine66 warning devices instance qwen38-tp2-\d is blocked: device 5 is held by pid \d+ \(flock\) in sd35", output)
    assert output.count("is blocked") == 1


def test_a_device_that_is_missing():
    on("machine66", "mv /dev/davinci3 /dev/gone3")
    try:
        code, output = play(deployment_overrides={"qwen38-tp2": {"expected_devices": 8}})
    finally:
        on("machine66", "mv /dev/gone3 /dev/davinci3")
    assert code != 0
    assert "machine66: 7 of 8 expected devices are there, missing: 3; repair" in output
