"""A tokenizer without a vocabulary: a token is four bytes of UTF-8, or one special token.

A prompt is one `bytes` object of four-byte tokens, so that token counts, slices and cache blocks are plain arithmetic.
Every message is padded to whole tokens by itself, as special tokens part messages in a real chat template: a conversation
that grows keeps the tokens it had, which is what the prefix cache lives on.
"""

from __future__ import annotations

import codecs
import hashlib

TOKEN_BYTES = 4
IMAGE_TOKENS = 256  # what one picture costs; the real number depends on its size

# 0xff never occurs in UTF-8, so special tokens cannot be written by a user.
IM_START, IM_END, THINK, END_THINK, TOOL_CALL, END_TOOL_CALL = (b"\xff\xff\x00" + bytes([n]) for n in range(6))
SPECIAL_TEXT = {
    THINK: "<think>",
    END_THINK: "</think>",
    TOOL_CALL: "<tool_call>",
    END_TOOL_CALL: "</tool_call>",
    IM_START: "",
    IM_END: "",
}

# Each is exactly one token, with its leading space: text made of them splits into the same tokens when it comes back
# as history.
WORDS = (
    "the and for are but not you all any can one our out day get has how new now old see two way who did its let put say "
    "too use air arm art ask bed big bit box bus buy car cut dry eat end eye far few fly fun hot ice job key kid law lot "
    "low map mix net oil own pay red run sea set sky son sun ten top try war win yes"
)
WORD_TOKENS = [f" {word}".encode() for word in WORDS.split()]


def encode(text: str) -> bytes:
    """Tokens of a piece of text, the last one padded with NULs."""
    raw = text.encode("utf-8", "surrogatepass")
    return raw + b"\0" * (-len(raw) % TOKEN_BYTES)


def count(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES


class Decoder:
    """Text of tokens that arrive one by one: a character split between two tokens comes out whole, with the second."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, tokens: bytes) -> str:
        text = []
        for at in range(0, len(tokens), TOKEN_BYTES):
            token = tokens[at : at + TOKEN_BYTES]
            special = SPECIAL_TEXT.get(token)
            text.append(self._utf8.decode(token.rstrip(b"\0")) if special is None else special)
        return "".join(text)


def encode_image(url: str) -> bytes:
    """Placeholder tokens of a picture; equal pictures give equal tokens, so they hit the prefix cache."""
    return hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=TOKEN_BYTES).digest() * IMAGE_TOKENS


def encode_message(role: str, pieces: list[bytes]) -> bytes:
    """One message of the ChatML template that Qwen models use."""
    return b"".join([IM_START, encode(f"{role}\n"), *pieces, IM_END])


def encode_answer_start() -> bytes:
    """What the template adds for the model to go on from (`add_generation_prompt`)."""
    return IM_START + encode("assistant\n")
