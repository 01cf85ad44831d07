"""What the programs of a tiled attention read, as integers: rows, columns, block tables and masks of trees.

A tile is a few query rows of one segment with all query heads that share a K/V head: `height` rows of a matrix product.
A tile whose columns are many is split into items of about as many columns each, so that a few long sequences occupy the
whole device; the parts of a row are combined afterwards. A chain needs no mask, only its rows' positions. A tree has
one bit for each of its own columns, rows that are open already included: the committed prefix is visible entirely. So
no mask grows with the context.

The plan is numpy alone. That of one batch serves all layers; a layer's sliding window is applied by the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.batching.segment import PlacedSegment
from paceline.engine.paged.kv_cache import FlatBatch, KvStorage, SegmentSlots

Ints = NDArray[np.int32]

COLUMNS = 64  # items begin at multiples of it; a multiple of what a kernel reads at a time
WORD = 32  # bits of a mask's word
_LOW, _HIGH = 16, 64  # matrix products have at least 16 rows; 64 serve a prompt or a tree of eight with one read


class Item(IntEnum):
    """Fields of an item. Offsets are into `TilePlan.pool`."""

    ROW = 0  # the tile's first row in the flat row
    NUM_ROWS = 1  # 0: padding, nothing to do
    TABLE = 2  # offset of the block table
    BEGIN = 3  # first column
    END = 4  # last column + 1
    FULL = 5  # columns before this one are visible to every row, but for a window
    OWN = 6  # first column of the tree
    MASK = 7  # offset of the mask of the tile's first row
    WORDS = 8  # words of a row's mask; 0: a chain
    POSITIONS = 9  # offset of the positions of the tree's columns
    SLOT = 10  # slot of the first row's partial result; -1: the item is the whole tile
    LEAST = 11  # the least position of the tile's rows


class Split(IntEnum):
    """Fields of a row's partial results."""

    FIRST = 0  # slot
    STRIDE = 1  # slots from one part to the next
    COUNT = 2  # 0: the row is in one part, which is in place


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a plan needs to know of a model and a device."""

    group: int  # query heads of each K/V head
    spread: int  # items that occupy the device, all K/V heads counted as one
    window: int | None = None  # the longest of all layers; None: one has no window

    @property
    def heights(self) -> tuple[int, ...]:
        """Rows of a low tile, for single rows, and of a high one."""
        least = 1 << (self.group - 1).bit_length()
        return (max(_LOW, least),) if least >= _HIGH else (max(_LOW, least), max(_HIGH, least))

    def rows(self, height: int) -> int:
        """Query rows of a tile."""
        return height // self.group


@dataclass(frozen=True, slots=True)
class TilePlan:
    items: tuple[Ints, ...]  # (items, fields of Item) of each height
    splits: Ints  # (rows, fields of Split)
    num_slots: int  # partial results
    pool: Ints  # block tables, masks and positions, one after the other


def plan_tiles(segments: Sequence[SegmentSlots], num_rows: int, shape: TileShape) -> TilePlan:
    """Every row of the flat row is in one tile."""
    pool = _Pool()
    low = shape.rows(shape.heights[0])
    tiles = [_Tiles(), _Tiles()]
    for slots in segments:
        is_high = len(shape.heights) > 1 and slots.num_rows > low
        tiles[is_high].add(slots, pool, shape.rows(shape.heights[is_high]))
    made = [each.made() for each in tiles[: len(shape.heights)]]
    chunk = _columns_per_item(made, shape)
    splits = np.zeros((num_rows, len(Split)), dtype=np.int32)
    num_slots = 0
    items: list[Ints] = []
    for each in made:
        found, num_slots = _split(each, chunk, splits, num_slots, shape.window)
        items.append(found)
    return TilePlan(tuple(items), splits, num_slots, pool.made())


def most_items(num_rows: int, shape: TileShape) -> int:
    """Upper bound of the items of one height for so many rows."""
    return num_rows + shape.spread


def most_slots(num_rows: int, shape: TileShape) -> int:
    """Upper bound of the partial results for so many rows: a part beyond a tile's first has a tile's rows."""
    return num_rows + shape.spread * shape.rows(shape.heights[-1])


def ancestors(segment: PlacedSegment) -> Ints:
    """(n, words): bit j of row i is set if it attends to row j of the tree. A chain has no words."""
    if segment.parents is None:
        return np.zeros((len(segment.tokens), 0), dtype=np.int32)
    seen: list[int] = []
    for row, parent in enumerate(segment.parents):
        seen.append(1 << row if parent < 0 else seen[parent] | 1 << row)
    words = -(-len(seen) // WORD)
    rows = b"".join(each.to_bytes(words * WORD // 8, "little") for each in seen[segment.num_open_rows :])
    return np.frombuffer(rows, dtype="<i4").reshape(-1, words).astype(np.int32)


class _Pool:
    """Arrays one after the other."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.integer]] = []
        self._size = 0

    def add(self, part: NDArray[np.integer]) -> int:
        """Returns its offset."""
        first = self._size
        self._parts.append(part)
        self._size += len(part)
        return first

    def made(self) -> Ints:
        found = np.empty(self._size, dtype=np.int32)
        if self._parts:
            np.concatenate(self._parts, out=found, casting="same_kind")
        return found


class _Tiles:
    """Tiles of one height. Segments of one tile, the most frequent ones, cost a tuple each."""

    def __init__(self) -> None:
        self._parts: list[Ints] = []
        self._single: list[tuple[int, ...]] = []

    def add(self, slots: SegmentSlots, pool: _Pool, rows: int) -> None:
        """rows: of a tile"""
        segment, n = slots.segment, slots.num_rows
        table = pool.add(slots.blocks)
        own = segment.start - segment.num_open_rows  # the committed rows
        mask = words = places = 0
        if segment.parents is not None:
            bits = ancestors(segment)
            words = bits.shape[1]
            mask = pool.add(bits.ravel())
            places = pool.add(np.array(segment.tree_positions(), dtype=np.int32))
        if n <= rows:
            end = segment.start + n
            full, least = (own, own) if words else (segment.start + 1, segment.start)
            self._single.append((slots.first, n, table, 0, end, full, own, mask, words, places, -1, least))
            return
        at = np.arange(0, n, rows, dtype=np.int32)  # the first row of each tile in the segment
        tile = np.empty((len(at), len(Item)), dtype=np.int32)
        tile[:, Item.ROW] = slots.first + at
        tile[:, Item.NUM_ROWS] = np.minimum(rows, n - at)
        tile[:, Item.TABLE] = table
        tile[:, Item.BEGIN] = 0
        tile[:, Item.END] = segment.start + at + tile[:, Item.NUM_ROWS]
        tile[:, Item.FULL] = own if words else segment.start + at + 1
        tile[:, Item.OWN] = own
        tile[:, Item.MASK] = mask + at * words
        tile[:, Item.WORDS] = words
        tile[:, Item.POSITIONS] = places
        tile[:, Item.SLOT] = -1
        tile[:, Item.LEAST] = own if words else segment.start + at
        self._parts.append(tile)

    def made(self) -> Ints:
        single = np.array(self._single, dtype=np.int32).reshape(-1, len(Item))
        return np.concatenate([single, *self._parts]) if self._parts else single


def _begins(tiles: Ints, window: int | None) -> NDArray[np.int32]:
    """The first column that any layer reads."""
    if window is None:
        return tiles[:, Item.BEGIN]
    return np.maximum(tiles[:, Item.LEAST] - window + 1, 0) // COLUMNS * COLUMNS


def _columns_per_item(tiles: Sequence[Ints], shape: TileShape) -> int:
    """Columns above which a tile is split, so that there are about `spread` items, and never more than that beyond
    the tiles themselves. Where tiles are many already, only the longest are split."""
    count = sum(map(len, tiles))
    more = max(shape.spread - count, shape.spread // 4, 1)
    total = sum(int((each[:, Item.END] - _begins(each, shape.window)).sum()) for each in tiles)
    return max(COLUMNS, -(-total // more))


def _split(tiles: Ints, chunk: int, splits: Ints, num_slots: int, window: int | None) -> tuple[Ints, int]:
    """Items of these tiles, of at most `chunk` columns rounded up; fills the rows' `splits`. Returns the slots too."""
    begin, end = _begins(tiles, window), tiles[:, Item.END]
    counts = np.maximum(-(-(end - begin) // chunk), 1)
    if not len(tiles) or counts.max() == 1:
        tiles[:, Item.BEGIN] = begin
        return tiles, num_slots
    columns = -(-(end - begin) // (counts * COLUMNS)) * COLUMNS  # of each part
    counts = np.maximum(-(-(end - begin) // columns), 1)  # rounding may have left a part without columns
    parted = counts > 1
    rows = tiles[:, Item.NUM_ROWS]
    slots = np.where(parted, counts * rows, 0)
    first = num_slots + np.cumsum(slots) - slots  # slot of each tile
    items = np.repeat(tiles, counts, axis=0)
    part = np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)
    items[:, Item.BEGIN] = np.repeat(begin, counts) + part * np.repeat(columns, counts)
    items[:, Item.END] = np.minimum(items[:, Item.END], items[:, Item.BEGIN] + np.repeat(columns, counts))
    items[:, Item.SLOT] = np.where(
        np.repeat(parted, counts), np.repeat(first, counts) + part * np.repeat(rows, counts), -1
    )
    which = np.flatnonzero(parted)
    taken = rows[which]
    within = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    at = np.repeat(tiles[which, Item.ROW], taken) + within
    splits[at, Split.FIRST] = np.repeat(first[which], taken) + within
    splits[at, Split.STRIDE] = np.repeat(taken, taken)
    splits[at, Split.COUNT] = np.repeat(counts[which], taken)
    return items, num_slots + int(slots.sum())


# The seam between transformers' models and our attention over the paged KV cache.
#
# transformers calls `attention` by name (`AttentionInterface.register`) with the metadata of the running forward, which
# store the rows' K and V and attend: `gathered` or `tiled`, as `backends` chooses. Knows nothing of models. Attention
# sinks are not handled: they raise.


NAME = "paceline"  # registered with transformers, for `config._attn_implementation`


class Attending(Protocol):
    """Argument `attn_metadata` of `attention`. Valid for one forward."""

    rotary: tuple[Tensor, Tensor] | None  # set by the first fused layer, read by the others

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: LayerAttention) -> Tensor:
        """Store K and V of the batch's rows, then attend.

        query: (rows, heads, dim); key, value: (rows, kv heads, dim). Returns (rows, heads, value dim).
        """


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention parameters of one layer."""

    scale: float
    window: int | None = None  # positions a row attends to, its own included
    softcap: float | None = None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attn_metadata: Attending,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query: (1, heads, rows, dim); key, value: (1, kv heads, rows, dim).

    `attention_mask` is None: transformers makes no mask for a name without a registered mask function.
    """
    if attention_mask is not None or s_aux is not None or position_bias is not None:
        raise NotImplementedError("masks, attention sinks and position biases of a model's own are not handled")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)
    params = LayerAttention(scale, sliding_window, softcap)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attn_metadata.attend(layer, query, key, value, params)[None], None


# Host memory from which the integers of a step reach the device in one copy.
#
# On a GPU the memory is pinned and the copy asynchronous: a buffer is filled again only after its copy has ended, and
# there are two, so nothing waits. On a CPU the same calls copy at once.


Bytes = NDArray[np.uint8]

_BUFFERS = 2
_LEAST = 1 << 16  # bytes


class Staging:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * _BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._current = 0

    def buffer(self, size: int) -> Bytes:
        """Memory of `size` bytes to fill; its contents are those of an earlier step. Ends with `send`."""
        self._current = (self._current + 1) % _BUFFERS
        copied = self._copied[self._current]
        if copied is not None:
            copied.synchronize()
        if len(self._buffers[self._current]) < size:
            grown = max(_LEAST, size + size // 2)
            self._buffers[self._current] = torch.empty(grown, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        filled: Bytes = self._buffers[self._current][:size].numpy()
        return filled

    def send(self, size: int, into: Tensor | None = None) -> Tensor:
        """The buffer's first bytes on the device, in fresh memory or at the beginning of `into`."""
        if into is None:
            into = torch.empty(size, dtype=torch.uint8, device=self.device)
        into[:size].copy_(self._buffers[self._current][:size], non_blocking=True)
        if self._pinned:
            event = self._copied[self._current] or torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            event.record()
            self._copied[self._current] = event
        return into


# All integers of a step in one buffer, at places that depend on the step's shape alone.
#
# A step as it is has a shape of its own; steps that a graph replays are padded to a few shapes, so that every kernel
# finds its numbers at the same addresses. Padding rows are token 0 at position 0, store their K and V in the spare
# block, and belong to no tile.


_LONG, _INT = 8, 4  # bytes
_ALIGNED = 16  # bytes: Triton compiles kernels anew for pointers that are not
_WIDTH = len(Item)


@dataclass(frozen=True, slots=True)
class StepShape:
    rows: int
    wanted: int
    items: tuple[int, ...]  # of each height of tile
    num_slots: int
    is_padded: bool = False

    @classmethod
    def of(cls, flat: FlatBatch, plan: TilePlan) -> StepShape:
        """The step as it is."""
        return cls(flat.num_rows, len(flat.logits_rows), tuple(map(len, plan.items)), plan.num_slots)

    @classmethod
    def padded(cls, rows: int, plan: TilePlan, tiles: TileShape) -> StepShape:
        """For any step of at most `rows` rows with tiles of the same heights: all rows are scored."""
        items = tuple(most_items(rows, tiles) if len(each) else 0 for each in plan.items)
        return cls(rows, rows, items, most_slots(rows, tiles), is_padded=True)

    def sizes(self) -> list[int]:
        """Bytes of tokens, positions, slots, rows to score, the items of each height, and splits."""
        longs = [self.rows * _LONG] * 3 + [self.wanted * _LONG]
        return longs + [count * _WIDTH * _INT for count in self.items] + [self.rows * len(Split) * _INT]

    def offsets(self) -> list[int]:
        """Bytes before each of `sizes`, and before the pool."""
        return [0, *accumulate(-(-size // _ALIGNED) * _ALIGNED for size in self.sizes())]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Views of a step's buffer on the device."""

    tokens: Tensor  # (1, rows) int64, as are the next three
    positions: Tensor  # (1, rows)
    slots: Tensor  # (rows,)
    logits_rows: Tensor  # (wanted,)
    items: tuple[Tensor, ...]  # (items, fields) int32 of each height, as are the next two
    splits: Tensor  # (rows, fields)
    pool: Tensor
    num_slots: int
    is_padded: bool


def size_of(shape: StepShape, pool: int) -> int:
    """Bytes of a step whose pool has so many integers."""
    return shape.offsets()[-1] + pool * _INT


def fill(buffer: Bytes, shape: StepShape, flat: FlatBatch, plan: TilePlan, spare_slot: int) -> None:
    """Write a step, padded to the shape. buffer: `size_of` bytes"""
    *places, pool = shape.offsets()
    rows = (flat.tokens, 0), (flat.positions, 0), (flat.slots, spare_slot), (flat.logits_rows, 0)
    for (values, padding), at, stop in zip(rows, places, places[1:], strict=False):
        into: NDArray[np.int64] = buffer[at:stop].view(np.int64)
        into[: len(values)] = values
        into[len(values) :] = padding
    for values_of, at, stop in zip((*plan.items, plan.splits), places[4:], [*places[5:], pool], strict=True):
        ints: NDArray[np.int32] = buffer[at:stop].view(np.int32)
        ints[: values_of.size] = values_of.ravel()
        ints[values_of.size :] = 0
    buffer[pool:].view(np.int32)[:] = plan.pool


def views(buffer: Tensor, shape: StepShape) -> StepTensors:
    """The step's tensors in a buffer on the device, of which the pool is all that is left."""
    *places, pool = shape.offsets()
    parts = [buffer[at : at + size] for at, size in zip(places, shape.sizes(), strict=True)]
    longs, ints = [part.view(torch.int64) for part in parts[:4]], [part.view(torch.int32) for part in parts[4:]]
    return StepTensors(
        tokens=longs[0][None],
        positions=longs[1][None],
        slots=longs[2],
        logits_rows=longs[3],
        items=tuple(each.view(-1, _WIDTH) for each in ints[:-1]),
        splits=ints[-1].view(-1, len(Split)),
        pool=buffer[pool : len(buffer) // _INT * _INT].view(torch.int32),
        num_slots=shape.num_slots,
        is_padded=shape.is_padded,
    )


# Attention by kernels that read K and V through the block tables, without gathering them or building masks of rows
# and columns.
#
# One launch for each height of tile, and one that combines the parts of split tiles. The kernels are Triton's on a
# GPU.


@dataclass(frozen=True, slots=True)
class Operands:
    """Tensors of one attention call."""

    query: Tensor  # (rows, heads, key dim)
    keys: Tensor  # (slots, kv heads, key dim)
    values: Tensor  # (slots, kv heads, value dim)
    output: Tensor  # (rows, heads, value dim)
    partial: Tensor  # (slots, heads, value dim) float32: softmax-weighted means of parts
    norms: Tensor  # (slots, heads) float32: base-2 logarithms of the parts' sums of exponentials
    block_size: int


class Kernels(Protocol):
    @property
    def name(self) -> str: ...

    def attend(self, operands: Operands, step: StepTensors, items: Tensor, height: int, params: LayerAttention) -> None:
        """Write the output of the items' rows, or their parts. height: rows of a tile, query heads of a K/V head
        counted one by one."""

    def combine(self, operands: Operands, step: StepTensors) -> None:
        """Write the output of rows whose parts were written."""


class TiledAttention:
    """Attention of one step. The step's shape decides what is launched, not its contents: a graph may replay it."""

    def __init__(self, storage: KvStorage, kernels: Kernels, heights: tuple[int, ...], step: StepTensors) -> None:
        self.storage, self.kernels, self.step = storage, kernels, step
        self._heights = heights
        self.rotary: tuple[Tensor, Tensor] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: LayerAttention) -> Tensor:
        step = self.step
        keys, values = self.storage.by_layer[layer]
        keys.index_copy_(0, step.slots, key)
        values.index_copy_(0, step.slots, value)
        shape = (*query.shape[:2], value.shape[-1])
        # Padding rows belong to no tile; what they hold must be finite for models whose rows meet later.
        output = query.new_zeros(shape) if step.is_padded else query.new_empty(shape)
        partial = query.new_empty((step.num_slots, *shape[1:]), dtype=torch.float32)
        norms = query.new_empty((step.num_slots, shape[1]), dtype=torch.float32)
        operands = Operands(query, keys, values, output, partial, norms, self.storage.block_size)
        for items, height in zip(step.items, self._heights, strict=True):
            if len(items):
                self.kernels.attend(operands, step, items, height, params)
        if step.num_slots:
            self.kernels.combine(operands, step)
        return output
