"""What ``npu-smi`` prints, as data: every layout family from 23.0 to 26.x, 310 to 950.

Each parser takes the text of one command run with LC_ALL=C and returns plain dicts, or raises NpuSmiError naming the
line and the reason: a table is believed whole or not at all. The formats are those of the vendor's open driver source
(npucli: npu_info_print_ext.c, npu_info.c) and of outputs from real machines (tests/unit/fixtures/npu_smi).

Four numbers name one chip, and none follows from another:

* NPU ID: the card, as the tool counts them (may start at 8 or jump to 32768);
* Chip ID: the chip on its card;
* Chip Logic ID: what the runtime counts, and ``ASCEND_RT_VISIBLE_DEVICES`` on the host;
* Chip Phy-ID: the N of ``/dev/davinciN``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ansible_collections.llmops.ascend.plugins.module_utils.numa import parse_cpu_list


class NpuSmiError(ValueError):
    """An output that cannot be believed."""

    def __init__(self, command: str, reason: str, line: int | None = None, text: str = "") -> None:
        where = command if line is None else f"{command}, line {line}"
        shown = f": {text.strip()!r}" if text.strip() else ""
        super().__init__(f"{where}: {reason}{shown}")
        self.line = line


class Failure(NamedTuple):
    """A failed call, explained: the tool's own code (negative) or None, what it means, and what to do."""

    code: int | None
    meaning: str
    remedy: str


# DCMI codes (dcmi_interface_api.h). The tool exits with them, so that a shell sees `code & 255`.
_CODES: dict[int, tuple[str, str]] = {
    -8001: ("invalid parameter", "check the npu-smi version: it does not know this command"),
    -8002: ("operation not permitted", "run as root (become: true)"),
    -8005: ("the driver or its devices do not answer",
            "check `lsmod | grep drv_` and dmesg; reboot after a driver installation; in a container, map the device nodes "
            "and /usr/local/Ascend/driver, and see that no other container holds the device"),
    -8008: ("the device does not exist", "check the ids with `npu-smi info -m`"),
    -8012: ("the device is not ready", "wait a minute after boot, then look at dmesg"),
    -8013: ("not supported in a container", "run it on the host"),
    -8020: ("the device is used by another container", "stop the container that holds it; one container per device"),
    -8255: ("not supported on this device", "nothing to do: the tool cannot tell"),
}
# Some failures only print, and may exit with 0.
_TEXTS: tuple[tuple[str, str, str], ...] = (
    (r"There is no NPU card on this server", "the machine shows no NPU",
     "check `lspci -d 19e5:`; if the cards are listed, install or reload the driver"),
    (r"can(?:not| not) be executed on a VM", "not available on a virtual machine", "nothing to do: the tool cannot tell here"),
    (r"can be executed only by the root user", "needs root", "run as root (become: true)"),
    (r"does not support querying", "not supported on this device", "nothing to do: the tool cannot tell"),
    (r"driver package may not be completely installed", "the driver is not completely installed",
     "install the driver again and reboot"),
    (r"Failed to get card number", "the driver does not answer", "check dmesg; reboot after a driver installation"),
    (r"npu get board type failed", "the driver does not answer", "check dmesg; reboot after a driver installation"),
    (r"error while loading shared libraries", "a library of the driver is missing",
     "install the driver again; check /etc/ld.so.conf.d and run ldconfig"),
)


def explain_failure(exit_code: int, output: str) -> Failure | None:
    """Why a call failed, from its exit code and all it printed; None when it did not fail."""
    printed = re.search(r"\bret is (-\d+)", output)
    code = int(printed.group(1)) if printed else next((c for c in _CODES if exit_code and c & 255 == exit_code), None)
    if printed and code in _CODES:
        return Failure(code, *_CODES[code])
    for pattern, meaning, remedy in _TEXTS:
        if re.search(pattern, output, re.IGNORECASE):
            return Failure(code, meaning, remedy)
    if code in _CODES:
        return Failure(code, *_CODES[code])
    if code is not None or exit_code:
        return Failure(code, f"it failed with exit code {exit_code}", "run it by hand on the machine")
    return None


# --------------------------------------------------------------------------------------------------------------- info

_VERSION = re.compile(r"\|\s*npu-smi\s+(\S+)\s+Version:\s*(\S*)")
_PAIR = r"(\d+)\s*/\s*(\d+)"
_ABSENT = {"-", "NA", "N/A"}


def parse_info(text: str) -> dict:
    """``npu-smi info``: versions, chips and who uses them.

    Returns ``{"tool_version", "driver_version", "devices": [...], "processes": [...]}``; a device is ``{"npu_id", "chip_id",
    "phy_id", "name", "health", "bus_id", "power_w", "temperature_c", "utilization_pct", "memory_used_mb",
    "memory_total_mb", "hbm_used_mb", "hbm_total_mb"}``, a process ``{"npu_id", "chip_id", "pid", "name", "memory_mb",
    "container_pid"}``. What a layout does not print is None (phy_id on 910B, hbm_* on 310P, chip_id of a 950 process).
    """
    info: dict = {"tool_version": None, "driver_version": None, "devices": [], "processes": []}
    columns: dict[str, str] = {}                    # what the header says: "id" -> Phy-ID, "memory" -> ...
    unit = 0                                        # bytes per unit of process memory; 0 until its table has begun
    first: tuple[int, str, list[str]] | None = None

    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped.startswith("|"):
            continue                                # frame lines, driver chatter before the table
        if not stripped.endswith("|"):
            raise NpuSmiError("npu-smi info", "row without its right border", number, line)
        version = _VERSION.match(stripped)
        if version:
            info["tool_version"], info["driver_version"] = version.group(1), version.group(2) or None
            continue
        cells = [cell.strip() for cell in stripped[1:-1].split("|")]
        if "Process id" in cells:
            if first:
                raise NpuSmiError("npu-smi info", "process table begins inside a device", number, line)
            unit = 1 if any("memory(B)" in cell for cell in cells) else 1024 * 1024
        elif "Health" in cells or "Bus-Id" in cells:
            columns.update(_info_header(cells))
        elif unit:
            info["processes"].extend(_info_process(number, line, cells, unit))
        elif first is None:
            first = (number, line, cells)
        else:
            info["devices"].append(_info_device(first, (number, line, cells), columns))
            first = None

    if first:
        raise NpuSmiError("npu-smi info", "device with a first row only", first[0], first[1])
    if not info["devices"]:
        raise NpuSmiError("npu-smi info", "no device in the table", None, text[:120])
    for key in (("npu_id", "chip_id"), ("phy_id",)):
        seen: dict[tuple, dict] = {}
        for device in info["devices"]:
            value = tuple(device[name] for name in key)
            if None not in value and value in seen:
                raise NpuSmiError("npu-smi info", f"two devices with {'/'.join(key)} {'/'.join(map(str, value))}")
            seen[value] = device
    return info


def _info_header(cells: list[str]) -> dict[str, str]:
    columns = {}
    if "Bus-Id" in cells:
        columns["second"] = " ".join(cells[0].split())          # "Chip", "Chip Phy-ID", "Chip Device" or "" on 950
        columns["hbm"] = "yes" if "HBM-Usage" in cells[-1] else "no"
    return columns


def _number(token: str) -> float | None:
    return None if token in _ABSENT else float(token)


def _info_device(first: tuple[int, str, list[str]], second: tuple[int, str, list[str]], columns: dict[str, str]) -> dict:
    number, line, cells = first
    head = re.match(r"(\d+)\s+(\S.*)$", cells[0]) if len(cells) == 3 else None
    if len(cells) == 4 and cells[0].isdigit():                  # 950: the id and the name have their own columns
        npu_id, name = int(cells[0]), cells[1]
    elif head:
        npu_id, name = int(head.group(1)), head.group(2)
    else:
        raise NpuSmiError("npu-smi info", "expected the first row of a device (NPU, name, health, power)", number, line)
    health, readings = cells[-2], re.match(rf"(\S+)\s+(\S+)\s+{_PAIR}$", cells[-1])
    if not re.match(r"[A-Za-z]+$", health):
        raise NpuSmiError("npu-smi info", f"{health!r} is not a health", number, line)
    if not readings:
        raise NpuSmiError("npu-smi info", "expected power, temperature and huge pages", number, line)

    number2, line2, cells2 = second
    if len(cells2) != len(cells):
        raise NpuSmiError("npu-smi info", f"expected the second row of NPU {npu_id} (chip, bus id, usage)", number2, line2)
    ids = cells2[0].split()
    layout = columns.get("second")
    wanted = {None: (0, 1, 2), "": (0,), "Chip": (1,)}.get(layout, (2,))
    if len(ids) not in wanted or not all(token.isdigit() for token in ids):
        raise NpuSmiError("npu-smi info", f"{cells2[0]!r} where the header says {layout or 'Chip'!r}", number2, line2)
    usage = re.match(rf"(\S+)\s+{_PAIR}(?:\s+{_PAIR})?$", cells2[-1])
    if not usage or (columns.get("hbm") == "yes") > (usage.group(4) is not None):
        raise NpuSmiError("npu-smi info", "expected utilisation and memory", number2, line2)
    try:
        power, temperature, utilization = _number(readings.group(1)), _number(readings.group(2)), _number(usage.group(1))
    except ValueError as error:
        raise NpuSmiError("npu-smi info", str(error), number, line) from error

    def whole(value: float | None) -> int | None:
        return None if value is None else int(value)

    return {
        "npu_id": npu_id,
        "chip_id": int(ids[0]) if ids else 0,
        "phy_id": int(ids[1]) if len(ids) == 2 else None,
        "name": name,
        "health": health,
        "bus_id": None if cells2[-2] in _ABSENT else cells2[-2],
        "power_w": power,
        "temperature_c": whole(temperature),
        "utilization_pct": whole(utilization),
        "memory_used_mb": int(usage.group(2)),
        "memory_total_mb": int(usage.group(3)),
        "hbm_used_mb": int(usage.group(4)) if usage.group(4) else None,
        "hbm_total_mb": int(usage.group(5)) if usage.group(5) else None,
    }


def _info_process(number: int, line: str, cells: list[str], unit: int) -> list[dict]:
    if len(cells) == 1 and re.match(r"No running processes found in NPU \d+$", cells[0]):
        return []
    ids = cells[0].split()
    if (len(cells) not in (4, 5) or len(ids) not in (1, 2) or not all(token.isdigit() for token in ids)
            or not cells[1].isdigit() or not cells[3].isdigit()):
        raise NpuSmiError("npu-smi info", "expected a process (NPU, chip, pid, name, memory)", number, line)
    container_pid = cells[4] if len(cells) == 5 else "NA"
    if container_pid not in _ABSENT and not container_pid.isdigit():
        raise NpuSmiError("npu-smi info", f"{container_pid!r} is not a pid", number, line)
    return [{
        "npu_id": int(ids[0]),
        "chip_id": int(ids[1]) if len(ids) == 2 else None,
        "pid": int(cells[1]),
        "name": cells[2],                           # may be empty, and is cut off after 13 to 20 characters
        "memory_mb": int(cells[3]) * unit // (1024 * 1024),
        "container_pid": None if container_pid in _ABSENT else int(container_pid),
    }]


# ------------------------------------------------------------------------------------------------------------ info -m

_MAP_COLUMNS = {"NPU ID": "npu_id", "Chip ID": "chip_id", "Chip Logic ID": "logic_id", "Chip Phy-ID": "phy_id",
                "Slot ID": "slot_id", "Chip Name": "name"}


def parse_map(text: str) -> list[dict]:
    """``npu-smi info -m``: ``[{"npu_id", "chip_id", "logic_id", "phy_id", "name"}]`` of the NPU chips.

    Columns are found by their names: 4 on older drivers (no phy id), 5 on newer ones, Slot ID instead of the logic id on
    950, where the NPU ID counts as the logic id (vllm-ascend does the same). Rows of the card's controller (``Mcu``, its
    ids are dashes) are left out.
    """
    command = "npu-smi info -m"
    keys: list[str] = []
    chips: list[dict] = []
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell for cell in re.split(r"\t+| {2,}", line.strip()) if cell]
        if not keys:
            if cells and all(cell in _MAP_COLUMNS for cell in cells) and {"NPU ID", "Chip ID"} <= set(cells):
                keys = [_MAP_COLUMNS[cell] for cell in cells]
                if len(set(keys)) != len(keys):
                    raise NpuSmiError(command, "a column comes twice", number, line)
            continue
        if not cells:
            continue
        if len(cells) != len(keys):
            cells = line.split(None, len(keys) - 1)             # narrow columns: only the name may hold blanks
        row = dict(zip(keys, cells))
        if len(cells) != len(keys):
            raise NpuSmiError(command, f"{len(cells)} values under {len(keys)} columns", number, line)
        ids = {key: value for key, value in row.items() if key != "name"}
        if row.get("name", "").strip().lower() == "mcu":
            continue
        if not all(value.isdigit() for value in ids.values()):
            raise NpuSmiError(command, "an id that is not a number", number, line)
        chip: dict = {key: int(value) for key, value in ids.items() if key != "slot_id"}
        chip["name"] = row.get("name")
        if "slot_id" in row:
            chip.setdefault("logic_id", chip["npu_id"])
        chip.setdefault("logic_id", None)
        chip.setdefault("phy_id", None)
        for other in chips:
            for key in ("logic_id", "phy_id"):
                if chip[key] is not None and chip[key] == other[key]:
                    raise NpuSmiError(command, f"{key} {chip[key]} comes twice", number, line)
            if (chip["npu_id"], chip["chip_id"]) == (other["npu_id"], other["chip_id"]):
                raise NpuSmiError(command, f"chip {chip['chip_id']} of NPU {chip['npu_id']} comes twice", number, line)
        chips.append(chip)
    if not keys:
        raise NpuSmiError(command, "no header with NPU ID and Chip ID", None, text[:120])
    return chips


# ------------------------------------------------------------------------------------------------------ info -t topo

# As printed by the tool, and by its second dialect (XLink). NA: the driver does not know.
LINKS = ("X", "SIO", "HCCS", "XLink", "UB", "HCCS_SW", "XLink_SW", "PIX", "PXB", "PHB", "SYS", "NA")
_LABEL = re.compile(r"(NPU|Phy-ID|NIC)(\d+)$")


def parse_topo(text: str) -> dict:
    """``npu-smi info -t topo``: ``{"kind": "NPU" | "Phy-ID", "links": {id: {id: link}}, "cpus": {id: cpu list | None}}``.

    `kind` says what the ids are: NPU ids, or phy ids on machines with two dies to a card. Network cards among rows and
    columns are checked and left out. A table without its header is taken when it is square; when it is not, only its
    CPU affinities are (`links` is empty then).
    """
    command = "npu-smi info -t topo"
    header: list[tuple[str, int]] = []
    has_affinity: bool | None = None
    rows: dict[tuple[str, int], tuple[int, str, list[str]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        bare = re.sub(r"CPU\s+Affinity\s*$", "", line)
        labels = [_LABEL.match(token) for token in bare.split()]
        if not labels or not labels[0]:
            continue                                # legend, names of network cards, blank lines
        if all(labels):
            if header or rows:
                raise NpuSmiError(command, "a second header", number, line)
            header = [(label.group(1), int(label.group(2))) for label in labels]
            if len(set(header)) != len(header):
                raise NpuSmiError(command, "a column comes twice", number, line)
            has_affinity = bare != line
            continue
        label = (labels[0].group(1), int(labels[0].group(2)))
        if label in rows:
            raise NpuSmiError(command, f"row {_name(label)} comes twice", number, line)
        rows[label] = (number, line, line.split()[1:])
    if not rows:
        raise NpuSmiError(command, "no row of a device", None, text[:120])
    if header and set(header) != set(rows):
        odd = sorted(set(header) ^ set(rows))[0]
        what = "a row without a column" if odd in rows else "a column without a row"
        raise NpuSmiError(command, f"{_name(odd)} is {what}")

    cells: dict[tuple[str, int], list[str]] = {}
    cpus: dict[int, str | None] = {}
    kinds = {kind for kind, _number_ in rows if kind != "NIC"}
    if len(kinds) != 1:
        raise NpuSmiError(command, f"rows of {' and '.join(sorted(kinds)) or 'network cards only'}")
    for label, (number, line, tokens) in rows.items():
        links, affinity = _split_affinity(tokens)
        if header and len(links) != len(header):
            raise NpuSmiError(command, f"{len(links)} links under {len(header)} columns", number, line)
        if affinity is not None and has_affinity is False:
            raise NpuSmiError(command, "CPUs without a column for them", number, line)
        unknown = [link for link in links if link not in LINKS]
        if unknown:
            raise NpuSmiError(command, f"{unknown[0]!r} is no kind of link", number, line)
        cells[label] = links
        if label[0] != "NIC":
            cpus[label[1]] = affinity
    columns = header or list(rows)
    links_by_id: dict[int, dict[int, str]] = {}
    if all(len(links) == len(columns) for links in cells.values()):
        links_by_id = _square(command, columns, cells, rows)
    elif header or len({len(links) for links in cells.values()}) != 1:
        raise NpuSmiError(command, "rows of different lengths")
    return {"kind": kinds.pop(), "links": links_by_id, "cpus": cpus}


def _name(label: tuple[str, int]) -> str:
    return "{}{}".format(*label)


def _split_affinity(tokens: list[str]) -> tuple[list[str], str | None]:
    links = ["NA" if cell == "N/A" else cell for cell in tokens]
    if links and links[-1][:1].isdigit():
        try:
            parse_cpu_list(links[-1])
        except ValueError as error:
            raise NpuSmiError("npu-smi info -t topo", str(error)) from error
        return links[:-1], links[-1]
    return links, None


def _square(command: str, columns: list[tuple[str, int]], cells: dict[tuple[str, int], list[str]],
            rows: dict[tuple[str, int], tuple[int, str, list[str]]]) -> dict[int, dict[int, str]]:
    table = {label: dict(zip(columns, links)) for label, links in cells.items()}
    result: dict[int, dict[int, str]] = {}
    for label, row in table.items():
        number, line, _tokens = rows[label]
        for other, link in row.items():
            if (link == "X") != (other == label):
                raise NpuSmiError(command, f"the link of {_name(label)} to {_name(other)} is {link}", number, line)
            if table[other][label] != link:
                raise NpuSmiError(command, f"{_name(label)} to {_name(other)} is {link}, "
                                           f"but {table[other][label]} the other way", number, line)
        if label[0] != "NIC":
            result[label[1]] = {other[1]: link for other, link in row.items() if other[0] != "NIC" and other != label}
    return result


# ---------------------------------------------------------------------------------------------- info -l, info -t TYPE

def parse_fields(text: str, command: str = "npu-smi") -> list[tuple[str, str]]:
    """The ``Name : value`` lines of a query, in order; anything else but blank lines is an error."""
    fields = []
    for number, line in enumerate(text.splitlines(), 1):
        name, colon, value = line.partition(":")
        if not line.strip():
            continue
        if not colon or not name.strip():
            raise NpuSmiError(command, "expected `Name : value`", number, line)
        fields.append((name.strip(), value.strip()))
    return fields


def _integer(command: str, name: str, value: str) -> int:
    if not value.isdigit():
        raise NpuSmiError(command, f"{name} is {value!r}, not a number")
    return int(value)


def parse_list(text: str) -> list[dict]:
    """``npu-smi info -l``: ``[{"npu_id", "product", "serial", "chips" (None on 950)}]``, one per card."""
    command = "npu-smi info -l"
    total, cards = None, []
    for name, value in parse_fields(text, command):
        if name in ("Total Count", "Card Count"):
            total = _integer(command, name, value)
        elif name == "NPU ID":
            cards.append({"npu_id": _integer(command, name, value), "product": None, "serial": None, "chips": None})
        elif cards and name == "Product Name":
            cards[-1]["product"] = value
        elif cards and name == "Serial Number":
            cards[-1]["serial"] = value
        elif cards and name == "Chip Count":
            cards[-1]["chips"] = _integer(command, name, value)
    if total is None or total != len(cards):
        raise NpuSmiError(command, f"it counts {total} cards and lists {len(cards)}")
    return cards


def parse_board(text: str) -> dict:
    """``npu-smi info -t board -i N``: ``{"npu_id", "driver_version", "firmware_version", "compatible", "bus_id", "chips",
    "fields"}``. `compatible` is what the driver says of the firmware: True, False or None (unknown); `fields` holds
    every line as printed.
    """
    command = "npu-smi info -t board"
    fields = dict(parse_fields(text, command))
    if "NPU ID" not in fields or "Software Version" not in fields:
        raise NpuSmiError(command, "no NPU ID or Software Version", None, text[:120])

    def known(name: str) -> str | None:
        value = fields.get(name)
        return None if value is None or value in _ABSENT else value

    compatibility = fields.get("Compatibility", "UNKNOWN").upper()
    return {
        "npu_id": _integer(command, "NPU ID", fields["NPU ID"]),
        "driver_version": known("Software Version"),
        "firmware_version": known("Firmware Version"),
        "compatible": None if compatibility in ("UNKNOWN", "NA") else compatibility == "OK",
        "bus_id": known("PCIe Bus Info"),
        "chips": int(fields["Chip Count"]) if fields.get("Chip Count", "").isdigit() else None,
        "fields": fields,
    }


def parse_readings(text: str) -> list[dict]:
    """``npu-smi info -t usages|health|temp|memory|common -i N``: one ``{"npu_id", "chip_id", "fields"}`` per chip.

    The chip's id stands before its values (common), after them (usages), or nowhere when the card has one chip (950).
    Values of the card's controller (``Chip Name : mcu``) are left out.
    """
    command = "npu-smi info -t"
    parse_fields(text, command)                     # refuses with the line's number in the whole
    blocks = [parse_fields(paragraph, command) for paragraph in re.split(r"\n\s*\n", text.replace("\r", ""))]
    pairs = [pair for block in blocks if ("Chip Name", "mcu") not in block for pair in block]
    if not pairs or pairs[0][0] != "NPU ID":
        raise NpuSmiError(command, "does not begin with NPU ID", 1, text[:60])
    npu_id, pairs = _integer(command, *pairs[0]), [pair for pair in pairs[1:] if pair[0] != "Chip Count"]
    names = [name for name, _value in pairs]
    chips: list[dict] = []
    if "Chip ID" not in names:
        chips.append({"npu_id": npu_id, "chip_id": 0, "fields": pairs})
    elif names[0] == "Chip ID":
        for name, value in pairs:
            if name == "Chip ID":
                chips.append({"npu_id": npu_id, "chip_id": _integer(command, name, value), "fields": []})
            else:
                chips[-1]["fields"].append((name, value))
    else:
        waiting: list[tuple[str, str]] = []
        for name, value in pairs:
            if name == "Chip ID":
                chips.append({"npu_id": npu_id, "chip_id": _integer(command, name, value), "fields": waiting})
                waiting = []
            else:
                waiting.append((name, value))
        if waiting:
            raise NpuSmiError(command, f"values without a Chip ID: {waiting[0][0]!r}")
    for chip in chips:
        fields = dict(chip["fields"])
        if len(fields) != len(chip["fields"]):
            raise NpuSmiError(command, f"a value comes twice for chip {chip['chip_id']}")
        chip["fields"] = fields
    return chips
