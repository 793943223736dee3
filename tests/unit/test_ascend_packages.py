"""Package names, choice, order, arguments and outcomes of the Ascend installers."""

from __future__ import annotations

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import ascend_packages as packages
from hypothesis import given
from hypothesis import strategies as st

DRIVER = "Ascend-hdk-910b-npu-driver_26.0.rc1_linux-x86-64.run"
DRIVER_ARM = "Ascend-hdk-910b-npu-driver_26.0.rc1_linux-aarch64.run"
OLD_DRIVER = "Ascend-hdk-910b-npu-driver_25.5.2_linux-x86-64.run"
FIRMWARE = "Ascend-hdk-910b-npu-firmware_7.8.0.6.201.run"
A3_DRIVER = "Atlas-A3-hdk-npu-driver_25.3.rc1_linux-x86-64.run"
NOTHING = {"driver": "", "firmware": ""}


def wanted(names, installed=None, chip="", **versions):
    return packages.wanted_packages(names, "x86_64", installed or NOTHING, versions, chip)


@pytest.mark.parametrize(
    ("name", "product", "chip", "version", "arch"),
    [
        (DRIVER, "driver", "910b", "26.0.rc1", "x86_64"),
        (DRIVER_ARM, "driver", "910b", "26.0.rc1", "aarch64"),
        (FIRMWARE, "firmware", "910b", "7.8.0.6.201", ""),
        (A3_DRIVER, "driver", "A3", "25.3.rc1", "x86_64"),
        ("Atlas-A3-hdk-npu-firmware_7.8.0.2.212.run", "firmware", "A3", "7.8.0.2.212", ""),
        ("A800-9000-npu-driver_21.0.2_ubuntu18.04-aarch64.run", "driver", "A800-9000", "21.0.2", "aarch64"),
        ("Ascend-hdk-910b-npu-driver_25.5.0.b061_linux-aarch64.run", "driver", "910b", "25.5.0.b061", "aarch64"),
    ],
)
def test_names_as_huawei_writes_them(name, product, chip, version, arch):
    assert packages.parse_package_name(name) == packages.Package(name, product, chip, version, arch)


@pytest.mark.parametrize("name", ["SHA256SUMS", "Ascend-cann-toolkit_9.1.0_linux-x86_64.run", DRIVER + ".asc", "npu-driver_1.run"])
def test_other_files_are_passed_over(name):
    assert packages.parse_package_name(name) is None


@given(st.text())
def test_any_file_name_can_lie_there(name):
    package = packages.parse_package_name(name)
    assert package is None or package.product in packages.PRODUCTS


def test_the_machine_gets_the_package_of_its_architecture():
    assert packages.select_package([DRIVER, DRIVER_ARM], "driver", "aarch64").name == DRIVER_ARM


def test_a_version_chooses_among_several():
    with pytest.raises(packages.PackageError, match=r"several driver packages fit .*set driver_version"):
        wanted([DRIVER, OLD_DRIVER])
    assert wanted([DRIVER, OLD_DRIVER], driver="25.5.2")["driver"].name == OLD_DRIVER


def test_a_chip_chooses_among_several():
    assert wanted([DRIVER, A3_DRIVER], chip="a3")["driver"].name == A3_DRIVER


def test_a_version_that_is_not_there_is_said_with_what_is():
    with pytest.raises(packages.PackageError, match=r"driver 27\.0 for x86_64 .*there: .*26\.0\.rc1.*correct driver_version"):
        wanted([DRIVER], driver="27.0")


def test_a_bare_machine_without_a_package_is_an_error():
    with pytest.raises(packages.PackageError, match=r"no Ascend driver is installed .*driver_manage: false"):
        wanted([FIRMWARE, DRIVER_ARM])


def test_what_is_installed_needs_no_package():
    installed = {"driver": "26.0.rc1", "firmware": "7.8.0.6.201"}
    assert wanted([], installed) == {"driver": None, "firmware": None}
    assert wanted([], installed, driver="26.0.rc1") == {"driver": None, "firmware": None}


def test_driver_comes_first_on_a_new_machine():
    steps = packages.plan(NOTHING, wanted([DRIVER, FIRMWARE]))
    assert [step.text for step in steps] == ["install driver 26.0.rc1", "install firmware 7.8.0.6.201"]


def test_firmware_comes_first_over_an_older_driver():
    installed = {"driver": "25.5.2", "firmware": "7.8.0.5.201"}
    steps = packages.plan(installed, wanted([DRIVER, FIRMWARE], installed))
    assert [step.text for step in steps] == [
        "change firmware 7.8.0.5.201 -> 7.8.0.6.201",
        "change driver 25.5.2 -> 26.0.rc1",
    ]


@given(st.sampled_from(["", "25.5.2", "26.0.rc1"]), st.sampled_from(["", "7.7.0.10.220", "7.8.0.6.201"]))
def test_a_plan_reaches_the_wanted_versions_and_is_then_empty(driver, firmware):
    installed = {"driver": driver, "firmware": firmware}
    goal = wanted([DRIVER, FIRMWARE], installed)
    for step in packages.plan(installed, goal):
        assert step.installed != step.package.version
        installed = {**installed, step.package.product: step.package.version}
    assert packages.plan(installed, goal) == []


def test_user_and_group_are_given_on_a_first_installation_only():
    first, second = packages.plan(NOTHING, wanted([DRIVER, FIRMWARE]))
    assert packages.installer_arguments(first, "u", "g", True) == [
        "--full",
        "--quiet",
        "--install-username=u",
        "--install-usergroup=g",
        "--install-for-all",
    ]
    assert packages.installer_arguments(second, "u", "g", True) == ["--full", "--quiet"]
    upgrade = packages.Step(first.package, "25.5.2")
    assert packages.installer_arguments(upgrade, "u", "g", True) == ["--upgrade", "--quiet"]


@pytest.mark.parametrize(
    ("code", "text", "reboot"),
    [
        (
            0,
            "[INFO]\x1b[32mDriver package installed successfully! The new version takes effect immediately. \x1b[0m",
            False,
        ),
        (2, "[INFO]Driver package upgraded successfully! Reboot needed for installation/upgrade to take effect!", True),
        (
            0,
            "[INFO]Firmware package installed successfully! Reboot now or after driver installation for the "
            "installation/upgrade to take effect.",
            True,
        ),
    ],
)
def test_success_and_whether_a_reboot_is_needed(code, text, reboot):
    assert packages.read_outcome("driver", code, f"[Driver] [2026-11-30 21:44:11] {text}\n") == (True, reboot, "")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (
            "[ERROR]\x1b[31mThe davinci nodes are occupied by some processes, please stop processes\x1b[0m",
            "stop the containers",
        ),
        ("[ERROR]The list of missing tools: lspci,ifconfig,", "driver_system_packages"),
        (
            "[ERROR]ERR_NO:0x0095;ERR_DES:The user and group are not same with last installation",
            "driver_user and driver_group",
        ),
        ("[ERROR]something new", "read /var/log/ascend_seclog/ascend_install.log"),
        ("", "no reason given"),
    ],
)
def test_a_failure_says_why_and_what_helps(said, advice):
    output = f"[Driver] [2026-11-30 21:44:14] {said}\n[Driver] [2026-11-30 21:44:14] [INFO]End time: now\n"
    outcome = packages.read_outcome("driver", 1, output)
    assert not outcome.installed
    assert outcome.message.startswith("the driver installer failed with code 1 (")
    assert advice in outcome.message
    assert "\n" not in outcome.message


def test_versions_are_read_from_real_files():
    assert packages.read_version("Version=24.1.rc3\nascendhal_version=7.35.23\npackage_version=24.1.rc3\n") == "24.1.rc3"
    assert packages.read_version("") == ""


def test_the_install_path_is_where_the_record_says():
    info = "UserName=HwHiAiUser\nDriver_Install_Type=full\nDriver_Install_Path_Param=/opt/Ascend\n"
    assert packages.install_path(info, "driver") == "/opt/Ascend"
    assert packages.install_path(info, "firmware") == "/usr/local/Ascend"


def test_checksums_as_sha256sum_writes_them():
    assert packages.read_checksums("AB12  one.run\ncd34 *two.run\n\n") == {"one.run": "ab12", "two.run": "cd34"}
