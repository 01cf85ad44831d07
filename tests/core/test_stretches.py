"""Stretches of an answer: they follow each other without a gap, and all but the last are equally long."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.wire.messages import stretch_of


@given(st.integers(1, 500), st.integers(1, 100))
def test_stretches_follow_each_other_up_to_the_limit(limit: int, every: int) -> None:
    ends = [0]
    while ends[-1] < limit:
        begin, end = stretch_of(ends[-1], every, limit)
        assert begin == ends[-1] < end
        assert all(stretch_of(length, every, limit) == (begin, end) for length in range(begin, end))
        ends.append(end)
    lengths = [end - begin for begin, end in pairwise(ends)]
    assert all(length == every for length in lengths[:-1]) and lengths[-1] <= every
    assert ends[-1] == limit


@given(st.integers(0, 100), st.integers(100, 200))
def test_without_a_second_search_the_answer_is_one_stretch(length: int, limit: int) -> None:
    assert stretch_of(length, 0, limit) == (0, limit)
