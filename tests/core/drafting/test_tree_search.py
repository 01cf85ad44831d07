"""Best-first draft trees against all trees, shapes, and budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.drafting.tree_search import (
    NO_DRAFT,
    PAPER,
    RECYCLING_LEVELS,
    Scoring,
    TreeShape,
    best_budget,
    fill,
    grow_tree,
    levelled_shape,
    static_shape,
)

Path = tuple[int, ...]


@dataclass
class MarkovSource:
    """A draft source whose distributions depend on the last token alone."""

    dists: dict[int, list[tuple[int, float]]]

    def children(self, context: int) -> list[tuple[int, float]]:
        return self.dists.get(context, [])

    def child(self, context: int, token: int) -> int:  # noqa: ARG002
        return token


@st.composite
def rows(draw: st.DrawFn) -> MarkovSource:
    vocab = 4
    dists = {}
    for token in range(vocab):
        width = draw(st.integers(0, 3))
        weights = draw(st.lists(st.floats(0.05, 1.0), min_size=width, max_size=width))
        total = sum(weights) + draw(st.floats(0.01, 1.0))
        order = draw(st.permutations(range(vocab)))
        dists[token] = list(zip(order, sorted((w / total for w in weights), reverse=True), strict=False))
    return MarkovSource(dists)


def candidates(source: MarkovSource, scoring: Scoring, depth: int) -> dict[Path, tuple[float, float]]:
    """Score and probability, by the formula, of every path of at most `depth` tokens after token 0."""
    found: dict[Path, tuple[float, float]] = {}

    def go(path: Path, score: float, prob: float) -> None:
        if len(path) == depth:
            return
        for rank, (token, share) in enumerate(source.children(path[-1] if path else 0)):
            decay = scoring.depth_decay if path else 1.0
            below = score * decay * share * scoring.width_decay**rank
            found[(*path, token)] = below, prob * share
            go((*path, token), below, prob * share)

    go((), 1.0, 1.0)
    return found


def subtrees(paths: list[Path], size: int) -> Iterator[tuple[Path, ...]]:
    for chosen in combinations(paths, size):
        nodes = set(chosen)
        if all(len(path) == 1 or path[:-1] in nodes for path in chosen):
            yield chosen


@given(rows(), st.integers(1, 3), st.sampled_from([Scoring(), Scoring(0.8, 0.7), PAPER]))
def test_a_tree_is_the_best_connected_one_of_its_size(source: MarkovSource, budget: int, scoring: Scoring) -> None:
    drafted = grow_tree(source, 0, budget, scoring)
    scores = {path: pair for path, pair in candidates(source, scoring, budget).items() if pair[0] >= scoring.threshold}
    paths = [drafted.tree.text(node) for node in range(len(drafted))]
    assert len(paths) == min(budget, len(scores)) if len(scores) <= budget else len(paths) == budget
    best = max((sum(scores[path][0] for path in tree) for tree in subtrees(list(scores), len(paths))), default=0.0)
    assert sum(scores[path][0] for path in paths) == pytest.approx(best)
    assert [scores[path][1] for path in paths] == pytest.approx(list(drafted.probs))


@given(rows(), st.integers(0, 12), st.sampled_from([Scoring(), PAPER]))
def test_every_prefix_of_a_tree_is_the_tree_of_that_budget_and_expected_accepted_is_concave(
    source: MarkovSource, budget: int, scoring: Scoring
) -> None:
    whole = grow_tree(source, 0, budget, scoring)
    for count in range(budget + 1):
        assert whole.first(count) == grow_tree(source, 0, count, scoring)
    expected = [whole.first(count).expected_accepted for count in range(len(whole) + 1)]
    gains = np.diff(expected)
    assert (gains > 0.0).all()
    if scoring == Scoring():
        assert (np.diff(gains) <= 1e-12).all()


@given(rows(), st.integers(1, 12), st.booleans())
def test_scores_fall_along_paths_unless_taken_literally(source: MarkovSource, budget: int, literal: bool) -> None:
    scoring = Scoring(0.8, 0.7, 1e-3, literal=literal)
    drafted = grow_tree(source, 0, budget, scoring)
    for node, parent in enumerate(drafted.tree.parents):
        above = 1.0 if parent < 0 else drafted.probs[parent]
        children = source.children(0 if parent < 0 else drafted.tree.tokens[parent])
        token, share = children[drafted.ranks[node]]
        assert (token, above * share) == (drafted.tree.tokens[node], pytest.approx(drafted.probs[node]))
        if literal:
            depth = drafted.tree.depth(node)
            assert drafted.probs[node] * 0.8**depth * 0.7 ** drafted.ranks[node] >= 1e-3 * (1 - 1e-9)


def test_a_child_outscores_its_parent_only_when_the_formula_is_taken_literally() -> None:
    dists = {0: [(token, 0.1) for token in range(1, 9)], 8: [(9, 0.9)], 1: [(9, 0.01)]}
    literal = grow_tree(MarkovSource(dists), 0, 9, Scoring(0.8, 0.7, 0.0, literal=True))
    assert literal.tree.tokens[:9] == (*range(1, 9), 9)
    assert 0.1 * 0.9 * 0.8 > 0.1 * 0.7**7, "the child of the last root outscores that root"
    assert literal.ranks[-1] == 0 and literal.tree.parents[-1] == 7


@given(rows(), rows(), st.integers(0, 12))
def test_filling_a_shape_keeps_the_structure_and_takes_the_source_s_tokens(
    one: MarkovSource, other: MarkovSource, budget: int
) -> None:
    drafted = grow_tree(one, 0, budget)
    assert fill(one, 0, drafted.shape) == drafted
    filled = fill(other, 0, drafted.shape)
    for node, (parent, rank) in enumerate(zip(filled.tree.parents, filled.ranks, strict=True)):
        token, share = other.children(0 if parent < 0 else filled.tree.tokens[parent])[rank]
        assert filled.tree.tokens[node] == token
        assert filled.probs[node] == pytest.approx(share * (1.0 if parent < 0 else filled.probs[parent]))


def test_ranks_without_a_candidate_are_left_out_with_their_subtrees() -> None:
    shape = TreeShape((-1, -1, 0, 1, 3), (0, 1, 0, 0, 0))
    filled = fill(MarkovSource({0: [(1, 0.5)], 1: [(2, 0.5)]}), 0, shape)
    assert (filled.tree.tokens, filled.tree.parents, filled.probs) == ((1, 2), (-1, 0), (0.5, 0.25))


def test_a_static_tree_has_the_given_size_and_recycling_has_its_levels() -> None:
    shape = levelled_shape()
    depths: list[int] = []
    for parent in shape.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    assert [depths.count(depth) for depth in range(6)] == list(RECYCLING_LEVELS)
    assert len(set(zip(shape.parents, shape.ranks, strict=True))) == 80
    assert len(static_shape(32).parents) == 32
    assert static_shape(3, (0.9, 0.05)) == TreeShape((-1, 0, 1), (0, 0, 0))


@given(
    st.lists(st.floats(0.001, 1.0), max_size=20).map(lambda probs: sorted(probs, reverse=True)),
    st.floats(0.0, 0.5),
    st.floats(0.01, 1.0),
)
def test_the_best_budget_maximises_tokens_per_second(probs: list[float], row: float, first: float) -> None:
    chosen = best_budget(probs, lambda rows: first + row * (rows - 1))
    rates = [(1.0 + sum(probs[:count])) / (first + row * count) for count in range(len(probs) + 1)]
    assert rates[chosen] == pytest.approx(max(rates))


def test_drafts_that_cost_more_than_they_gain_are_left_out() -> None:
    assert best_budget([0.5, 0.4], lambda rows: float(rows)) == 0
    assert best_budget([0.5, 0.4], lambda rows: 1.0) == 2  # noqa: ARG005
    assert best_budget([], lambda rows: 1.0) == 0  # noqa: ARG005
    assert len(NO_DRAFT) == 0 and grow_tree(MarkovSource({}), 0, 5) == NO_DRAFT
