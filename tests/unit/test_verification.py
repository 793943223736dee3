"""Questions, answers, expectations: a good endpoint meets them all, and every fault is named by the one it breaks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml
from ansible_collections.llmops.ascend.plugins.filter import verify as filters
from ansible_collections.llmops.ascend.plugins.module_utils import verification
from ansible_collections.llmops.ascend.plugins.module_utils.endpoint_questions import ask
from ansible_collections.llmops.ascend.plugins.module_utils.expectations import judge
from ansible_collections.llmops.ascend.plugins.module_utils.openai_http import Client, read_events

from tests.unit.fake_endpoint import BACKENDS, KEY, MODEL, fake_endpoint

ROLE = Path(__file__).resolve().parents[2] / "roles/verify"
EXPECTATIONS = yaml.safe_load((ROLE / "vars/main.yml").read_text())["verify_expectations"]
SERVICES = {"qwen": {"listen_port": 2219, "api_key": KEY}, "open": {"listen_port": 2220, "api_key": "none"}}
DEPLOYMENTS = {
    "tp2": {
        "name": "tp2",
        "service": "qwen",
        "model": MODEL,
        "served_names": [MODEL],
        "args": {
            "max_model_len": 262144,
            "reasoning_parser": "qwen3",
            "enable_auto_tool_choice": True,
            "tool_call_parser": "qwen3_coder",
        },
    }
}
INSTANCE = {
    "name": "tp2-0",
    "deployment": "tp2",
    "service": "qwen",
    "devices": [0, 1],
    "numa_nodes": [0],
    "address": "127.0.0.1",
    "port": 8000,
    "state": "placed",
}


def targets(level: str = "full", deployments: dict = DEPLOYMENTS, **instance) -> list[dict]:
    """What verify makes of one instance."""
    placed = [{**INSTANCE, **instance}]
    return verification.backend_targets(placed, deployments, SERVICES, "machine66", level, [], 5)


def row_of(target: dict, url: str) -> dict:
    """Ask the endpoint at `url` what the target wants, and judge."""
    target["endpoint"]["url"] = url
    name = target["endpoint"]["name"]
    answers = {name: ask(target["endpoint"], verification.keys([target], SERVICES).get(name))}
    (row,) = verification.rows([target], answers, EXPECTATIONS)
    return row


def unmet_with(*faults: str, level: str = "full") -> list[str]:
    """The names of the expectations that an endpoint with these faults does not meet, asked directly."""
    with fake_endpoint(*faults) as endpoint:
        row = row_of(targets(level)[0], endpoint.url)
    assert all("\n" not in unmet["message"] and "{" not in unmet["name"] for unmet in row["unmet"])
    return [unmet["name"] for unmet in row["unmet"]]


def balanced_target(policy: str = "session", level: str = "full") -> dict:
    """What verify makes of the service through a load balancer, with three backends known."""
    services = {**SERVICES, "qwen": {**SERVICES["qwen"], "policy": policy}}
    asked = [{"service": "qwen", "url": f"http://{backend}", "health": 200} for backend in BACKENDS]
    (target,) = verification.service_targets(
        [DEPLOYMENTS], services, {"machine69": "198.18.254.69"}, asked, level, 16, 5, 0
    )
    return target


def unmet_through_balancer(*faults: str, policy: str = "session") -> list[str]:
    """As unmet_with, through a load balancer."""
    with fake_endpoint(*faults) as endpoint:
        return [unmet["name"] for unmet in row_of(balanced_target(policy), endpoint.url)["unmet"]]


def test_a_good_endpoint_meets_every_expectation():
    with fake_endpoint() as endpoint:
        row = row_of(targets()[0], endpoint.url)
    assert row["unmet"] == []
    assert row["met"] == row["asked"] == len([e for e in EXPECTATIONS if "sessions" not in e.get("when", "")])
    assert (row["health"], row["name"], row["checks"], row["level"]) == (200, MODEL, "14/14", "full")


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("unhealthy", ["it is healthy"]),
        ("refuses its key", ["it names its models"]),
        ("other model", ["served names"]),
        ("short context", ["max_model_len"]),
        ("ignores temperature", ["temperatures 0, 0.5 and 1 differ"]),
        ("one token more", ["max_tokens is exact", "a stream reports usage"]),
        ("never says length", ["max_tokens is exact"]),
        ("does not stream", ["an answer streams", "a stream ends with [DONE]", "a stream reports usage", "token sums"]),
        ("broken stream", ["an answer streams"]),
        ("stream cut off", ["a stream ends with [DONE]"]),
        ("no usage in stream", ["a stream reports usage", "token sums"]),
        ("wrong sum", ["token sums"]),
        ("reasoning in content", ["reasoning apart from content"]),
        ("no tool call", ["a tool call"]),
        ("broken arguments", ["a tool call"]),
        ("takes any key", ["401 for a wrong key"]),
        ("takes no key", ["401 without a key"]),
        ("old vllm", []),
    ],
)
def test_each_fault_is_named_by_the_expectation_it_breaks(fault, names):
    assert unmet_with(fault) == names


def test_an_engine_that_answers_nothing_but_health_fails_whatever_it_was_asked():
    assert unmet_with("errors") == [
        "temperatures 0, 0.5 and 1 differ",
        "max_tokens is exact",
        "an answer streams",
        "a stream ends with [DONE]",
        "a stream reports usage",
        "token sums",
        "reasoning apart from content",
        "a tool call",
    ]


def test_an_answer_that_breaks_off_is_none():
    assert unmet_with("cut off") == ["it is healthy"]


def test_the_first_decisive_fault_is_the_only_line():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    row = row_of(targets()[0], url)
    assert [unmet["name"] for unmet in row["unmet"]] == ["it is healthy"]
    assert "connection refused" in row["unmet"][0]["message"] and "tp2-0" in row["unmet"][0]["message"]
    assert (row["health"], row["name"], row["checks"]) == ("none", None, "0/14")
    line = verification.unmet_lines([row])[0]
    assert line.startswith(f"machine66: tp2-0 ({url}): /health says connection refused")


def test_brief_asks_for_health_and_name_only():
    with fake_endpoint("errors", "takes any key") as endpoint:
        row = row_of(targets("brief")[0], endpoint.url)
        assert endpoint.requests == 0
    assert (row["unmet"], row["checks"], row["level"]) == ([], "4/4", "brief")
    assert unmet_with("other model", level="brief") == ["served names"]


def test_only_what_the_deployment_has_is_expected():
    plain = {"tp2": {**DEPLOYMENTS["tp2"], "service": "open", "args": {"max_model_len": "256k"}}}
    (target,) = targets(deployments=plain)
    assert target["expected"]["max_model_len"] is None
    assert not (target["expected"]["api_key"] or target["expected"]["reasoning"] or target["expected"]["tools"])
    assert verification.keys([target], SERVICES) == {}
    with fake_endpoint("takes no key", "reasoning in content", "no tool call", "short context") as endpoint:
        row = row_of(target, endpoint.url)
        assert row["unmet"] == [] and "wrong_key" not in row["answers"]


def test_random_weights_need_not_make_sense():
    dummy = {**DEPLOYMENTS["tp2"], "args": {**DEPLOYMENTS["tp2"]["args"], "load_format": "dummy"}}
    (target,) = targets(deployments={"tp2": dummy})
    with fake_endpoint("reasoning in content", "no tool call") as endpoint:
        assert row_of(target, endpoint.url)["unmet"] == []


def test_a_deployment_without_a_service_has_no_key():
    alone = {"tp2": {**DEPLOYMENTS["tp2"], "service": None}}
    (target,) = targets(deployments=alone)
    assert target["expected"]["api_key"] is False


def test_instances_named_are_asked_in_full_and_blocked_ones_not_at_all():
    instances = [INSTANCE, {**INSTANCE, "name": "tp2-1", "port": 8001}, {**INSTANCE, "name": "tp2-2", "state": "blocked"}]
    made = verification.backend_targets(instances, DEPLOYMENTS, SERVICES, "machine66", "brief", ["tp2-1"], 5)
    assert [(t["endpoint"]["name"], t["endpoint"]["level"]) for t in made] == [("tp2-0", "brief"), ("tp2-1", "full")]


def test_an_ipv6_address_stands_in_brackets():
    assert targets(address="fd00::66")[0]["endpoint"]["url"] == "http://[fd00::66]:8000"


@pytest.mark.parametrize(
    ("faults", "policy", "names"),
    [
        ((), "session", []),
        (("tries another first",), "session", []),
        (("forgets sessions",), "session", ["a session stays on its backend"]),
        (("forgets sessions",), "round_robin", []),
        (("one backend",), "session", ["sessions spread"]),
        (("unmarked",), "round_robin", ["the backend is named", "sessions spread"]),
        (("slow to wake",), "session", ["temperatures 0, 0.5 and 1 differ", "token sums"]),
    ],
)
def test_through_a_load_balancer(faults, policy, names):
    assert unmet_through_balancer(*faults, policy=policy) == names


def test_sessions_need_not_spread_over_backends_that_are_down():
    rows = [{"service": "qwen", "url": f"http://127.0.0.1:{port}", "health": health} for port, health in ((8000, 200), (8001, "none"))]
    (target,) = verification.service_targets([DEPLOYMENTS], SERVICES, {"machine69": "127.0.0.1"}, rows, "full", 16, 5, 0)
    assert target["expected"]["backends"] == ["127.0.0.1:8000"]
    with fake_endpoint("one backend") as endpoint:
        assert row_of(target, endpoint.url)["unmet"] == []


def test_no_sessions_are_opened_at_level_brief():
    assert balanced_target(level="brief")["endpoint"]["sessions"] == 0


def test_report_and_tables():
    with fake_endpoint() as endpoint, fake_endpoint("wrong sum") as other:
        backends = [row_of(targets()[0], endpoint.url), row_of(targets(name="tp2-1", port=8001)[0], other.url)]
        services = [row_of(balanced_target(), endpoint.url)]
    report = verification.report(backends, services)
    assert (report["schema"], report["ok"], report["met"], report["asked"]) == (1, False, 45, 46)
    assert len(report["unmet"]) == 1 and "machine66: tp2-1 (http://127.0.0.1:" in report["unmet"][0]
    assert sum(row["sessions"] for row in report["distribution"]) == 16
    lines = filters.verify_tables(report)
    assert lines[0].split() == ["machine", "instance", "devices", "numa", "node", "port", "health", "name", "checks", "seconds"]
    assert lines[2].split()[:8] == ["machine66", "tp2-0", "0,1", "0", "8000", "200", MODEL, "14/14"]
    assert lines[-1] == "45 of 46 expectations met"
    assert KEY not in str(report)


def test_an_endpoint_that_does_not_answer_in_time():
    with fake_endpoint("hangs") as endpoint:
        answer = Client(endpoint.url, timeout_s=0.2).get("/health")
    assert (answer.status, answer.error) == (None, "no complete answer within 0.2 s")


def test_a_key_that_cannot_travel_is_not_repeated():
    answer = Client("http://127.0.0.1:9", api_key="geheim\nX: y").get("/v1/models")
    assert answer.status is None and "geheim" not in answer.error


def test_an_address_that_is_none():
    with pytest.raises(ValueError, match="is no http or https address"):
        Client("198.18.254.66:8000")


def test_server_sent_events():
    stream = read_events([b": ping\n", b"\n", b"event: x\n", b'data: {"a": 1}\r\n', b"data:[DONE]\n", b"\n"])
    assert (stream.chunks, stream.malformed, stream.done) == ([{"a": 1}], 0, True)
    stream = read_events([b"data: [DONE]\n", b"data: {}\n"])
    assert stream.done is False
    stream = read_events([b"nonsense\n", b"data: {\n", b"data: 1\n"])
    assert (stream.malformed, stream.done) == (3, False)


def test_expectations_are_data():
    document = {"level": "full", "names": ["a"], "n": 0}
    wanted = [
        {"name": "zero is true", "expect": "answers.n", "message": "n is {answers.n}"},
        {"name": "no type error", "expect": "sum(answers.names) == `1`", "message": "names {answers.names} and {expected.x}"},
        {"name": "left out", "when": "answers.missing", "expect": "`false`", "message": ""},
    ]
    assert judge(document, {"x": None}, wanted) == {
        "asked": 2,
        "met": 1,
        "unmet": [{"name": "no type error", "message": 'names ["a"] and null'}],
    }
    assert filters.unmet_expectations(document, wanted, {}) == [{"name": "no type error", "message": 'names ["a"] and null'}]
    with pytest.raises(ValueError, match="is no JMESPath"):
        judge(document, {}, [{"name": "x", "expect": "answers..n", "message": ""}])


def test_every_expectation_can_say_what_is_wrong():
    """Each message can be made from answers of any kind, and asks for nothing that is not there by name."""
    for expectation in EXPECTATIONS:
        assert set(expectation) <= {"name", "expect", "message", "level", "when", "decisive"}
        wanted = [{**expectation, "expect": "`false`", "when": "`true`"}]
        verdict = judge({"level": "full"}, {}, wanted)
        assert len(verdict["unmet"]) == 1 and "\n" not in verdict["unmet"][0]["message"]
