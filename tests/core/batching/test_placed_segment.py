"""Placed segments: masks and positions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.segment import PlacedSegment, SeqId


def test_a_row_of_a_chain_attends_to_the_rows_before_it() -> None:
    segment = PlacedSegment(SeqId(1), 5, (7, 8, 9), None, (2,))
    assert segment.mask().tolist() == np.tri(3, dtype=bool).tolist()
    assert segment.positions() == (5, 6, 7)


def test_a_row_of_a_tree_attends_to_its_path_at_the_position_of_its_depth() -> None:
    segment = PlacedSegment(SeqId(1), 5, (7, 8, 9, 6), (-1, 0, 0, 2), ())
    assert [np.flatnonzero(row).tolist() for row in segment.mask()] == [[0], [0, 1], [0, 2], [0, 2, 3]]
    assert segment.positions() == (5, 6, 6, 7)


def test_a_continued_tree_has_the_mask_and_positions_of_the_whole_tree() -> None:
    segment = PlacedSegment(SeqId(1), 8, (6, 5), (-1, 0, 0, 2, 1), ())  # rows 5 to 7 of the sequence are its open tree
    assert segment.num_open_rows == 3
    assert [np.flatnonzero(row).tolist() for row in segment.mask()] == [[0, 2, 3], [0, 1, 4]]
    assert segment.positions() == (7, 7)
    assert segment.tree_positions() == (5, 6, 6, 7, 7)


def test_chains_and_new_trees_have_no_open_rows() -> None:
    assert PlacedSegment(SeqId(1), 5, (7, 8), None, ()).num_open_rows == 0
    assert PlacedSegment(SeqId(1), 5, (7, 8), (-1, -1), ()).num_open_rows == 0


@given(st.data(), st.integers(0, 20))
def test_masks_and_positions_follow_from_paths_however_much_of_a_tree_is_open(data: st.DataObject, before: int) -> None:
    size = data.draw(st.integers(1, 12))
    parents = tuple(data.draw(st.integers(-1, i - 1)) for i in range(size))
    open_rows = data.draw(st.integers(0, size - 1))
    segment = PlacedSegment(SeqId(1), before + open_rows, tuple(range(size - open_rows)), parents, ())

    def path(row: int) -> set[int]:
        return set() if row < 0 else path(parents[row]) | {row}

    paths = [path(row) for row in range(size)]
    assert segment.num_open_rows == open_rows
    assert segment.mask().shape == (size - open_rows, size)
    assert [set(np.flatnonzero(row).tolist()) for row in segment.mask()] == paths[open_rows:]
    assert segment.tree_positions() == tuple(before + len(rows) - 1 for rows in paths)
    assert segment.positions() == segment.tree_positions()[open_rows:]
