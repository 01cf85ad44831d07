"""What the engine tests share: scoring from scratch, and random prompts and trees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from hypothesis import strategies as st

from paceline.core.dist import Dist, total_variation
from paceline.core.segments import Batch, Segment, SeqId
from paceline.engine.contract import Engine

TOLERANCE = 2e-4  # total variation: float32 sums in another order

_ids = itertools.count(1_000_000)


@contextmanager
def sequences(engine: Engine, count: int = 1) -> Iterator[list[SeqId]]:
    """Fresh sequences; afterwards they are released and the engine must hold what it held before."""
    free = engine.free_rows()
    seqs = [SeqId(next(_ids)) for _ in range(count)]
    try:
        yield seqs
    finally:
        for seq in seqs:
            engine.release(seq)
    engine.check()
    assert engine.free_rows() == free


def extend(
    engine: Engine, seq: SeqId, tokens: Sequence[int], *, parents: Sequence[int] | None = None
) -> tuple[Dist, ...]:
    """Append to one sequence, all rows wanted."""
    tree = None if parents is None else tuple(parents)
    segment = Segment(seq, engine.length(seq), tuple(tokens), parents=tree, logits="all")
    return engine.forward(Batch((segment,))).dists[0]


def scratch(engine: Engine, tokens: Sequence[int]) -> tuple[Dist, ...]:
    """The distribution after each token, in one prefill of a fresh sequence."""
    with sequences(engine) as (seq,):
        return extend(engine, seq, tokens)


def assert_same(found: Sequence[Dist], expected: Sequence[Dist]) -> None:
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert np.isfinite(a.probs).all()
        assert total_variation(a, b) <= TOLERANCE, (i, total_variation(a, b))


def path(parents: Sequence[int], row: int) -> list[int]:
    """Rows from a root of the tree to `row`."""
    rows = [row]
    while parents[rows[0]] >= 0:
        rows.insert(0, parents[rows[0]])
    return rows


def prompts(least: int = 1, most: int = 30) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 96), min_size=least, max_size=most)


@st.composite
def trees(draw: st.DrawFn, most: int = 9) -> tuple[list[int], list[int]]:
    """(tokens, parents)"""
    tokens = draw(prompts(1, most))
    return tokens, [draw(st.integers(-1, i - 1)) for i in range(len(tokens))]
