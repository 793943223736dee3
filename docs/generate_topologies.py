#!/usr/bin/env python3
"""Write docs/topologies.md: every kind of machine among the test fixtures, drawn, with instances of several sizes placed on it.

    docs/generate_topologies.py            writes the page; a unit test compares it with what the code says now
"""
from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.llmops.ascend.plugins.module_utils import deployments, npu_smi, nvidia_smi, placement  # noqa: E402
from ansible_collections.llmops.ascend.plugins.module_utils.numa import parse_cpu_list  # noqa: E402

FIXTURES = ROOT / "tests" / "unit" / "fixtures"
PAGE = ROOT / "docs" / "topologies.md"
SIZES = (1, 2, 4, 8, 16)
# What the tool prints on them is no whole machine: a container's share, one card alone, or the same table in another layout.
PARTS = {"a3-container-two-dies", "a3-one-die-from-source", "910b-centred"}
INTRODUCTION = """# Topologies

Every kind of machine among the fixtures of the parsers (`tests/unit/fixtures`), as its tool prints it, with the instances that placement
puts on it. Written by `docs/generate_topologies.py`; a unit test keeps the page and the code the same.

In a box stand the devices of one NUMA node and its CPUs, below it the links between devices by kind, tightest first. Placement gives a new
instance the tightest links that are free, and splits it across NUMA nodes only where it must. Atlas A3 has two dies on a card that only work
together: an instance takes whole cards, and size 1 is refused. The tables name no nodes: here they are numbered in the order of their CPUs.
"""


def facts_of(links: dict, cpus: dict, vendor: str = "huawei", two_dies: bool = False) -> dict:
    """Facts of a machine that shows this topology and nothing else."""
    lists = sorted({text for text in cpus.values() if text}, key=lambda text: parse_cpu_list(text)[0])
    node = "davinci" if vendor == "huawei" else "nvidia"
    return {
        "vendor": vendor,
        "devices": [{"phy_id": one, "logic_id": one, "npu_id": one // 2 if two_dies else one, "node": f"/dev/{node}{one}",
                     "name": "Ascend910" if two_dies else None, "health": "OK", "holders": [], "cpus": text,
                     "numa_node": lists.index(text) if text else None} for one, text in sorted(cpus.items())],
        "links": {str(one): {str(other): link for other, link in row.items()} for one, row in links.items()},
        "numa_nodes": [{"id": number, "cpus": text, "cores": None} for number, text in enumerate(lists)],
    }


def machines() -> dict[str, dict]:
    """Facts by the name of the fixture."""
    found = {}
    for directory in sorted((FIXTURES / "npu_smi" / "topo").iterdir()):
        if directory.name not in PARTS:
            table = npu_smi.parse_topo((directory / "input.txt").read_text())
            found[directory.name] = facts_of(table["links"], table["cpus"], two_dies=table["kind"] == "Phy-ID")
    for path in sorted((FIXTURES / "nvidia_smi").glob("topo-*.txt")):
        table = nvidia_smi.parse_topo(path.read_text())
        found["nvidia " + path.stem.removeprefix("topo-")] = facts_of(table["links"], table["cpus"], "nvidia")
    return found


def numbers(devices: list[int]) -> str:
    return " ".join(map(str, devices))


def drawn(facts: dict) -> list[str]:
    """NUMA nodes as boxes, then links by kind."""
    boxes = [(f"NUMA node {node['id']}, CPUs {node['cpus']}", [device["phy_id"] for device in facts["devices"] if device["numa_node"] == node["id"]])
             for node in facts["numa_nodes"]]
    unknown = [device["phy_id"] for device in facts["devices"] if device["numa_node"] is None]
    lines = []
    for title, devices in [*boxes, *([("NUMA node not known", unknown)] if unknown else [])]:
        width = max(len(title), len(numbers(devices)))
        lines += [f"┌─ {title} {'─' * (width - len(title))}─┐", f"│  {numbers(devices):{width}}  │", f"└{'─' * (width + 4)}┘"]
    kinds: dict[str, list[str]] = {}
    for one, row in facts["links"].items():
        by_kind: dict[str, list[int]] = {}
        for other, link in row.items():
            by_kind.setdefault(link, []).append(int(other))
        for link, others in by_kind.items():
            kinds.setdefault(link, []).append(f"{one}: {numbers(others)}")
    total = len(facts["devices"])
    for link in sorted(kinds, key=lambda link: placement.LINK_RANKS.get(link, 9)):
        whole = len(kinds[link]) == total and all(len(entry.split(": ")[1].split()) == total - 1 for entry in kinds[link])
        lines.append(f"{link:8} " + ("all to all" if whole else "   ".join(kinds[link])))
    return lines


def placed(facts: dict) -> list[str]:
    """What placement says for each size, without the port."""
    lines = []
    for size in SIZES:
        if size > len(facts["devices"]):
            break
        resolved, findings = deployments.resolve_deployments(
            {f"tp{size}": {"model": "m", "model_path": "/m", "image": "i", "tensor_parallel_size": size}}, {}, {}, None)
        assert not findings, findings
        plan = placement.place_instances(resolved, facts, "198.18.254.66")
        lines += [line.partition(", port")[0] for line in plan["explain"]]
        lines += [f"{finding['level']}: {finding['message']}" for finding in plan["findings"]]
    return lines


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, facts in machines().items():
        parts.append("\n".join([f"## {name}", "", "```text", *drawn(facts), "", *placed(facts), "```", ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
