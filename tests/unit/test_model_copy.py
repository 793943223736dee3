"""Receiving a model: whole or not there, resumed, mended, and said in one line when it fails."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import manifest as manifests
from ansible_collections.llmops.ascend.plugins.module_utils import model_copy
from ansible_collections.llmops.ascend.plugins.module_utils.model_copy import CopyError, Source

FILES = {
    "config.json": b'{"a": 1}',
    "model-00001-of-00002.safetensors": os.urandom(300_000),
    "model-00002-of-00002.safetensors": os.urandom(200_000),
    "with space/naïve 文件.txt": b"text",
    "empty": b"",
}


class Origin:
    """A source in a directory, which notes what was asked of it and can fail."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []
        self.break_after: int | None = None
        self.corrupt: list[str] = []
        for name, content in FILES.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        self.id = manifests.settle(str(root))[0].id

    def fetch(self, paths: list[str], directory: Path) -> None:
        for path in paths:
            if path != manifests.MANIFEST_NAME:
                if self.break_after is not None and len(self.asked) >= self.break_after:
                    raise CopyError("the copy broke off")
                self.asked.append(path)
            goal = Path(directory, path)
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.root / path, goal)
            if path in self.corrupt:
                self.corrupt.remove(path)
                goal.write_bytes(b"?" * goal.stat().st_size)


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "NAME"


def receive(origin: Origin, target: Path, **options) -> model_copy.Report:
    return model_copy.receive(target, origin.id, "machine69", origin.fetch, 2, **options)


def check(target: Path, origin: Origin) -> None:
    assert {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}.items() >= FILES.items()
    state = manifests.inspect(str(target), full=True)
    assert (state.status, state.id, state.extra) == ("whole", origin.id, [])
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_model_arrives_whole(origin, target):
    report = receive(origin, target)
    assert (report.files, report.bytes) == (len(FILES), sum(map(len, FILES.values())))
    check(target, origin)


def test_a_second_call_fetches_nothing(origin, target):
    receive(origin, target)
    origin.asked.clear()
    assert receive(origin, target).files == 0
    assert origin.asked == []
    check(target, origin)


@pytest.mark.parametrize("after", range(len(FILES)))
def test_an_interrupted_copy_is_not_there_and_resumes(origin, target, after):
    origin.break_after = after
    with pytest.raises(CopyError, match="broke off"):
        receive(origin, target)
    assert not target.exists()
    assert model_copy.bytes_there(target) >= 0
    origin.break_after, before = None, list(origin.asked)
    receive(origin, target)
    assert sorted(origin.asked) == sorted(FILES)
    assert not set(origin.asked[len(before) :]) & set(before)
    check(target, origin)


def test_what_arrives_damaged_is_fetched_again(origin, target):
    origin.corrupt = ["model-00001-of-00002.safetensors"]
    report = receive(origin, target)
    assert report.fetched_again == ["model-00001-of-00002.safetensors"]
    check(target, origin)


def test_what_arrives_damaged_twice_is_named_and_not_there(origin, target):
    origin.corrupt = ["model-00002-of-00002.safetensors"] * 2
    with pytest.raises(CopyError, match="model-00002-of-00002.safetensors arrived damaged twice from machine69"):
        receive(origin, target)
    assert not target.exists()
    receive(origin, target)
    check(target, origin)


def test_a_damaged_shard_alone_is_fetched_and_running_engines_keep_theirs(origin, target):
    receive(origin, target)
    shard = target / "model-00002-of-00002.safetensors"
    shard.write_bytes(b"short")
    origin.asked.clear()
    with shard.open("rb") as running:
        receive(origin, target)
        assert running.read() == b"short"
    assert origin.asked == ["model-00002-of-00002.safetensors"]
    check(target, origin)


def test_a_shard_rotten_in_place_is_fetched_when_it_is_named(origin, target):
    receive(origin, target)
    shard = target / "model-00001-of-00002.safetensors"
    times = shard.stat().st_mtime_ns
    shard.write_bytes(b"?" * shard.stat().st_size)
    os.utime(shard, ns=(times, times))
    assert receive(origin, target).files == 0
    origin.asked.clear()
    assert receive(origin, target, damaged=[shard.name]).files == 1
    assert origin.asked == [shard.name]
    check(target, origin)


def test_what_an_older_copy_left_is_removed(origin, target):
    partial = model_copy.partial_path(target)
    partial.mkdir(parents=True)
    (partial / "old.safetensors").write_bytes(b"x")
    (partial / "config.json").write_bytes(b"x" * len(FILES["config.json"]))
    assert receive(origin, target).fetched_again == ["config.json"]
    check(target, origin)


def test_a_source_that_changed_meanwhile(origin, target):
    (origin.root / "config.json").write_bytes(b"other")
    manifests.settle(str(origin.root), accept=True)
    with pytest.raises(CopyError, match="the model on machine69 changed"):
        receive(origin, target)
    assert not target.exists()


def test_two_at_once_fetch_once(origin, target):
    threads = [threading.Thread(target=receive, args=(origin, target)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(origin.asked) == sorted(FILES)
    check(target, origin)


def test_links_to_a_hugging_face_cache_are_mended_as_files(origin, target, tmp_path):
    receive(origin, target)
    blob = tmp_path / "blob"
    (target / "config.json").rename(blob)
    (target / "config.json").symlink_to(blob)
    (target / "empty").unlink()
    receive(origin, target)
    check(target, origin)


def test_disk_too_small_is_said_before_the_first_byte(origin, target, monkeypatch):
    monkeypatch.setattr(model_copy.os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 100, 100, 100, 1, 1, 1, 0, 255)))
    with pytest.raises(CopyError, match=r"not enough disk for .*: 525\.\d kB needed, 409\.6 kB free on the file system of .*: make room"):
        receive(origin, target)
    assert origin.asked == []


def test_rsync_between_directories(origin, target):
    fetch = model_copy.rsync_fetch(Source("here", path=str(origin.root)), None, 0)
    model_copy.receive(target, origin.id, "here", fetch, 2)
    check(target, origin)


def test_rsync_says_what_it_lacks(tmp_path, target):
    fetch = model_copy.rsync_fetch(Source("here", path=str(tmp_path / "none")), None, 0)
    with pytest.raises(CopyError, match="the copy from here failed: .*No such file"):
        model_copy.receive(target, "id", "here", fetch, 2)


@pytest.mark.parametrize(
    "code,error,said",
    [
        (10, "rsync: failed to connect to 1.2.3.4: Connection refused (111)", "broke off.*Connection refused.*it resumes"),
        (30, "rsync error: timeout in data send/receive", "broke off.*run again"),
        (11, "rsync: write failed: No space left on device (28)", "disk full under /data/.m.partial"),
        (5, "@ERROR: auth failed on module model", "refused the copy.*data_address"),
        (5, "@ERROR: access denied to model from x (1.2.3.4)", "refused the copy.*data_address"),
        (23, "\nrsync: link_stat failed: Permission denied (13)\n", "failed: rsync: link_stat.*rsync exit 23"),
    ],
)
def test_each_failure_is_one_line(code, error, said):
    line = model_copy.explain(code, error, Source("machine69", "1.2.3.4", 40000), Path("/data/.m.partial"))
    assert "\n" not in line
    assert re.search(said, line)


def test_sizes_as_operators_speak_of_them():
    assert [model_copy.gigabytes(size) for size in (0, 999, 8_400_000, 27_300_000_000)] == ["0 bytes", "999 bytes", "8.4 MB", "27.3 GB"]


def test_urls():
    assert Source("m", "198.51.100.1", 873).url == "rsync://llmops@198.51.100.1:873/model/"
    assert Source("m", "fd00::1", 873).url == "rsync://llmops@[fd00::1]:873/model/"
    assert Source("m", path="/mnt/model").url == "/mnt/model/"
