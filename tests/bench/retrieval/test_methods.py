"""Plans: documents of each side's contexts, cropping, fetched tokens, and the mixture of contexts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.retrieval.methods import (
    METHODS,
    Context,
    Retrieved,
    branches,
    concatenation,
    mixture,
)
from paceline.core.sampling.dist import Dist
from paceline.core.side import SIDES, Side

SEPARATOR = (0,)


def found(device: int, cloud: int, size: int = 4) -> dict[Side, list[Retrieved]]:
    """Documents 10…, 20…: the n-th of the device has the score 9 - n, that of the cloud 8.5 - n."""
    return {
        "device": [Retrieved("device", (10 + n,) * size, 9.0 - n) for n in range(device)],
        "cloud": [Retrieved("cloud", (20 + n,) * size, 8.5 - n) for n in range(cloud)],
    }


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 9), st.integers(0, 30))
def test_no_context_is_longer_than_its_budget(device: int, cloud: int, size: int, budget: int) -> None:
    for method in METHODS:
        plan = method(found(device, cloud, size), SEPARATOR, budget)
        assert plan.contexts
        assert all(len(context.ids) <= budget for context in plan.contexts)


def test_concatenation_reads_the_best_of_both_sides_and_fetches_those_of_the_other() -> None:
    plan = concatenation(found(3, 3), SEPARATOR, 15)
    (context,) = plan.contexts
    assert context.side == "device"
    assert context.ids == (11,) * 4 + (0,) + (20,) * 4 + (0,) + (10,) * 4 + (0,)
    assert plan.fetched == 4
    assert concatenation(found(3, 3), SEPARATOR, 15, reader="cloud").fetched == 8


def test_ours_reads_each_document_alone_where_it_lies_and_fetches_none() -> None:
    plan = branches(found(2, 1), SEPARATOR, 15)
    assert {(context.side, context.ids[0]) for context in plan.contexts} == {
        ("device", 10),
        ("device", 11),
        ("cloud", 20),
    }
    assert sorted(context.score or 0 for context in plan.contexts) == [8.0, 8.5, 9.0]
    assert plan.fetched == 0


scores = st.floats(-20, 20)
contexts = st.lists(st.builds(Context, st.sampled_from(SIDES), st.just((1,)), scores), min_size=1, max_size=6)


@given(contexts, st.data())
def test_the_mixture_is_one_softmax_over_all_documents_wherever_they_lie(
    drawn: list[Context], data: st.DataObject
) -> None:
    rows = [np.array(data.draw(st.lists(st.floats(0.01, 1), min_size=3, max_size=3))) for _ in drawn]
    dists = [Dist.dense(row / row.sum()) for row in rows]
    weights = np.exp([context.score or 0.0 for context in drawn])
    expected = sum(w * dist.probs for w, dist in zip(weights / weights.sum(), dists, strict=True))
    assert mixture(drawn, dists).probs == pytest.approx(expected)
