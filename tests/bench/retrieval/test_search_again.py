"""Documents that are searched for again while a text grows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.perplexity import _log_probability
from bench.retrieval.methods import Found, Ids, Retrieved, branches, fixed_branches
from bench.retrieval.search_again import Way, _dists, log_probability
from paceline.core.sampling.dist import Dist

TEXT: Ids = tuple(range(12))
START = 2
HARBOUR, TOWER, BRIDGE = (Retrieved("device", (number,), score) for number, score in ((1, 2.0), (2, 1.0), (3, 0.5)))
TOWN = Retrieved("cloud", (9,), 1.5)
QUERY: Found = {"device": [HARBOUR, TOWER, BRIDGE], "cloud": [TOWN]}


def rows() -> dict[Ids, list[Dist]]:
    """Of each document, how probable it makes each token of the text."""
    drawn = np.random.default_rng(3)
    probabilities = {ids: drawn.uniform(0.05, 0.9, len(TEXT) - START) for ids in ((1,), (2,), (3,), (9,))}
    return {ids: _dists(TEXT[START:], each.tolist()) for ids, each in probabilities.items()}


@pytest.mark.parametrize("evidence", [True, False])
def test_one_search_is_scored_as_by_perplexity(evidence: bool) -> None:
    scored = rows()
    found: Found = {"device": QUERY["device"][:2], "cloud": QUERY["cloud"]}
    plan = (branches if evidence else fixed_branches)(found, (), 64)
    expected = _log_probability(plan, [scored[context.ids] for context in plan.contexts], TEXT[START:])
    read = {context.ids: scored[context.ids] for context in plan.contexts}
    got = log_probability(Way(evidence=evidence), TEXT, START, {START: QUERY}, 2, read)
    assert math.isclose(got, expected, rel_tol=1e-12)
