"""Segments and batches: logits rows, ids and invalid arguments; masks and positions of placed segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.segment import Batch, LogitsMode, PlacedSegment, Segment, SeqId


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
        (5, (1,), (-1, 0)),
        (5, (), (-1,)),
    ],
)
def test_an_invalid_segment_is_refused(start: int, tokens: tuple[int, ...], parents: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match=r"tokens|parent"):
        Segment(SeqId(1), start, tokens, parents)


@pytest.mark.parametrize("ids", [(1,), (3, 3), (4, 3), (-1, 2), (1, 2, 3)])
def test_ids_name_every_row_and_rise(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ids"):
        Segment(SeqId(1), 5, (1, 2), (-1, -1), "all", ids)


def test_parents_come_before_their_children_and_chains_have_no_ids() -> None:
    assert Segment(SeqId(1), 5, (1, 2), (3, 8), "all", (8, 9)).node_ids == (8, 9)
    with pytest.raises(ValueError, match="parent"):
        Segment(SeqId(1), 5, (1, 2), (8, 3), "all", (8, 9))
    with pytest.raises(ValueError, match="ids"):
        Segment(SeqId(1), 5, (1, 2), None, "all", (8, 9))


def test_a_batch_counts_its_rows_and_holds_a_sequence_once() -> None:
    one, two = Segment(SeqId(1), 0, (1, 2)), Segment(SeqId(2), 0, (1, 2, 3))
    assert Batch((one, two)).num_rows == 5
    with pytest.raises(ValueError, match="twice"):
        Batch((one, two, Segment(SeqId(1), 2, (1,))))


def test_a_row_of_a_chain_attends_to_the_rows_before_it() -> None:
    segment = PlacedSegment(SeqId(1), 5, (7, 8, 9), None, (2,))
    assert segment.mask().tolist() == np.tri(3, dtype=bool).tolist()
    assert segment.positions() == (5, 6, 7) and segment.num_open_rows == 0


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
