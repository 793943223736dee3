"""From bare machines to sixteen verified backends, and everything that happens to them afterwards, in order."""
from __future__ import annotations

import base64
import json
import threading
import time

import openai
import pytest

from .conftest import BALANCER, MACHINES, MODEL, ROOT, SERVICE, Traffic, lab, on

OTHERS = [machine for machine in MACHINES if machine != "machine66"]


def without_machine66(data: dict) -> None:
    """The inventory before machine66 was bought."""
    data["all"]["children"]["workers"]["hosts"] = {"machine[67:69]": None}


def deployment(data: dict) -> dict:
    return data["all"]["children"]["workers"]["vars"]["deployments"]["qwen38-tp2"]


def assert_ok(run) -> None:
    assert run.rc == 0, f"{run.failures}\n\n{run.output[-6000:]}"


# --- growing ------------------------------------------------------------------------------------------------------------------

def test_check_on_bare_machines_predicts_and_changes_nothing(cluster):
    run = cluster.playbook(check=True)
    assert_ok(run)
    assert "would install" in run.output and "would start" in run.output
    for machine in MACHINES:
        assert on(machine, "command -v docker npu-smi nginx; ls -d /etc/llmops /var/lib/llmops 2>/dev/null; true") == ""


def test_three_machines_become_twelve_backends(cluster):
    assert_ok(cluster.playbook(inventory=cluster.inventory(without_machine66)))
    cluster.wait_active(12)
    for machine in OTHERS:
        assert sorted(cluster.containers(machine)) == [f"qwen38-tp2-{index}" for index in range(4)]


def test_instances_run_on_their_own_devices_only(cluster):
    for machine in OTHERS:
        for index in range(4):
            inspect = json.loads(on(machine, f"docker inspect qwen38-tp2-{index}"))[0]
            host = inspect["HostConfig"]
            devices = {entry["PathOnHost"] for entry in host["Devices"]}
            own = {f"/dev/davinci{2 * index}", f"/dev/davinci{2 * index + 1}"}
            assert devices == own | {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"}
            assert not host["Privileged"] and host["NetworkMode"] == "host"
            assert cluster.key not in json.dumps([inspect["Args"], inspect["Path"], inspect["Config"]["Labels"], inspect["Config"]["Cmd"]])
        listening = on(machine, "cat /proc/net/tcp | awk '$4 == \"0A\" {print $2}'")
        assert "00000000:1F40" not in listening, "a backend listens on all addresses: a way around the load balancer"


def test_the_key_is_in_root_only_files_and_nowhere_else(cluster):
    needle = base64.b64encode(cluster.key.encode()).decode()
    for machine in OTHERS:
        on(machine, f"echo {needle} | base64 -d > /run/needle")
        files = on(machine, "grep -rlFf /run/needle /etc /var/lib/llmops /var/log /run/llmops /usr/local/lib/llmops 2>/dev/null; true")
        assert sorted(files.split()) == [f"/etc/llmops/instances/qwen38-tp2-{index}.env" for index in range(4)]
        assert set(on(machine, "stat -c '%U %a' /etc/llmops/instances/*.env").splitlines()) == {"root 600"}
        assert on(machine, "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -cFf /run/needle; true") == "0", "in a command line"
        assert on(machine, "journalctl --no-pager --quiet | grep -cFf /run/needle; true") == "0", "in the journal"


def test_scale_out_contacts_the_new_machine_the_balancer_and_one_source(cluster):
    before = {machine: cluster.containers(machine) for machine in OTHERS}
    with Traffic(cluster) as traffic:
        run = cluster.playbook(limit="machine66")
        assert_ok(run)
        cluster.wait_active(16)
    assert run.contacted() <= {"machine66", BALANCER}, "the balancer is also the nearest machine that has the model"
    assert {machine: cluster.containers(machine) for machine in OTHERS} == before
    assert traffic.errors == [] and traffic.requests > 50
    moved = {session: set(seen) for session, seen in traffic.seen.items() if len(set(seen)) > 1}
    address = f"{cluster.management}.66:"
    for session, seen in moved.items():
        assert len(seen) == 2 and any(backend.startswith(address) for backend in seen), f"{session} moved between old backends: {seen}"


# --- a cluster at rest --------------------------------------------------------------------------------------------------------

def test_a_second_run_changes_nothing(cluster):
    before = cluster.running(), {machine: cluster.engine_pids(machine) for machine in MACHINES}
    run = cluster.playbook()
    assert_ok(run)
    assert run.changed == {}
    assert (cluster.running(), {machine: cluster.engine_pids(machine) for machine in MACHINES}) == before
    for machine in MACHINES:
        assert len(run.remote_tasks(machine)) <= 40 + (20 if machine == BALANCER else 0), run.remote_tasks(machine)


def test_a_check_of_the_converged_cluster_predicts_nothing(cluster):
    run = cluster.playbook(check=True)
    assert_ok(run)
    assert run.changed == {}


def test_a_check_predicts_what_an_argument_would_restart(cluster):
    before = cluster.running()
    changed = cluster.inventory(lambda data: deployment(data).update(args={"max_num_seqs": 16}))
    run = cluster.playbook(inventory=changed, check=True)
    assert_ok(run)
    assert "--max-num-seqs" in run.output and "would restart" in run.output
    assert cluster.running() == before


def test_every_check_on_every_backend(cluster):
    assert_ok(cluster.playbook("playbooks/verify.yml"))
    report = json.loads((ROOT / "build" / "verify.json").read_text())
    assert len(report["backends"]) == 16
    assert all(row["met"] == row["asked"] >= 10 for row in report["backends"])


def test_the_official_client_works_unchanged(cluster):
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=cluster.key, max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    answer = client.chat.completions.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "hello"}])
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    chunks = list(client.chat.completions.create(model=MODEL, max_tokens=8, stream=True, stream_options={"include_usage": True},
                                                 messages=[{"role": "user", "content": "hello"}]))
    assert chunks[-1].usage.completion_tokens == 8 and len(chunks) > 4
    wrong = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_session_stays_and_sessions_spread(cluster):
    homes = {}
    for number in range(64):
        session = f"spread-{number}"
        homes[session] = {cluster.chat(session)[1]["X-Upstream-Addr"] for _ in range(2)}
    assert all(len(home) == 1 for home in homes.values())
    assert len(set().union(*homes.values())) >= 12


# --- failures ----------------------------------------------------------------------------------------------------------------

def test_a_rebooted_machine_returns_by_itself(cluster):
    before = cluster.running()
    lab("reboot", "machine67")
    cluster.wait_active(16, 180)
    after = cluster.running()
    assert set(after["machine67"]) == set(before["machine67"])
    assert {machine: after[machine] for machine in MACHINES if machine != "machine67"} == \
        {machine: before[machine] for machine in MACHINES if machine != "machine67"}


@pytest.mark.parametrize("victim", ["init", "api server", "engine core"])
def test_a_killed_process_of_an_engine_brings_the_instance_back(cluster, victim):
    before = cluster.containers("machine68")
    init = before["qwen38-tp2-1"][2]
    pids = {"init": init,
            "api server": on("machine68", f"pgrep -P {init} | head -1"),
            "engine core": on("machine68", f"pgrep -P $(pgrep -P {init} | head -1) | head -1")}
    assert pids[victim]
    on("machine68", f"kill -9 {pids[victim]}")
    cluster.wait(lambda: cluster.containers("machine68").get("qwen38-tp2-1", (None, None))[1] not in (None, before["qwen38-tp2-1"][1]), 90,
                 "a new container")
    cluster.wait_active(16)
    after = cluster.containers("machine68")
    assert {name: row for name, row in after.items() if name != "qwen38-tp2-1"} == \
        {name: row for name, row in before.items() if name != "qwen38-tp2-1"}


def test_a_killed_supervisor_costs_no_reload(cluster):
    before = cluster.containers("machine68")
    old = on("machine68", "systemctl show -p MainPID --value qwen38-tp2-2")
    on("machine68", f"kill -9 {old}")
    cluster.wait(lambda: on("machine68", "systemctl is-active qwen38-tp2-2", check=False) == "active"
                 and on("machine68", "systemctl show -p MainPID --value qwen38-tp2-2") not in ("0", old), 90, "the unit active again")
    assert cluster.containers("machine68") == before


def test_a_dockerd_restart_restarts_no_instance(cluster):
    before, pids = cluster.containers("machine68"), cluster.engine_pids("machine68")
    on("machine68", "systemctl restart docker")
    time.sleep(5)
    assert cluster.containers("machine68") == before and cluster.engine_pids("machine68") == pids
    assert set(on("machine68", "systemctl is-active 'qwen38-tp2-*'").split()) == {"active"}
    cluster.wait_active(16)


# --- changes -----------------------------------------------------------------------------------------------------------------

def test_a_changed_argument_rolls_one_backend_at_a_time(cluster):
    """Only machine68 is concerned; never more than one backend is away, and no request fails."""
    def change(data):
        data["all"]["children"]["workers"]["hosts"] = dict.fromkeys(MACHINES)
        data["all"]["children"]["workers"]["hosts"]["machine68"] = {"deployment_overrides": {"qwen38-tp2": {"args": {"max_num_seqs": 16}}}}

    before, low, stop = cluster.running(), [16], threading.Event()

    def watch():
        while not stop.wait(0.2):
            low[0] = min(low[0], len(cluster.active()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with Traffic(cluster, sessions=16) as traffic:
            run = cluster.playbook(inventory=cluster.inventory(change))
    finally:
        stop.set()
        watcher.join()
    assert_ok(run)
    after = cluster.running()
    for machine in MACHINES:
        moved = {name for name in after[machine] if after[machine][name] != before[machine][name]}
        assert moved == (set(after[machine]) if machine == "machine68" else set())
    assert low[0] == 15, f"{low[0]} backends were the fewest active"
    assert traffic.errors == [] and traffic.requests > 100


@pytest.mark.parametrize(("moment", "sequences"), [
    pytest.param("Compare what runs", 24, marks=pytest.mark.long), pytest.param("Drain on every load balancer", 25, marks=pytest.mark.long),
    ("Carry out: restart qwen38-tp2-1", 26), pytest.param("Activate on every load balancer", 27, marks=pytest.mark.long)])
def test_a_killed_run_loses_no_due_restart(cluster, moment, sequences):
    """Killed when `moment` comes; the next run finishes what is due on machine68, and no drain of the dead run stays."""
    def change(data):
        data["all"]["children"]["workers"]["hosts"] = dict.fromkeys(MACHINES)
        data["all"]["children"]["workers"]["hosts"]["machine68"] = {
            "deployment_overrides": {"qwen38-tp2": {"args": {"max_num_seqs": sequences}}}}

    inventory, others = cluster.inventory(change), {machine: cluster.containers(machine) for machine in MACHINES if machine != "machine68"}
    assert cluster.playbook(inventory=inventory, until=moment).rc != 0
    assert_ok(cluster.playbook(inventory=inventory))
    cluster.wait_active(16, 20)
    for index in range(4):
        assert f'"--max-num-seqs","{sequences}"' in on("machine68", f"docker inspect -f '{{{{json .Args}}}}' qwen38-tp2-{index}")
    assert {machine: cluster.containers(machine) for machine in others} == others


def test_a_powered_off_worker_does_not_stop_the_others(cluster):
    changed = cluster.inventory(lambda data: deployment(data).update(env={"LLMOPS_TEST": "1"}))
    lab("kill", "machine66")
    try:
        run = cluster.playbook(inventory=changed, max_unavailable=8)
        assert run.rc != 0 and "machine66" in run.output
        for machine in OTHERS:
            for index in range(4):
                assert "LLMOPS_TEST=1" in on(machine, f"docker inspect -f '{{{{json .Config.Env}}}}' qwen38-tp2-{index}")
    finally:
        lab("start", "machine66")
    assert_ok(cluster.playbook(max_unavailable=8))
    cluster.wait_active(16, 180)


@pytest.mark.parametrize(("ailment", "word"), [("--health Critical", "Critical"), ("--absent", "is not there")])
def test_a_sick_or_missing_device_blocks_its_own_instance_only(cluster, ailment, word):
    before, pids = cluster.containers("machine67"), cluster.engine_pids("machine67")
    on("machine67", "/usr/local/Ascend/driver/lab/device 3 " + ailment)
    try:
        run = cluster.playbook()
        assert run.rc != 0, "a blocked instance must not pass silently"
        assert "machine67" in run.failures and "qwen38-tp2-1" in run.failures and word in run.failures
        assert len(cluster.active()) == 15 and "machine67:8001" not in cluster.active()
        kept = {name: row for name, row in cluster.containers("machine67").items() if name != "qwen38-tp2-1"}
        assert kept == {name: row for name, row in before.items() if name != "qwen38-tp2-1"}
    finally:
        on("machine67", "/usr/local/Ascend/driver/lab/device 3 --heal")
    assert_ok(cluster.playbook())
    cluster.wait_active(16)
    assert cluster.containers("machine67") == before and cluster.engine_pids("machine67") == pids


def test_an_instance_taken_out_of_the_inventory_is_drained_and_gone(cluster):
    before = cluster.running()
    with Traffic(cluster, sessions=16) as traffic:
        assert_ok(cluster.playbook(inventory=cluster.inventory(lambda data: deployment(data).update(instances=3))))
    assert traffic.errors == []
    assert len(cluster.backends()) == 12
    for machine, containers in cluster.running().items():
        assert containers == {name: row for name, row in before[machine].items() if name != "qwen38-tp2-3"}
        assert on(machine, "ls /etc/llmops/instances/qwen38-tp2-3.* /etc/systemd/system/qwen38-tp2-3.service 2>/dev/null; true") == ""
        assert "No running processes found in NPU 6" in on(machine, "npu-smi info")
    assert_ok(cluster.playbook())
    cluster.wait_active(16)


def test_a_machine_taken_out_of_the_inventory_leaves_the_balancer(cluster):
    before = {machine: cluster.containers(machine) for machine in OTHERS}
    with Traffic(cluster, sessions=16) as traffic:
        assert_ok(cluster.playbook(inventory=cluster.inventory(without_machine66)))
    assert traffic.errors == []
    assert sorted({name.split(":")[0] for name in cluster.backends()}) == OTHERS
    assert {machine: cluster.containers(machine) for machine in OTHERS} == before
    assert_ok(cluster.playbook())
    cluster.wait_active(16)


def test_the_service_is_one_name(cluster):
    assert set(json.loads(on(BALANCER, "cat /etc/llmops/load_balancer/services.json"))["services"]) == {SERVICE}
