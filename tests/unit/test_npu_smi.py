"""npu-smi's outputs: recorded ones, broken ones, and every dialect rendered and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import npu_smi
from ansible_collections.llmops.ascend.plugins.module_utils.npu_smi import NpuSmiError
from hypothesis import given, settings
from hypothesis import strategies as st

FIXTURES = Path(__file__).parent / "fixtures/npu_smi"
PARSERS = {
    "info": npu_smi.parse_info,
    "map": npu_smi.parse_map,
    "list": npu_smi.parse_list,
    "topo": npu_smi.parse_topo,
    "board": npu_smi.parse_board,
    "readings": npu_smi.parse_readings,
    "chip": npu_smi.parse_chip,
    "processes": npu_smi.parse_processes,
    "version": npu_smi.parse_version,
}


def as_json(value):
    """The value as JSON has it: keys are texts."""
    return json.loads(json.dumps(value))


def fixture(name: str) -> str:
    return (FIXTURES / name / "input.txt").read_text()


@pytest.mark.parametrize("case", sorted(FIXTURES.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_recorded_outputs(case):
    parsed = PARSERS[case.parent.name]((case / "input.txt").read_text())
    assert as_json(parsed) == json.loads((case / "expected.json").read_text())


@pytest.mark.parametrize("case", sorted(FIXTURES.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_windows_line_ends_and_trailing_blanks_change_nothing(case):
    text = (case / "input.txt").read_text()
    parse = PARSERS[case.parent.name]
    assert parse("".join(line + "  \r\n" for line in text.splitlines())) == parse(text)


# -------------------------------------------------------------------------------------------------------------- refused

INFO, TOPO, MAP = fixture("info/910b3-24.1.rc1"), fixture("topo/910b3-kunpeng-pairs"), fixture("map/a3-with-controller")


@pytest.mark.parametrize(("text", "reason"), [
    ("", "no device"),
    ("Segmentation fault", "no device"),
    (INFO.replace("| 0                         | 0000:C2:00.0", "| x                         | 0000:C2:00.0"), "line 11: 'x'"),
    (INFO.replace("| 1     910B3 ", "| 0     910B3 "), "two devices with npu_id/chip_id 0/0"),
    (INFO.replace("92.0        39 ", "92.0        hot"), "line 10: '92.0        hot"),
    (INFO.replace("| 1     910B3               | OK ", "| 1     910B3               |    "), "line 10: '' where the header says 'Health'"),
    (INFO.replace("3314 / 65536         |", "3314 / 65536", 1), "line 11: row without its right border"),
    (INFO[:INFO.index("| 0                         | 0000:42")], "line 28: device with a first row only"),
    (INFO.replace("0    / 0          3314 / 65536", "3314 / 65536             ", 1), "line 11: '0           3314 / 65536' where the header says 'AICore(%) Memory-Usage(MB) HBM-Usage(MB)'"),
    (fixture("info/a3-24.1.rc3.3").replace("| 1     3      ", "| 1     2      "), "two devices with phy_id 2"),
    (fixture("info/a3-24.1.rc3.3").replace("| 1     3      ", "| 1            "), "line 17: '1' where the header says 'Chip Phy-ID'"),
    (fixture("info/910b4-24.1.rc3-holders-without-name").replace("| 582939  ", "| many    "), "line 34: expected a process"),
])
def test_info_that_cannot_be_believed(text, reason):
    with pytest.raises(NpuSmiError, match="npu-smi info") as error:
        npu_smi.parse_info(text)
    assert reason in str(error.value)


@pytest.mark.parametrize(("text", "reason"), [
    ("This device does not support querying topo.\n", "no row of a device"),
    (TOPO.replace("NPU3       HCCS       HCCS       HCCS       X ", "NPU3       HCCS       HCCS       HCCS       SYS"),
     "line 5: the link of NPU3 to NPU3 is SYS"),
    (TOPO.replace("NPU1       HCCS       X          HCCS", "NPU1       HCCS       X          SYS "),
     "line 3: NPU1 to NPU2 is SYS, but HCCS the other way"),
    (TOPO.replace("NPU5       HCCS       HCCS", "NPU5       HCCS       NVL8"), "line 7: 'NVL8' is no kind of link"),
    (TOPO.replace("NPU6       HCCS       HCCS       HCCS", "NPU6       HCCS       HCCS       "), "line 8: 7 links under 8 columns"),
    (TOPO.replace("\nNPU7 ", "\nNPU6 "), "line 9: row NPU6 comes twice"),
    (TOPO.replace("\nNPU7 ", "\nNPU9 "), "NPU7 is a column without a row"),
    (TOPO.replace("NPU6       NPU7       CPU Aff", "NPU6       NPU6       CPU Aff"), "line 1: a column comes twice"),
    (TOPO.replace("144-167", "167-144", 1), "'167-144' runs backwards"),
    (TOPO.replace("CPU Affinity", ""), "line 2: CPUs without a column for them"),
    (TOPO + TOPO, "a second header"),
    ("NPU0 X HCCS\nPhy-ID1 HCCS X\n", "rows of NPU and Phy-ID"),
    ("NIC0 X\n", "rows of network cards only"),
    ("NPU0 X HCCS\nNPU1 HCCS X SYS\n", "rows of different lengths"),
])
def test_topo_that_cannot_be_believed(text, reason):
    with pytest.raises(NpuSmiError, match="npu-smi info -t topo") as error:
        npu_smi.parse_topo(text)
    assert reason in str(error.value)


@pytest.mark.parametrize(("text", "reason"), [
    ("dcmi module initialize failed. ret is -8005\n", "no header"),
    (MAP.replace("    1                              0 ", "    0                              0 "), "line 5: chip 0 of NPU 0 comes twice"),
    (MAP.replace(f"{1:<31}{1:<31}{1:<31}Asc", f"{1:<31}{0:<31}{1:<31}Asc"),
     "line 3: logic_id 0 comes twice"),
    (MAP.replace("Ascend910\n", "\n", 1), "line 2: 4 values under 5 columns"),
    (MAP.replace("2                              2                              Ascend", "-                  2                 Ascend"),
     "line 5: an id that is not a number"),
    (MAP.replace("Chip Phy-ID  ", "Chip Logic ID"), "line 1: a column comes twice"),
])
def test_map_that_cannot_be_believed(text, reason):
    with pytest.raises(NpuSmiError, match="npu-smi info -m") as error:
        npu_smi.parse_map(text)
    assert reason in str(error.value)


def test_other_queries_that_cannot_be_believed():
    with pytest.raises(NpuSmiError, match="counts 2 cards and lists 1"):
        npu_smi.parse_list(fixture("list/950").replace(": 1", ": 2"))
    with pytest.raises(NpuSmiError, match="no NPU ID or Software Version"):
        npu_smi.parse_board("NPU ID : 0\n")
    with pytest.raises(NpuSmiError, match="line 1: expected `Name : value`"):
        npu_smi.parse_readings("This device does not support querying health.")
    with pytest.raises(NpuSmiError, match="comes twice for chip 0"):
        npu_smi.parse_readings("NPU ID : 0\nHealth : OK\nHealth : Alarm\n")
    with pytest.raises(NpuSmiError, match="without a Chip ID"):
        npu_smi.parse_readings("NPU ID : 0\nHealth : OK\nChip ID : 0\nHealth : OK\n")


# ------------------------------------------------------------------------------------------------------------- failures

@pytest.mark.parametrize(("exit_code", "output", "code", "meaning"), [
    (187, "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi module initialize failed. ret is -8005\n", -8005, "do not answer"),
    (172, "dcmi model initialized failed, because the device is used. ret is -8020\n", -8020, "used by another container"),
    (193, "This device does not support querying topo.\n", -8255, "not supported on this device"),
    (0, "This device does not support querying topo.\n", None, "not supported on this device"),
    (0, "This command cannot be executed on a VM.\n", None, "virtual machine"),
    (0, "This command cannot be executed on a VM-based container.\n", None, "virtual machine"),
    (190, "This command can be executed only by the root user.\n", -8002, "needs root"),
    (0, "There is no NPU card on this server.\n", None, "shows no NPU"),
    (255, "Failed to get card number.\n", None, "driver does not answer"),
    (184, "", -8008, "does not exist"),
    (180, "", -8012, "not ready"),
    (179, "", -8013, "not supported in a container"),
    (191, "", -8001, "invalid parameter"),
    (127, "npu-smi: error while loading shared libraries: libdrvdsmi_host.so: cannot open", None, "library of the driver"),
    (1, "something new", None, "exit code 1"),
])
def test_failures_are_explained(exit_code, output, code, meaning):
    failure = npu_smi.explain_failure(exit_code, output)
    assert failure.code == code
    assert meaning in failure.meaning
    assert failure.remedy


def test_success_is_no_failure():
    assert npu_smi.explain_failure(0, INFO) is None


