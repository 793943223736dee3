"""npu-smi's outputs of any shape: rendered in every dialect and read back, and damaged, where a reading must be what the text says.

LLMOPS_FUZZ multiplies the number of examples: 20 take five minutes.
"""

from __future__ import annotations

import os
import random
from typing import Iterator, NamedTuple

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import npu_smi
from ansible_collections.llmops.ascend.plugins.module_utils.npu_smi import NpuSmiError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

PARSERS = (npu_smi.parse_info, npu_smi.parse_map, npu_smi.parse_list, npu_smi.parse_topo, npu_smi.parse_board, npu_smi.parse_chip,
           npu_smi.parse_readings, npu_smi.parse_processes, npu_smi.parse_version, npu_smi.parse_fields)
# Shapes are drawn by hypothesis, and shrink; the contents of a table of 64 devices are the generator's.
GENERATORS = st.integers(0, 2**32).map(random.Random)
SIZES = st.one_of(st.integers(1, 4), st.integers(1, 64))


def examples(count: int) -> settings:
    return settings(max_examples=count * int(os.environ.get("LLMOPS_FUZZ", "1")), deadline=None,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


BEFORE = ["", "DrvMngGetConsoleLogLevel failed. (ret=4)", "ERROR: ld.so: object 'libjemalloc.so' from LD_PRELOAD cannot be preloaded: ignored.",
          "[WARNING] 驱动版本较旧", "bash: warning: setlocale: LC_ALL: cannot change locale (zh_CN.UTF-8)"]
AFTER = ["", "[WARNING]The driver package may not be completely installed, which may cause function abnormal. Please reinstall it."]


def dressed(lines: list[str], rng: random.Random) -> str:
    """The lines as a terminal, a serial console or Windows leave them, with others' lines around."""
    lines = [rng.choice(BEFORE), *lines, rng.choice(AFTER)]
    end = rng.choice(["\n", "\r\n", "  \n", " \t\r\n"])
    if rng.random() < 0.3:
        lines = [f"\x1b[1;31m{line}\x1b[0m" if rng.random() < 0.3 else line for line in lines]
    return end.join(lines) + (end if rng.random() < 0.5 else "")


# ---------------------------------------------------------------------------------------------------------------- info

class Dialect(NamedTuple):
    """Headers of `npu-smi info`: cells apart by |, columns by two blanks; a device's first and second row, and a process."""

    first: str
    second: str
    process: str | None
    chips: int = 1


PAGES = "Power(W)  Temp(C)  Hugepages-Usage(page)"
HBM = "AICore(%)  Memory-Usage(MB)  HBM-Usage(MB)"
OLD = "Process id|Process name|Process memory(MB)"
NEW = "Process id|Process name|Process memory(MB)|Process id in container"
DIALECTS = {
    "910": Dialect(f"NPU  Name|Health|{PAGES}", f"Chip|Bus-Id|{HBM}", f"NPU  Chip|{OLD}"),
    "910 memory in bytes": Dialect(f"NPU  Name|Health|{PAGES}", f"Chip|Bus-Id|{HBM}", "NPU  Chip|Process id|Process name|Process memory(B)"),
    "910 of 26": Dialect(f"NPU  Name|Health|{PAGES}", f"Chip|Bus-Id|{HBM}", f"NPU  Chip|{NEW}"),
    "A3": Dialect(f"NPU  Name|Health|{PAGES}", f"Chip  Phy-ID|Bus-Id|{HBM}", f"NPU  Chip|{OLD}", 2),
    "A3 of 26": Dialect(f"NPU  Name|Health|{PAGES}", f"Chip  Phy-ID|Bus-Id|{HBM}", f"NPU  Chip|{NEW}", 2),
    "310 of 21": Dialect("NPU  Name|Health|Power(W)  Temp(C)", "Chip  Device|Bus-Id|AICore(%)  Memory-Usage(MB)", None, 4),
    "310P": Dialect(f"NPU  Name|Health|{PAGES}", "Chip  Device|Bus-Id|AICore(%)  Memory-Usage(MB)", f"NPU  Chip|{OLD}", 2),
    "950": Dialect(f"NPU ID|Name|Health|{PAGES}", "||Bus-Id|NPU Util(%)  Memory-Usage(MB)  HBM-Usage(MB)", f"NPU ID|{OLD}"),
    "950 of 26": Dialect(f"NPU ID|Name|Health|{PAGES}", "||Bus-Id|NPU Util(%)  Memory-Usage(MB)  HBM-Usage(MB)", f"NPU ID|{NEW}"),
}
KEYS = {"Phy-ID": "phy_id", "Device": "phy_id", "Memory-Usage(MB)": "memory", "HBM-Usage(MB)": "hbm", "AICore(%)": "utilization_pct",
        "NPU Util(%)": "utilization_pct", "Power(W)": "power_w", "Temp(C)": "temperature_c"}


def card_ids(rng: random.Random, count: int) -> list[int]:
    start, step = rng.choice([(0, 1), (8, 1), (0, 32), (1536, 256), (0, 32768)])
    ids = [start + step * n for n in range(count)]
    if rng.random() < 0.3:
        ids = rng.sample(range(100000), count)
    return ids


def a_machine(rng: random.Random, size: int, dialect: Dialect) -> dict:
    """What the machine is: the result that parse_info shall give."""
    columns = {KEYS.get(column) for column in (dialect.first + "|" + dialect.second).replace("|", "  ").split("  ")}
    devices: list[dict] = []
    phy_ids = rng.sample(range(300), size)
    for card in card_ids(rng, size):
        for chip in range(rng.randint(1, dialect.chips)):
            if len(devices) == size:
                break
            maybe = [None, rng.randint(0, 99999)]
            device = {
                "npu_id": card, "chip_id": chip, "phy_id": phy_ids[len(devices)],
                "name": rng.choice(["910B4-1", "910A", "Ascend910", "310P3", "910 Pro B", "Ascend950DT"]),
                "health": rng.choice(["OK", "Warning", "Alarm", "Critical", "UNKNOWN"]),
                "bus_id": rng.choice([None, f"0000:{rng.randrange(256):02X}:00.0", "0001:c1:00.0", "00010000:01:00.0"]),
                "power_w": rng.choice([None, 0.0, 92.5, 263.2]), "temperature_c": rng.choice([None, -5, 39, 110]),
                "utilization_pct": rng.choice([None, 0, 7, 100]),
                "memory_used_mb": rng.choice(maybe), "memory_total_mb": rng.choice(maybe),
                "hbm_used_mb": rng.choice(maybe), "hbm_total_mb": rng.choice(maybe),
            }
            for key in device:
                kind = key.split("_")[0] if key.startswith(("memory", "hbm")) else key
                if kind in KEYS.values() and kind not in columns:
                    device[key] = None
            devices.append(device)
    processes = []
    for device in devices if dialect.process else []:
        for _again in range(rng.choice([0, 0, 1, 2])):
            processes.append({
                "npu_id": device["npu_id"], "chip_id": device["chip_id"] if "Chip" in dialect.process else None,
                "pid": rng.randint(1, 4194304), "memory_mb": rng.randint(0, 99999),
                "name": rng.choice(["", "python3.1", "VLLMWorker_TP", "pt main thread", "a|b", "7", "NA"]),
                "container_pid": rng.choice([None, 7, 4711]) if "container" in dialect.process else None,
            })
    return {"tool_version": "25.5.2.b030", "driver_version": "25.5.2", "devices": devices, "processes": processes}


def shown(value: object) -> str:
    return "NA" if value is None else str(value)


def value_of(column: str, item: dict) -> str:
    if column == "Hugepages-Usage(page)":
        return "0    / 15"
    if column in ("Memory-Usage(MB)", "HBM-Usage(MB)"):
        kind = KEYS[column]
        return f"{shown(item[kind + '_used_mb']):<5}/ {shown(item[kind + '_total_mb'])}"
    if column == "Process memory(B)":
        return str(item["memory_mb"] * 1024 * 1024 + 77)
    keys = {"NPU": "npu_id", "NPU ID": "npu_id", "Chip": "chip_id", "Name": "name", "Health": "health", "Bus-Id": "bus_id",
            "Process id": "pid", "Process name": "name", "Process memory(MB)": "memory_mb",
            "Process id in container": "container_pid", **KEYS}
    return shown(item[keys[column]]) if column in keys else "17"


class Table(NamedTuple):
    """Lines, and what each is: ("first" | "second", index of its device), ("process", its index) or (anything else, None)."""

    lines: list[str]
    tags: list[tuple[str, int | None]]


def render_info(machine: dict, dialect: Dialect, rng: random.Random, pad: int = 12, mixed: bool = False) -> Table:
    """`pad` is the least width of a column; `mixed` puts columns and cells into another order and adds ones that nobody knows."""
    first, second = ([cell.split("  ") if cell else [] for cell in row.split("|")] for row in (dialect.first, dialect.second))
    process = [cell.split("  ") for cell in dialect.process.split("|")] if dialect.process else []
    if mixed:
        for row in (first, second):
            rng.choice([cell for cell in row if cell]).append("Fan(%)")
            rng.shuffle(row)
            for cell in row:
                rng.shuffle(cell)
        first.append(["Zone"])
        second.append([])
        process = rng.sample(process, len(process)) + ([["User Id"]] if process else [])

    def row(cells: list[list[str]]) -> str:
        return "|" + "|".join(" " + " ".join(f"{text:<{pad}}" for text in cell) + " " for cell in cells) + "|"

    table = Table([], [])

    def add(line: str, kind: str = "", index: int | None = None) -> None:
        table.lines.append(line)
        table.tags.append((kind, index))

    add("+" + "-" * 60 + "+")
    add(f"| npu-smi {machine['tool_version']:<24} Version: {machine['driver_version']:<40} |", "version")
    add("+" + "-" * 30 + "+" + "-" * 29 + "+")
    add(row(first), "header")
    add(row(second), "header")
    add("+" + "=" * 60 + "+")
    for index, device in enumerate(machine["devices"]):
        for kind, cells in (("first", first), ("second", second)):
            add(row([[value_of(column, device) for column in cell] for cell in cells]), kind, index)
        add("+" + "-" * 60 + "+")
    if process:
        add(row(process), "processes")
        add("+" + "=" * 60 + "+")
        for npu_id in dict.fromkeys(device["npu_id"] for device in machine["devices"]):
            own = [index for index, item in enumerate(machine["processes"]) if item["npu_id"] == npu_id]
            for index in own:
                add(row([[value_of(column, machine["processes"][index]) for column in cell] for cell in process]), "process", index)
            if not own:
                add(f"| No running processes found in NPU {npu_id:<40} |", "idle", npu_id)
            add("+" + "=" * 60 + "+")
    return table


def in_order_of(table: Table, machine: dict) -> dict:
    """The machine with its processes in the order in which the table has them."""
    return {**machine, "processes": [machine["processes"][index] for kind, index in table.tags if kind == "process"]}


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@examples(12)
@given(rng=GENERATORS, size=SIZES, pad=st.sampled_from([0, 12, 24]), mixed=st.booleans())
def test_info_is_read_back(dialect, rng, size, pad, mixed):
    machine = a_machine(rng, size, dialect)
    if mixed:                                       # a bar in a name is told by the columns to its right
        machine["processes"] = [{**process, "name": process["name"].replace("|", "/")} for process in machine["processes"]]
    table = render_info(machine, dialect, rng, pad, mixed)
    wanted = in_order_of(table, machine)
    for process in wanted["processes"]:
        process["name"] = process["name"].replace("a|b", "a | b")
    assert npu_smi.parse_info(dressed(table.lines, rng)) == wanted


def damaged(table: Table, rng: random.Random) -> Table:
    """A line lost, doubled, moved, exchanged with another, or the end cut off."""
    lines = list(zip(table.lines, table.tags))
    where, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    damage = rng.choice(["lost", "doubled", "exchanged", "moved", "cut"])
    if damage == "lost":
        del lines[where]
    elif damage == "doubled":
        lines.insert(where, lines[where])
    elif damage == "exchanged":
        lines[where], lines[other] = lines[other], lines[where]
    elif damage == "moved":
        lines.insert(other, lines.pop(where))
    else:
        del lines[max(where, 1):]
    return Table([line for line, _tag in lines], [tag for _line, tag in lines])


def what_the_rows_say(table: Table, machine: dict) -> tuple[list[dict] | None, list[dict]]:
    """The devices by the rows that are there, None when rows are left over or stand crosswise; and the processes."""
    halves = [(kind, index) for kind, index in table.tags if kind in ("first", "second")]
    processes = [machine["processes"][index] for kind, index in table.tags if kind == "process"]
    if [kind for kind, _index in halves] != ["first", "second"] * (len(halves) // 2):
        return None, processes
    upper = ("npu_id", "name", "health", "power_w", "temperature_c")
    devices = [{key: machine["devices"][one if key in upper else other][key] for key in machine["devices"][0]}
               for (_first, one), (_second, other) in zip(halves[::2], halves[1::2])]
    return devices, processes


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@examples(40)
@given(rng=GENERATORS, size=st.integers(1, 6), times=st.integers(1, 2))
def test_info_with_damaged_lines_is_refused_or_read_as_it_stands(dialect, rng, size, times):
    machine = a_machine(rng, size, dialect)
    for process in machine["processes"]:
        process["name"] = process["name"].replace("|", "/")
    table = render_info(machine, dialect, rng)
    for _time in range(times):
        table = damaged(table, rng)
    try:
        info = npu_smi.parse_info("\n".join(table.lines))
    except NpuSmiError as error:
        assert str(error).startswith("npu-smi info")
        return
    assert (info["devices"], info["processes"]) == what_the_rows_say(table, machine)


def with_another_character(line: str, rng: random.Random) -> str:
    where = rng.randrange(len(line) + 1)
    new = rng.choice(["", *"|+-=/ 0X9NAa.:²٣"])
    return line[:where] + new + line[where + rng.choice([0, 1]):]


def squeezed(text: str) -> str:
    return "".join(text.split()).replace(".0", "")


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@examples(60)
@given(rng=GENERATORS, size=st.integers(1, 4))
def test_a_wrong_character_touches_one_line_only(dialect, rng, size):
    machine = a_machine(rng, size, dialect)
    for process in machine["processes"]:
        process["name"] = process["name"].replace("|", "/")
    table = render_info(machine, dialect, rng)
    number = rng.choice([n for n, line in enumerate(table.lines) if line.startswith("|")])
    kind, index = table.tags[number]
    changed = with_another_character(table.lines[number], rng)
    try:
        info = npu_smi.parse_info("\n".join([*table.lines[:number], changed, *table.lines[number + 1:]]))
    except NpuSmiError:
        return
    for table_name, kinds, wanted in (("devices", ("first", "second"), machine["devices"]),
                                      ("processes", ("process",), in_order_of(table, machine)["processes"])):
        assert len(info[table_name]) == len(wanted)
        for read, true in zip(info[table_name], wanted):
            for key, value in read.items():
                if value == true[key]:
                    continue
                assert kind in ("header", "processes", *kinds), f"{key} of another row"
                # A column whose name is not known any more is no value; a value that differs stands in the changed line.
                said = value in (None, "") or kind not in ("header", "processes") and squeezed(str(value)) in squeezed(changed)
                said = said or key == "memory_mb" and "(B)" in dialect.process       # in other units than the text
                said = said or key == "name" and kind in ("header", "processes") and value in true["name"]     # a new column parts it
                assert said, f"{key} {value!r} for {true[key]!r} from {changed!r}"
    others = [device for n, device in enumerate(info["devices"]) if kind not in ("first", "second") or n != index]
    if kind != "header":
        assert all(device in machine["devices"] for device in others)


# ----------------------------------------------------------------------------------------------------------------- map

MAP_KEYS = {"NPU ID": "npu_id", "Chip ID": "chip_id", "Chip Logic ID": "logic_id", "Chip Phy-ID": "phy_id", "Chip Name": "name"}
MAPS = {
    "four columns": ["NPU ID", "Chip ID", "Chip Logic ID", "Chip Name"],
    "five columns": ["NPU ID", "Chip ID", "Chip Logic ID", "Chip Phy-ID", "Chip Name"],
    "950": ["NPU ID", "Slot ID", "Chip ID", "Chip Phy-ID", "Chip Name"],
}


def render_map(rng: random.Random, size: int, columns: list[str], layout: str) -> tuple[list[str], list[dict | None]]:
    """The lines, and the chip of each."""
    mixed = layout == "mixed"
    columns = rng.sample([*columns, "Die"], len(columns) + 1) if mixed else columns
    name = rng.choice(["Ascend 910B3", "Ascend910", "MiniD", "xxx"])

    def row(cells: list[str]) -> str:
        if layout == "single":
            return " ".join(cells)
        return "\t".join(cells) if layout == "tabs" else "\t" + "".join(f"{cell:<31}" for cell in cells)

    lines, chips, logic_id = [row(columns)], [None], rng.choice([0, 4])
    phy_ids = rng.sample(range(300), size)
    for card in card_ids(rng, size):
        for chip_id in range(1 if "Slot ID" in columns else rng.randint(1, 2)):
            if logic_id - len(phy_ids) in (0, 4) and len([chip for chip in chips if chip]) == size:
                break
            chip = {"npu_id": card, "chip_id": chip_id, "logic_id": card if "Slot ID" in columns else logic_id,
                    "phy_id": phy_ids[len([one for one in chips if one])] if "Chip Phy-ID" in columns else None, "name": name}
            logic_id += 1
            chips.append(chip)
            lines.append(row([str(chip[MAP_KEYS[column]]) if column in MAP_KEYS else "-1" for column in columns]))
            if len([one for one in chips if one]) == size:
                break
        else:
            if "Slot ID" not in columns and rng.random() < 0.7:
                controller = {"NPU ID": str(card), "Chip ID": "5", "Chip Name": rng.choice(["Mcu", "3559"])}
                lines.append(row([controller.get(column, "-") for column in columns]))
                chips.append(None)
            continue
        break
    return lines, chips


@pytest.mark.parametrize("columns", MAPS.values(), ids=MAPS)
@examples(40)
@given(rng=GENERATORS, size=SIZES, layout=st.sampled_from(["tool", "single", "tabs", "mixed"]))
def test_map_is_read_back(columns, rng, size, layout):
    lines, chips = render_map(rng, size, columns, layout)
    assert npu_smi.parse_map(dressed(lines, rng).replace(AFTER[1], "")) == [chip for chip in chips if chip]


@pytest.mark.parametrize("columns", MAPS.values(), ids=MAPS)
@examples(60)
@given(rng=GENERATORS, size=st.integers(1, 6), layout=st.sampled_from(["tool", "single", "tabs"]))
def test_a_damaged_map_is_refused_or_read_as_it_stands(columns, rng, size, layout):
    lines, chips = render_map(rng, size, columns, layout)
    table = damaged(Table(lines, [("chip" if chip else "", number) for number, chip in enumerate(chips)]), rng)
    try:
        read = npu_smi.parse_map("\n".join(table.lines))
    except NpuSmiError as error:
        assert str(error).startswith("npu-smi info -m")
        return
    header = table.tags.index(("", 0))
    assert read == [chips[number] for kind, number in table.tags[header:] if kind]


# ---------------------------------------------------------------------------------------------------------------- topo

LINKS = [link for link in npu_smi.LINKS if link != "X"]
LEGEND = ["", "Legend:", "", "  X    = Self", "  SYS  = Path traversing PCIe and NUMA nodes. Nodes are connected through SMP, such as QPI, UPI.",
          "  HCCS_SW = Connection traversing HCCS through a switch.", "  NA   = Unknown relationship."]


def cpu_list(rng: random.Random) -> str:
    start, width = rng.randrange(512), rng.randint(0, 95)
    lists = [str(start), f"{start}-{start + width + 1}", f"{start}-{start + width},{start + 1024}-{start + 1024 + width}", "1,3,5"]
    return rng.choice(lists)


class Topology(NamedTuple):
    lines: list[str]
    truth: dict


def render_topo(rng: random.Random, size: int, layout: str, header: bool) -> Topology:
    kind = rng.choice(["NPU", "Phy-ID"])
    ids = rng.sample(range(100000), size) if rng.random() < 0.3 else [rng.choice([0, 8, 12]) + n for n in range(size)]
    ids = list(dict.fromkeys(ids)) if len(set(ids)) == size else list(range(size))
    cards = [("NIC", number) for number in range(rng.choice([0, 0, 2, 4]))]
    rows = [(kind, number) for number in ids] + (cards if rng.random() < 0.7 else [])
    columns = [(kind, number) for number in ids] + cards
    links: dict = {}
    for index, one in enumerate(columns):
        for other in columns[:index]:
            links[one, other] = links[other, one] = rng.choice(LINKS)
    affinity = rng.choice(["all", "some", "none"])
    cpus = {number: None if affinity == "none" or affinity == "some" and rng.random() < 0.5 else cpu_list(rng) for number in ids}
    numa = header and affinity == "all" and rng.random() < 0.3

    def cell(text: str, width: int = 11) -> str:
        forms = {"tool": f"{text:<{width}}", "single": text + " ", "centred": f"{text:^13}", "tabs": text + "\t", "wide": f"{text:<24}"}
        return forms[layout]

    def label(one: tuple[str, int]) -> str:
        text = "{}{}".format(*one)
        return f"{one[0]}{one[1]:<{max(11 - len(one[0]), 0)}}" if layout == "tool" else cell(text)

    lines = []
    if header:
        lines.append("\t   " + "".join(map(label, columns)) + ("CPU Affinity" if affinity != "none" else "")
                     + (cell("") + "NUMA Affinity" if numa else ""))
    for one in rows:
        line = label(one) + "".join(cell("X" if other == one else links[one, other]) for other in columns)
        line = line.replace(" NA ", " N/A ") if rng.random() < 0.2 else line
        lines.append(line + ((cpus.get(one[1]) or "") if one[0] != "NIC" else "") + (" 3" if numa and one[0] != "NIC" else ""))
    truth = {
        "kind": kind, "cpus": cpus,
        "links": {} if not header and len(rows) < len(columns) else
        {one: {other: links[(kind, one), (kind, other)] for other in ids if other != one} for one in ids},
    }
    return Topology(lines, truth)


@pytest.mark.parametrize("layout", ["tool", "single", "centred", "tabs", "wide"])
@examples(24)
@given(rng=GENERATORS, size=SIZES, header=st.booleans(), names=st.booleans(), legend=st.booleans())
def test_topo_is_read_back(layout, rng, size, header, names, legend):
    topology = render_topo(rng, size, layout, header)
    lines = ["NPU Chip Affinity", *topology.lines] if names else list(topology.lines)
    lines += ["", "NIC0: mlx5_0", "NIC1: ", ""] if names else []
    assert npu_smi.parse_topo(dressed(lines + (LEGEND if legend else []), rng)) == topology.truth


def within(read: dict, truth: dict) -> bool:
    """Nothing but what is true: of every device or of fewer, and links of all of them or none at all."""
    return (read["kind"] == truth["kind"] and read["cpus"].items() <= truth["cpus"].items()
            and read["links"] in ({}, truth["links"]))


@examples(400)
@given(rng=GENERATORS, size=st.integers(2, 6), header=st.booleans())
def test_a_damaged_topo_is_refused_or_says_nothing_wrong(rng, size, header):
    topology = render_topo(rng, size, "tool", header)
    table = damaged(Table([*topology.lines, *LEGEND], [("", None)] * (len(topology.lines) + len(LEGEND))), rng)
    try:
        read = npu_smi.parse_topo("\n".join(table.lines))
    except NpuSmiError as error:
        assert str(error).startswith("npu-smi info -t topo")
        return
    assert within(read, topology.truth)
    if table.lines[0] == topology.lines[0] and header:
        assert read == topology.truth


@examples(400)
@given(rng=GENERATORS, size=st.integers(2, 5))
def test_a_wrong_character_in_a_topo_changes_no_link(rng, size):
    topology = render_topo(rng, size, "tool", header=True)
    lines = list(topology.lines)
    number = rng.randrange(1, len(lines))
    lines[number] = with_another_character(lines[number], rng)
    try:
        read = npu_smi.parse_topo("\n".join(lines))
    except NpuSmiError:
        return
    assert read["links"] == topology.truth["links"]
    wrong = [one for one, cpus in read["cpus"].items() if cpus != topology.truth["cpus"][one]]
    assert all(read["cpus"][one] is None or read["cpus"][one] in lines[number] for one in wrong) and len(wrong) < 2


# ------------------------------------------------------------------------------------------- the Name : value outputs

def pairs(items: list[tuple[str, object]], tab: str) -> list[str]:
    return [f"{tab}{name:<30} : {value}" if name else "" for name, value in items]


def a_query(rng: random.Random, kind: str) -> tuple[list[tuple[str, object]], list[dict]]:
    """The lines of `npu-smi info -t ...` for one card, and what they say."""
    npu_id, chips = rng.choice([0, 7, 32768]), 1 if kind == "950" else rng.randint(1, 3)
    names = rng.sample(["HBM Capacity(MB)", "HBM Usage Rate(%)", "Aicore Usage Rate(%)", "Temperature (C)", "Health", "Error Code"],
                       rng.randint(1, 5))
    lines: list[tuple[str, object]] = [("NPU ID", npu_id)]
    if kind != "950":
        lines.append(("Chip Count", chips))
    wanted = []
    for chip_id in range(chips):
        fields = {name: str(rng.choice(["NA", 0, 39, "OK", "0000:C1:00.0"])) for name in names}
        wanted.append({"npu_id": npu_id, "chip_id": chip_id, "fields": fields})
        mark = [] if kind == "950" else [("Chip ID", chip_id)]
        lines += [("", ""), *(mark if kind == "before" else []), *fields.items(), *(mark if kind == "after" else [])]
    if kind != "950" and rng.random() < 0.6:
        mark, values = [("Chip Name", rng.choice(["mcu", "MCU", "3559"]))], [("LM75A_TE (C)", 36), ("Temperature (C)", 38)]
        lines += [("", ""), *(mark + values if kind == "before" else values + mark)]
    return lines, wanted


@pytest.mark.parametrize("kind", ["before", "after", "950"])
@examples(60)
@given(rng=GENERATORS, tab=st.sampled_from(["", "\t", "        "]))
def test_readings_are_read_back(kind, rng, tab):
    lines, wanted = a_query(rng, kind)
    assert npu_smi.parse_readings(dressed(pairs(lines, tab), rng)) == wanted


@pytest.mark.parametrize("kind", ["before", "after", "950"])
@examples(100)
@given(rng=GENERATORS)
def test_damaged_readings_are_refused_or_stay_with_their_chip(kind, rng):
    lines, wanted = a_query(rng, kind)
    where = rng.randrange(len(lines))
    lines[where:where + 1] = rng.choice([[], [lines[where]] * 2])
    try:
        read = npu_smi.parse_readings("\n".join(pairs(lines, "\t")))
    except NpuSmiError:
        return
    for chip in read:
        if chip["npu_id"] is None:                  # the first line is lost, so that nothing says whose values these are
            continue
        true = next(one for one in wanted if one["chip_id"] == chip["chip_id"])
        assert chip["fields"].items() <= true["fields"].items()


@examples(100)
@given(rng=GENERATORS, size=SIZES, tab=st.sampled_from(["", "\t", "        "]), total=st.sampled_from(["Total Count", "Card Count"]),
       server=st.booleans())
def test_list_is_read_back(rng, size, tab, total, server):
    cards = [{"npu_id": card, "product": None if server else "Atlas 300I Duo", "serial": None if server else f"SN{card}",
              "chips": rng.choice([None, 1, 2])} for card in card_ids(rng, size)]
    lines: list[tuple[str, object]] = [(total, size)]
    keys = {"NPU ID": "npu_id", "Product Name": "product", "Serial Number": "serial", "Chip Count": "chips"}
    for card in cards:
        lines += [("", ""), *((name, card[key]) for name, key in keys.items() if card[key] is not None)]
    text = pairs(lines, tab)
    assert npu_smi.parse_list(dressed(text, rng)) == cards
    where = rng.choice([number for number, (name, _value) in enumerate(lines) if name in ("NPU ID", total)])
    for damage in ([], [text[where]] * 2):
        with pytest.raises(NpuSmiError, match="npu-smi info -l"):
            npu_smi.parse_list("\n".join([*text[:where], *damage, *text[where + 1:]]))


@examples(60)
@given(rng=GENERATORS, tab=st.sampled_from(["", "\t"]), ids=st.sampled_from(["printed", "950", "asked"]))
def test_processes_are_read_back(rng, tab, ids):
    npu_id, chips = None if ids == "asked" else rng.choice([0, 32768]), rng.randint(1, 2) if ids == "printed" else 1
    lines = [] if ids == "asked" else pairs([("NPU ID", npu_id)], tab)
    lines += pairs([("Chip Count", chips), ("", "")], tab) if ids == "printed" else []
    wanted = []
    for chip_id in range(chips):
        own = [{"npu_id": npu_id, "chip_id": None if ids == "asked" else chip_id, "pid": rng.randint(1, 4194304),
                "name": rng.choice(["", "python3.1", "pt main thread", "a:b"]), "memory_mb": rng.randint(0, 99999)}
               for _number in range(rng.randint(0, 3))]
        lines += [f"{tab}Process id:{one['pid']:<7d} Process name:{one['name']:<17s} Process memory(MB):{one['memory_mb']}" for one in own]
        lines += [] if own else [f"{tab}No process in device."]
        lines += [*pairs([("Chip ID", chip_id)], tab), ""] if ids == "printed" else []
        wanted += own
    assert npu_smi.parse_processes(dressed(lines, rng).replace(AFTER[1], "")) == wanted


# ------------------------------------------------------------------------------------------------------- whatever comes

WORDS = st.sampled_from([
    "|", "||", "+", "+--+", "+==+", "NPU", "NPU ID", "NPU0", "Phy-ID1", "NIC0", "NIC0:", "Chip", "Chip ID", "Chip Logic ID", "Chip Phy-ID",
    "Chip Name", "Chip Count", "Mcu", "3559", "Total Count", "Name", "Health", "OK", "Bus-Id", "NA", "N/A", "-", "0", "1", "00", "²", "٣", "1e9",
    "nan", "inf", "9" * 30, "9" * 5000, "0-99999999999", "0-3", "3-0", "0-3,8-11", "X", "HCCS", "SIO", "CPU Affinity", "Process id", "Process name",
    "Process memory(MB)", "Process memory(B)", "Process id:1 Process name: Process memory(MB):2", "No running processes found in NPU 0",
    "No process in device.", "Software Version", "npu-smi 25.5.2", "npu-smi version:", "Version: 25.5.2", "AICore(%)", "HBM-Usage(MB)", "Power(W)",
    "0 / 0", "0/ 0", " : ", ":", "\n", "\n", "\n", "\t", "  ", " ", "\x1b[31m", "\x00", "\r", "\u2028", "910B3", "0000:C1:00.0"])


@examples(500)
@given(st.one_of(st.text(), st.lists(st.one_of(WORDS, st.text(max_size=3)), max_size=60).map(" ".join),
                 st.lists(WORDS, max_size=60).map("".join)), st.integers(-10000, 300))
@example("| 0 Name | Health | | |\n|" + "²" * 3 + "|", 0)
@example("ret is -" + "9" * 5000, 187)
def test_any_text_is_read_or_refused_with_a_reason(text, exit_code):
    for parse in PARSERS:
        try:
            parse(text)
        except NpuSmiError as error:
            assert str(error).startswith("npu-smi") and len(str(error)) > 20
    failure = npu_smi.explain_failure(exit_code, text)
    assert failure is None or failure.meaning and failure.remedy


def recorded() -> Iterator[str]:
    for name in ("910", "A3", "310P", "950 of 26"):
        rng = random.Random(name)
        yield "\n".join(render_info(a_machine(rng, 4, DIALECTS[name]), DIALECTS[name], rng).lines)
    for columns in MAPS.values():
        yield "\n".join(render_map(random.Random(4), 4, columns, "tool")[0])
    for header in (True, False):
        yield "\n".join(render_topo(random.Random(7), 4, "tool", header).lines + LEGEND)
    for kind in ("before", "after", "950"):
        yield "\n".join(pairs(a_query(random.Random(3), kind)[0], "\t"))


@examples(300)
@given(st.sampled_from(list(recorded())), GENERATORS, st.integers(1, 8))
def test_texts_with_many_wrong_characters_are_read_or_refused(text, rng, times):
    for _time in range(times):
        text = with_another_character(text, rng)
    for parse in PARSERS:
        try:
            parse(text)
        except NpuSmiError as error:
            assert str(error).startswith("npu-smi")
