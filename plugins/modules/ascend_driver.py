#!/usr/bin/python
# Copyright: llmops.ascend authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Bring Ascend driver and firmware to the wanted versions."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ascend_driver
short_description: Bring Ascend driver and firmware to the wanted versions
description:
  - Compares the installed versions with the wanted ones and runs Huawei's installers only where they differ, in the
    order Huawei asks for (driver then firmware on a new machine, firmware then driver over an older driver).
  - In check mode says what it would run. The packages need not be on the machine then, only their names are needed.
  - Installers run with C(--quiet), which accepts Huawei's licence agreement; O(eula_accepted) says so.
version_added: 0.1.0
author: [llmops.ascend authors]
attributes:
  check_mode: {support: full, description: Says what it would install.}
  diff_mode: {support: full, description: Versions before and after.}
  idempotent: {support: full, description: Runs nothing when the versions are right.}
options:
  packages:
    description: Names of the C(.run) files to choose from. Names of other products are passed over.
    type: list
    elements: str
    required: true
  directory:
    description: Where the chosen packages lie on the machine. Needed to install, not in check mode.
    type: path
  driver_version:
    description: The wanted driver. Empty takes the only one among O(packages), else keeps what is installed.
    type: str
    default: ""
  firmware_version:
    description: The wanted firmware, chosen like O(driver_version). Where no package is there, firmware is left alone.
    type: str
    default: ""
  chip:
    description: The chip family in the package names (V(910b), V(A3), V(310p)). Needed where there are several.
    type: str
    default: ""
  checksums:
    description: Lines of C(sha256sum) for the packages. Empty means that no checksums are compared.
    type: str
    default: ""
  require_checksums:
    description: Refuse packages that O(checksums) does not list.
    type: bool
    default: true
  user:
    description: Owner of the device nodes. Must exist when the driver is installed.
    type: str
    default: HwHiAiUser
  group:
    description: Group of the device nodes. Must exist when the driver is installed.
    type: str
    default: HwHiAiUser
  install_for_all:
    description: Let all users of the machine use the driver, not only O(group).
    type: bool
    default: true
  eula_accepted:
    description: Huawei's end user licence agreement has been read and is accepted.
    type: bool
    default: false
  timeout:
    description: The longest an installer may take, in seconds.
    type: int
    default: 1800
"""

EXAMPLES = r"""
- name: What would be installed
  llmops.ascend.ascend_driver:
    packages: [Ascend-hdk-910b-npu-driver_26.0.rc1_linux-x86-64.run, Ascend-hdk-910b-npu-firmware_7.8.0.6.201.run]
    require_checksums: false
    eula_accepted: true
  check_mode: true

- name: Driver and firmware
  llmops.ascend.ascend_driver:
    packages: [Ascend-hdk-910b-npu-driver_26.0.rc1_linux-x86-64.run, Ascend-hdk-910b-npu-firmware_7.8.0.6.201.run]
    directory: /var/cache/llmops/driver
    checksums: "{{ lookup('ansible.builtin.file', 'artifacts/SHA256SUMS') }}"
    eula_accepted: true
"""

RETURN = r"""
installed:
  description: Versions by product after the module ran; empty where a product is not installed.
  type: dict
  returned: always
  sample: {driver: 26.0.rc1, firmware: 7.8.0.6.201}
steps:
  description: What was run, or in check mode would be, in order.
  type: list
  elements: dict
  returned: always
  sample: [{product: driver, package: Ascend-hdk-910b-npu-driver_26.0.rc1_linux-x86-64.run, installed: "",
            wanted: 26.0.rc1, text: install driver 26.0.rc1}]
reboot_required:
  description: Something installed since the last boot starts with the next one only.
  type: bool
  returned: always
reboot_reasons:
  description: What waits for the reboot.
  type: list
  elements: str
  returned: always
  sample: [firmware 7.8.0.6.201]
holders:
  description: Processes that have a device open. A driver in use cannot be exchanged.
  type: list
  elements: dict
  returned: always
  sample: [{pid: 4711, name: VLLMWorker_TP0, node: /dev/davinci0}]
answers:
  description: Whether C(npu-smi info) answers.
  type: bool
  returned: always
answer:
  description: What C(npu-smi) said when it did not answer, empty otherwise.
  type: str
  returned: always
  sample: dcmi module initialize failed. ret is -8005
progress:
  description: The installers' own lines.
  type: list
  elements: str
  returned: always
"""

import contextlib
import hashlib
import os
import platform
import shutil
import signal
import subprocess
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llmops.ascend.plugins.module_utils import ascend_packages as packages
from ansible_collections.llmops.ascend.plugins.module_utils.processes import open_files

# /run is empty after a boot, and so is the list of what waits for one.
PENDING = Path("/run/llmops/driver-reboot")
ENVIRONMENT = {
    **os.environ,
    "LC_ALL": "C",
    "PATH": os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin",
}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "list", "elements": "str", "required": True},
            "directory": {"type": "path"},
            "driver_version": {"type": "str", "default": ""},
            "firmware_version": {"type": "str", "default": ""},
            "chip": {"type": "str", "default": ""},
            "checksums": {"type": "str", "default": ""},
            "require_checksums": {"type": "bool", "default": True},
            "user": {"type": "str", "default": "HwHiAiUser"},
            "group": {"type": "str", "default": "HwHiAiUser"},
            "install_for_all": {"type": "bool", "default": True},
            "eula_accepted": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**ensure(module))
    except packages.PackageError as error:
        module.fail_json(msg=str(error), installed=installed_versions(), steps=[], progress=[])


def ensure(module: AnsibleModule) -> dict:
    """Compare, install what differs, and describe the machine as it is then."""
    options = module.params
    before = installed_versions()
    versions = {product: options[f"{product}_version"] for product in packages.PRODUCTS}
    wanted = packages.wanted_packages(options["packages"], platform.machine(), before, versions, options["chip"])
    steps = packages.plan(before, wanted)
    checksums = packages.read_checksums(options["checksums"])
    for step in steps:
        check_permission(step, options, checksums)
    progress: list[str] = []
    if not module.check_mode:
        for step in steps:
            progress += install(step, options, checksums)
    after = {**before, **{step.package.product: step.package.version for step in steps}}
    answer = ask_npu_smi() if before["driver"] or not module.check_mode else "no driver is installed yet"
    reasons = PENDING.read_text().splitlines() if PENDING.exists() else []
    return {
        "changed": bool(steps),
        "installed": before if module.check_mode else after,
        "steps": [
            {
                "product": step.package.product,
                "package": step.package.name,
                "installed": step.installed,
                "wanted": step.package.version,
                "text": step.text,
            }
            for step in steps
        ],
        "reboot_required": bool(reasons),
        "reboot_reasons": reasons,
        "holders": holders(),
        "answers": not answer,
        "answer": answer,
        "progress": progress,
        "diff": {"before": describe(before), "after": describe(after)},
    }


def check_permission(step: packages.Step, options: dict, checksums: dict) -> None:
    """What must hold before anything is copied or run."""
    if not options["eula_accepted"]:
        raise packages.PackageError(
            f"to {step.text} means to accept Huawei's end user licence agreement (the installer runs with "
            "--quiet): read it, then set driver_eula_accepted: true"
        )
    if options["require_checksums"] and step.package.name not in checksums:
        raise packages.PackageError(
            f"{step.package.name} has no checksum: run `sha256sum *.run > SHA256SUMS` in the artifacts "
            'directory, or set driver_checksum_file: "" to do without'
        )


def install(step: packages.Step, options: dict, checksums: dict) -> list[str]:
    """Run one installer; returns its lines. Raises PackageError when it fails."""
    if not options["directory"]:
        raise packages.PackageError(f"to {step.text} the option directory must say where {step.package.name} lies")
    path = Path(options["directory"]) / step.package.name
    if not path.is_file():
        raise packages.PackageError(f"{path} is not on the machine: copy it there first")
    expected, found = checksums.get(step.package.name), sha256(path)
    if expected not in (None, found):
        raise packages.PackageError(
            f"{path} is damaged: its SHA-256 is {found}, SHA256SUMS says {expected}; put the original file into the artifacts directory"
        )
    arguments = packages.installer_arguments(step, options["user"], options["group"], options["install_for_all"])
    code, output = run(["bash", str(path), *arguments], options["timeout"])
    outcome = packages.read_outcome(step.package.product, code, output)
    if not outcome.installed:
        raise packages.PackageError(outcome.message)
    if outcome.reboot_required:
        remember_reboot(f"{step.package.product} {step.package.version}")
    return packages.progress_lines(output)


def run(command: list[str], timeout: int) -> tuple[int, str]:
    """Run an installer without a terminal, in a group of its own so that a timeout ends its children too."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise packages.PackageError(
            f"{command[1]} did not end within {timeout} s and was killed: read {packages.INSTALL_LOG}, "
            "then run again with a higher driver_install_timeout"
        ) from None
    return process.returncode, output


def remember_reboot(reason: str) -> None:
    """Note what waits for a reboot, for this and later runs."""
    PENDING.parent.mkdir(mode=0o755, exist_ok=True)
    with PENDING.open("a") as pending:
        pending.write(reason + "\n")


def installed_versions() -> dict[str, str]:
    """The installed version of each product, "" for none."""
    info = read(Path(packages.INSTALL_INFO))
    return {
        product: packages.read_version(read(Path(packages.install_path(info, product)) / product / "version.info"))
        for product in packages.PRODUCTS
    }


def read(path: Path) -> str:
    """A file's text, "" when it is not there."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def sha256(path: Path) -> str:
    """The SHA-256 of a file of any size."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def holders() -> list[dict]:
    """Who has a device open, one entry per process. Paths are those the process sees, so containers count too."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        node = next((target for target in open_files(process) if target.startswith(packages.DEVICE_NODES)), None)
        if node:
            with contextlib.suppress(OSError):  # it ended meanwhile
                found.append({"pid": int(process.name), "name": (process / "comm").read_text().strip(), "node": node})
    return sorted(found, key=lambda holder: holder["pid"])


def ask_npu_smi() -> str:
    """Whether the driver works: "" when npu-smi lists its devices, else what it said."""
    tool = shutil.which("npu-smi", path=ENVIRONMENT["PATH"])
    if not tool:
        return "npu-smi is not on the machine"
    try:
        result = subprocess.run([tool, "info"], capture_output=True, text=True, errors="replace", timeout=120, env=ENVIRONMENT)
    except subprocess.TimeoutExpired:
        return "npu-smi info did not end within 120 s"
    said = (result.stdout + result.stderr).strip().splitlines()
    # It has been seen to fail with code 0: a table is what counts.
    if result.returncode == 0 and any(line.startswith("| NPU") for line in said):
        return ""
    return said[-1].strip() if said else f"npu-smi info ended with code {result.returncode} and said nothing"


def describe(versions: dict[str, str]) -> str:
    """Versions as lines, for the diff."""
    return "".join(f"{product}: {version or 'not installed'}\n" for product, version in versions.items())


if __name__ == "__main__":
    main()
