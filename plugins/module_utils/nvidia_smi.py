"""What ``nvidia-smi`` prints, as data: the GPUs of a machine, their processes and how they are linked.

Each parser takes the text of one command run with LC_ALL=C and returns plain dicts, or raises NvidiaSmiError naming the command,
the line and the reason. Formats: ``nvidia-smi --help-query-gpu``, the man page nvidia-smi(1) (exit codes, legend of ``topo -m``),
and outputs of real machines (tests/unit/fixtures/nvidia_smi).

Two numbers name one GPU: the index counts in the order of PCI addresses, the minor is the N of ``/dev/nvidiaN``
(``/proc/driver/nvidia/gpus/ADDRESS/information``). They often agree and need not.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ansible_collections.llmops.ascend.plugins.module_utils.numa import parse_cpu_list
from ansible_collections.llmops.ascend.plugins.module_utils.tool_output import OutputError

QUERY = ("index", "uuid", "pci.bus_id", "memory.total", "memory.used", "temperature.gpu", "power.draw", "utilization.gpu",
         "driver_version", "mig.mode.current", "name")
"""Fields of ``--query-gpu``, the one that may hold a comma last."""
QUERY_PROCESSES = ("gpu_uuid", "pid", "used_gpu_memory", "process_name")
"""Fields of ``--query-compute-apps``, the one that may hold a comma last."""
FORMAT = "--format=csv,noheader,nounits"

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# What stands for a value the tool cannot give: [N/A], [Not Supported], [Unknown Error], [GPU requires reset], ERR!
_UNKNOWN = re.compile(r"\[.*\]|N/A|ERR!|Unknown Error|")
_UUID = re.compile(r"GPU-[0-9a-fA-F-]{8,}$")
_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|N/A")
_COLUMN = re.compile(r"(?:GPU|NIC)\d+|[a-z]+\d*_(?:bond_)?\d+")
_AFFINITY = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


class NvidiaSmiError(OutputError):
    """An output of nvidia-smi that cannot be believed."""


class Failure(NamedTuple):
    """A failed call, explained: what it means, and what to do."""

    meaning: str
    remedy: str


# Texts first: several of them come with exit code 255, some with 0.
_TEXTS = (
    ("couldn't communicate with the nvidia driver", Failure("the driver is not loaded", "see `dmesg | grep -i nvrm`; build the module for "
                                                            "the running kernel (dkms status), or reboot after a kernel update")),
    ("version mismatch", Failure("the driver in the kernel and the library are of different versions",
                                 "the driver was updated while it was loaded: reboot, or unload and load its modules")),
    ("gpu is lost", Failure("a GPU has fallen off the bus", "reboot; see `dmesg | grep -i xid`, and look at power and seating")),
    ("unable to determine the device handle", Failure("a GPU does not answer", "see `dmesg | grep -i xid`; reset it or reboot")),
    ("insufficient permissions", Failure("not permitted", "run as root (become: true)")),
    ("no devices were found", Failure("the driver sees no GPU", "see `lspci -d 10de:` and dmesg; in a container, give it the devices")),
    ("failed to initialize nvml", Failure("the driver does not answer", "see dmesg; in a container, start it anew: a systemd reload on the "
                                          "host may have taken its devices away")),
)
# nvidia-smi(1), RETURN VALUE
_CODES = {
    2: Failure("the tool does not know this question", "check the version of the driver"),
    3: Failure("not available on this device", "nothing to do: the tool cannot tell"),
    4: Failure("not permitted", "run as root (become: true)"),
    6: Failure("the query found nothing", "see `lspci -d 10de:` and dmesg"),
    8: Failure("a GPU's power cables are not attached", "attach them"),
    9: Failure("the driver is not loaded", "see dmesg; reboot after a driver installation"),
    10: Failure("the kernel finds an interrupt fault with a GPU", "see dmesg"),
    12: Failure("the driver's library is not found", "install the driver whole; in a container, mount its libraries"),
    13: Failure("the driver is older than the tool", "install tool and driver of one release"),
    14: Failure("a GPU's infoROM is corrupted", "have the card looked at"),
    15: Failure("a GPU has fallen off the bus", "reboot; look at power and seating"),
    124: Failure("the tool gave no answer in time", "the driver hangs: see dmesg"),
    126: Failure("the tool cannot be executed", "check its permissions"),
    127: Failure("the tool is not there", "install the driver"),
}


def explain_failure(exit_code: int, text: str) -> Failure | None:
    """What a failed call means; None when nothing in exit code or text speaks of a failure."""
    said = text.lower()
    found = next((failure for words, failure in _TEXTS if words in said), None)
    if found or exit_code == 0:
        return found
    return _CODES.get(exit_code) or Failure(f"exit code {exit_code}", "run it by hand on the machine")


def _value(text: str) -> str | None:
    text = text.strip()
    return None if _UNKNOWN.fullmatch(text) else text


def _number(command: str, name: str, text: str, number: int, line: str) -> float | None:
    known = _value(text)
    if known is None:
        return None
    if not re.fullmatch(r"\d+(\.\d+)?", known):
        raise NvidiaSmiError(command, f"{name} {known!r} is no number", number, line)
    return float(known)


def _rows(command: str, text: str, fields: tuple[str, ...]) -> list[tuple[int, str, dict[str, str]]]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().lower().startswith(("warning", "no running processes")):
            continue
        cells = [cell.strip() for cell in line.split(",", len(fields) - 1)]
        if len(cells) != len(fields):
            raise NvidiaSmiError(command, f"{len(cells)} fields, not {len(fields)}", number, line)
        rows.append((number, line, dict(zip(fields, cells))))
    return rows


def parse_gpus(text: str) -> list[dict]:
    """``--query-gpu=QUERY --format=csv,noheader,nounits``, a GPU a line.

    Returns ``[{index, uuid, name, bus_id, memory_total_mb, memory_used_mb, temperature_c, power_w, utilization_pct,
    driver_version, mig}]`` (MiB, °C, W, %); what the tool cannot tell is None, `mig` is True where the GPU is cut in slices.
    """
    command = "nvidia-smi --query-gpu"
    gpus, seen = [], set()
    for number, line, row in _rows(command, text, QUERY):
        if not re.fullmatch(r"\d+", row["index"]):
            raise NvidiaSmiError(command, f"index {row['index']!r} is no number", number, line)
        if not _UUID.match(row["uuid"]):
            raise NvidiaSmiError(command, f"{row['uuid']!r} is no UUID of a GPU", number, line)
        for key in (row["index"], row["uuid"]):
            if key in seen:
                raise NvidiaSmiError(command, f"{key} stands there twice", number, line)
            seen.add(key)

        def figure(name: str, row=row, number=number, line=line) -> float | None:
            return _number(command, name, row[name], number, line)

        total, used = figure("memory.total"), figure("memory.used")
        if total is not None and used is not None and used > total:
            raise NvidiaSmiError(command, f"{used:.0f} MiB used of {total:.0f}", number, line)
        whole = {name: None if (read := figure(name)) is None else round(read) for name in ("temperature.gpu", "utilization.gpu")}
        gpus.append({
            "index": int(row["index"]), "uuid": row["uuid"], "name": _value(row["name"]), "bus_id": _value(row["pci.bus_id"]),
            "memory_total_mb": None if total is None else round(total), "memory_used_mb": None if used is None else round(used),
            "temperature_c": whole["temperature.gpu"], "power_w": figure("power.draw"), "utilization_pct": whole["utilization.gpu"],
            "driver_version": _value(row["driver_version"]), "mig": row["mig.mode.current"] == "Enabled",
        })
    if not gpus:
        raise NvidiaSmiError(command, "no GPU in it", text=text)
    return sorted(gpus, key=lambda gpu: gpu["index"])


def parse_processes(text: str) -> list[dict]:
    """``--query-compute-apps=QUERY_PROCESSES --format=csv,noheader,nounits``: ``[{uuid, pid, name, memory_mb}]``.

    Memory in MiB; it and the name are None where the tool cannot tell (inside containers, of other users).
    """
    command = "nvidia-smi --query-compute-apps"
    processes = []
    for number, line, row in _rows(command, text, QUERY_PROCESSES):
        if not _UUID.match(row["gpu_uuid"]) or not re.fullmatch(r"\d+", row["pid"]):
            raise NvidiaSmiError(command, "it begins with no UUID and pid", number, line)
        memory = _number(command, "used_gpu_memory", row["used_gpu_memory"], number, line)
        processes.append({"uuid": row["gpu_uuid"], "pid": int(row["pid"]), "name": _value(row["process_name"]),
                          "memory_mb": None if memory is None else round(memory)})
    return processes


def parse_minor(text: str) -> int | None:
    """The N of /dev/nvidiaN from /proc/driver/nvidia/gpus/ADDRESS/information, None where it does not say."""
    found = re.search(r"^Device Minor:\s*(\d+)\s*$", text, re.MULTILINE)
    return int(found.group(1)) if found else None


def parse_topo(text: str) -> dict:
    """``topo -m``: ``{"links": {0: {1: "NV4", 2: "SYS"}}, "cpus": {0: "0-31", 1: None}, "numa_nodes": {0: 0, 1: None}}`` by index.

    Rows and columns of network cards are passed over. A GPU near several NUMA nodes has None for its node. The matrix must be
    whole and the same both ways.
    """
    command = "nvidia-smi topo -m"
    columns: list[str] | None = None
    titles: list[str] = []
    rows: dict[int, tuple[int, str, list[str], list[str]]] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = _ANSI.sub("", raw).rstrip()
        name, _, rest = line.strip().partition("\t") if "\t" in line.strip() else line.strip().partition(" ")
        if columns is None:
            if re.match(r"GPU\d+(\s|$)", line.strip()) and "X" not in line.split()[1:2]:
                columns, titles = _header(command, line, number)
            continue
        if not re.fullmatch(r"GPU\d+", name):
            continue
        cells = rest.split()
        links, tail = cells[:len(columns)], cells[len(columns):]
        wrong = next((cell for cell in links if not _LINK.fullmatch(cell)), None)
        if len(links) < len(columns) or wrong:
            reason = f"{wrong!r} is no link" if wrong else f"{len(links)} links for {len(columns)} columns"
            raise NvidiaSmiError(command, reason, number, line)
        if int(name[3:]) in rows:
            raise NvidiaSmiError(command, f"{name} has two rows", number, line)
        if len(tail) > len(titles) or (tail and len(tail) < len(titles)):
            tail = _by_tabs(command, rest, len(columns), titles, number, line)
        rows[int(name[3:])] = number, line, links, tail
    if columns is None:
        raise NvidiaSmiError(command, "no header with GPUs in it", text=text)
    return _matrix(command, columns, titles, rows)


def _header(command: str, line: str, number: int) -> tuple[list[str], list[str]]:
    at = min((line.index(title) for title in _AFFINITY if title in line), default=len(line))
    columns, titles = line[:at].split(), [title for title in _AFFINITY if title in line[at:]]
    wrong = next((name for name in columns if not _COLUMN.fullmatch(name)), None)
    if wrong or len(set(columns)) != len(columns):
        raise NvidiaSmiError(command, f"{wrong!r} is no column known" if wrong else "a column stands there twice", number, line)
    return columns, sorted(titles, key=line.index)


def _by_tabs(command: str, rest: str, links: int, titles: list[str], number: int, line: str) -> list[str]:
    """Affinities of a row with an empty cell: only tabs can tell which."""
    cells = [cell.strip() for cell in rest.split("\t")][links:]
    if len(cells) < 2 or len([cell for cell in cells if cell]) > len(titles):
        raise NvidiaSmiError(command, f"what follows the links is not {', '.join(titles) or 'nothing'}", number, line)
    return [cell or "N/A" for cell in cells[:len(titles)]]


def _matrix(command: str, columns: list[str], titles: list[str], rows: dict) -> dict:
    gpus = [int(name[3:]) for name in columns if name.startswith("GPU")]
    if set(gpus) != set(rows):
        raise NvidiaSmiError(command, f"columns for GPU {', '.join(map(str, sorted(gpus)))}, rows for {', '.join(map(str, sorted(rows)))}")
    found: dict[str, dict] = {"links": {}, "cpus": {}, "numa_nodes": {}}
    for gpu, (number, line, cells, tail) in sorted(rows.items()):
        by_column = dict(zip(columns, cells))
        for other in gpus:
            link = by_column[f"GPU{other}"]
            if (link == "X") != (other == gpu):
                raise NvidiaSmiError(command, f"GPU{other} is {link} to GPU{gpu}", number, line)
        found["links"][gpu] = {other: by_column[f"GPU{other}"] for other in sorted(gpus) if other != gpu}
        said = dict(zip(titles, tail))
        found["cpus"][gpu] = _cpus(command, said.get("CPU Affinity"), number, line)
        node = said.get("NUMA Affinity")
        found["numa_nodes"][gpu] = int(node) if node and node.isdigit() else None
    for gpu, row in found["links"].items():
        for other, link in row.items():
            back = found["links"][other][gpu]
            if back != link:
                raise NvidiaSmiError(command, f"GPU{gpu} to GPU{other} is {link}, and back {back}")
            if link == "N/A":
                row[other] = "NA"
    return found


def _cpus(command: str, text: str | None, number: int, line: str) -> str | None:
    if text in (None, "N/A"):
        return None
    try:
        parse_cpu_list(text)
    except ValueError as error:
        raise NvidiaSmiError(command, str(error), number, line) from None
    return text
