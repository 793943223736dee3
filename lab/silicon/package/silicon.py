"""The simulated accelerators of one lab machine: what is plugged in, how it feels, who holds it.

Installed by the simulated driver package as /usr/local/Ascend/driver/lab/silicon.py and used there by npu-smi, by the
`device` command and by the boot unit. Nothing of it belongs to a real machine.

hardware.json   what is plugged in; from /usr/share/llmops-lab, copied beside this file for containers to see:
                {"devices": [{"npu_id", "chip_id", "logic_id", "phy_id", "name", "bus_id", "hbm_total_mb",
                "numa_node"}], "numa_nodes": [{"id", "cpus"}], "links": {"0": {"1": "PHB"}}}
state.json      how it feels, by phy id: {"3": {"health": "Critical", "hbm_used_mb": 3401, "absent": true}}
locks/davinciN  who holds it: the engine keeps an exclusive flock on it, which works from a read-only mount, across
                containers, and ends with the process however that dies
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(os.environ.get("LLMOPS_LAB_ROOT", "/"))  # tests install into a directory
WHOLE_MACHINE = str(ROOT) == "/"
PLUGGED = ROOT / "usr/share/llmops-lab/hardware.json"
DRIVER = ROOT / "usr/local/Ascend/driver"
FIRMWARE = ROOT / "usr/local/Ascend/firmware"
LAB = DRIVER / "lab"
NO_HOT_RESET = ROOT / "etc/llmops-lab/no-hot-reset"  # where it exists, a new driver starts only with the next boot
DEV = ROOT / "dev"
SHARED_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
HEALTHS = ("OK", "Warning", "Alarm", "Critical", "UNKNOWN")
FACTORY_FIRMWARE = "7.7.0.10.220"  # what the chips came with, until a newer one is installed and the machine is rebooted


def read_json(path: Path) -> dict:
    """The JSON object in a file; empty when the file is not there."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def hardware() -> dict:
    """What is plugged in, as the driver saw it when it was installed or the machine booted."""
    return read_json(LAB / "hardware.json")


def state(phy_id: int) -> dict:
    """How one device feels: the keys of state.json that are set for it."""
    return read_json(LAB / "state.json").get(str(phy_id), {})


def set_state(phy_id: int, change: dict | None) -> None:
    """Change one device's state; None heals it."""
    everything = read_json(LAB / "state.json")
    everything[str(phy_id)] = {**everything.get(str(phy_id), {}), **change} if change else {}
    write_atomically(LAB / "state.json", json.dumps(everything, indent=1, sort_keys=True) + "\n")


def version_of(directory: Path) -> str:
    """The version in a version.info, "" when there is none."""
    try:
        lines = (directory / "version.info").read_text().splitlines()
    except FileNotFoundError:
        return ""
    return next((line.partition("=")[2] for line in lines if line.startswith("Version=")), "")


def id_of(database: str, name: str) -> int | None:
    """The number of a user (passwd) or group (group) of this machine, None when there is none."""
    entries = (line.split(":") for line in (ROOT / "etc" / database).read_text().splitlines())
    return next((int(entry[2]) for entry in entries if entry[0] == name), None)


def lock_file(phy_id: int) -> Path:
    """The file whose flock says who holds a device."""
    return LAB / "locks" / f"davinci{phy_id}"


def holders() -> dict[int, list[int]]:
    """Pids that hold each device, by phy id. In a container only its own pids can be seen, as the kernel has it.

    A line of /proc/locks: `1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF`. The device number there is not always
    the one stat() gives (overlayfs), so it is passed over, and a pid counts when it also has that file open.
    """
    inodes = {str(path.stat().st_ino): int(path.name[len("davinci") :]) for path in (LAB / "locks").glob("davinci*")}
    found: dict[int, list[int]] = {}
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "->" in fields or "FLOCK" not in fields:
            continue
        pid, inode = fields[4], fields[5].rpartition(":")[2]
        if inode in inodes and int(pid) > 0 and _has_open(pid, f"locks/davinci{inodes[inode]}"):
            found.setdefault(inodes[inode], []).append(int(pid))
    return found


def _has_open(pid: str, ending: str) -> bool:
    """Whether a process has a file with this path ending open; True when we may not look."""
    try:
        return any(target.endswith(ending) for target in open_files(pid))
    except PermissionError:
        return True
    except OSError:  # it ended meanwhile
        return False


def open_files(pid: str):
    """What the descriptors of a process point to, without those it closes meanwhile. Raises OSError when it may not be looked at."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            yield os.readlink(entry.path)
        except FileNotFoundError:
            continue


def make_nodes() -> None:
    """Create the device nodes; after a boot there are none. Their numbers are /dev/null's: opening one does no harm."""
    info = dict(line.split("=", 1) for line in (ROOT / "etc/ascend_install.info").read_text().splitlines() if "=" in line)
    owner, group = id_of("passwd", info["UserName"]), id_of("group", info["UserGroup"])
    absent = {device["phy_id"] for device in hardware()["devices"] if state(device["phy_id"]).get("absent")}
    for device in hardware()["devices"]:
        if device["phy_id"] not in absent:
            make_node(f"davinci{device['phy_id']}", owner, group)
        else:
            (DEV / f"davinci{device['phy_id']}").unlink(missing_ok=True)
    for name in SHARED_NODES:
        make_node(name, owner, group)


def make_node(name: str, owner: int | None, group: int | None) -> None:
    """One character device, mode 0660."""
    path = DEV / name
    if not path.exists():
        os.mknod(path, stat.S_IFCHR | 0o660, os.makedev(1, 3))
    os.chown(path, owner or 0, group or 0)
    path.chmod(0o660)


def remove_nodes() -> None:
    """Take all nodes away: the driver is unloaded."""
    for path in [*DEV.glob("davinci*"), *(DEV / name for name in SHARED_NODES)]:
        path.unlink(missing_ok=True)


def load() -> None:
    """What loading the driver does: see what is plugged in, make the nodes, prepare the locks."""
    shutil.copyfile(PLUGGED, LAB / "hardware.json")
    (LAB / "locks").mkdir(exist_ok=True)
    for device in hardware()["devices"]:
        lock_file(device["phy_id"]).touch()
    make_nodes()


def boot() -> None:
    """At boot the driver loads, and firmware that was installed since the last boot becomes the running one."""
    if version_of(FIRMWARE):
        write_atomically(LAB / "firmware.running", version_of(FIRMWARE))
    load()


def running_firmware() -> str:
    """The firmware the chips run, which differs from the installed one until the next boot."""
    try:
        return (LAB / "firmware.running").read_text()
    except FileNotFoundError:
        return FACTORY_FIRMWARE


def systemctl(*arguments: str) -> None:
    """Tell systemd; in a bare directory there is none to tell."""
    if WHOLE_MACHINE:
        subprocess.run(["systemctl", *arguments], check=True)


if __name__ == "__main__":
    if sys.argv[1:] != ["boot"]:
        sys.exit("usage: silicon.py boot")
    boot()
