"""A model directory for real vLLM on CPU: a Qwen3 of four small layers, without weights.

vLLM's `--load-format dummy` makes the weights up, so what it says is noise in words; everything else, from the chat template to
the prefix cache, is the real thing. The tokenizer is a byte-level BPE, trained here on the licence of this project.
Formats: config.json of Qwen3ForCausalLM, and tokenizer.json of https://github.com/huggingface/tokenizers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from llmops_lab import host
from llmops_lab.settings import PROJECT

NAME = "qwen3-tiny"
CORPUS = PROJECT / "LICENSE"
MERGES = 1500
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def ensure() -> Path:
    """The model's directory, made if the cache does not have it."""
    recipe = [CONFIG, CHAT_TEMPLATE, MERGES, CORPUS.read_text()]
    return host.cached("model-tiny", recipe, write)


def write(directory: Path) -> None:
    """Writes config.json, generation_config.json, tokenizer.json and tokenizer_config.json into an existing directory."""
    merges = train(CORPUS.read_text(), MERGES)
    tokens = [*dict.fromkeys([*byte_symbols(), *(left + right for left, right in merges)]), *SPECIAL]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    end = {"eos_token_id": vocabulary["<|im_end|>"], "pad_token_id": vocabulary["<|endoftext|>"]}
    files = {
        "config.json": CONFIG | {"vocab_size": -(-len(vocabulary) // 64) * 64} | end,
        "generation_config.json": {"do_sample": True, "temperature": 0.7, **end},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG["max_position_embeddings"],
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
        },
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": vocabulary[token], "content": token, "special": True}
                | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                for token in SPECIAL
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {token: number for token, number in vocabulary.items() if token not in SPECIAL},
                "merges": [list(pair) for pair in merges],
            },
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def byte_symbols() -> list[str]:
    """A printable character for every byte, as GPT-2's byte-level BPE has it: itself where it is printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]


def train(text: str, count: int) -> list[tuple[str, str]]:
    """The `count` most frequent merges of a text, or fewer when every word is one token. Words carry the space before them."""
    symbols = byte_symbols()
    words = Counter(re.findall(r" ?[A-Za-z]+", text))
    pieces = {word: [symbols[byte] for byte in word.encode()] for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in pieces.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for word, parts in pieces.items():
            pieces[word] = _merge(parts, best)
    return merges


def _merge(parts: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for part in parts:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged
