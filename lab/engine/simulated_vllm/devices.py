"""The accelerators an engine sees, and taking them for itself.

What the driver would do is done with `flock` on one file per device in the driver directory, mounted read-only into
every container: it works across containers, `/proc/locks` names the holder, and the kernel frees it on SIGKILL.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from simulated_vllm.settings import DRIVER_LAB_DIRECTORY

DEVICE_DIRECTORY = Path(os.environ.get("LLMOPS_LAB_DEVICES", "/dev"))
MANAGEMENT_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")

# The tool's own words, typing errors included (dcmi_interface_api.h and npu_smi.c give the numbers).
INITIALIZE_FAILED = "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi module initialize failed. ret is -8005"
DEVICE_IS_USED = "dcmi model initialized failed, because the device is used. ret is -8020"


class DeviceError(RuntimeError):
    """The devices are not there or not free; the message is what the driver's libraries print."""


def present() -> list[int]:
    """The N of every /dev/davinciN, ascending: the logic id that the runtime counts on is the position in this list."""
    names = (re.fullmatch(r"davinci(\d+)", path.name) for path in DEVICE_DIRECTORY.iterdir())
    return sorted(int(name[1]) for name in names if name)


def visible(count: int) -> list[int]:
    """The devices for `count` ranks, as ASCEND_RT_VISIBLE_DEVICES selects them (default: the first ones).

    Raises DeviceError when driver or devices are missing or fewer than needed.
    """
    devices = present()
    missing = [node for node in MANAGEMENT_NODES if not (DEVICE_DIRECTORY / node).exists()]
    if not devices or missing or not (DRIVER_LAB_DIRECTORY / "locks").is_dir():
        raise DeviceError(INITIALIZE_FAILED)
    selection = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if selection:
        try:
            chosen = [devices[int(part)] for part in selection.split(",") if int(part) >= 0]
        except (ValueError, IndexError):
            raise DeviceError(
                f"aclrtSetDevice failed: invalid device id in ASCEND_RT_VISIBLE_DEVICES={selection}: "
                f"{len(devices)} devices are present (error code 107001)"
            ) from None
    else:
        chosen = devices
    if len(chosen) < count:
        raise DeviceError(
            f"World size ({count}) is larger than the number of available NPUs ({len(chosen)}): aclrtSetDevice failed (error code 107001)"
        )
    return chosen[:count]


def hold(devices: list[int]) -> None:
    """Takes the devices until this process ends. Raises DeviceError when one is held by another.

    The nodes are opened too, as the runtime does: that is how installers look for users of the driver.
    """
    for device in devices:
        try:
            os.open(DEVICE_DIRECTORY / f"davinci{device}", os.O_RDWR)  # fails where the container was not given it
            lock = os.open(DRIVER_LAB_DIRECTORY / "locks" / f"davinci{device}", os.O_RDONLY)
        except OSError:
            raise DeviceError(INITIALIZE_FAILED) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # never closed: the lock lives as long as the process
        except BlockingIOError:
            raise DeviceError(DEVICE_IS_USED) from None
