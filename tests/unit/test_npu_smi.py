"""npu-smi's outputs: recorded ones, broken ones, and every dialect rendered and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import npu_smi
from ansible_collections.llmops.ascend.plugins.module_utils.npu_smi import NpuSmiError

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

A3_BUSY = (fixture("info/a3-24.1.rc3.3").partition("| NPU     Chip ")[0]
           + "| NPU ID | Process id | Process name | Process memory(MB) |\n| 0 | 4711 | python | 5 |\n")
HOLDERS = fixture("info/910b4-24.1.rc3-holders-without-name")
NICS = fixture("topo/910b-network-cards-from-source")
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
    (INFO.replace("0    / 0          3314 / 65536", "3314 / 65536             ", 1),
     "line 11: '0           3314 / 65536' where the header says 'AICore(%) Memory-Usage(MB) HBM-Usage(MB)'"),
    (fixture("info/a3-24.1.rc3.3").replace("| 1     3      ", "| 1     2      "), "two devices with phy_id 2"),
    (fixture("info/a3-24.1.rc3.3").replace("| 1     3      ", "| 1            "), "line 17: '1' where the header says 'Chip Phy-ID'"),
    (fixture("info/910b4-24.1.rc3-holders-without-name").replace("| 582939  ", "| many    "), "line 34: expected a process"),
    (HOLDERS.replace("| No running processes found in NPU 2 ", "| No running processes found in NPU 0 "),
     "NPU 0 is idle 1 times, with 1 of its 1 chips in use"),
    (HOLDERS.replace("| No running processes found in NPU 2 ", "| No running processes found in NPU 3 "), "NPU 3 is idle 2 times"),
    (A3_BUSY, "pid 4711 on NPU 0, which has more than one chip, without a chip"),
    (HOLDERS.replace("| Process id ", "| Processes  "), "line 32: expected the first row of a device"),
    (HOLDERS.replace("| NPU     Chip ", "|         Chip "), "line 32: header without npu_id"),
    (HOLDERS.replace("| 0       0                 | 582939 ", "  0       0                 | 582939 "), "line 34: row without its left border"),
    (HOLDERS.replace("| 0       0                 | 582939 ", "+ 0       0                 | 582939 "), "line 34: row without its left border"),
    (HOLDERS + HOLDERS, "a second table"),
    (HOLDERS + HOLDERS[HOLDERS.index("| NPU     Chip "):], "a second header of processes"),
    ("| 0 910B3 | OK | 1 2 0/0 |\n| No running processes found in NPU 0 |\n", "line 1: device with a first row only"),
    ("| 0 910B3 | OK | 1 2 0/0 |\n| 0 | | 0000:C1:00.0 | 0 0/0 1/2 |\n", "line 2: expected the second row of a device"),
    (INFO.replace("| Chip ", "| Chip Chip "), "line 5: a column comes twice"),
    (INFO.replace("| NPU   Name ", "|       Name "), "line 4: header without npu_id"),
    ("\n".join(INFO.splitlines()[3:] + INFO.splitlines()[3:5]), "a header in the wrong place"),
    ("\n".join(line for line in INFO.splitlines() if not line.startswith("| 0     910B3")), "line 7: '0' where the header says 'NPU Name'"),
    ("\n".join(line for line in INFO.splitlines() if "0000:C1" not in line), "line 7: device with a first row only"),
    (INFO.replace("3318 / 65536", "²318 / 65536"), "line 8: '0           0    / 0          ²318 / 65536'"),
    (INFO.replace("3318 / 65536", "3" * 5000 + " / 1"), "line 8: "),
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
    ("NPU0 X\nNPU1 X\n", "rows of different lengths"),
    ("Phy-ID0 Phy-ID1\nPhy-ID0 X SIO\nPhy-ID1 SIO\n", "line 3: 1 links under 2 columns"),
    (TOPO.replace("144-167", "144-167x", 1), "line 2: '144-167x' is no list of CPUs"),
    (TOPO.replace("144-167", "0-99999999999", 1), "line 2: '0-99999999999' is no list of CPUs"),
    (TOPO.replace("144-167", "144-167 NUMA", 1), "line 2: 10 values under 9 columns"),
    ("NPU0 X SYS 0-3 4-7\nNPU1 SYS X\n", "line 1: '4-7' after the CPUs"),
    ("\n".join(line for line in NICS.splitlines() if not line.startswith("NIC3 ")), "NIC3 is a column without a row"),
    (NICS.replace("NIC0       PIX        SYS ", "NIC0       PXB        SYS "), "line 2: NPU0 to NIC0 is PIX, but PXB the other way"),
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
    (MAP + MAP, "line 6: a second header"),
    (MAP.replace("-                              -                              Mcu",
     "3                              3                              Mcu"),
     "line 4: a controller with the id of an NPU"),
    (MAP.replace("Mcu", "Dsp"), "line 4: an id that is not a number"),
])
def test_map_that_cannot_be_believed(text, reason):
    with pytest.raises(NpuSmiError, match="npu-smi info -m") as error:
        npu_smi.parse_map(text)
    assert reason in str(error.value)


COMMON, TEMP = fixture("readings/310p-common-two-chips-with-controller"), fixture("readings/910b-temp-with-controller")
PROCESSES, BOARD, CARDS = fixture("processes/310p-two-chips"), fixture("board/910-23.0.5"), fixture("list/a3-server")


@pytest.mark.parametrize(("parse", "text", "reason"), [
    (npu_smi.parse_list, fixture("list/950").replace(": 1", ": 2"), "counts 2 cards and lists 1"),
    (npu_smi.parse_list, "There is no NPU card on this server.\n", "line 1: expected `Name : value`"),
    (npu_smi.parse_list, CARDS.replace("NPU ID                         : 1", "NPU ID : 0"), "line 6: NPU ID 0 comes twice"),
    (npu_smi.parse_list, CARDS.replace("\tChip Count                     : 2\n", "\tChip Count                     : 2\n" * 2, 1),
     "line 5: Chip Count comes twice for NPU 0"),
    (npu_smi.parse_list, CARDS.replace("Count                     : 2", "Count                     : two"), "line 4: Chip Count is 'two'"),
    (npu_smi.parse_list, CARDS + CARDS, "a second count of cards"),
    (npu_smi.parse_board, "NPU ID : 0\n", "no NPU ID or Software Version"),
    (npu_smi.parse_board, BOARD + BOARD, "line 16: a value comes twice: 'NPU ID'"),
    (npu_smi.parse_board, BOARD.replace("Chip Count                     : 1", "Chip Count : I"), "Chip Count is 'I', not a number"),
    (npu_smi.parse_chip, BOARD, "no NPU ID, Chip ID or Chip Name"),
    (npu_smi.parse_readings, "This device does not support querying health.", "line 1: expected `Name : value`"),
    (npu_smi.parse_readings, "npu-smi: error while loading shared libraries: libdrvdsmi_host.so", "does not begin with NPU ID"),
    (npu_smi.parse_readings, "NPU ID : 0\nHealth : OK\nHealth : Alarm\n", "line 3: a value comes twice for chip 0: 'Health'"),
    (npu_smi.parse_readings, "NPU ID : 0\nHealth : OK\nChip ID : 0\nHealth : OK\n", "line 4: values without a Chip ID: 'Health'"),
    (npu_smi.parse_readings, "NPU ID : 0\n", "no value of a chip"),
    (npu_smi.parse_readings, COMMON.replace("Chip Name                      : mcu\n", ""),
     "line 14: values apart from their Chip ID: 'Temperature(C)'"),
    (npu_smi.parse_readings, COMMON.replace("Chip ID                        : 1\n", "Chip ID                        : 0\n"), "a Chip ID comes twice"),
    (npu_smi.parse_readings, COMMON.replace("Chip Count                     : 2", "Chip Count                     : 3"),
     "line 2: it counts 3 chips and shows 2"),
    (npu_smi.parse_readings, TEMP.replace("        NPU Temperature (C)            : 39\n", ""), "a Chip ID without a value"),
    (npu_smi.parse_readings, TEMP.replace("        Chip ID                        : 0\n", ""), "of a controller and of a chip are not apart"),
    (npu_smi.parse_readings, COMMON + COMMON, "line 17: NPU ID in the wrong place"),
    (npu_smi.parse_processes, PROCESSES.replace("id:577293", "id:many"), "line 5: expected a process (id, name, memory)"),
    (npu_smi.parse_processes, PROCESSES.replace("Process id:1654605", "No process in device.\nProcess id:1654605"), "processes where there are none"),
    (npu_smi.parse_processes, PROCESSES.replace("Chip ID                        : 1", ""), "values without a Chip ID"),
    (npu_smi.parse_processes, PROCESSES.replace("Chip ID                        : 1", "Segmentation fault"), "line 9: expected a process"),
    (npu_smi.parse_processes, "NPU ID : 0\n", "neither a process nor that there is none"),
    (npu_smi.parse_version, "npu-smi version: \n", "line 1: no version"),
    (npu_smi.parse_version, "Command or option is not found.\n", "expected one line `npu-smi version: ...`, not 0"),
])
def test_other_queries_that_cannot_be_believed(parse, text, reason):
    with pytest.raises(NpuSmiError, match="npu-smi") as error:
        parse(text)
    assert reason in str(error.value)


@pytest.mark.parametrize(("said", "compatible"), [
    ("OK", True), ("NOK", False), ("[7.0.0,7.1.0]", False), ("UNKNOWN", None), ("NA", None),
    ("NOT SUPPORT", None),                          # printed to everybody but root
])
def test_what_the_driver_says_of_its_firmware(said, compatible):
    assert npu_smi.parse_board(BOARD.replace("Compatibility                  : OK", f"Compatibility : {said}"))["compatible"] is compatible


def test_topo_with_network_cards_as_columns_only():
    text = "\n".join(line for line in NICS.splitlines() if not line.startswith("NIC"))
    assert npu_smi.parse_topo(text) == npu_smi.parse_topo(NICS)


def test_topo_rows_without_a_header_give_their_cpus():
    assert npu_smi.parse_topo("NPU0 X HCCS HCCS 0-3\n") == {"kind": "NPU", "links": {}, "cpus": {0: "0-3"}}
    assert npu_smi.parse_topo("NPU Chip Affinity\nNPU0 X SYS 0-3\nNPU1 SYS X 4-7\n")["links"] == {0: {1: "SYS"}, 1: {0: "SYS"}}


def test_fields_are_given_as_printed():
    assert npu_smi.parse_fields("\tProduct Type                   : Atlas 300I Duo\r\n\n\tSlot ID : \n") == [
        ("Product Type", "Atlas 300I Duo"), ("Slot ID", "")]


def test_a_long_output_is_quoted_in_part():
    with pytest.raises(NpuSmiError) as error:
        npu_smi.parse_info("driver chatter " * 1000)
    assert len(str(error.value)) < 200


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
    (211, "npu get board type failed. ret is -9005\n", -9005, "do not answer"),
    (211, "", -9005, "do not answer"),
    (217, "", -9255, "not supported on this device"),
    (-8005, "", -8005, "do not answer"),
    (198, "There has no options.", -9018, "no such process"),
    (199, "Command or option is not found.", -9017, "invalid parameter"),
    (172, "DrvMngGetConsoleLogLevel failed. (ret=4)\ndcmi model initialized failed, because the device is used. ret is -8020\n"
          "npu get board type failed. ret is -9005\n", -8020, "used by another container"),
    (0, "\x1b[31mdcmi module initialize failed. ret is -8005\x1b[0m\r\n", -8005, "do not answer"),
    (0, "This command cannot be executed on a VM or container.\n", None, "virtual machine or in a container"),
    (0, "This command cannot be executed on a container.\n", None, "not available in a container"),
    (0, "There is no NPU chip on this card.\n", None, "shows no NPU"),
    (0, "This device dose not support querying hccs topo.\n", None, "not supported on this device"),
    (0, 'Failed to query "health" result.\n', None, "driver does not answer"),
    (0, "[WARNING]The driver package may not be completely installed, which may cause function abnormal.\n" + INFO, None, "not completely installed"),
    (187, "Failed to execute npu-smi info. ret is -8005.\n", -8005, "do not answer"),
    (124, "", None, "did not end in time"),
    (126, "bash: /usr/local/bin/npu-smi: 权限不够", None, "may not be executed"),
    (127, "bash: npu-smi: 未找到命令", None, "is not there"),
    (139, "Segmentation fault", None, "ended by signal 11"),
    (-9, "", None, "ended by signal 9"),
    (255, "", None, "exit code 255"),
])
def test_failures_are_explained(exit_code, output, code, meaning):
    failure = npu_smi.explain_failure(exit_code, output)
    assert failure.code == code
    assert meaning in failure.meaning
    assert failure.remedy


def test_no_two_codes_look_alike_to_a_shell():
    codes = [-8000 - number for number in range(1, 24)] + [-9000 - number for number in range(1, 23)] + [-8255, -9255, -9256]
    assert len({code & 255 for code in codes}) == len(codes)
    for code in codes:
        failure = npu_smi.explain_failure(code & 255, "")
        assert failure == npu_smi.explain_failure(code, "")
        assert failure.code == code and "exit code" not in failure.meaning


def test_success_is_no_failure():
    assert npu_smi.explain_failure(0, INFO) is None


