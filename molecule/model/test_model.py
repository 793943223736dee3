"""A model is whole or not there, comes from a machine that has it, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(os.environ["MOLECULE_PROJECT_DIRECTORY"])
MODEL = "/data/models/Qwen3.8-27B-W8A8"
SHARD = f"{MODEL}/quant_model_weights-00002-of-00004.safetensors"

testinfra_hosts = ["ansible://machine68?force_ansible=True"]


def play(*arguments: str, **variables) -> tuple[int, str]:
    """The role again, as `molecule converge` runs it: (exit code, what it said, in one line)."""
    command = ["ansible-playbook", "-i", str(PROJECT / "inventory/lab"), str(Path(__file__).with_name("converge.yml"))]
    command += ["--extra-vars", json.dumps(variables), *arguments]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def on(machine: str, command: str) -> str:
    """A command on a machine, as root."""
    lab = [str(PROJECT / "lab/lab"), "exec", machine, "--", "sh", "-c", command]
    return subprocess.run(lab, capture_output=True, text=True, check=True).stdout.strip()


def wanting(path: str, source: str | None = None) -> dict:
    names = ("qwen38-tp2", "qwen38-tp4")
    return {"resolved_deployments": {name: {"model": Path(path).name, "model_path": path, "model_source": source} for name in names}}


def sums(machine: str, path: str = MODEL) -> str:
    return on(machine, f"cd {path} && find . -type f ! -name '.llmops-*' -exec sha256sum {{}} + | sort -k2")


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    for machine in ("machine68", "machine69"):
        assert on(machine, "ls -A /run/llmops/model_server 2>/dev/null; ls -d /data/models/.*.partial 2>/dev/null; true") == ""
        assert on(machine, "systemctl list-units --all --plain --no-legend 'llmops-model-server-*'; pgrep -x rsync; true") == ""


def test_both_have_the_same_model():
    assert sums("machine68") == sums("machine69") != ""
    identities = [json.loads(on(machine, f"cat {MODEL}/.llmops-manifest.json"))["id"] for machine in ("machine68", "machine69")]
    assert identities[0] == identities[1]


def test_a_damaged_shard_alone_is_fetched_again():
    kept = on("machine68", f"stat -c %i {MODEL}/quant_model_weights-00001-of-00004.safetensors")
    on("machine68", f"truncate -s 100 {SHARD}")
    code, said = play("--check")
    assert code == 0 and "would copy" in said, said
    code, said = play()
    assert code == 0 and "copied 8.4 MB from machine69" in said, said
    assert sums("machine68") == sums("machine69")
    assert on("machine68", f"stat -c %i {MODEL}/quant_model_weights-00001-of-00004.safetensors") == kept


def test_a_rotten_shard_is_found_by_reading():
    on("machine68", f"touch -r {SHARD} /tmp/time; printf x | dd of={SHARD} conv=notrunc status=none; touch -r /tmp/time {SHARD}")
    code, said = play()
    assert code == 0 and "changed=0" in said, said
    code, said = play(model_verify="full")
    assert code == 0 and "copied 8.4 MB from machine69" in said, said
    assert sums("machine68") == sums("machine69")


def test_an_edited_file_is_for_a_person_to_decide():
    on("machine68", f"echo >> {MODEL}/config.json")
    code, said = play("--limit", "machine68")
    assert code != 0 and f"machine68: {MODEL}: config.json differs from the manifest: run with -e model_edited_files=accept" in said, said
    code, said = play(model_edited_files="accept")
    assert code == 0 and "is not the same model everywhere" in said, said
    on("machine68", f"echo >> {MODEL}/config.json")
    code, said = play("--limit", "machine68", model_edited_files="repair")
    assert code == 0, said
    assert sums("machine68") == sums("machine69")


def test_one_machine_alone_asks_up_to_the_first_that_has_it():
    """machine67 is not up: it is asked, does not answer, and stops nothing."""
    on("machine68", f"rm -rf {MODEL}")
    code, said = play("--limit", "machine68", model_source_hints={"Qwen3.8-27B-W8A8": ["machine67", "machine69"]})
    assert code == 0 and "copied 33.6 MB from machine69" in said, said
    assert "machine66" not in said.split("PLAY RECAP")[0].split("Ask for the model")[1]
    assert sums("machine68") == sums("machine69")


def test_what_an_interrupted_copy_left_is_used():
    on("machine68", f"mv {MODEL} /data/models/.Qwen3.8-27B-W8A8.partial && rm /data/models/.Qwen3.8-27B-W8A8.partial/*-0000[34]-of*")
    code, said = play()
    assert code == 0 and "copied 16.8 MB from machine69" in said, said
    assert sums("machine68") == sums("machine69")


def test_a_directory_of_the_machine_is_a_source_too():
    code, said = play("--limit", "machine68", **wanting("/data/models/copy of it", MODEL))
    assert code == 0 and "from machine68" in said, said
    assert sums("machine68", "'/data/models/copy of it'") == sums("machine69")
    on("machine68", "rm -r '/data/models/copy of it'")


def test_a_model_that_is_nowhere():
    code, said = play("--limit", "machine68", "--check", **wanting("/data/models/none", "machine69"))
    assert code != 0 and "machine68: /data/models/none is on no machine (machine69:/data/models/none (absent)): put the model" in said, said


def test_a_disk_too_small_is_said_before_the_first_byte():
    on("machine68", "mkdir -p /small && mount -t tmpfs -o size=20m small /small")
    try:
        for arguments in (("--check",), ()):
            code, said = play("--limit", "machine68", *arguments, **wanting("/small/model", f"machine69:{MODEL}"))
            assert code != 0 and "not enough disk for /small/model: 35." in said and "MB free on the file system of /small" in said, said
            assert on("machine68", "find /small -name '*.safetensors'") == ""
    finally:
        on("machine68", "umount /small && rmdir /small")


def test_what_an_interrupted_run_left_is_ended():
    on("machine69", "mkdir -p /run/llmops/model_server/gone && touch -d '1 hour ago' /run/llmops/model_server/gone")
    code, said = play()
    assert code == 0 and "changed=1" in said, said
