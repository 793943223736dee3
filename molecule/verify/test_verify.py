"""Real requests to running engines, directly and through a real load balancer: what is well is said, and what is not is named."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
KEY = "SK-12345678-@aaa"
MACHINE = "machine69"

testinfra_hosts = [f"ansible://{MACHINE}?force_ansible=True"]


def on_machine(*command: str) -> str:
    """What a command prints on the machine, as root."""
    lab = [str(PROJECT / "lab/lab"), "exec", MACHINE, "--", *command]
    return subprocess.run(lab, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def verify(tmp_path):
    """The role again, as converge runs it: exit code, output with its lines joined, and the report (None where there is none)."""
    report = tmp_path / "verify" / "report.json"

    def run(*options: str, **variables) -> tuple[int, str, dict | None]:
        command = ["ansible-playbook", "-i", str(PROJECT / "inventory/lab"), str(Path(__file__).with_name("converge.yml"))]
        command += ["--extra-vars", json.dumps({"verify_report_path": str(report), **variables}), *options]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
        output = done.stdout + done.stderr
        assert KEY not in output
        assert not report.exists() or KEY not in report.read_text()
        return done.returncode, " ".join(output.split()), json.loads(report.read_text()) if report.exists() else None

    return run


@contextlib.contextmanager
def stopped(unit: str):
    """A unit stopped, and afterwards started again and answering."""
    on_machine("systemctl", "stop", unit)
    try:
        yield
    finally:
        on_machine("systemctl", "start", unit)
        on_machine("bash", "-c", "for _ in $(seq 100); do ss -ltn | grep -q :8000 && break; sleep 0.2; done")


def test_all_is_well(verify):
    code, output, report = verify()
    assert code == 0
    assert "46 of 46 expectations met" in output
    assert (report["schema"], report["ok"], report["met"], report["asked"], report["unmet"]) == (1, True, 46, 46, [])
    assert [row["instance"] for row in report["backends"]] == ["qwen38-tp2-0", "qwen38-tp2-1"]
    assert all(row["answers"]["max_tokens"]["usage"]["completion_tokens"] == 8 for row in report["backends"])
    (service,) = report["services"]
    assert service["answers"]["sessions"]["sticky"] == 32
    assert len(report["distribution"]) == 2 and sum(row["sessions"] for row in report["distribution"]) == 32


def test_brief_sends_no_prompt(verify):
    before = on_machine("journalctl", "-u", "qwen38-tp2-*", "-o", "cat").count("POST /v1")
    code, _output, report = verify(verify_level="brief")
    assert code == 0
    assert [row["checks"] for row in report["backends"] + report["services"]] == ["4/4"] * 3
    assert on_machine("journalctl", "-u", "qwen38-tp2-*", "-o", "cat").count("POST /v1") == before


def test_instances_that_are_named_are_asked_in_full(verify):
    code, _output, report = verify(verify_level="brief", verify_full_for=["qwen38-tp2-1"])
    assert code == 0
    assert [row["level"] for row in report["backends"]] == ["brief", "full"]


def test_check_mode_asks_nothing(verify):
    code, output, report = verify("--check")
    assert code == 0
    assert "would verify 2 instances, not asked" in output
    assert report is None


def test_an_instance_that_is_down_is_one_line_and_the_service_lives(verify):
    with stopped("qwen38-tp2-0"):
        code, output, report = verify()
    assert code != 0
    (line,) = report["unmet"]
    assert line.startswith("machine69: qwen38-tp2-0 (http://") and "connection refused" in line
    assert "see `systemctl status qwen38-tp2-0`" in line
    assert "/health says connection refused" in output
    assert report["services"][0]["unmet"] == []
    assert len(report["distribution"]) == 1


def test_another_key_than_the_engines(verify):
    services = {"qwen3.8-27b": {"listen_port": 2219, "api_key": "another-key"}}
    code, output, report = verify(services=services)
    assert code != 0
    assert "another-key" not in output
    assert len(report["unmet"]) == 3
    assert all("check services.qwen3.8-27b.api_key" in line and "401" in line for line in report["unmet"])


def test_another_context_length_than_the_engines(verify):
    args = {"qwen38-tp2": {"args": {"max_model_len": 131072}, "instances": 2}}
    code, _output, report = verify(deployment_overrides=args)
    assert code != 0
    assert len(report["unmet"]) == 3
    assert all("max_model_len is 262144 instead of 131072" in line for line in report["unmet"])


def test_an_expectation_of_ones_own(verify):
    own = [{"name": "never", "expect": "answers.models.names[1]", "message": "no second name beside {answers.models.names[0]}"}]
    code, output, report = verify(verify_extra_expectations=own)
    assert code != 0
    assert len(report["unmet"]) == 3
    assert "no second name beside Qwen3.8-27B-W8A8" in output
