"""The KV cache as vLLM keeps it: blocks of tokens named by the hash of all that stands before them, freed blocks reused
in the order in which they were used last."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

from simulated_vllm.tokens import TOKEN_BYTES


def block_names(tokens: bytes, block_tokens: int, salt: str = "") -> Iterator[bytes]:
    """Names of the full blocks of a token sequence, in order; each depends on every token before its end."""
    name = hashlib.blake2b(salt.encode(), digest_size=8).digest()
    size = block_tokens * TOKEN_BYTES
    for at in range(0, len(tokens) - size + 1, size):
        name = hashlib.blake2b(tokens[at : at + size], key=name, digest_size=8).digest()
        yield name


class KVCache:
    """A bounded set of blocks. Blocks of running sequences are counted, not named; named blocks are what can be hit.

    A named block in use by a running sequence is pinned. Everything else is evicted oldest first when room is needed.
    """

    def __init__(self, blocks: int, block_tokens: int, prefix_caching: bool) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # named, unused; oldest first
        self._pins: dict[bytes, int] = {}  # named, in use: by how many sequences
        self._private = 0  # blocks reserved by running sequences that have no name yet

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

    @property
    def usage(self) -> float:
        """Share of the blocks that running sequences use, 0 to 1."""
        return (len(self._pins) + self._private) / self.blocks

    def open(self, prompt: bytes, output_tokens: int, salt: str) -> Sequence | None:
        """Reserves all that a sequence will need; None when there is no room now."""
        prompt_tokens = len(prompt) // TOKEN_BYTES
        names = list(block_names(prompt, self.block_tokens, salt)) if self.prefix_caching else []
        hits = []
        # The last prompt token is always computed, for the first output token comes out of it.
        for name in names[: (prompt_tokens - 1) // self.block_tokens]:
            if name not in self._idle and name not in self._pins:
                break
            hits.append(name)
        needed = -(-(prompt_tokens + output_tokens) // self.block_tokens) - len(hits)
        revived = sum(name in self._idle for name in hits)
        if len(self._pins) + revived + self._private + needed > self.blocks:
            return None
        for name in hits:
            self._pin(name)
        self._private += needed
        self._make_room()
        return Sequence(self, hits, needed, salt)

    def _pin(self, name: bytes) -> None:
        self._idle.pop(name, None)
        self._pins[name] = self._pins.get(name, 0) + 1

    def _unpin(self, name: bytes) -> None:
        self._pins[name] -= 1
        if not self._pins[name]:
            del self._pins[name]
            self._idle[name] = None

    def _make_room(self) -> None:
        while self._idle and len(self._idle) + len(self._pins) + self._private > self.blocks:
            self._idle.popitem(last=False)


class Sequence:
    """The blocks of one running sequence."""

    def __init__(self, cache: KVCache, hits: list[bytes], private: int, salt: str) -> None:
        self._cache = cache
        self._names = list(hits)
        self._private = private
        self._salt = salt
        self.cached_tokens = len(hits) * cache.block_tokens

    def computed(self, tokens: bytes) -> None:
        """The sequence's full blocks are now in the cache and others can hit them."""
        cache = self._cache
        if not cache.prefix_caching:
            return
        for name in list(block_names(tokens, cache.block_tokens, self._salt))[len(self._names) :]:
            cache._pin(name)
            cache._private -= 1
            self._private -= 1
            self._names.append(name)

    def close(self) -> None:
        """Gives all blocks back; the named ones stay to be hit until their room is needed."""
        self._cache._private -= self._private
        self._private = 0
        # The tail goes first, so that a shared beginning outlives it.
        for name in reversed(self._names):
            self._cache._unpin(name)
        self._names.clear()
