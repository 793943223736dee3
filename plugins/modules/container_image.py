#!/usr/bin/python
# Copyright: the llmops.ascend authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: container_image
short_description: Have container images on a machine, of the right architecture
description:
  - Pulls images that are missing, or loads them from an archive, and says what they are.
  - An image that is there costs one question to dockerd. Before anything is pulled, the registry is asked for digest
    and architecture.
options:
  name:
    description: Images, as C([registry/]name[:tag][@sha256:digest]).
    type: list
    elements: str
    required: true
  state:
    description: Whether the images should be on the machine.
    type: str
    choices: [present, absent]
    default: present
  pull:
    description:
      - V(missing) leaves an image that is there alone.
      - V(always) compares its digest with the registry's (or its id with the archive's), and gets the newer one.
    type: str
    choices: [missing, always]
    default: missing
  archives:
    description:
      - Where images are to be loaded from a file on the machine, as C(docker save) writes it, and not pulled.
      - Maps the image's name to the file's path.
    type: dict
    default: {}
  username:
    description: User of the registry. Default is what C(docker login) left in root's docker configuration.
    type: str
  password:
    description: Password of the registry.
    type: str
  socket:
    description: dockerd's socket.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    description:
      - Says what it would pull, after asking the registry for it.
      - Where no dockerd answers yet it says so and succeeds.
    support: full
  diff_mode:
    description: Shows the images' ids, or digests, before and after.
    support: full
  idempotent:
    support: full
author:
  - The llmops.ascend authors
"""

EXAMPLES = r"""
- name: Have the engine image
  llmops.ascend.container_image:
    name: [quay.io/ascend/vllm-ascend:v0.18.0]

- name: Have it from a file, where there is no registry
  llmops.ascend.container_image:
    name: [quay.io/ascend/vllm-ascend:v0.18.0]
    archives:
      quay.io/ascend/vllm-ascend:v0.18.0: /data/images/vllm-ascend-v0.18.0.tar
"""

RETURN = r"""
images:
  description: What the images are, by name. Empty where nothing could be inspected; without the images that check
    mode would get.
  returned: success
  type: dict
  sample:
    quay.io/ascend/vllm-ascend:v0.18.0:
      {id: "sha256:0c5e...", digest: "sha256:99ab...", architecture: arm64, os: linux, size: 18253611008, env:
      {VLLM_VERSION: "0.18.0"},
       labels: {}, vllm_version: "0.18.0"}
  contains:
    id:
      description: The image's id, as containers name it.
      type: str
    digest:
      description: The registry's digest; null for an image that never saw a registry.
      type: str
    architecture:
      description: The image's architecture.
      type: str
    os:
      description: The image's operating system.
      type: str
    size:
      description: Size on disk, in bytes.
      type: int
    env:
      description: The image's environment.
      type: dict
    labels:
      description: The image's labels.
      type: dict
    vllm_version:
      description: The version of vLLM that the image says it holds; null where it does not say.
      type: str
inspected:
  description: False in check mode where no dockerd answers yet.
  returned: success
  type: bool
messages:
  description: What was done, or would be, one line each.
  returned: success
  type: list
  elements: str
  sample: ["pulled quay.io/ascend/vllm-ascend:v0.18.0 (18.3 GB)"]
"""

import json
import os
import platform
import socket
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import images
from ansible_collections.llmops.ascend.plugins.module_utils.atomic_files import read_text
from ansible_collections.llmops.ascend.plugins.module_utils.docker_engine import Engine, EngineAbsent, EngineError
from ansible_collections.llmops.ascend.plugins.module_utils.images import ImageError

DOCKER_CONFIGURATION = "/root/.docker/config.json"


class Keeper:
    """Has images on this machine, one after another, and notes what it did."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.engine = Engine(module.params["socket"])
        self.host = socket.gethostname()
        self.architecture = images.machine_architecture(platform.machine())
        self.images: dict[str, dict] = {}
        self.before: dict[str, str] = {}
        self.after: dict[str, str] = {}
        self.messages: list[str] = []
        self.changed = False

    def present(self, name: str) -> None:
        """Have the image; raises ImageError."""
        image = self._inspect(name)
        archive = self.module.params["archives"].get(name)
        if image is None or self.module.params["pull"] == "always":
            if archive:
                self._load(name, image, archive)
            else:
                self._pull(name, image)
        else:
            self._record(name, image)

    def absent(self, name: str) -> None:
        """Remove the image; raises ImageError when a container uses it."""
        image = self._inspect(name)
        if image is None:
            return
        self._note(name, image["id"], "absent", "remove{0} " + name)
        if not self.module.check_mode:
            try:
                self.engine.remove(name)
            except EngineError as error:
                raise ImageError(f"cannot remove {name} on {self.host}: {error}") from error

    def _pull(self, name: str, image: dict | None) -> None:
        auth = self._auth(name)
        try:
            digest, architectures = self.engine.registry_image(name, auth)
            if image and image["digest"] == digest:
                self._record(name, image)
                return
            if architectures and self.architecture not in architectures:
                raise ImageError(images.wrong_architecture(name, " and ".join(sorted(set(architectures))), self.architecture, self.host))
            if self.module.check_mode:
                self._note(name, image and image["digest"], digest, "pull{0} " + name)
                return
            self.engine.pull(name, auth)
        except EngineError as error:
            raise ImageError(images.explain(name, str(error), self.host, self.architecture)) from error
        self._arrived(name, image, "pull{0} " + name)

    def _load(self, name: str, image: dict | None, archive: str) -> None:
        held = images.find_in_archive(archive, name)
        self._refuse_architecture(name, held["architecture"])
        if image and held["id"] == image["id"]:
            self._record(name, image)
            return
        if self.module.check_mode:
            self._note(name, image and image["id"], held["id"], "load{0} " + name + " from " + archive)
            return
        try:
            self.engine.load(archive)
        except EngineError as error:
            raise ImageError(images.explain(name, str(error), self.host, self.architecture)) from error
        self._arrived(name, image, "load{0} " + name + " from " + archive)

    def _arrived(self, name: str, old: dict | None, what: str) -> None:
        image = self._inspect(name)
        if image is None:
            raise ImageError(f"{name} is not on {self.host} although dockerd took it: see journalctl -u docker")
        self._record(name, image)
        if not old or old["id"] != image["id"]:
            self._note(
                name,
                old and old["id"],
                image["id"],
                what + " ({:.1f} GB)".format(image["size"] / 1e9).replace("{", "{{"),
            )

    def _inspect(self, name: str) -> dict | None:
        try:
            image = self.engine.image(name)
        except EngineError as error:
            raise ImageError(f"dockerd on {self.host} cannot inspect {name}: {error}") from error
        return image and images.describe(name, image)

    def _record(self, name: str, image: dict) -> None:
        self._refuse_architecture(name, image["architecture"])
        self.images[name] = image
        self.before[name] = self.after[name] = image["id"]

    def _refuse_architecture(self, name: str, architecture: str | None) -> None:
        wrong = images.wrong_architecture(name, architecture, self.architecture, self.host)
        if wrong:
            raise ImageError(wrong)

    def _note(self, name: str, before: str | None, after: str | None, what: str) -> None:
        """Note a change; what holds the verb with a place for its ending: "pull{0} NAME"."""
        self.changed = True
        self.before[name], self.after[name] = before or "absent", after or "unknown"
        check = self.module.check_mode
        self.messages.append(("would " if check else "") + what.format("" if check else "d" if what.startswith("remove") else "ed"))

    def _auth(self, name: str) -> str | None:
        registry = images.Reference.parse(name).registry
        username, password = self.module.params["username"], self.module.params["password"]
        if username:
            return images.registry_auth({"username": username, "password": password or "", "serveraddress": registry})
        try:
            configuration = json.loads(read_text(DOCKER_CONFIGURATION) or "{}")
        except ValueError as error:
            raise ImageError(f"{DOCKER_CONFIGURATION} on {self.host} is not JSON: {error}") from error
        credentials = images.registry_credentials(configuration, registry) or _ask_helper(configuration, registry)
        return images.registry_auth(credentials) if credentials else None


def _ask_helper(configuration: dict, registry: str) -> dict | None:
    """Credentials from docker's credential helper, by its protocol: the registry on stdin, {Username, Secret} on
    stdout."""
    helper = images.credential_helper(configuration, registry)
    if not helper:
        return None
    environment = dict(os.environ, LC_ALL="C")
    try:
        asked = subprocess.run(
            ["docker-credential-" + helper, "get"],
            input=registry.encode(),
            capture_output=True,
            env=environment,
            timeout=30,
            check=True,
        )
        answer = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # as docker does: the registry may well answer without
    return {"username": answer["Username"], "password": answer["Secret"], "serveraddress": registry}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "list", "elements": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "pull": {"type": "str", "choices": ["missing", "always"], "default": "missing"},
            "archives": {"type": "dict", "default": {}},
            "username": {"type": "str"},
            "password": {"type": "str", "no_log": True},
            "socket": {"type": "path", "default": "/var/run/docker.sock"},
        },
        supports_check_mode=True,
    )
    keeper = Keeper(module)
    names = list(dict.fromkeys(module.params["name"]))
    try:
        for name in names:
            images.Reference.parse(name)
            getattr(keeper, module.params["state"])(name)
    except ImageError as error:
        module.fail_json(msg=str(error))
    except EngineAbsent as error:
        if not module.check_mode:
            module.fail_json(msg=f"{error} on {keeper.host}: start it (systemctl status docker)")
        verb = "pull" if module.params["state"] == "present" else "remove"
        messages = [f"would {verb} {name}, not inspected: dockerd is not there yet" for name in names]
        module.exit_json(changed=module.params["state"] == "present", images={}, inspected=False, messages=messages)
    module.exit_json(
        changed=keeper.changed,
        images=keeper.images,
        inspected=True,
        messages=keeper.messages,
        diff={"before": keeper.before, "after": keeper.after},
    )


if __name__ == "__main__":
    main()
