"""An engine that is ours follows its variables without a restart; one that is not ours is left alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
MACHINE = "machine69"
DAEMON_JSON = "/etc/docker/daemon.json"
# dockerd keeps what it runs with for keys that are not there when it reloads: say them.
FOREIGN = '{"live-restore": false, "insecure-registries": []}'

testinfra_hosts = [f"ansible://{MACHINE}?force_ansible=True"]


def play(**variables) -> subprocess.CompletedProcess:
    """The role again, as `molecule converge` runs it, with other variables."""
    command = ["ansible-playbook", "-i", str(PROJECT / "inventory/lab"), str(Path(__file__).with_name("converge.yml"))]
    command += ["--extra-vars", json.dumps(variables)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)


def on(command: str) -> str:
    """A command on the machine, as root."""
    lab = [str(PROJECT / "lab/lab"), "exec", MACHINE, "--", "sh", "-c", command]
    return subprocess.run(lab, capture_output=True, text=True, check=True).stdout.strip()


def info() -> dict:
    return json.loads(on("docker info --format '{{json .}}'"))


def pid() -> str:
    return on("systemctl show --property=MainPID docker.service")


@pytest.fixture
def restored(host):
    """Whatever a test does to dockerd's configuration is undone."""
    before = host.file(DAEMON_JSON).content_string
    yield
    on(f"printf %s '{before}' > {DAEMON_JSON}; systemctl start docker && systemctl reload docker")


def test_dockerd_runs_at_boot_and_follows_our_configuration(host):
    assert host.service("docker").is_enabled and host.service("docker").is_running
    said = info()
    assert said["LiveRestoreEnabled"] and said["LoggingDriver"] == "json-file"
    assert said["Labels"] == ["llmops.managed-by=llmops.ascend"]
    assert host.file(DAEMON_JSON).mode == 0o644


def test_a_changed_variable_is_applied_by_reload(restored):
    before = pid()
    done = play(container_engine_insecure_registries=["198.18.0.0/15", "other.site:5000"])
    assert done.returncode == 0 and "changed=1" in done.stdout, done.stdout
    registries = info()["RegistryConfig"]
    assert "198.18.0.0/15" in registries["InsecureRegistryCIDRs"] and "other.site:5000" in registries["IndexConfigs"]
    assert pid() == before


def test_what_only_a_start_applies_is_said_and_waits(restored):
    before = pid()
    done = play(container_engine_log_max_files=5)
    assert done.returncode == 0 and "log-opts of /etc/docker/daemon.json waits for dockerd's next start" in done.stdout + done.stderr
    assert pid() == before


def test_an_engine_that_is_not_ours_is_left_alone(restored):
    on(f"echo '{FOREIGN}' > {DAEMON_JSON}; systemctl reload docker")
    before = pid()
    done = play()
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0 and "changed=0" in said, said
    assert "machine69: restarting dockerd will stop every instance (no live-restore); it is not ours to change" in said
    assert "machine69: dockerd does not accept" in said
    assert on(f"cat {DAEMON_JSON}") == FOREIGN and pid() == before


def test_an_engine_that_is_not_ours_is_not_started_either(host, restored):
    on(f"echo '{FOREIGN}' > {DAEMON_JSON}; systemctl stop docker.socket docker.service")
    done = play()
    assert done.returncode != 0
    assert "machine69: dockerd is installed but does not run, and is not ours to start" in " ".join(done.stdout.split())
    assert not host.service("docker").is_running


def test_a_broken_configuration_is_said_in_one_line(restored):
    on(f"echo '{{' > {DAEMON_JSON}")
    done = play()
    assert done.returncode != 0
    assert f"machine69: {DAEMON_JSON} is not JSON" in " ".join(done.stdout.split())
