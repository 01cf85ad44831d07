"""Responses to be written: the conversation that one continues, its generation, and those of servers that are gone."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import FastAPI

from paceline.api.chat.request import MAX_MESSAGES, ChatCall, ChatRequest, chat_call
from paceline.api.chat.tools import AnswerReader
from paceline.api.generation.request import must_load, prepare_all
from paceline.api.http.auth import Identity
from paceline.api.http.body import MAX_BODY, Json, encode_json, parse
from paceline.api.http.errors import failure_of
from paceline.api.http.routing import Addresses, Settings
from paceline.api.responses.conversations import items_of
from paceline.api.responses.events import ResponseEvents, Search, Unsaid, close_interrupted
from paceline.api.responses.log import POLL_S, EventLog, LiveEvents
from paceline.api.responses.request import (
    ResponseRequest,
    as_written,
    chat_body,
    first_state,
    new_id,
    search_of,
    set_apart,
)
from paceline.api.responses.runs import DIVERGED, PREFIX, Responses
from paceline.api.responses.store import ENDS, EventRow, ResponseRecord, Turn
from paceline.api.search import filter_of, min_score_of, select_stores
from paceline.errors import RequestError, StorageError
from paceline.runtime.service import AnswerProof, GenerateRequest, Generation, Joining, Service

_log = logging.getLogger("paceline.api")
# ---- the conversation that a response continues: earlier turns, truncated where `truncation` is `auto` ---------------
# A chain of responses may be longer than any request; it is read no further than a request may be long.
MAX_EARLIER = 4 * MAX_BODY  # bytes of earlier turns


async def conversation_of(asked: ResponseRequest, given: Sequence[Json], log: EventLog, caller: Identity) -> list[Json]:
    """Items of the conversation or of the responses that are continued, oldest first, and then those `given` now.

    With `truncation: auto` the oldest are dropped when there are too many. Raises RequestError (400).
    """
    truncate = asked.truncation == "auto"
    room = MAX_MESSAGES - bool(asked.instructions and truncate)  # instructions are a message too
    if asked.conversation_id is not None:
        earlier = [*(await items_of(asked.conversation_id, log, caller)).values()]
    else:
        room_left = room - len(given)
        earlier = await _earlier(asked.previous_response_id, log, caller.key, room_left, truncate=truncate)
    set_apart(given, earlier)
    items = [*earlier, *given]
    if len(items) <= room:
        return items
    if not truncate:
        raise RequestError(f"A conversation may have {MAX_MESSAGES} items at most.", param="input")
    return items[-room:]


async def _earlier(previous: str | None, log: EventLog, owner: str, room: int, *, truncate: bool) -> list[Json]:
    """Items of earlier responses: all, or the latest until they exceed `room` items.

    With `truncate` also no more than MAX_EARLIER bytes.
    """
    turns: list[list[Json]] = []
    size = 0
    while previous is not None and (not turns or sum(map(len, turns)) <= room):  # the latest is looked up in any case
        running = log.running(previous) is not None or await log.elsewhere(previous)  # asked first, as above
        record = await log.find(previous) if previous.startswith(PREFIX) else None
        last = None if record is None else await log.output(previous)
        if record is None or last is None or record.owner != owner:
            raise _context_missing(previous)
        kind, output = last
        if kind not in ENDS:
            if running:
                raise RequestError(f"The response {previous!r} has not ended yet.", param="previous_response_id")
            output = await _interrupted_output(previous, log)
        given = json.loads(record.request)["input"]
        size += len(encode_json(given)) + len(output)
        if size > MAX_EARLIER:
            if truncate:
                break
            raise RequestError(
                f"The responses that previous_response_id continues hold more than {MAX_EARLIER} bytes. Begin anew, or "
                'leave the oldest out with "truncation": "auto".',
                code="context_length_exceeded",
                param="previous_response_id",
            )
        turns.append([*given, *json.loads(output)])
        previous = record.previous
    return [item for turn in reversed(turns) for item in turn]


async def _interrupted_output(response: str, log: EventLog) -> str:
    """The output of a response that has no end and that this process is not writing."""
    rows = await log.all(response)
    if not rows:
        raise _context_missing(response)
    last = [*rows, *close_interrupted(rows)][-1]  # the process that writes it may have ended it by now
    return json.dumps(json.loads(last.data)["response"]["output"])


def _context_missing(previous: str) -> RequestError:
    return RequestError(
        f"Previous response with id {previous!r} not found.",
        code="previous_response_not_found",
        param="previous_response_id",
    )


async def _admitted(service: Service, asked: ResponseRequest, request: GenerateRequest) -> Generation:
    if must_load(service, request.model):
        await service.wait_for_room(request.account.owner)
    (generation,) = await prepare_all(service, [request], partial(_truncated, service, asked))
    return generation


async def _truncated(service: Service, asked: ResponseRequest, request: GenerateRequest) -> Generation:
    """Admit the request. With `truncation: auto`, drop as few of the oldest messages as make it fit the context.

    Holds one admission at a time, and none when this raises or is cancelled: a trial is closed at once."""
    try:
        return await service.prepare(request)
    except RequestError as error:
        if error.code != "context_length_exceeded" or asked.truncation != "auto":
            raise
        too_long = error
    messages = request.prompt.messages
    fixed = sum(1 for message in messages[:1] if asked.instructions and message["role"] == "system")

    def without(count: int) -> GenerateRequest:
        left = (*messages[:fixed], *messages[fixed + count :])
        return replace(request, prompt=replace(request.prompt, messages=left))

    async def fits(count: int) -> bool:
        try:
            generation = await service.prepare(without(count))
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return False
        await generation.aclose()
        return True

    low, high = 1, len(messages) - fixed - 1  # messages to drop
    max_dropped = high
    while low <= high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle - 1
        else:
            low = middle + 1
    if low > max_dropped:
        raise too_long
    return await service.prepare(without(low))


# ---- responses of servers that are gone: asked for once more as they were asked for, with the same seed, so that the
# same text comes again; what has been told of it is not told again (`events.Unsaid`)
DEVICE_S = 5.0  # for the device of such a response to be linked again
BUSY_S = 1.0  # until it is tried again, where there is no room for it


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """A response to be written: what was asked by whom."""

    service: Service
    settings: Settings
    caller: Identity
    asked: ResponseRequest
    id: str
    created: int  # s since 1970
    links: Addresses  # as its client has them
    new_id: Callable[[str], str]  # makes ids of items from their prefix

    async def request(
        self, items: Sequence[Json], predicted: str = ""
    ) -> tuple[ChatCall, GenerateRequest, Search | None]:
        """What its generation is asked for. `items`, `predicted`: as of `prepared`. Raises RequestError."""
        expected = {"prediction": {"content": predicted}} if predicted else {}
        body = parse(ChatRequest, chat_body(self.asked, items) | expected)
        call = chat_call(body, self.service, self.caller, documents=self.settings.documents)
        return call, *await searching(self.asked, call, self.service, self.caller)

    async def prepared(self, items: Sequence[Json], predicted: str = "") -> tuple[Generation, ChatCall, ResponseEvents]:
        """Admit its generation. `items`: the whole conversation. `predicted`: what the text may turn out to be.
        Raises RequestError."""
        asked = self.asked
        with as_written(asked):
            call, wanted, search = await self.request(items, predicted)
            generation = await _admitted(self.service, asked, wanted)
        events = ResponseEvents(
            first_state(asked, self.id, self.created, call.requests[0].wish.sampling),
            reader=AnswerReader(None if call.tools is None else call.tools.parser()),
            search=search,
            new_id=self.new_id,
            clock=lambda: int(time.time()),
            links=self.links,
            report=call.report,
        )
        return generation, call, events

    def again(self, body: Json, earlier: int, joining: Joining) -> Json:
        """All that is needed to write it again, or to compute it. `earlier`: items of the conversation it continues."""
        linked = self.service.links()
        device = joining.device or (linked[0].peer if joining.any_device and len(linked) == 1 else None)
        scopes = None if self.caller.scopes is None else sorted(self.caller.scopes)
        return {
            "asked": {name: value for name, value in body.items() if name != "input"} | {"seed": self.asked.seed},
            "earlier": earlier,
            "device": device,
            "public": self.links.public,
            "caller": [self.caller.device, self.caller.key, scopes, self.caller.name],
        }


async def asked_before(
    record: ResponseRecord, log: EventLog, caller: Identity
) -> tuple[ResponseRequest, list[Json], list[Json]]:
    """What a response was asked for, the items it was given, and its whole conversation. Raises RequestError."""
    kept = json.loads(record.request)
    again, given = kept["again"], kept["input"]
    asked = parse(ResponseRequest, again["asked"] | ({"input": given} if given else {}))
    items = await conversation_of(asked, given, log, caller)
    return asked, given, [*items[: again["earlier"]], *given]  # others may have been added to the conversation since


async def proof_of(
    record: ResponseRecord, log: EventLog, asking: Callable[[ResponseRequest], AskedResponse]
) -> AnswerProof:
    """A response that has ended, computed again. Raises RequestError where there is no room for that."""
    records = await log.records(record.id)
    if not records or "again" not in json.loads(record.request):
        why = "It was cut before its end, written by a stranger's endpoint, or kept by another version"
        return AnswerProof(0, unproven={f"{why}: how it was written is not known.": 0})
    try:
        asked, _, items = await asked_before(record, log, Identity(key=record.owner))
        begun = asking(asked)
        _, wanted, _ = await begun.request(items)
    except RequestError as error:  # what it was asked from is not there any more
        return AnswerProof(
            tokens := sum(len(each.tokens) + each.ends for each in records), unproven={str(error): tokens}
        )
    async with begun.service.of(wanted.model) as served:
        return await served.prove(wanted, records)


class Continuing:
    """Goes on with responses of servers that are gone, from now on; where a program has its log alone, with those that
    were cut when it last ended."""

    def __init__(self, app: FastAPI) -> None:
        """Called on the event loop."""
        self._responses: Responses = app.state.responses
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()
        self._responses.log.take_over(self.resume)
        if self._responses.log.fleet is not None:
            app.state.admission.on_drain = self._responses.leave

    def resume(self, record: ResponseRecord, live: LiveEvents, rows: list[EventRow]) -> None:
        task = asyncio.create_task(self._go_on(record, live, rows))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _go_on(self, record: ResponseRecord, live: LiveEvents, rows: list[EventRow]) -> None:
        log = self._responses.log
        while True:
            try:
                again = json.loads(record.request)["again"]
                if await self._joined(again["device"]):
                    return await self._start(record, live, rows, again)
                return await log.hand_over(live, again["device"])
            except RequestError as error:
                if error.status not in (429, 503):
                    _log.error("%s cannot be continued here: %s", record.id, error)
                    await log.fail(live, failure_of(error))
                    return
                _log.warning("%s waits: %s", record.id, error)  # for room
            except StorageError as error:
                _log.warning("%s waits: %s", record.id, error)
                return log.abandon(live)  # until the database is there again
            except Exception:
                _log.exception("%s could not be continued", record.id)
                await log.fail(live, DIVERGED)
                return
            await asyncio.sleep(BUSY_S)
            if log.fleet is not None:
                return log.abandon(live)  # for any server with room, this one too

    async def _start(
        self, record: ResponseRecord, live: LiveEvents, rows: list[EventRow], again: dict[str, Any]
    ) -> None:
        state = self._app.state
        device, key, scopes, name = again["caller"]
        caller = Identity(device, key, None if scopes is None else frozenset(scopes), name)
        asked, given, items = await asked_before(record, self._responses.log, caller)
        unsaid = Unsaid(rows)
        ids = deque(unsaid.ids)
        links = replace(state.settings.addresses, public=again["public"])
        begun = AskedResponse(
            state.service, state.settings, caller, asked, record.id, int(record.created), links,
            lambda prefix: ids.popleft() if ids and ids[0].startswith(prefix) else new_id(prefix),
        )  # fmt: skip
        generation, call, events = await begun.prepared(items, unsaid.text)
        watch = state.observer.answer({"identity": caller, "model": call.requests[0].model})
        turn = turn_of(asked, given)
        self._responses.start(asked, record, turn, generation, watch, events, (live, unsaid))

    async def _joined(self, device: str | None) -> bool:
        """Wait until the device of a response is linked here, or elsewhere, which is False; or for too long."""
        fleet = self._responses.log.fleet
        if device is None:
            return True
        until = time.monotonic() + DEVICE_S
        while time.monotonic() < until:
            if any(link.peer == device for link in self._app.state.service.links()):
                return True
            if fleet is not None and await asyncio.to_thread(fleet.where, device) is not None:
                return False
            await asyncio.sleep(POLL_S)
        return True


def turn_of(asked: ResponseRequest, given: Sequence[Json]) -> Turn | None:
    """The turn of a conversation that a response will end; None outside of one."""
    if asked.conversation_id is None:
        return None
    return Turn(asked.conversation_id, tuple(encode_json(item) for item in given))


async def searching(
    asked: ResponseRequest, call: ChatCall, service: Service, caller: Identity
) -> tuple[GenerateRequest, Search | None]:
    """Apply a `file_search` tool to the request. Its stores take precedence over those of `paceline`.

    Raises RequestError: 404 for a store that is not the key's, 400 for filters that cannot be used.
    """
    request, condition = call.requests[0], None
    stores: Sequence[str] | None = call.asked.paceline.vector_stores
    index, tool = search_of(asked)
    if tool is not None:
        condition = filter_of(tool.filters, f"tools[{index}].filters")
        min_score = min_score_of(tool.ranking_options, f"tools[{index}].ranking_options")
        request = replace(
            request,
            wish=replace(request.wish, documents=tool.max_num_results or request.wish.documents),
            sources=replace(request.sources, min_score=min_score or request.sources.min_score),
        )
        stores = tool.vector_store_ids or stores
    (request,), attributes = await select_stores([request], service, caller, stores, condition)
    if tool is None:
        return request, None
    user_messages = (message["content"] for message in reversed(request.prompt.messages) if message["role"] == "user")
    return request, Search(next(user_messages, ""), "file_search_call.results" in asked.include, attributes)
