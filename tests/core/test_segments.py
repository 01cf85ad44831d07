"""Segments and batches: masks, positions and wanted rows, and what is no segment."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.segments import Batch, Segment, SeqId, Wanted


def test_a_chain_sees_what_came_before_it() -> None:
    segment = Segment(SeqId(1), 5, (7, 8, 9))
    assert segment.mask().tolist() == np.tri(3, dtype=bool).tolist()
    assert segment.positions() == (5, 6, 7)


def test_a_tree_row_sees_its_path_and_stands_at_its_depth() -> None:
    segment = Segment(SeqId(1), 5, (7, 8, 9, 6), (-1, 0, 0, 2), "all")
    assert [np.flatnonzero(row).tolist() for row in segment.mask()] == [[0], [0, 1], [0, 2], [0, 2, 3]]
    assert segment.positions() == (5, 6, 6, 7)


@pytest.mark.parametrize(("logits", "rows"), [("all", (0, 1, 2)), ("last", (2,)), ("none", ())])
def test_the_rows_asked_for(logits: Wanted, rows: tuple[int, ...]) -> None:
    assert Segment(SeqId(1), 0, (1, 2, 3), None, logits).wanted() == rows


@pytest.mark.parametrize(
    ("start", "tokens", "parents"),
    [(-1, (1,), None), (0, (), None), (0, (1, 2), (-1,)), (0, (1, 2), (-1, 1)), (0, (1,), (-2,))],
)
def test_what_is_no_segment_is_refused(start: int, tokens: tuple[int, ...], parents: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match=r"tokens|parent"):
        Segment(SeqId(1), start, tokens, parents)


def test_a_batch_counts_its_rows_and_holds_a_sequence_once() -> None:
    one, two = Segment(SeqId(1), 0, (1, 2)), Segment(SeqId(2), 0, (1, 2, 3))
    assert Batch((one, two)).num_rows == 5
    with pytest.raises(ValueError, match="twice"):
        Batch((one, two, Segment(SeqId(1), 2, (1,))))
