"""Backend files: content, checks, what to purge and what to take over."""

from __future__ import annotations

import json

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import load_balancer as lb
from hypothesis import given
from hypothesis import strategies as st

BACKEND = {"id": "m:8000", "instance": "i-0", "address": "10.0.0.1", "port": 8000, "model": "Qwen"}
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9._]|-(?!-|\Z)){0,10}", fullmatch=True)


def content(machine="m", cluster="c", service="s", backends=(BACKEND,)):
    return lb.backend_file(cluster, service, machine, backends)


def write(directory, machine, cluster="c", **fields):
    data = content(machine, cluster, **fields)
    (directory / lb.file_name(data)).write_text(lb.render(data))
    return data


def test_a_file_is_what_the_design_says():
    other = {**BACKEND, "id": "m:7999", "port": 7999, "weight": 2.0}
    data = content(backends=[BACKEND, other])
    assert [backend["port"] for backend in data["backends"]] == [7999, 8000]
    assert [backend["weight"] for backend in data["backends"]] == [2, 1]
    assert {key: data[key] for key in ("schema", "cluster", "service", "machine")} == {
        "schema": 1,
        "cluster": "c",
        "service": "s",
        "machine": "m",
    }
    assert lb.file_name(data) == "c--s--m.json"


@given(NAMES, NAMES, NAMES)
def test_file_names_tell_files_apart(cluster, service, machine):
    data = content(machine, cluster, service)
    assert lb.file_name(data)[:-5].split("--") == [cluster, service, machine]
    assert lb.parse(lb.render(data)) == data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": "machine66"}, "address 'machine66' is not an IP address; set service_address"),
        ({"address": None}, "address 'None'"),
        ({"port": 0}, "port '0'"),
        ({"port": True}, "port 'True'"),
        ({"port": "8000"}, "port '8000'"),
        ({"weight": 0}, "weight '0'"),
        ({"color": "red"}, "unknown field color"),
        ({"id": ""}, "has no id"),
    ],
)
def test_a_wrong_backend_is_named(change, message):
    with pytest.raises(lb.LoadBalancerError, match=message):
        lb.check_backend({**BACKEND, **change})


@pytest.mark.parametrize("name", ["", "a--b", "-a", "a-", "a/b", "a b", "..", None, 7])
def test_names_must_fit_into_a_file_name(name):
    with pytest.raises(lb.LoadBalancerError, match="is not a name"):
        content(machine=name)


def test_an_id_stands_there_once():
    with pytest.raises(lb.LoadBalancerError, match="m:8000 of service s stands there twice"):
        content(backends=[BACKEND, BACKEND])


@pytest.mark.parametrize("text", ["{", "[]", "7", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "backends": []}'])
def test_other_texts_are_no_backend_files(text):
    with pytest.raises(lb.LoadBalancerError):
        lb.parse(text)


def test_a_directory_is_read_with_its_faults(tmp_path):
    data = write(tmp_path, "m")
    (tmp_path / "c--s--x.json").write_text("{")
    (tmp_path / ".c--s--y.json").write_text("{")
    good, bad = lb.read_directory(str(tmp_path))
    assert (good.content, good.error) == (data, None)
    assert bad.content is None and "not JSON" in bad.error
    assert lb.read_directory(str(tmp_path / "missing")) == []


def test_registrations_leave_out_what_is_blocked_or_behind_no_balancer():
    deployments = {
        "a": {"service": "s", "model": "Qwen", "weight": 2, "max_concurrent": 32},
        "b": {"service": None, "model": "Staging"},
        "c": {"service": "t", "model": "Other", "weight": 1, "max_concurrent": None},
        "gone": {"service": "u"},
    }
    instances = [
        {"name": "a-0", "deployment": "a", "port": 8000, "state": "placed"},
        {"name": "a-1", "deployment": "a", "port": 8001, "state": "blocked"},
        {"name": "b-0", "deployment": "b", "port": 8002, "state": "placed"},
        {"name": "gone-0", "deployment": "gone", "port": 8003},
    ]
    assert lb.registrations(instances, deployments, "m", "10.0.0.1") == [
        {
            "service": "s",
            "backends": [
                {
                    "id": "m:8000",
                    "instance": "a-0",
                    "address": "10.0.0.1",
                    "port": 8000,
                    "model": "Qwen",
                    "weight": 2,
                    "max_concurrent": 32,
                }
            ],
        },
        {"service": "t", "backends": []},
        {
            "service": "u",
            "backends": [
                {"id": "m:8003", "instance": "gone-0", "address": "10.0.0.1", "port": 8003, "weight": 1},
            ],
        },
    ]


def test_purge_takes_only_this_clusters_lost_machines(tmp_path):
    for machine in ("m1", "m2", "m3"):
        write(tmp_path, machine)
    write(tmp_path, "m1", cluster="other")
    (tmp_path / "bad.json").write_text("{")
    files = lb.read_directory(str(tmp_path))
    gone = lb.purgeable(files, "c", ["m1", "m2"], confirm=False)
    assert [file.path.name for file in gone] == ["c--s--m3.json"]
    assert lb.purgeable(files, "c", ["m1", "m2", "m3"], confirm=False) == []


def test_purge_of_more_than_half_wants_confirmation(tmp_path):
    for machine in ("m1", "m2", "m3"):
        write(tmp_path, machine)
    files = lb.read_directory(str(tmp_path))
    with pytest.raises(lb.LoadBalancerError, match=r"2 of 3 .* \(m2, m3\): confirm"):
        lb.purgeable(files, "c", ["m1"], confirm=False)
    assert len(lb.purgeable(files, "c", ["m1"], confirm=True)) == 2


def test_newer_takes_what_is_missing_unreadable_or_later(tmp_path):
    same, old = write(tmp_path, "same"), write(tmp_path, "old")
    bad = content("bad")
    (tmp_path / lb.file_name(bad)).write_text("{")
    missing, changed = content("missing"), content("old", backends=[])
    files = lb.read_directory(str(tmp_path))
    now = max(file.modified for file in files)
    offers = [
        {"content": same, "modified": now + 9},
        {"content": old, "modified": now + 1},
        {"content": changed, "modified": now + 9},
        {"content": missing, "modified": 1.0},
        {"content": bad, "modified": 1.0},
        {"content": content("else", cluster="other"), "modified": 1.0},
    ]
    taken = lb.newer(files, offers, "c")
    assert [offer["content"] for offer in taken] == [bad, missing, changed]
    offers[2]["modified"] = now - 9
    offers[1]["modified"] = now - 10
    assert [offer["content"] for offer in lb.newer(files, offers, "c")] == [bad, missing]


def test_without_leaves_the_others():
    other = {**BACKEND, "id": "m:8001", "port": 8001}
    data = content(backends=[BACKEND, other])
    assert [backend["id"] for backend in lb.without(data, ["m:8000"])["backends"]] == ["m:8001"]
    assert len(data["backends"]) == 2


def test_a_balancer_that_does_not_run_is_told_apart_from_one_that_refuses(tmp_path):
    with pytest.raises(lb.BalancerUnreachable, match="does not answer on"):
        lb.Balancer(str(tmp_path / "admin.sock")).status()


def test_rendering_is_stable():
    data = content()
    assert lb.render(json.loads(lb.render(data))) == lb.render(data)
