# Copyright (c) llmops.ascend authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a load balancer knows: backend files, and its own word over the admin socket.

A backend file says which instances one machine offers to one service of one cluster:

    {"schema": 1, "cluster": "prod", "service": "qwen3.8-27b", "machine": "machine66",
     "backends": [{"id": "machine66:8000", "instance": "qwen38-tp2-0", "address": "198.18.254.66", "port": 8000,
                   "model": "Qwen3.8-27B-W8A8", "weight": 1, "max_concurrent": 32}]}

Membership stands in these files and is Ansible's; drains are the balancer's own, changed only through its socket.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
from pathlib import Path
from typing import Any, Iterable, NamedTuple

from ansible_collections.llmops.ascend.plugins.module_utils.unix_http import UnixConnection

SCHEMA = 1
BACKENDS_DIRECTORY = "/etc/llmops/load_balancer/backends"
COPIES_DIRECTORY = "/var/lib/llmops/backends"
ADMIN_SOCKET = "/run/llmops/load_balancer/admin.sock"

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._]|-(?![-]|\Z))*")
_BACKEND_FIELDS = {"id", "instance", "address", "port", "model", "weight", "max_concurrent"}


class LoadBalancerError(Exception):
    """One line: what is wrong, with which value, what to do."""


class BalancerUnreachable(LoadBalancerError):
    """Nothing answers on the admin socket: the balancer is not running."""


class Refused(LoadBalancerError):
    """The balancer answered and said no."""


class BackendFile(NamedTuple):
    """A backend file on disk: `content` is None and `error` a line when it is unusable; `modified` is its mtime (s)."""

    path: Path
    content: dict[str, Any] | None
    error: str | None
    modified: float


# --- content ---------------------------------------------------------------------------------------------------------


def check_name(what: str, value: Any) -> str:
    """Returns a cluster, service or machine name that is fit to be part of a file name.

    "--" separates the parts of a file's name and so cannot stand inside one.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise LoadBalancerError(
            f"{what} '{value}' is not a name: use letters, digits, dots, underscores and single hyphens"
        )
    return value


def check_backend(backend: Any) -> dict[str, Any]:
    """Returns a backend with its defaults filled in; raises LoadBalancerError with its id and the wrong value."""
    if not isinstance(backend, dict) or not backend.get("id"):
        raise LoadBalancerError(f"backend {backend!r} has no id: it is <machine>:<port>")
    identity = backend["id"]
    unknown = sorted(set(backend) - _BACKEND_FIELDS)
    if unknown:
        raise LoadBalancerError(f"backend {identity}: unknown field {', '.join(unknown)}")
    try:
        ipaddress.ip_address(backend.get("address"))
    except ValueError:
        raise LoadBalancerError(
            f"backend {identity}: address '{backend.get('address')}' is not an IP address; set service_address"
        ) from None
    port, weight = backend.get("port"), backend.get("weight", 1)
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise LoadBalancerError(f"backend {identity}: port '{port}' is not one of 1 to 65535")
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not weight > 0:
        raise LoadBalancerError(f"backend {identity}: weight '{weight}' is not a number above 0")
    return {**backend, "weight": int(weight) if weight == int(weight) else weight}


def backend_file(cluster: str, service: str, machine: str, backends: Iterable[Any]) -> dict[str, Any]:
    """The content of one backend file, checked, backends ordered by port."""
    checked = sorted((check_backend(backend) for backend in backends), key=lambda backend: backend["port"])
    identities = [backend["id"] for backend in checked]
    for identity in identities:
        if identities.count(identity) > 1:
            raise LoadBalancerError(f"backend {identity} of service {service} stands there twice")
    return {
        "schema": SCHEMA,
        "cluster": check_name("cluster", cluster),
        "service": check_name("service", service),
        "machine": check_name("machine", machine),
        "backends": checked,
    }


def parse(text: str) -> dict[str, Any]:
    """The content of a backend file's text; raises LoadBalancerError when it breaks the schema."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise LoadBalancerError(f"not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise LoadBalancerError(f"schema is not {SCHEMA}")
    backends = data.get("backends")
    if not isinstance(backends, list):
        raise LoadBalancerError("backends is not a list")
    return backend_file(data.get("cluster"), data.get("service"), data.get("machine"), backends)


def render(content: dict[str, Any]) -> str:
    """The text of a backend file; the same content always gives the same text."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def file_name(content: dict[str, Any]) -> str:
    """The name of a backend file: <cluster>--<service>--<machine>.json."""
    return "--".join(content[part] for part in ("cluster", "service", "machine")) + ".json"


def without(content: dict[str, Any], ids: Iterable[str]) -> dict[str, Any]:
    """A backend file's content without the named backends."""
    gone = set(ids)
    return {**content, "backends": [backend for backend in content["backends"] if backend["id"] not in gone]}


def registrations(
    instances: Iterable[dict[str, Any]], deployments: dict[str, dict[str, Any]], machine: str, address: str
) -> list[dict[str, Any]]:
    """What a machine registers: [{service, backends}], from its placed instances and its resolved deployments.

    Instances that are blocked and deployments without a service are left out. Every service of the deployments is
    there, if need be with no backend, so that a file never promises what is not placed any more.
    """
    by_service: dict[str, list[dict[str, Any]]] = {
        deployment["service"]: [] for deployment in deployments.values() if deployment.get("service")
    }
    for instance in instances:
        deployment = deployments[instance["deployment"]]
        if not deployment.get("service") or instance.get("state", "placed") != "placed":
            continue
        backend = {
            "id": f"{machine}:{instance['port']}",
            "instance": instance["name"],
            "address": address,
            "port": instance["port"],
            "weight": deployment.get("weight", 1),
        }
        if deployment.get("model"):
            backend["model"] = deployment["model"]
        if deployment.get("max_concurrent"):
            backend["max_concurrent"] = deployment["max_concurrent"]
        by_service[deployment["service"]].append(backend)
    return [{"service": service, "backends": backends} for service, backends in sorted(by_service.items())]


# --- files -----------------------------------------------------------------------------------------------------------


def read_directory(directory: str) -> list[BackendFile]:
    """Every backend file of a directory by name; none when the directory is missing."""
    files = []
    for path in sorted(Path(directory).glob("[!.]*.json")):
        content, error = None, None
        try:
            content = parse(path.read_text(encoding="utf-8"))
        except (LoadBalancerError, OSError, UnicodeDecodeError) as problem:
            error = str(problem)
        files.append(BackendFile(path, content, error, path.stat().st_mtime))
    return files


def purgeable(files: Iterable[BackendFile], cluster: str, machines: Iterable[str], confirm: bool) -> list[BackendFile]:
    """The files of a cluster whose machine is not among `machines`.

    Refuses to name more than half of the cluster's files unless confirmed: a shortened inventory looks just like that.
    """
    ours = [file for file in files if file.content and file.content["cluster"] == cluster]
    known = set(machines)
    gone = [file for file in ours if file.content["machine"] not in known]
    if len(gone) * 2 > len(ours) and not confirm:
        names = ", ".join(sorted({file.content["machine"] for file in gone}))
        raise LoadBalancerError(
            f"{len(gone)} of {len(ours)} backend files of cluster {cluster} belong to machines that are not in the "
            f"inventory ({names}): confirm the purge if they are really gone"
        )
    return gone


def newer(files: Iterable[BackendFile], offered: Iterable[dict[str, Any]], cluster: str) -> list[dict[str, Any]]:
    """Which offered files ({content, modified}) of a cluster to take: those missing here, unreadable here, or
    different and written later elsewhere. Of several offers for one file the latest counts."""
    here = {file.path.name: file for file in files}
    latest: dict[str, dict[str, Any]] = {}
    for offer in offered:
        content = parse(json.dumps(offer["content"]))
        name = file_name(content)
        if content["cluster"] == cluster and offer["modified"] > latest.get(name, {"modified": -1})["modified"]:
            latest[name] = {"content": content, "modified": offer["modified"]}
    taken = []
    for name, offer in sorted(latest.items()):
        present = here.get(name)
        if (
            present is None
            or present.content is None
            or (present.content != offer["content"] and offer["modified"] > present.modified)
        ):
            taken.append(offer)
    return taken


# --- the running balancer --------------------------------------------------------------------------------------------


class Balancer:
    """The admin socket of a load balancer."""

    def __init__(self, path: str = ADMIN_SOCKET, timeout_s: float = 10) -> None:
        self.path = path
        self.timeout_s = timeout_s

    def _ask(self, method: str, target: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        connection = UnixConnection(self.path, self.timeout_s)
        try:
            connection.request(method, target, json.dumps(body) if body is not None else None)
            response = connection.getresponse()
            answer = json.loads(response.read().decode("utf-8"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BalancerUnreachable(f"the load balancer does not answer on {self.path}: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise Refused(answer.get("error", {}).get("message", f"HTTP {response.status}"))
        return answer

    def status(self) -> dict[str, Any]:
        """{configuration, services: {name: {status, counts, backends: {id: {...}}}}, files, errors}.

        Lua writes an empty list as an empty object; nothing here is a list.
        """
        return self._ask("GET", "/status")

    def backends(self, service: str) -> dict[str, dict[str, Any]]:
        """A service's backends by id: {id, machine, address, port, model, state, in_flight, ...}; none if unknown."""
        return self.status()["services"].get(service, {}).get("backends", {})

    def drain(
        self, service: str, ids: Iterable[str], max_unavailable: int | None = None, by: str | None = None
    ) -> list[str]:
        """Sends new requests elsewhere; returns the ids that were not drained before. Refused: max_unavailable."""
        order: dict[str, Any] = {"service": service, "ids": sorted(ids)}
        if by is not None:
            order["by"] = by
        if max_unavailable is not None:
            order["max_unavailable"] = max_unavailable
        return list(self._ask("POST", "/drain", order)["changed"])

    def activate(self, service: str, ids: Iterable[str], by: str | None = None) -> list[str]:
        """Ends drains, those of one maker where `by` is given; returns the ids that were drained."""
        order: dict[str, Any] = {"service": service, "ids": sorted(ids)}
        if by is not None:
            order["by"] = by
        return list(self._ask("POST", "/activate", order)["changed"])
