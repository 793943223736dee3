"""A small client of dockerd's own API on its socket, and the rules for dockerd's configuration file.

The API (https://docs.docker.com/reference/api/engine/) answers in JSON where the command line answers in prose, gives
an image's digest and architecture before anything is pulled, and takes credentials in a header, not in a file or an
argument.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import urllib.parse
from pathlib import Path
from typing import Any

from ansible_collections.llmops.ascend.plugins.module_utils.images import Reference
from ansible_collections.llmops.ascend.plugins.module_utils.ownership import LABEL_MANAGED_BY, MANAGER
from ansible_collections.llmops.ascend.plugins.module_utils.unix_http import UnixConnection

SOCKET = "/var/run/docker.sock"
CONFIGURATION_FILE = "/etc/docker/daemon.json"

# daemon.json has no comments: a label of the daemon is the mark that the file is ours. dockerd shows it in `docker
# info`.
LABEL = LABEL_MANAGED_BY + "=" + MANAGER

# dockerd(8), "configuration reload behavior": what SIGHUP applies. All else waits for dockerd's next start.
RELOADABLE = frozenset(
    {
        "debug",
        "labels",
        "live-restore",
        "max-concurrent-downloads",
        "max-concurrent-uploads",
        "max-download-attempts",
        "default-runtime",
        "runtimes",
        "authorization-plugins",
        "insecure-registries",
        "registry-mirrors",
        "shutdown-timeout",
        "features",
    }
)


class EngineError(Exception):
    """dockerd refused; the message is its own. status is the HTTP status, 0 for an error inside a running pull or
    load."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class EngineAbsent(Exception):
    """Nobody answers at dockerd's socket."""


class Engine:
    """dockerd behind its socket. timeout_s bounds the silence between two answers, not a whole pull."""

    def __init__(self, path: str = SOCKET, timeout_s: float = 600) -> None:
        self._path = path
        self._timeout_s = timeout_s

    def info(self) -> dict[str, Any]:
        """What `docker info` shows; raises EngineAbsent."""
        return self._json("GET", "/info")

    def image(self, name: str) -> dict[str, Any] | None:
        """The local image of that name as inspected, or None."""
        try:
            return self._json("GET", f"/images/{_quote(name)}/json")
        except EngineError as error:
            if error.status == 404:
                return None
            raise

    def registry_image(self, name: str, auth: str | None = None) -> tuple[str, list[str]]:
        """What the registry has under that name, without pulling it: (digest, architectures); raises EngineError."""
        answer = self._json("GET", f"/distribution/{_quote(name)}/json", auth)
        architectures = [item.get("architecture", "") for item in answer.get("Platforms") or []]
        return answer["Descriptor"]["digest"], [item for item in architectures if item and item != "unknown"]

    def pull(self, name: str, auth: str | None = None) -> None:
        """Pull an image; raises EngineError."""
        reference = Reference.parse(name)
        query = urllib.parse.urlencode({"fromImage": f"{reference.registry}/{reference.repository}", "tag": reference.version})
        self._stream("POST", "/images/create?" + query, auth=auth)

    def load(self, archive: str) -> None:
        """Load the images of an archive that docker save wrote, compressed or not; raises EngineError."""
        with Path(archive).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            headers = {"Content-Type": "application/x-tar", "Content-Length": str(size)}
            self._stream("POST", "/images/load?quiet=1", body=file, headers=headers)

    def remove(self, name: str) -> None:
        """Remove an image's name, and the image with its last name; raises EngineError when a container uses it."""
        self._json("DELETE", f"/images/{_quote(name)}")

    def _request(self, method: str, url: str, auth: str | None = None, body: Any = None, headers: dict | None = None):
        connection = UnixConnection(self._path, self._timeout_s)
        try:
            connection.request(method, url, body, {**(headers or {}), **({"X-Registry-Auth": auth} if auth else {})})
            response = connection.getresponse()
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise EngineAbsent(f"no dockerd answers at {self._path}") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"dockerd broke off: {error}") from error
        if response.status >= 400:
            text = response.read().decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["message"]
            raise EngineError(text, response.status)
        return response

    def _json(self, method: str, url: str, auth: str | None = None) -> Any:
        return json.loads(self._request(method, url, auth).read() or b"null")

    def _stream(self, method: str, url: str, **options: Any) -> None:
        """Follow a stream of JSON lines to its end; an error arrives as one of them, after HTTP said 200."""
        response = self._request(method, url, **options)
        try:
            for line in response:
                if line.strip():
                    progress = json.loads(line)
                    if "error" in progress:
                        raise EngineError(progress["error"])
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"dockerd broke off: {error}") from error


def _quote(name: str) -> str:
    return urllib.parse.quote(name, safe="/:@")


def is_ours(configuration: dict | None) -> bool:
    """Whether a daemon.json carries our mark."""
    return LABEL in ((configuration or {}).get("labels") or [])


def marked(configuration: dict) -> dict:
    """The configuration with our mark."""
    labels = [label for label in configuration.get("labels") or [] if label != LABEL]
    return {**configuration, "labels": [LABEL, *labels]}


def render(configuration: dict) -> str:
    """The text of daemon.json."""
    return json.dumps(configuration, indent=2, sort_keys=True) + "\n"


def waits_for_start(before: dict, after: dict) -> list[str]:
    """The keys whose change only dockerd's next start applies."""
    changed = (key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return sorted(key for key in changed if key not in RELOADABLE)


def accepts_plain_http(info: dict, registry: str) -> bool:
    """Whether dockerd (its /info) speaks plain HTTP with a registry (host or host:port)."""
    known = info.get("RegistryConfig") or {}
    index = (known.get("IndexConfigs") or {}).get(registry)
    if index is not None:
        return not index.get("Secure", True)
    try:
        address = ipaddress.ip_address(registry.rpartition(":")[0] or registry)
    except ValueError:
        return False
    return any(address in ipaddress.ip_network(network) for network in known.get("InsecureRegistryCIDRs") or [])


def not_applied(info: dict, configuration: dict) -> list[str]:
    """Keys of the configuration that the running dockerd does not follow yet, as far as its /info tells."""
    lacking = []
    if bool(configuration.get("live-restore")) != bool(info.get("LiveRestoreEnabled")):
        lacking.append("live-restore")
    # A network (198.51.100.0/24) is as good an entry as a registry's name.
    networks = (info.get("RegistryConfig") or {}).get("InsecureRegistryCIDRs") or []
    registries = configuration.get("insecure-registries") or []
    if any(entry not in networks and not accepts_plain_http(info, entry) for entry in registries):
        lacking.append("insecure-registries")
    return lacking


def foreign_findings(info: dict | None, registries: list[str], host: str) -> list[str]:
    """What an engine that is not ours lacks, one line each. info is None where it does not run."""
    advice = "it is not ours to change: set {0} in {1} and run `systemctl reload docker` there"
    findings = []
    if info is None:
        return [f"{host}: dockerd is installed but does not run, and is not ours to start: systemctl enable --now docker"]
    for key in not_applied(info, {"live-restore": True, "insecure-registries": registries}):
        if key == "live-restore":
            what, value = "restarting dockerd will stop every instance (no live-restore)", '"live-restore": true'
        else:
            what = "dockerd does not accept {} over plain HTTP".format(", ".join(registries))
            value = '"insecure-registries": ' + json.dumps(registries)
        findings.append(f"{host}: {what}; {advice.format(value, CONFIGURATION_FILE)}")
    return findings
