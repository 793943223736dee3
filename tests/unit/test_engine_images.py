"""The image builder's own parts: layers and layouts, and the tiny model's tokenizer."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "lab"))

from images import oci, tiny_model


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tool").write_text("#!/bin/sh\n")
    (root / "bin" / "tool").chmod(0o755)
    (root / "bin" / "alias").symlink_to("tool")
    (root / "doc").mkdir()
    (root / "doc" / "readme").write_text("unread")
    return root


def test_a_layer_is_named_by_what_is_in_it(tree, tmp_path):
    def fill(tar: tarfile.TarFile) -> None:
        oci.add_tree(tar, tree, "usr/", skip=lambda name: name.startswith("doc/"))
        oci.add_file(tar, "etc/hello", b"hello\n", 0o600)

    layer = oci.make_layer(tmp_path / "one.layer", fill)
    again = oci.make_layer(tmp_path / "two.layer", fill)
    assert (layer.digest, layer.diff_id) == (again.digest, again.diff_id)
    assert oci.Layer.load(tmp_path / "one.json") == layer
    blob = layer.path.read_bytes()
    assert (sha256(blob), len(blob)) == (layer.digest, layer.size)
    assert sha256(gzip.decompress(blob)) == layer.diff_id
    with tarfile.open(layer.path) as tar:
        entries = {entry.name: entry for entry in tar}
    assert set(entries) == {"usr/bin", "usr/bin/tool", "usr/bin/alias", "usr/doc", "etc/hello"}
    assert (entries["usr/bin/tool"].mode, entries["usr/bin/tool"].uid, entries["usr/bin/tool"].mtime) == (0o755, 0, 0)
    assert entries["usr/bin/alias"].linkname == "tool"


def test_a_layout_leads_from_the_tag_to_every_blob(tmp_path):
    layer = oci.make_layer(tmp_path / "a.layer", lambda tar: oci.add_file(tar, "a", b"a"))
    layout = tmp_path / "layout"
    oci.write_image(layout, [layer], ["A=1"], {"label": "value"}, ["vllm"], architecture="arm64")

    def blob(reference: dict) -> dict:
        data = (layout / "blobs" / reference["digest"].replace(":", "/")).read_bytes()
        assert (sha256(data), len(data)) == (reference["digest"], reference["size"])
        return json.loads(data)

    [reference] = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = blob(reference)
    config = blob(manifest["config"])
    assert config["architecture"] == "arm64"
    assert config["config"]["Labels"] == {"label": "value"}
    assert config["rootfs"]["diff_ids"] == [layer.diff_id]
    assert [entry["digest"] for entry in manifest["layers"]] == [layer.digest]
    assert (layout / "blobs" / layer.digest.replace(":", "/")).samefile(layer.path)


def test_merges_make_the_frequent_words_whole():
    merges = tiny_model.train("a cat and the other and the next, the last", 3)
    assert "".join(merges[-1]) == "Ġthe"
    assert len(tiny_model.train("the cat", 1000)) == len("the") - 1 + len(" cat") - 1


def test_every_byte_has_a_symbol():
    symbols = tiny_model.byte_symbols()
    assert len(set(symbols)) == 256
    assert (symbols[ord("a")], symbols[ord(" ")], symbols[0xAD]) == ("a", "Ġ", "Ń")


def test_the_tiny_model_s_files_agree(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_model, "MERGES", 30)
    tiny_model.write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    numbers = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    assert sorted(numbers) == list(range(256 + 30 + 3))
    assert config["vocab_size"] >= len(numbers)
    assert config["eos_token_id"] in numbers
