"""Manifests: the id says what a model is, the cheap check what moved, the full one what is really there."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from ansible_collections.llmops.ascend.plugins.module_utils import manifest as manifests
from ansible_collections.llmops.ascend.plugins.module_utils.manifest import Manifest, ManifestError
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 100 and not name.startswith((".llmops-", "..llmops-"))
)
TREES = st.dictionaries(
    st.lists(NAMES.filter(lambda name: name not in manifests.BOOKKEEPING), min_size=1, max_size=3).map("/".join),
    st.binary(max_size=200),
    min_size=1,
    max_size=6,
)


def plant(root: Path, tree: dict[str, bytes]) -> dict[str, bytes]:
    """Write the files of a tree; returns those that could be (a/b cannot be where a is a file)."""
    planted = {}
    for name, content in tree.items():
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except (NotADirectoryError, FileExistsError, IsADirectoryError):
            continue
        planted[name] = content
    return planted


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "Qwen 模型"
    plant(root, {"config.json": b"{}", "model-1.safetensors": b"a" * 1000, "model-2.safetensors": b"b" * 2000, "empty": b""})
    return root


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_any_tree_survives_settling_and_json(tree):
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory, "model")
        planted = plant(root, tree)
        state, written = manifests.settle(str(root))
        assert (state.status, written, state.files) == ("whole", True, len(planted))
        assert state.bytes == sum(map(len, planted.values()))
        loaded = manifests.load(str(root))
        assert loaded.id == state.id and loaded.files.keys() == planted.keys()
        assert manifests.inspect(str(root), full=True).status == "whole"
        assert manifests.settle(str(root)) == (state, False)


@settings(max_examples=40, deadline=None)
@given(TREES, st.data())
def test_the_id_changes_with_any_content_and_with_nothing_else(tree, data):
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        planted = plant(Path(one), tree)
        plant(Path(other), dict(reversed(list(planted.items()))))
        assert manifests.settle(one)[0].id == manifests.settle(other)[0].id
        changed = data.draw(st.sampled_from(sorted(planted)))
        Path(other, changed).write_bytes(planted[changed] + b"!")
        assert manifests.settle(other, accept=True)[0].id != manifests.load(one).id


def test_names_that_are_not_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.bin")).write_bytes(b"x")
    state, _ = manifests.settle(str(tmp_path))
    assert manifests.load(str(tmp_path)).id == state.id
    assert manifests.inspect(str(tmp_path)).status == "whole"


def test_nothing_an_empty_directory_and_a_file(tmp_path):
    assert manifests.inspect(str(tmp_path / "none")).status == "absent"
    assert manifests.inspect(str(tmp_path)).status == "absent"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ManifestError, match="is not a directory"):
        manifests.inspect(str(tmp_path / "file"))


def test_a_model_copied_by_hand_and_one_whose_index_names_what_is_missing(model):
    assert manifests.inspect(str(model)).status == "unmanifested"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    state, written = manifests.settle(str(model))
    assert (state.status, state.missing, written) == ("incomplete", ["model-3.safetensors"], False)


def test_time_alone_moved(model):
    before, _ = manifests.settle(str(model))
    os.utime(model / "config.json", ns=(1, 1))
    state = manifests.inspect(str(model))
    assert (state.status, state.touched) == ("touched", ["config.json"])
    after, written = manifests.settle(str(model))
    assert (after.status, after.id, written) == ("whole", before.id, True)


@pytest.mark.parametrize("name,edited", [("model-2.safetensors", []), ("config.json", ["config.json"])])
def test_changed_content_is_named_and_the_manifest_stands(model, name, edited):
    before, _ = manifests.settle(str(model))
    os.utime(model / "empty", ns=(1, 1))
    content = (model / name).read_bytes()
    (model / name).write_bytes(b"X" + content[1:])
    os.utime(model / name, ns=(2, 2))
    state, written = manifests.settle(str(model))
    assert (state.status, state.changed, state.edited, state.touched, written) == ("damaged", [name], edited, [], True)
    assert manifests.load(str(model)).id == before.id
    assert manifests.settle(str(model))[0].status == "damaged"


def test_a_shard_rotten_in_place_shows_in_full_only(model):
    manifests.settle(str(model))
    shard = model / "model-1.safetensors"
    times = shard.stat().st_mtime_ns
    shard.write_bytes(b"a" * 999 + b"b")
    os.utime(shard, ns=(times, times))
    assert manifests.inspect(str(model)).status == "whole"
    state = manifests.inspect(str(model), full=True)
    assert (state.status, state.changed) == ("damaged", ["model-1.safetensors"])
    assert manifests.settle(str(model), full=True) == (state, False)


def test_missing_and_extra_files(model):
    manifests.settle(str(model))
    (model / "empty").unlink()
    (model / "chat_template.jinja").write_text("x")
    state = manifests.inspect(str(model))
    assert (state.status, state.missing, state.extra) == ("damaged", ["empty"], ["chat_template.jinja"])


def test_accept_takes_what_is_there(model):
    before, _ = manifests.settle(str(model))
    (model / "config.json").write_text('{"max": 1}')
    (model / "empty").unlink()
    (model / "chat_template.jinja").write_text("x")
    after, written = manifests.settle(str(model), accept=True)
    assert (after.status, after.extra, written) == ("whole", [], True)
    assert after.id != before.id
    assert manifests.settle(str(model), accept=True) == (after, False)


def test_hugging_face_cache_is_the_same_model_as_a_plain_directory(tmp_path, model):
    blobs, snapshot = tmp_path / "models--q" / "blobs", tmp_path / "models--q" / "snapshots" / "rev"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        (blobs / path.name.upper()).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name.upper())
    assert manifests.settle(str(snapshot))[0].id == manifests.settle(str(model))[0].id


def test_links_that_lead_nowhere_or_in_a_circle(model):
    (model / "loop").symlink_to(".")
    with pytest.raises(ManifestError, match="leads back above itself"):
        manifests.scan(str(model))
    (model / "loop").unlink()
    (model / "dangling").symlink_to("nowhere")
    with pytest.raises(ManifestError, match="leads nowhere"):
        manifests.scan(str(model))


def test_bookkeeping_is_no_part_of_the_model(model):
    before = manifests.settle(str(model))[0].id
    plant(model, {".cache/huggingface/x.lock": b"", ".git/HEAD": b"x", "..llmops-manifest.json.x1": b"half"})
    assert manifests.inspect(str(model)).extra == []
    assert manifests.settle(str(model), accept=True)[0].id == before


def test_a_file_that_changes_while_it_is_read(model, monkeypatch):
    honest = manifests.sha256

    def read_while_written(path: str, sync: bool = False) -> str:
        digest = honest(path, sync)
        with Path(path).open("ab") as file:
            file.write(b"more")
        return digest

    monkeypatch.setattr(manifests, "sha256", read_while_written)
    with pytest.raises(ManifestError, match="changed while it was read"):
        manifests.settle(str(model))
    assert manifests.load(str(model)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 2, "id": "", "files": {}}',
        '{"schema": 1, "id": "wrong", "files": {}}',
        '{"schema": 1, "id": "x", "files": {"../../etc/passwd": {"size": 1, "sha256": "", "mtime_ns": 1}}}',
        '{"schema": 1, "id": "x", "files": {"a": {"size": 1}}}',
    ],
)
def test_what_is_no_manifest(text):
    with pytest.raises(ValueError):
        Manifest.from_json(text)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\0b", ""])
def test_paths_out_of_the_model_are_refused(path):
    text = Manifest({path: manifests.Entry(1, "ab", 1)}).to_json()
    with pytest.raises(ValueError, match="leads out of the model"):
        Manifest.from_json(text)


def test_where_the_manifest_cannot_be_written(model, monkeypatch):
    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(manifests, "write_text", read_only)
    with pytest.raises(ManifestError, match=r"cannot write .*\.llmops-manifest\.json: Read-only file system"):
        manifests.settle(str(model))
