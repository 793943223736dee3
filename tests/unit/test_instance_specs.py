"""From placement to specifications and secrets."""
from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.llmops.ascend.plugins.filter.instance_specs import instance_secrets, instance_specs
from ansible_collections.llmops.ascend.plugins.module_utils import units
from instance_machine import SALT

PLACED = {
    "name": "qwen38-tp2-0", "deployment": "qwen38-tp2", "service": "qwen3.8-27b", "index": 0, "devices": [0, 1],
    "visible_devices": "0,1", "address": "198.18.254.66", "port": 8000, "numa_nodes": [0], "cpus": "0-31", "link": "PHB",
    "hccl_ports": {"host": "60000-60015", "npu": "16666-16681"}, "arguments": ["vllm", "serve", "/data/models/Qwen"],
    "env": {"ASCEND_RT_VISIBLE_DEVICES": "0,1", "VLLM_USE_V1": True, "OMP_NUM_THREADS": 1},
    "device_nodes": ["/dev/davinci0", "/dev/davinci1", "/dev/davinci_manager"],
    "state": "blocked", "reason": "device 1 is in Alarm", "blocked_by": "health"}
DEPLOYMENT = {
    "runtime": "container", "model": "Qwen", "model_path": "/data/models/Qwen", "image": "quay.io/x:1",
    "container": {"shm_size": "1g", "volumes": ["/cache:/cache"], "devices": [], "options": ["--cap-add", "SYS_NICE"]},
    "start_timeout_s": 3600, "stop_timeout_s": 60}


def test_a_specification_is_all_a_machine_needs():
    spec, = instance_specs([PLACED], {"qwen38-tp2": DEPLOYMENT}, {"qwen38-tp2": {"id": "sha256:aa"}}, {"qwen38-tp2": "m1"})
    assert spec["image_id"] == "sha256:aa"
    assert spec["model_manifest"] == "m1"
    assert spec["volumes"] == ["/data/models/Qwen:/data/models/Qwen:ro", "/cache:/cache"]
    assert "/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro" in spec["driver_volumes"]
    assert spec["env"] == {"ASCEND_RT_VISIBLE_DEVICES": "0,1", "VLLM_USE_V1": "true", "OMP_NUM_THREADS": "1"}
    assert (spec["state"], spec["reason"], spec["blocked_by"]) == ("blocked", "device 1 is in Alarm", "health")
    document, _files = units.render(spec, {}, SALT)
    assert set(spec) - set(document) == {"state", "reason", "blocked_by"}


def test_what_is_not_there_yet_is_null():
    spec, = instance_specs([PLACED | {"device_nodes": []}], {"qwen38-tp2": DEPLOYMENT})
    assert spec["image_id"] is None
    assert spec["model_manifest"] is None
    assert spec["driver_volumes"] == []


def test_an_unknown_deployment_is_named():
    with pytest.raises(AnsibleFilterError, match="qwen38-tp2-0: there is no deployment qwen38-tp2"):
        instance_specs([PLACED], {})


@pytest.mark.parametrize(("services", "secrets"), [
    ({"qwen3.8-27b": {"api_key": "a$b%c\"d'e"}}, {"qwen38-tp2-0": {"VLLM_API_KEY": "a$b%c\"d'e"}}),
    ({"qwen3.8-27b": {"api_key": "none"}}, {}), ({"qwen3.8-27b": {}}, {}), ({}, {})])
def test_a_key_is_the_services(services, secrets):
    assert instance_secrets([PLACED, PLACED | {"name": "staging-0", "service": None}], services) == secrets
