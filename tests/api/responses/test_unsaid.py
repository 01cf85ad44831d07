"""An answer computed again: whatever was told of it, and however its text is cut this time, the rest follows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.api.http.body import encode_json
from paceline.api.responses.events import DivergedError, Unsaid, replay
from paceline.api.responses.store import EventRow
from paceline.runtime.service import GenerateEvent, GenerationResult, TextDelta, TokenLogprob
from tests.api.responses.test_events import events_of, rows_of

TOKENS = ("Ti", "ber", " is", " a", " cat", ".", "")


def deltas(cuts: Sequence[int], *, thinking: int = 2) -> list[GenerateEvent]:
    """The same tokens, so many at a time; the first of them thought."""
    events: list[GenerateEvent] = []
    begin = 0
    for end in sorted({*cuts, thinking, len(TOKENS)}):
        tokens = TOKENS[begin:end]
        logprobs = tuple((TokenLogprob(token, -0.5, tuple(token.encode())), ()) for token in tokens)
        if tokens and end <= thinking:
            events.append(TextDelta("".join(tokens), len(tokens), thinking=True))
        elif tokens:
            events.append(TextDelta("".join(tokens), len(tokens), logprobs=logprobs))
        begin = end
    return [*events, GenerationResult("stop", 1, len(TOKENS), "autoregressive", "")]


cuts = st.lists(st.integers(1, len(TOKENS)))


@given(cuts, cuts, st.integers(1, 40))
def test_what_was_told_and_the_rest_are_the_whole_answer(first: list[int], second: list[int], count: int) -> None:
    whole = rows_of(events_of(deltas(first)))
    begun = whole[: min(count, len(whole) - 1)]
    unsaid = Unsaid(begun)
    rest = unsaid.of(events_of(deltas(second), ids=unsaid.ids))
    rows = [*begun, *(EventRow(int(str(body["sequence_number"])), kind, encode_json(body)) for kind, body in rest)]
    assert [row.sequence for row in rows] == list(range(len(rows)))
    assert replay(rows) == replay(whole)
    assert replay(rows[:-1])["output"] == replay(whole[:-1])["output"]  # made of the deltas, not of the last event


@pytest.mark.parametrize("other", ["Ti", "Tiger"])
def test_another_text_is_not_told_as_the_rest(other: str) -> None:
    begun = rows_of(events_of([TextDelta("Tiber is", 3)]))
    unsaid = Unsaid(begun)
    end = GenerationResult("stop", 1, 1, "autoregressive", "")
    with pytest.raises(DivergedError):
        unsaid.of(events_of([TextDelta(other, 1), end], ids=unsaid.ids))
