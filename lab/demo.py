#!/usr/bin/env python3
"""Show the whole path: boot the lab, run site.yml, print the verified backends and a chat answer through the load balancer.

Run by `make demo` (ENGINE=simulated or vllm). Everything it shows was read from what runs: the table from the verification
report that site.yml wrote, the answer from the endpoint itself.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.llmops.ascend.plugins.filter.verify import verify_tables  # noqa: E402

INVENTORIES = {"simulated": "inventory/lab", "vllm": "inventory/lab-vllm"}
REPORT = ROOT / "build" / "verify.json"


def step(text: str, argv: list) -> None:
    """Run one step with its output shown, or end with its exit code."""
    print(f"\n\033[1m{text}\033[0m\n$ {' '.join(argv)}", flush=True)
    code = subprocess.run(argv, cwd=ROOT, env=environment(), check=False).returncode
    if code:
        sys.exit(f"demo: `{' '.join(argv)}` ended with {code}; see its last lines above")


def environment() -> dict:
    return dict(os.environ, PATH=f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}", ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"))


def inventory(engine: str) -> dict:
    """The service as the inventory says it: {url, key, model}; read by Ansible itself, so that nothing is written twice."""
    output = subprocess.run(
        ["ansible-inventory", "-i", INVENTORIES[engine], "--list"], cwd=ROOT, env=environment(), check=True, capture_output=True, text=True
    ).stdout
    data = json.loads(output)
    balancer = data["load_balancers"]["hosts"][0]
    templated = json.loads(subprocess.run(
        ["ansible", "-i", INVENTORIES[engine], balancer, "-c", "local", "-m", "ansible.builtin.debug",
         "-a", "msg={{ {'address': service_address | default(ansible_host), 'services': services} | to_json }}"],
        cwd=ROOT, env=dict(environment(), ANSIBLE_STDOUT_CALLBACK="ansible.builtin.default", ANSIBLE_CALLBACK_RESULT_FORMAT="json"),
        check=True, capture_output=True, text=True).stdout.split("=>", 1)[1])["msg"]
    templated = json.loads(templated) if isinstance(templated, str) else templated
    service = next(iter(templated["services"].values()))
    return {"url": f"http://{templated['address']}:{service['listen_port']}", "key": service["api_key"]}


def ask(service: dict, path: str, body: dict | None = None, key: str | None = None, session: str = ""):
    """One request to the endpoint: (status, headers, body as JSON or None)."""
    headers = {"Authorization": f"Bearer {key or service['key']}", "Content-Type": "application/json"}
    if session:
        headers["X-Session-ID"] = session
    request = urllib.request.Request(service["url"] + path, headers=headers, data=json.dumps(body).encode() if body else None)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.headers, None


def first_token_ms(service: dict, model: str, prompt: str, session: str) -> float:
    """Time to the first streamed token of a short answer, in milliseconds."""
    body = {"model": model, "stream": True, "max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(service["url"] + "/v1/chat/completions", data=json.dumps(body).encode(), headers={
        "Authorization": f"Bearer {service['key']}", "Content-Type": "application/json", "X-Session-ID": session})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"]
                if delta and any(delta[0]["delta"].get(name) for name in ("content", "reasoning", "reasoning_content")):
                    return (time.perf_counter() - began) * 1000
    sys.exit("demo: the endpoint streamed no token; see `lab/lab exec MACHINE -- journalctl -u INSTANCE`")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(INVENTORIES), default="simulated")
    engine = parser.parse_args().engine
    began = time.monotonic()
    machines = "machine66-machine69" if engine == "simulated" else "machine68,machine69"
    step("1. The lab: bare machines", ["lab/lab", "up", "--engine", engine, "--machines", machines])
    REPORT.unlink(missing_ok=True)
    step("2. One command", ["ansible-playbook", "-i", INVENTORIES[engine], "site.yml"])

    service = inventory(engine)
    report = json.loads(REPORT.read_text())
    print("\n\033[1m3. What runs, as verified\033[0m")
    print("\n".join(verify_tables(report)))

    status, _, models = ask(service, "/v1/models")
    if status != 200:
        sys.exit(f"demo: {service['url']}/v1/models answered {status}")
    model, session = models["data"][0]["id"], f"demo-{uuid.uuid4()}"
    status, headers, answer = ask(service, "/v1/chat/completions", session=session, body={
        "model": model, "max_tokens": 64, "messages": [{"role": "user", "content": "你好! Say hello from the cluster."}]})
    if status != 200:
        sys.exit(f"demo: the chat request was answered with {status}")
    message = answer["choices"][0]["message"]
    print(f"\n\033[1m4. A chat answer through {service['url']}\033[0m (from {headers['X-Upstream-Addr']}, {answer['usage']['total_tokens']} tokens)")
    print(f"   {(message.get('content') or message.get('reasoning') or message.get('reasoning_content') or '').strip()[:300]!r}")
    print(f"   with a wrong key: {ask(service, '/v1/models', key='wrong')[0]}")

    prompt = f"{uuid.uuid4()} " + "The quick brown fox jumps over the lazy dog. " * 150
    cold, warm = (first_token_ms(service, model, prompt, session) for _ in range(2))
    print(f"   prefix cache: first token after {cold:.0f} ms, the same session again {warm:.0f} ms")

    print(f"\nDone in {time.monotonic() - began:.0f} s. Try next:")
    print(f"""
  curl {service['url']}/v1/models -H 'Authorization: Bearer {service['key']}'
  ansible-playbook -i {INVENTORIES[engine]} site.yml                      # changed=0: nothing moves
  lab/lab reboot {'machine67' if engine == 'simulated' else 'machine68'}                              # its instances return by themselves
  lab/lab exec machine69 -- journalctl -u 'qwen*' -f     # what the engines say
  ansible-playbook -i {INVENTORIES[engine]} playbooks/verify.yml          # every check on every backend
  make demo-down                                         # end the lab
""")


if __name__ == "__main__":
    main()
