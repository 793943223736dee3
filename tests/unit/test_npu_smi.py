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
    (INFO.replace("92.0        39 ", "92.0        hot"), "line 10: could not convert"),
    (INFO.replace("| 1     910B3               | OK ", "| 1     910B3               |    "), "line 10: '' is not a health"),
    (INFO.replace("3314 / 65536         |", "3314 / 65536", 1), "line 11: row without its right border"),
    (INFO[:INFO.index("| 0                         | 0000:42")], "line 28: device with a first row only"),
    (INFO.replace("0    / 0          3314 / 65536", "3314 / 65536             ", 1), "line 11: expected utilisation and memory"),
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


# ----------------------------------------------------------------------------------------- every dialect, there and back

LINKS = [link for link in npu_smi.LINKS if link != "X"]
CPU_LISTS = st.sampled_from(["0", "0-23", "0-31,64-95", "144-167", "0-95,192-287", "1,3,5"])


@st.composite
def topologies(draw):
    """A square table: its labels, symmetric links, CPU lists or none."""
    kind = draw(st.sampled_from(["NPU", "Phy-ID"]))
    # The tool pads a phy id to five places, so that five digits would run into the next column.
    ids = draw(st.lists(st.integers(0, 40000 if kind == "NPU" else 9999), min_size=1, max_size=9, unique=True))
    labels = [(kind, number) for number in ids] + [("NIC", number) for number in range(draw(st.integers(0, 3)))]
    links = {}
    for index, one in enumerate(labels):
        for other in labels[:index]:
            links[one, other] = links[other, one] = draw(st.sampled_from(LINKS))
    cpus = {number: draw(CPU_LISTS) for number in ids} if draw(st.booleans()) else dict.fromkeys(ids)
    return kind, labels, links, cpus


@given(topologies(), st.sampled_from(["source", "single", "centred"]), st.booleans(), st.booleans())
def test_topo_round_trip(topology, layout, header, legend):
    kind, labels, links, cpus = topology
    affinity = any(cpus.values())

    def cell(text):
        return {"source": f"{text:<11}", "single": text + " ", "centred": f"{text:^13}"}[layout]

    lines = ["\t   " + "".join(cell("{}{}".format(*label)) for label in labels) + ("CPU Affinity" if affinity else "")] if header else []
    for one in labels:
        row = "".join(cell("X" if other == one else links[one, other]) for other in labels)
        lines.append(cell("{}{}".format(*one)) + row + ((cpus[one[1]] or "") if one[0] != "NIC" else ""))
    if legend:
        lines += ["", "NIC0: mlx5_0", "", "Legend:", "", "  X    = Self", "  HCCS_SW = Connection traversing HCCS through a switch."]
    parsed = npu_smi.parse_topo("\n".join(lines) + "\n")
    assert parsed == {
        "kind": kind,
        "cpus": cpus,
        "links": {one[1]: {other[1]: links[one, other] for other in labels if other[0] != "NIC" and other != one}
                  for one in labels if one[0] != "NIC"},
    }


def test_topo_rows_without_a_header_give_their_cpus():
    assert npu_smi.parse_topo("NPU0 X HCCS HCCS 0-3\n") == {"kind": "NPU", "links": {}, "cpus": {0: "0-3"}}
    assert npu_smi.parse_topo("NPU Chip Affinity\nNPU0 X SYS 0-3\nNPU1 SYS X 4-7\n")["links"] == {0: {1: "SYS"}, 1: {0: "SYS"}}


NUMBER = st.integers(0, 99999)


@st.composite
def machines(draw, phy):
    """Devices and processes as `info` shows them."""
    cards = draw(st.lists(st.integers(0, 40000), min_size=1, max_size=5, unique=True))
    chips = draw(st.integers(1, 2))
    phy_ids = draw(st.lists(st.integers(0, 99), min_size=10, max_size=10, unique=True))
    devices = []
    for card in cards:
        for chip in range(chips):
            devices.append({
                "npu_id": card, "chip_id": chip, "phy_id": phy_ids[len(devices)] if phy else None,
                "name": draw(st.sampled_from(["910B4-1", "910A", "Ascend910", "310P3", "910 Pro B"])),
                "health": draw(st.sampled_from(["OK", "Warning", "Alarm", "Critical", "UNKNOWN"])),
                "bus_id": draw(st.sampled_from([None, "0000:C1:00.0", "0001:01:00.0"])),
                "power_w": draw(st.sampled_from([None, 0.0, 92.5, 263.2])), "temperature_c": draw(st.integers(0, 110)),
                "utilization_pct": draw(st.integers(0, 100)),
                "memory_used_mb": draw(NUMBER), "memory_total_mb": draw(NUMBER),
                "hbm_used_mb": draw(NUMBER), "hbm_total_mb": draw(NUMBER),
            })
    processes = [{
        "npu_id": device["npu_id"], "chip_id": device["chip_id"], "pid": draw(st.integers(1, 4194304)),
        "name": draw(st.sampled_from(["", "python3.1", "VLLMWorker_TP", "pt main thread"])), "memory_mb": draw(NUMBER),
        "container_pid": draw(st.sampled_from([None, 7, 4711])),
    } for device in devices if draw(st.booleans())]
    return devices, processes


def shown(value):
    return "NA" if value is None else str(value)


@pytest.mark.parametrize("family", ["910", "910-bytes", "A3", "26", "310", "950"])
@settings(max_examples=40)
@given(data=st.data())
def test_info_round_trip(family, data):
    devices, processes = data.draw(machines(phy=family in ("A3", "310")))
    if family == "950":
        devices = [device for device in devices if device["chip_id"] == 0]
        processes = [{**process, "chip_id": None} for process in processes if process["chip_id"] == 0]
    for device in devices:
        if family == "310":
            device["hbm_used_mb"] = device["hbm_total_mb"] = None
    for process in processes:
        if family != "26":
            process["container_pid"] = None

    second = {"A3": "Chip  Phy-ID", "310": "Chip    Device", "950": ""}.get(family, "Chip")
    usage = "NPU Util(%)" if family == "950" else "AICore(%)"
    head = "| NPU ID | Name |" if family == "950" else "| NPU   Name |"
    blank = "| {} | |" if family == "950" else "| {} |"
    lines = [
        "+" + "-" * 96 + "+", "| npu-smi 25.5.2               Version: 25.5.2     |", "+---+",
        f"{head} Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|",
        f"{blank.format(second)} Bus-Id        | {usage}   Memory-Usage(MB) {'' if family == '310' else 'HBM-Usage(MB)'} |",
    ]
    for device in devices:
        name = f"| {device['npu_id']} | {device['name']} |" if family == "950" else f"| {device['npu_id']:<6}{device['name']:<20}|"
        ids = {"A3": f"{device['chip_id']:<6}{device['phy_id']}", "310": f"{device['chip_id']}   {device['phy_id']}", "950": ""}.get(
            family, str(device["chip_id"]))
        hbm = "" if family == "310" else f"{device['hbm_used_mb']:<5}/ {device['hbm_total_mb']}"
        lines += [
            f"{name} {device['health']:<14}| {shown(device['power_w']):<12}{device['temperature_c']:<18}0    / 0             |",
            f"{blank.format(ids)} {shown(device['bus_id']):<14}| {device['utilization_pct']:<12}{device['memory_used_mb']:<5}/ "
            f"{device['memory_total_mb']} {hbm} |",
            "+===+",
        ]
    byte = family == "910-bytes"
    lines.append("| " + ("NPU ID" if family == "950" else "NPU     Chip") + " | Process id    | Process name  | Process memory"
                 + ("(B)" if byte else "(MB)") + (" | Process id in container |" if family == "26" else " |"))
    for device in devices:
        own = [process for process in processes if process["npu_id"] == device["npu_id"]
               and process["chip_id"] in (None, device["chip_id"])]
        for process in own:
            ids = str(process["npu_id"]) if family == "950" else f"{process['npu_id']:<8}{process['chip_id']}"
            memory = process["memory_mb"] * 1024 * 1024 if byte else process["memory_mb"]
            lines.append(f"| {ids} | {process['pid']} | {process['name']} | {memory} |"
                         + (f" {shown(process['container_pid'])} |" if family == "26" else ""))
        if not own:
            lines.append(f"| No running processes found in NPU {device['npu_id']}    |")
    assert npu_smi.parse_info("\n".join(lines) + "\n") == {
        "tool_version": "25.5.2", "driver_version": "25.5.2", "devices": devices, "processes": processes}


@given(st.lists(st.tuples(st.integers(0, 40000), st.integers(0, 3)), min_size=1, max_size=8, unique=True),
       st.sampled_from(["four", "five", "950"]), st.sampled_from(["Ascend 910B3", "910B4-1", "xxx"]), st.booleans())
def test_map_round_trip(chips, layout, name, controller):
    columns = {"four": ["NPU ID", "Chip ID", "Chip Logic ID", "Chip Name"],
               "five": ["NPU ID", "Chip ID", "Chip Logic ID", "Chip Phy-ID", "Chip Name"],
               "950": ["NPU ID", "Slot ID", "Chip ID", "Chip Phy-ID", "Chip Name"]}[layout]
    if layout == "950":
        chips = [(npu, 0) for npu in dict.fromkeys(npu for npu, _chip in chips)]
    lines, wanted = ["\t" + "".join(f"{column:<31}" for column in columns)], []
    for number, (npu, chip) in enumerate(chips):
        logic = npu if layout == "950" else number
        phy = None if layout == "four" else 2 * number + 1
        values = {"NPU ID": npu, "Chip ID": chip, "Chip Logic ID": logic, "Chip Phy-ID": phy, "Slot ID": 3, "Chip Name": name}
        lines.append("\t" + "".join(f"{values[column]!s:<31}" for column in columns))
        wanted.append({"npu_id": npu, "chip_id": chip, "logic_id": logic, "phy_id": phy, "name": name})
        if controller:
            row = {**dict.fromkeys(columns, "-"), "NPU ID": npu, "Chip ID": chip + 4, "Chip Name": "Mcu"}
            lines.append("\t" + "".join(f"{row[column]!s:<31}" for column in columns))
    assert npu_smi.parse_map("\n".join(lines) + "\n") == wanted


@given(st.sampled_from(sorted(PARSERS)), st.data())
def test_damaged_outputs_are_read_or_refused(command, data):
    """A line lost, doubled or cut off: never another exception, never a device invented."""
    text = data.draw(st.sampled_from(sorted(FIXTURES.glob(f"{command}/*/input.txt")))).read_text()
    lines = text.splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    damage = data.draw(st.sampled_from(["lost", "doubled", "cut"]))
    lines[number:number + 1] = {"lost": [], "doubled": [lines[number]] * 2,
                                "cut": [lines[number][:data.draw(st.integers(0, 80))]]}[damage]
    try:
        parsed = PARSERS[command]("\n".join(lines))
    except NpuSmiError:
        return
    if command == "info":
        known = npu_smi.parse_info(text)["devices"]
        assert all(device in known for device in parsed["devices"])
