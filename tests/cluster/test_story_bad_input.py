"""Mistakes and surprises on a converged cluster: each says what is wrong in one line, and nothing that serves is touched.

The fixture converges the cluster itself, so that this runs after the story or alone.
"""
from __future__ import annotations

import json

import pytest

from .conftest import MACHINES, SERVICE, on


@pytest.fixture(scope="module")
def converged(cluster):
    run = cluster.playbook(max_unavailable=8)
    assert run.rc == 0, run.output[-4000:]
    cluster.wait_active(16)
    return cluster


def deployments(data: dict) -> dict:
    return data["all"]["children"]["workers"]["vars"]["deployments"]


def deployment(data: dict) -> dict:
    return deployments(data)["qwen38-tp2"]


def arguments(**args):
    return lambda data: deployment(data).update(args=args)


def second(**keys):
    """A second deployment beside the first."""
    return lambda data: deployments(data).update(other={"preset": "qwen3.8-27b-w8a8", "service": SERVICE, **keys})


def overrides(**machines: dict):
    """Each machine with what it overrides of its deployment; None for nothing."""
    def change(data):
        data["all"]["children"]["workers"]["hosts"] = {
            name: {"deployment_overrides": {"qwen38-tp2": machines[name]}} if name in machines else None for name in MACHINES}
    return change


INVENTORY_FAULTS = {
    "unknown option": (arguments(max_model_length=4096), ["max_model_length", "max_model_len"]),
    "unknown tool parser": (lambda data: deployment(data).update(vllm_version="0.18.0", args={"tool_call_parser": "qwen3"}),
                            ["qwen3_xml", "qwen3_coder"]),
    "reserved option": (arguments(port=9000), ["port", "first_port"]),
    "key missing": (lambda data: data["all"]["vars"]["services"][SERVICE].pop("api_key"), ["api_key", "none"]),
    "service not defined": (lambda data: deployment(data).update(service="qwen3.8-27"), ["qwen3.8-27", SERVICE]),
    "arguments differ in a service": (second(instances=1, first_port=8100, args={"max_model_len": 4096}), ["max_model_len", "4096", "262144"]),
    "two on one port": (second(instances=1, devices=[0, 1]), ["8000"]),
    "two on one device": (lambda data: (deployment(data).update(devices=[0, 1], instances=1),
                                        second(instances=1, devices=[1, 2], first_port=8100)(data)), ["1"]),
    "more instances than the expected devices hold": (lambda data: deployment(data).update(instances=5, expected_devices=8), ["5", "8"]),
    "unknown key of a deployment": (lambda data: deployment(data).update(tensor_paralel_size=2), ["tensor_paralel_size", "tensor_parallel_size"]),
}

# Each machine with a fault of its own, so that one run has to name them all: (overrides, words of the line that names it).
DEVICE_FAULTS = {
    "machine66": ({"devices": [8, 9], "expected_devices": None}, ["8"]),
    "machine67": ({"instances": 5, "expected_devices": None}, ["5"]),
    "machine68": ({"expected_devices": 16}, ["8", "16"]),
}
ARTIFACT_FAULTS = {
    "machine66": ({"model_path": "/data/models/Nowhere"}, ["/data/models/Nowhere"]),
    "machine67": ({"image": "ascend/vllm-ascend:wrong-arch"}, ["arm64", "amd64"]),
    "machine68": ({"image": "ascend/vllm-ascend:nothing"}, ["ascend/vllm-ascend:nothing"]),
}


def refused(cluster, *lines, **options):
    """Run site.yml; it fails, has for each of `lines` one line with all its words, and what serves goes on untouched. Returns the run."""
    before = cluster.running()
    run = cluster.playbook(**options)
    assert run.rc != 0
    for words in lines:
        assert any(all(word in line for word in words) for line in run.failures.splitlines()), f"no line says {words}:\n{run.failures}"
    assert cluster.running() == before
    assert len(cluster.active()) == 16
    return run


@pytest.mark.parametrize("fault", INVENTORY_FAULTS)
def test_an_inventory_that_cannot_work_is_refused_without_contact(converged, fault):
    change, words = INVENTORY_FAULTS[fault]
    assert refused(converged, words, inventory=converged.inventory(change)).contacted() == set()


@pytest.mark.parametrize("faults", [DEVICE_FAULTS, ARTIFACT_FAULTS], ids=["devices", "artifacts"])
def test_what_machines_do_not_have_is_refused(converged, faults):
    change = overrides(**{machine: override for machine, (override, _) in faults.items()})
    refused(converged, *([machine, *words] for machine, (_, words) in faults.items()), inventory=converged.inventory(change))


def test_a_port_held_by_a_foreign_process(converged):
    command = "exec python3 -c 'import socket, time; s = socket.create_server((\"0.0.0.0\", 8107)); time.sleep(600)'"
    on("machine67", f"systemd-run --unit=stranger sh -c \"{command.replace(chr(34), chr(92) + chr(34))}\"")
    try:
        refused(converged, ["machine67", "8107", "python3"], inventory=converged.inventory(overrides(machine67={"first_port": 8104})),
                replace_placement=True)
    finally:
        on("machine67", "systemctl stop stranger")


def test_strangers_are_named_and_not_overwritten(converged):
    """machine67 gives up three instances. A hand-made unit and a hand-made container bear the names of two, and a foreign process
    holds a card of the third: the names stop the run, the card alone blocks its own instance."""
    assert converged.playbook(inventory=converged.inventory(overrides(machine67={"instances": 1}))).rc == 0
    converged.wait_active(13)
    unit = "/etc/systemd/system/qwen38-tp2-1.service"
    image = json.loads(on("machine67", "docker inspect qwen38-tp2-0"))[0]["Image"]
    try:
        on("machine67", f"printf '[Service]\\nExecStart=/bin/sleep 600\\n' > {unit}; docker create --name qwen38-tp2-2 {image} sleep 600")
        on("machine67", "systemd-run --unit=stranger flock /usr/local/Ascend/driver/lab/locks/davinci7 sleep 600")
        run = converged.playbook()
        assert run.rc != 0
        for name in ("unit qwen38-tp2-1.service", "container qwen38-tp2-2"):
            assert any("machine67" in line and name in line and "adopt or retire" in line for line in run.failures.splitlines()), run.failures
        assert "/bin/sleep 600" in on("machine67", f"cat {unit}")
        assert on("machine67", "docker inspect -f '{{.State.Status}}' qwen38-tp2-2") == "created"
        on("machine67", f"rm {unit}; systemctl daemon-reload; docker rm -f qwen38-tp2-2")
        run = converged.playbook()
        assert run.rc != 0
        line = next(line for line in run.failures.splitlines() if "qwen38-tp2-3" in line)
        assert "machine67" in line and "7" in line and ("flock" in line or "sleep" in line)
        assert len(converged.active()) == 15
    finally:
        on("machine67", f"rm -f {unit}; systemctl daemon-reload; docker rm -f qwen38-tp2-2; systemctl stop stranger", check=False)
    assert converged.playbook().rc == 0
    converged.wait_active(16)


def test_not_enough_disk_is_refused_before_a_byte_is_copied(converged):
    """The model's directory of machine67 on a file system of 16 MB: too small for the 34 MB model."""
    on("machine67", "mkdir -p /data/small && mount -t tmpfs -o size=16m tmpfs /data/small")
    try:
        change = overrides(machine67={"model_path": "/data/small/Qwen3.8-27B-W8A8",
                                      "model_source": "machine69:/data/models/Qwen3.8-27B-W8A8"})
        refused(converged, ["machine67", "/data/small"], inventory=converged.inventory(change))
        assert on("machine67", "find /data/small -type f | wc -l") == "0"
    finally:
        on("machine67", "umount /data/small")


def test_keys_with_special_characters_simply_work(converged):
    key = "a$b%c\"d'e SK-@#"

    def change(data):
        data["all"]["vars"]["services"][SERVICE]["api_key"] = key

    run = converged.playbook(inventory=converged.inventory(change), max_unavailable=8)
    assert run.rc == 0, run.failures
    assert key not in run.output
    assert converged.ask("/v1/models", key=key)[0] == 200
    assert converged.ask("/v1/models")[0] == 401
    assert converged.playbook(max_unavailable=8).rc == 0
    assert converged.ask("/v1/models")[0] == 200
