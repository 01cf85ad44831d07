"""Requests for a response that meanwhile ends, is deleted or stays unfinished."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import pytest

from paceline.api.responses.log import EventLog, LiveEvents, Retention
from paceline.api.responses.store import EventStore, LogBatch, ResponseRecord
from paceline.errors import ConfigError
from paceline.runtime.service import TextDelta
from tests.api.responses.test_endpoint import error_of, post
from tests.api.responses.test_resume import events_in
from tests.api.scripted import WAIT, Script, ScriptedService, Signal, client_of, done, serving

T = TypeVar("T")


class Ending:
    """Lets a response end after the n-th query to its log has returned, and before the result is used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, service: ScriptedService) -> None:
        self.after = 0
        self.go = Signal()
        service.script = Script([TextDelta("Hello", 1), self.go, TextDelta(" there.", 1), done()])
        query = EventLog.query

        async def observed(log: EventLog, run: Callable[[], T]) -> T:
            answer = await query(log, run)
            self.after -= 1
            if self.after == 0:
                self.go.set()
                async with asyncio.timeout(WAIT):
                    while log._live:
                        await asyncio.sleep(0.001)
            return answer

        monkeypatch.setattr(EventLog, "query", observed)


def begun(http: httpx.Client) -> str:
    """The id of a background response that has written some text."""
    made = str(post(http, background=True, stream=False).json()["id"])
    with http.stream("GET", f"/v1/responses/{made}", params={"stream": "true"}) as stream:
        assert any("Hello" in part for part in stream.iter_text())
    return made


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize(("method", "where"), [("GET", ""), ("POST", "/cancel")])
def test_a_response_that_ends_while_it_is_fetched_has_not_failed(
    http: httpx.Client, service: ScriptedService, monkeypatch: pytest.MonkeyPatch, after: int, method: str, where: str
) -> None:
    ending = Ending(monkeypatch, service)
    made = begun(http)
    if method == "POST":
        monkeypatch.setattr("paceline.api.responses.runs.Responses.stop", lambda *_: asyncio.sleep(0))
    ending.after = after
    answer = http.request(method, f"/v1/responses/{made}{where}")
    assert answer.json()["status"] in ("in_progress", "completed"), answer.text
    ending.go.set()
    assert http.get(f"/v1/responses/{made}", params={"stream": "true"}).text.count("response.completed") == 2
    assert http.get(f"/v1/responses/{made}").json()["status"] == "completed"


def test_a_response_that_ends_while_it_is_continued_has_not_failed(
    http: httpx.Client, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = Ending(monkeypatch, service)
    made = begun(http)
    ending.after = 1
    assert error_of(post(http, previous_response_id=made)) == (400, "previous_response_id", None)
    assert post(http, previous_response_id=made).status_code == 200


def test_a_response_whose_writing_failed_midway_has_an_end_for_every_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    service = ScriptedService()
    go = Signal()
    service.script = Script([TextDelta("Hello", 1), go, TextDelta(" there.", 1), done()])

    def refusing(*_: object) -> None:
        raise ConfigError("The disk is full.")

    with serving(service) as url, client_of(url) as http:
        made = begun(http)
        monkeypatch.setattr(EventStore, "write", refusing)
        go.set()
        with http.stream("GET", f"/v1/responses/{made}", params={"stream": "true"}) as stream:
            assert events_in(stream.read())[-1]["type"] in ("error", "response.failed")
        monkeypatch.undo()
        events = events_in(http.get(f"/v1/responses/{made}", params={"stream": "true"}).content)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"] == http.get(f"/v1/responses/{made}").json()
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"
        query = {"stream": "true", "starting_after": events[-2]["sequence_number"]}
        assert events_in(http.get(f"/v1/responses/{made}", params=query).content) == events[-1:]
        query["starting_after"] = events[-1]["sequence_number"]
        assert http.get(f"/v1/responses/{made}", params=query).content == b""
        service.script = Script([TextDelta("Yes.", 1), done()])
        assert post(http, previous_response_id=made).status_code == 200
        assert service.requests[-1].prompt.messages[1]["content"] == "Hello"


def test_a_response_that_is_cancelled_while_it_waits_for_the_disk_has_an_event_for_each_part_of_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, go, waits, disk = ScriptedService(), Signal(), Signal(), threading.Event()
    service.script = Script([TextDelta("Hello", 1), go, *[TextDelta(f" {number}", 1) for number in range(9)], Signal()])
    monkeypatch.setattr("paceline.api.responses.log.MAX_UNCOMMITTED", 2)
    until, write, append_nowait = LiveEvents.until, EventStore.write, EventLog.append_nowait

    async def noted(live: LiveEvents, is_so: Callable[[], bool]) -> None:
        if not is_so():
            waits.set()
        await until(live, is_so)

    def slow(store: EventStore, batch: LogBatch) -> set[str]:
        assert disk.wait(WAIT)
        return write(store, batch)

    def ending(log: EventLog, live: LiveEvents, *arguments: Any, last: bool = False, **options: Any) -> None:
        append_nowait(log, live, *arguments, last=last, **options)
        if last:
            disk.set()

    with serving(service) as url, client_of(url) as http:
        made = begun(http)
        monkeypatch.setattr(LiveEvents, "until", noted)
        monkeypatch.setattr(EventStore, "write", slow)
        monkeypatch.setattr(EventLog, "append_nowait", ending)
        go.set()
        assert waits.wait()
        assert http.post(f"/v1/responses/{made}/cancel").json()["status"] == "cancelled"
        events = events_in(http.get(f"/v1/responses/{made}", params={"stream": "true"}).content)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert said == events[-1]["response"]["output"][0]["content"][0]["text"]


def test_an_expired_response_can_be_deleted() -> None:
    with serving(ScriptedService(), retention=Retention(max_age=0.05)) as url, client_of(url) as http:
        path = f"/v1/responses/{post(http).json()['id']}"
        while http.get(path).status_code == 200:
            pass
        assert http.delete(path).status_code == 200
        assert http.delete(path).status_code == 404


@pytest.mark.parametrize(("method", "where"), [("GET", ""), ("POST", "/cancel")])
def test_a_response_that_is_deleted_while_it_is_fetched_is_not_found(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, method: str, where: str
) -> None:
    made = post(http, background=True).json()["id"]
    http.get(f"/v1/responses/{made}", params={"stream": "true"})
    find = EventLog.find

    async def deleted(log: EventLog, response: str, **options: bool) -> ResponseRecord | None:
        record = await find(log, response, **options)
        await log.delete(response)
        return record

    monkeypatch.setattr(EventLog, "find", deleted)
    assert error_of(http.request(method, f"/v1/responses/{made}{where}")) == (404, "response_id", None)
