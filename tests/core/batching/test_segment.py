"""Segments and batches: logits rows, ids, and invalid arguments."""

from __future__ import annotations

import pytest

from paceline.core.batching.segment import Batch, LogitsMode, Segment, SeqId


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
