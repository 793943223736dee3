"""What takes longer than CI has: runs killed at random moments, processes killed at random. `LLMOPS_SEED` repeats a series."""
from __future__ import annotations

import os
import random
import time

import pytest

from .conftest import MACHINES, Traffic, lab, on

pytestmark = pytest.mark.long
SEED = int(os.environ.get("LLMOPS_SEED", random.SystemRandom().randrange(10**6)))


@pytest.fixture(scope="module")
def converged(cluster):
    print(f"LLMOPS_SEED={SEED}")
    run = cluster.playbook(max_unavailable=8)
    assert run.rc == 0, run.output[-4000:]
    cluster.wait_active(16)
    return cluster


def test_runs_killed_at_random_moments_converge(converged):
    """Six times: an argument changes, the run is killed somewhere, the next one finishes; every instance wears the new argument."""
    chance = random.Random(SEED)
    full = time.monotonic()
    assert converged.playbook().rc == 0
    full = time.monotonic() - full
    for number in range(6):
        def change(data, number=number):
            data["all"]["children"]["workers"]["vars"]["deployments"]["qwen38-tp2"]["args"] = {"max_num_seqs": 20 + number}

        inventory, end = converged.inventory(change), time.monotonic() + chance.uniform(0.2, 2.5) * full
        killed = converged.playbook(inventory=inventory, max_unavailable=4, cancel=lambda end=end: time.monotonic() > end)
        print(f"round {number}: first run ended with {killed.rc}")
        run = converged.playbook(inventory=inventory, max_unavailable=4)
        assert run.rc == 0, f"{run.failures}\n{run.output[-4000:]}"
        converged.wait_active(16)
        for machine in MACHINES:
            arguments = on(machine, "docker ps -q --filter label=llmops.instance | xargs docker inspect -f '{{json .Args}}'").splitlines()
            assert len(arguments) == 4 and all(f'"{20 + number}"' in line for line in arguments)
        assert converged.playbook(inventory=inventory).changed == {}


def test_a_cold_machine_survives_killed_runs(converged):
    """A machine that starts bare is added while runs die at random moments; the others never notice."""
    chance = random.Random(SEED + 1)
    assert converged.playbook(max_unavailable=8).rc == 0
    others = {machine: converged.containers(machine) for machine in MACHINES if machine != "machine66"}
    lab("reset", "machine66")
    for _ in range(4):
        end = time.monotonic() + chance.uniform(5, 90)
        converged.playbook(limit="machine66", cancel=lambda end=end: time.monotonic() > end)
    run = converged.playbook(limit="machine66")
    assert run.rc == 0, f"{run.failures}\n{run.output[-4000:]}"
    converged.wait_active(16)
    assert {machine: converged.containers(machine) for machine in others} == others


def test_processes_killed_at_random_return(converged):
    """Twenty kills all over the cluster while sessions talk: everything returns, and afterwards nothing fails any more."""
    chance = random.Random(SEED + 2)
    for _ in range(20):
        machine = chance.choice(MACHINES)
        victim = chance.choice(["supervisor.py", "simulated_vllm", "dockerd", "VLLM::EngineCor", "nginx: worker"])
        pids = on(machine, f"pgrep -f '{victim}'", check=False).split()
        if pids:
            on(machine, f"kill -9 {chance.choice(pids)}", check=False)
        time.sleep(chance.uniform(0, 5))
    converged.wait(lambda: len(converged.active()) == 16, 900, "16 active backends after the last kill")
    with Traffic(converged, sessions=16) as traffic:
        time.sleep(20)
    assert traffic.errors == [] and traffic.requests > 100
    assert converged.playbook().rc == 0
