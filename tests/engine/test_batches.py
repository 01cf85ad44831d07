"""Rows of a batch are those of each segment alone, whatever groups the attention makes of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Engine
from paceline.engine.loader import load_model
from paceline.models import DEVICE

# (rows, cached rows, is a tree): neighbours exceed the padding limit, and sorted by size all fit one group.
SORTED_INTO_ONE_GROUP = (
    *((1, start, False) for start in (61, 61, 61, 62, 64)),
    *((4, start, True) for start in (68, 85)),
    *((1, start, False) for start in (61, 61)),
    *((4, start, True) for start in (89, 70)),
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_model(DEVICE, backend="paged", kv_rows=4096).engine


def differs(engine: Engine, shape: tuple[tuple[int, int, bool], ...], chance: random.Random) -> float:
    """Largest difference of a probability between the batch and its segments alone."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(5, 2000) for _ in range(count))

    segments = []
    for number, (rows, start, is_tree) in enumerate(shape):
        engine.forward(Batch((Segment(SeqId(number), 0, tokens(start)),)))
        parents = (-1, *[0] * (rows - 1)) if is_tree else None
        segments.append(Segment(SeqId(number), start, tokens(rows), parents, "all"))
    together = engine.forward(Batch(tuple(segments))).dists
    for segment in segments:
        engine.truncate(segment.seq, segment.start)
    alone = [engine.forward(Batch((segment,))).dists[0] for segment in segments]
    for segment in segments:
        engine.release(segment.seq)
    pairs = [pair for ours, theirs in zip(together, alone, strict=True) for pair in zip(ours, theirs, strict=True)]
    return max(float(np.abs(ours.probs - theirs.probs).max()) for ours, theirs in pairs)


def test_segments_that_fit_one_group_when_sorted_keep_their_rows(engine: Engine) -> None:
    assert differs(engine, SORTED_INTO_ONE_GROUP, random.Random(0)) < 1e-4


def test_random_batches_equal_their_segments_alone(engine: Engine) -> None:
    chance = random.Random(1)
    for _ in range(15):
        trees = [chance.random() < 0.4 for _ in range(chance.randrange(2, 14))]
        shape = tuple((chance.randrange(2, 8) if tree else 1, chance.randrange(30, 100), tree) for tree in trees)
        assert differs(engine, shape, chance) < 1e-4, shape
