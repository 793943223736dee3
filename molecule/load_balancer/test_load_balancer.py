"""The load balancer that the scenario left on machine69, as its operator and its clients see it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
testinfra_hosts = ["ansible://machine69?force_ansible=True"]

UNIT = "llmops-load-balancer.service"
LOG = "/var/log/llmops/load_balancer"
CONFIGURATION = "/etc/llmops/load_balancer/nginx.conf"
BACKENDS = "/etc/llmops/load_balancer/backends/llmops--qwen3.8-27b--machine69.json"
COPY = "/var/lib/llmops/backends/llmops--qwen3.8-27b--machine69.json"
SOCKET = "/run/llmops/load_balancer/admin.sock"
ASK = """
import http.client, socket, sys
connection = http.client.HTTPConnection("127.0.0.1", 2219, timeout=10)
if sys.argv[1] == "socket":
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect("%s")
connection.request(sys.argv[2], sys.argv[3], sys.argv[5] or None, {"X-Session-ID": sys.argv[4]})
response = connection.getresponse()
print(response.status, response.getheader("X-Upstream-Addr"))
print(response.read().decode())
""" % SOCKET


def play(name, *arguments, **variables):
    """A playbook of this scenario; the text it prints and whether it succeeded."""
    command = ["ansible-playbook", "-i", str(PROJECT / "inventory/lab"), str(Path(__file__).with_name(name))]
    command += ["--extra-vars", json.dumps(variables), *arguments]
    environment = {**os.environ, "ANSIBLE_TIMEOUT": "3"}
    run = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return run.stdout + run.stderr, run.returncode == 0


def ask(host, path, session="", method="GET", way="port", body=""):
    """Status, backend and body of one request made on the host."""
    text = host.check_output("python3 -c %s %s %s %s %s %s", ASK, way, method, path, session, body)
    head, _, text = text.partition("\n")
    status, backend = head.split()
    return int(status), backend, text


def status(host):
    return json.loads(ask(host, "/status", way="socket")[2])


def eventually(check, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def test_its_own_unit_runs_and_the_distributions_does_not(host):
    assert host.service(UNIT).is_running and host.service(UNIT).is_enabled
    assert not host.service("nginx").is_running and not host.service("nginx").is_enabled
    assert not host.socket("tcp://0.0.0.0:80").is_listening


def test_workers_are_unprivileged_and_the_admin_socket_is_roots(host):
    workers = host.process.filter(comm="nginx", user="llmops-lb")
    assert len(workers) >= 1
    assert host.file("/run/llmops/load_balancer").mode == 0o700
    assert host.run("runuser -u llmops-lb -- python3 -c %s socket GET /status x ''", ASK).rc != 0


def test_no_key_reaches_the_machine(host):
    assert host.run("grep -r SK-12345678 /etc/llmops /etc/systemd/system %s", LOG).rc == 1


def test_requests_reach_all_backends_and_sessions_stay(host):
    homes = {session: ask(host, "/v1/models", session)[1] for session in "abcdefghijkl"}
    assert set(homes.values()) == {"127.0.0.1:8000", "127.0.0.1:8001", "127.0.0.1:8002"}
    assert {session: ask(host, "/v1/models", session)[1] for session in homes} == homes
    assert json.loads(ask(host, "/health")[2])["backends"]["active"] == 3


def test_the_machine_kept_a_copy(host):
    assert host.file(COPY).content == host.file(BACKENDS).content


def test_a_stopped_engine_is_left_and_found_again(host):
    host.check_output("systemctl stop engine@8001")
    eventually(lambda: json.loads(ask(host, "/health")[2])["status"] == "degraded")
    assert {ask(host, "/v1/models", session)[0] for session in "abcdef"} == {200}
    host.check_output("systemctl start engine@8001")
    eventually(lambda: json.loads(ask(host, "/health")[2])["status"] == "ok")


def test_a_drain_outlives_kill_9_of_the_master(host):
    order = json.dumps({"service": "qwen3.8-27b", "ids": ["machine69:8002"], "max_unavailable": 1})
    assert ask(host, "/drain", method="POST", way="socket", body=order)[0] == 200
    pid = host.check_output("systemctl show --property=MainPID --value %s", UNIT)
    host.check_output("kill -9 %s", pid)
    eventually(lambda: host.check_output("systemctl show --property=MainPID --value %s", UNIT) not in ("0", pid))
    eventually(lambda: host.run("test -S %s", SOCKET).rc == 0)
    backend = status(host)["services"]["qwen3.8-27b"]["backends"]["machine69:8002"]
    assert backend["state"] == "drained"
    assert "127.0.0.1:8002" not in {ask(host, "/v1/models", session)[1] for session in "abcdefghijkl"}
    assert ask(host, "/activate", method="POST", way="socket", body=order)[0] == 200


def test_the_access_log_is_json_and_shows_no_session(host):
    ask(host, "/v1/models", "very-private-session")
    lines = host.file(f"{LOG}/access.log").content_string.splitlines()
    last = json.loads(lines[-1])
    assert (last["service"], last["key_source"], last["status"]) == ("qwen3.8-27b", "session", 200)
    assert "very-private-session" not in "".join(lines)


def states(host):
    return {name: entry["state"] for name, entry in status(host)["services"]["qwen3.8-27b"]["backends"].items()}


def test_drain_refuse_activate_deregister_and_register_again(host):
    said, ok = play("entry.yml", entry="drain", load_balancer_ids=["machine69:8000"])
    assert ok, said
    assert states(host)["machine69:8000"] == "drained"
    said, ok = play("entry.yml", entry="drain", load_balancer_ids=["machine69:8001"])
    assert not ok
    assert "max_unavailable is 1; already unavailable: machine69:8000" in said
    assert states(host)["machine69:8001"] == "active"
    said, ok = play("entry.yml", entry="activate")
    assert ok, said
    assert set(states(host).values()) == {"active"}
    said, ok = play("entry.yml", entry="deregister", load_balancer_ids=["machine69:8002"])
    assert ok, said
    assert "machine69:8002" not in host.file(BACKENDS).content_string
    assert "machine69:8002" not in host.file(COPY).content_string
    eventually(lambda: sorted(states(host)) == ["machine69:8000", "machine69:8001"])
    said, ok = play("converge.yml")
    assert ok, said
    assert set(states(host)) == {"machine69:8000", "machine69:8001", "machine69:8002"}


def test_a_dead_load_balancer_is_named_and_stops_nothing_else(host, tmp_path):
    more = tmp_path / "more.yml"
    more.write_text("load_balancers: {hosts: {machine68: }}\n")
    host.check_output("rm %s", BACKENDS)
    said, ok = play("converge.yml", "-i", str(more))
    assert not ok
    assert "machine69 on load balancer machine68: " in said
    assert host.file(BACKENDS).content == host.file(COPY).content


def test_a_configuration_that_does_not_work_replaces_nothing(host):
    before, running = host.file(CONFIGURATION).content, status(host)["configuration"]
    health = {"interval_s": 0.5, "connect_timeout_s": 0.4, "read_timeout_s": 3, "fall": 0, "rise": 2}
    said, ok = play("converge.yml", load_balancer_health=health)
    assert not ok
    assert "the running one is untouched: " in said and "health.fall must be a number above 0" in said
    assert (host.file(CONFIGURATION).content, status(host)["configuration"]) == (before, running)
    assert not host.file("/run/llmops/load_balancer.candidate").exists


def test_a_held_port_is_named_with_its_holder(host):
    host.check_output("systemd-run --quiet --unit=holder python3 -m http.server 2220")
    services = {"qwen3.8-27b": {"listen_port": 2219}, "other": {"listen_port": 2220}}
    try:
        eventually(lambda: host.socket("tcp://0.0.0.0:2220").is_listening)
        said, ok = play("converge.yml", services=services)
    finally:
        host.check_output("systemctl stop holder")
    assert not ok
    assert "machine69: port 2220 is held by python3 (pid" in said
    assert ask(host, "/v1/models")[0] == 200


def test_an_unfinished_reload_is_made_up_for(host):
    host.check_output("sed -i 's/64m/65m/' %s", CONFIGURATION)
    said, ok = play("converge.yml", "--check")
    assert ok and "changed=1" in said, said
    said, ok = play("converge.yml")
    assert ok and "changed=1" in said, said
    assert "client_max_body_size 64m" in host.file(CONFIGURATION).content_string
