"""The same path with real vLLM on CPU: one instance on each of two machines, small, slow and real."""
from __future__ import annotations

import json
import time
import urllib.request
import uuid

import openai
import pytest

from .conftest import ROOT, Cluster, lab

pytestmark = pytest.mark.vllm
INVENTORY = ROOT / "inventory" / "lab-vllm"


@pytest.fixture(scope="module")
def real(scratch) -> Cluster:
    """Two bare machines that became two verified backends."""
    lab("up", "--fresh", "--engine", "vllm", "--machines", "machine68-69", timeout=2400)
    cluster = Cluster(scratch)
    run = cluster.playbook(inventory=INVENTORY)
    assert run.rc == 0, f"{run.failures}\n{run.output[-6000:]}"
    return cluster


@pytest.fixture(scope="module")
def client(real) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real.url}/v1", api_key=real.key, max_retries=0, timeout=300)


def test_two_backends_of_real_vllm_are_verified(real):
    assert len(real.active()) == 2
    report = json.loads((ROOT / "build" / "verify.json").read_text())
    assert [row["machine"] for row in report["backends"]] == ["machine68", "machine69"]
    assert all(row["unmet"] == [] and row["asked"] >= 8 for row in report["backends"] + report["services"])
    version = json.load(urllib.request.urlopen(f"http://{real.management}.68:8000/version", timeout=30))["version"]
    assert version.startswith("0.30.0")


def test_a_real_chat_answer_through_the_load_balancer(client):
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, max_tokens=12, temperature=0, messages=[{"role": "user", "content": "hello"}])
    assert answer.usage.completion_tokens == 12 and answer.choices[0].message.content
    again = client.chat.completions.create(model=model, max_tokens=12, temperature=0, messages=[{"role": "user", "content": "hello"}])
    assert again.choices[0].message.content == answer.choices[0].message.content


def test_a_wrong_key_is_refused(real):
    wrong = openai.OpenAI(base_url=f"{real.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_repeated_session_finds_its_prefix_cached(client):
    """A long prompt is read sooner the second time, as the session came back to its backend.

    The time of an answer of one token is asked, not that of the first piece of text: a token alone need not be any text.
    """
    model = client.models.list().data[0].id

    def one_token_ms(session: str, prompt: str) -> float:
        began = time.perf_counter()
        answer = client.chat.completions.create(model=model, max_tokens=1, messages=[{"role": "user", "content": prompt}],
                                                extra_headers={"X-Session-ID": session})
        assert answer.usage.completion_tokens == 1
        return (time.perf_counter() - began) * 1000

    ratios = []
    for _ in range(3):
        session, prompt = str(uuid.uuid4()), f"{uuid.uuid4()} " + "The quick brown fox jumps over the lazy dog. " * 150
        cold, warm = one_token_ms(session, prompt), one_token_ms(session, prompt)
        ratios.append(warm / cold)
    assert sorted(ratios)[1] < 0.5, ratios


def test_a_second_run_changes_nothing(real):
    before = {machine: real.containers(machine) for machine in ("machine68", "machine69")}
    run = real.playbook(inventory=INVENTORY)
    assert run.rc == 0 and run.changed == {}
    assert {machine: real.containers(machine) for machine in ("machine68", "machine69")} == before
