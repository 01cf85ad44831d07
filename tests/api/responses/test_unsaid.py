"""An answer computed again: whatever was told of it, and however its text is cut this time, the rest follows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.api.chat.tools import AnswerReader
from paceline.api.http.body import encode_json
from paceline.api.responses.events import DivergedError, Event, ResponseEvents, Unsaid, replay
from paceline.api.responses.store import EventRow
from paceline.runtime.service import GenerateEvent, GenerationResult, TextDelta, TokenLogprob

TOKENS = ("Ti", "ber", " is", " a", " cat", ".", "")


def encoder(ids: Sequence[str] = ()) -> ResponseEvents:
    waiting = list(ids)
    return ResponseEvents(
        {"id": "resp_1", "status": "in_progress", "output": []},
        reader=AnswerReader(None),
        new_id=lambda prefix: waiting.pop(0) if waiting else f"{prefix}_1",
        clock=lambda: 0,
        extension=lambda _: {},
    )


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


def told(encoder: ResponseEvents, events: Sequence[GenerateEvent]) -> list[Event]:
    return [*encoder.begin(), *(each for event in events for each in encoder.take(event))]


def rows_of(events: Sequence[Event]) -> list[EventRow]:
    return [EventRow(number, kind, encode_json(body)) for number, (kind, body) in enumerate(events)]


cuts = st.lists(st.integers(1, len(TOKENS)))


@given(cuts, cuts, st.integers(1, 40))
def test_what_was_told_and_the_rest_are_the_whole_answer(first: list[int], second: list[int], count: int) -> None:
    whole = rows_of(told(encoder(), deltas(first)))
    begun = whole[: min(count, len(whole) - 1)]
    unsaid = Unsaid(begun)
    rest = unsaid.of(told(encoder(unsaid.ids), deltas(second)))
    rows = [*begun, *(EventRow(int(str(body["sequence_number"])), kind, encode_json(body)) for kind, body in rest)]
    assert [row.sequence for row in rows] == list(range(len(rows)))
    assert replay(rows) == replay(whole)
    assert replay(rows[:-1])["output"] == replay(whole[:-1])["output"]  # made of the deltas, not of the last event


@pytest.mark.parametrize("other", ["Ti", "Tiger"])
def test_another_text_is_not_told_as_the_rest(other: str) -> None:
    begun = rows_of(told(encoder(), [TextDelta("Tiber is", 3)]))
    unsaid = Unsaid(begun)
    end = GenerationResult("stop", 1, 1, "autoregressive", "")
    with pytest.raises(DivergedError):
        unsaid.of(told(encoder(unsaid.ids), [TextDelta(other, 1), end]))
