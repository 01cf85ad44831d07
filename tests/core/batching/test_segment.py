"""Segments and batches: masks, positions, logits rows, and invalid arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.segment import Batch, LogitsMode, Segment, SeqId


def test_a_row_of_a_chain_attends_to_the_rows_before_it() -> None:
    segment = Segment(SeqId(1), 5, (7, 8, 9))
    assert segment.mask().tolist() == np.tri(3, dtype=bool).tolist()
    assert segment.positions() == (5, 6, 7)


def test_a_row_of_a_tree_attends_to_its_path_at_the_position_of_its_depth() -> None:
    segment = Segment(SeqId(1), 5, (7, 8, 9, 6), (-1, 0, 0, 2), "all")
    assert [np.flatnonzero(row).tolist() for row in segment.mask()] == [[0], [0, 1], [0, 2], [0, 2, 3]]
    assert segment.positions() == (5, 6, 6, 7)


def test_a_continued_tree_has_the_mask_and_positions_of_the_whole_tree() -> None:
    segment = Segment(SeqId(1), 8, (6, 5), (-1, 0, 0, 2, 1), "all")  # rows 5 to 7 of the sequence are its open tree
    assert segment.num_open_rows == 3
    assert [np.flatnonzero(row).tolist() for row in segment.mask()] == [[0, 2, 3], [0, 1, 4]]
    assert segment.positions() == (7, 7)
    assert segment.tree_positions() == (5, 6, 6, 7, 7)
    assert segment.logits_rows() == (0, 1)


def test_chains_and_new_trees_have_no_open_rows() -> None:
    assert Segment(SeqId(1), 5, (7, 8)).num_open_rows == 0
    assert Segment(SeqId(1), 5, (7, 8), (-1, -1)).num_open_rows == 0


@given(st.data(), st.integers(0, 20))
def test_masks_and_positions_follow_from_paths_however_much_of_a_tree_is_open(data: st.DataObject, before: int) -> None:
    size = data.draw(st.integers(1, 12))
    parents = tuple(data.draw(st.integers(-1, i - 1)) for i in range(size))
    open_rows = data.draw(st.integers(0, size - 1))
    segment = Segment(SeqId(1), before + open_rows, tuple(range(size - open_rows)), parents)

    def path(row: int) -> set[int]:
        return set() if row < 0 else path(parents[row]) | {row}

    paths = [path(row) for row in range(size)]
    assert segment.num_open_rows == open_rows
    assert segment.mask().shape == (size - open_rows, size)
    assert [set(np.flatnonzero(row).tolist()) for row in segment.mask()] == paths[open_rows:]
    assert segment.tree_positions() == tuple(before + len(rows) - 1 for rows in paths)
    assert segment.positions() == segment.tree_positions()[open_rows:]


@pytest.mark.parametrize(
    ("logits", "rows"), [("all", (0, 1, 2)), ("last", (2,)), ("none", ()), (2, (1, 2)), (9, (0, 1, 2))]
)
def test_logits_rows(logits: LogitsMode, rows: tuple[int, ...]) -> None:
    assert Segment(SeqId(1), 0, (1, 2, 3), None, logits).logits_rows() == rows


@pytest.mark.parametrize(
    ("start", "tokens", "parents"),
    [
        (-1, (1,), None),
        (0, (), None),
        (0, (1, 2), (-1,)),
        (0, (1, 2), (-1, 1)),
        (0, (1,), (-2,)),
        (1, (1,), (-1, 0, 0)),  # two open rows where one is cached
        (5, (1,), (-1, 1)),
        (5, (1,), (0, -1)),
        (5, (), (-1,)),
    ],
)
def test_an_invalid_segment_is_refused(start: int, tokens: tuple[int, ...], parents: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match=r"tokens|parent"):
        Segment(SeqId(1), start, tokens, parents)


def test_a_batch_counts_its_rows_and_holds_a_sequence_once() -> None:
    one, two = Segment(SeqId(1), 0, (1, 2)), Segment(SeqId(2), 0, (1, 2, 3))
    assert Batch((one, two)).num_rows == 5
    with pytest.raises(ValueError, match="twice"):
        Batch((one, two, Segment(SeqId(1), 2, (1,))))
