"""What ``npu-smi`` prints, as data: every layout family from 21.0 to 26.x, 310 to 950.

Each parser takes the text of one command run with LC_ALL=C and returns plain dicts, or raises NpuSmiError naming the
command, the line and the reason: a table is believed whole or not at all. Layout is taken as it comes: columns are found
by their names in any width and order, unknown ones are passed over, and neither colours nor CR LF nor lines of others
around the table matter. The formats are those of the vendor's open driver source (npucli: npu_info_print_ext.c, npu_info.c,
npu_smi.c) and of outputs from real machines (tests/unit/fixtures/npu_smi).

Four numbers name one chip, and none follows from another:

* NPU ID: the card, as the tool counts them (may start at 8 or jump to 32768);
* Chip ID: the chip on its card;
* Chip Logic ID: what the runtime counts, and ``ASCEND_RT_VISIBLE_DEVICES`` on the host;
* Chip Phy-ID: the N of ``/dev/davinciN``.
"""

from __future__ import annotations

import re
from typing import Iterator, Mapping, NamedTuple, Sequence, Tuple

from ansible_collections.llmops.ascend.plugins.module_utils.numa import parse_cpu_list
from ansible_collections.llmops.ascend.plugins.module_utils.tool_output import OutputError


class NpuSmiError(OutputError):
    """An output of npu-smi that cannot be believed."""


class Failure(NamedTuple):
    """A failed call, explained: the tool's own code (negative) or None, what it means, and what to do."""

    code: int | None
    meaning: str
    remedy: str


# The last three digits of the library's codes (-8000 - N, dcmi_interface_api.h) and of the tool's own (-9000 - N, npu_common.h).
# The tool exits with either, so that a shell sees `code & 255`: no two of them are alike there.
_DRIVER = ("the driver does not answer", "check dmesg; reboot after a driver installation")
_NOT_AVAILABLE = "nothing to do: the tool cannot tell"
_CODES: dict[int, tuple[str, str]] = {
    1: ("invalid parameter", "check the npu-smi version: it does not know this command"),
    2: ("operation not permitted", "run as root (become: true)"),
    3: ("the tool ran out of memory", "look at `free -m` and dmesg"),
    4: ("a function of the tool failed", "run it by hand on the machine"),
    5: ("the driver or its devices do not answer",
        "check `lsmod | grep drv_` and dmesg; reboot after a driver installation; who is not root must be in the driver's group "
        "(HwHiAiUser); in a container, map the device nodes, /usr/local/dcmi and /usr/local/Ascend/driver, and see that no other "
        "container holds the device"),
    6: ("the device did not answer in time", "run it again; if it stays so, look at dmesg and reset the device or reboot"),
    7: ("invalid device id", "check the ids with `npu-smi info -m`"),
    8: ("the device does not exist", "check the ids with `npu-smi info -m`"),
    9: _DRIVER,
    10: _DRIVER,
    11: _DRIVER,
    12: ("the device is not ready", "wait a minute after boot, then look at dmesg"),
    13: ("not supported in a container", "run it on the host"),
    14: ("a file of the driver cannot be read", "install the driver again; check the free space of /"),
    15: ("the device could not be reset", "stop what uses the device, or reboot"),
    16: ("the operation was aborted", "run it again"),
    17: ("the device is being upgraded", "wait until the upgrade has ended"),
    18: ("no such process on the device", _NOT_AVAILABLE),
    19: ("a function of the driver's library failed", "check that tool and driver are of one release: `npu-smi -v`"),
    20: ("the device is used by another container", "stop the container that holds it; one container per device"),
    21: ("the device is being upgraded", "wait until the upgrade has ended"),
    22: ("the device is divided in a way that does not fit", "look at the virtual NPUs: `npu-smi info -t info-vnpu`"),
    23: ("the configuration does not exist", _NOT_AVAILABLE),
    255: ("not supported on this device", _NOT_AVAILABLE),
    256: ("not supported on this system", _NOT_AVAILABLE),
}
_OWN_CODES = {17: ("invalid parameter", "check the npu-smi version: it does not know this command")}    # of -90xx only
# Some failures only print, and may exit with 0.
_TEXTS: tuple[tuple[str, str, str], ...] = (
    (r"There is no NPU c(?:ard|hip) on this", "the machine shows no NPU",
     "check `lspci -d 19e5:`; if the cards are listed, install or reload the driver"),
    (r"can(?:not| not) be executed on a VM-based container", "not available in a container on a virtual machine", _NOT_AVAILABLE),
    (r"can(?:not| not) be executed on a VM or container", "not available on a virtual machine or in a container",
     "run it on the host"),
    (r"can(?:not| not) be executed on a VM", "not available on a virtual machine", "nothing to do: the tool cannot tell here"),
    (r"can(?:not| not) be executed on a container", "not available in a container", "run it on the host"),
    (r"can be executed only by", "needs root", "run as root (become: true)"),
    (r"do(?:es|se) not support", "not supported on this device", _NOT_AVAILABLE),
    (r"driver package may not be completely installed", "the driver is not completely installed",
     "install the driver again and reboot"),
    (r"because the device is used", *_CODES[20]),
    (r"Container ID verify failed", *_CODES[20]),
    (r"dcmi modu?l?e?l? initiali[sz]", *_CODES[5]),
    (r"Failed to get card number", *_DRIVER),
    (r"npu get board type failed", *_DRIVER),
    (r"Failed to query ", *_DRIVER),
    (r"Command or option is not found|Must input parameter", *_CODES[1]),
    (r"error while loading shared libraries", "a library of the driver is missing",
     "install the driver again; check /etc/ld.so.conf.d and run ldconfig"),
)
# Of whoever was to start the tool: a shell, timeout(1), Python.
_EXIT_CODES: dict[int, tuple[str, str]] = {
    124: ("it did not end in time", "the driver hangs: look at dmesg for drv_ and devdrv, then reboot"),
    126: ("npu-smi may not be executed", "check its mode and the mount options of its file system"),
    127: ("npu-smi is not there", "install the driver; on PATH its tool is /usr/local/bin/npu-smi or /usr/local/sbin/npu-smi"),
}


def _code_meaning(code: int | None) -> tuple[str, str] | None:
    family, number = divmod(-code, 1000) if code is not None and code < 0 else (0, 0)
    if family == 9 and number in _OWN_CODES:
        return _OWN_CODES[number]
    return _CODES.get(number) if family in (8, 9) else None


def explain_failure(exit_code: int, output: str) -> Failure | None:
    """Why a call failed, from its exit code and all it printed; None when it did not fail.

    `exit_code` is what a shell sees (0 to 255, 128 + N for signal N) or Python's (-N for signal N), or the tool's code itself.
    """
    output = _ANSI.sub("", output)
    printed = re.search(r"\bret(?: is |=)(-[0-9]{1,6})\b", output)
    code = int(printed.group(1)) if printed else None
    if code is None and not -64 <= exit_code <= 0:
        known = [-family - number for family in (8000, 9000) for number in _CODES]
        code = exit_code if exit_code in known else next((c for c in known if c & 255 == exit_code), None)
    if printed and _code_meaning(code):
        return Failure(code, *_code_meaning(code))
    for pattern, meaning, remedy in _TEXTS:
        if re.search(pattern, output, re.IGNORECASE):
            return Failure(code, meaning, remedy)
    if _code_meaning(code):
        return Failure(code, *_code_meaning(code))
    if exit_code in _EXIT_CODES:
        return Failure(None, *_EXIT_CODES[exit_code])
    signal = -exit_code if exit_code < 0 else exit_code - 128
    if 1 <= signal <= 64:
        return Failure(code, f"it was ended by signal {signal}", "look at dmesg: a crash or the kernel's out-of-memory killer")
    if code is not None or exit_code:
        return Failure(code, f"it failed with exit code {exit_code}", "run it by hand on the machine")
    return None


# -------------------------------------------------------------------------------------------------- text, numbers, names

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_ID = r"([0-9]{1,9})"
_ABSENT = {"-", "NA", "N/A", ""}
_AMOUNT = r"([0-9]{1,9}|-|NA|N/A)"
_PAIR = rf"{_AMOUNT}\s*/\s*{_AMOUNT}"
_READING = r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?|-|NA|N/A)"


def _lines(text: str) -> Iterator[tuple[int, str]]:
    return enumerate(re.sub(r"\r+\n", "\n", _ANSI.sub("", text)).splitlines(), 1)


def _is_id(token: str) -> bool:
    """No str.isdigit: that also takes superscripts, which are no numbers."""
    return re.fullmatch(_ID, token) is not None


def _integer(command: str, name: str, value: str, line: int | None = None) -> int:
    if not _is_id(value):
        raise NpuSmiError(command, f"{name} is {value!r}, not a number", line)
    return int(value)


def _amount(token: str | None) -> int | None:
    return None if token is None or token in _ABSENT else int(float(token))


def _headings(cell: str, known: Mapping[str, object]) -> list[str]:
    """The names of columns in a heading: the known ones as `known` writes them; of others, words one blank apart are one name."""
    names = {name.lower(): name for name in known}
    alternatives = "|".join(re.escape(name).replace(r"\ ", r"\s+") for name in sorted(known, key=len, reverse=True))
    found: list[str] = []
    open_end = None                                 # where an unknown name ends that one more word may continue
    for match in re.finditer(rf"({alternatives})(?!\S)|\S+", cell, re.IGNORECASE):
        if match.group(1):
            found.append(names[" ".join(match.group(1).lower().split())])
        elif open_end is not None and cell[open_end:match.start()] == " ":
            found[-1] += " " + match.group()
        else:
            found.append(match.group())
        open_end = None if match.group(1) else match.end()
    return found


# --------------------------------------------------------------------------------------------------------------- info

_VERSION = re.compile(r"\|\s*npu-smi\s+(\S+)\s+Version:\s*(\S*)")
# Name of a column -> the keys of its values, and how they look.
_Columns = Mapping[str, Tuple[Tuple[str, ...], str]]
_INFO_COLUMNS: _Columns = {
    "NPU ID": (("npu_id",), _ID), "NPU": (("npu_id",), _ID), "Name": (("name",), r"(\S(?:.*\S)?)"),
    "Health": (("health",), r"([A-Za-z]+)"),
    "Power(W)": (("power_w",), _READING), "Temp(C)": (("temperature_c",), _READING),
    "Hugepages-Usage(page)": (("pages_used", "pages_total"), _PAIR),
    # Device: the driver's source prints the logic id; on a host, the number of /dev/davinciN too.
    "Chip": (("chip_id",), _ID), "Phy-ID": (("phy_id",), _ID), "Device": (("phy_id",), _ID),
    "Bus-Id": (("bus_id",), r"([0-9A-Fa-f]{2,8}(?::[0-9A-Fa-f]{2}){1,2}\.[0-9A-Fa-f]{1,2}|-|NA|N/A)"),
    "AICore(%)": (("aicore_pct",), _READING), "NPU Util(%)": (("npu_pct",), _READING),
    "Memory-Usage(MB)": (("memory_used_mb", "memory_total_mb"), _PAIR),
    "HBM-Usage(MB)": (("hbm_used_mb", "hbm_total_mb"), _PAIR),
}
_PROCESS_COLUMNS: _Columns = {
    "NPU ID": (("npu_id",), _ID), "NPU": (("npu_id",), _ID), "Chip": (("chip_id",), _ID),
    "Process id": (("pid",), _ID), "Process name": (("name",), r"(.*)"),
    "Process memory(MB)": (("memory_mb",), _AMOUNT), "Process memory(B)": (("memory_b",), r"([0-9]{1,15}|-|NA|N/A)"),
    "Process id in container": (("container_pid",), _AMOUNT),
}
# What excerpts without a header are read as, the first that fits.
_FIRST_ROWS = ("NPU Name|Health|Power(W) Temp(C) Hugepages-Usage(page)", "NPU ID|Name|Health|Power(W) Temp(C) Hugepages-Usage(page)",
               "NPU Name|Health|Power(W) Temp(C)")
_SECOND_ROWS = ("Chip|Bus-Id|AICore(%) Memory-Usage(MB) HBM-Usage(MB)", "Chip Phy-ID|Bus-Id|AICore(%) Memory-Usage(MB) HBM-Usage(MB)",
                "||Bus-Id|NPU Util(%) Memory-Usage(MB) HBM-Usage(MB)", "Chip Device|Bus-Id|AICore(%) Memory-Usage(MB)")


class _Row:
    """A header row: which columns stand in which cell. `read` takes a row of values apart by it."""

    def __init__(self, cells: Sequence[str], known: _Columns, command: str = "npu-smi info", line: int | None = None) -> None:
        self.titles = [" ".join(cell.split()) for cell in cells]
        self.keys: list[tuple[str, ...]] = []
        self.patterns = []
        for cell in cells:
            names = _headings(cell, known)
            anything = r".*" if len(names) == 1 else rf"(?:{_PAIR.replace('(', '(?:')}|\S+)"     # of a column that nobody knows
            columns = [known.get(name, ((), anything)) for name in names]
            self.keys.append(tuple(key for keys, _pattern in columns for key in keys))
            self.patterns.append(re.compile(r"\s+".join(pattern for _keys, pattern in columns)))
        flat = [key for keys in self.keys for key in keys]
        if len(set(flat)) != len(flat):
            raise NpuSmiError(command, "a column comes twice", line, " | ".join(self.titles))

    def odd(self, cells: Sequence[str]) -> int | None:
        """The first cell that does not look as its heading says."""
        return next((n for n, (cell, pattern) in enumerate(zip(cells, self.patterns)) if not pattern.fullmatch(cell)), None)

    def read(self, cells: Sequence[str]) -> dict[str, str]:
        return {key: value for cell, keys, pattern in zip(cells, self.keys, self.patterns)
                for key, value in zip(keys, pattern.fullmatch(cell).groups())}


_DEFAULTS = tuple(tuple(_Row(row.split("|"), _INFO_COLUMNS) for row in rows) for rows in (_FIRST_ROWS, _SECOND_ROWS))
_IDLE = re.compile(r"No running processes found in NPU ([0-9]{1,9})")


class _Line(NamedTuple):
    """A table's row, and where it stands."""

    number: int
    text: str
    cells: list[str]


def parse_info(text: str) -> dict:
    """``npu-smi info``: versions, chips and who uses them.

    Returns ``{"tool_version", "driver_version", "devices": [...], "processes": [...]}``; a device is ``{"npu_id", "chip_id",
    "phy_id", "name", "health", "bus_id", "power_w", "temperature_c", "utilization_pct", "memory_used_mb",
    "memory_total_mb", "hbm_used_mb", "hbm_total_mb"}``, a process ``{"npu_id", "chip_id", "pid", "name", "memory_mb",
    "container_pid"}``. What a layout does not print is None (phy_id on 910B, hbm_* on 310P, chip_id of a 950 process), and so
    is what it prints as NA. `phy_id` is the column Phy-ID, or Device on 310 and 310P.
    """
    command = "npu-smi info"
    info: dict = {"tool_version": None, "driver_version": None, "devices": [], "processes": []}
    heads: list[_Row | None] = [None, None]         # of the first and the second row of a device
    table: _Row | None = None                       # of the processes
    idle: list[int] | None = None                   # NPUs without a process; None until the table of processes has begun
    first: _Line | None = None

    for number, line in _lines(text):
        row = line.strip()
        if first and row.startswith("+"):
            raise NpuSmiError(command, "device with a first row only", first.number, first.text)
        if not row.startswith("|"):
            if row.endswith("|") or row.startswith("+") and row.strip("+-=| "):
                raise NpuSmiError(command, "row without its left border", number, line)
            continue                                # frames, and what the driver says before or after the table
        if len(row) < 2 or not row.endswith("|"):
            raise NpuSmiError(command, "row without its right border", number, line)
        version = _VERSION.match(row)
        cells = [cell.strip() for cell in row[1:-1].split("|")]
        names = _header_names(cells)
        quiet = _IDLE.fullmatch(cells[0]) if len(cells) == 1 else None
        if first and (version or quiet or names):
            raise NpuSmiError(command, "device with a first row only", first.number, first.text)
        if version:
            if info["tool_version"]:
                raise NpuSmiError(command, "a second table", number, line)
            info["tool_version"], info["driver_version"] = version.group(1), version.group(2) or None
        elif "Process id" in names:
            if table or idle:
                raise NpuSmiError(command, "a second header of processes", number, line)
            table, idle = _info_header(cells, _PROCESS_COLUMNS, {"npu_id", "pid"}, number, line), []
        elif names:
            second = "Bus-Id" in names
            if heads[second] or idle is not None or info["devices"]:
                raise NpuSmiError(command, "a header in the wrong place", number, line)
            heads[second] = _info_header(cells, _INFO_COLUMNS, {"bus_id"} if second else {"npu_id", "name", "health"}, number, line)
        elif quiet:
            idle = [*(idle or []), int(quiet.group(1))]
        elif idle is not None:
            info["processes"].append(_info_process(_Line(number, line, cells), table))
        elif first is None:
            first = _Line(number, line, cells)
            _info_row(first, heads[0], 0)           # refused where it stands, not at the row after it
        else:
            info["devices"].append(_info_device(first, _Line(number, line, cells), heads))
            first = None

    if first:
        raise NpuSmiError(command, "device with a first row only", first.number, first.text)
    if not info["devices"]:
        raise NpuSmiError(command, "no device in the table", None, text)
    for key in (("npu_id", "chip_id"), ("phy_id",)):
        seen: set[tuple] = set()
        for device in info["devices"]:
            value = tuple(device[name] for name in key)
            if None not in value and value in seen:
                raise NpuSmiError(command, f"two devices with {'/'.join(key)} {'/'.join(map(str, value))}")
            seen.add(value)
    cards = [device["npu_id"] for device in info["devices"]]
    for process in info["processes"]:
        if process["chip_id"] is None and cards.count(process["npu_id"]) > 1:
            raise NpuSmiError(command, f"pid {process['pid']} on NPU {process['npu_id']}, which has more than one chip, without a chip")
    for npu_id in set(idle or ()):
        chips = cards.count(npu_id)
        busy = {process["chip_id"] for process in info["processes"] if process["npu_id"] == npu_id}
        if chips and len(busy) + idle.count(npu_id) > chips:
            raise NpuSmiError(command, f"NPU {npu_id} is idle {idle.count(npu_id)} times, with {len(busy)} of its {chips} chips in use")
    return info


def _header_names(cells: list[str]) -> set[str]:
    """The known names in a row, if it is a header: rows of values have a number."""
    if any(_is_id(word) for cell in cells for word in cell.split()):
        return set()
    names = {name for cell in cells for name in _headings(cell, {**_INFO_COLUMNS, **_PROCESS_COLUMNS})}
    return names if names & {"Health", "Bus-Id", "Process id"} else set()


def _info_header(cells: list[str], known: _Columns, needed: set[str], number: int, line: str) -> _Row:
    head = _Row(cells, known, "npu-smi info", number)
    missing = needed - {key for keys in head.keys for key in keys}
    if missing:
        raise NpuSmiError("npu-smi info", f"header without {', '.join(sorted(missing))}", number, line)
    return head


def _info_row(row: _Line, head: _Row | None, part: int) -> dict[str, str]:
    """The values of one row (`part` 0 or 1) of a device."""
    expected = ("expected the first row of a device (NPU, name, health, power)",
                "expected the second row of a device (chip, bus id, usage)")[part]
    if head is None:
        head = next((one for one in _DEFAULTS[part] if len(one.patterns) == len(row.cells) and one.odd(row.cells) is None), None)
    if head is None or len(row.cells) != len(head.patterns):
        raise NpuSmiError("npu-smi info", expected, row.number, row.text)
    odd = head.odd(row.cells)
    if odd is not None:
        raise NpuSmiError("npu-smi info", f"{row.cells[odd]!r} where the header says {head.titles[odd]!r}", row.number, row.text)
    return head.read(row.cells)


def _info_device(first: _Line, second: _Line, heads: list[_Row | None]) -> dict:
    if len(second.cells) != len(first.cells):
        raise NpuSmiError("npu-smi info", "expected the second row of a device (chip, bus id, usage)", second.number, second.text)
    values = {**_info_row(first, heads[0], 0), **_info_row(second, heads[1], 1)}
    power = values.get("power_w", "")
    busy = values.get("aicore_pct", "") in _ABSENT and "npu_pct" or "aicore_pct"
    return {
        "npu_id": int(values["npu_id"]),
        "chip_id": int(values.get("chip_id", 0)),
        "phy_id": _amount(values.get("phy_id")),
        "name": values["name"],
        "health": values["health"],
        "bus_id": None if values["bus_id"] in _ABSENT else values["bus_id"],
        "power_w": None if power in _ABSENT else float(power),
        "temperature_c": _amount(values.get("temperature_c")),
        "utilization_pct": _amount(values.get(busy)),
        **{key: _amount(values.get(key)) for key in ("memory_used_mb", "memory_total_mb", "hbm_used_mb", "hbm_total_mb")},
    }


def _info_process(row: _Line, table: _Row | None) -> dict:
    cells = row.cells
    name = next((n for n, keys in enumerate(table.keys) if keys == ("name",)), None) if table else None
    if table and name is not None and len(cells) > len(table.patterns):     # a process may have bars in its name
        bars = len(cells) - len(table.patterns)
        cells = [*cells[:name], " | ".join(cells[name:name + bars + 1]), *cells[name + bars + 1:]]
    if table is None or len(cells) != len(table.patterns) or table.odd(cells) is not None:
        raise NpuSmiError("npu-smi info", "expected a process (NPU, chip, pid, name, memory)", row.number, row.text)
    values = table.read(cells)
    in_bytes = _amount(values.get("memory_b"))
    return {
        "npu_id": int(values["npu_id"]),
        "chip_id": _amount(values.get("chip_id")),
        "pid": int(values["pid"]),
        "name": values.get("name", ""),             # may be empty, and is cut off after 13 to 20 characters
        "memory_mb": _amount(values.get("memory_mb")) if in_bytes is None else in_bytes // (1024 * 1024),
        "container_pid": _amount(values.get("container_pid")),
    }


# ------------------------------------------------------------------------------------------------------------ info -m

_MAP_COLUMNS = {"NPU ID": "npu_id", "Chip ID": "chip_id", "Chip Logic ID": "logic_id", "Chip Phy-ID": "phy_id",
                "Slot ID": "slot_id", "Chip Name": "name"}
_CONTROLLERS = {"mcu", "3559"}                      # chips of the card that compute nothing


def parse_map(text: str) -> list[dict]:
    """``npu-smi info -m``: ``[{"npu_id", "chip_id", "logic_id", "phy_id", "name"}]`` of the NPU chips.

    Columns are found by their names: 4 on older drivers (no phy id), 5 on newer ones, Slot ID instead of the logic id on
    950, where the NPU ID counts as the logic id (vllm-ascend does the same). Rows of the card's controllers (``Mcu``,
    ``3559``; their ids are dashes) are left out.
    """
    command = "npu-smi info -m"
    keys: list[str] = []
    chips: list[dict] = []
    seen: set[tuple] = set()
    for number, line in _lines(text):
        if not line.strip():
            continue
        columns = _headings(line, _MAP_COLUMNS)
        if {"NPU ID", "Chip ID"} <= set(columns):
            if keys:
                raise NpuSmiError(command, "a second header", number, line)
            keys = [_MAP_COLUMNS.get(column, column) for column in columns]
            if len(set(keys)) != len(keys):
                raise NpuSmiError(command, "a column comes twice", number, line)
            continue
        if not keys:
            continue
        cells = [cell for cell in re.split(r"\t+|\s{2,}", line.strip()) if cell]
        if len(cells) != len(keys):
            cells = line.split(None, len(keys) - 1)             # narrow columns: only the last may hold blanks
        if len(cells) != len(keys):
            raise NpuSmiError(command, f"{len(cells)} values under {len(keys)} columns", number, line)
        row = dict(zip(keys, (cell.strip() for cell in cells)))
        name = row.get("name")
        if (name or "").lower() in _CONTROLLERS:
            if any(row[key] not in _ABSENT for key in ("logic_id", "phy_id") if key in row):
                raise NpuSmiError(command, "a controller with the id of an NPU", number, line)
            continue
        ids = {key: row[key] for key in ("npu_id", "chip_id", "logic_id", "phy_id") if key in row}
        if not all(_is_id(value) for value in ids.values()):
            raise NpuSmiError(command, "an id that is not a number", number, line)
        chip: dict = {"logic_id": None, "phy_id": None, **{key: int(value) for key, value in ids.items()}}
        chip["name"] = None if name is None or name in _ABSENT else name
        if "slot_id" in row and "logic_id" not in row:
            chip["logic_id"] = chip["npu_id"]
        for identity, what in ((("chip", chip["npu_id"], chip["chip_id"]), f"chip {chip['chip_id']} of NPU {chip['npu_id']}"),
                               (("logic_id", chip["logic_id"]), f"logic_id {chip['logic_id']}"),
                               (("phy_id", chip["phy_id"]), f"phy_id {chip['phy_id']}")):
            if None not in identity and identity in seen:
                raise NpuSmiError(command, f"{what} comes twice", number, line)
            seen.add(identity)
        chips.append(chip)
    if not keys:
        raise NpuSmiError(command, "no header with NPU ID and Chip ID", None, text)
    return chips


# ------------------------------------------------------------------------------------------------------ info -t topo

# As printed by the tool, and by its second dialect (XLink). NA: the driver does not know.
LINKS = ("X", "SIO", "HCCS", "XLink", "UB", "HCCS_SW", "XLink_SW", "PIX", "PXB", "PHB", "SYS", "NA")
# Five digits of a phy id fill the column, so that labels may stand without a blank between them.
_LABEL = re.compile(r"(NPU|Phy-ID|NIC)([0-9]{1,9})(?![0-9:])")
_AFFINITY = re.compile(r"[0-9]{1,4}(?:-[0-9]{1,4})?(?:,[0-9]{1,4}(?:-[0-9]{1,4})?){0,99}")
_Label = Tuple[str, int]


class _TopoRow(NamedTuple):
    """A row of the table: where it stands, its links, its CPUs or None."""

    number: int
    text: str
    links: list[str]
    cpus: str | None


def parse_topo(text: str) -> dict:
    """``npu-smi info -t topo``: ``{"kind": "NPU" | "Phy-ID", "links": {id: {id: link}}, "cpus": {id: cpu list | None}}``.

    `kind` says what the ids are: NPU ids, or phy ids on machines with two dies to a card. Network cards among rows and
    columns are checked and left out; a build may print them as columns only. A table without its header is taken when it is
    square; when it has fewer rows, only its CPU affinities are (`links` is empty then).
    """
    command = "npu-smi info -t topo"
    header: list[_Label] = []
    tail: list[str] | None = None                   # the columns after the links; None without a header
    rows: dict[_Label, _TopoRow] = {}
    for number, line in _lines(text):
        labels, rest = _topo_labels(line)
        if not labels or rest.lstrip().startswith(":"):
            continue                                # legend, names of network cards, blank lines, others' lines
        columns = _headings(rest, {"CPU Affinity": None})
        # Two labels make a header; where there is one device only, its header is a label without a link after it.
        if len(labels) > 1 or not rows and not header and (not columns or columns[0] == "CPU Affinity"):
            if header or rows:
                raise NpuSmiError(command, "a second header", number, line)
            if len(set(labels)) != len(labels):
                raise NpuSmiError(command, "a column comes twice", number, line)
            header, tail = labels, columns
            continue
        if labels[0] in rows:
            raise NpuSmiError(command, f"row {_name(labels[0])} comes twice", number, line)
        rows[labels[0]] = _topo_row(number, line, rest, header, tail)
    if not rows:
        raise NpuSmiError(command, "no row of a device", None, text)
    kinds = {kind for kind, _id in rows if kind != "NIC"}
    if len(kinds) != 1:
        raise NpuSmiError(command, f"rows of {' and '.join(sorted(kinds)) or 'network cards only'}")

    columns = header or list(rows)
    hidden = {"NIC"} if not any(kind == "NIC" for kind, _id in rows) else set()
    odd = sorted((set(columns) ^ set(rows)) - {label for label in columns if label[0] in hidden})
    if odd:
        raise NpuSmiError(command, f"{_name(odd[0])} is a {'row without a column' if odd[0] in rows else 'column without a row'}")
    lengths = {len(row.links) for row in rows.values()}
    if len(lengths) != 1 or max(lengths) < len(rows):
        raise NpuSmiError(command, "rows of different lengths")
    square = bool(header) or max(lengths) == len(rows)
    return {
        "kind": kinds.pop(),
        "links": _square(command, columns, rows) if square else {},
        "cpus": {number: row.cpus for (kind, number), row in rows.items() if kind != "NIC"},
    }


def _topo_labels(line: str) -> tuple[list[_Label], str]:
    """The labels a line begins with, and what follows them."""
    labels, rest = [], line.lstrip()
    while (match := _LABEL.match(rest)) is not None:
        labels.append((match.group(1), int(match.group(2))))
        rest = rest[match.end():].lstrip()
    return labels, rest


def _topo_row(number: int, line: str, rest: str, header: list[_Label], tail: list[str] | None) -> _TopoRow:
    command = "npu-smi info -t topo"
    values = ["NA" if value == "N/A" else value for value in re.sub(r",\s+", ",", rest).split()]
    count = len(header) or next((n for n, value in enumerate(values) if value[0].isdigit()), len(values))
    links, more = values[:count], values[count:]
    for link in links:
        if link[0].isdigit() and header:
            raise NpuSmiError(command, f"{values.index(link)} links under {len(header)} columns", number, line)
        if link not in LINKS:
            raise NpuSmiError(command, f"{link!r} is no kind of link", number, line)
    if header and len(links) != len(header):
        raise NpuSmiError(command, f"{len(links)} links under {len(header)} columns", number, line)
    affinity = more[0] if more else None
    if tail is not None and more:
        if "CPU Affinity" not in tail and _AFFINITY.fullmatch(more[0]):
            raise NpuSmiError(command, "CPUs without a column for them", number, line)
        if len(more) != len(tail):
            raise NpuSmiError(command, f"{len(links) + len(more)} values under {len(header) + len(tail)} columns", number, line)
        affinity = more[tail.index("CPU Affinity")] if "CPU Affinity" in tail else None
    elif len(more) > 1:
        raise NpuSmiError(command, f"{more[1]!r} after the CPUs", number, line)
    if affinity in (None, *_ABSENT):
        return _TopoRow(number, line, links, None)
    try:
        if not _AFFINITY.fullmatch(affinity):
            raise ValueError(f"{affinity!r} is no list of CPUs")
        parse_cpu_list(affinity)
    except ValueError as error:
        raise NpuSmiError(command, str(error), number, line) from error
    return _TopoRow(number, line, links, affinity)


def _name(label: _Label) -> str:
    return "{}{}".format(*label)


def _square(command: str, columns: list[_Label], rows: dict[_Label, _TopoRow]) -> dict[int, dict[int, str]]:
    table = {label: dict(zip(columns, row.links)) for label, row in rows.items()}
    result: dict[int, dict[int, str]] = {}
    for label, links in table.items():
        row = rows[label]
        for other, link in links.items():
            if (link == "X") != (other == label):
                raise NpuSmiError(command, f"the link of {_name(label)} to {_name(other)} is {link}", row.number, row.text)
            back = table[other][label] if other in table else link
            if back != link:
                raise NpuSmiError(command, f"{_name(label)} to {_name(other)} is {link}, but {back} the other way",
                                  row.number, row.text)
        if label[0] != "NIC":
            result[label[1]] = {other[1]: link for other, link in links.items() if other[0] != "NIC" and other != label}
    return result


# ------------------------------------------------------------------------------------ npu-smi -v, info -l, info -t TYPE

def parse_version(text: str) -> str:
    """``npu-smi -v``: the tool's version, which is its driver's."""
    found = [(number, line, match) for number, line in _lines(text)
             if (match := re.match(r"\s*npu-smi\s+version\s*:(.*)$", line, re.IGNORECASE))]
    if len(found) != 1:
        raise NpuSmiError("npu-smi -v", f"expected one line `npu-smi version: ...`, not {len(found)}", None, text)
    number, line, match = found[0]
    if not re.fullmatch(r"\s*\S+\s*", match.group(1)):
        raise NpuSmiError("npu-smi -v", "no version", number, line)
    return match.group(1).strip()


class _Field(NamedTuple):
    """A ``Name : value`` line, its number, and whether a blank line stands before it."""

    line: int
    name: str
    value: str
    apart: bool = False


def _fields(text: str, command: str, begin: Sequence[str] = ()) -> list[_Field]:
    """The ``Name : value`` lines. What stands before the first whose name is in `begin` is others' talk, if there is such one.

    A line without a name goes on with the value before it (the second of two errors of a device).
    """
    fields: list[_Field] = []
    lines = [(number, line, *(part.strip() for part in line.partition(":"))) for number, line in _lines(text) if line.strip()]
    skip = next((n for n, line in enumerate(lines) if line[2] in begin and line[3]), 0)
    last = 0
    for number, line, name, colon, value in lines[skip:]:
        if re.match(r"\s*(?:\[WARNING\]|DrvMng)", line):
            continue
        if not colon or not name and not fields:
            raise NpuSmiError(command, "expected `Name : value`", number, line)
        if name:
            fields.append(_Field(number, name, value, not fields or number - last > 1))
        elif value:
            fields[-1] = fields[-1]._replace(value="; ".join(filter(None, (fields[-1].value, value))))
        last = number
    return fields


def _unique(command: str, fields: Sequence[_Field], where: str = "") -> dict[str, str]:
    values: dict[str, str] = {}
    for line, name, value, _apart in fields:
        if name in values:
            raise NpuSmiError(command, f"a value comes twice{where}: {name!r}", line)
        values[name] = value
    return values


def _known(fields: Mapping[str, str], name: str) -> str | None:
    value = fields.get(name)
    return None if value is None or value in _ABSENT else value


def parse_fields(text: str, command: str = "npu-smi") -> list[tuple[str, str]]:
    """The ``Name : value`` lines of a query (``-t product`` and others), in order; anything else but blank lines is an error."""
    return [(field.name, field.value) for field in _fields(text, command)]


def parse_list(text: str) -> list[dict]:
    """``npu-smi info -l``: ``[{"npu_id", "product", "serial", "chips"}]``, one per card.

    Servers print no product and no serial number, 950 no count of chips: None.
    """
    command = "npu-smi info -l"
    keys = {"Product Name": "product", "Serial Number": "serial", "Chip Count": "chips"}
    total: int | None = None
    cards: list[dict] = []
    for line, name, value, _apart in _fields(text, command, ("Total Count", "Card Count")):
        if name in ("Total Count", "Card Count"):
            if total is not None:
                raise NpuSmiError(command, "a second count of cards", line)
            total = _integer(command, name, value, line)
        elif name == "NPU ID":
            cards.append({"npu_id": _integer(command, name, value, line), "product": None, "serial": None, "chips": None})
            if cards[-1]["npu_id"] in [card["npu_id"] for card in cards[:-1]]:
                raise NpuSmiError(command, f"NPU ID {value} comes twice", line)
        elif cards and name in keys:
            if cards[-1][keys[name]] is not None:
                raise NpuSmiError(command, f"{name} comes twice for NPU {cards[-1]['npu_id']}", line)
            cards[-1][keys[name]] = _integer(command, name, value, line) if name == "Chip Count" else value
    if total is None or total != len(cards):
        raise NpuSmiError(command, f"it counts {total} cards and lists {len(cards)}", None, "" if cards else text)
    return cards


def parse_board(text: str) -> dict:
    """``npu-smi info -t board -i N``: ``{"npu_id", "driver_version", "firmware_version", "compatible", "bus_id", "chips",
    "fields"}``.

    `compatible` is what the driver says of the firmware: True, False (``NOK``, or a list of what would fit) or None (it does
    not know, or tells root only); `fields` holds every line as printed.
    """
    command = "npu-smi info -t board"
    fields = _unique(command, _fields(text, command, ("NPU ID",)))
    if "NPU ID" not in fields or "Software Version" not in fields:
        raise NpuSmiError(command, "no NPU ID or Software Version", None, text)
    compatibility = (_known(fields, "Compatibility") or "UNKNOWN").upper()
    chips = _known(fields, "Chip Count")
    return {
        "npu_id": _integer(command, "NPU ID", fields["NPU ID"]),
        "driver_version": _known(fields, "Software Version"),
        "firmware_version": _known(fields, "Firmware Version"),
        "compatible": None if compatibility.startswith(("UNKNOWN", "NOT SUPPORT")) else compatibility == "OK",
        "bus_id": _known(fields, "PCIe Bus Info"),
        "chips": None if chips is None else _integer(command, "Chip Count", chips),
        "fields": fields,
    }


def parse_chip(text: str) -> dict:
    """``npu-smi info -t board -i N -c C``: ``{"npu_id", "chip_id", "chip_type", "chip_name", "npu_name", "firmware_version",
    "bus_id", "fields"}``; 910C and 950 print no chip type, others no NPU name: None.
    """
    command = "npu-smi info -t board"
    fields = _unique(command, _fields(text, command, ("NPU ID",)))
    if not {"NPU ID", "Chip ID", "Chip Name"} <= set(fields):
        raise NpuSmiError(command, "no NPU ID, Chip ID or Chip Name", None, text)
    return {
        "npu_id": _integer(command, "NPU ID", fields["NPU ID"]),
        "chip_id": _integer(command, "Chip ID", fields["Chip ID"]),
        "chip_type": _known(fields, "Chip Type"),
        "chip_name": _known(fields, "Chip Name"),
        "npu_name": _known(fields, "NPU Name"),
        "firmware_version": _known(fields, "Firmware Version"),
        "bus_id": _known(fields, "PCIe Bus Info"),
        "fields": fields,
    }


class _Block(NamedTuple):
    """The lines of one chip."""

    chip_id: int | None
    fields: list[_Field]


def _blocks(command: str, fields: list[_Field]) -> tuple[int | None, list[_Block]]:
    """The NPU ID and what belongs to which chip; the card's controllers are left out.

    A chip's id stands before its values (common), after them (usages, temp), or nowhere when the card has one chip (950) or the
    query named it (``-c``). So does the name of a controller.
    """
    npu_id = _integer(command, "NPU ID", fields[0].value, fields[0].line) if fields and fields[0].name == "NPU ID" else None
    counts = [field for field in fields if field.name == "Chip Count"]
    rest = [field for field in fields[npu_id is not None:] if field.name != "Chip Count"]
    again = next((field.line for field in rest if field.name == "NPU ID"), None)
    if again:
        raise NpuSmiError(command, "NPU ID in the wrong place", again)

    def marks(field: _Field) -> bool:
        return field.name == "Chip ID" or field.name == "Chip Name" and field.value.lower() in _CONTROLLERS

    blocks: list[_Block] = []
    if any(field.name == "Chip ID" for field in rest):
        before = marks(rest[0])
        if before and marks(rest[-1]):
            raise NpuSmiError(command, "a Chip ID without a value", rest[0].line)
        stray = next((field for field in rest if before and field.apart and not marks(field)), None)
        if stray:                                   # may be a controller's
            raise NpuSmiError(command, "values apart from their Chip ID", stray.line, stray.name)
        waiting: list[_Field] = []
        for field in reversed(rest) if before else rest:
            if not marks(field):
                waiting.append(field)
                continue
            if field.name == "Chip ID":
                blocks.append(_Block(_integer(command, "Chip ID", field.value, field.line), waiting[::-1] if before else waiting))
            waiting = []
        if waiting:
            raise NpuSmiError(command, f"values without a Chip ID: {waiting[0].name!r}", waiting[0].line)
        blocks = blocks[::-1] if before else blocks
    else:
        if rest and marks(rest[-1]):
            raise NpuSmiError(command, "values of a controller and of a chip are not apart", rest[-1].line)
        cut = next((n for n, field in enumerate(rest) if marks(field)), len(rest))
        blocks.append(_Block(None if npu_id is None else 0, rest[:cut]))
    ids = [block.chip_id for block in blocks]
    if len(set(ids)) != len(ids):
        raise NpuSmiError(command, "a Chip ID comes twice", rest[0].line)
    if counts and (len(counts) > 1 or _integer(command, "Chip Count", counts[0].value, counts[0].line) != len(blocks)):
        raise NpuSmiError(command, f"it counts {counts[0].value} chips and shows {len(blocks)}", counts[0].line)
    return npu_id, blocks


def parse_readings(text: str) -> list[dict]:
    """``npu-smi info -t usages|health|temp|memory|common -i N [-c C]``: one ``{"npu_id", "chip_id", "fields"}`` per chip.

    With ``-c`` the tool prints no ids: they are None then. Several errors of a device are one value, apart by ``; ``. Values of
    the card's controllers (``Chip Name : mcu``) are left out.
    """
    command = "npu-smi info -t"
    fields = _fields(text, command, ("NPU ID",))
    if not fields or fields[0].name != "NPU ID" and not re.fullmatch(r"Health( Status)?|.+\((?:MB|MHz|C|%|W|V|page)\)",
                                                                    fields[0].name, re.IGNORECASE):
        raise NpuSmiError(command, "does not begin with NPU ID", 1, text[:60])
    npu_id, blocks = _blocks(command, fields)
    if not blocks or not all(block.fields for block in blocks):
        raise NpuSmiError(command, "no value of a chip", fields[0].line)
    return [{"npu_id": npu_id, "chip_id": chip_id,
             "fields": _unique(command, lines, "" if chip_id is None else f" for chip {chip_id}")} for chip_id, lines in blocks]


_PROCESS = re.compile(r"\s*Process id\s*:\s*([0-9]{1,9})\s+Process name\s*:(.*)Process memory\(MB\)\s*:\s*([0-9]{1,9})\s*")


def parse_processes(text: str) -> list[dict]:
    """``npu-smi info -t proc-mem -i N [-c C]``: ``[{"npu_id", "chip_id", "pid", "name", "memory_mb"}]``, whose memory it is.

    With ``-c`` the tool prints no ids: None. Names are empty where the tool cannot look (``Get pid name failed.``).
    """
    command = "npu-smi info -t proc-mem"
    fields: list[_Field] = []
    said = False                                    # whether it speaks of processes at all
    for number, line in _lines(text):
        name, colon, value = (part.strip() for part in line.partition(":"))
        if re.fullmatch(r"Get pid name failed\.?", name):
            continue
        idle = re.fullmatch(r"No process in device\.?", name)
        if idle or name.startswith("Process "):
            said = True
            fields.append(_Field(number, "None" if idle else "Process", line))  # belongs to a Chip ID after it, as readings do
        elif fields or name in ("NPU ID", "Chip ID"):
            if name and not colon:
                raise NpuSmiError(command, "expected a process", number, line)
            if name:
                fields.append(_Field(number, name, value))
    if not said:
        raise NpuSmiError(command, "neither a process nor that there is none", None, text)
    processes = []
    npu_id, blocks = _blocks(command, fields)
    for chip_id, lines in blocks:
        idle = any(field.name == "None" for field in lines)
        if idle and len(lines) > 1:
            raise NpuSmiError(command, "processes where there are none", lines[0].line)
        for field in () if idle else lines:
            match = _PROCESS.fullmatch(field.value) if field.name == "Process" else None
            if not match:
                raise NpuSmiError(command, "expected a process (id, name, memory)", field.line, field.value)
            processes.append({"npu_id": npu_id, "chip_id": chip_id, "pid": int(match.group(1)), "name": match.group(2).strip(),
                              "memory_mb": int(match.group(3))})
    return processes
