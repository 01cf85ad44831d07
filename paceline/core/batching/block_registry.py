"""KV blocks by their content: the block that holds these tokens after those, or the one that begins as they do.

Knows neither sequences nor memory: see `block_manager`. As in a radix tree (SGLang, Zheng et al. 2024) a prefix ends at
any token, not at a border of blocks: blocks that begin alike are compared token by token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

TOKEN_BYTES = 4


class BlockName(NamedTuple):
    """Content of a block, full or not, and of all before it. Made by `prefix_cache.BlockHasher`."""

    before: bytes  # hash of the salt and of all blocks before it
    content: bytes  # hash of `before` and of its own tokens
    tokens: bytes  # int32, little-endian

    @property
    def rows(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def beginning(self) -> bytes:
        """Key of the blocks that share their first row: the hash before it, and its token."""
        return self.before + self.tokens[:TOKEN_BYTES]


class BlockRegistry:
    """Names of blocks. A block has one name at most, and no two blocks have the same."""

    def __init__(self) -> None:
        self._names: dict[int, BlockName] = {}
        self._by_content: dict[bytes, int] = {}
        self._alike: dict[bytes, dict[int, bytes]] = {}  # by `beginning`: blocks and their tokens

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def add(self, block: int, name: BlockName) -> None:
        """Ignored where the block has a name, or another block this one."""
        if name.content not in self._by_content and block not in self._names:
            self._names[block], self._by_content[name.content] = name, block
            self._alike.setdefault(name.beginning, {})[block] = name.tokens

    def remove(self, block: int) -> None:
        """Raises KeyError for a block without a name."""
        name = self._names.pop(block)
        del self._by_content[name.content]
        alike = self._alike[name.beginning]
        del alike[block]
        if not alike:
            del self._alike[name.beginning]

    def find(self, content: bytes) -> int | None:
        return self._by_content.get(content)

    def rows(self, block: int) -> int:
        """Rows that the name of the block covers."""
        return self._names[block].rows

    def longest(self, name: BlockName) -> tuple[int, int] | None:
        """The block after the same content with the most tokens in common from its first one on, and how many; None
        if none has one in common. A scan of those that have the first."""
        found = [
            (block, _num_common(tokens, name.tokens)) for block, tokens in self._alike.get(name.beginning, {}).items()
        ]
        return max(found, key=lambda each: each[1], default=None)

    def check(self, total: int) -> None:
        assert all(0 <= block < total for block in self._names), self._names
        assert {name.content: block for block, name in self._names.items()} == self._by_content
        assert self._alike == {
            beginning: {block: name.tokens for block, name in self._names.items() if name.beginning == beginning}
            for beginning in {name.beginning for name in self._names.values()}
        }


def _num_common(one: bytes, other: bytes) -> int:
    """Tokens that both begin with."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size // TOKEN_BYTES
    a, b = (np.frombuffer(each, "<i4", size // TOKEN_BYTES) for each in (one, other))
    return int(np.argmax(a != b))
