"""Image names, what images say of themselves, archives, and dockerd's refusals in the operator's words."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import images
from ansible_collections.llmops.ascend.plugins.module_utils.images import ImageError, Reference

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    "name,parts",
    [
        ("nginx", ("docker.io", "library/nginx", "latest", None)),
        ("ascend/vllm-ascend:v0.18.0", ("docker.io", "ascend/vllm-ascend", "v0.18.0", None)),
        ("quay.io/ascend/vllm-ascend:qwen3.8-a2", ("quay.io", "ascend/vllm-ascend", "qwen3.8-a2", None)),
        ("198.18.254.1:5000/ascend/vllm-ascend", ("198.18.254.1:5000", "ascend/vllm-ascend", "latest", None)),
        ("localhost/x@" + DIGEST, ("localhost", "x", None, DIGEST)),
        ("quay.io/x/y:1@" + DIGEST, ("quay.io", "x/y", "1", DIGEST)),
    ],
)
def test_names(name, parts):
    reference = Reference.parse(name)
    assert (reference.registry, reference.repository, reference.tag, reference.digest) == parts


@pytest.mark.parametrize("name", ["", "Nginx", "a b", "quay.io/", "x:-a", "x@sha256:12", "x@", "https://quay.io/x", "-x", "x/y/"])
def test_what_is_no_name(name):
    with pytest.raises(ImageError, match="is not an image name"):
        Reference.parse(name)


def inspected(**overrides) -> dict:
    image = {
        "Id": "sha256:1",
        "Architecture": "arm64",
        "Os": "linux",
        "Size": 18_000_000_000,
        "RepoDigests": ["quay.io/other/name@sha256:2", "quay.io/ascend/vllm-ascend@sha256:" + "3" * 64],
        "Config": {"Env": ["PATH=/bin", "VLLM_VERSION=v0.23.0", "A=b=c"], "Labels": None},
    }
    return {**image, **overrides}


def test_description():
    image = inspected()
    image["RepoDigests"][0] = "quay.io/other/name@sha256:" + "2" * 64
    said = images.describe("quay.io/ascend/vllm-ascend:a2", image)
    assert said == {
        "id": "sha256:1",
        "digest": "sha256:" + "3" * 64,
        "architecture": "arm64",
        "os": "linux",
        "size": 18_000_000_000,
        "env": {"PATH": "/bin", "VLLM_VERSION": "v0.23.0", "A": "b=c"},
        "labels": {},
        "vllm_version": "0.23.0",
    }


def test_an_image_that_never_saw_a_registry():
    image = {"Id": "sha256:1", "RepoDigests": None, "Config": None}
    said = images.describe("x:1", image)
    assert (said["digest"], said["architecture"], said["vllm_version"], said["env"]) == (None, None, None, {})


@pytest.mark.parametrize(
    "env,labels,version",
    [
        ({"VLLM_VERSION": "0.18.0"}, {"llmops.vllm-version": "1.0"}, "0.18.0"),
        ({}, {"llmops.vllm-version": "v0.23.0rc1"}, "0.23.0rc1"),
        ({"VLLM_VERSION": "main"}, {"org.opencontainers.image.version": "22.04"}, None),
    ],
)
def test_vllm_version(env, labels, version):
    assert images.vllm_version(env, labels) == version


def test_architecture():
    assert images.machine_architecture("x86_64") == "amd64"
    assert images.machine_architecture("aarch64") == "arm64"
    assert images.wrong_architecture("x", "amd64", "amd64", "machine67") is None
    assert images.wrong_architecture("x", None, "amd64", "machine67") is None
    line = images.wrong_architecture("x", "arm64", "amd64", "machine67")
    assert line == "image x is arm64, machine67 is amd64: name one that is built for amd64"


def test_credentials():
    auth = base64.b64encode(b"user:pa:ss").decode()
    configuration = {"auths": {"quay.io": {"auth": auth}, "https://index.docker.io/v1/": {"auth": auth}, "helped": {}}}
    known = {"username": "user", "password": "pa:ss", "serveraddress": "quay.io"}
    assert images.registry_credentials(configuration, "quay.io") == known
    assert images.registry_credentials(configuration, "docker.io")["username"] == "user"
    assert images.registry_credentials(configuration, "helped") is None
    assert images.registry_credentials({}, "quay.io") is None
    assert json.loads(base64.urlsafe_b64decode(images.registry_auth(known))) == known
    assert images.registry_credentials({"auths": {"r": {"identitytoken": "t"}}}, "r") == {"identitytoken": "t", "serveraddress": "r"}
    assert images.credential_helper({"credHelpers": {"r": "ecr"}, "credsStore": "pass"}, "r") == "ecr"
    assert images.credential_helper({"credsStore": "pass"}, "r") == "pass"


@pytest.mark.parametrize(
    "said,line",
    [
        ('Get "https://r:5000/v2/": dial tcp 198.18.254.1:5000: connect: connection refused', "registry r:5000 is unreachable from m67"),
        ('Get "https://r:5000/v2/": net/http: request canceled (Client.Timeout exceeded)', "registry r:5000 is unreachable from m67"),
        ('Get "https://r:5000/v2/": dial tcp: lookup r: no such host', "registry r:5000 is unreachable from m67"),
        ("http: server gave HTTP response to HTTPS client", "speaks plain HTTP, which dockerd on m67 refuses: add it to container_engine_"),
        ("manifest for r:5000/x/y:1 not found: manifest unknown: manifest unknown", "registry r:5000 has no image r:5000/x/y:1"),
        ("errors:\ndenied: requested access to the resource is denied\n", "registry r:5000 refuses r:5000/x/y:1 to m67"),
        ("no matching manifest for linux/amd64 in the manifest list entries", "is not built for m67, which is amd64"),
        ("write /var/lib/docker/tmp/x: no space left on device", "disk full on m67 while getting r:5000/x/y:1"),
        ("x509: certificate signed by unknown authority", "/etc/docker/certs.d/r:5000/ca.crt"),
        ("something new", "dockerd on m67 cannot get r:5000/x/y:1: something new"),
    ],
)
def test_refusals_in_one_line(said, line):
    explained = images.explain("r:5000/x/y:1", said, "m67", "amd64")
    assert line in explained and "\n" not in explained


def archive(path: Path, *tags: str, architecture: str = "arm64", mode: str = "w") -> str:
    """An archive as docker save writes it, without layers; returns the image's id."""
    config = json.dumps({"architecture": architecture, "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}).encode()
    digest = hashlib.sha256(config).hexdigest()
    manifest = json.dumps([{"Config": digest + ".json", "RepoTags": list(tags), "Layers": []}]).encode()
    with tarfile.open(path, mode) as tar:
        for name, content in ((digest + ".json", config), ("manifest.json", manifest)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return "sha256:" + digest


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_archives(tmp_path, mode):
    path = tmp_path / "image.tar"
    digest = archive(path, "vllm:1", "quay.io/ascend/vllm-ascend:a2", mode=mode)
    found = images.find_in_archive(str(path), "quay.io/ascend/vllm-ascend:a2")
    assert (found["id"], found["architecture"]) == (digest, "arm64")
    assert images.find_in_archive(str(path), "docker.io/library/vllm:1")["id"] == digest
    with pytest.raises(ImageError, match="holds vllm:1, quay.io/ascend/vllm-ascend:a2, not quay.io/x:1: save it under that name"):
        images.find_in_archive(str(path), "quay.io/x:1")


def test_what_is_no_archive(tmp_path):
    with pytest.raises(ImageError, match="cannot read image archive .*No such file"):
        images.archive_contents(str(tmp_path / "none"))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ImageError, match="is not an image archive"):
        images.archive_contents(str(tmp_path / "text"))
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("x"))
    with pytest.raises(ImageError, match="is not an image archive"):
        images.archive_contents(str(tmp_path / "other.tar"))
