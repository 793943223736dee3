"""Huawei's driver and firmware packages: which one fits a machine, what is installed, what to run in which order.

Pure text and data; plugins/modules/ascend_driver.py does the running. Sources of names, orders, files and exit codes:
the installation guides of CANN 9.0 and 9.1 (instg_0005), and the driver's published installer scripts (hicann/driver,
scripts/package/custom/driver).
"""

from __future__ import annotations

import re
from typing import Iterable, Mapping, NamedTuple

PRODUCTS = ("driver", "firmware")
VARIABLES = {"driver": "driver_version", "firmware": "driver_firmware_version"}  # by which operators choose
INSTALL_INFO = "/etc/ascend_install.info"
INSTALL_LOG = "/var/log/ascend_seclog/ascend_install.log"
DEFAULT_PATH = "/usr/local/Ascend"
DEVICE_NODES = ("/dev/davinci", "/dev/devmm_svm", "/dev/hisi_hdc")  # beginnings: davinci0.., davinci_manager

# Ascend-hdk-910b-npu-driver_26.0.rc1_linux-x86-64.run, Atlas-A3-hdk-npu-firmware_7.8.0.2.212.run,
# A800-9000-npu-driver_21.0.2_ubuntu18.04-aarch64.run
_NAME = re.compile(
    r"(?P<family>[\w-]+)-npu-(?P<product>driver|firmware)_(?P<version>[\w.]+?)(?:_[a-z]+[\d.]*-(?P<arch>x86[-_]64|aarch64))?\.run"
)
_STAMP = re.compile(r"^\[(?:Driver|Firmware)\] \[[^\]]*\] ?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m|\\033\[[0-9;]*m")

# What the installers say when they fail, and what helps.
_ADVICE = (
    ("davinci nodes are occupied", "stop the containers and processes that use the devices, then run again"),
    ("list of missing tools", "name the packages that hold them in driver_system_packages"),
    (
        "Dkms install failed",
        "install the kernel headers of the running kernel, gcc, make and dkms (driver_system_packages)",
    ),
    ("0x0094", "another installation is running on the machine: wait for its end"),
    ("0x0095", "driver_user and driver_group must be those in " + INSTALL_INFO),
    ("0x0092", "put the package for this machine's architecture into the artifacts directory"),
)


class PackageError(Exception):
    """The wanted packages cannot be had; one line that says why and what to do."""


class Package(NamedTuple):
    """One .run file. `arch` is "" where one package serves all (firmware)."""

    name: str
    product: str
    chip: str
    version: str
    arch: str


class Step(NamedTuple):
    """One installer to run: `installed` is the version it replaces ("" = none)."""

    package: Package
    installed: str

    @property
    def text(self) -> str:
        """`install driver 26.0.rc1`, `change firmware 7.5.0.1.129 -> 7.8.0.6.201`."""
        if self.installed:
            return f"change {self.package.product} {self.installed} -> {self.package.version}"
        return f"install {self.package.product} {self.package.version}"


class Outcome(NamedTuple):
    """How an installer ended. `message` is "" unless it failed."""

    installed: bool
    reboot_required: bool
    message: str


def parse_package_name(name: str) -> Package | None:
    """What a file name says; None for files that are no driver or firmware package."""
    match = _NAME.fullmatch(name)
    if not match:
        return None
    chip = re.sub(r"^(Ascend|Atlas)-|hdk-|-hdk$", "", match["family"])
    arch = (match["arch"] or "").replace("-", "_")
    return Package(name, match["product"], chip, match["version"], arch)


def select_package(names: Iterable[str], product: str, arch: str, version: str = "", chip: str = "") -> Package | None:
    """The one package that fits. None when none fits and no version was asked for.

    `arch` is the machine's, as `uname -m` says it. Raises PackageError when the wanted is not there, or several are.
    """
    of_product = [found for found in map(parse_package_name, sorted(names)) if found and found.product == product]
    fitting = [found for found in of_product if found.arch in ("", arch) and chip.lower() in ("", found.chip.lower())]
    matching = [found for found in fitting if version in ("", found.version)]
    if len(matching) == 1:
        return matching[0]
    there = ", ".join(found.name for found in of_product) or "none"
    if matching:
        raise PackageError(f"several {product} packages fit ({there}): set {VARIABLES[product]}, or driver_chip for one chip")
    if version:
        wanted = " ".join(filter(None, [product, version, "for", chip, arch]))
        raise PackageError(f"no package of {wanted} in the artifacts directory (there: {there}): add it or correct {VARIABLES[product]}")
    return None


def wanted_packages(
    names: Iterable[str], arch: str, installed: Mapping[str, str], versions: Mapping[str, str], chip: str = ""
) -> dict[str, Package | None]:
    """The package each product should have; None where what is installed stays.

    A version that is installed already needs no package: sites delete them. Raises PackageError as select_package
    does, and when there is neither a driver nor a package of one.
    """
    names = list(names)
    wanted = {}
    for product in PRODUCTS:
        version = versions.get(product, "")
        done = bool(version) and version == installed[product]
        wanted[product] = None if done else select_package(names, product, arch, version, chip)
    if not installed["driver"] and not wanted["driver"]:
        raise PackageError(
            f"no Ascend driver is installed and the artifacts directory holds none for {arch}: put "
            f"Ascend-hdk-<chip>-npu-driver_<version>_linux-{arch.replace('_', '-')}.run there, "
            "or set driver_manage: false where the site installs drivers itself"
        )
    return wanted


def plan(installed: Mapping[str, str], wanted: Mapping[str, Package | None]) -> list[Step]:
    """What to run, in Huawei's order: driver then firmware on a new machine, the reverse over an old driver."""
    order = reversed(PRODUCTS) if installed["driver"] else PRODUCTS
    steps = []
    for product in order:
        package = wanted[product]
        if package and package.version != installed[product]:
            steps.append(Step(package, installed[product]))
    return steps


def installer_arguments(step: Step, user: str, group: str, for_all: bool) -> list[str]:
    """The options for one step. User and group are given on a first installation only; later the record keeps them."""
    arguments = ["--upgrade" if step.installed else "--full", "--quiet"]
    if not step.installed and step.package.product == "driver":
        arguments += [f"--install-username={user}", f"--install-usergroup={group}"]
        arguments += ["--install-for-all"] if for_all else []
    return arguments


def read_outcome(product: str, code: int, output: str) -> Outcome:
    """Read an installer's exit code: 0 done, 1 failed, 2 done but the chips could not be reset: a reboot is needed.

    The firmware's says that with code 0 and words ("Reboot now or after driver installation ...").
    """
    if code in (0, 2):
        return Outcome(True, code == 2 or bool(re.search(r"reboot (now|needed)", output, re.IGNORECASE)), "")
    errors = [line for line in progress_lines(output) if "ERROR" in line or "ERR_NO" in line]
    said = re.sub(r"^\[ERROR\]", "", errors[-1]) if errors else f"no reason given, see {INSTALL_LOG}"
    advice = next((help_ for sign, help_ in _ADVICE if sign in said), f"read {INSTALL_LOG} on the machine")
    return Outcome(False, False, f"the {product} installer failed with code {code} ({said.strip()}): {advice}")


def progress_lines(output: str) -> list[str]:
    """An installer's lines without colours, product and time."""
    return [line for line in (_STAMP.sub("", _COLOUR.sub("", raw)).strip() for raw in output.splitlines()) if line]


def read_version(version_info: str) -> str:
    """The version in the text of a version.info (`Version=26.0.rc1`), "" when it names none."""
    return _read_pairs(version_info).get("Version", "")


def install_path(install_info: str, product: str) -> str:
    """Where a product is installed, from the text of /etc/ascend_install.info; the default path when it is not said."""
    return _read_pairs(install_info).get(f"{product.capitalize()}_Install_Path_Param") or DEFAULT_PATH


def read_checksums(text: str) -> dict[str, str]:
    """{file name: SHA-256} of the lines `sha256sum` writes."""
    lines = (line.split() for line in text.splitlines())
    return {fields[1].lstrip("*"): fields[0].lower() for fields in lines if len(fields) == 2}


def _read_pairs(text: str) -> dict[str, str]:
    pairs = (line.strip().partition("=") for line in text.splitlines())
    return {key: value.strip() for key, sign, value in pairs if sign}
