"""Names of KV blocks by content, so that sequences that begin alike share them.

A block is named by a chained hash: of the salt, of all tokens before it, and of its own. The salt is the owner of a
request: blocks are shared within an owner alone, so that no timing reveals what somebody else has asked. Knows neither
blocks nor memory: see `block_manager`. After vLLM's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from paceline.core.batching.block_registry import BlockName

HASH_BYTES = 16


class BlockHasher:
    """Names of the blocks of one sequence, which grows and is truncated."""

    def __init__(self, salt: str, block_size: int, tokens: Sequence[int] = ()) -> None:
        self._block_size = block_size
        self._root = hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"paceline prefix").digest()
        self._tokens: list[int] = []
        self._full: list[BlockName] = []
        self.append(tokens)

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    @property
    def full(self) -> Sequence[BlockName]:
        """Names of the full blocks, 0, 1, …"""
        return self._full

    @property
    def names(self) -> Sequence[BlockName]:
        """`full`, then `rest`."""
        return [*self._full, *self.rest]

    @property
    def rest(self) -> Sequence[BlockName]:
        """Name of the last block if it is not full: one or none."""
        return [self._name(len(self._full))] if len(self._tokens) % self._block_size else []

    def append(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)
        while (len(self._full) + 1) * self._block_size <= len(self._tokens):
            self._full.append(self._name(len(self._full)))

    def truncate(self, length: int) -> None:
        del self._tokens[length:]
        del self._full[length // self._block_size :]

    def fork(self) -> BlockHasher:
        copy = object.__new__(BlockHasher)
        copy._block_size, copy._root = self._block_size, self._root
        copy._tokens, copy._full = list(self._tokens), list(self._full)
        return copy

    def _name(self, place: int) -> BlockName:
        """Name of the block at this place, full or not. The block before it must be full."""
        begin = place * self._block_size
        tokens = np.asarray(self._tokens[begin : begin + self._block_size], dtype="<i4").tobytes()
        before = self._full[place - 1].content if place else self._root
        return BlockName(before, hashlib.blake2b(before + tokens, digest_size=HASH_BYTES).digest(), tokens)
