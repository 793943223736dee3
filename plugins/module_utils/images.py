"""Container images: their names, what an image says of itself, and what a registry's refusal means.

Formats: image references as in distribution's reference grammar; images as ``GET /images/{name}/json`` of the Docker
Engine API gives them; archives as ``docker save`` writes them.
"""

from __future__ import annotations

import base64
import json
import re
import tarfile
from dataclasses import dataclass
from typing import Mapping

DEFAULT_REGISTRY = "docker.io"

_REPOSITORY = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$")
_TAG = re.compile(r"\w[\w.-]{0,127}$")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}$")

# What the kernel calls a processor, and what image formats call it.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "loongarch64": "loong64"}

# Where an engine image may say which vLLM it holds, the first that is there. Huawei's own do not say it; images that a
# site builds can, by the label. (org.opencontainers.image.version is the base image's.)
_VERSION_VARIABLES = ("VLLM_VERSION", "VLLM_TAG")
_VERSION_LABELS = ("llmops.vllm-version", "vllm.version")


class ImageError(Exception):
    """An image cannot be had or used; the message is one line for the operator."""


@dataclass(frozen=True)
class Reference:
    """An image's name, taken apart; tag or digest are None where the name has none, and tag is latest without both."""

    registry: str
    repository: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, name: str) -> Reference:
        """Take a name apart as docker does; raises ImageError for what is none."""
        rest, at, digest = name.partition("@")
        head, slash, tail = rest.partition("/")
        if slash and ("." in head or ":" in head or head == "localhost"):
            registry, path = head, tail
        else:
            registry, path = DEFAULT_REGISTRY, rest
        path, _, tag = path.partition(":")
        legal = _REPOSITORY.match(path) and (not tag or _TAG.match(tag)) and (not at or _DIGEST.match(digest))
        if not legal:
            raise ImageError(f"{name!r} is not an image name: it reads [registry/]name[:tag][@sha256:digest], no capitals")
        if registry == DEFAULT_REGISTRY and "/" not in path:
            path = "library/" + path
        return cls(registry, path, tag or (None if digest else "latest"), digest or None)

    @property
    def source(self) -> str:
        """Registry and repository, which is what a digest belongs to."""
        return self.registry + "/" + self.repository

    @property
    def version(self) -> str:
        """What to ask the registry for: the digest if the name has one, else the tag."""
        return self.digest or self.tag or "latest"


def machine_architecture(machine: str) -> str:
    """The image architecture (amd64, arm64) for a processor as uname names it."""
    return _ARCHITECTURES.get(machine, machine)


def describe(name: str, image: dict) -> dict:
    """What others need of an inspected image.

    Returns {id, digest, architecture, os, size (bytes), env {}, labels {}, vllm_version}; digest is the registry's
    for this name's repository, None for an image that never saw a registry; vllm_version is None where the image does
    not say.
    """
    configuration = image.get("Config") or {}
    env = dict(item.partition("=")[::2] for item in configuration.get("Env") or [])
    labels = configuration.get("Labels") or {}
    source = Reference.parse(name).source
    digests = [item.partition("@")[2] for item in image.get("RepoDigests") or [] if Reference.parse(item).source == source]
    return {
        "id": image["Id"],
        "digest": digests[0] if digests else None,
        "architecture": image.get("Architecture") or None,
        "os": image.get("Os") or None,
        "size": image.get("Size") or 0,
        "env": env,
        "labels": labels,
        "vllm_version": vllm_version(env, labels),
    }


def vllm_version(env: Mapping[str, str], labels: Mapping[str, str]) -> str | None:
    """The vLLM version an image says it holds ("0.23.0", without a leading v), or None."""
    said = [env.get(key) for key in _VERSION_VARIABLES] + [labels.get(key) for key in _VERSION_LABELS]
    for version in said:
        found = re.match(r"v?(\d+\.\d+.*)$", version or "")
        if found:
            return found.group(1)
    return None


def wrong_architecture(name: str, architecture: str | None, machine: str, host: str) -> str | None:
    """The operator's line when an image is not for this machine's processors; None when it fits or does not say."""
    if not architecture or architecture == machine:
        return None
    return f"image {name} is {architecture}, {host} is {machine}: name one that is built for {machine}"


def registry_credentials(configuration: dict, registry: str) -> dict[str, str] | None:
    """The credentials that docker's own configuration (config.json) holds in plain for a registry, or None.

    Returns {username, password, serveraddress} or {identitytoken, serveraddress}.
    """
    keys = [registry, "https://" + registry]
    if registry == DEFAULT_REGISTRY:
        keys.append("https://index.docker.io/v1/")
    for key in keys:
        entry = (configuration.get("auths") or {}).get(key) or {}
        if entry.get("identitytoken"):
            return {"identitytoken": entry["identitytoken"], "serveraddress": registry}
        if entry.get("auth"):
            username, _, password = base64.b64decode(entry["auth"]).decode().partition(":")
            return {"username": username, "password": password, "serveraddress": registry}
    return None


def credential_helper(configuration: dict, registry: str) -> str | None:
    """NAME of the helper program docker-credential-NAME that docker's configuration names for a registry, or None."""
    return (configuration.get("credHelpers") or {}).get(registry) or configuration.get("credsStore")


def registry_auth(credentials: Mapping[str, str]) -> str:
    """Credentials as the Docker Engine API takes them (X-Registry-Auth)."""
    return base64.urlsafe_b64encode(json.dumps(dict(credentials)).encode()).decode()


# What dockerd says when it does not get an image, and what that means to the operator; the first that fits is meant.
_REFUSALS = (
    (
        "no space left on device",
        "disk full on {host} while getting {name}: make room in dockerd's data directory (docker system df) and run again",
    ),
    (
        "server gave http response to https client",
        "registry {registry} speaks plain HTTP, which dockerd on {host} refuses: add it to container_engine_insecure_registries",
    ),
    (
        "no matching manifest|does not match the specified platform",
        "image {name} is not built for {host}, which is {machine}: name one that is",
    ),
    (
        "manifest unknown|manifest for .* not found|name unknown|repository name not known",
        "registry {registry} has no image {name}, which {host} is to run: check the name, or push it there",
    ),
    (
        "unauthorized|denied|authentication required|no basic auth",
        "registry {registry} refuses {name} to {host}: check engine_image_username and engine_image_password, or docker login there",
    ),
    (
        "x509|certificate",
        "{host} does not trust the certificate of registry {registry}: put its CA in /etc/docker/certs.d/{registry}/ca.crt",
    ),
    (
        r"connection refused|no such host|time.?out|timed out|no route|unreachable|deadline exceeded|\beof\b|lookup ",
        "registry {registry} is unreachable from {host}: check it, its address and image_registry ({said})",
    ),
)


def explain(name: str, said: str, host: str, machine: str) -> str:
    """The operator's line for what dockerd said when asked for an image; machine is the host's architecture."""
    said = " ".join(said.split())[-200:]
    meaning = next((text for pattern, text in _REFUSALS if re.search(pattern, said, re.IGNORECASE)), None)
    registry = Reference.parse(name).registry
    return (meaning or "dockerd on {host} cannot get {name}: {said}").format(name=name, said=said, host=host, machine=machine, registry=registry)


def archive_contents(path: str) -> list[dict]:
    """The images in a file that docker save wrote: [{names, id, architecture}]; raises ImageError when it is none."""
    try:
        with tarfile.open(path) as archive:
            images = []
            for entry in json.load(_member(archive, "manifest.json")):
                config = _member(archive, entry["Config"]).read()
                digest = re.search(r"[0-9a-f]{64}", entry["Config"])
                images.append(
                    {
                        "names": entry.get("RepoTags") or [],
                        "id": "sha256:" + digest.group() if digest else None,
                        "architecture": json.loads(config).get("architecture"),
                    }
                )
            return images
    except OSError as error:
        raise ImageError(f"cannot read image archive {path}: {error.strerror or error}") from error
    except (tarfile.TarError, KeyError, ValueError, TypeError) as error:
        raise ImageError(f"{path} is not an image archive as docker save writes it: {error}") from error


def _member(archive: tarfile.TarFile, name: str):
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file


def find_in_archive(path: str, name: str) -> dict:
    """The image of that name in an archive: {names, id, architecture}; raises ImageError when it is not among them."""
    wanted = Reference.parse(name)
    contents = archive_contents(path)
    for image in contents:
        for own in image["names"]:
            reference = Reference.parse(own)
            if (reference.source, reference.tag) == (wanted.source, wanted.tag):
                return image
    held = ", ".join(own for image in contents for own in image["names"]) or "images without names"
    raise ImageError(f"{path} holds {held}, not {name}: save it under that name")
