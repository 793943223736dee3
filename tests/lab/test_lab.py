"""The lab keeps its word: machines boot bare, live through what is done to them, and leave nothing behind.

One story on two machines of a lab of its own, told in order; needs root.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab"))

from llmops_lab.settings import Lab, LabError, parse_machines  # noqa: E402

FIRST, SECOND = "labtest", "second"
MACHINES = "machine66-67"


def lab(*arguments: str, name: str = FIRST, check: bool = True) -> subprocess.CompletedProcess:
    """Run lab/lab for a lab."""
    return subprocess.run(
        [ROOT / "lab" / "lab", *arguments], env=os.environ | {"LAB": name}, check=check, capture_output=True, text=True, timeout=240
    )


def status(name: str = FIRST) -> dict:
    return json.loads(lab("status", "--json", name=name).stdout)


def inside(machine: str, script: str) -> str:
    """Run a shell script as root inside a machine of the first lab."""
    return lab("exec", machine, "--", "sh", "-c", script).stdout.strip()


def traces(name: str) -> list[str]:
    """Everything on the host that carries the lab's name: namespaces, interfaces, mounts, control groups, files."""
    found = [line.split()[0] for line in subprocess.check_output(["ip", "netns"], text=True).splitlines()]
    found += [path.name for path in Path("/sys/class/net").iterdir()]
    found += [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/llmops-lab/{name}")]
    found += [str(path) for path in (Path("/var/lib/llmops-lab") / name, *Path("/run/systemd/nspawn").glob("*/*")) if path.exists()]
    return [entry for entry in found if entry.startswith(f"{name}-") or f"/{name}" in entry.replace("-", "/")]


@pytest.fixture(scope="module", autouse=True)
def machines():
    lab("down")
    lab("up", "--machines", MACHINES)
    yield
    lab("down", name=SECOND)
    lab("down")


def test_machines_boot_bare_and_ansible_gets_in():
    assert [machine["state"] for machine in status()["machines"]] == ["on", "on"]
    assert lab("ssh", "machine66", "id -un; sudo -n id -un").stdout.split() == ["ops", "root"]
    assert inside("machine66", "systemctl is-system-running") == "running"
    assert inside("machine66", "command -v dockerd rsync nginx || echo bare") == "bare"
    assert inside("machine67", "ls /data/models") == "Qwen3.8-27B-W8A8"
    assert inside("machine66", "ls /data 2>&1 || true").endswith("No such file or directory")


def test_inventory_derives_the_addresses_that_the_lab_has():
    command = [Path(sys.executable).with_name("ansible"), "-i", ROOT / "inventory/lab", "machine66", "-m", "ansible.builtin.command",
               "-a", "ip -br -4 address"]
    told = subprocess.run(command, env=os.environ | {"LAB": FIRST}, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert f"{Lab(FIRST).management}.66/24" in told
    assert f"{Lab(FIRST).data}.66/24" in told


def test_up_again_changes_nothing_and_is_quick():
    before, started = status(), time.monotonic()
    lab("up", "--machines", MACHINES)
    assert time.monotonic() - started < 10
    assert status() == before


def test_hardware_is_the_report_s():
    assert inside("machine66", "cat /sys/devices/system/node/node1/cpulist") == "32-63,96-127"
    nodes = inside("machine66", "cat /sys/bus/pci/devices/0000:c1:00.0/numa_node /sys/bus/pci/devices/0000:42:00.0/numa_node")
    assert nodes.split() == ["0", "1"]
    assert len(json.loads(inside("machine66", "cat /usr/share/llmops-lab/hardware.json"))["devices"]) == 8


def test_packages_come_from_the_lab_and_nothing_leaves_it():
    inside("machine66", "apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y rsync")
    assert inside("machine66", "command -v rsync") == "/usr/bin/rsync"
    script = "import socket; print(socket.socket().connect_ex(('192.0.2.1', 80)))"
    assert inside("machine66", f'python3 -c "{script}"') == "101"  # ENETUNREACH
    assert subprocess.run(["ip", "route", "get", "198.19.255.1"], capture_output=True).returncode == 2  # EHOSTUNREACH


def test_reboot_keeps_disks():
    inside("machine66", "touch /root/kept /run/lost; touch /dev/shm/lost")
    lab("reboot", "machine66")
    assert inside("machine66", "ls /root/kept /run/lost /dev/shm/lost 2>/dev/null || true") == "/root/kept"


def test_reboot_from_inside_comes_back_by_itself():
    before = status()["machines"][0]["init_pid"]
    lab("ssh", "machine66", "sudo systemctl reboot", check=False)
    deadline = time.monotonic() + 60
    while (machine := status()["machines"][0])["init_pid"] in (before, None) or machine["state"] != "on":
        assert time.monotonic() < deadline, machine
        time.sleep(0.2)


def test_power_cut_ends_everything_at_once_and_keeps_disks():
    lab("kill", "machine66")
    assert [machine["state"] for machine in status()["machines"]] == ["off", "on"]
    assert "machine66 is off" in lab("exec", "machine66", "--", "true", check=False).stderr
    lab("start", "machine66")
    assert inside("machine66", "ls /root/kept") == "/root/kept"


def test_cut_cables_leave_the_machine_running():
    reach = f"timeout 2 bash -c '</dev/tcp/{Lab(FIRST).data}.67/22' 2>/dev/null && echo reached || echo cut"
    assert inside("machine66", reach) == "reached"
    lab("cut", "machine67")
    assert status()["machines"][1]["cut"]
    assert inside("machine66", reach) == "cut"
    assert inside("machine67", "systemctl is-system-running") == "running"
    lab("mend", "machine67")
    assert inside("machine66", reach) == "reached"


def test_reset_makes_it_bare_and_its_host_key_stays_known():
    lab("reset", "machine66")
    assert inside("machine66", "command -v rsync || ls /root/kept 2>/dev/null || echo bare") == "bare"
    assert lab("ssh", "machine66", "hostname").stdout == "machine66\n"


def test_a_second_lab_beside_the_first():
    before = status()
    lab("up", "--machines", "machine66", name=SECOND)
    assert status(SECOND)["management"] != before["management"]
    assert lab("ssh", "machine66", "hostname", name=SECOND).stdout == "machine66\n"
    lab("down", name=SECOND)
    assert traces(SECOND) == []
    assert status() == before


def test_up_mends_what_a_crash_broke():
    subprocess.run(["ip", "netns", "delete", f"{FIRST}-switch"], check=True)
    lab("up", "--machines", MACHINES)
    assert lab("ssh", "machine66", "hostname").stdout == "machine66\n"


def test_down_leaves_nothing_even_without_its_state():
    subprocess.run(["rm", "-r", f"/var/lib/llmops-lab/{FIRST}/ssh", f"/var/lib/llmops-lab/{FIRST}/registry.yml"], check=True)
    assert traces(FIRST)
    lab("down")
    assert traces(FIRST) == []


def test_what_cannot_be_is_said_in_one_line():
    unknown = lab("ssh", "machine99", "true", check=False)
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
    assert "lab/lab up --machines machine99" in unknown.stderr
    bad_name = lab("status", name="Not-A-Name", check=False)
    assert (bad_name.returncode, bad_name.stderr.count("\n")) == (1, 1)
    with pytest.raises(LabError, match="backwards"):
        parse_machines("machine69-66")
    assert [machine.number for machine in parse_machines("machine66-machine67,machine9 machine2")] == [2, 9, 66, 67]


def test_without_root_it_says_so():
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, ROOT / "lab" / "lab", "up"],
        capture_output=True, text=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "needs root: run it with sudo" in done.stderr
