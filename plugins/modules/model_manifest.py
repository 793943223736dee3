#!/usr/bin/python
# Copyright: the llmops.ascend authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_manifest
short_description: Say which models a machine has, and make their manifests
description:
  - A model's manifest lists its files with size, sha256 and modification time, in C(.llmops-manifest.json) inside the
    model's directory. Its id is the same wherever the model's content is the same.
  - One call looks at all models of a machine. The everyday check costs a stat of each file and reads none.
  - Links are followed, so that a snapshot in a Hugging Face cache is a model like any other.
options:
  path:
    description: Model directories.
    type: list
    elements: path
    required: true
  state:
    description:
      - V(inspected) says what is there and writes nothing.
      - V(present) also makes the manifest of a model that has none, and reads the files whose modification time moved.
    type: str
    choices: [inspected, present]
    default: inspected
  verify:
    description:
      - V(cheap) compares sizes and modification times with the manifest.
      - V(full) reads every file and compares its sha256.
    type: str
    choices: [cheap, full]
    default: cheap
  accept:
    description: With O(state=present), take edited, added and removed files as the model, and make its manifest anew.
    type: bool
    default: false
  threads:
    description: Files read at the same time. V(0) means one per core, at most eight.
    type: int
    default: 0
attributes:
  check_mode:
    description: Reports a manifest it would make, and reads no file for it.
    support: full
  diff_mode:
    description: Shows status and id of each model before and after.
    support: full
  idempotent:
    support: full
author:
  - The llmops.ascend authors
"""

EXAMPLES = r"""
- name: Look at the machine's models
  llmops.ascend.model_manifest:
    path: [/data/models/Qwen3.8-27B-W8A8]

- name: Make the manifest of a model that was copied by hand
  llmops.ascend.model_manifest:
    path: [/data/models/Qwen3.8-27B-W8A8]
    state: present
"""

RETURN = r"""
models:
  description: What is at each path.
  returned: success
  type: dict
  sample:
    /data/models/Qwen3.8-27B-W8A8:
      {status: whole, id: 0f343b09..., files: 12, bytes: 29313468416, missing: [], changed: [], edited: [], touched:
      [], extra: []}
  contains:
    status:
      description:
        - C(absent); C(incomplete) (no manifest, and the model's index names files that are missing); C(unmanifested);
          C(touched) (modification times moved); C(damaged) (files are missing or have other content); C(whole).
      type: str
    id:
      description: The manifest's id; null where there is no manifest.
      type: str
    files:
      description: Number of files.
      type: int
    bytes:
      description: Size of all files, in bytes.
      type: int
    missing:
      description: Files that should be there and are not.
      type: list
      elements: str
    changed:
      description: Files of another size or content than the manifest says.
      type: list
      elements: str
    edited:
      description: Those of RV(models.changed) that are no weights, and so may have been edited on purpose.
      type: list
      elements: str
    different:
      description: Whether anything is missing, changed or extra.
      type: bool
    touched:
      description: Files whose modification time moved.
      type: list
      elements: str
    extra:
      description: Files that the manifest does not know.
      type: list
      elements: str
rsync:
  description: Whether rsync is installed here.
  returned: success
  type: bool
ended_servers:
  description: Model servers that an interrupted run had left here and that were ended, see
    M(llmops.ascend.model_server).
  returned: success
  type: list
  elements: str
"""

import os
import shutil
from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import manifest, rsync_daemon


def look(path: str, module: AnsibleModule, threads: int) -> tuple[manifest.State, manifest.State, bool]:
    """(state before, state after, changed) of one model."""
    full = module.params["verify"] == "full"
    if module.params["state"] == "inspected":
        state = manifest.inspect(path, full, threads)
        return state, state, False
    before = manifest.inspect(path)
    if module.check_mode:
        accepts = module.params["accept"] and (before.status == "damaged" or bool(before.extra))
        return before, before, before.status in ("unmanifested", "touched") or accepts
    after, written = manifest.settle(path, module.params["accept"], full, threads)
    return before, after, written


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "list", "elements": "path", "required": True},
            "state": {"type": "str", "choices": ["inspected", "present"], "default": "inspected"},
            "verify": {"type": "str", "choices": ["cheap", "full"], "default": "cheap"},
            "accept": {"type": "bool", "default": False},
            "threads": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    threads = module.params["threads"] or min(8, os.cpu_count() or 1)
    ended = rsync_daemon.leftovers(module.run_command)
    if not module.check_mode:
        for name in ended:
            rsync_daemon.stop(name, module.run_command)
    models, before, after, changed = {}, {}, {}, bool(ended)
    for path in dict.fromkeys(module.params["path"]):
        try:
            old, new, written = look(path, module, threads)
        except manifest.ManifestError as error:
            module.fail_json(msg=str(error))
        models[path] = {key: value for key, value in asdict(new).items() if key != "path"}
        models[path].update(edited=new.edited, different=bool(new.missing or new.changed or new.extra))
        if new.extra:
            module.warn(
                f"{path} holds files that its manifest does not know, which no copy takes along: "
                f"{', '.join(new.extra[:3])}; -e model_edited_files=accept makes them part of the model"
            )
        before[path], after[path] = ({"status": state.status, "id": state.id} for state in (old, new))
        changed = changed or written
    module.exit_json(
        changed=changed,
        models=models,
        rsync=shutil.which("rsync") is not None,
        ended_servers=ended,
        diff={"before": before, "after": after},
    )


if __name__ == "__main__":
    main()
