"""What the programs of a tiled attention read, as integers: rows, columns, block tables and masks of trees.

A tile is a few query rows of one segment with all query heads that share a K/V head: `height` rows of a matrix product.
A tile whose columns are many is split into items of about as many columns each, so that a few long sequences occupy the
whole device; the parts of a row are combined afterwards. A chain needs no mask, only its rows' positions. A tree has
one bit for each of its own columns, rows that are open already included: the committed prefix is visible entirely. So
no mask grows with the context.

Pure: numpy alone. The plan of one batch serves all layers; a layer's sliding window is applied by the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.segment import PlacedSegment
from paceline.engine.paged.flat_batch import SegmentSlots

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
