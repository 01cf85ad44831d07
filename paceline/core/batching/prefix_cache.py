"""Names of KV blocks by content, so that sequences that begin alike share them.

A full block is named by a chained hash: of the salt, of all tokens before it, and of its own. The salt is the owner of
a request: blocks are shared within an owner alone, so that no timing reveals what somebody else has asked. Knows
neither blocks nor memory: see `block_manager`. After vLLM's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

HASH_BYTES = 16


class BlockHasher:
    """Hashes of the full blocks of one sequence, which grows and is truncated."""

    def __init__(self, salt: str, block_size: int, tokens: Sequence[int] = ()) -> None:
        self._block_size = block_size
        self._root = hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"paceline prefix").digest()
        self._tokens: list[int] = []
        self.hashes: list[bytes] = []  # of block 0, 1, …
        self.append(tokens)

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)
        size = self._block_size
        while (len(self.hashes) + 1) * size <= len(self._tokens):
            begin = len(self.hashes) * size
            content = np.asarray(self._tokens[begin : begin + size], dtype="<i4").tobytes()
            before = self.hashes[-1] if self.hashes else self._root
            self.hashes.append(hashlib.blake2b(before + content, digest_size=HASH_BYTES).digest())

    def truncate(self, length: int) -> None:
        del self._tokens[length:]
        del self.hashes[length // self._block_size :]

    def fork(self) -> BlockHasher:
        copy = object.__new__(BlockHasher)
        copy._block_size, copy._root = self._block_size, self._root
        copy._tokens, copy.hashes = list(self._tokens), list(self.hashes)
        return copy
