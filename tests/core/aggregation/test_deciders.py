"""Which documents decided a token."""

from __future__ import annotations

import math

from paceline.core.aggregation.weights import deciders


def test_a_document_with_a_large_share_of_the_tokens_probability_decided_it() -> None:
    assert deciders((0.0, 0.0), (0.9, 0.1)) == {0}
    assert deciders((0.0, 0.0, 0.0), (0.1, 0.9, 0.8)) == {1, 2}


def test_a_token_that_all_documents_give_tells_nothing_of_any() -> None:
    assert deciders((0.0, 0.0), (0.99, 0.98)) is None
    assert deciders((0.0, 0.3), (1.0, 1.0)) is None


def test_weights_count_as_in_the_mixture() -> None:
    assert deciders((math.log(4.0), 0.0), (0.3, 0.5)) == {0}
    assert deciders((1000.0, -1000.0), (0.5, 0.5)) == {0}


def test_one_document_or_none_decides_without_a_word() -> None:
    assert deciders((0.0,), (0.2,)) is None
    assert deciders((), ()) is None
    assert deciders((0.0, 0.0), (0.0, 0.0)) is None, "a token of probability 0, as a constraint forces it"
