"""What the simulated model says: a reply is made whole before its first token is timed.

A reply depends on the prompt and the sampling parameters alone, so at temperature 0 every instance gives the same answer
to the same question, and at other temperatures every `seed` gives its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import dataclass
from typing import Any

from simulated_vllm.tokens import (
    END_THINK,
    END_TOOL_CALL,
    IM_END,
    THINK,
    TOKEN_BYTES,
    TOOL_CALL,
    WORD_TOKENS,
    Decoder,
    count,
    encode,
)

SIGNATURE = encode("\n[end of a simulated answer]")


@dataclass(frozen=True)
class Part:
    """A run of tokens of one kind: "reasoning", "content", "tool", or "hidden" (in no field of the answer)."""

    kind: str
    tokens: bytes
    function: str | None = None  # of a tool call


@dataclass(frozen=True)
class Sampling:
    """The parameters of a request that decide about its reply."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reply:
    """Tokens in order, and why they end: "stop", "length" or "tool_calls"."""

    parts: list[Part]
    finish_reason: str
    stop_reason: str | None = None

    @property
    def tokens(self) -> bytes:
        return b"".join(part.tokens for part in self.parts)


def generator(prompt: bytes, sampling: Sampling) -> random.Random:
    digest = hashlib.blake2b(prompt, digest_size=16)
    if sampling.temperature > 0:
        seed = os.urandom(8).hex() if sampling.seed is None else str(sampling.seed)
        digest.update(f"{sampling.temperature} {seed}".encode())
    return random.Random(digest.digest())


def words(source: random.Random, number: int) -> bytes:
    return b"".join(source.choices(WORD_TOKENS, k=number))


def compose(
    prompt: bytes,
    sampling: Sampling,
    answer_tokens: int,
    thinks: bool = False,
    reasoning_apart: bool = False,
    call: tuple[str, str] | None = None,
    finish_with_call: str = "tool_calls",
) -> Reply:
    """The reply to a prompt.

    thinks: the model thinks before it answers; reasoning_apart: a parser tells thoughts from content.
    call: (function, arguments as JSON) of the tool call that is the answer.
    """
    source = generator(prompt, sampling)
    parts = []
    if thinks:
        marker = "hidden" if reasoning_apart else "content"
        thought = words(source, source.randint(answer_tokens // 4, answer_tokens // 2))
        parts += [
            Part(marker, THINK),
            Part("reasoning" if reasoning_apart else "content", thought),
            Part(marker, END_THINK),
        ]
    if call:
        function, arguments = call
        parts += [
            Part("hidden", TOOL_CALL + encode(f"{function}\n")),
            Part("tool", encode(arguments), function),
            Part("hidden", END_TOOL_CALL),
        ]
    else:
        answer = words(source, source.randint(answer_tokens // 2, answer_tokens))
        so_far = sum(count(part.tokens) for part in parts) + count(answer)
        wanted = sampling.max_tokens if sampling.ignore_eos else sampling.min_tokens
        answer += words(source, max(0, wanted - so_far))
        parts.append(Part("content", answer + SIGNATURE))
    parts.append(Part("hidden", IM_END))
    finish_reason, stop_reason = (finish_with_call if call else "stop"), None
    parts, stopped_at = _stop_at(parts, sampling)
    if stopped_at is not None:
        finish_reason, stop_reason = "stop", stopped_at
    parts, cut = _truncate(parts, sampling.max_tokens)
    return Reply(parts, "length", None) if cut else Reply(parts, finish_reason, stop_reason)


def _truncate(parts: list[Part], max_tokens: int) -> tuple[list[Part], bool]:
    """The first max_tokens tokens; true if that is not all."""
    kept, left = [], max_tokens * TOKEN_BYTES
    for part in parts:
        if len(part.tokens) > left:
            if left:
                kept.append(Part(part.kind, part.tokens[:left], part.function))
            return kept, True
        kept.append(part)
        left -= len(part.tokens)
    return kept, False


def _stop_at(parts: list[Part], sampling: Sampling) -> tuple[list[Part], str | None]:
    """Ends the content before the first stop string, as vLLM does without include_stop_str_in_output.

    The token in which the string ends is the last one generated; those that belong to the string are not shown.
    """
    kept: list[Part] = []
    for part in parts:
        text = Decoder().decode(part.tokens) if part.kind == "content" else ""
        found = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
        if found:
            at, stop = min(found)
            shown = encode(text[:at])
            hidden = count(encode(text[: at + len(stop)])) - count(shown)
            return [*kept, Part("content", shown), Part("hidden", encode(" ") * hidden)], stop
        kept.append(part)
    return kept, None


def tool_arguments(schema: dict[str, Any] | None, user_text: str) -> str:
    """Arguments that satisfy a function's JSON schema, as a JSON text: names from the user's words, else plain values."""
    name = next((word.strip(".,?!") for word in user_text.split()[1:] if word[:1].isupper()), "lab")
    return json.dumps(_value(schema or {"type": "object"}, name), ensure_ascii=False)


def _value(schema: dict[str, Any], name: str) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties", {})
        required = schema.get("required", list(properties))
        return {key: _value(properties.get(key, {}), name) for key in required}
    if kind == "array":
        return [_value(schema.get("items", {}), name)]
    return {"integer": 1, "number": 1.0, "boolean": True, "null": None}.get(kind, name)
