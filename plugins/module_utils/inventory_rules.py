"""What can be known to be wrong from the inventory alone: no facts, no connection, every machine at once.

The inventory is given as {machine: Machine}. A finding is {level: error | warning, machine, check, message, remedy}; `machine`
is None for what concerns the whole cluster. Secrets are looked at and never repeated.

What one deployment says is judged by deployments.py and vllm_cli.py; this module asks whether deployments, services and
machines agree with each other.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Iterable, Mapping

from ansible_collections.llmops.ascend.plugins.module_utils.deployments import resolve_deployments
from ansible_collections.llmops.ascend.plugins.module_utils.vllm_cli import check_arguments

READ = (
    "ansible_host",
    "cluster_name",
    "data_address",
    "deployment_overrides",
    "deployments",
    "image_registry",
    "quarantined_devices",
    "service_address",
    "services",
)
"""The variables the rules read of each machine."""

CONTRACT = (
    *READ[1:],
    "artifacts_directory",
    "load_balancer_package",
    "max_unavailable",
    "replace_placement",
)
"""The variables an inventory speaks in, besides those of the roles."""

SERVICE_KEYS = ("listen_port", "policy", "api_key")
POLICIES = ("session",)

SAME_ARGUMENTS = (
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "enable_lora",
    "limit_mm_per_prompt",
    "lora_modules",
    "max_logprobs",
    "max_model_len",
    "override_generation_config",
    "reasoning_parser",
    "tokenizer",
    "tool_call_parser",
)
"""Arguments a client can tell apart: whatever backend a session lands on, they must be the same."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TYPO_RATIO = 0.9
"""From here on (difflib's ratio) an unknown variable is taken for a misspelt one."""


@dataclass
class Machine:
    """One machine of the inventory: its groups, the variables of READ that are defined, those that cannot be read (name to
    reason), and the names of all its variables."""

    worker: bool = False
    balancer: bool = False
    vars: dict[str, Any] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()


def inventory_findings(
    machines: Mapping[str, Machine], presets: Mapping[str, Any], known_variables: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Everything the rules find, errors first, cluster before machines.

    `presets` is what resolve_deployments wants, `known_variables` are the names that roles know beside CONTRACT.
    """
    findings: list[dict[str, Any]] = []
    resolved: dict[str, dict[str, dict]] = {}
    known = sorted({*CONTRACT, *known_variables})
    for name, machine in machines.items():
        findings += _variable_findings(name, machine, known)
        findings += _address_findings(name, machine)
        if machine.worker:
            deployments, faults = _resolved(name, machine, presets)
            resolved[name] = deployments
            findings += faults
            findings += _sharing_findings(name, machine, deployments)
    findings += _service_findings(machines)
    findings += _agreement_findings(resolved)
    findings += _one_address_findings(machines)
    findings += _group_findings(machines, resolved)
    order = {"error": 0, "warning": 1}
    return sorted(findings, key=lambda f: (order[f["level"]], f["machine"] is not None, f["machine"] or ""))


def lines(findings: Iterable[Mapping[str, Any]], level: str) -> list[str]:
    """The findings of one level as lines: where, what is wrong, what to do. What is wrong on many machines is one line."""
    places: dict[str, list[str]] = {}
    for finding in findings:
        if finding["level"] == level:
            remedy = f"; {finding['remedy']}" if finding.get("remedy") else ""
            machines = places.setdefault(finding["message"] + remedy, [])
            machines += [finding["machine"]] if finding.get("machine") else []
    return [f"{_some(machines)}: {text}" if machines else text for text, machines in places.items()]


def service_address(variables: Mapping[str, Any]) -> str | None:
    """Where a machine's backends listen: `service_address`, else `ansible_host` where that is an IP, else None."""
    chosen = variables.get("service_address")
    if chosen is not None:
        return str(chosen)
    connection = variables.get("ansible_host")
    return str(connection) if _ip(connection) is not None else None


def _finding(machine: str | None, check: str, message: str, remedy: str, level: str = "error") -> dict[str, Any]:
    return {"level": level, "machine": machine, "check": check, "message": message, "remedy": remedy}


def _variable_findings(name: str, machine: Machine, known: list[str]) -> list[dict[str, Any]]:
    findings = [
        _finding(name, "variable", f"{variable} cannot be read: {reason}", "define what it refers to")
        for variable, reason in sorted(machine.unreadable.items())
    ]
    for variable in sorted(set(machine.names) - set(known)):
        like = difflib.get_close_matches(variable, known, n=1, cutoff=TYPO_RATIO)
        if like:
            remedy = f"did you mean {like[0]}? Rename it, even if it is a variable of your own"
            findings.append(_finding(name, "variable", f"no variable is called {variable}", remedy))
    quarantined = machine.vars.get("quarantined_devices", [])
    if not isinstance(quarantined, list) or not all(type(device) is int and device >= 0 for device in quarantined):
        remedy = "write a list of device ids: quarantined_devices: [6]"
        findings.append(_finding(name, "variable", f"quarantined_devices is {quarantined!r}", remedy))
    cluster = machine.vars.get("cluster_name", "llmops")
    findings += [
        _finding(name, "name", f"{what} {value!r} cannot be part of a file name", "use letters, digits, dots and single dashes")
        for what, value in (("cluster_name", cluster), ("machine", name))
        if not _is_name(value)
    ]
    return findings


def _address_findings(name: str, machine: Machine) -> list[dict[str, Any]]:
    findings = []
    address = service_address(machine.vars)
    if "service_address" in machine.unreadable or "ansible_host" in machine.unreadable:
        return findings
    if address is None:
        host = machine.vars.get("ansible_host", name)
        findings.append(
            _finding(
                name,
                "address",
                f"service_address is not set, and ansible_host {host!r} is no IP address",
                "set service_address to the IP the machine is reached at by its load balancer and clients",
            )
        )
    elif not _is_reachable(address):
        findings.append(
            _finding(
                name,
                "address",
                f"service_address {address!r} is no IP address other machines can reach",
                "set it to one of the machine's own addresses",
            )
        )
    data = machine.vars.get("data_address")
    if data is not None and not _is_reachable(data):
        findings.append(
            _finding(
                name,
                "address",
                f"data_address {data!r} is no IP address other machines can reach",
                "set it to the machine's address in the network models travel on, or leave it out",
            )
        )
    return findings


def _resolved(
    name: str, machine: Machine, presets: Mapping[str, Any]
) -> tuple[dict[str, dict], list[dict[str, Any]]]:
    """The machine's deployments that are in order, and what is wrong with the others."""
    read = {key: machine.vars.get(key) or {} for key in ("deployments", "deployment_overrides", "services")}
    for key, value in read.items():
        if not isinstance(value, dict):
            return {}, [_finding(name, "variable", f"{key} is {type(value).__name__}", "write a dictionary")]
    deployments, faults = resolve_deployments(
        read["deployments"],
        read["deployment_overrides"],
        dict(presets),
        None if "services" in machine.unreadable else read["services"],
        machine.vars.get("image_registry") or "",
    )
    findings = [_finding(name, "deployment", fault["message"], "", fault["level"]) for fault in faults]
    for deployment in deployments.values():
        findings += [
            _finding(name, "arguments", fault["message"], "", fault["level"]) for fault in check_arguments(deployment)
        ]
    return deployments, findings


def _sharing_findings(name: str, machine: Machine, deployments: Mapping[str, dict]) -> list[dict[str, Any]]:
    """Two deployments of one machine that want the same devices or ports, as far as that can be known beforehand."""
    findings = _size_findings(name, deployments)
    ports = _ports(deployments)
    for one, other in combinations(deployments.values(), 2):
        if _compete(one, other):
            findings.append(
                _finding(
                    name,
                    "devices",
                    f"deployments {one['name']} ({_wish(one)}) and {other['name']} ({_wish(other)}) want the same devices",
                    "give each its own list in `devices`, or a number in `instances`",
                )
            )
        shared = set(ports[one["name"]]) & set(ports[other["name"]])
        if shared:
            free = max(ports[one["name"]].stop, ports[other["name"]].stop)
            findings.append(
                _finding(
                    name,
                    "ports",
                    f"deployments {one['name']} and {other['name']} both want port {min(shared)}",
                    f"set another first_port for one of them, e.g. {free}",
                )
            )
    services = machine.vars.get("services")
    if machine.balancer and isinstance(services, dict):
        for service, definition in services.items():
            port = definition.get("listen_port") if isinstance(definition, dict) else None
            findings += [
                _finding(
                    name,
                    "ports",
                    f"service {service} listens on port {port}, which deployment {deployment} wants for an instance",
                    "set another first_port or listen_port",
                )
                for deployment, wanted in ports.items()
                if port in wanted
            ]
    return findings


def _size_findings(name: str, deployments: Mapping[str, dict]) -> list[dict[str, Any]]:
    """Deployments of one machine that together ask for more devices than it is said to have."""
    expected = max((d["expected_devices"] or 0 for d in deployments.values()), default=0)
    listed = {device for d in deployments.values() if d["devices"] != "all" for device in d["devices"]}
    asked = len(listed) + sum(
        d["instances"] * d["devices_per_instance"]
        for d in deployments.values()
        if d["devices"] == "all" and d["instances"] != "all"
    )
    if not expected or asked <= expected:
        return []
    wishes = ", ".join(f"{d['name']} ({_wish(d)})" for d in deployments.values())
    return [
        _finding(
            name,
            "devices",
            f"{asked} devices are asked for by {wishes}, expected_devices is {expected}",
            "lower `instances` or shorten `devices`, or correct expected_devices",
        )
    ]


def _compete(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two deployments cannot both be had: lists that share a device, or two that want all there is.

    Beside a list, `all` means the rest; beside a number of instances, what that leaves.
    """
    lists = [set(d["devices"]) for d in (one, other) if d["devices"] != "all"]
    if len(lists) == 2:
        return bool(lists[0] & lists[1])
    return not lists and one["instances"] == other["instances"] == "all"


def _counts(deployments: Mapping[str, Mapping[str, Any]]) -> dict[str, int | None]:
    """How many instances each deployment of a machine gets, None where only the machine knows. As placement counts."""
    listed = {device for d in deployments.values() if d["devices"] != "all" for device in d["devices"]}
    numbered = sum(
        d["instances"] * d["devices_per_instance"]
        for d in deployments.values()
        if d["devices"] == "all" and d["instances"] != "all"
    )
    expected = max((d["expected_devices"] or 0 for d in deployments.values()), default=0)
    counts: dict[str, int | None] = {}
    for name, deployment in deployments.items():
        size = deployment["devices_per_instance"]
        if deployment["instances"] != "all":
            counts[name] = deployment["instances"]
        elif deployment["devices"] != "all":
            counts[name] = len(deployment["devices"]) // size
        else:
            counts[name] = max(expected - len(listed) - numbered, 0) // size if expected else None
    return counts


def _ports(deployments: Mapping[str, Mapping[str, Any]]) -> dict[str, range]:
    """The ports each deployment certainly wants."""
    return {
        name: range(deployments[name]["first_port"], deployments[name]["first_port"] + (1 if count is None else count))
        for name, count in _counts(deployments).items()
    }


def possible_names(deployments: Mapping[str, Mapping[str, Any]], unknown_count: int = 16) -> list[str]:
    """The names instances may get; `unknown_count` for each deployment of which only the machine knows how many it has."""
    return [
        f"{name}-{index}"
        for name, count in _counts(deployments).items()
        for index in range(unknown_count if count is None else count)
    ]


def _wish(deployment: Mapping[str, Any]) -> str:
    devices = deployment["devices"]
    shown = "all" if devices == "all" else "[" + ", ".join(map(str, devices)) + "]"
    return f"devices {shown}, instances {deployment['instances']} of {deployment['devices_per_instance']}"


def _service_findings(machines: Mapping[str, Machine]) -> list[dict[str, Any]]:
    """Every service once: they are the cluster's, and the same on all machines."""
    findings: list[dict[str, Any]] = []
    first: dict[str, tuple[str, Any]] = {}
    for name, machine in machines.items():
        services = machine.vars.get("services") or {}
        if not isinstance(services, dict):
            findings.append(_finding(name, "service", f"services is {type(services).__name__}", "write a dictionary"))
            continue
        for service, definition in services.items():
            if service not in first:
                first[service] = (name, definition)
                findings += _definition_findings(service, definition)
            elif definition != first[service][1]:
                other, known = first[service]
                findings.append(
                    _finding(
                        None,
                        "service",
                        f"service {service} is not the same on {other} and {name}: {_difference(known, definition)} differs",
                        "define `services` once, in all.vars",
                    )
                )
    by_port: dict[int, list[str]] = {}
    for service, (_machine, definition) in first.items():
        if isinstance(definition, dict) and _is_port(definition.get("listen_port")):
            by_port.setdefault(definition["listen_port"], []).append(service)
    findings += [
        _finding(None, "service", f"services {' and '.join(names)} both listen on port {port}", "give each its own listen_port")
        for port, names in sorted(by_port.items())
        if len(names) > 1
    ]
    return findings


def _definition_findings(service: str, definition: Any) -> list[dict[str, Any]]:
    where = f"services.{service}"
    if not isinstance(definition, dict):
        remedy = "write a dictionary with listen_port and api_key"
        return [_finding(None, "service", f"{where} is {type(definition).__name__}", remedy)]
    findings = []
    if not _is_name(service):
        remedy = "use letters, digits, dots, underscores and single dashes"
        findings.append(_finding(None, "name", f"service {service!r} cannot be part of a file name", remedy))
    for key in definition:
        if key not in SERVICE_KEYS:
            like = difflib.get_close_matches(str(key), SERVICE_KEYS, n=1, cutoff=0.6)
            remedy = f"did you mean {like[0]}?" if like else f"there are {', '.join(SERVICE_KEYS)}"
            findings.append(_finding(None, "service", f"{where}.{key}: a service has no such key", remedy))
    port = definition.get("listen_port")
    if not _is_port(port):
        shown = "missing" if port is None else repr(port)
        findings.append(_finding(None, "service", f"{where}.listen_port is {shown}", "write a port number, 1 to 65535"))
    policy = definition.get("policy", "session")
    if policy not in POLICIES:
        like = difflib.get_close_matches(str(policy), POLICIES, n=1, cutoff=0.6)
        remedy = f"did you mean {like[0]}?" if like else f"use one of {', '.join(POLICIES)}"
        findings.append(_finding(None, "service", f"{where}.policy {policy!r} does not exist", remedy))
    fault = _key_fault(definition.get("api_key"))
    if fault:
        findings.append(_finding(None, "api key", f"{where}.api_key {fault[0]}", fault[1]))
    return findings


def _key_fault(key: Any) -> tuple[str, str] | None:
    """What is wrong with an API key, and what to do; the key itself is not in it."""
    if key is None or key == "":
        return "is missing", "set it from a vault variable, or say `api_key: none` to serve without one"
    if not isinstance(key, str):
        return f"is {type(key).__name__}, not a text", "put it in quotes"
    if "\n" in key or "\r" in key:
        return "holds a line break, which no header and no environment file can", "store it in one line (check `|` and `>` in the vault)"
    if not all(" " <= character <= "~" for character in key) or key != key.strip():
        return "holds characters or outer blanks that do not travel in HTTP headers", "use printable ASCII without outer blanks"
    return None


def _agreement_findings(resolved: Mapping[str, Mapping[str, dict]]) -> list[dict[str, Any]]:
    """Deployments of one service that clients could tell apart."""
    members: dict[str, list[tuple[str, dict]]] = {}
    for machine, deployments in resolved.items():
        for deployment in deployments.values():
            if deployment["service"] is not None:
                members.setdefault(deployment["service"], []).append((machine, deployment))
    findings = []
    for service, backends in sorted(members.items()):
        for key in ("model", *SAME_ARGUMENTS):
            values: dict[str, list[str]] = {}
            for machine, deployment in backends:
                value = deployment["served_names"] if key == "model" else deployment["args"].get(key)
                values.setdefault(_shown(value), []).append(f"{deployment['name']} on {machine}")
            if len(values) > 1:
                said = "; ".join(f"{value} in {_some(places)}" for value, places in values.items())
                what = "model" if key == "model" else f"args.{key}"
                findings.append(
                    _finding(
                        None,
                        "service",
                        f"the deployments of service {service} differ in {what}: {said}",
                        "make them equal, or put them behind services of their own",
                    )
                )
    return findings


def _one_address_findings(machines: Mapping[str, Machine]) -> list[dict[str, Any]]:
    """Two machines that claim one address."""
    findings = []
    claimed: dict[tuple[str, str], str] = {}
    for name, machine in machines.items():
        service = service_address(machine.vars)
        for variable, address in (("service_address", service), ("data_address", machine.vars.get("data_address", service))):
            ip = _ip(address)
            if ip is None:
                continue
            owner = claimed.setdefault((variable, str(ip)), name)
            if owner != name:
                findings.append(
                    _finding(name, "address", f"{variable} {ip} is also that of {owner}", "give each machine its own")
                )
    return findings


def _group_findings(machines: Mapping[str, Machine], resolved: Mapping[str, Mapping[str, dict]]) -> list[dict[str, Any]]:
    """Services without a load balancer."""
    if any(machine.balancer for machine in machines.values()):
        return []
    joined = sorted({d["service"] for deployments in resolved.values() for d in deployments.values()} - {None})
    return [
        _finding(
            None,
            "service",
            f"services {', '.join(joined)} have no load balancer",
            "put a machine in group load_balancers, or set `service: null` in the deployments",
        )
        for _once in joined[:1]
    ]


def _is_name(value: Any) -> bool:
    """Two dashes separate the parts of a backend file's name."""
    return isinstance(value, str) and bool(NAME.fullmatch(value)) and "--" not in value


def _is_port(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 65535


def _ip(value: Any) -> Any:
    try:
        return ipaddress.ip_address(str(value))
    except ValueError:
        return None


def _is_reachable(value: Any) -> bool:
    ip = _ip(value)
    return ip is not None and not (ip.is_unspecified or ip.is_loopback or ip.is_multicast)


def _difference(one: Any, other: Any) -> str:
    """Which keys of two definitions differ; their values may be secret."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return "its kind"
    return ", ".join(sorted(str(key) for key in {*one, *other} if one.get(key) != other.get(key)))


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _some(places: list[str], most: int = 3) -> str:
    rest = len(places) - most
    return ", ".join(places[:most]) + (f" and {rest} more" if rest > 0 else "")
