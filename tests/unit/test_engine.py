"""The simulated engine as a process: its interface over HTTP, its devices, its life and death."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = "Qwen3.8-27B-W8A8"
KEY = "SK-12345678-@aaa$b%c\"d'e"
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Machine:
    """A directory that stands for a machine with eight devices, and the engines started on it."""

    def __init__(self, directory: Path) -> None:
        self.devices, self.driver, self.model = directory / "dev", directory / "driver", directory / "model"
        self.devices.mkdir()
        (self.driver / "locks").mkdir(parents=True)
        self.model.mkdir()
        for number in range(8):
            (self.devices / f"davinci{number}").touch()
            (self.driver / "locks" / f"davinci{number}").touch()
        for node in ("davinci_manager", "devmm_svm", "hisi_hdc"):
            (self.devices / node).touch()
        (self.model / "config.json").write_text('{"max_position_embeddings": 262144}')
        for number in range(4):
            (self.model / f"part-{number}.safetensors").touch()
        self.settings()

    def settings(self, **values: object) -> None:
        wanted = {"load_s": 0, "decode_ms_per_step": 2, "prefill_us_per_token": 50} | values
        (self.driver / "engine.json").write_text(json.dumps(wanted))

    def start(self, *arguments: str, devices: str = "0", **environment: str) -> Engine:
        return Engine(self, arguments, {"ASCEND_RT_VISIBLE_DEVICES": devices, **environment})

    @contextlib.contextmanager
    def engine(self, *arguments: str, devices: str = "0") -> Iterator[Engine]:
        engine = self.start(*arguments, devices=devices)
        try:
            engine.wait_until_ready()
            yield engine
        finally:
            engine.kill()


class Engine:
    """`vllm serve` on a free port of the loopback address."""

    def __init__(self, machine: Machine, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "simulated_vllm", "serve", str(machine.model), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "lab" / "engine"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LLMOPS_LAB_DEVICES": str(machine.devices),
            "LLMOPS_LAB_DRIVER": str(machine.driver),
            "VLLM_API_KEY": KEY,
            **environment,
        }
        self.log = machine.driver / f"{self.port}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 10
        while "Application startup complete." not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    @property
    def core_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ends(self, seconds: float = 5) -> tuple[int, str]:
        """Waits for the end; returns exit code and log."""
        return self.process.wait(seconds), self.log.read_text()

    # -- HTTP ------------------------------------------------------------------------------------------------------------

    def open(self, method: str, path: str, body: object = None, key: str | None = KEY) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
        connection.request(method, path, data, headers)
        return connection.getresponse()

    def get(self, path: str, key: str | None = KEY) -> tuple[int, str]:
        answer = self.open("GET", path, key=key)
        return answer.status, answer.read().decode()

    def post(self, path: str, body: object, key: str | None = KEY) -> tuple[int, dict]:
        answer = self.open("POST", path, body, key)
        return answer.status, json.loads(answer.read())

    def chat(self, messages: list = HELLO, **more: object) -> dict:
        status, answer = self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **more})
        assert status == 200, answer
        return answer

    def stream(self, messages: list = HELLO, **more: object) -> list[dict]:
        """The chunks of a streamed chat answer."""
        body = {"model": MODEL, "messages": messages, "stream": True, **more}
        events = self.open("POST", "/v1/chat/completions", body).read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def fault(self, fault: object) -> None:
        assert self.post("/lab/fault", {"fault": fault})[0] == 200

    def metric(self, name: str) -> float:
        return float(re.search(rf"^vllm:{name}\{{.*?\}} (\S+)$", self.get("/metrics")[1], re.MULTILINE)[1])

    def wait_for(self, metric: str, value: float) -> None:
        deadline = time.monotonic() + 3
        while self.metric(metric) != value:
            assert time.monotonic() < deadline, f"{metric} is {self.metric(metric)}, not {value}"
            time.sleep(0.02)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for all tests that leave it as it was."""
    machine = Machine(tmp_path_factory.mktemp("machine"))
    arguments = "-tp 2 --max-model-len 32768 --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder"
    with machine.engine(*arguments.split(), "--enable-prompt-tokens-details", devices="2,3") as running:
        yield running


# -- the interface -----------------------------------------------------------------------------------------------------


def test_what_is_there(engine):
    assert engine.get("/health", key=None)[0] == 200
    assert json.loads(engine.get("/version", key=None)[1]) == {"version": "0.23.0"}
    [card] = json.loads(engine.get("/v1/models")[1])["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, 32768)
    assert engine.get("/v1/nothing")[0] == 404
    assert engine.get("/v1/chat/completions")[0] == 405


@pytest.mark.parametrize("key", [None, "wrong", KEY + "x", ""])
def test_the_key_guards_v1_only(engine, key):
    assert engine.get("/v1/models", key)[0] == 401
    assert engine.post("/v1/chat/completions", {"messages": HELLO}, key) == (401, {"error": "Unauthorized"})
    assert engine.get("/metrics", key)[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "JSON"),
        ({"model": MODEL}, 400, "messages"),
        ({"model": MODEL, "messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
        ({"model": MODEL, "messages": HELLO, "temperature": -1}, 400, "temperature"),
        ({"model": "other", "messages": HELLO}, 404, "The model `other` does not exist."),
        ({"model": MODEL, "messages": [{"role": "user", "content": "x" * 140_000}]}, 400, "maximum context length is 32768"),
        ({"model": MODEL, "messages": HELLO, "max_tokens": 40_000}, 400, "40000 output tokens"),
        ({"model": MODEL, "messages": HELLO, "tool_choice": "required"}, 400, "`tools` must be set"),
    ],
)
def test_bad_requests(engine, body, status, message):
    answered, answer = engine.post("/v1/chat/completions", body)
    assert (answered, answer["error"]["code"]) == (status, status)
    assert message in answer["error"]["message"]


def test_a_big_body_in_chunks(engine):
    chunks = (b"x" * 1_000_000 for _ in range(20))
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=10)
    connection.request("POST", "/v1/completions", chunks, {"Authorization": f"Bearer {KEY}"}, encode_chunked=True)
    assert connection.getresponse().status == 400


def test_max_tokens_and_sums_are_exact(engine):
    answer = engine.chat(max_tokens=8)
    usage = answer["usage"]
    assert (usage["completion_tokens"], answer["choices"][0]["finish_reason"]) == (8, "length")
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


def test_a_stream_says_the_same_as_a_whole_answer(engine):
    whole = engine.chat(temperature=0)
    chunks = engine.stream(temperature=0, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    message = whole["choices"][0]["message"]
    for field in ("content", "reasoning"):
        assert "".join(delta.get(field) or "" for delta in deltas) == message[field]
    assert message["reasoning"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:-1]] == ["stop"]


def test_temperatures_differ_and_zero_repeats(engine):
    def said(temperature: float) -> str:
        return engine.chat(temperature=temperature, max_tokens=12)["choices"][0]["message"]["reasoning"]

    assert said(0) == said(0)
    assert len({said(0), said(0.5), said(1)}) == 3


def test_thinking_can_be_off(engine):
    message = engine.chat(chat_template_kwargs={"enable_thinking": False})["choices"][0]["message"]
    assert message["reasoning"] is None
    assert "<think>" not in message["content"]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
)
def test_tool_calls(engine, choice, reason):
    question = [{"role": "user", "content": "How is the weather in Hangzhou?"}]
    answer = engine.chat(question, tools=[WEATHER], tool_choice=choice)["choices"][0]
    [call] = answer["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Hangzhou"})
    assert answer["finish_reason"] == reason
    chunks = engine.stream(question, tools=[WEATHER], tool_choice=choice)
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Hangzhou"}'
    result = [*question, answer["message"], {"role": "tool", "content": "rain", "tool_call_id": call["id"]}]
    assert engine.chat(result, tools=[WEATHER])["choices"][0]["message"]["content"]


def test_images_in_messages(engine):
    def ask(url: str) -> tuple[int, dict]:
        parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
        return engine.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 4})

    status, answer = ask("data:image/png;base64,iVBORw0KGgo=")
    assert status == 200
    assert answer["usage"]["prompt_tokens"] > 256
    assert ask("data:image/png;base64,***")[0] == 400
    assert ask("file:///etc/passwd")[0] == 400


def test_text_completions(engine):
    status, answer = engine.post("/v1/completions", {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 5})
    assert (status, answer["object"], answer["usage"]["completion_tokens"]) == (200, "text_completion", 5)
    assert answer["choices"][0]["text"]


# -- timing, cache, queue ------------------------------------------------------------------------------------------------


def test_the_prefix_cache_shortens_the_second_turn(machine):
    machine.settings(prefill_us_per_token=300)
    with machine.engine("--enable-prompt-tokens-details") as engine:
        first = [{"role": "user", "content": "a long story. " * 350}]

        def ask(messages: list) -> tuple[float, dict]:
            start = time.monotonic()
            answer = engine.chat(messages, max_tokens=1)
            return time.monotonic() - start, answer["usage"]

        cold, usage = ask(first)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        assert cold > 0.3
        warm, usage = ask([*first, {"role": "assistant", "content": "Indeed."}, {"role": "user", "content": "And then?"}])
        assert usage["prompt_tokens_details"]["cached_tokens"] > 1200
        assert warm < cold / 3
        hits, queries = engine.metric("prefix_cache_hits_total"), engine.metric("prefix_cache_queries_total")
        assert 0.45 < hits / queries < 0.5
        assert engine.metric("time_to_first_token_seconds_count") == 2


def test_max_num_seqs_makes_a_queue_and_a_client_that_leaves_frees_its_place(machine):
    with machine.engine("--max-num-seqs", "1", "--no-enable-prefix-caching") as engine:
        first = engine.open("POST", "/v1/chat/completions", {"messages": HELLO, "stream": True, "ignore_eos": True})
        first.readline()
        second = socket.create_connection(("127.0.0.1", engine.port))
        body = json.dumps({"messages": HELLO, "max_tokens": 3}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        second.sendall(head.encode() + body)
        engine.wait_for("num_requests_waiting", 1)
        assert engine.metric("num_requests_running") == 1
        first.close()
        assert b'"completion_tokens":3' in second.recv(65536)
        engine.wait_for("num_requests_running", 0)
        assert engine.metric("kv_cache_usage_perc") == 0
        second.close()


def test_running_sequences_share_steps(machine):
    machine.settings(decode_ms_per_step=20, decode_ms_per_sequence=0)
    with machine.engine() as engine:
        body = {"messages": HELLO, "max_tokens": 10, "ignore_eos": True}
        start = time.monotonic()
        answers = [engine.open("POST", "/v1/chat/completions", body | {"stream": True}) for _ in range(8)]
        assert all(answer.read().count(b'"finish_reason":"length"') == 1 for answer in answers)
        assert 0.2 <= time.monotonic() - start < 1.4  # one after the other they would take 1.6


# -- faults --------------------------------------------------------------------------------------------------------------


def test_faults(machine):
    with machine.engine() as engine:
        engine.fault("error_503")
        assert engine.post("/v1/chat/completions", {"messages": HELLO})[0] == 503
        assert engine.get("/health")[0] == 200

        engine.fault("reset")
        with pytest.raises(ConnectionResetError):
            engine.get("/v1/models")

        engine.fault({"slow_prefill_s": 0.4})
        start = time.monotonic()
        engine.chat(max_tokens=1)
        assert time.monotonic() - start > 0.4

        engine.fault("hang_engine")
        stuck = engine.open("POST", "/v1/chat/completions", {"messages": HELLO, "stream": True})
        engine.wait_for("num_requests_running", 1)
        assert engine.get("/health")[0] == 200
        engine.fault(None)
        assert stuck.read().endswith(b"data: [DONE]\n\n")

        engine.fault("hang")
        connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=0.2)
        connection.request("GET", "/health")
        with pytest.raises(TimeoutError):
            connection.getresponse()
        engine.fault(None)
        assert engine.get("/health")[0] == 200


# -- devices, life and death ---------------------------------------------------------------------------------------------


def test_loading_shows_its_progress(machine):
    machine.settings(load_s=0.2)
    with machine.engine() as engine:
        log = engine.log.read_text()
    assert re.search(r"EngineCore pid=\d+\) Loading safetensors checkpoint shards:  25% Completed \| 1/4 \[", log)
    assert "Application startup complete." in log


def test_a_device_has_one_user(machine):
    with machine.engine("-tp", "2", devices="2,3") as engine:
        code, log = machine.start("-tp", "2", devices="3,4").ends()
        assert code == 1
        assert "the device is used. ret is -8020" in log
        holders = Path("/proc/locks").read_text()
        inode = (machine.driver / "locks" / "davinci2").stat().st_ino
        assert re.search(rf"FLOCK +ADVISORY +WRITE {engine.core_pid} \S+:{inode} ", holders)


def test_a_cache_too_small_for_the_longest_request(machine):
    machine.settings(kv_cache_tokens=100_000)
    code, log = machine.start().ends()
    assert code == 1
    assert "max seq len (262144)" in log


def test_devices_that_are_not_there(machine):
    assert "available NPUs (1)" in machine.start("-tp", "2", devices="7").ends()[1]
    assert "invalid device id" in machine.start(devices="8").ends()[1]
    (machine.devices / "hisi_hdc").unlink()
    code, log = machine.start().ends()
    assert code == 1
    assert "dcmi module initialize failed. ret is -8005" in log


def test_logic_ids_count_the_devices_that_are_present(machine):
    for number in (0, 1, 2, 3):
        (machine.devices / f"davinci{number}").unlink()
    with machine.engine(devices="0"), (machine.driver / "locks" / "davinci4").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_refused_arguments_end_the_process(machine):
    assert machine.start("--no-such-option").ends()[0] == 2
    code, log = machine.start("--enable-auto-tool-choice", "--tool-call-parser", "qwen3").ends()
    assert code == 1
    assert "invalid tool call parser: qwen3" in log


def test_a_taken_port_fails_before_the_model_is_loaded(machine):
    with machine.engine() as engine:
        code, log = machine.start("--port", str(engine.port), devices="1").ends()
    assert code == 1
    assert "Address already in use" in log
    assert "Starting to load" not in log


def test_death_of_the_core_ends_the_server(machine):
    with machine.engine() as engine:
        stuck = engine.open("POST", "/v1/chat/completions", {"messages": HELLO, "stream": True, "ignore_eos": True})
        os.kill(engine.core_pid, signal.SIGKILL)
        code, log = engine.ends()
        assert code == 1
        assert "EngineDeadError" in log
        assert b"EngineCore encountered an issue" in stuck.read()


def test_death_of_the_server_frees_the_device(machine):
    with machine.engine() as engine:
        engine.kill()
        deadline = time.monotonic() + 3
        with (machine.driver / "locks" / "davinci0").open() as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)


@pytest.mark.parametrize(("timeout_s", "reason"), [("5", "length"), ("0", "abort")])
def test_sigterm_drains_for_as_long_as_it_is_told(machine, timeout_s, reason):
    with machine.engine("--shutdown-timeout", timeout_s) as engine:
        body = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 150}
        answer = engine.open("POST", "/v1/chat/completions", body)
        answer.readline()
        engine.process.terminate()
        events = answer.read()
        assert f'"finish_reason":"{reason}"'.encode() in events
        assert events.endswith(b"data: [DONE]\n\n")
        assert engine.ends()[0] == 0


def test_sigterm_while_loading(machine):
    machine.settings(load_s=30)
    engine = machine.start()
    while "Starting to load" not in engine.log.read_text():
        time.sleep(0.02)
    engine.process.terminate()
    assert engine.ends(2)[0] == 143


def test_memory_stays_small(machine):
    """Sixteen engines share a small machine: what each adds is its private memory."""
    with machine.engine("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder") as engine:
        engine.chat()
        for pid in (engine.process.pid, engine.core_pid):
            usage = Path(f"/proc/{pid}/smaps_rollup").read_text()
            private = sum(int(kilobytes) for kilobytes in re.findall(r"^Private_\w+: +(\d+) kB", usage, re.MULTILINE))
            assert private < 25_000
