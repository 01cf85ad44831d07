"""The conversation a response continues, its truncation, and that a trial holds no admission."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator

import httpx
import pytest

from paceline.api.chat.request import MAX_MESSAGES
from paceline.api.responses import begun as responses_context
from paceline.errors import RequestError
from paceline.runtime.service import GenerateEvent, GenerateRequest, Generation
from tests.api.responses.test_endpoint import error_of, post
from tests.api.scripted import WAIT, ScriptedService, Signal, client_of

LONG = [{"role": "user", "content": str(number)} for number in range(40)]


class Places:
    """Wraps a service: refuses conversations of more than `fit` messages, and counts admissions."""

    def __init__(self, service: ScriptedService, monkeypatch: pytest.MonkeyPatch, fit: int = 7) -> None:
        self.held = self.max_held = self.admitted = 0
        self.busy_after = 1000  # admissions until it refuses with 429
        self.hold: Signal | None = None  # awaited by the admission after the first
        self.waiting, self.left = Signal(), Signal()
        self._fit = fit
        self._prepare = service.prepare
        monkeypatch.setattr(service, "prepare", self.prepare)

    async def prepare(self, request: GenerateRequest) -> Generation:
        if len(request.prompt.messages) > self._fit:
            raise RequestError("Too long.", code="context_length_exceeded", param="messages")
        if self.admitted >= self.busy_after:
            raise RequestError("Too much to do.", status=429, type="rate_limit_error", code="busy")
        if self.admitted and self.hold is not None:
            self.waiting.set()
            try:
                await self.hold.reached()
            except asyncio.CancelledError:
                self.left.set()
                raise
        place = Place(self, await self._prepare(request))
        self.admitted += 1
        self.held += 1
        self.max_held = max(self.max_held, self.held)
        return place


class Place:
    def __init__(self, places: Places, prepared: Generation) -> None:
        self._places, self._prepared = places, prepared

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        try:
            async for event in self._prepared.run():
                yield event
        finally:
            self._places.held -= 1

    async def aclose(self) -> None:
        self._places.held -= 1
        await self._prepared.aclose()


@pytest.fixture
def places(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    yield Places(service, monkeypatch)


def test_one_place_at_a_time_is_held_while_a_conversation_is_cut(
    http: httpx.Client, service: ScriptedService, places: Places
) -> None:
    assert post(http, input=LONG, truncation="auto", instructions="Be brief.").status_code == 200
    kept = [message["content"] for message in service.requests[-1].prompt.messages]
    assert kept == ["Be brief.", *map(str, range(34, 40))]
    assert (places.held, places.max_held) == (0, 1)


def test_a_conversation_that_cannot_or_may_not_be_truncated_is_too_long(
    http: httpx.Client, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error_of(post(http, input=LONG)) == (400, "input", "context_length_exceeded")
    monkeypatch.setattr(places, "_fit", 0)
    assert error_of(post(http, input=LONG, truncation="auto")) == (400, "input", "context_length_exceeded")
    assert error_of(post(http, truncation="auto")) == (400, "input", "context_length_exceeded")
    assert places.admitted == 0


# ---- earlier turns --------------------------------------------------------------------------------------------------
def test_a_chain_of_many_items_goes_on_without_the_oldest(http: httpx.Client, service: ScriptedService) -> None:
    def numbered(first: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": str(number)} for number in range(first, first + 600)]

    one = post(http, input=numbered(0)).json()["id"]
    two = post(http, input=numbered(600), previous_response_id=one)
    assert error_of(two) == (400, "input", None)
    two = post(http, input=numbered(600), previous_response_id=one, truncation="auto", instructions="Be brief.")
    assert two.status_code == 200, two.text
    received = [message["content"] for message in service.requests[-1].prompt.messages]
    assert len(received) == MAX_MESSAGES and received[0] == "Be brief."
    assert received[1:3] == ["202", "203"] and received[-1] == "1199" and "Hello there." in received
    full = post(
        http, input=numbered(0) + numbered(0)[:400], previous_response_id="resp_0", truncation="auto", instructions="x"
    )
    assert error_of(full)[1:] == ("previous_response_id", "previous_response_not_found"), "though it has no room"
    three = post(http, input="And now?", previous_response_id=two.json()["id"], truncation="auto")
    received = [message["content"] for message in service.requests[-1].prompt.messages]
    assert three.status_code == 200 and len(received) == MAX_MESSAGES and received[-1] == "And now?"


def test_a_chain_is_read_no_further_than_there_is_room(
    http: httpx.Client, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_context, "MAX_EARLIER", 3_500)
    previous = None
    for number in range(4):
        made = post(http, input=f"{number}" * 1000, previous_response_id=previous, truncation="auto")
        assert made.status_code == 200
        previous = made.json()["id"]
    refused = post(http, previous_response_id=previous)
    assert error_of(refused) == (400, "previous_response_id", "context_length_exceeded")
    assert post(http, previous_response_id=previous, truncation="auto").status_code == 200
    received = [message["content"] for message in service.requests[-1].prompt.messages]
    assert received == ["2" * 1000, "Hello there.", "3" * 1000, "Hello there.", "Hi"]


def test_instructions_take_no_room_in_the_conversation(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_context, "MAX_EARLIER", 3_500)
    first = post(http, instructions="Be brief. " * 1000).json()["id"]
    assert post(http, previous_response_id=first).status_code == 200


def test_a_refusal_while_a_conversation_is_cut_leaves_no_place_taken(http: httpx.Client, places: Places) -> None:
    for admissions in (1, 2):
        places.admitted, places.busy_after = 0, admissions
        assert error_of(post(http, input=LONG, truncation="auto")) == (429, None, "busy")
        assert places.held == 0


def test_leaving_while_a_conversation_is_cut_leaves_no_place_taken(url: str, places: Places) -> None:
    places.hold = Signal()
    with client_of(url) as http, pytest.raises(httpx.ReadTimeout):
        body = {"model": "scripted", "input": LONG, "truncation": "auto"}
        http.post("/v1/responses", json=body, timeout=httpx.Timeout(WAIT, read=0.2))
    assert places.waiting.wait() and places.left.wait()
    assert places.held == 0
