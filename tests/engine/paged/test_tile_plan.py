"""Plans of tiles: every row and column once, bounded sizes, masks no wider than the tree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.batching.segment import PlacedSegment, SeqId
from paceline.engine.paged.attention.tile_plan import (
    COLUMNS,
    Item,
    Split,
    TileShape,
    ancestors,
    most_items,
    most_slots,
    plan_tiles,
)
from paceline.engine.paged.kv_cache import SegmentSlots
from tests.engine.paged.attention_cases import Kind, case

KINDS: tuple[Kind, ...] = ("prompt", "decode", "chain", "tree", "part")
kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=12)
shapes = st.builds(
    TileShape, group=st.sampled_from([1, 4, 7, 24, 71]), spread=st.integers(1, 40), window=st.sampled_from([None, 50])
)


@settings(max_examples=60)
@given(kinds=kinds, shape=shapes, seed=st.integers(0, 99))
def test_every_row_reads_every_column_that_it_sees_once(kinds: list[Kind], shape: TileShape, seed: int) -> None:
    flat = case(kinds, seed, longest=700).flat
    plan = plan_tiles(flat.segments, flat.num_rows, shape)
    segment_of = {row: each for each in flat.segments for row in range(each.first, each.first + each.num_rows)}
    read: dict[int, list[tuple[int, int]]] = {row: [] for row in segment_of}
    parts: dict[int, list[int]] = {row: [] for row in segment_of}
    slots: set[int] = set()
    for height, items in zip(shape.heights, plan.items, strict=True):
        assert len(items) <= most_items(flat.num_rows, shape)
        for item in items.tolist():
            slots_of = segment_of[item[Item.ROW]]
            segment = slots_of.segment
            assert 0 < item[Item.NUM_ROWS] <= height // shape.group
            assert item[Item.BEGIN] % COLUMNS == 0
            table = plan.pool[item[Item.TABLE] : item[Item.TABLE] + len(slots_of.blocks)]
            assert np.array_equal(table, slots_of.blocks)
            for at in range(item[Item.NUM_ROWS]):
                row = item[Item.ROW] + at
                read[row].append((item[Item.BEGIN], item[Item.END]))
                assert flat.positions[row] >= item[Item.LEAST]
                seen = segment.attention_mask(None)[row - slots_of.first]
                assert seen[: item[Item.FULL]].all(), "columns before FULL need no mask"
                if item[Item.SLOT] >= 0:
                    parts[row].append(item[Item.SLOT] + at)
                    assert item[Item.SLOT] + at not in slots
                    slots.add(item[Item.SLOT] + at)
    for row, ranges in read.items():
        slots_of = segment_of[row]
        visible = np.flatnonzero(slots_of.segment.attention_mask(shape.window)[row - slots_of.first])
        ranges.sort()
        assert ranges[0][0] <= visible[0] and ranges[-1][1] > visible[-1]
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges))
        first, stride, count = plan.splits[row]
        assert sorted(parts[row]) == [first + stride * part for part in range(count)]
        assert plan.splits[row, Split.COUNT] != 1
    assert len(slots) == plan.num_slots <= most_slots(flat.num_rows, shape)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=70), st.data())
def test_a_mask_has_a_bit_for_each_column_of_the_tree_only(draws: list[int], data: st.DataObject) -> None:
    parents = tuple(draw % (row + 1) - 1 for row, draw in enumerate(draws))
    new = data.draw(st.integers(1, len(parents)))
    segment = PlacedSegment(SeqId(0), 5000 + len(parents) - new, (1,) * new, parents, ())
    words = ancestors(segment)
    assert words.shape == (new, -(-len(parents) // 32)), "whatever the context is"
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : len(parents)]
    assert np.array_equal(bits.astype(bool), segment.mask())


def test_one_long_sequence_occupies_the_device_and_many_are_not_split() -> None:
    shape = TileShape(group=7, spread=132)
    alone = SegmentSlots(PlacedSegment(SeqId(0), 8000, (1,), None, (0,)), 0, np.arange(501))
    long = plan_tiles([alone], 1, shape)
    assert 100 < len(long.items[0]) <= 132
    many = plan_tiles(case(["decode"] * 200, 1).flat.segments, 200, shape)
    assert len(many.items[0]) < 240


def test_the_plan_of_a_step_does_not_grow_with_rows_times_columns() -> None:
    """64 trees of 8 rows behind 8,000 rows each: 64 x 8 x 8,000 cells of a mask, had it any."""
    parents = (-1, 0, 0, 1, 1, 2, 2, 3)
    placed = [PlacedSegment(SeqId(seq), 8000, (1,) * 8, parents, ()) for seq in range(64)]
    trees = [SegmentSlots(each, 8 * each.seq, np.arange(501)) for each in placed]
    plan = plan_tiles(trees, 512, TileShape(group=7, spread=132))
    assert plan.pool.size == 64 * (501 + 8 + 8), "block tables, a word a row, a position a column"


@pytest.mark.parametrize("group", [1, 7, 16, 17, 64, 71])
def test_a_tile_holds_all_query_heads_of_a_row(group: int) -> None:
    shape = TileShape(group=group, spread=8)
    assert all(shape.rows(height) >= 1 and height >= 16 and height & (height - 1) == 0 for height in shape.heights)
    assert len(set(shape.heights)) == len(shape.heights)
