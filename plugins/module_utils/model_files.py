"""What a model directory holds, read without its weights: config.json, and the names, types and shapes of its tensors.

A safetensors file begins with the length of its header (8 bytes, little endian) and the header, JSON that maps each tensor to
``{"dtype", "shape", "data_offsets"}`` (https://github.com/huggingface/safetensors, "Format"). Only headers are read: a model of
700 GB costs some megabytes and less than a second. Hundreds of layers and experts are alike, so tensors are folded into rows:

    {"name": "model.layers.*.mlp.experts.*.up_proj.weight", "dtype": "I8", "shape": [2048, 6144], "count": 256, "layers": "3-77"}

`count` tensors of that name, type and shape in each of the `layers` (null: not in a layer).

Standard library only: this runs on the machines.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any, Iterable

CONFIG = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"

# More than any model has; what is beyond is no model directory. The header's limit is that of the format's own reader.
MAX_FILES = 2000
MAX_JSON = 64 * 1024 * 1024
MAX_HEADER = 100_000_000

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Unreadable(ValueError):
    """A file is not what its name says; one line that names it."""


def read_model(directory: str) -> dict[str, Any]:
    """``{"path", "config", "tensors", "total_bytes", "missing"}`` of a model directory; whatever is not there is None.

    `tensors` are rows as above from the headers of the weight files, `total_bytes` their sum; without weight files but with an index
    `total_bytes` is what the index says. `missing` says in one line each what could not be had and where.
    """
    missing: list[str] = []
    config = _optional_json(directory, CONFIG, missing)
    if config is None and not missing:
        missing.append(f"{directory} has no {CONFIG}")
    indexes = [index for name in _names(directory) if name.endswith(INDEX_SUFFIX)
               for index in [_optional_json(directory, name, missing)] if index]
    try:
        tensors = _read_tensors(directory, indexes)
    except (OSError, Unreadable) as error:
        missing.append(str(error))
        tensors = None
    total = sum(row_bytes(row) for row in tensors) if tensors else None
    if total is None and indexes:
        said = [(index.get("metadata") or {}).get("total_size") for index in indexes]
        total = int(sum(said)) if all(isinstance(size, (int, float)) for size in said) else None
    return {"path": directory, "config": config, "tensors": tensors, "total_bytes": total, "missing": missing}


def read_header(path: str) -> dict[str, dict]:
    """The tensors of one safetensors file: ``{name: {"dtype", "shape", "data_offsets"}}``.

    Raises Unreadable where it is no such file, or shorter than its header says (an interrupted copy).
    """
    size = Path(path).stat().st_size
    with Path(path).open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise Unreadable(f"{path} is no safetensors file: its first 8 bytes announce a header of {length} bytes in {size}")
        try:
            header = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            for entry in tensors.values():
                entry["dtype"], entry["shape"] = str(entry["dtype"]), [int(edge) for edge in entry["shape"]]
                if min(entry["shape"], default=0) < 0:
                    raise ValueError(entry["shape"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise Unreadable(f"{path} is no safetensors file: its header is not as the format wants it") from error
    if size < end:
        raise Unreadable(f"{path} is cut short: {size} bytes of {end}")
    return tensors


def fold(tensors: Iterable[tuple[str, str, list[int]]]) -> list[dict]:
    """Rows (see above) of ``(name, dtype, shape)``, ordered by name."""
    counts: dict[tuple, dict[int | None, int]] = {}
    for name, dtype, shape in tensors:
        layer = _LAYER.search(name)
        row = counts.setdefault((_NUMBER.sub("*", name), dtype, tuple(shape)), {})
        number = int(layer.group(1)) if layer else None
        row[number] = row.get(number, 0) + 1
    rows = []
    for (name, dtype, shape), per_layer in sorted(counts.items()):
        alike: dict[int, list[int]] = {}
        for number, count in per_layer.items():
            if number is None:
                rows.append({"name": name, "dtype": dtype, "shape": list(shape), "count": count, "layers": None})
            else:
                alike.setdefault(count, []).append(number)
        rows += [{"name": name, "dtype": dtype, "shape": list(shape), "count": count, "layers": ranges(numbers)}
                 for count, numbers in sorted(alike.items())]
    return rows


def ranges(numbers: Iterable[int]) -> str:
    """``0-2,5`` of 0, 1, 2, 5."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def numbers(text: str | None) -> list[int]:
    """The opposite of `ranges`."""
    found: list[int] = []
    for part in (text or "").split(","):
        first, _dash, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found


# Bits of an element; the names are those of the format.
DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
              "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "I64": 64, "U64": 64, "F64": 64}


def row_bytes(row: dict) -> int:
    """Bytes of all tensors of a row, as they lie on the disk. A type the format does not know counts as 16 bits."""
    elements = row["count"] * (len(numbers(row["layers"])) if row["layers"] is not None else 1)
    for edge in row["shape"]:
        elements *= edge
    return elements * DTYPE_BITS.get(row["dtype"], 16) // 8


def _names(directory: str) -> list[str]:
    try:
        return sorted(path.name for path in Path(directory).iterdir())
    except OSError:
        return []


def _read_tensors(directory: str, indexes: list[dict]) -> list[dict] | None:
    """None where there are no weight files at all. With an index its files count, else every file: some models bring both forms."""
    present = [name for name in _names(directory) if name.endswith(".safetensors")]
    wanted = sorted({str(name) for index in indexes for name in (index.get("weight_map") or {}).values()}) or present
    if not present:
        return None
    absent = [name for name in wanted if name not in present]
    if absent:
        raise Unreadable(f"{directory} lacks {len(absent)} of {len(wanted)} weight files that its index names, the first is {absent[0]}")
    if len(wanted) > MAX_FILES:
        raise Unreadable(f"{directory} has {len(wanted)} weight files, more than {MAX_FILES}; they are not read")
    return fold((name, entry["dtype"], entry["shape"]) for file in wanted
                for name, entry in read_header(str(Path(directory, file))).items())


def _optional_json(directory: str, name: str, missing: list[str]) -> dict | None:
    path = Path(directory, name)
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(MAX_JSON + 1)
        content = json.loads(text) if len(text) <= MAX_JSON else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        missing.append(f"{path} cannot be read: {error}")
        return None
    if not isinstance(content, dict):
        missing.append(f"{path} is not the JSON object it should be")
        return None
    return content
