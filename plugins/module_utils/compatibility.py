"""Whether versions work together: chip, driver, CANN, torch, vLLM, vllm-ascend and Python, by presets/compatibility.yml.

Pure functions. What the table refuses is an error, what it does not speak of a warning, what is not known is not judged. A pair of
versions can be allowed by its name, ``"vllm-ascend 0.22.1 + vLLM 0.23.0"``, with a reason; it is a warning then.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, Mapping

_STAGES = {"alpha": 0, "beta": 1, "rc": 2}
_RELEASED, _POST = 3, 4


def version_key(text: str) -> tuple:
    """An order over the versions of Huawei, Python packages and drivers: ``8.0.RC1.alpha002 < 8.0.RC1 < 8.0.0``,
    ``9.1.0-beta.1 < 9.1.0 < 9.1.0.post1``, ``25.0.rc1.1 > 25.0.rc1``.

    Raises ValueError for what is no version.
    """
    said = text.strip().lower().removeprefix("v")
    if not re.match(r"\d+(\.\d+)*([.-]?(alpha|beta|rc|post|dev)|$|[.+-])", said):
        raise ValueError(f"{text!r} is no version")
    parts = re.findall(r"\d+|alpha|beta|rc|post", said.partition("+")[0])
    numbers: list[int] = []
    while parts and parts[0].isdigit():
        numbers.append(int(parts.pop(0)))
    numbers += [0] * (4 - len(numbers))
    stages: list[int] = []
    while parts:
        part = parts.pop(0)
        number = int(parts.pop(0)) if parts and parts[0].isdigit() else 0
        stages += [_POST if part == "post" else _STAGES.get(part, _RELEASED), number]
    return (*numbers, *stages, _RELEASED)


def covers(written: str, version: str) -> bool:
    """Whether a version of the table stands for `version`: equal as far as it is written (``9.1`` for ``9.1.0-beta.1``)."""
    one, other = (re.findall(r"\d+|[a-z]+", text.lower().removeprefix("v")) for text in (written, version))
    return other[:len(one)] == one


def family_of(name: str, table: Mapping[str, Any]) -> dict | None:
    """The row of a chip's name as npu-smi prints it, or None."""
    return next((row for row in table["families"] if re.fullmatch(row["name"], name)), None)


def judge(known: Mapping[str, str | None], table: Mapping[str, Any], allow: Mapping[str, str] | None = None) -> list[dict]:
    """What stands against a combination: ``[{"level": "error" | "warning", "pair", "message", "remedy"}]``.

    `known` has any of: ``chip`` (a name as npu-smi prints it), ``hdk`` (the driver's version), ``cann``, ``torch``, ``torch_npu``,
    ``vllm``, ``vllm_ascend``, ``python``; absent or None is not known. `allow` maps names of pairs to the reason they are allowed for.
    """
    found = [*_chip(known, table), *_driver(known, table), *_engine(known, table)]
    allow = allow or {}
    return [dict(finding, level="warning", message=f"{finding['message']}; allowed: {allow[finding['pair']]}", remedy="")
            if finding["pair"] in allow else finding for finding in found]


def _finding(level: str, pair: str, message: str, remedy: str) -> dict:
    return {"level": level, "pair": pair, "message": message, "remedy": remedy}


def _chip(known: Mapping[str, str | None], table: Mapping[str, Any]) -> Iterable[dict]:
    name = known.get("chip")
    if not name:
        return
    row, pair = family_of(name, table), f"{name} + vllm-ascend"
    if row is None:
        yield _finding("warning", pair, f"no statement on whether vllm-ascend runs on {name}", "try it on one machine first")
    elif row["engine"] is False:
        yield _finding("error", pair, f"vllm-ascend does not run on {name} (family {row['family']}; {row['source']})", row["instead"])


def _driver(known: Mapping[str, str | None], table: Mapping[str, Any]) -> Iterable[dict]:
    hdk, cann = known.get("hdk"), known.get("cann")
    if not hdk or not cann:
        return
    pair = f"CANN {cann} + HDK {hdk}"
    row = next((row for row in table["cann"] if covers(row["cann"], cann)), None)
    if row is None or not any(covers(release, hdk) for release in [*row["hdk"], *row.get("not_hdk", [])]):
        yield _finding("warning", pair, f"no statement on CANN {cann} with driver {hdk}", "try it on one machine first")
    elif any(covers(release, hdk) for release in row.get("not_hdk", [])):
        yield _finding("error", pair, f"CANN {cann} does not work with driver {hdk} ({row['source']})",
                       f"upgrade the driver to {row['hdk'][0]} or newer")


def _engine(known: Mapping[str, str | None], table: Mapping[str, Any]) -> Iterable[dict]:
    release = known.get("vllm_ascend")
    if not release:
        return
    row = next((row for row in table["vllm_ascend"] if version_key(row["vllm_ascend"]) == version_key(release)), None)
    if row is None:
        newest = max((row["vllm_ascend"] for row in table["vllm_ascend"]), key=version_key)
        yield _finding("warning", f"vllm-ascend {release} + vLLM {known.get('vllm') or 'unknown'}",
                       f"no statement on vllm-ascend {release}; the newest release known here is {newest}", "")
        # Each release is for the vLLM of its own number (0.14.0rc1, for 0.14.1, is the one exception, and has a row).
        row = {"vllm": re.match(r"[\d.]*\d", release)[0]}
    vllm = known.get("vllm")
    if vllm and version_key(vllm) != version_key(row["vllm"]):
        yield _finding("error", f"vllm-ascend {release} + vLLM {vllm}", f"vllm-ascend {release} is for vLLM {row['vllm']}, not {vllm}",
                       f"use vLLM {row['vllm']}")
    cann = known.get("cann")
    if cann and row.get("cann") and not any(_minor(cann) == _minor(wanted) for wanted in row["cann"]):
        yield _finding("error", f"vllm-ascend {release} + CANN {cann}",
                       f"vllm-ascend {release} was built for CANN {' or '.join(row['cann'])}, not {cann}", f"use CANN {row['cann'][-1]}")
    for name, shown in (("torch", "torch"), ("torch_npu", "torch_npu")):
        there, wanted = known.get(name), row.get(name)
        if there and wanted and version_key(there)[:3] != version_key(wanted)[:3]:
            yield _finding("error", f"vllm-ascend {release} + {shown} {there}", f"vllm-ascend {release} needs {shown} {wanted}, not {there}",
                           f"install {shown} {wanted}")
    python, bounds = known.get("python"), row.get("python")
    if python and bounds and not _within(python, bounds):
        yield _finding("error", f"vllm-ascend {release} + Python {python}", f"vllm-ascend {release} needs Python {bounds}, not {python}",
                       f"use a Python {bounds}")


def _minor(version: str) -> tuple:
    return version_key(version)[:2]


def _within(version: str, bounds: str) -> bool:
    """Whether a version satisfies ``>=3.10,<3.13``."""
    for bound in bounds.split(","):
        operator, limit = re.fullmatch(r"(>=|<)([\d.]+)", bound).groups()
        if (version_key(version) >= version_key(limit)) != (operator == ">="):
            return False
    return True
