"""The automaton of a text's suffixes, and the best tree of its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.drafting.lookup_table import NOTHING, SuffixAutomaton
from paceline.core.drafting.ngram_drafter import NO_DRAFT, best_budget, grow_tree
from tests.core.drafting.draft_paths import text

TEXT = st.integers(1, 3).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=30))


def occurrences(text: list[int], suffix: list[int]) -> list[int]:
    """End positions of the suffix's earlier occurrences, rising."""
    size = len(suffix)
    return [i + size for i in range(len(text) - size) if text[i : i + size] == suffix]


def longest(text: list[int]) -> int:
    return next((n for n in range(len(text) - 1, 0, -1) if occurrences(text, text[len(text) - n :])), 0)


@given(TEXT)
def test_the_match_is_the_longest_suffix_that_occurred_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, start=1):
        automaton.append(token)
        assert automaton.match.length == longest(text[:count])


@given(TEXT)
def test_continuations_are_the_next_tokens_with_their_counts_the_latest_first(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    size = automaton.match.length
    ends = occurrences(text, text[len(text) - size :]) if size else []
    found = automaton.continuations(automaton.match)
    assert [token for token, _ in found[:1]] == [text[end] for end in ends[-1:]]
    assert dict(found) == Counter(text[end] for end in ends)
    assert [count for _, count in found[1:]] == sorted((count for _, count in found[1:]), reverse=True)


@given(TEXT, TEXT)
def test_advancing_without_appending_finds_the_longest_suffix_in_the_text(text: list[int], more: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match = NOTHING
    for count, token in enumerate(more, start=1):
        match = automaton.advance(match, token)
        read = more[:count]
        inside = [
            n for n in range(count + 1) if any(text[i : i + n] == read[count - n :] for i in range(len(text) + 1))
        ]
        assert match.length == max(inside)


@given(TEXT, TEXT)
def test_matches_do_not_cross_two_texts(one: list[int], other: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(one)
    automaton.separate()
    assert automaton.match == NOTHING
    for count, token in enumerate(other, start=1):
        automaton.append(token)
        assert automaton.match.length == longest([*one, -9, *other[:count]])
        assert all(token >= 0 for token, _ in automaton.continuations(automaton.match))


@given(TEXT, st.integers(0, 20))
def test_a_full_automaton_adds_no_text_and_continues_to_match(text: list[int], room: int) -> None:
    full, whole = SuffixAutomaton(room), SuffixAutomaton()
    full.extend(text)
    whole.extend(text[:room])
    match = whole.match
    for token in text[room:]:
        match = whole.advance(match, token)
    assert full.num_tokens == min(room, len(text)) and full.num_states == whole.num_states
    assert full.match == match


def test_memory_stays_small_for_repetitive_and_for_random_text() -> None:
    for tokens in ([5] * 2000, [i * i * 7919 % 1009 for i in range(2000)]):
        automaton = SuffixAutomaton()
        automaton.extend(tokens)
        assert automaton.num_states <= 2 * len(tokens)


# ---- best-first draft trees against all trees, shapes, and budgets --------------------------------------------------
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


def candidates(source: MarkovSource, depth: int) -> dict[Path, float]:
    """Probability of every path of at most `depth` tokens after token 0."""
    found: dict[Path, float] = {}

    def go(path: Path, prob: float) -> None:
        if len(path) == depth:
            return
        for token, share in source.children(path[-1] if path else 0):
            found[(*path, token)] = prob * share
            go((*path, token), prob * share)

    go((), 1.0)
    return found


def subtrees(paths: list[Path], size: int) -> Iterator[tuple[Path, ...]]:
    for chosen in combinations(paths, size):
        nodes = set(chosen)
        if all(len(path) == 1 or path[:-1] in nodes for path in chosen):
            yield chosen


@given(rows(), st.integers(1, 3))
def test_a_tree_is_the_best_connected_one_of_its_size(source: MarkovSource, budget: int) -> None:
    drafted = grow_tree(source, 0, budget)
    probs = candidates(source, budget)
    paths = [text(drafted, node) for node in range(len(drafted))]
    assert len(set(paths)) == len(paths) == min(budget, len(probs))
    best = max((sum(probs[path] for path in tree) for tree in subtrees(list(probs), len(paths))), default=0.0)
    assert sum(drafted.probs) == pytest.approx(best)
    assert [probs[path] for path in paths] == pytest.approx(list(drafted.probs))


@given(rows(), st.integers(0, 12))
def test_every_prefix_of_a_tree_is_the_tree_of_that_budget_and_gains_fall(source: MarkovSource, budget: int) -> None:
    whole = grow_tree(source, 0, budget)
    for count in range(budget + 1):
        assert whole.first(count) == grow_tree(source, 0, count)
    assert all(parent < node for node, parent in enumerate(whole.parents)) and all(prob > 0.0 for prob in whole.probs)
    assert (np.diff(whole.probs) <= 1e-12).all()


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
