"""The load balancer that the scenario left on machine69, as its operator and its clients see it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
MACHINE, SERVICE = "machine69", "qwen3.8-27b"
UNIT = "llmops-load-balancer.service"
LOGS = "/var/log/llmops/load_balancer"
CONFIGURATION = "/etc/llmops/load_balancer/nginx.conf"
BACKENDS = "/etc/llmops/load_balancer/backends/llmops--qwen3.8-27b--machine69.json"
COPY = "/var/lib/llmops/backends/llmops--qwen3.8-27b--machine69.json"
SOCKET = "/run/llmops/load_balancer/admin.sock"
SESSIONS = "abcdefghijkl"
ASK = """
import http.client, json, socket, sys
answers = []
for way, method, path, session, body in json.loads(sys.argv[1]):
    connection = http.client.HTTPConnection("127.0.0.1", 2219, timeout=10)
    if way != "port":
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(way)
    connection.request(method, path, body, {"X-Session-ID": session})
    response = connection.getresponse()
    answers.append([response.status, response.getheader("X-Upstream-Addr"), response.read().decode()])
    connection.close()
print(json.dumps(answers))
"""


def run(script, check=True):
    """A shell script on the machine as root, its output. Not through Ansible: these are many, and each would take seconds."""
    command = [str(PROJECT / "lab/lab"), "exec", MACHINE, "--", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.strip()


def play(name, *arguments, **variables):
    """A playbook of this scenario: what it prints, in one line, and whether it succeeded."""
    command = ["ansible-playbook", "-i", str(PROJECT / "inventory/lab"), str(Path(__file__).with_name(name))]
    command += ["--extra-vars", json.dumps(variables), *arguments]
    environment = {**os.environ, "ANSIBLE_TIMEOUT": "3"}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return " ".join((done.stdout + done.stderr).split()), done.returncode == 0


def ask(*requests):
    """Status, backend and body of requests made on the machine, each (way, method, path, session, body)."""
    return json.loads(run(f"python3 -c {shlex.quote(ASK)} {shlex.quote(json.dumps(requests))}"))


def homes(sessions=SESSIONS):
    """The backend that answers each session."""
    answers = ask(*(["port", "GET", "/v1/models", session, None] for session in sessions))
    assert {status for status, _, _ in answers} == {200}
    return {session: backend for session, (_, backend, _) in zip(sessions, answers)}


def health():
    return json.loads(ask(["port", "GET", "/health", "", None])[0][2])


def tell(path, **order):
    """The status of an order on the admin socket."""
    return ask([SOCKET, "POST", path, "", json.dumps({"service": SERVICE, **order})])[0][0]


def status():
    return json.loads(ask([SOCKET, "GET", "/status", "", None])[0][2])


def states():
    return {name: entry["state"] for name, entry in status()["services"][SERVICE]["backends"].items()}


def eventually(check, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_its_own_unit_runs_and_the_distributions_does_not():
    assert run(f"systemctl is-active {UNIT}; systemctl is-enabled {UNIT}").split() == ["active", "enabled"]
    assert run("systemctl is-active nginx; systemctl is-enabled nginx", check=False).split() == ["inactive", "disabled"]


def test_workers_are_unprivileged_and_the_admin_socket_is_roots():
    master = run(f"systemctl show --property=MainPID --value {UNIT}")
    assert set(run(f"ps -o user:20= --ppid {master}").split()) == {"llmops-lb"}
    assert run("stat -c '%a %U' /run/llmops/load_balancer") == "700 root"


def test_no_key_reaches_the_machine():
    assert run("grep -r SK-12345678 /etc/llmops /etc/systemd/system /var/lib/llmops", check=False) == ""


def test_requests_reach_all_backends_and_sessions_stay():
    before = homes()
    assert set(before.values()) == {"127.0.0.1:8000", "127.0.0.1:8001", "127.0.0.1:8002"}
    assert homes() == before
    assert health()["backends"] == {"total": 3, "active": 3, "down": 0, "draining": 0}


def test_the_machine_kept_a_copy():
    assert run(f"cmp {BACKENDS} {COPY}") == ""


def test_a_stopped_engine_is_left_and_found_again():
    run("systemctl stop engine@8001")
    eventually(lambda: health()["status"] == "degraded")
    assert "127.0.0.1:8001" not in homes().values()
    run("systemctl start engine@8001")
    eventually(lambda: health()["status"] == "ok")


@pytest.mark.parametrize("killed", ["master", "worker"])
def test_a_drain_outlives_kill_9(killed):
    assert tell("/drain", ids=["machine69:8002"], max_unavailable=1) == 200
    master = run(f"systemctl show --property=MainPID --value {UNIT}")
    run(f"kill -9 {master}" if killed == "master" else f"pkill -9 -P {master}")
    eventually(lambda: run(f"test -S {SOCKET} && systemctl is-active {UNIT}", check=False) == "active")
    assert states()["machine69:8002"] == "drained"
    assert "127.0.0.1:8002" not in homes().values()
    assert tell("/activate", ids=["machine69:8002"]) == 200


def test_the_access_log_is_json_and_shows_no_session():
    homes(["very-private-session"])
    lines = run(f"cat {LOGS}/access.log").splitlines()
    last = json.loads(lines[-1])
    assert (last["service"], last["key_source"], last["status"]) == (SERVICE, "session", 200)
    assert "very-private-session" not in "".join(lines)


def test_drain_refuse_activate_deregister_and_register_again():
    said, ok = play("entry.yml", entry="drain", load_balancer_ids=["machine69:8000"])
    assert ok, said
    assert states()["machine69:8000"] == "drained"
    said, ok = play("entry.yml", entry="drain", load_balancer_ids=["machine69:8001"])
    assert not ok
    assert "max_unavailable is 1; already unavailable: machine69:8000" in said
    assert states()["machine69:8001"] == "active"
    said, ok = play("entry.yml", entry="activate")
    assert ok, said
    assert set(states().values()) == {"active"}
    said, ok = play("entry.yml", entry="deregister", load_balancer_ids=["machine69:8002"])
    assert ok, said
    assert run(f"grep -c machine69:8002 {BACKENDS} {COPY}", check=False).split() == [f"{BACKENDS}:0", f"{COPY}:0"]
    eventually(lambda: sorted(states()) == ["machine69:8000", "machine69:8001"])
    said, ok = play("converge.yml")
    assert ok, said
    assert states() == dict.fromkeys(["machine69:8000", "machine69:8001", "machine69:8002"], "active")


def test_a_dead_load_balancer_is_named_and_stops_nothing_else(tmp_path):
    more = tmp_path / "more.yml"
    more.write_text("load_balancers: {hosts: {machine68: }}\n")
    run(f"rm {BACKENDS}")
    said, ok = play("converge.yml", "-i", str(more))
    assert not ok
    assert "machine69 on load balancer machine68: " in said
    assert run(f"cmp {BACKENDS} {COPY}") == ""


def test_a_configuration_that_does_not_work_replaces_nothing():
    before = run(f"cat {CONFIGURATION}"), status()["configuration"]
    wrong = {"interval_s": 0.5, "connect_timeout_s": 0.4, "read_timeout_s": 3, "fall": 0, "rise": 2}
    said, ok = play("converge.yml", load_balancer_health=wrong)
    assert not ok
    assert "the running one is untouched: " in said
    assert "health.fall must be a number above 0" in said
    assert (run(f"cat {CONFIGURATION}"), status()["configuration"]) == before
    assert run("ls /run/llmops") == "load_balancer"


def test_a_held_port_is_named_with_its_holder():
    run("systemd-run --quiet --unit=holder python3 -m http.server 2220")
    try:
        said, ok = play("converge.yml", services={SERVICE: {"listen_port": 2219}, "other": {"listen_port": 2220}})
    finally:
        run("systemctl stop holder")
    assert not ok
    assert "machine69: port 2220 is held by python3 (pid" in said
    assert health()["status"] == "ok"


def test_a_new_service_gets_its_port_and_a_stream_survives_the_reload():
    run(
        "systemd-run --quiet --unit=stream --property=StandardOutput=file:/run/stream "
        "curl --silent --no-buffer http://127.0.0.1:2219/v1/stream"
    )
    said, ok = play("converge.yml", services={SERVICE: {"listen_port": 2219}, "other": {"listen_port": 2220}})
    assert ok, said
    assert set(status()["services"]) == {SERVICE, "other"}
    eventually(lambda: run("tail -1 /run/stream") == "data: done", timeout_s=60)


def test_an_edited_file_is_put_right_and_check_mode_says_so():
    said, ok = play("converge.yml")
    assert ok, said
    run(f"sed -i s/64m/65m/ {CONFIGURATION}")
    said, ok = play("converge.yml", "--check")
    assert ok and "changed=1 " in said, said
    said, ok = play("converge.yml")
    assert ok and "changed=1 " in said, said
    assert run(f"grep -c 64m {CONFIGURATION}") == "1"
