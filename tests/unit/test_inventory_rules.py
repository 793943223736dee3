"""The first gate: each mistake in an inventory is one finding that names place, value and remedy, and nothing else is."""

from __future__ import annotations

import copy

import pytest
from ansible_collections.llmops.ascend.plugins.filter.resolve_deployments import load_presets
from ansible_collections.llmops.ascend.plugins.module_utils import inventory_rules
from ansible_collections.llmops.ascend.plugins.module_utils.deployments import resolve_deployments
from ansible_collections.llmops.ascend.plugins.module_utils.inventory_rules import Machine

SERVICES = {"qwen3.8-27b": {"listen_port": 2219, "api_key": "a$b%c\"d'e"}}
DEPLOYMENT = {"preset": "qwen3.8-27b-w8a8", "service": "qwen3.8-27b", "expected_devices": 8}


def machine(number: int, **variables) -> Machine:
    """One of the report's machines; 69 is the load balancer too."""
    given = {
        "ansible_host": f"198.18.254.{number}",
        "data_address": f"198.18.11.{number}",
        "services": SERVICES,
        "deployments": {"qwen38-tp2": DEPLOYMENT},
        **variables,
    }
    given = copy.deepcopy({name: value for name, value in given.items() if value is not ...})
    return Machine(worker=True, balancer=number == 69, vars=given, names=tuple(given))


def found(**changed: Machine) -> list[dict]:
    """The findings on machines 66 to 69 with some of them replaced (m67=...)."""
    machines = {f"machine{number}": machine(number) for number in (66, 67, 68, 69)}
    machines.update({name.replace("m", "machine"): replaced for name, replaced in changed.items()})
    return inventory_rules.inventory_findings(machines, load_presets(), ["preflight_architectures"])


def all_with(**variables) -> list[dict]:
    """The findings when every machine has these variables."""
    return found(**{f"m{number}": machine(number, **variables) for number in (66, 67, 68, 69)})


def one_line(findings: list[dict]) -> str:
    """The one finding, as its line."""
    lines = inventory_rules.lines(findings, "error")
    assert len(lines) == len(findings) == 1, lines
    assert "\n" not in lines[0]
    return lines[0]


def deployment(**changes) -> dict:
    """The report's deployment with some keys changed."""
    return {**DEPLOYMENT, **changes}


def test_a_good_inventory_has_no_findings():
    assert found() == []


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ({"service_adress": "198.18.254.67"}, ["no variable is called service_adress", "service_address"]),
        ({"deployment": {}}, ["no variable is called deployment", "deployments"]),
        ({"quarantine_devices": [6]}, ["no variable is called quarantine_devices", "quarantined_devices"]),
        ({"preflight_architecture": []}, ["no variable is called preflight_architecture", "preflight_architectures"]),
        ({"quarantined_devices": 6}, ["quarantined_devices is 6", "[6]"]),
        ({"quarantined_devices": [True]}, ["quarantined_devices is [True]"]),
        ({"ansible_host": "m67.example.org"}, ["service_address is not set", "m67.example.org", "set service_address"]),
        ({"ansible_host": ...}, ["service_address is not set", "'machine67'"]),
        ({"service_address": "node67"}, ["service_address 'node67'", "no IP address"]),
        ({"service_address": "127.0.0.1"}, ["service_address '127.0.0.1'", "other machines can reach"]),
        ({"service_address": "0.0.0.0"}, ["service_address '0.0.0.0'"]),
        ({"data_address": "198.18.11.256"}, ["data_address '198.18.11.256'"]),
        ({"service_address": "198.18.254.66"}, ["service_address 198.18.254.66 is also that of machine66"]),
        ({"cluster_name": "a--b"}, ["cluster_name 'a--b'"]),
        ({"deployments": ["qwen38-tp2"]}, ["deployments is list", "dictionary"]),
        ({"deployments": {"qwen 38": DEPLOYMENT}}, ["deployments.qwen 38", "systemd units"]),
    ],
)
def test_a_mistake_on_one_machine(variables, parts):
    line = one_line(found(m67=machine(67, **variables)))
    assert line.startswith("machine67: ") or "machine67" in line
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"service": "qwen3.8"}, ["'qwen3.8' is not among the services", "qwen3.8-27b?"]),
        ({"presett": None}, ["presett: no such key", "did you mean preset?"]),
        ({"tensor_parallel_size": "2"}, ["tensor_parallel_size is '2'"]),
        ({"instances": 5}, ["expected_devices", "8", "5 instances", "10"]),
        ({"args": {"tool_call_parser": "qwen3"}, "vllm_version": "0.18.0"}, ["tool_call_parser", "qwen3_xml", "qwen3_coder"]),
        ({"args": {"enable_prefix_caching": "true"}}, ["enable_prefix_caching", "'true'", "use true or false"]),
    ],
)
def test_a_mistake_in_a_deployment(changes, parts):
    same = {"qwen38-tp2": deployment(**changes)}
    (line,) = inventory_rules.lines(all_with(deployments=same), "error")
    assert line.startswith("machine66, machine67, machine68 and 1 more: ")
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("service", "parts"),
    [
        ({"listen_port": 2219}, ["services.qwen3.8-27b.api_key is missing", "`api_key: none`"]),
        ({"listen_port": 2219, "api_key": ""}, ["api_key is missing"]),
        ({"listen_port": 2219, "api_key": None}, ["api_key is missing"]),
        ({"listen_port": 2219, "api_key": 12345678}, ["api_key is int", "in quotes"]),
        ({"listen_port": 2219, "api_key": "geheim\n"}, ["api_key holds a line break"]),
        ({"listen_port": 2219, "api_key": "geheim "}, ["api_key holds characters or outer blanks"]),
        ({"listen_port": 2219, "api_key": "schlüssel-geheim"}, ["api_key holds characters"]),
        ({"api_key": "none"}, ["listen_port is missing"]),
        ({"listen_port": "2219", "api_key": "none"}, ["listen_port is '2219'"]),
        ({"listen_port": 2219, "api_key": "none", "policy": "sesion"}, ["policy 'sesion' does not exist", "session?"]),
        ({"listen_port": 2219, "api_key": "none", "listen": 1}, ["qwen3.8-27b.listen: a service has no such key", "listen_port?"]),
        ("2219", ["services.qwen3.8-27b is str"]),
    ],
)
def test_a_mistake_in_a_service_is_said_once_and_without_its_key(service, parts):
    line = one_line(all_with(services={"qwen3.8-27b": service}))
    for part in parts:
        assert part in line
    assert "geheim" not in line


def test_none_must_be_said_and_is_then_enough():
    assert all_with(services={"qwen3.8-27b": {"listen_port": 2219, "api_key": "none"}}) == []


def test_two_services_on_one_port():
    line = one_line(all_with(services={**SERVICES, "other": {"listen_port": 2219, "api_key": "none"}}))
    assert "services qwen3.8-27b and other both listen on port 2219" in line


def test_a_service_that_differs_between_machines():
    line = one_line(found(m67=machine(67, services={"qwen3.8-27b": {"listen_port": 2219, "api_key": "geheim"}})))
    assert "service qwen3.8-27b is not the same on machine66 and machine67: api_key differs" in line
    assert "geheim" not in line and "a$b" not in line


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": "Other"}, "model"),
        ({"args": {"max_model_len": 131072}}, "args.max_model_len"),
        ({"args": {"reasoning_parser": None}}, "args.reasoning_parser"),
        ({"args": {"tool_call_parser": "qwen3_xml"}}, "args.tool_call_parser"),
    ],
)
def test_deployments_of_one_service_that_clients_could_tell_apart(changes, what):
    line = one_line(found(m67=machine(67, deployments={"qwen38-tp2": deployment(**changes)})))
    assert f"the deployments of service qwen3.8-27b differ in {what}: " in line
    assert "qwen38-tp2 on machine67" in line
    assert "qwen38-tp2 on machine66, qwen38-tp2 on machine68, qwen38-tp2 on machine69" in line


def test_deployments_of_one_service_may_differ_in_what_no_client_sees():
    slow = deployment(tensor_parallel_size=4, args={"max_num_seqs": 8})
    assert found(m67=machine(67, deployments={"qwen38-tp4": slow})) == []


def two(one: dict, other: dict, number: int = 67) -> list[dict]:
    """The findings when a machine has two deployments."""
    return found(**{f"m{number}": machine(number, deployments={"one": deployment(**one), "other": deployment(**other)})})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"devices": [0, 1, 2, 3]}, {"devices": [3, 4, 5, 6]}),
        ({}, {}),
        ({"expected_devices": None}, {"expected_devices": None}),
    ],
)
def test_two_deployments_on_one_device(one, other):
    line = one_line(two({"first_port": 8000, **one}, {"first_port": 9000, **other}))
    assert line.startswith("machine67: deployments one (devices ") and "want the same devices" in line


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"devices": [0, 1, 2, 3]}, {"devices": [4, 5, 6, 7]}),
        ({"devices": [0, 1]}, {}),
        ({"instances": 2}, {}),
        ({"instances": 2}, {"instances": 2}),
    ],
)
def test_two_deployments_that_share_a_machine(one, other):
    assert two({"first_port": 8000, **one}, {"first_port": 9000, **other}) == []


def test_two_deployments_on_one_port():
    line = one_line(two({"devices": [0, 1, 2, 3]}, {"devices": [4, 5, 6, 7], "first_port": 8001}))
    assert "deployments one and other both want port 8001" in line and "first_port" in line and "8003" in line


def test_ports_are_counted_as_placement_counts():
    """`all` beside a list is the rest: three instances, ports 8000 to 8002, and 8003 is free."""
    assert two({}, {"devices": [6, 7], "first_port": 8003}) == []
    assert "port 8002" in one_line(two({}, {"devices": [6, 7], "first_port": 8002}))


def test_an_instance_on_the_port_of_a_service():
    line = one_line(found(m69=machine(69, deployments={"qwen38-tp2": deployment(first_port=2217)})))
    assert line.startswith("machine69: service qwen3.8-27b listens on port 2219, which deployment qwen38-tp2 wants")


def test_services_need_a_load_balancer():
    lonely = machine(69)
    lonely.balancer = False
    assert "services qwen3.8-27b have no load balancer" in one_line(found(m69=lonely))
    alone = deployment(service=None)
    machines = {"machine66": machine(66, services=..., deployments={"qwen38-tp2": alone})}
    assert inventory_rules.inventory_findings(machines, load_presets()) == []


def test_an_undefined_variable_is_one_finding():
    broken = machine(67, services=...)
    broken.unreadable["services"] = "'vault_qwen_key' is undefined"
    assert "machine67: services cannot be read: 'vault_qwen_key' is undefined" in one_line(found(m67=broken))


def test_all_findings_come_at_once_errors_first():
    findings = found(
        m66=machine(66, deployments={"qwen38-tp2": deployment(vllm_version="9.9")}),
        m67=machine(67, service_adress="x", quarantined_devices=6),
        m68=machine(68, data_address="nowhere"),
    )
    assert [finding["level"] for finding in findings] == ["error"] * 3 + ["warning"]
    assert len(inventory_rules.lines(findings, "error")) == 3


def test_possible_names():
    def names(**changes):
        resolved, faults = resolve_deployments({"a": deployment(**changes)}, {}, load_presets(), SERVICES)
        assert not faults
        return inventory_rules.possible_names(resolved, unknown_count=3)

    assert names() == ["a-0", "a-1", "a-2", "a-3"]
    assert names(instances=1) == ["a-0"]
    assert names(devices=[2, 3]) == ["a-0"]
    assert names(expected_devices=None) == ["a-0", "a-1", "a-2"]


def test_more_devices_than_a_machine_is_said_to_have():
    line = one_line(found(m67=machine(67, deployments={"qwen38-tp2": deployment(instances=5)})))
    assert all(part in line for part in ("machine67", "8 are too few", "5 instances of 2"))
    two = {"a": deployment(instances=4), "b": deployment(instances=4, first_port=8100)}
    assert "16 devices" in one_line(found(m67=machine(67, deployments=two)))
