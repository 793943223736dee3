"""The load balancer end to end: its template and Lua in a real nginx, small engines behind it."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import load_balancer
from ansible_collections.llmops.ascend.plugins.module_utils.unix_http import UnixConnection

from tests.lua.support import SERVICE, Balancer, Engine, cluster, eventually

SESSIONS = [f"session-{number}" for number in range(60)]
STREAM = {"chunks": 20, "pause_s": 0.1}


def test_sessions_stay_and_growth_moves_only_to_the_new(tmp_path):
    with cluster(tmp_path, 3) as (balancer, engines):
        before = balancer.homes(SESSIONS)
        assert balancer.homes(SESSIONS) == before
        assert set(before.values()) == {engine.address for engine in engines}
        new = Engine("machine70")
        try:
            balancer.offer(new.machine, [new])
            eventually(lambda: balancer.states().get(new.id) == "active", timeout_s=3)
            after = balancer.homes(SESSIONS)
            moved = [session for session in SESSIONS if after[session] != before[session]]
            assert moved and {after[session] for session in moved} == {new.address}
            assert len(moved) < len(SESSIONS) / 2
        finally:
            new.stop()


def test_a_new_backend_serves_only_once_it_answers(tmp_path):
    with cluster(tmp_path, 1) as (balancer, [engine]):
        new = Engine("machine70")
        new.stop()
        balancer.offer(new.machine, [new])
        eventually(lambda: balancer.states().get(new.id) == "down", timeout_s=3)
        assert set(balancer.homes(SESSIONS[:20]).values()) == {engine.address}
        assert new.requests == []


def test_a_dead_backend_is_out_in_two_seconds_and_only_its_sessions_move(tmp_path):
    with cluster(tmp_path, 4) as (balancer, engines):
        before = balancer.homes(SESSIONS)
        dead = engines[1]
        killed = time.monotonic()
        dead.stop()
        during = balancer.homes(SESSIONS)  # no request fails meanwhile
        eventually(lambda: balancer.states()[dead.id] == "down")
        assert time.monotonic() - killed <= 2
        after = balancer.homes(SESSIONS)
        assert during == after
        assert {session for session in SESSIONS if after[session] != before[session]} == {
            session for session in SESSIONS if before[session] == dead.address
        }
        dead.start()
        eventually(lambda: balancer.states()[dead.id] == "active")
        assert balancer.homes(SESSIONS) == before


def test_a_silently_lost_machine_is_out_in_two_seconds(tmp_path):
    with cluster(tmp_path, 2) as (balancer, engines):
        lost = engines[0]
        # A listening socket whose queue is full answers no connection, like a machine without power.
        lost.stop()
        with socket.socket() as mute:
            mute.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            mute.bind(("127.0.0.1", lost.port))
            mute.listen(0)
            clients = []
            for _ in range(3):
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", lost.port))
                clients.append(client)
            started = time.monotonic()
            eventually(lambda: balancer.states()[lost.id] == "down")
            assert time.monotonic() - started <= 2
            for client in clients:
                client.close()


@pytest.mark.parametrize("fault", ["503", "reset"])
def test_a_failed_attempt_is_repeated_elsewhere(tmp_path, fault):
    with cluster(tmp_path, 2) as (balancer, engines):
        home = balancer.homes(["a"])["a"]
        broken, other = sorted(engines, key=lambda engine: engine.address != home)
        broken.fault = fault
        answer = balancer.ask("a", b"x" * 3_000_000)
        assert (answer.status, answer.json["engine"], answer.json["bytes"]) == (200, other.id, 3_000_000)
        assert answer.headers["X-Upstream-Addr"] == other.address


def test_an_engines_own_500_is_passed_on(tmp_path):
    with cluster(tmp_path, 2) as (balancer, engines):
        for engine in engines:
            engine.fault = "500"
        assert balancer.ask("a", {}).status == 500
        assert sum(len(engine.requests) for engine in engines) == 1


def test_a_slow_answer_is_never_computed_twice(tmp_path):
    timeouts = {"connect_timeout_s": 1, "read_timeout_s": 1, "more_tries": 2, "keepalive_connections": 8}
    with cluster(tmp_path, 2, load_balancer_proxy=timeouts) as (balancer, engines):
        for engine in engines:
            engine.fault = "hang"
        assert balancer.ask("a", {}).status == 502
        assert sum(len(engine.requests) for engine in engines) == 1


def test_drain_lets_running_requests_finish_and_survives_reload_and_restart(tmp_path):
    with cluster(tmp_path, 3) as (balancer, engines):
        homes = balancer.homes(SESSIONS)
        drained = engines[0]
        session = next(name for name in SESSIONS if homes[name] == drained.address)
        answers = []
        stream = threading.Thread(target=lambda: answers.append(balancer.ask(session, STREAM)))
        stream.start()
        eventually(lambda: balancer.admin.backends(SERVICE)[drained.id]["in_flight"] == 1)
        assert balancer.admin.drain(SERVICE, [drained.id]) == [drained.id]
        assert balancer.states()[drained.id] == "draining"
        assert balancer.ask(session).headers["X-Upstream-Addr"] != drained.address
        stream.join()
        assert answers[0].body.count(b"data: ") == STREAM["chunks"]
        eventually(lambda: balancer.states()[drained.id] == "drained")
        balancer.reload()
        assert balancer.states()[drained.id] == "drained"
        balancer.stop()
        balancer.start()
        assert balancer.states()[drained.id] == "drained"
        assert drained.address not in balancer.homes(SESSIONS).values()
        assert balancer.admin.activate(SERVICE, [drained.id]) == [drained.id]
        assert balancer.homes(SESSIONS) == homes


def test_a_drain_belongs_to_who_made_it(tmp_path):
    with cluster(tmp_path, 2) as (balancer, engines):
        mine, theirs = (engine.id for engine in engines)
        balancer.admin.drain(SERVICE, [mine], by="site.yml")
        balancer.admin.drain(SERVICE, [theirs])
        assert balancer.admin.drain(SERVICE, [theirs], by="site.yml") == []
        assert balancer.admin.activate(SERVICE, [mine, theirs], by="site.yml") == [mine]
        backends = balancer.admin.backends(SERVICE)
        assert backends[mine]["state"] == "active"
        assert backends[theirs]["state"] == "drained" and backends[theirs]["drained_by"] == "operator"
        assert balancer.admin.activate(SERVICE, [theirs]) == [theirs]


def test_a_drain_ends_with_its_backend(tmp_path):
    with cluster(tmp_path, 2) as (balancer, engines):
        balancer.admin.drain(SERVICE, [engines[0].id])
        path = balancer.offer(engines[0].machine, [engines[0]])
        path.unlink()
        eventually(lambda: engines[0].id not in balancer.states())
        eventually(lambda: engines[0].id not in (tmp_path / "state" / "drains.json").read_text())
        balancer.offer(engines[0].machine, [engines[0]])
        eventually(lambda: balancer.states().get(engines[0].id) == "active")


def test_max_unavailable_counts_what_is_down_and_drained(tmp_path):
    with cluster(tmp_path, 3) as (balancer, engines):
        first, second, third = (engine.id for engine in engines)
        with pytest.raises(load_balancer.Refused, match="max_unavailable is 1"):
            balancer.admin.drain(SERVICE, [first, second], max_unavailable=1)
        balancer.admin.drain(SERVICE, [first], max_unavailable=1)
        with pytest.raises(load_balancer.Refused, match=f"already unavailable: {first}"):
            balancer.admin.drain(SERVICE, [second], max_unavailable=1)
        assert balancer.admin.drain(SERVICE, [first], max_unavailable=1) == []
        engines[1].stop()
        eventually(lambda: balancer.states()[second] == "down")
        assert balancer.admin.drain(SERVICE, [second], max_unavailable=1) == [second]  # it is out already
        with pytest.raises(load_balancer.Refused):
            balancer.admin.drain(SERVICE, [third], max_unavailable=2)


def test_a_bad_file_keeps_the_last_good_one_and_is_reported(tmp_path):
    with cluster(tmp_path, 2) as (balancer, engines):
        path = balancer.offer(engines[0].machine, [engines[0]])
        for text in ("{", '{"schema": 2}', path.read_text().replace("127.0.0.1", "localhost")):
            path.write_text(text)
            eventually(lambda: balancer.admin.status()["files"][path.name].get("error"), timeout_s=3)
            balancer.reload()  # also then
            assert set(balancer.states()) == {engine.id for engine in engines}
        assert "localhost" in balancer.admin.status()["files"][path.name]["error"]
        balancer.offer(engines[0].machine, [engines[0]])
        eventually(lambda: not balancer.admin.status()["files"][path.name].get("error"), timeout_s=3)


def test_health_tells_the_truth(tmp_path):
    with cluster(tmp_path, 2) as (balancer, engines):
        assert balancer.ask(path="/health").json == {
            "status": "ok",
            "service": SERVICE,
            "backends": {"total": 2, "active": 2, "down": 0, "draining": 0},
        }
        engines[0].stop()
        eventually(lambda: balancer.ask(path="/health").json["status"] == "degraded")
        engines[1].stop()
        eventually(lambda: balancer.ask(path="/health").status == 503)
        engines[1].start()
        eventually(lambda: balancer.ask(path="/health").status == 200)


def test_panic_tries_backends_that_are_down(tmp_path):
    slow = {"interval_s": 5, "connect_timeout_s": 0.4, "read_timeout_s": 3, "fall": 1, "rise": 2}
    with cluster(tmp_path, 1, load_balancer_health=slow) as (balancer, [engine]):
        engine.stop()
        assert balancer.ask("a").status == 502
        eventually(lambda: balancer.states()[engine.id] == "down", timeout_s=6)
        engine.start()
        assert balancer.ask("a").status == 200
        balancer.admin.drain(SERVICE, [engine.id])
        answer = balancer.ask("a")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert SERVICE in answer.json["error"]["message"]


def test_streams_are_not_buffered(tmp_path):
    with cluster(tmp_path, 1) as (balancer, _):
        connection = balancer.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps(STREAM))
        response = connection.getresponse()
        arrivals = []
        while response.read1():
            arrivals.append(time.monotonic())
        assert len(arrivals) >= STREAM["chunks"]
        assert arrivals[-1] - arrivals[0] > 1
        connection.close()
        line = eventually(lambda: balancer.log("access").strip())
        assert json.loads(line)["ttft_s"] < 0.5 < json.loads(line)["duration_s"]


def test_a_clients_abort_reaches_the_engine(tmp_path):
    with cluster(tmp_path, 1) as (balancer, [engine]):
        connection = balancer.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps({"chunks": 100, "pause_s": 0.05}))
        connection.getresponse().read1()
        assert balancer.in_flight() == 1
        connection.sock.close()
        connection.close()
        assert engine.aborted.wait(5)
        eventually(lambda: balancer.in_flight() == 0)


def test_a_killed_worker_leaves_no_stuck_counter(tmp_path):
    with cluster(tmp_path, 1) as (balancer, _):
        connections = []
        for _ in range(6):
            connection = balancer.connect()
            connection.request("POST", "/v1/chat/completions", json.dumps({"chunks": 200, "pause_s": 0.05}))
            connections.append(connection)
        eventually(lambda: balancer.in_flight() == 6)
        for pid in balancer.workers():
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: balancer.in_flight() == 0, timeout_s=3)
        assert balancer.ask("a").status == 200
        for connection in connections:
            connection.close()


def test_a_reload_cuts_no_stream(tmp_path):
    with cluster(tmp_path, 2) as (balancer, engines):
        answers = []
        streams = [
            threading.Thread(target=lambda name=name: answers.append(balancer.ask(name, STREAM)))
            for name in SESSIONS[:10]
        ]
        for stream in streams:
            stream.start()
        eventually(lambda: balancer.in_flight() == 10)
        balancer.reload()
        assert balancer.in_flight() == 10
        for stream in streams:
            stream.join()
        assert [answer.body.count(b"data: ") for answer in answers] == [STREAM["chunks"]] * 10
        eventually(lambda: balancer.in_flight() == 0)


def test_large_bodies_pass(tmp_path):
    with cluster(tmp_path, 1) as (balancer, _):
        assert balancer.ask("a", b"x" * 50 * 1024 * 1024).json["bytes"] == 50 * 1024 * 1024


def test_the_key_is_the_session_else_the_token_else_the_address(tmp_path):
    with cluster(tmp_path, 4) as (balancer, _):
        token = {"Authorization": "Bearer SK-12345678-@aaa"}
        assert len({balancer.ask(None, **token).headers["X-Upstream-Addr"] for _ in range(8)}) == 1
        assert len({balancer.ask(name, **token).headers["X-Upstream-Addr"] for name in SESSIONS}) == 4
        assert len({balancer.ask().headers["X-Upstream-Addr"] for _ in range(8)}) == 1
        log = eventually(lambda: balancer.log("access"))
        lines = [json.loads(line) for line in log.splitlines()]
        assert {line["key_source"] for line in lines} == {"session", "bearer", "address"}
        assert "SK-12345678" not in log and "session-1" not in log
        assert {line["status"] for line in lines} == {200}


def test_engines_see_the_key_and_no_client_sees_more_than_the_api(tmp_path):
    with cluster(tmp_path, 1) as (balancer, [engine]):
        balancer.ask("a", Authorization="Bearer k")
        assert engine.requests[-1]["headers"]["Authorization"] == "Bearer k"
        for path in ("/metrics", "/reset_prefix_cache", "/v1/../metrics", "/v1/%2e%2e/metrics", "/"):
            assert balancer.ask("a", path=path).status == 404
        assert len(engine.requests) == 1


def test_browsers_are_told_what_they_may(tmp_path):
    with cluster(tmp_path, 1) as (balancer, [engine]):
        connection = balancer.connect()
        connection.request("OPTIONS", "/v1/chat/completions", headers={"Origin": "http://app"})
        response = connection.getresponse()
        response.read()
        assert response.status == 204
        assert response.getheader("Access-Control-Allow-Origin") == "*"
        assert response.getheader("Access-Control-Max-Age") == "1728000"
        assert "X-Session-ID" in response.getheader("Access-Control-Allow-Headers")
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        response.read()
        assert response.headers.get_all("Access-Control-Allow-Origin") == ["*"]
        assert "X-Upstream-Addr" in response.getheader("Access-Control-Expose-Headers")
        connection.close()
        assert [request["path"] for request in engine.requests] == ["/v1/models"]


def test_services_do_not_mix(tmp_path):
    one, two = Engine("machine66"), Engine("machine67")
    balancer = Balancer(tmp_path, services=("one", "two"))
    balancer.offer("machine66", [one], "one")
    balancer.offer("machine67", [two], "two")
    try:
        balancer.start()
        eventually(lambda: balancer.states("one") == {one.id: "active"} and balancer.states("two") == {two.id: "active"})
        with pytest.raises(load_balancer.Refused, match="has no backend"):
            balancer.admin.drain("one", [two.id])
        with pytest.raises(load_balancer.Refused, match="not served here"):
            balancer.admin.drain("three", [two.id])
    finally:
        balancer.stop()
        one.stop()
        two.stop()


def test_the_admin_socket_refuses_what_it_does_not_understand(tmp_path):
    with cluster(tmp_path, 1) as (balancer, _):
        path = str(tmp_path / "run" / "admin.sock")
        for method, target, body, status in (
            ("POST", "/drain", "{", 400),
            ("POST", "/drain", '{"ids": "all"}', 400),
            ("POST", "/drain", json.dumps({"service": SERVICE, "ids": [], "max_unavailable": "x"}), 400),
            ("GET", "/drain", None, 403),
            ("GET", "/", None, 404),
        ):
            connection = UnixConnection(path, 5)
            connection.request(method, target, body)
            assert connection.getresponse().status == status, target
            connection.close()


def test_unknown_policies_do_not_start(tmp_path):
    balancer = Balancer(tmp_path, load_balancer_served={SERVICE: {"listen_port": 1, "policy": "least_conn"}})
    with pytest.raises(AssertionError, match="policy 'least_conn'"):
        balancer.start()
    balancer.process.stderr.close()
    balancer.process = None
