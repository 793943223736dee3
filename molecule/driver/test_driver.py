"""A machine with its driver: what was installed, that a boot brings it back, and how versions change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
MACHINE = "machine66"
NODES = sorted([*(f"/dev/davinci{number}" for number in range(8)), "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"])

testinfra_hosts = [f"ansible://{MACHINE}?force_ansible=True"]


def play(*arguments: str) -> subprocess.CompletedProcess:
    """The role again, as `molecule converge` runs it."""
    command = ["ansible-playbook", "-i", str(PROJECT / "inventory/lab"), str(Path(__file__).with_name("converge.yml"))]
    return subprocess.run([*command, *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)


def packages(directory: Path, driver_version: str, firmware_version: str) -> str:
    """Other versions than those the lab offers, as the option that makes the role use them."""
    build = [sys.executable, str(PROJECT / "lab/silicon/build.py"), str(directory)]
    subprocess.run([*build, "--driver-version", driver_version, "--firmware-version", firmware_version], check=True)
    return f"--extra-vars=artifacts_directory={directory}"


def check_devices(host, driver_version: str, firmware_version: str) -> None:
    """Nodes with their owner, npu-smi with its table, and the versions that run."""
    nodes = host.check_output("stat -c '%n %F %U:%G %a' /dev/davinci* /dev/devmm_svm /dev/hisi_hdc").splitlines()
    assert sorted(nodes) == [f"{node} character special file HwHiAiUser:HwHiAiUser 660" for node in NODES]
    table = host.check_output("npu-smi info")
    assert f"npu-smi {driver_version} " in table
    assert table.count("910B4-1") == 8
    board = host.check_output("npu-smi info -t board -i 7")
    assert f"Software Version               : {driver_version}" in board
    assert f"Firmware Version               : {firmware_version}" in board


def test_a_bare_machine_has_driver_and_firmware(host):
    check_devices(host, "26.0.rc1", "7.8.0.6.201")
    assert "Driver_Install_For_All=yes" in host.file("/etc/ascend_install.info").content_string
    assert not host.file("/var/cache/llmops/driver").exists, "packages are not left behind"


def test_a_reboot_brings_the_devices_back(host):
    subprocess.run([str(PROJECT / "lab/lab"), "reboot", MACHINE], check=True, timeout=120)
    check_devices(host, "26.0.rc1", "7.8.0.6.201")


def test_a_driver_in_use_is_not_exchanged(host, tmp_path):
    newer = packages(tmp_path, "26.1.0", "7.8.0.6.201")
    host.check_output("systemd-run --quiet --unit=holder -- bash -c 'exec 9<>/dev/davinci5; exec sleep 1000'")
    try:
        run = play(newer)
    finally:
        host.check_output("systemctl stop holder")
    assert run.returncode != 0
    assert "cannot change driver 26.0.rc1 -> 26.1.0 while /dev/davinci5 is held by sleep" in " ".join(run.stdout.split())
    check_devices(host, "26.0.rc1", "7.8.0.6.201")


def test_a_damaged_package_is_refused(host, tmp_path):
    newer = packages(tmp_path, "26.1.0", "7.8.0.6.201")
    with next(tmp_path.glob("*driver*")).open("ab") as package:
        package.write(b"\0")
    run = play(newer)
    assert run.returncode != 0
    assert "is damaged: its SHA-256 is" in " ".join(run.stdout.split())
    check_devices(host, "26.0.rc1", "7.8.0.6.201")


def test_a_driver_that_waits_for_a_boot_says_so(host, tmp_path):
    """Where the chips cannot be reset the installer ends with code 2: no device before the next boot."""
    newer = packages(tmp_path, "26.1.0", "7.8.0.8.100")
    host.check_output("mkdir -p /etc/llmops-lab && touch /etc/llmops-lab/no-hot-reset")
    run = play(newer, "--extra-vars=driver_reboot=never")
    assert run.returncode != 0
    said = " ".join(run.stdout.split())
    assert "driver 26.1.0 is installed but npu-smi fails (dcmi module initialize failed. ret is -8005)" in said
    assert "reboot the machine or set driver_reboot: when_needed" in said


def test_the_boot_that_is_due_is_made_where_allowed(host, tmp_path):
    newer = packages(tmp_path, "26.1.0", "7.8.0.8.100")
    run = play(newer)
    assert run.returncode == 0, run.stdout
    check_devices(host, "26.1.0", "7.8.0.8.100")
    assert "changed=0 " in play(newer).stdout
