#!/usr/bin/env python3
"""The budgets of the design as ratios within one run: machines are shared and noisy, so nothing here is a timed test.

    tests/bench.py [--keep]     a lab of its own, converged; --keep leaves it up for another run

Prints one table and writes build/bench.json. A row over its budget is marked; the exit code is 1 then.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".collections"))
BIN = ROOT / ".venv" / "bin"
ENVIRONMENT = dict(os.environ, LAB="bench", PATH=f"{BIN}:{os.environ['PATH']}", ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"),
                   ANSIBLE_HOME=str(ROOT / ".ansible"))
ROUNDS = 3


def command(*argv: str) -> tuple[float, str]:
    """(seconds, output) of one command that must succeed."""
    began = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"bench: {' '.join(argv)} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    return time.monotonic() - began, done.stdout


def playbook(path: str) -> tuple[float, str]:
    return command(str(BIN / "ansible-playbook"), "-i", "inventory/lab", path)


def remote_tasks(output: str) -> int:
    """How many tasks of a run reached its busiest host, as the recap counts them (controller-only ones included)."""
    return max(int(line.split("ok=")[1].split()[0]) for line in output.splitlines() if " ok=" in line)


def no_change() -> dict:
    """site.yml on a converged cluster against a playbook of as many `file` tasks on the same machines; medians of interleaved rounds."""
    playbook("site.yml")
    _, output = playbook("site.yml")
    if any("changed=" in line and "changed=0" not in line for line in output.splitlines() if " ok=" in line):
        sys.exit("bench: site.yml changed something on a converged cluster")
    tasks = remote_tasks(output)
    plays = [{"hosts": "workers", "gather_facts": False, "tasks": [
        {"name": f"File {number}", "ansible.builtin.file": {"path": "/etc/hostname", "state": "file"}} for number in range(tasks)]}]
    with tempfile.NamedTemporaryFile("w", suffix=".yml", dir=ROOT / "build") as plain:
        json.dump(plays, plain)
        plain.flush()
        ours, theirs = [], []
        for _ in range(ROUNDS):
            theirs.append(playbook(plain.name)[0])
            ours.append(playbook("site.yml")[0])
    ratio = sorted(ours)[ROUNDS // 2] / sorted(theirs)[ROUNDS // 2]
    return {"what": "no-change site.yml over as many file tasks", "figure": round(ratio, 2), "unit": "x", "budget": 1.3,
            "detail": f"{tasks} tasks on the busiest host, 4 machines, {ROUNDS} rounds"}


def placement() -> dict:
    """Placement of 1,000 machines of eight devices, in seconds of CPU time."""
    import yaml
    from ansible_collections.llmops.ascend.plugins.module_utils.deployments import resolve_deployments
    from ansible_collections.llmops.ascend.plugins.module_utils.placement import place_instances

    name = "qwen3.8-27b-w8a8"
    presets = {name: yaml.safe_load((ROOT / "presets" / f"{name}.yml").read_text())["deployment"]}
    resolved, findings = resolve_deployments({"qwen": {"preset": name, "service": "s"}}, {}, presets, {"s": {"listen_port": 1, "api_key": "none"}},
                                             "", "machine1")
    assert not findings, findings
    devices = [{"npu_id": d, "chip_id": 0, "logic_id": d, "phy_id": d, "node": f"/dev/davinci{d}", "health": "OK", "holders": [],
                "numa_node": d // 4, "cpus": ["0-31,64-95", "32-63,96-127"][d // 4], "hbm_total_mb": 65536} for d in range(8)]
    links = {str(a): {str(b): "PHB" if a // 4 == b // 4 else "SYS" for b in range(8) if b != a} for a in range(8)}
    facts = {"vendor": "huawei", "devices": devices, "links": links, "instances": [], "warnings": [],
             "numa_nodes": [{"id": n, "cpus": ["0-31,64-95", "32-63,96-127"][n], "devices": list(range(4 * n, 4 * n + 4))} for n in (0, 1)]}
    began = time.process_time()
    for number in range(1000):
        place_instances(resolved, facts, address="198.18.254.66", machine=f"machine{number}")
    return {"what": "placement of 1,000 machines", "figure": round(time.process_time() - began, 2), "unit": "s of CPU", "budget": 1.0,
            "detail": "eight devices each, four instances of two"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the lab up")
    keep = parser.parse_args().keep
    (ROOT / "build").mkdir(exist_ok=True)
    rows = [placement()]
    try:
        command("lab/lab", "up")
        rows.append(no_change())
    finally:
        if not keep:
            command("lab/lab", "down")
    for row in rows:
        verdict = "ok" if row["figure"] <= row["budget"] else "OVER"
        print(f"{row['what']:45} {row['figure']:8} {row['unit']:9} budget {row['budget']:5}  {verdict:4}  {row['detail']}")
    (ROOT / "build" / "bench.json").write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(row["figure"] > row["budget"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
