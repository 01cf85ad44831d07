"""Steps of a workflow in `/v1/responses`: a reasoning item before the answer, where the request wants them."""

from __future__ import annotations

import httpx
import pytest

from paceline.api.responses.events import close_interrupted, replay
from paceline.runtime.service import GenerateEvent, TextDelta
from tests.api.chat.test_workflow import FAILED, LINES, STEP
from tests.api.responses.test_events import CALL, events_of, final_of, rows_of
from tests.api.scripted import MODEL, Script, ScriptedService, done

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
    assert [body["output_index"] for _, body in events if "output_index" in body] == sorted(
        body["output_index"] for _, body in events if "output_index" in body
    )


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
