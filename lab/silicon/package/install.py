"""The installer inside the lab's simulated driver and firmware packages.

It behaves as the real ones do, so that the role meets on lab machines what it will meet in the field: flags, questions,
texts, exit codes, the user that must exist first, silent reinstallation. Sources: the published installer scripts of
the driver (hicann/driver, scripts/package/custom/driver) and recorded runs of both packages. Kernel modules, signatures
and flash are not here.

Exit codes: 0 installed and running, 1 failed, 2 installed but the chips could not be reset: the next boot starts it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import silicon  # noqa: E402  (it lies beside this file)

PACKAGE = json.loads((HERE / "package.json").read_text())  # {"product": "driver"|"firmware", "version", "arch": ""|"x86_64"|...}
INSTALL_INFO = silicon.ROOT / "etc/ascend_install.info"
LOGS = silicon.ROOT / "var/log/ascend_seclog"
UNIT = "llmops-lab-silicon.service"
ALONE = {"--uninstall", "--version", "--check"}
WAYS = {"--full", "--run", "--devel", "--docker", "--debug", "--upgrade"}
EXTRAS = {"--quiet", "--force", "--install-for-all", "--norebuild", "--repack"}
VALUED = {"--install-username", "--install-usergroup", "--install-path"}


def say(text: str) -> None:
    """A line as the real installers print it, also to their log."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    line = f"[{PACKAGE['product'].capitalize()}] [{now}] {text}"
    print(line, flush=True)
    if LOGS.is_dir():
        with (LOGS / "ascend_install.log").open("a") as log:
            log.write(line + "\n")


def fail(text: str) -> None:
    """End with exit code 1."""
    say(f"[ERROR]{text}")
    sys.exit(1)


def read_options(arguments: list[str]) -> dict[str, str]:
    """The options by name, checked for sense together as the real installers do."""
    options = dict(argument.partition("=")[::2] for argument in arguments)
    for name in options:
        if name not in ALONE | WAYS | EXTRAS | VALUED:
            fail(f"ERR_NO:0x0004;ERR_DES:Unrecognized parameters: {name}")
    if ALONE & set(options):
        if len(options) > 1 and options.keys() != {"--uninstall", "--quiet"}:
            fail("ERR_NO:0x0004;ERR_DES:version/uninstall/check can't use with other parameters.")
    elif len(WAYS & set(options)) != 1:
        fail("ERR_NO:0x0004;ERR_DES:param need used with full/run/docker/upgrade/devel.")
    named = {"--install-username", "--install-usergroup"} & set(options)
    if len(named) == 1:
        fail("ERR_NO:0x0004;ERR_DES:Username and usergroup are not specified at the same time.")
    if named and "--upgrade" in options:
        fail("ERR_NO:0x0004;ERR_DES:install-username and install-usergroup params need used with full/run/docker/devel.")
    if options.get("--install-path", "/usr/local/Ascend") != "/usr/local/Ascend":
        fail("ERR_NO:0x0003;ERR_DES:the lab's packages install to /usr/local/Ascend only")
    return options


def read_info() -> dict[str, str]:
    """The record both packages share, /etc/ascend_install.info."""
    if not INSTALL_INFO.exists():
        return {}
    return dict(line.partition("=")[::2] for line in INSTALL_INFO.read_text().splitlines())


def write_info(info: dict[str, str]) -> None:
    """Write the record; it goes with the last product."""
    if any(key.endswith("_Install_Path_Param") for key in info):
        silicon.write_atomically(INSTALL_INFO, "".join(f"{key}={value}\n" for key, value in info.items()))
    else:
        INSTALL_INFO.unlink(missing_ok=True)


def user_and_group(options: dict[str, str], info: dict[str, str]) -> tuple[str, str]:
    """Who will own the devices; must exist, and be the same as last time."""
    user = options.get("--install-username", info.get("UserName", "HwHiAiUser"))
    group = options.get("--install-usergroup", info.get("UserGroup", "HwHiAiUser"))
    if info and (user, group) != (info["UserName"], info["UserGroup"]):
        fail("ERR_NO:0x0095;ERR_DES:The user and group are not same with last installation,do not support overwriting installation")
    if silicon.id_of("passwd", user) is None:
        fail(f"ERR_NO:0x0091;ERR_DES:{user} not exists! Please add {user}")
    if silicon.id_of("group", group) is None:
        fail(f"ERR_NO:0x0091;ERR_DES:{group} group not exists! Please add {group} group")
    if user == "root" and "--install-for-all" not in options:
        fail("ERR_NO:0x0091;ERR_DES:username not permission for root")
    say(f"[INFO]set username and usergroup, {user}:{group}")
    return user, group


def occupied() -> bool:
    """Whether a process has a device open, or a running container has one mapped."""
    nodes = (str(silicon.DEV / "davinci"), *(str(silicon.DEV / name) for name in silicon.SHARED_NODES))
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(target.startswith(nodes) for target in silicon.open_files(process.name)):
                return True
            inside = process / "root/dev"  # a container has a /dev of its own
            elsewhere = inside.stat().st_dev != Path("/dev").stat().st_dev
            if silicon.WHOLE_MACHINE and elsewhere and any(inside.glob("davinci*")):
                return True
        except OSError:  # it ended meanwhile, or is none of ours
            continue
    return bool(silicon.holders())


def stop_if_occupied(options: dict[str, str]) -> None:
    """A driver in use cannot be exchanged."""
    if "--force" not in options and occupied():
        say(
            "[ERROR]The davinci nodes are occupied by some processes, please stop processes and install or uninstall "
            f"again, details in : {LOGS / 'ascend_install.log'}"
        )
        say("[INFO]If you want to install or uninstall the driver forcibly, add the force parameter. For details, see [--help].")
        sys.exit(1)


def confirm(question: str, options: dict[str, str]) -> None:
    """Ask, unless quiet. A no is not an error to the real installers: they exit with 0."""
    if "--quiet" in options:
        return
    say(f"[INFO]{question}  [y/n] ")
    for line in sys.stdin:
        if line.strip() == "y":
            return
        if line.strip() == "n":
            break
        say("[ERROR]ERR_NO:0x0002;ERR_DES:input error, please input again!")
    say("[INFO]installation Stoped!")
    sys.exit(0)


def copy(name: str, target: Path, mode: int) -> None:
    """Put one file of the package in its place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(HERE / name, target)
    target.chmod(mode)


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write one file, with its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    silicon.write_atomically(path, text)
    path.chmod(mode)


def put_driver_files() -> None:
    """Everything of the driver but its version, which comes last."""
    root, driver, lab = silicon.ROOT, silicon.DRIVER, silicon.LAB
    copy("npu-smi", root / "usr/local/sbin/npu-smi", 0o755)
    copy("silicon.py", lab / "silicon.py", 0o644)
    copy("device", lab / "device", 0o755)
    copy(UNIT, root / "etc/systemd/system" / UNIT, 0o644)
    put_uninstaller(driver)
    for library in ("driver/lib64/common/libdrvdsmi_host.so", "driver/lib64/driver/libascend_hal.so"):
        write(root / "usr/local/Ascend" / library, "simulated library of the lab\n")
    write(root / "usr/local/dcmi/libdcmi.so", "simulated library of the lab\n")
    write(
        driver / "tools/upgrade-tool",
        "#!/bin/sh\n# Simulated by the lab: prints the firmware the chips run.\n"
        f'echo "Get component version($(cat {lab}/firmware.running)) succeed for deviceId(0), componentType(0)."\n',
        0o755,
    )


def put_uninstaller(directory: Path) -> None:
    """script/uninstall.sh, which the real products leave behind too."""
    for name in ("install.py", "silicon.py", "package.json"):
        copy(name, directory / "script" / name, 0o644)
    write(
        directory / "script/uninstall.sh",
        f'#!/bin/sh\nexec python3 {directory}/script/install.py --uninstall "$@"\n',
        0o755,
    )


def install_driver(options: dict[str, str], info: dict[str, str]) -> int:
    """Install or overwrite the driver; the exit code says whether it runs already."""
    user, group = user_and_group(options, info)
    installed = silicon.version_of(silicon.DRIVER)
    if installed and "--upgrade" not in options:
        confirm(
            f"Driver package has been installed on the path /usr/local/Ascend, the version is {installed}, and the "
            f"version of this package is {PACKAGE['version']},do you want to continue?",
            options,
        )
    stop_if_occupied(options)
    (silicon.DRIVER / "version.info").unlink(missing_ok=True)
    say("[INFO]upgradePercentage:10%")
    write_info(
        {
            **info,
            "UserName": user,
            "UserGroup": group,
            "Driver_Install_Type": "full",
            "Driver_Install_Path_Param": "/usr/local/Ascend",
            "Driver_Install_For_All": "yes" if "--install-for-all" in options else info.get("Driver_Install_For_All", "no"),
            "Driver_Install_Mode": "normal",
        }
    )
    silicon.remove_nodes()
    put_driver_files()
    say("[INFO]upgradePercentage:40%")
    if not (silicon.LAB / "firmware.running").exists():
        write(silicon.LAB / "firmware.running", silicon.FACTORY_FIRMWARE)
    write(silicon.DRIVER / "version.info", (HERE / "version.info").read_text(), 0o444)
    silicon.systemctl("daemon-reload")
    silicon.systemctl("enable", UNIT)
    running = not silicon.NO_HOT_RESET.exists()
    if running:
        silicon.load()
    say("[INFO]upgradePercentage:100%")
    done = "upgraded" if "--upgrade" in options and installed else "installed"
    if running:
        say(f"[INFO]Driver package {done} successfully! The new version takes effect immediately. ")
        return 0
    say(f"[INFO]Driver package {done} successfully! Reboot needed for installation/upgrade to take effect!")
    return 2


def install_firmware(options: dict[str, str], info: dict[str, str]) -> int:
    """Install or overwrite the firmware; the chips run it after the next boot."""
    user, group = user_and_group(options, info)
    installed = silicon.version_of(silicon.FIRMWARE)
    if installed and "--upgrade" not in options:
        confirm(
            f"Firmware package has been installed on the path /usr/local/Ascend, the version is {installed}, and the "
            f"version of this package is {PACKAGE['version']},do you want to continue?",
            options,
        )
    chips = len(silicon.hardware().get("devices", []))
    if not chips:
        fail("no chip answers: the firmware reaches the chips through the driver, install that first")
    for percentage in (0, 51, 100):
        say(f"[INFO]upgradePercentage: {percentage}%")
    write_info(
        {
            **info,
            "UserName": user,
            "UserGroup": group,
            "Firmware_Install_Type": "full",
            "Firmware_Install_Path_Param": "/usr/local/Ascend",
        }
    )
    put_uninstaller(silicon.FIRMWARE)
    write(silicon.FIRMWARE / "version.info", (HERE / "version.info").read_text(), 0o444)
    say(f"[INFO]The firmware of [{chips}] chips are successfully upgraded.")
    done = "upgraded" if "--upgrade" in options and installed else "installed"
    say(f"[INFO]Firmware package {done} successfully! Reboot now or after driver installation for the installation/upgrade to take effect.")
    return 0


def uninstall(options: dict[str, str], info: dict[str, str]) -> int:
    """Take one product away."""
    product = PACKAGE["product"].capitalize()
    if f"{product}_Install_Path_Param" not in info:
        fail(f"ERR_NO:0x0080;ERR_DES:{product} package is not installed on this device, uninstall failed")
    if product == "Driver":
        stop_if_occupied(options)
        silicon.remove_nodes()
        silicon.systemctl("disable", UNIT)
        (silicon.ROOT / "etc/systemd/system" / UNIT).unlink(missing_ok=True)
        (silicon.ROOT / "usr/local/sbin/npu-smi").unlink(missing_ok=True)
        shutil.rmtree(silicon.ROOT / "usr/local/dcmi", ignore_errors=True)
        shutil.rmtree(silicon.DRIVER)
    else:
        shutil.rmtree(silicon.FIRMWARE)
    write_info({key: value for key, value in info.items() if not key.startswith(f"{product}_")})
    say(f"[INFO]{product} package uninstalled successfully! Uninstallation takes effect immediately. ")
    return 0


def main() -> int:
    if os.geteuid() != 0:
        fail("ERR_NO:0x0093;ERR_DES:do not have root permission, operation failed, please use root permission!")
    LOGS.mkdir(mode=0o750, parents=True, exist_ok=True)
    say(f"[INFO]LogFile: {LOGS / 'ascend_install.log'}")
    options = read_options(sys.argv[1:])
    if "--version" in options:
        say(f"[INFO]{PACKAGE['product']} version :{PACKAGE['version']}")
        return 0
    if "--check" in options:
        return 0
    if "--uninstall" in options:
        return uninstall(options, read_info())
    say("[WARNING]Do not power off or restart the system during the installation/upgrade")
    if PACKAGE["arch"] not in ("", platform.machine()):
        fail(f"ERR_NO:0x0092;ERR_DES:Arch mismatch: the package is for {PACKAGE['arch']}, not {platform.machine()}")
    install = install_driver if PACKAGE["product"] == "driver" else install_firmware
    return install(options, read_info())


if __name__ == "__main__":
    sys.exit(main())
