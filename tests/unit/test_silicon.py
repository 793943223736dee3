"""The lab's simulated packages and npu-smi, installed into a directory: they must behave as the real ones were seen to.

Needs root, as the packages do (device nodes, ownership).
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

from lab.llmops_lab.hardware import default_machine
from lab.silicon.build import build

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="device nodes are made by root")


class Machine:
    """A bare root directory with a user, hardware, and the packages beside it."""

    def __init__(self, directory: Path, machine: str = platform.machine()) -> None:
        self.root = directory / "root"
        for name in ("etc", "dev", "usr/share/llmops-lab", "usr/local/sbin", "var/log"):
            (self.root / name).mkdir(parents=True)
        (self.root / "usr/share/llmops-lab/hardware.json").write_text(json.dumps(default_machine()))
        (self.root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nHwHiAiUser:x:1500:1501::/home/x:/bin/bash\n")
        (self.root / "etc/group").write_text("root:x:0:\nHwHiAiUser:x:1501:\n")
        self.driver, self.firmware = build(directory / "packages", machine=machine)
        self.lab = self.root / "usr/local/Ascend/driver/lab"

    def run(self, *command: str | Path, said: str = "") -> subprocess.CompletedProcess:
        environment = {**os.environ, "LLMOPS_LAB_ROOT": str(self.root)}
        return subprocess.run(
            [str(part) for part in command],
            input=said,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def npu_smi(self, *arguments: str) -> subprocess.CompletedProcess:
        return self.run(self.root / "usr/local/sbin/npu-smi", *arguments)

    def nodes(self) -> set[str]:
        return {path.name for path in (self.root / "dev").iterdir()}


@pytest.fixture
def bare(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def machine(bare):
    assert bare.run(bare.driver, "--full", "--quiet", "--install-for-all").returncode == 0
    return bare


def test_the_same_input_gives_the_same_bytes(tmp_path):
    one, other = build(tmp_path / "one"), build(tmp_path / "other")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]
    sums = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path / "one", capture_output=True, check=False)
    assert sums.returncode == 0


def test_a_damaged_package_stops_itself(bare):
    with bare.driver.open("ab") as package:
        package.write(b"\0" * 512)
    run = bare.run(bare.driver, "--full", "--quiet")
    assert (run.returncode, bare.nodes()) == (1, set())
    assert "the archive is damaged" in run.stdout


def test_the_user_must_exist_first(bare):
    (bare.root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    run = bare.run(bare.driver, "--full", "--quiet")
    assert run.returncode == 1
    assert "ERR_NO:0x0091;ERR_DES:HwHiAiUser not exists! Please add HwHiAiUser" in run.stdout


def test_a_package_for_another_architecture_is_refused(tmp_path):
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    machine = Machine(tmp_path, other)
    assert machine.driver.name.endswith(f"linux-{other.replace('_', '-')}.run")
    run = machine.run(machine.driver, "--full", "--quiet")
    assert run.returncode == 1
    assert "Arch mismatch" in run.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--quiet"], "param need used with full/run/docker/upgrade/devel"),
        (["--full", "--upgrade"], "param need used with full/run/docker/upgrade/devel"),
        (["--version", "--full"], "can't use with other parameters"),
        (["--full", "--install-username=HwHiAiUser"], "not specified at the same time"),
        (["--upgrade", "--install-username=a", "--install-usergroup=a"], "need used with full/run/docker/devel"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_options_that_make_no_sense(bare, options, complaint):
    run = bare.run(bare.driver, *options)
    assert run.returncode == 1
    assert complaint in run.stdout


def test_an_installed_driver(machine):
    assert machine.nodes() == {*(f"davinci{n}" for n in range(8)), "davinci_manager", "devmm_svm", "hisi_hdc"}
    status = (machine.root / "dev/davinci3").stat()
    assert (status.st_mode & 0o777, status.st_uid, status.st_gid) == (0o660, 1500, 1501)
    assert "Version=26.0.rc1\n" in (machine.root / "usr/local/Ascend/driver/version.info").read_text()
    assert "Driver_Install_For_All=yes\n" in (machine.root / "etc/ascend_install.info").read_text()


def test_installing_again_asks_unless_quiet(machine):
    no = machine.run(machine.driver, "--full", said="n\n")
    assert no.returncode == 0, "a no is no error to Huawei's installer"
    assert "do you want to continue?  [y/n]" in no.stdout
    assert "upgradePercentage" not in no.stdout
    assert "upgradePercentage:100%" in machine.run(machine.driver, "--full", said="maybe\ny\n").stdout
    assert "takes effect immediately" in machine.run(machine.driver, "--full", "--quiet").stdout


def test_firmware_needs_the_driver_and_runs_after_the_next_boot(bare):
    assert bare.run(bare.firmware, "--full", "--quiet").returncode == 1
    bare.run(bare.driver, "--full", "--quiet")
    run = bare.run(bare.firmware, "--full", "--quiet")
    assert run.returncode == 0
    assert "Reboot now or after driver installation for the installation/upgrade to take effect" in run.stdout
    assert "Firmware Version               : 7.7.0.10.220" in bare.npu_smi("info", "-t", "board", "-i", "0").stdout
    assert bare.run("python3", "-B", bare.lab / "silicon.py", "boot").returncode == 0
    assert "Firmware Version               : 7.8.0.6.201" in bare.npu_smi("info", "-t", "board", "-i", "0").stdout


def test_without_a_hot_reset_the_installer_ends_with_2(bare):
    (bare.root / "etc/llmops-lab").mkdir()
    (bare.root / "etc/llmops-lab/no-hot-reset").touch()
    run = bare.run(bare.driver, "--full", "--quiet")
    assert (run.returncode, bare.nodes()) == (2, set())
    assert "Reboot needed for installation/upgrade to take effect!" in run.stdout
    failed = bare.npu_smi("info")
    assert (failed.returncode, failed.stdout.splitlines()[-1]) == (187, "dcmi module initialize failed. ret is -8005")


def test_uninstalling_leaves_nothing(machine):
    assert machine.run(machine.root / "usr/local/Ascend/driver/script/uninstall.sh").returncode == 0
    assert machine.nodes() == set()
    assert not (machine.root / "etc/ascend_install.info").exists()
    again = machine.run(machine.driver, "--uninstall")
    assert again.returncode == 1
    assert "Driver package is not installed on this device, uninstall failed" in again.stdout


def test_a_held_device_shows_its_process_and_blocks_the_installer(machine):
    with (machine.lab / "locks/davinci1").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = machine.npu_smi("info").stdout
        blocked = machine.run(machine.driver, "--upgrade", "--quiet")
    row = rf"\| 1       0                 \| {os.getpid():<14}\| .{{15,19}}\| 55048                 \| NA                      \|"
    assert re.search(row, table)
    assert "58449/ 65536" in table
    assert table.count("No running processes found in NPU") == 7
    assert blocked.returncode == 1
    assert "The davinci nodes are occupied by some processes" in blocked.stdout
    assert machine.npu_smi("info").stdout.count("No running processes found in NPU") == 8


def test_every_line_of_the_table_is_as_wide_as_the_real_one(machine):
    assert {len(line) for line in machine.npu_smi("info").stdout.splitlines()} == {116}


def test_the_topology_is_the_cluster_reports(machine):
    lines = machine.npu_smi("info", "-t", "topo").stdout.splitlines()
    assert lines[0] == "\t   " + "".join(f"NPU{n:<8}" for n in range(8)) + "CPU Affinity"
    assert lines[1].split() == ["NPU0", "X", "PHB", "PHB", "PHB", "SYS", "SYS", "SYS", "SYS", "0-31,64-95"]
    assert lines[8].split()[-1] == "32-63,96-127"
    assert "  NA   = Unknown relationship." in lines


def test_other_queries(machine):
    mapping = machine.npu_smi("info", "-m").stdout.splitlines()
    assert mapping[0].split("  ")[0] == "\tNPU ID"
    assert [line.split() for line in mapping[1:3]] == [["0", "0", "0", "0", "Ascend", "910B4-1"], ["0", "1", "-", "-", "Mcu"]]
    assert machine.npu_smi("info", "-l").stdout.startswith("\tTotal Count                    : 8\n")
    assert machine.npu_smi("-v").stdout == "npu-smi version: 26.0.rc1\n"
    assert "HBM Capacity(MB)               : 65536" in machine.npu_smi("info", "-t", "usages", "-i", "5").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["-t", "vnpu-mode"], 193, "This device does not support querying vnpu-mode."),
        (["-t", "board", "-i", "8"], 184, "npu get board type failed. ret is -8008"),
    ],
)
def test_failures_carry_the_real_codes(machine, arguments, code, text):
    run = machine.npu_smi("info", *arguments)
    assert (run.returncode, run.stdout) == (code, f"{text}\n")


def test_devices_fall_sick_vanish_and_heal(machine):
    device = machine.lab / "device"
    assert machine.run(device, "3", "--health", "Critical").returncode == 0
    assert machine.run(device, "4", "--absent").returncode == 0
    assert "| 3     910B4-1             | Critical      |" in machine.npu_smi("info").stdout
    assert "Health                         : Critical" in machine.npu_smi("info", "-t", "health", "-i", "3").stdout
    assert "davinci4" not in machine.nodes()
    assert machine.npu_smi("info").stdout.count("910B4-1") == 7
    for number in ("3", "4"):
        assert machine.run(device, number, "--heal").returncode == 0
    assert machine.npu_smi("info").stdout.count("| OK            |") == 8
    assert machine.run(device, "9", "--heal").returncode == 2


def test_npu_smi_without_its_driver_directory_does_not_start(machine):
    machine.lab.rename(machine.lab.with_name("elsewhere"))
    run = machine.npu_smi("info")
    assert run.returncode == 127
    assert "libdrvdsmi_host.so: cannot open shared object file" in run.stderr
