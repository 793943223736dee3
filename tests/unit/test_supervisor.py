"""The supervisor against a played dockerd: starting, adopting, waiting out, stopping; and its pure parts."""
from __future__ import annotations

import importlib.util
import json
import signal
import time

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import units
from hypothesis import given
from hypothesis import strategies as st
from instance_machine import SALT, specification
from played_dockerd import SUPERVISOR, Dockerd, Engine, Supervision

loader = importlib.util.spec_from_file_location("supervisor", SUPERVISOR)
supervisor = importlib.util.module_from_spec(loader)
loader.loader.exec_module(supervisor)

NAME = "qwen38-tp2-0"
KEY = "SK-12345678-@aaa"


@pytest.fixture
def engine():
    played = Engine()
    yield played
    played.server.shutdown()


@pytest.fixture
def dockerd(tmp_path):
    return Dockerd(tmp_path)


@pytest.fixture
def document(tmp_path, engine):
    """A specification that this machine can run: /dev/null for devices, a mount that is there."""
    spec = specification(address="127.0.0.1", port=engine.port, devices=[0, 1], device_nodes=["/dev/null", "/dev/zero"],
                         volumes=["/tmp:/data/models/Qwen:ro"], driver_volumes=["/usr:/usr/driver:ro", "/nowhere:/nowhere:ro"],
                         cpus="0-4095", numa_nodes=[0], options=["--cap-add", "SYS_NICE"], stop_timeout_s=5)
    value, files = units.render(spec, {"VLLM_API_KEY": KEY}, SALT)
    (tmp_path / f"{NAME}.json").write_text(files["specification"])
    (tmp_path / f"{NAME}.env").write_text(files["environment"])
    return value


@pytest.fixture
def supervision(tmp_path, document):
    made = Supervision(tmp_path, tmp_path / f"{NAME}.json")
    yield made
    made.close()


def serving(supervision, engine):
    """Start it and wait until it is ready."""
    process = supervision.start()
    supervision.until_notified("STATUS=loading")
    engine.healthy = True
    supervision.until_notified("READY=1")
    return process


def test_a_start_maps_what_the_instance_has_and_nothing_more(supervision, dockerd, engine, document, tmp_path):
    serving(supervision, engine)
    command = dockerd.commands[0]
    pairs = list(zip(command, command[1:]))
    assert command[:4] == ["run", "--detach", "--name", NAME]
    assert [value for option, value in pairs if option == "--device"] == ["/dev/null", "/dev/zero"]
    assert [value for option, value in pairs if option == "--volume"] == [
        "/usr:/usr/driver:ro", "/tmp:/data/models/Qwen:ro"], "driver files only where the machine has them"
    assert {value for option, value in pairs if option == "--label"} == {
        "llmops.managed-by=llmops.ascend", f"llmops.instance={NAME}", "llmops.devices=0,1",
        f"llmops.fingerprint={document['fingerprint']}"}
    for pair in (("--network", "host"), ("--pull", "never"), ("--shm-size", "1g"), ("--env", "OMP_NUM_THREADS=1"),
                 ("--env-file", str(tmp_path / f"{NAME}.env")), ("--cap-add", "SYS_NICE"), ("--cpuset-mems", "0")):
        assert pair in pairs
    assert "--init" in command
    for never in ("--privileged", "--restart", "--cpuset-cpus"):
        assert never not in command
    assert "not bound to CPUs 0-4095" in supervision.journal()
    assert command[-7:] == ["quay.io/ascend/vllm-ascend:qwen3.8-a2", *document["arguments"]]
    assert KEY not in json.dumps(dockerd.commands) + supervision.journal()


def test_the_stage_of_the_load_is_its_status_and_buys_time(supervision, dockerd, engine):
    supervision.start()
    supervision.until_notified("STATUS=loading")
    for line, stage in [("Loading safetensors checkpoint shards:  75% Completed | 3/4 [00:01<00:00]\n", "3/4 shards"),
                        ("Capturing CUDA graphs (decode, FULL):  57%| 4/7\r\n", "capturing graphs, 4/7")]:
        dockerd.log(line)
        message = supervision.until_notified(stage)
        assert "EXTEND_TIMEOUT_USEC=" in message
    for _repetition in range(3):
        dockerd.log("INFO No available shared memory broadcast block found in 60 seconds\n")
    engine.healthy = True
    ready = supervision.until_notified("READY=1")
    assert "STATUS=serving Qwen3.8-27B-W8A8 on 127.0.0.1" in ready
    assert sum("EXTEND_TIMEOUT" in message for message in supervision.notified) == 2, "a hang is no progress"
    assert "\r" not in supervision.journal()


def test_an_instance_that_serves_asks_nobody_anything(supervision, dockerd, engine):
    serving(supervision, engine)
    before = list(dockerd.calls)
    time.sleep(1)
    assert dockerd.calls == before


@pytest.mark.parametrize("code", [1, 137, 0])
def test_it_ends_as_the_container_does_and_keeps_it(supervision, dockerd, engine, code):
    process = serving(supervision, engine)
    dockerd.log("RuntimeError: the last line\n")
    dockerd.end(code)
    assert process.wait(10) == code
    assert "RuntimeError: the last line" in supervision.journal()
    assert dockerd.container is not None
    supervision.start()
    supervision.until_notified("READY=1")
    assert len(dockerd.commands) == 2


def test_its_own_death_costs_no_reload_and_no_log_line(supervision, dockerd, engine):
    process = serving(supervision, engine)
    for number in range(3):
        dockerd.log(f"line {number}\n", "2026-11-30T12:00:00.000000001Z")     # several messages at one time
    supervision.until_journal("line 2")
    process.kill()
    process.wait()
    dockerd.log("line 3\n", "2026-11-30T12:00:00.000000001Z")
    dockerd.log("line 4\n", "2026-11-30T12:00:01.000000000Z")
    supervision.start()
    supervision.until_notified("READY=1")
    supervision.until_journal("line 4")
    assert len(dockerd.commands) == 1
    assert "adopted running container" in supervision.journal()
    assert [supervision.journal().count(f"line {number}") for number in range(5)] == [1] * 5


def test_old_news_of_an_unknown_container_is_not_repeated(supervision, dockerd, engine, document):
    dockerd.appear(document["fingerprint"])
    dockerd.log("from before\n", "2020-01-01T00:00:00.000000000Z")
    serving(supervision, engine)
    dockerd.log("from now on\n", "2099-01-01T00:00:00.000000000Z")
    supervision.until_journal("from now on")
    assert "from before" not in supervision.journal()


def test_a_restart_of_dockerd_is_waited_out(supervision, dockerd, engine):
    process = serving(supervision, engine)
    dockerd.log("before\n")
    supervision.until_journal("before")
    dockerd.stop()
    supervision.until_journal("dockerd does not answer")
    dockerd.log("meanwhile\n")
    dockerd.start()
    supervision.until_journal("meanwhile")
    assert process.poll() is None
    assert supervision.journal().count("before") == 1
    dockerd.end(3)
    assert process.wait(10) == 3, "the end is noticed by the new dockerd, too"
    assert len(dockerd.commands) == 1


def test_it_waits_for_a_dockerd_that_is_not_up_yet(supervision, dockerd, engine):
    dockerd.stop()
    process = supervision.start()
    supervision.until_journal("dockerd does not answer")
    dockerd.start()
    supervision.until_notified("STATUS=loading")
    assert process.poll() is None


def test_an_earlier_specification_gives_way(supervision, dockerd, engine):
    dockerd.appear("the fingerprint of last week")
    serving(supervision, engine)
    assert [call for call in dockerd.calls if "stop" in call or "DELETE" in call] == [
        f"POST /containers/{'00' * 32}/stop", f"DELETE /containers/{'00' * 32}"]
    assert len(dockerd.commands) == 1


def test_somebody_elses_container_is_not_touched(supervision, dockerd):
    theirs = dockerd.appear("x", ours=False)
    assert supervision.start().wait(10) == 1
    assert "is not ours: adopt or retire it" in supervision.journal()
    assert dockerd.container is theirs


@pytest.mark.parametrize("when", ["serving", "loading", "dockerd away"])
def test_sigterm_stops_and_removes(supervision, dockerd, engine, when):
    if when == "serving":
        process = serving(supervision, engine)
    else:
        if when == "dockerd away":
            dockerd.stop()
        process = supervision.start()
        if when == "dockerd away":
            supervision.until_journal("dockerd does not answer")
        else:
            supervision.until_notified("STATUS=loading")
    process.send_signal(signal.SIGTERM)
    if when == "dockerd away":
        supervision.until_notified("STOPPING=1")
        dockerd.start()
    assert process.wait(10) == 0
    assert dockerd.container is None
    assert list(supervision.runtime.iterdir()) == []


@pytest.mark.parametrize(("change", "message"), [
    ({"device_nodes": ["/dev/davinci99"]}, "device /dev/davinci99 is not there: is the driver loaded?"),
    ({"volumes": ["/nowhere/Qwen:/data:ro"]}, "/nowhere/Qwen is not there")])
def test_what_is_missing_on_the_machine_is_named(supervision, dockerd, document, change, message):
    supervision.specification.write_text(json.dumps({**document, **change}))
    assert supervision.start().wait(10) == 1
    assert message in supervision.journal()
    assert dockerd.commands == []


def test_failures_in_a_row_wait_longer_but_not_for_a_human(supervision, dockerd):
    dockerd.refusal = "docker: Error response from daemon: no such device"
    for _attempt in range(2):
        assert supervision.start().wait(10) == 1
    assert "docker run failed: docker: Error response from daemon: no such device" in supervision.journal()
    supervision.restarts.write_text("2\n")
    process = supervision.start()
    message = supervision.until_notified("waiting 15 s more after 2 failures in a row")
    assert f"EXTEND_TIMEOUT_USEC={(15 + 3600) * 1000000}" in message
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0, "a stop does not wait"
    assert list(supervision.runtime.iterdir()) == [], "and starts the count anew"
    assert supervision.start().wait(10) == 1
    assert supervision.start().wait(10) == 1
    supervision.restarts.write_text("0\n")
    assert supervision.start().wait(10) == 1, "systemctl start does not wait"


def test_the_wait_doubles_up_to_five_minutes():
    assert [supervisor.backoff_seconds(failures) for failures in range(8)] == [0, 15, 30, 60, 120, 240, 300, 300]


@given(st.sets(st.integers(0, 300)))
def test_number_lists(numbers):
    assert supervisor.parse_number_list(",".join(map(str, numbers))) == numbers


def test_ranges():
    assert supervisor.parse_number_list("0-2,8\n") == {0, 1, 2, 8}
    assert supervisor.parse_number_list(None) == set()


@pytest.mark.parametrize(("cpus", "nodes", "options"), [
    (set(range(128)), {0, 1}, ["--cpuset-cpus", "0-31,64-95", "--cpuset-mems", "0"]),
    ({0, 1}, {0, 1}, ["--cpuset-mems", "0"]), (set(range(128)), {1}, ["--cpuset-cpus", "0-31,64-95"])])
def test_a_cpuset_only_where_the_kernel_has_it(cpus, nodes, options):
    assert supervisor.cpuset_options(specification(), cpus, nodes)[0] == options


@pytest.mark.parametrize(("line", "stage"), [
    ("(EngineCore pid=8) Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:02,  0.52s/it]",
     "loading weights, 1/4 shards"),
    ("INFO 11-30 22:02:44 [model_runner_v1.py:2612] Starting to load model /data/models/Qwen...", "loading weights"),
    ("INFO 11-30 [gpu_model_runner.py:1] Model loading took 14.21 GiB and 2.1 seconds", "weights loaded"),
    ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%|####| 67/67 [00:05<00:00]", "capturing graphs, 67/67"),
    ("INFO [kv_cache_utils.py:1087] GPU KV cache size: 524,288 tokens", "KV cache allocated"),
    ("(APIServer pid=7) INFO:     Application startup complete.", "API server starting"),
    ("INFO 198.18.254.1:5000 - \"POST /v1/chat/completions HTTP/1.1\" 200", None)])
def test_stages(line, stage):
    assert supervisor.stage_of(line) == stage
