"""Deployments: preset, inventory and overrides merged; mistakes named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.llmops.ascend.plugins.filter import resolve_deployments as door
from ansible_collections.llmops.ascend.plugins.module_utils import deployments as logic
from ansible_collections.llmops.ascend.plugins.module_utils import vllm_cli

SERVICES = {"qwen3.8-27b": {"listen_port": 2219}}
MINIMAL = {"model": "m", "model_path": "/m", "image": "quay.io/a/b:c"}
PRESETS = {"small": {**MINIMAL, "tensor_parallel_size": 2, "args": {"max_num_seqs": 32, "dtype": "bfloat16"}, "env": {"A": 1},
                     "container": {"shm_size": "2g"}}}


def resolve(written, overrides=None, registry="", services=None):
    resolved, findings = logic.resolve_deployments({"d": written}, overrides or {}, PRESETS, services, registry, "machine66")
    assert findings == []
    return resolved["d"]


def mistakes(written, overrides=None, services=None):
    resolved, findings = logic.resolve_deployments({"d": written}, overrides or {}, PRESETS, services, "", "machine66")
    assert "d" not in resolved
    assert all(finding["level"] == "error" and "\n" not in finding["message"] for finding in findings)
    return [finding["message"] for finding in findings]


def test_every_key_is_present():
    resolved = resolve(MINIMAL)
    assert set(resolved) == set(logic.FIELDS) | {"name", "served_names", "devices_per_instance", "max_concurrent"}
    assert resolved["container"] == {"shm_size": "1g", "volumes": [], "devices": [], "options": []}
    assert (resolved["name"], resolved["instances"], resolved["first_port"], resolved["args_check"]) == ("d", "all", 8000, "error")
    assert (resolved["service"], resolved["max_concurrent"], resolved["devices_per_instance"]) == (None, None, 1)


def test_layers_win_in_order_and_merge_by_key():
    resolved = resolve({"preset": "small", "args": {"max_num_seqs": 16, "seed": 1}, "env": {"B": "x"}, "tensor_parallel_size": 4},
                       {"d": {"args": {"dtype": None}, "first_port": 9000, "container": {"options": ["--ipc=host"]}}})
    assert resolved["args"] == {"max_num_seqs": 16, "seed": 1}
    assert resolved["env"] == {"A": "1", "B": "x"}
    assert (resolved["tensor_parallel_size"], resolved["first_port"], resolved["max_concurrent"]) == (4, 9000, 16)
    assert resolved["container"] == {"shm_size": "2g", "volumes": [], "devices": [], "options": ["--ipc=host"]}
    assert PRESETS["small"]["args"] == {"max_num_seqs": 32, "dtype": "bfloat16"}


def test_an_override_may_choose_the_preset():
    assert resolve({"model": "n"}, {"d": {"preset": "small"}})["tensor_parallel_size"] == 2


def test_a_list_of_models_gives_aliases():
    resolved = resolve({**MINIMAL, "model": ["Qwen", "q"]})
    assert (resolved["model"], resolved["served_names"]) == ("Qwen", ["Qwen", "q"])


def test_devices_of_an_instance():
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    assert resolve({**MINIMAL, **sizes})["devices_per_instance"] == 8


@pytest.mark.parametrize(("image", "registry", "expected"), [
    ("quay.io/ascend/vllm:1", "", "quay.io/ascend/vllm:1"),
    ("quay.io/ascend/vllm:1", "198.18.254.1:5000", "198.18.254.1:5000/ascend/vllm:1"),
    ("quay.io/ascend/vllm:1", "harbor.local/mirror/", "harbor.local/mirror/ascend/vllm:1"),
    ("localhost:5000/vllm", "r:1", "r:1/vllm"),
    ("vllm/vllm-openai:v1", "r:1", "r:1/vllm/vllm-openai:v1"),
    ("ubuntu", "r:1", "r:1/ubuntu"),
    ("quay.io/a/b@sha256:00", "r:1", "r:1/a/b@sha256:00"),
])
def test_registries(image, registry, expected):
    assert resolve({**MINIMAL, "image": image}, registry=registry)["image"] == expected


@pytest.mark.parametrize(("changed", "message"), [
    ({"tensor_paralel_size": 2}, ".tensor_paralel_size: no such key; did you mean tensor_parallel_size"),
    ({"container": {"shm": "1g"}}, ".container.shm: no such key; did you mean shm_size?"),
    ({"tensor_parallel_size": "2"}, ".tensor_parallel_size is '2'; write a whole number of at least 1"),
    ({"tensor_parallel_size": True}, ".tensor_parallel_size is True; write a whole number"),
    ({"tensor_parallel_size": 0}, ".tensor_parallel_size is 0; write a whole number of at least 1"),
    ({"first_port": 70000}, ".first_port is 70000; write a whole number of at least 1 and at most 65535"),
    ({"first_port": 65535, "instances": 2}, ".first_port is 65535; 2 instances do not fit below port 65536"),
    ({"instances": -1}, ".instances is -1; write a number or `all`"),
    ({"instances": "every"}, ".instances is 'every'; write a number or `all`"),
    ({"devices": [0, 0]}, ".devices is [0, 0]; write a list in which no device comes twice"),
    ({"devices": "0,1"}, ".devices is '0,1'; write `all` or a list of device ids"),
    ({"devices": [0, 1], "instances": 3}, ".devices: 2 are too few for 3 instances of 1 each (3)"),
    ({"expected_devices": 8, "instances": 5, "tensor_parallel_size": 2}, ".expected_devices: 8 are too few for 5 instances of 2 each (10)"),
    ({"expected_devices": 1, "tensor_parallel_size": 2}, ".expected_devices: 1 are too few for an instance of 2 (2)"),
    ({"numa_binding": "nodes"}, ".numa_binding is 'nodes'; write node, cores or none"),
    ({"args_check": False}, ".args_check is False; write error, warn or off"),
    ({"runtime": "podman"}, ".runtime is 'podman'; write container or venv"),
    ({"model": []}, ".model is []; write a name, or a list of different names"),
    ({"model_path": "models/x"}, ".model_path is 'models/x'; write an absolute path"),
    ({"image": None}, ".image is missing"),
    ({"args": ["--dtype"]}, ".args is ['--dtype']; write a dictionary"),
    ({"env": {"A": True}}, ".env.A is neither text nor number; quote it"),
    ({"env": {"A": ["SK-1"]}}, ".env.A is neither text nor number; quote it"),
    ({"env": {"A": "SK-1\nB=2"}}, ".env.A has several lines"),
    ({"env": {"A=B": "SK-1"}}, ".env.A=B is no name of a variable"),
    ({"env": {"ASCEND_RT_VISIBLE_DEVICES": "0"}}, ".env.ASCEND_RT_VISIBLE_DEVICES is set by the project; use `devices` instead"),
    ({"weight": 0}, ".weight is 0; write a number above 0"),
    ({"vllm_version": 0.23}, ".vllm_version is 0.23; write a text"),
    ({"preset": "smal"}, ".preset: there is no preset 'smal'; did you mean small?"),
    ({"preset": "zzz"}, ".preset: there is no preset 'zzz'; there is small"),
])
def test_mistakes(changed, message):
    found = mistakes({**MINIMAL, **changed})
    assert len(found) == 1
    assert found[0].startswith(f"machine66: deployments.d{message}")
    assert "SK-1" not in found[0]


def test_a_key_in_the_environment_is_refused_and_not_shown():
    [message] = mistakes({**MINIMAL, "env": {"VLLM_API_KEY": "SK-12345678-@aaa"}})
    assert message == "machine66: deployments.d.env.VLLM_API_KEY is set by the project; use services.<service>.api_key instead"


def test_all_mistakes_are_found_at_once():
    assert len(mistakes({"tensor_parallel_size": 0, "args_check": "x"})) == 4


def test_services():
    assert resolve({**MINIMAL, "service": "qwen3.8-27b"}, services=SERVICES)["service"] == "qwen3.8-27b"
    assert resolve({**MINIMAL, "service": None}, services=SERVICES)["service"] is None
    [message] = mistakes({**MINIMAL, "service": "qwen3.8"}, services=SERVICES)
    assert message == ("machine66: deployments.d.service: 'qwen3.8' is not among the services; did you mean qwen3.8-27b?, "
                       "or define it under `services`")


def test_an_override_without_its_deployment():
    _resolved, findings = logic.resolve_deployments({"qwen38-tp2": MINIMAL}, {"qwen38-tp": {}}, {}, None)
    assert [finding["message"] for finding in findings] == [
        "deployment_overrides.qwen38-tp: no such deployment here; did you mean qwen38-tp2?"]


@pytest.mark.parametrize("name", ["a b", "a/b", "-a", ""])
def test_names_that_no_unit_can_have(name):
    _resolved, findings = logic.resolve_deployments({name: MINIMAL}, {}, {}, None)
    assert "systemd units" in findings[0]["message"]


def test_a_deployment_that_is_no_dictionary():
    assert mistakes("qwen") == ["machine66: deployments.d: write a dictionary"]


# ---------------------------------------------------------------------------------------------------- filter and presets

def test_the_filter_fails_with_a_line_for_each_mistake():
    with pytest.raises(AnsibleFilterError, match="deployments.a.model is missing.*\n.*deployments.b.model is missing"):
        door.resolve_deployments({"a": {"model_path": "/m", "image": "i"}, "b": {"model_path": "/m", "image": "i"}})


def leaves(deployment):
    """The dotted names of a preset's values; args, env and container one level down."""
    for key, value in deployment.items():
        if key in ("args", "env", "container"):
            yield from (f"{key}.{inner}" for inner in value)
        else:
            yield key


@pytest.mark.parametrize("path", sorted(path for path in door.PRESETS.glob("*.yml") if path.stem != "compatibility"), ids=lambda path: path.stem)
def test_presets(path):
    preset = yaml.safe_load(path.read_text())
    assert set(preset) == {"description", "deployment", "sources"}
    assert set(preset["sources"]) == set(leaves(preset["deployment"])), "each value has its source, and each source its value"
    resolved = door.resolve_deployments({"d": {"preset": path.stem}})["d"]
    assert vllm_cli.check_arguments(resolved) == []


def test_presets_are_found_from_the_collection():
    assert Path(door.PRESETS).samefile(Path(__file__).parents[2] / "presets")
    assert importlib.util.find_spec("ansible_collections.llmops.ascend")
