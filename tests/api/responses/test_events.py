"""Response events: their order, their replay, and responses that are interrupted anywhere."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.api.chat.tools import AnswerReader, ToolCallParser
from paceline.api.http.body import encode_json
from paceline.api.http.errors import Failure
from paceline.api.responses.events import DivergedError, Event, ResponseEvents, Unsaid, close_interrupted, replay
from paceline.api.responses.store import ENDS, EventRow
from paceline.runtime.service import Citation, GenerateEvent, GenerationResult, TextDelta, TokenLogprob
from tests.api.chat.test_switches import FAILED, LINES, STEP
from tests.api.scripted import MODEL, Script, ScriptedService, done

FIRST: dict[str, object] = {"id": "resp_1", "status": "in_progress", "output": [], "usage": None}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Ulm"}}\n</tool_call>'


def encoder(calls: bool = False, ids: Sequence[str] = ()) -> ResponseEvents:
    """ids: of its first items; further ones are numbered."""
    waiting, numbers = list(ids), itertools.count(len(ids))
    return ResponseEvents(
        FIRST,
        reader=AnswerReader(ToolCallParser() if calls else None),
        new_id=lambda prefix: waiting.pop(0) if waiting else f"{prefix}_{next(numbers)}",
        clock=lambda: 1234,
    )


def events_of(generated: Sequence[GenerateEvent], calls: bool = False, ids: Sequence[str] = ()) -> list[Event]:
    one = encoder(calls, ids)
    return [*one.begin(), *(event for each in generated for event in one.take(each))]


def rows_of(events: Sequence[Event]) -> list[EventRow]:
    return [EventRow(index, kind, encode_json(body)) for index, (kind, body) in enumerate(events)]


def final_of(events: list[Event]) -> dict[str, Any]:
    final = events[-1][1]["response"]
    assert isinstance(final, dict)
    return final


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", []))


ANSWERS = st.tuples(
    st.lists(st.sampled_from(["a", " b", "é\n", "😀", CALL, "<tool", "_call>", "\n"]), max_size=10),
    st.lists(st.integers(0, 200), max_size=10),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)


def pieces_of(texts: list[str], borders: list[int], reason: str) -> list[GenerateEvent]:
    whole = "".join(texts)
    cuts = [0, *sorted(min(border, len(whole)) for border in borders), len(whole)]
    return [*(TextDelta(whole[a:b], 1) for a, b in itertools.pairwise(cuts)), done(reason)]


def test_the_events_of_a_plain_answer_are_openais_in_their_order() -> None:
    events = events_of([TextDelta("Hello", 1), TextDelta(" there", 1), done()])
    assert [kind.removeprefix("response.") for kind, _ in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    final = final_of(events)
    assert final["status"] == "completed" and final["completed_at"] == 1234
    details = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    details["output_tokens_details"] = {"reasoning_tokens": 0}
    assert final["usage"] == details | {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}


def test_a_call_has_events_of_its_own_and_ids_of_its_own() -> None:
    events = events_of(
        [TextDelta("Let me see. ", 1), TextDelta(CALL[:40], 9), TextDelta(CALL[40:], 9), done()], calls=True
    )
    kinds = [kind for kind, _ in events]
    assert kinds.index("response.function_call_arguments.delta") > kinds.index("response.output_item.done")
    arguments = "".join(str(body["delta"]) for kind, body in events if kind.endswith("arguments.delta"))
    message, call = final_of(events)["output"]
    assert (message["type"], text_of(final_of(events))) == ("message", "Let me see.")
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "look_up", arguments)
    assert json.loads(arguments) == {"city": "Ulm"}
    assert call["id"].startswith("fc_") and call["call_id"].startswith("call_") and call["status"] == "completed"


def test_a_call_is_text_where_nothing_may_be_called_and_an_empty_answer_is_a_message() -> None:
    assert text_of(final_of(events_of([TextDelta(CALL, 9), done()]))) == CALL
    empty = final_of(events_of([done()]))
    assert [item["type"] for item in empty["output"]] == ["message"] and text_of(empty) == ""


def test_an_answer_cut_by_its_limit_is_incomplete_and_says_why() -> None:
    events = events_of([TextDelta("Hel", 1), done("length")])
    final = final_of(events)
    assert events[-1][0] == "response.incomplete" and final["status"] == "incomplete"
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][0]["status"] == "incomplete" and final["completed_at"] is None


def test_citations_and_logprobs_are_in_their_events_and_in_the_last_one() -> None:
    one = TokenLogprob("Hi", -0.5, (72, 105))
    cited = done("stop", citations=(Citation("cloud", "a b.md", "text", 0.5),), degraded="device_lost")
    events = events_of([TextDelta("Hi", 1, logprobs=((one, (one,)),)), cited])
    part = final_of(events)["output"][0]["content"][0]
    place = {"start_index": 0, "end_index": 2, "title": "a b.md", "url": "paceline://cloud/a%20b.md"}
    assert part["annotations"] == [{"type": "url_citation", **place}]
    assert part["logprobs"][0]["logprob"] == -0.5 and part["logprobs"][0]["top_logprobs"][0]["token"] == "Hi"
    delta = next(body for kind, body in events if kind == "response.output_text.delta")
    assert delta["logprobs"] == part["logprobs"]
    added = next(body for kind, body in events if kind == "response.output_text.annotation.added")
    assert added["annotation"] == part["annotations"][0]
    assert final_of(events)["paceline"]["degraded"] == "device_lost"


@given(ANSWERS)
def test_every_answer_keeps_the_protocol(answer: tuple[list[str], list[int], bool, str]) -> None:
    texts, borders, calls, reason = answer
    events = events_of(pieces_of(texts, borders, reason), calls)
    assert [body["sequence_number"] for _, body in events] == list(range(len(events)))
    assert [kind in ENDS for kind, _ in events] == [False] * (len(events) - 1) + [True]
    open_item: object = None
    next_index = 0
    for kind, body in events[2:-1]:
        if kind == "response.output_item.added":
            assert open_item is None and body["output_index"] == next_index
            assert isinstance(body["item"], dict)
            open_item = body["item"]["id"]
        elif kind == "response.output_item.done":
            assert isinstance(body["item"], dict) and body["item"]["id"] == open_item
            assert body["item"] == final_of(events)["output"][next_index]
            open_item, next_index = None, next_index + 1
        else:
            assert (body["item_id"], body["output_index"]) == (open_item, next_index)
    assert open_item is None and next_index == len(final_of(events)["output"]) > 0


@given(ANSWERS)
def test_deltas_add_up_however_the_text_was_cut(answer: tuple[list[str], list[int], bool, str]) -> None:
    texts, borders, calls, reason = answer
    events = events_of(pieces_of(texts, borders, reason), calls)
    deltas: dict[object, str] = {}
    for kind, body in events:
        if kind.endswith(".delta"):
            deltas[body["output_index"]] = deltas.get(body["output_index"], "") + str(body["delta"])
    for index, item in enumerate(final_of(events)["output"]):
        assert deltas.get(index, "") == (item["content"][0]["text"] if item["type"] == "message" else item["arguments"])
    whole = final_of(events_of([TextDelta("".join(texts), 1), done(reason)], calls))
    assert text_of(whole) == text_of(final_of(events))


@given(ANSWERS, st.data())
def test_an_interrupted_response_keeps_the_text_of_its_events(
    answer: tuple[list[str], list[int], bool, str], data: st.DataObject
) -> None:
    texts, borders, calls, reason = answer
    events = events_of(pieces_of(texts, borders, reason), calls)
    rows = rows_of(events)
    assert replay(rows) == replay(rows[-1:]) == final_of(events)
    assert close_interrupted(rows) == []
    kept = rows[: data.draw(st.integers(1, len(rows) - 1))]
    (last,) = close_interrupted(kept)
    response = json.loads(last.data)["response"]
    assert (last.sequence, last.type) == (len(kept), "response.failed")
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    written = "".join(str(body["delta"]) for kind, body in events[: len(kept)] if kind == "response.output_text.delta")
    assert text_of(response) == written
    assert all(item["status"] != "in_progress" for item in response["output"])


@pytest.mark.parametrize("how", ["fail", "cancel"])
def test_a_response_that_ends_early_keeps_its_text(how: str) -> None:
    one = encoder()
    events = [*one.begin(), *one.take(TextDelta("Half", 1))]
    events += one.cancel() if how == "cancel" else one.fail(Failure(503, "The device has gone.", "server_error"))
    kind, body = events[-1]
    response = body["response"]
    assert isinstance(response, dict) and text_of(response) == "Half"
    assert response["output"][0]["status"] == "incomplete" and body["sequence_number"] == len(events) - 1
    if how == "cancel":
        assert (kind, response["status"]) == ("response.incomplete", "cancelled")
    else:
        assert (kind, response["status"]) == ("response.failed", "failed")
        assert response["error"] == {"code": "server_error", "message": "The device has gone."}


# ---- steps of a workflow: a reasoning item before the answer, where the request wants them ---------------------------
STEPS: list[GenerateEvent] = [TextDelta("", 0, step=step) for step in (STEP, FAILED)]


@pytest.mark.parametrize(("texts", "calls"), [(["Hi"], False), ([], False), ([CALL], True)])
def test_steps_are_one_item_before_the_answer(texts: list[str], calls: bool) -> None:
    events = events_of([*STEPS, *(TextDelta(text, 2) for text in texts), done()], calls)
    assert [kind for kind, _ in events[2:12]] == [
        "response.output_item.added",
        *[f"response.reasoning_summary_{kind}" for kind in ("part.added", "text.delta", "text.done", "part.done")] * 2,
        "response.output_item.done",
    ]
    reasoning, answer = final_of(events)["output"]
    assert (reasoning["type"], reasoning["status"]) == ("reasoning", "completed")
    assert [part["text"] for part in reasoning["summary"]] == LINES.splitlines(keepends=True)
    assert answer["type"] == ("function_call" if calls else "message")
    indices = [body["output_index"] for _, body in events if "output_index" in body]
    assert indices == sorted(indices)


def test_a_step_after_the_answer_has_begun_changes_nothing_of_it() -> None:
    events = events_of([TextDelta("Hi", 2), *STEPS, done()])
    assert [item["type"] for item in final_of(events)["output"]] == ["message"]


def test_an_interrupted_reasoning_keeps_its_steps() -> None:
    rows = rows_of(events_of([*STEPS, TextDelta("Hi", 2), done()]))
    assert replay(rows[:-1])["output"] == replay(rows)["output"]
    (last,) = close_interrupted(rows[:6])
    (item,) = replay([last])["output"]
    assert (item["status"], [part["text"] for part in item["summary"]]) == ("incomplete", LINES.splitlines(True)[:1])


def test_a_response_has_reasoning_where_steps_are_told(http: httpx.Client, service: ScriptedService) -> None:
    body = {"model": MODEL.name, "input": "Hi", "paceline": {"workflow": "advanced", "steps": True}}
    service.script = Script([*STEPS, TextDelta("Hi", 2), done(steps=(STEP, FAILED))])
    output = http.post("/v1/responses", json=body).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert http.post("/v1/responses", json=body | {"input": [*output, {"role": "user", "content": "And?"}]}).is_success
    service.script = Script([TextDelta("Hi", 2), done()])
    assert [item["type"] for item in http.post("/v1/responses", json=body).json()["output"]] == ["message"]


# ---- an answer computed again: whatever was told of it, and however its text is cut this time ------------------------
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
