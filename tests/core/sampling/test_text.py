"""Incremental text: no stop strings, for any division into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.sessions.output_text import StopStrings


def first_complete(text: str, stops: tuple[str, ...]) -> int | None:
    """Index where the answer ends, found by reading one more character at a time."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


letters = st.text(alphabet="abé", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=4).map(tuple)


@given(letters, stop_lists, st.lists(st.integers(1, 5), max_size=30))
def test_stops_do_not_depend_on_how_the_text_is_cut(text: str, stops: tuple[str, ...], sizes: list[int]) -> None:
    filter_, sent, at, found = StopStrings(stops), "", 0, False
    for size in [*sizes, len(text)]:
        safe, found = filter_.push(text[at : at + size])
        at += size
        sent += safe
        end = first_complete(text, stops)
        assert text[: len(text) if end is None else end].startswith(sent), "sent too much"
        if found:
            break
    if not found:
        sent += filter_.flush()
    end = first_complete(text, stops)
    assert found == (end is not None)
    assert sent == (text if end is None else text[:end])


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    filter_ = StopStrings(("\n\nUser:",))
    assert filter_.push("Yes.\n") == ("Yes.", False)
    assert filter_.push("No.\n\nUs") == ("\nNo.", False)
    assert filter_.push("ed") == ("\n\nUsed", False)
    assert filter_.push("\n\nUser: hi") == ("", True)
    assert filter_.push("more") == ("", True)
    assert filter_.flush() == ""


def test_without_stops_everything_passes_and_an_empty_one_is_refused() -> None:
    assert StopStrings(()).push("anything") == ("anything", False)
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("a", ""))


def test_text_that_may_not_end_completes_no_stop_string_and_what_follows_does() -> None:
    early = StopStrings(("ab", "abc"))
    assert early.push("xab", may_end=False) == ("x", False)  # held: the longer one may still come
    assert early.push("d ab") == ("abd ", True)
    across = StopStrings(("END",))
    assert across.push("aEN", may_end=False) == ("a", False)
    assert across.push("D") == ("", True) and across.found == "END"
