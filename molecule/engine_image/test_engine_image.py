"""The engine image is there; what is wrong with an image or its registry is said in one line."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
MACHINE = "machine69"
NAME = "ascend/vllm-ascend:qwen3.8-a2"

testinfra_hosts = [f"ansible://{MACHINE}?force_ansible=True"]


def play(*arguments: str, **variables) -> tuple[int, str]:
    """The roles again, as `molecule converge` runs them: (exit code, what they said, in one line)."""
    command = ["ansible-playbook", "-i", str(PROJECT / "inventory/lab"), str(Path(__file__).with_name("converge.yml"))]
    command += ["--extra-vars", json.dumps(variables), *arguments]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def on(command: str) -> str:
    """A command on the machine, as root."""
    lab = [str(PROJECT / "lab/lab"), "exec", MACHINE, "--", "sh", "-c", command]
    return subprocess.run(lab, capture_output=True, text=True, check=True).stdout.strip()


def wanting(image: str) -> dict:
    names = ("qwen38-tp2", "qwen38-tp4")
    return {"resolved_deployments": {name: {"runtime": "container", "image": image} for name in names}}


@pytest.fixture
def registry(image: str) -> str:
    return image.partition("/")[0]


@pytest.fixture
def image() -> str:
    return next(name for name in on("docker images --format '{{.Repository}}:{{.Tag}}'").split() if name.endswith(NAME))


def test_the_image_is_there(image):
    assert on("docker image inspect --format '{{.Architecture}}' " + image) == "amd64"


def test_always_asks_and_finds_nothing_newer(image):
    code, said = play(engine_image_pull="always")
    assert code == 0 and "changed=0" in said, said


@pytest.mark.parametrize(
    "name,line",
    [
        ("{registry}/ascend/vllm-ascend:wrong-arch", "is arm64, machine69 is amd64: name one that is built for amd64"),
        ("{registry}/ascend/vllm-ascend:none", "registry {registry} has no image {registry}/ascend/vllm-ascend:none, which machine"),
        ("{host}:9/x/y:1", "registry {host}:9"),
        ("Not/An-Image", "'Not/An-Image' is not an image name"),
    ],
)
def test_what_cannot_be_had_is_said_before_anything_is_pulled(registry, name, line):
    place = {"registry": registry, "host": registry.partition(":")[0]}
    code, said = play("--check", **wanting(name.format(**place)))
    assert code != 0 and line.format(**place) in said, said


def test_an_image_comes_from_a_file(image):
    before = on("docker image inspect --format '{{.Id}}' " + image)
    on(f"docker save -o /var/tmp/image.tar {image} && docker image rm {image}")
    code, said = play("--check", engine_image_archives={image: "/var/tmp/image.tar"})
    assert code == 0 and f"would load {image} from /var/tmp/image.tar" in said, said
    code, said = play(engine_image_archives={image: "/var/tmp/image.tar"})
    assert code == 0 and "changed=1" in said, said
    assert on("docker image inspect --format '{{.Id}}' " + image) == before
    code, said = play(engine_image_archives={image: "/var/tmp/image.tar"}, engine_image_pull="always")
    assert code == 0 and "changed=0" in said, said
    on("rm /var/tmp/image.tar")
