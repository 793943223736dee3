"""Models that a machine of a lab is delivered with, and the one for the simulated engine: Qwen3.8-27B-W8A8, in small.

Shards are valid safetensors (https://huggingface.co/docs/safetensors: 8 bytes of header length, a JSON header, the data) of
pseudo-random bytes: they do not compress, and copies can be compared. The simulated engine never computes with them.
"""
from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path

from . import host

NAME = "Qwen3.8-27B-W8A8"
PATH_IN_MACHINE = "data/models"

SHARDS = 4
SHARD_BYTES = 8 << 20

CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "vocab_size": 248320,
    "torch_dtype": "bfloat16",
}


def order(directory: Path, name: str, source: Path) -> None:
    """Note in a machine's directory that the machine is delivered with a model; deliver() does it, once per life of its disks."""
    link = directory / "models" / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(source)


def deliver(directory: Path, root: Path) -> None:
    """Copy the ordered models into a machine's root file system, but none a second time: it may have been removed on purpose."""
    for link in (directory / "models").glob("*"):
        mark, target = directory / "delivered" / link.name, root / PATH_IN_MACHINE / link.name
        if not mark.exists():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(link.resolve(), target)
            mark.parent.mkdir(exist_ok=True)
            mark.touch()


def ensure() -> Path:
    """Return the model's directory, written where it is not in the cache (32 MB)."""
    return host.cached("model", [NAME, SHARDS, SHARD_BYTES, CONFIG], _write)


def _write(directory: Path) -> None:
    tokenizer = {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 262144}
    weights = {}
    for number in range(1, SHARDS + 1):
        shard, tensor = f"quant_model_weights-{number:05}-of-{SHARDS:05}.safetensors", f"model.layers.{number - 1}.mlp.weight"
        (directory / shard).write_bytes(_safetensors(tensor, random.Random(number).randbytes(SHARD_BYTES)))
        weights[tensor] = shard
    for name, content in {
        "config.json": CONFIG,
        "generation_config.json": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
        "quant_model_description.json": {"model_quant_type": "W8A8", **dict.fromkeys(weights, "W8A8")},
        "quant_model_weights.safetensors.index.json": {"metadata": {"total_size": SHARDS * SHARD_BYTES}, "weight_map": weights},
        "tokenizer.json": {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}},
        "tokenizer_config.json": tokenizer,
    }.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def _safetensors(tensor: str, data: bytes) -> bytes:
    """A safetensors file of one tensor of 8-bit integers."""
    header = json.dumps({tensor: {"dtype": "I8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data
