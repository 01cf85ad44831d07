"""The suffix automaton against a search of the text."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.drafting.lookup_table import NOTHING, SuffixAutomaton

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
    for text in ([5] * 2000, [i * i * 7919 % 1009 for i in range(2000)]):
        automaton = SuffixAutomaton()
        automaton.extend(text)
        assert automaton.num_states <= 2 * len(text)
