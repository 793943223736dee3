"""What a machine shows of itself, read as it really looks, and held against what is wanted of it."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.filter import preflight as filters
from ansible_collections.llmops.ascend.plugins.filter.resolve_deployments import load_presets
from ansible_collections.llmops.ascend.plugins.module_utils import preflight
from ansible_collections.llmops.ascend.plugins.module_utils.deployments import resolve_deployments
from ansible_collections.llmops.ascend.plugins.module_utils.preflight import Listener, Process
from hypothesis import given
from hypothesis import strategies as st

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
TCP = f"""{HEADER}
   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 20001 1 0000000000000000 100 0 0 10 0
   1: 42FE12C6:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 20002 1 0000000000000000 100 0 0 10 0
   2: 0100007F:1F42 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 20003 1 0000000000000000 100 0 0 10 0
   3: 42FE12C6:0016 01FE12C6:C350 01 00000000:00000000 02:000A1234 00000000     0        0 20004 4 0000000000000000 20 4 30 10 -1
"""
TCP6 = """  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 00000000000000000000000000000000:1F43 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 20005 1
   1: 000080FE00000000FF24545A74CB6AFE:1F44 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 20006 1
   2: 0000000000000000FFFF000042FE12C6:1F45 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 20007 1
"""
FIB_TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 198.18.254.0/24 2 0 2
        |-- 198.18.254.0
           /24 link UNICAST
        |-- 198.18.254.66
           /32 host LOCAL
        |-- 198.18.254.255
           /32 link BROADCAST
Local:
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.0
           /8 host LOCAL
        |-- 127.0.0.1
           /32 host LOCAL
        |-- 198.18.254.66
           /32 host LOCAL
"""
IF_INET6 = """00000000000000000000000000000001 01 80 10 80       lo
fe800000000000005a5424fffe6acb74 02 40 20 80     eth0
"""


def test_listening_sockets_of_ipv4():
    assert preflight.listeners(TCP) == [
        Listener("0.0.0.0", 8000, 20001),
        Listener("198.18.254.66", 8001, 20002),
        Listener("127.0.0.1", 8002, 20003),
    ]


def test_listening_sockets_of_ipv6():
    assert preflight.listeners(TCP6) == [
        Listener("::", 8003, 20005),
        Listener("fe80::5a54:24ff:fe6a:cb74", 8004, 20006),
        Listener("198.18.254.66", 8005, 20007),
    ]


@given(st.ip_addresses(v=4), st.integers(1, 65535), st.integers(1, 2**31), st.sampled_from("<>"))
def test_any_socket_is_read_back_in_either_byte_order(address, port, inode, order):
    (word,) = struct.unpack(order + "I", address.packed)
    line = f"  7: {word:08X}:{port:04X} 00000000:0000 0A 0:0 00:0 0 0 0 {inode} 1"
    assert preflight.listeners(line, order) == [Listener(str(address), port, inode)]


def test_this_machine_shows_a_socket_of_this_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        shown = preflight.listeners(Path("/proc/net/tcp").read_text())
        assert ("127.0.0.1", server.getsockname()[1]) in {(listener.address, listener.port) for listener in shown}


def test_the_machines_own_addresses():
    assert preflight.local_addresses(FIB_TRIE, IF_INET6) == [
        "198.18.254.66",
        "127.0.0.1",
        "::1",
        "fe80::5a54:24ff:fe6a:cb74",
    ]


ID = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "unit", "container"),
    [
        ("0::/system.slice/minimax-h3.service\n", "minimax-h3.service", None),
        ("0::/lab-machine66/system.slice/minimax-h3.service\n", "minimax-h3.service", None),
        (f"0::/system.slice/docker-{ID}.scope\n", None, ID),
        (f"12:cpuset:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/containerd.service\n", "containerd.service", ID),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", None, ID),
        (f"0::/kubepods.slice/cri-containerd-{ID}.scope\n", None, ID),
        ("0::/user.slice/user-0.slice/user@0.service/app.slice/tool.service\n", "tool.service", None),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", None, None),
        ("0::/system.slice/qwen38-tp2-0.service/supervised\n", "qwen38-tp2-0.service", None),
        ("0::/\n", None, None),
        ("", None, None),
    ],
)
def test_unit_and_container_of_a_process(text, unit, container):
    assert preflight.cgroup_place(text) == (unit, container)


FOREIGN = Process(4711, "python3", "minimax-h3.service")
WANTED = [{"port": 8000, "address": "198.18.254.66", "purpose": "qwen38-tp2-0", "unit": "qwen38-tp2-0.service"}]


def ports(listening: str, process: Process | None, ours: tuple[str, ...] = (), port: int = 8000) -> list[dict]:
    """The findings when one socket is held on that port."""
    return preflight.port_findings(WANTED, {Listener(listening, port, 1): process}, ours)


def test_a_port_held_by_a_foreign_process_names_it():
    (finding,) = ports("0.0.0.0", FOREIGN)
    assert (finding["level"], finding["check"]) == ("error", "port")
    assert finding["message"] == (
        "port 8000 of qwen38-tp2-0 is held by python3 (pid 4711, unit minimax-h3.service) on 0.0.0.0"
    )
    assert "first_port" in finding["remedy"]
    assert "that cannot be seen" in ports("198.18.254.66", None)[0]["message"]
    assert "container sd35-npu-0" in ports("::", Process(1, "x", None, "sd35-npu-0"))[0]["message"]


@pytest.mark.parametrize(
    ("process", "ours"),
    [
        (Process(1, "vllm", "qwen38-tp2-0.service"), ()),
        (Process(1, "vllm", "containerd.service", "qwen38-tp2-0"), ("qwen38-tp2-0",)),
        (Process(1, "vllm", None, "old-0"), ("old-0",)),
        (Process(1, "vllm", "old-0.service"), ("old-0.service",)),
    ],
)
def test_our_own_instances_may_pass_ports_among_themselves(process, ours):
    assert ports("198.18.254.66", process, ours) == []


@pytest.mark.parametrize(("listening", "port"), [("127.0.0.1", 8000), ("198.18.254.67", 8000), ("fe80::1", 8000), ("0.0.0.0", 8001)])
def test_a_socket_elsewhere_is_not_in_the_way(listening, port):
    assert ports(listening, FOREIGN, port=port) == []


def test_one_holder_is_one_finding():
    held = {Listener("0.0.0.0", 8000, 1): FOREIGN, Listener("::", 8000, 2): FOREIGN}
    assert len(preflight.port_findings(WANTED, held, ())) == 1


def test_names_that_others_bear():
    findings = preflight.name_findings(
        ["a-0", "a-1", "a-2", "a-3"], {"a-0": "/etc/systemd/system/a-0.service"}, {"a-1": False, "a-2": True, "b": False}
    )
    assert [finding["message"] for finding in findings] == [
        "unit a-0.service exists and is not ours: /etc/systemd/system/a-0.service",
        "container a-1 exists and is not ours",
    ]
    assert all("adopt or retire it" in finding["remedy"] for finding in findings)


def disk(settled: bool, model_free: int, engine_free: int, same: bool) -> list[str]:
    """Level and message of the findings for a model of 100 MiB and images of 50, on one file system or two."""
    wanted = [
        {"path": "/data/m", "free_mb": 100, "purpose": "the model", "settled": settled},
        {"path": "/var/lib/docker", "free_mb": 50, "purpose": "images", "settled": False},
    ]
    free = {"/data/m": ("/" if same else "/data", model_free), "/var/lib/docker": ("/", engine_free)}
    return [f"{f['level']}: {f['message']}" for f in preflight.disk_findings(wanted, free)]


def test_disk_space():
    assert disk(False, 100, 50, same=False) == []
    assert disk(False, 99, 50, same=False) == ["error: /data has 99 MiB free, of 100 MiB wanted for the model (/data/m)"]
    assert disk(True, 99, 50, same=False) == ["warning: /data has 99 MiB free, of 100 MiB wanted for the model (/data/m)"]
    assert disk(False, 150, 150, same=True) == []
    assert disk(False, 149, 149, same=True) == [
        "error: / has 149 MiB free, of 150 MiB wanted for the model (/data/m) and images (/var/lib/docker)"
    ]
    assert disk(True, 60, 60, same=True) == []


def test_addresses():
    wanted = [{"variable": "service_address", "address": "198.18.254.66"}, {"variable": "data_address", "address": "198.18.11.66"}]
    (finding,) = preflight.address_findings(wanted, ["127.0.0.1", "198.18.254.66"])
    assert finding["message"] == "data_address 198.18.11.66 is not an address of this machine, which has 198.18.254.66"


def test_device_nodes():
    instances = [
        {"name": "a-0", "device_nodes": ["/dev/davinci0", "/dev/davinci1"], "state": "placed"},
        {"name": "a-1", "device_nodes": ["/dev/davinci2"], "state": "blocked"},
    ]
    (finding,) = preflight.node_findings(instances, ["/dev/davinci0"])
    assert finding["message"] == "/dev/davinci1 of a-0 is not there"


def test_architecture():
    assert preflight.architecture_findings("aarch64", ["aarch64", "x86_64"]) == []
    (finding,) = preflight.architecture_findings("riscv64", ["aarch64", "x86_64"])
    assert "riscv64" in finding["message"] and "aarch64 and x86_64" in finding["message"]


def placed(assumed: bool, findings: tuple = (), instances: int = 1) -> dict:
    """A placement as place_instances returns it, as far as preflight reads it."""
    instance = {"name": "a-0", "address": "198.18.254.66", "port": 8000, "state": "placed", "device_nodes": ["/dev/davinci0"]}
    messages = [{"level": "warning", "message": f"machine66: {finding}"} for finding in findings]
    return {"instances": [instance] * instances, "findings": messages, "explain": [], "assumed": assumed}


def test_what_placement_and_facts_say_becomes_findings():
    said = filters.placement_findings(placed(False, ("a-1 is blocked",)), {"warnings": ["sysfs and table differ"]}, "machine66", False)
    assert [(finding["level"], finding["message"]) for finding in said] == [
        ("warning", "a-1 is blocked"),
        ("warning", "sysfs and table differ"),
    ]


def test_assumed_devices_are_an_error_save_in_check_mode():
    nothing = placed(True, ("nothing is placed",), instances=0)
    facts = {"reason": "npu-smi is not there"}
    assert [f["level"] for f in filters.placement_findings(nothing, facts, "machine66", True)] == ["warning"]
    *_, error = filters.placement_findings(nothing, facts, "machine66", False)
    assert (error["level"], error["message"]) == ("error", "no device is shown: npu-smi is not there")
    assert filters.placement_findings(placed(True, instances=0), facts, "machine66", False) == []
    assert filters.placed_wants(placed(True))[0]["device_nodes"] == []
    assert filters.placed_wants(placed(False))[0]["device_nodes"] == ["/dev/davinci0"]


def test_what_is_wanted_of_a_worker_that_is_the_load_balancer_too():
    deployments, faults = resolve_deployments(
        {"tp2": {"preset": "qwen3.8-27b-w8a8", "instances": 2}}, {}, load_presets(), None
    )
    assert not faults
    variables = {
        "ansible_host": "198.18.254.69",
        "data_address": "198.18.11.69",
        "services": {"qwen": {"listen_port": 2219, "api_key": "none"}},
    }
    wants = filters.machine_wants(variables, deployments, ["workers", "load_balancers"], 100, 50)
    assert wants["names"] == ["tp2-0", "tp2-1"]
    assert [want["address"] for want in wants["addresses"]] == ["198.18.254.69", "198.18.11.69"]
    assert [(want["path"], want["free_mb"]) for want in wants["disk"]] == [
        ("/data/models/Qwen3.8-27B-W8A8", 100),
        ("/var/lib/docker", 50),
    ]
    assert [(want["port"], want["unit"]) for want in wants["ports"]] == [(2219, "llmops-load-balancer.service")]
    assert filters.machine_wants(variables, {}, ["load_balancers"], 100, 50)["disk"] == []
    assert filters.service_addresses(["machine69"], {"machine69": variables}) == {"machine69": "198.18.254.69"}


def test_findings_are_shown_and_said():
    one = {"level": "warning", "machine": "machine67", "check": "disk", "message": "full", "remedy": "empty it"}
    other = {"level": "error", "machine": "machine66", "check": "port", "message": "held", "remedy": ""}
    lines = filters.finding_table([one, other])
    assert [line.split()[:2] for line in lines[2:]] == [["machine66", "error"], ["machine67", "warning"]]
    assert filters.finding_lines([one, other], "error") == ["machine66: held"]
    assert filters.finding_lines([one, other], "warning") == ["machine67: full; empty it"]
    assert filters.finding_table([]) == []


# ------------------------------------------------------------------------------------------- versions and fit, gate three

def versions(**given_):
    return {"q": {"cann_version": None, "vllm_version": "0.23.0", "vllm_ascend_version": None, **given_}}


def chips(*names, vendor="huawei", driver="25.5.1"):
    return {"vendor": vendor, "driver_version": driver, "devices": [{"name": name} for name in names]}


def test_versions_that_cannot_work_are_findings_each_once():
    found = filters.compatibility_findings(versions(cann_version="9.1.0"), chips("910A", "910A", driver="25.0.rc1"), {})
    assert [(finding["level"], finding["check"]) for finding in found] == [("error", "compatibility")] * 2
    assert "does not run on 910A" in found[0]["message"] and "CANN 9.1.0 does not work with driver 25.0.rc1" in found[1]["message"]


def test_an_allowed_pair_is_a_warning_with_its_reason():
    found = filters.compatibility_findings(versions(vllm_ascend_version="0.22.1rc1"), chips("910B4-1"),
                                        {"vllm-ascend 0.22.1rc1 + vLLM 0.23.0": "tested here"})
    assert [finding["level"] for finding in found] == ["warning"] and "allowed: tested here" in found[0]["message"]


def test_other_vendors_and_machines_without_a_driver_are_not_judged():
    assert filters.compatibility_findings(versions(), chips("NVIDIA GeForce RTX 4090", vendor="nvidia"), {}) == []
    assert filters.compatibility_findings(versions(), {}, {}) == []
    assert filters.compatibility_findings(versions(), chips("910B4-1"), {}) == []


def test_a_machine_without_the_model_is_judged_by_what_another_has_read():
    read = {"config": {"hidden_size": 1}}
    hostvars = {"a": {"preflight_devices": {"models": {"/m": {"config": None}}}}, "b": {"preflight_devices": {"models": {"/m": read}}}, "c": {}}
    assert filters.known_models({"/m": {"config": None}}, ["/m", "/n"], ["a", "b", "c"], hostvars) == {"/m": read}


def test_a_machine_s_own_model_goes_first_and_nobody_else_is_looked_at():
    own = {"config": {"hidden_size": 2}}
    assert filters.known_models({"/m": own}, ["/m"], ["a"], {}) == {"/m": own}


def test_fit_has_findings_where_it_is_more_than_information():
    verdicts = [{"deployment": "q", "findings": [{"level": "error", "message": "its weights take too much", "remedy": "more devices"},
                                                 {"level": "info", "message": "concurrency 3", "remedy": ""}]}]
    assert filters.fit_findings(verdicts) == [
        {"level": "error", "check": "fit", "message": "deployment q: its weights take too much", "remedy": "more devices"}]
