"""Corpora and test text, plans of contexts, and documents that are searched for again."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.perplexity import _log_probability
from bench.retrieval.articles import Shelves, parse_wikitext, printed, shelve
from bench.retrieval.corpora import gather
from bench.retrieval.methods import (
    METHODS,
    Context,
    Found,
    Ids,
    Retrieved,
    branches,
    concatenation,
    fixed_branches,
    mixture,
)
from bench.retrieval.search_again import Way, _dists, log_probability
from paceline.core.sampling.dist import Dist
from paceline.core.side import SIDES, Side

WIKITEXT = """
 = First title =

 A sentence ( with 1 @,@ 200 words ) by <unk> , " quoted " .

 = = A heading = =

 It 's the end .

 = Second =

 More .
"""

lengths = st.lists(st.integers(0, 300), min_size=1, max_size=5)


@given(lengths, st.integers(8, 40), st.integers(4, 12))
def test_no_token_of_a_test_window_is_in_a_corpus_and_nothing_is_there_twice(
    sizes: list[int], window: int, passage: int
) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    articles = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    shelves = shelve(articles, window=window, passage=passage)
    tested = [token for each in shelves.windows for token in each.ids]
    stored = [token for each in shelves.pieces for token in each.ids]
    assert not set(tested) & set(stored)
    assert len(set(tested)) == len(tested) and len(set(stored)) == len(stored)
    assert all(set(each.ids) <= set(articles[each.article]) for each in shelves.windows)
    assert all(set(each.ids) <= set(articles[each.article]) for each in shelves.pieces)
    assert all(len(each.ids) == window for each in shelves.windows)
    assert all(passage / 4 <= len(each.ids) <= passage for each in shelves.pieces)


def test_wikitext_is_read_by_article_as_it_was_printed() -> None:
    first, second = parse_wikitext(WIKITEXT)
    assert first.title == "First title"
    assert first.text.splitlines() == [
        "First title",
        'A sentence (with 1,200 words) by _, "quoted".',
        "A heading",
        "It's the end.",
    ]
    assert second.text == "Second\nMore.\n"
    assert printed("5 – 6 a @-@ b doesn 't") == "5–6 a-b doesn't"


def _tokens(shelves: Shelves) -> set[int]:
    parts = [each.ids for each in shelves.windows] + [each.ids for each in shelves.pieces]
    return {token for ids in parts for token in ids}


def test_no_model_reads_test_text(tmp_path: Path) -> None:
    (tmp_path / "wikitext2").mkdir()
    articles = "".join(f" = T {number} = \n {chr(97 + number) * 60} \n" for number in range(12))
    (tmp_path / "wikitext2" / "test.txt").write_text(articles)
    material = gather(tmp_path, lambda text: [ord(c) for c in text.split("\n")[1]], window=9, passage=5)
    tested, fitted = _tokens(material.test), _tokens(material.lessons)
    read = {token for text in material.reading for token in text}
    assert len(tested) == 6 and len(fitted) == 1 and len(read) == 5
    assert not tested & fitted and not tested & read and not fitted & read


# ---- plans ----------------------------------------------------------------------------------------------------------
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


# ---- documents that are searched for again while a text grows -------------------------------------------------------
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
