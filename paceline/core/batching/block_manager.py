"""Allocation of KV blocks: block tables per sequence, reference counts, copy on write.

Knows block numbers only: the engine owns the memory and performs the copies. One block is `block_size` rows; a row's
slot is block * block_size + offset. Forks share every block, including a partly filled last one, until one of them
writes to it. After PagedAttention (Kwon et al. 2023).

A block may be registered under a name of its content (`BlockName`); sequences that begin with the same content adopt
it, and of a block that begins as they do they adopt a copy of those rows. A registered block that no sequence uses
stays until its memory is needed, or more than `max_unused` stay, the least recently used first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.segment import SeqId
from paceline.errors import EngineError

# KV blocks by their content: the block that holds these tokens after those, or the one that begins as they do.
#
# As in a radix tree (SGLang, Zheng et al. 2024) a prefix ends at any token, not at a border of blocks: blocks that
# begin alike are compared token by token.


TOKEN_BYTES = 4


class BlockName(NamedTuple):
    """Content of a block, full or not, and of all before it. Made by `BlockHasher`."""

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


SlotArray = NDArray[np.int64]


class OutOfBlocks(EngineError):
    """Not enough free blocks. Nothing has changed; the request may succeed once another sequence is released."""


class BlockCopy(NamedTuple):
    """Copy of the first `rows` rows of block `source` to block `target`, to perform before any other write."""

    source: int
    target: int
    rows: int


class Adopted(NamedTuple):
    """Rows with which a sequence begins, and the copies to perform first: one at most."""

    rows: int
    copies: tuple[BlockCopy, ...] = ()


class BlockManager:
    """Blocks 0..total-1 and the block tables of sequences.

    A sequence begins with its first `reserve`. Raises OutOfBlocks for lack of blocks and ValueError for invalid
    arguments (rows that were never reserved, a sequence that exists already); neither changes anything.
    """

    def __init__(self, total: int, block_size: int, max_unused: int | None = None) -> None:
        """max_unused: most registered blocks that stay without a sequence. Others are allocated again before a block
        that was never used, so memory that is committed at first use stays small. None: all stay."""
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and rows in them, got {total} blocks of {block_size} rows")
        self.total = total
        self.block_size = block_size
        self._max_unused = total if max_unused is None else max_unused
        self._free = list(range(total - 1, -1, -1))  # a stack: the lowest id is allocated first
        self._ref_counts = [0] * total  # sequences that share the block
        self._registry = BlockRegistry()
        self._unused: OrderedDict[int, None] = OrderedDict()  # registered, and no sequence's; least recent first
        self._tables: dict[SeqId, array[int]] = {}  # arrays, because numpy copies them as they are
        self._lengths: dict[SeqId, int] = {}

    def length(self, seq: SeqId) -> int:
        """Rows reserved; 0 for an unknown sequence."""
        return self._lengths.get(seq, 0)

    def block_array(self, seq: SeqId) -> SlotArray:
        """Block ids in row order; empty for an unknown sequence. A copy."""
        return np.array(self._tables.get(seq, array("q")), dtype=np.int64)

    def free_rows(self) -> int:
        """Rows in blocks that no sequence uses, without the unused rows in the last blocks of sequences."""
        return (len(self._free) + len(self._unused)) * self.block_size

    def num_cached(self, names: Sequence[BlockName]) -> int:
        """Rows that `adopt` would find, if a block is free where it needs one."""
        blocks, begun = self._find(names)
        return sum(name.rows for name in names[: len(blocks)]) + (begun[1] if begun is not None else 0)

    def adopt(self, seq: SeqId, names: Sequence[BlockName]) -> Adopted:
        """Begin `seq` with the registered blocks of these names, up to the first that is missing, and with the rows
        that the beginning of a registered block has in common with that one. With 0 rows it has not begun.

        names: of the blocks of a text, in their order; the last one may be of less than a block. A block of which only
        the beginning is wanted is copied, for which one free block is needed: without it those rows are left out.
        """
        if seq in self._tables:
            raise ValueError(f"sequence {seq} exists already")
        blocks, begun = self._find(names)
        for block in blocks:
            self._ref(block)
        rows = sum(name.rows for name in names[: len(blocks)])
        copies: tuple[BlockCopy, ...] = ()
        if begun is not None:
            block, common = begun
            self._ref(block)  # so that it is not evicted for its own copy
            if common == self._registry.rows(block):
                blocks.append(block)  # whoever writes to it first copies it, if it is shared by then
                rows += common
            else:
                if self._free or self._unused:
                    copies = (BlockCopy(block, self._allocate(), common),)
                    blocks.append(copies[0].target)
                    rows += common
                self._unref(block)
        if blocks:
            self._tables[seq], self._lengths[seq] = array("q", blocks), rows
        return Adopted(rows, copies)

    def register(self, seq: SeqId, place: int, name: BlockName) -> None:
        """Offer the block at this place of the table, as far as it is filled, under the name of its content.

        Ignored where another block has that content already. The rows must not change while they are reserved.
        """
        self._check_range(seq, place * self.block_size, place * self.block_size + name.rows)
        self._registry.add(self._tables[seq][place], name)

    def reserve(self, seq: SeqId, rows: int) -> list[BlockCopy]:
        """Allocate `rows` more rows and make them writable. Returns the copies to perform first: one at most."""
        if rows < 0:
            raise ValueError(f"cannot grow by {rows} rows")
        table, start = self._tables.get(seq) or array("q"), self.length(seq)
        grown = self._num_blocks(start + rows) - len(table)
        last = start // self.block_size
        fills_last = rows > 0 and last < len(table)
        is_shared = fills_last and self._ref_counts[table[last]] > 1
        free = len(self._free) + len(self._unused)
        if grown + is_shared > free:
            raise OutOfBlocks(f"{grown + is_shared} blocks are needed, {free} of {self.total} are free")
        copies: list[BlockCopy] = []
        if is_shared:
            source, target = table[last], self._allocate()
            table[last] = target
            self._unref(source)
            copies.append(BlockCopy(source, target, start % self.block_size))
        elif fills_last and table[last] in self._registry:
            self._registry.remove(table[last])  # its content is about to change
        table.extend(self._allocate() for _ in range(grown))
        self._tables[seq], self._lengths[seq] = table, start + rows
        return copies

    def truncate(self, seq: SeqId, length: int) -> None:
        """Drop the rows from `length` on; blocks without rows are freed unless another sequence shares them."""
        self._check_range(seq, length, self.length(seq))
        table = self._tables.get(seq, array("q"))
        while len(table) > self._num_blocks(length):
            self._unref(table.pop())
        if seq in self._lengths:
            self._lengths[seq] = length

    def release(self, seq: SeqId) -> None:
        """Free the sequence. Unknown ones are ignored."""
        for block in reversed(self._tables.pop(seq, array("q"))):  # so that the end of a cached prefix is evicted first
            self._unref(block)
        self._lengths.pop(seq, None)

    def slot_mapping(self, seq: SeqId, start: int, stop: int) -> SlotArray:
        """(stop - start,) slots of these rows. Valid until the sequence changes."""
        self._check_range(seq, start, stop)
        first = start // self.block_size
        if stop - start == 1:  # a step of an answer, of which a batch has many
            return np.array([self._tables[seq][first] * self.block_size + start % self.block_size], dtype=np.int64)
        table = np.array(self._tables.get(seq, array("q"))[first : self._num_blocks(stop)], dtype=np.int64)
        rows = np.arange(start, stop, dtype=np.int64)
        return np.asarray(table[rows // self.block_size - first] * self.block_size + rows % self.block_size)

    def check(self) -> None:
        ref_counts = [0] * self.total
        for table in self._tables.values():
            assert len(set(table)) == len(table), table
            for block in table:
                ref_counts[block] += 1
        assert ref_counts == self._ref_counts, (ref_counts, self._ref_counts)
        idle = [block for block in range(self.total) if ref_counts[block] == 0]
        assert sorted([*self._free, *self._unused]) == idle, (self._free, self._unused)
        self._registry.check(self.total)
        assert set(self._unused) == {block for block in idle if block in self._registry}, self._unused
        assert len(self._unused) <= self._max_unused, (self._unused, self._max_unused)
        assert self._tables.keys() == self._lengths.keys(), (self._tables, self._lengths)
        for seq, table in self._tables.items():
            assert len(table) == self._num_blocks(self._lengths[seq]), (seq, table, self._lengths[seq])

    def _find(self, names: Sequence[BlockName]) -> tuple[list[int], tuple[int, int] | None]:
        """The blocks of these names up to the first that is missing, and the block that begins as that one, with the
        rows they have in common."""
        blocks: list[int] = []
        for name in names:
            found = self._registry.find(name.content)
            if found is None:
                return blocks, self._registry.longest(name)
            blocks.append(found)
        return blocks, None

    def _num_blocks(self, rows: int) -> int:
        return -(-rows // self.block_size)

    def _check_range(self, seq: SeqId, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.length(seq):
            raise ValueError(f"rows {start}..{stop} of sequence {seq}, which has {self.length(seq)}")

    def _allocate(self) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._ref_counts[block] = 1
        return block

    def _evict(self) -> int:
        """The least recently used of the registered blocks without a sequence, which loses its name."""
        block, _ = self._unused.popitem(last=False)
        self._registry.remove(block)
        return block

    def _ref(self, block: int) -> None:
        self._ref_counts[block] += 1
        self._unused.pop(block, None)

    def _unref(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._registry:
                self._unused[block] = None
                if len(self._unused) > self._max_unused:
                    self._free.append(self._evict())
            else:
                self._free.append(block)


# Names of KV blocks by content, so that sequences that begin alike share them.
#
# A block is named by a chained hash: of the salt, of all tokens before it, and of its own. The salt is the owner of a
# request: blocks are shared within an owner alone, so that no timing reveals what somebody else has asked. After vLLM's
# automatic prefix caching.


HASH_BYTES = 16


class BlockHasher:
    """Names of the blocks of one sequence, which grows and is truncated."""

    def __init__(self, salt: str, block_size: int, tokens: Sequence[int] = ()) -> None:
        self._block_size = block_size
        self._root = hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"paceline prefix").digest()
        self._tokens: list[int] = []
        self.full: list[BlockName] = []  # names of the full blocks, 0, 1, …
        self.append(tokens)

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    @property
    def names(self) -> Sequence[BlockName]:
        """Those of the full blocks, then `rest`."""
        return [*self.full, *self.rest]

    @property
    def rest(self) -> Sequence[BlockName]:
        """Name of the last block if it is not full: one or none."""
        return [self._name(len(self.full))] if len(self._tokens) % self._block_size else []

    def append(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)
        while (len(self.full) + 1) * self._block_size <= len(self._tokens):
            self.full.append(self._name(len(self.full)))

    def truncate(self, length: int) -> None:
        del self._tokens[length:]
        del self.full[length // self._block_size :]

    def _name(self, place: int) -> BlockName:
        """Name of the block at this place, full or not. The block before it must be full."""
        begin = place * self._block_size
        tokens = np.asarray(self._tokens[begin : begin + self._block_size], dtype="<i4").tobytes()
        before = self.full[place - 1].content if place else self._root
        return BlockName(before, hashlib.blake2b(before + tokens, digest_size=HASH_BYTES).digest(), tokens)


# Keys and values of a sequence's first rows, outside any engine: exported by one, stored in a file, imported by
# another.
#
# Plain arrays, so that neither a store nor a test needs torch. Valid only for engines of the same model.


KvArray: TypeAlias = NDArray[np.generic]  # of a dtype in `CARRIERS`

# The model's dtype → that of the arrays. numpy has no bfloat16: its 16 bits are stored as an integer.
CARRIERS: dict[str, np.dtype[np.generic]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "int64": np.dtype("<i8"),
}


@dataclass(frozen=True, slots=True, eq=False)
class KvPrefix:
    """Rows 0 to n - 1 of a sequence, as after a prefill of `tokens`. Raises ValueError if shapes or dtypes disagree."""

    model: str  # fingerprint; each range of a model's layers has its own
    dtype: str  # the model's
    tokens: tuple[int, ...]  # (n,), n >= 1
    keys: KvArray  # (layers, n, kv heads, key dim)
    values: KvArray  # (layers, n, kv heads, value dim)

    def __post_init__(self) -> None:
        carrier = CARRIERS.get(self.dtype)
        for part in (self.keys, self.values):
            if part.dtype != carrier or part.ndim != 4 or part.shape[1] != len(self.tokens):
                raise ValueError(f"{part.dtype} {part.shape} for {len(self.tokens)} rows of {self.dtype}")
        if not self.tokens or self.keys.shape[0] != self.values.shape[0]:
            raise ValueError(f"{len(self.tokens)} rows, {self.keys.shape[0]} and {self.values.shape[0]} layers")

    @property
    def num_bytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def followed_by(self, other: KvPrefix, first: int, frequencies: Sequence[float]) -> KvPrefix:
        """These rows, and behind them those of the other from `first` on, as if they had been computed there. They were
        not: what they say depends on the rows that stood before them. The keys are turned to their new positions.

        frequencies: of the model's rotary embedding, as `turned`. Raises ValueError for rows of another model.
        """
        if (self.model, self.dtype) != (other.model, other.dtype):
            raise ValueError("these rows are of another model")
        keys = turned(other.keys[:, first:], self.dtype, len(self.tokens) - first, frequencies)
        return KvPrefix(
            self.model,
            self.dtype,
            self.tokens + other.tokens[first:],
            np.concatenate((self.keys, keys), axis=1),
            np.concatenate((self.values, other.values[:, first:]), axis=1),
        )


def turned(keys: KvArray, dtype: str, by: int, frequencies: Sequence[float]) -> KvArray:
    """Keys as they would be `by` positions later, rounded to their dtype.

    keys: (..., key dim), of which number i and number i + len(frequencies) are turned together (RoFormer, eq. 34, in
    halves). frequencies: radians a position, of at most half of the key dim.
    """
    half = len(frequencies)
    angles = by * np.asarray(frequencies, np.float64)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rows = as_floats(keys, dtype)
    first, second, rest = rows[..., :half], rows[..., half : 2 * half], rows[..., 2 * half :]
    found = np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1)
    if dtype != "bfloat16":
        return found.astype(keys.dtype)
    bits = found.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(keys.dtype)  # to the nearest, ties to even


def as_floats(part: KvArray, dtype: str) -> NDArray[np.float32]:
    """Keys or values of the model's dtype, as numbers."""
    return (part.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else part.astype(np.float32)
