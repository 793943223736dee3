#!/usr/bin/python
# Copyright: the llmops.ascend authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_copy
short_description: Receive a model from another machine, so that it is right or not there
description:
  - Takes a model from a M(llmops.ascend.model_server), or from a directory of this machine, into a hidden directory
    beside its place, compares every file with the manifest, and puts it in its place by one rename.
  - An interrupted copy resumes. A damaged model is mended by fetching the damaged files alone.
  - Enough disk is checked before the first byte.
options:
  path:
    description: Where the model shall be.
    type: path
    required: true
  id:
    description: The manifest id of the model at the source. May be left out in check mode, where the source may have
      no manifest yet.
    type: str
  bytes:
    description: Size of the model, in bytes, for the check of the disk in check mode.
    type: int
    default: 0
  damaged:
    description: Files that are known to be damaged or missing; they are fetched even where size and time look right.
    type: list
    elements: str
    default: []
  source:
    description: Name of the machine, for messages.
    type: str
    required: true
  source_path:
    description: A directory of this machine to copy from; excludes O(address).
    type: path
  address:
    description: Address of the model server.
    type: str
  port:
    description: Port of the model server.
    type: int
  secret:
    description: Secret of the model server.
    type: str
  bind_address:
    description: The address of this machine that the model server expects.
    type: str
  retries:
    description: How often a broken connection is tried again.
    type: int
    default: 3
  threads:
    description: Files compared at the same time. V(0) means one per core, at most eight.
    type: int
    default: 0
attributes:
  check_mode:
    description: Checks the disk and says what it would copy.
    support: full
  diff_mode:
    support: full
  idempotent:
    support: full
author:
  - The llmops.ascend authors
"""

EXAMPLES = r"""
- name: Receive the model
  llmops.ascend.model_copy:
    path: /data/models/Qwen3.8-27B-W8A8
    id: "{{ model.id }}"
    source: machine69
    address: 198.51.100.69
    port: "{{ server.port }}"
    secret: "{{ secret }}"
"""

RETURN = r"""
message:
  description: What was done, or would be, in one line.
  returned: success
  type: str
  sample: copied 27.3 GB from machine69 in 41.2 s
files:
  description: Files that came from the source.
  returned: success, not in check mode
  type: int
bytes:
  description: Bytes that came from the source.
  returned: success, not in check mode
  type: int
seconds:
  description: How long it took, comparing included.
  returned: success, not in check mode
  type: float
fetched_again:
  description: Files that arrived damaged and were fetched once more.
  returned: success, not in check mode
  type: list
  elements: str
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import model_copy
from ansible_collections.llmops.ascend.plugins.module_utils.manifest import ManifestError


def copy(module: AnsibleModule) -> None:
    options = module.params
    target, name = Path(options["path"]), options["source"]
    diff = {"before": {str(target): "not there, or damaged"}, "after": {str(target): options["id"] or "whole"}}
    if options["id"] and not options["damaged"] and model_copy.is_whole(target, options["id"]):
        module.exit_json(changed=False, message=f"{target} is there", files=0, bytes=0, seconds=0.0, fetched_again=[])
    if module.check_mode:
        missing = max(0, options["bytes"] - model_copy.bytes_there(target))
        model_copy.check_space(target, missing)
        message = f"would copy {model_copy.gigabytes(missing)} from {name} to {target}"
        module.exit_json(changed=True, message=message, diff=diff)
    source = model_copy.Source(name, options["address"], options["port"] or 0, options["source_path"] or "", options["bind_address"])
    fetch = model_copy.rsync_fetch(source, options["secret"], options["retries"])
    report = model_copy.receive(target, options["id"], name, fetch, options["threads"] or min(8, os.cpu_count() or 1), options["damaged"])
    message = f"copied {model_copy.gigabytes(report.bytes)} from {name} in {report.seconds} s"
    module.exit_json(changed=True, message=message, diff=diff, **vars(report))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "id": {"type": "str"},
            "bytes": {"type": "int", "default": 0},
            "damaged": {"type": "list", "elements": "str", "default": []},
            "source": {"type": "str", "required": True},
            "source_path": {"type": "path"},
            "address": {"type": "str"},
            "port": {"type": "int"},
            "secret": {"type": "str", "no_log": True},
            "bind_address": {"type": "str"},
            "retries": {"type": "int", "default": 3},
            "threads": {"type": "int", "default": 0},
        },
        mutually_exclusive=[("source_path", "address")],
        required_one_of=[("source_path", "address")],
        supports_check_mode=True,
    )
    if module.params["id"] is None and not module.check_mode:
        module.fail_json(msg="id is required: the manifest id of the model at the source")
    try:
        copy(module)
    except (model_copy.CopyError, ManifestError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
