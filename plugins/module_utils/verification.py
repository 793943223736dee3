"""What is to be verified, and what came of it: between placement, the module endpoint_answers and the report.

A target is a dictionary of three parts:

    endpoint  what the module endpoint_answers is given
    expected  what expectations compare with: {name, machine, url, model, served_names, max_model_len (int or null), reasoning,
              tools, api_key (bool: whether one is asked for), service, sessions (int or null), sticky, backends ["ADDRESS:PORT"]}
    place     what the table says about it: {machine, instance, devices, numa_nodes, port, ...}

A row is a place with the verdict: {level, health, name, asked, met, unmet [{name, message}], seconds, answers}.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping
from urllib.parse import urlsplit

from ansible_collections.llmops.ascend.plugins.module_utils.expectations import judge

STICKY_POLICIES = ("session", "md5_modulo")


def backend_targets(
    instances: Iterable[Mapping[str, Any]],
    deployments: Mapping[str, Mapping[str, Any]],
    services: Mapping[str, Mapping[str, Any]],
    machine: str,
    level: str,
    full_for: Iterable[str],
    timeout_s: float,
) -> list[dict[str, Any]]:
    """The instances of one machine that are to be asked directly, at `level` or in full when named in `full_for`.

    Blocked instances are left out: the plan has said why they do not run.
    """
    full_for = set(full_for)
    targets = []
    for instance in instances:
        if instance["state"] != "placed":
            continue
        deployment = deployments[instance["deployment"]]
        place = {
            "machine": machine,
            "instance": instance["name"],
            "service": deployment["service"],
            "devices": instance["devices"],
            "numa_nodes": instance["numa_nodes"],
            "port": instance["port"],
        }
        url = _url(instance["address"], instance["port"])
        asked_level = "full" if instance["name"] in full_for else level
        targets.append(_target(instance["name"], url, asked_level, deployment, services, place, timeout_s))
    return targets


def service_targets(
    deployments: Iterable[Mapping[str, Mapping[str, Any]]],
    services: Mapping[str, Mapping[str, Any]],
    balancers: Mapping[str, str],
    backends: Iterable[Mapping[str, Any]],
    level: str,
    sessions: int,
    timeout_s: float,
    wait_s: float,
) -> list[dict[str, Any]]:
    """Every service that a deployment joins, through every load balancer.

    `deployments` are those of each machine, `balancers` maps machine to address, `backends` are the rows of backends asked before: over
    those that were healthy sessions must spread. Sessions are opened at level full only.
    """
    joined: dict[str, Mapping[str, Any]] = {}
    for deployment in (deployment for of_machine in deployments for deployment in of_machine.values()):
        if deployment["service"] is not None:
            joined.setdefault(deployment["service"], deployment)
    healthy: dict[str, list[str]] = {}
    for row in backends:
        if row["health"] == 200:
            healthy.setdefault(row["service"], []).append(urlsplit(row["url"]).netloc)
    targets = []
    for service, deployment in sorted(joined.items()):
        for machine, address in sorted(balancers.items()):
            port = services[service]["listen_port"]
            place = {"machine": machine, "service": service, "port": port}
            name = f"{service} through {machine}"
            target = _target(name, _url(address, port), level, deployment, services, place, timeout_s)
            target["endpoint"]["wait_s"] = wait_s
            if level == "full" and sessions:
                target["endpoint"]["sessions"] = target["expected"]["sessions"] = sessions
            target["expected"]["sticky"] = services[service].get("policy", "session") in STICKY_POLICIES
            target["expected"]["backends"] = sorted(healthy.get(service, ()))
            targets.append(target)
    return targets


def keys(targets: Iterable[Mapping[str, Any]], services: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The key of each endpoint that has one, by the endpoint's name. Secret: hand it to a no_log option and nowhere else."""
    return {
        target["endpoint"]["name"]: services[target["expected"]["service"]]["api_key"]
        for target in targets
        if target["expected"]["api_key"]
    }


def rows(
    targets: Iterable[Mapping[str, Any]],
    answers: Mapping[str, Mapping[str, Any]],
    expectations: Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Judge the answers of every target that was asked."""
    expectations = list(expectations)
    result = []
    for target in targets:
        answer = answers.get(target["endpoint"]["name"])
        if answer is None:
            continue
        verdict = judge(answer, target["expected"], expectations)
        health, names = answer["health"]["status"], answer["models"]["names"]
        result.append(
            dict(
                target["place"],
                url=target["endpoint"]["url"],
                level=answer["level"],
                health=health if health is not None else "none",
                name=names[0] if names else None,
                checks=f"{verdict['met']}/{verdict['asked']}",
                seconds=answer["seconds"],
                answers=answer,
                **verdict,
            )
        )
    return result


def unmet_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line per unmet expectation: where, what is wrong, what to do."""
    return [
        f"{row['machine']}: {row.get('instance') or 'service ' + row['service']} ({row['url']}): {unmet['message']}"
        for row in rows
        for unmet in row["unmet"]
    ]


def distribution(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How new sessions spread over backends: rows {service, machine, backend, sessions, share ("12.5 %")}."""
    spread = []
    for row in rows:
        backends = (row["answers"].get("sessions") or {}).get("backends") or {}
        total = sum(backends.values())
        spread += [
            {
                "service": row["service"],
                "machine": row["machine"],
                "backend": backend,
                "sessions": count,
                "share": f"{100 * count / total:.1f} %",
            }
            for backend, count in sorted(backends.items())
        ]
    return spread


def report(backends: list[dict[str, Any]], services: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything in one document: {schema: 1, ok, asked, met, unmet [lines], backends [rows], services [rows], distribution}."""
    everything = backends + services
    unmet = unmet_lines(everything)
    return {
        "schema": 1,
        "ok": not unmet,
        "asked": sum(row["asked"] for row in everything),
        "met": sum(row["met"] for row in everything),
        "unmet": unmet,
        "backends": backends,
        "services": services,
        "distribution": distribution(services),
    }


def _target(
    name: str,
    url: str,
    level: str,
    deployment: Mapping[str, Any],
    services: Mapping[str, Mapping[str, Any]],
    place: dict[str, Any],
    timeout_s: float,
) -> dict[str, Any]:
    arguments = deployment["args"]
    # Random weights answer, but neither think nor call.
    sensible = arguments.get("load_format") != "dummy"
    reasoning = sensible and bool(arguments.get("reasoning_parser"))
    tools = sensible and bool(arguments.get("enable_auto_tool_choice") and arguments.get("tool_call_parser"))
    longest = arguments.get("max_model_len")
    service = deployment["service"]
    return {
        "endpoint": {
            "name": name,
            "url": url,
            "model": deployment["model"],
            "level": level,
            "reasoning": reasoning,
            "tools": tools,
            "sessions": 0,
            "timeout_s": timeout_s,
            "wait_s": 0,
        },
        "expected": {
            "name": name,
            "machine": place["machine"],
            "url": url,
            "service": service,
            "model": deployment["model"],
            "served_names": list(deployment["served_names"]),
            # vLLM also takes "auto" and "256k": what they come to is the engine's to say.
            "max_model_len": longest if isinstance(longest, int) and longest > 0 else None,
            "reasoning": reasoning,
            "tools": tools,
            "sessions": None,
            "api_key": service is not None and services[service]["api_key"] != "none",
        },
        "place": place,
    }


def _url(address: str, port: int) -> str:
    """An IPv6 address stands in brackets in a URL (RFC 3986 section 3.2.2)."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
