"""An instance's files, what is seen of a machine, and the lines that explain a failed start."""
from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import atomic_files, ownership, units
from ansible_collections.llmops.ascend.plugins.module_utils.journal import failure_reason
from hypothesis import given
from hypothesis import strategies as st
from instance_machine import SALT, Machine, specification


def test_a_unit_is_ours_and_keeps_its_promises():
    unit = units.render_unit(specification())
    assert ownership.is_marked(unit)
    lines = unit.splitlines()
    for line in ("Type=notify", "Restart=always", "RestartSec=15", "KillMode=mixed", "TimeoutStartSec=3600",
                 "TimeoutStopSec=120", "WantedBy=multi-user.target", "StartLimitIntervalSec=0",
                 "ExecStart=/usr/bin/python3 /usr/local/lib/llmops/supervisor.py /etc/llmops/instances/qwen38-tp2-0.json"):
        assert line in lines
    assert not any(line.startswith("Requires=") for line in lines), "a restart of dockerd must not stop instances"


def test_systemd_reads_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not there")
    path = tmp_path / "qwen38-tp2-0.service"
    path.write_text(units.render_unit(specification(model="100%\nQwen")))
    result = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    complaints = [line for line in result.stderr.splitlines() if "qwen38-tp2-0.service:" in line]
    assert [line for line in complaints if "not executable" not in line] == []


def test_the_document_holds_no_secret_and_no_transient_state():
    document, files = units.render(specification(), {"VLLM_API_KEY": "SK-12345678-@aaa"}, SALT)
    assert "SK-12345678" not in files["specification"] + files["unit"]
    assert "state" not in document
    assert json.loads(files["specification"]) == document
    assert len(document["fingerprint"]) == 64


@given(st.text(st.characters(blacklist_characters="\r\n\0", blacklist_categories=["Cs"]), min_size=1))
def test_a_key_reaches_the_environment_file_literally(key):
    lines = units.render_environment({"VLLM_API_KEY": key}).split("\n")
    assert lines[1] == "VLLM_API_KEY=" + key


@pytest.mark.parametrize("secrets", [{"VLLM_API_KEY": "a\nb"}, {"not a name": "a"}])
def test_what_an_environment_file_cannot_carry_is_refused(secrets):
    with pytest.raises(ValueError, match="secret") as error:
        units.render_environment(secrets)
    assert "a\nb" not in str(error.value)


@pytest.mark.parametrize("change", [{"name": "Up/0"}, {"runtime": "venv"}])
def test_what_cannot_be_a_unit_is_refused(change):
    with pytest.raises(ValueError, match="use"):
        units.document(specification() | change, {}, SALT)


def test_units_are_told_apart():
    text = ("Id=a.service\nLoadState=loaded\nActiveState=active\nSubState=running\nNRestarts=2\nJob=17 x\n\n"
            "Id=b.service\nLoadState=not-found\nActiveState=inactive\nSubState=dead\nNRestarts=\n")
    seen = units.parse_units(text, ["a", "b", "c"])
    assert (seen["a"].active_state, seen["a"].restarts, seen["a"].job) == ("active", 2, 17)
    assert not seen["b"].exists
    assert not seen["c"].exists


def test_a_machine_without_anything_is_empty(tmp_path):
    machine = Machine(tmp_path)
    seen, unknown = units.observe(machine.run, None, machine.paths, ["x-0"])
    assert unknown is None
    assert not seen["x-0"].unit.exists
    assert seen["x-0"].foreign is None


def test_dockerd_that_does_not_answer_is_unknown_not_empty(tmp_path):
    machine = Machine(tmp_path)
    machine.docker_error = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
    _seen, unknown = units.observe(machine.run, "docker", machine.paths, ["x-0"])
    assert "Cannot connect" in unknown


def test_a_hand_made_unit_is_foreign(tmp_path):
    machine = Machine(tmp_path)
    machine.paths.units.mkdir(parents=True)
    machine.paths.unit("x-0").write_text("[Service]\nExecStart=docker run x\n")
    seen, _ = units.observe(machine.run, "docker", machine.paths, ["x-0"])
    assert seen["x-0"].foreign == f"unit {machine.paths.unit('x-0')}"


def test_a_broken_record_is_not_an_empty_one():
    with pytest.raises(ValueError, match="not JSON"):
        ownership.parse_record("{", "/var/lib/llmops/instances.json")
    with pytest.raises(ValueError, match="not a record"):
        ownership.parse_record('{"schema": 9}', "/var/lib/llmops/instances.json")
    assert ownership.parse_record(None, "x")["instances"] == {}


def test_files_are_written_whole_and_once(tmp_path):
    path = tmp_path / "new" / "file"
    assert atomic_files.write_text(path, "a", 0o600)
    assert not atomic_files.write_text(path, "a", 0o600)
    assert atomic_files.write_text(path, "a", 0o644), "a wrong mode is a change"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    assert atomic_files.remove(path)
    assert not atomic_files.remove(path)


@pytest.mark.parametrize(("lines", "reason"), [
    (["Traceback (most recent call last):", "  File \"x\"", "RuntimeError: device is used. ret is -8020",
      "[supervisor] the container ended with exit code 1"], "RuntimeError: device is used. ret is -8020"),
    (["(EngineCore pid=9) ERROR 11-30 core.py:1 ValueError: max_model_len too long",
      "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
      "[supervisor] the container ended with exit code 1"], "ValueError: max_model_len too long"),
    (["vllm serve: error: argument --tool-call-parser: invalid choice: 'qwen3'"],
     "error: argument --tool-call-parser: invalid choice: 'qwen3'"),
    (["[supervisor] device /dev/davinci3 is not there: is the driver loaded?",
      "x.service: Main process exited, code=exited, status=1/FAILURE"],
     "device /dev/davinci3 is not there: is the driver loaded?"),
    (["INFO loading", "x.service: start operation timed out. Terminating."], "start operation timed out"),
    (["INFO loading", "[supervisor] the container ended with exit code 137"],
     "[supervisor] the container ended with exit code 137"),
    ([], "it left no line in its log"),
])
def test_the_reason_of_a_failure(lines, reason):
    assert failure_reason(lines) == reason
