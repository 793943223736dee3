"""From placed instances to the specifications that machines run by."""
from __future__ import annotations

from ansible.errors import AnsibleFilterError

# Read only into every container that has an Ascend device, each where the machine has it: the tool lies in bin or sbin
# depending on the driver's version (https://docs.vllm.ai/projects/ascend/en/latest/installation.html).
ASCEND_VOLUMES = [
    "/usr/local/dcmi:/usr/local/dcmi:ro",
    "/usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro",
    "/usr/local/sbin/npu-smi:/usr/local/sbin/npu-smi:ro",
    "/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro",
    "/etc/ascend_install.info:/etc/ascend_install.info:ro",
]
PLACED = ("name", "deployment", "service", "index", "port", "devices", "device_nodes", "cpus", "numa_nodes",
          "arguments", "state", "reason", "blocked_by")


def instance_specs(instances: list, deployments: dict, images: dict | None = None, manifests: dict | None = None,
                   address: str | None = None) -> list:
    """The specifications of placed instances, as modules instance_plan and systemd_units take them.

    `instances` is what filter place_instances returns under that key, `deployments` the resolved deployments by name,
    `images` {deployment: {"id": image id, ...}}, `manifests` {deployment: manifest id}; a deployment missing in either
    is one whose image or model is not there yet. `address` is where instances listen that do not say so themselves.
    """
    return [_specification(instance, _deployment(instance, deployments), images or {}, manifests or {}, address)
            for instance in instances]


def instance_secrets(instances: list, services: dict) -> dict:
    """{instance name: {"VLLM_API_KEY": key}} of instances whose service has a key.

    A service with `api_key: none` has none, and neither has an instance of no service. The result is secret: it belongs
    into a module's no_log option and nowhere else.
    """
    secrets = {}
    for instance in instances:
        service = services.get(instance.get("service")) if instance.get("service") else None
        key = (service or {}).get("api_key")
        if key is not None and str(key) != "none":
            secrets[instance["name"]] = {"VLLM_API_KEY": str(key)}
    return secrets


def _deployment(instance: dict, deployments: dict) -> dict:
    try:
        return deployments[instance["deployment"]]
    except KeyError as error:
        raise AnsibleFilterError("instance {}: there is no deployment {}".format(
            instance["name"], instance["deployment"])) from error


def _specification(instance: dict, deployment: dict, images: dict, manifests: dict, address: str | None) -> dict:
    name, container = instance["deployment"], deployment["container"]
    ascend = any(node.startswith("/dev/davinci") for node in instance["device_nodes"])
    model = deployment["model_path"]
    specification = {key: instance.get(key) for key in PLACED}
    specification.update({
        "runtime": deployment["runtime"],
        "address": instance.get("address") or address,
        "model": deployment["model"],
        "image": deployment["image"],
        "image_id": (images.get(name) or {}).get("id"),
        "env": {key: _text(value) for key, value in instance["env"].items()},
        "volumes": [f"{model}:{model}:ro"] + container["volumes"],
        "driver_volumes": ASCEND_VOLUMES if ascend else [],
        "shm_size": str(container["shm_size"]),
        "options": [str(option) for option in container["options"]],
        "model_manifest": manifests.get(name),
        "start_timeout_s": deployment["start_timeout_s"],
        "stop_timeout_s": deployment["stop_timeout_s"],
    })
    return specification


def _text(value: object) -> str:
    """A value as an environment variable holds it: YAML's true is what vLLM and CANN write as "true"."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class FilterModule:
    """Filters of role instances."""

    def filters(self) -> dict:
        return {"instance_specs": instance_specs, "instance_secrets": instance_secrets}
