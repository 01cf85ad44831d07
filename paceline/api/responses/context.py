"""The conversation a response continues: earlier turns, truncated where `truncation` is `auto`.

A chain of responses may be longer than any request; it is read no further than a request may be long.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from paceline.api.chat.schema import MAX_MESSAGES
from paceline.api.generation.late import LateGeneration, must_load
from paceline.api.http.body import MAX_BODY
from paceline.api.responses.event_log.conversations import Conversations
from paceline.api.responses.event_log.log import EventLog
from paceline.api.responses.event_log.replay import close_interrupted
from paceline.api.responses.event_log.store import ENDS
from paceline.api.responses.events import Json
from paceline.api.responses.schema import ResponseRequest
from paceline.errors import RequestError
from paceline.runtime.service import GenerateRequest, Generation, Service

MAX_EARLIER = 4 * MAX_BODY  # bytes of earlier turns


async def conversation_of(
    asked: ResponseRequest, given: Sequence[Json], log: EventLog, conversations: Conversations, owner: str
) -> list[Json]:
    """Items of the conversation or of the responses that are continued, oldest first, and then those `given` now.

    With `truncation: auto` the oldest are dropped when there are too many. Raises RequestError (400).
    """
    truncate = asked.truncation == "auto"
    room = MAX_MESSAGES - bool(asked.instructions and truncate)  # instructions are a message too
    if asked.conversation_id is not None:
        earlier = await conversations.items(asked.conversation_id, owner)
    else:
        earlier = await _earlier(asked.previous_response_id, log, owner, room - len(given), truncate=truncate)
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
        running = log.running(previous) is not None  # asked first: if it ends meanwhile, the rows hold its end
        record = await log.find(previous)
        last = None if record is None else await log.output(previous)
        if record is None or last is None or record.owner != owner:
            raise _missing(previous)
        kind, output = last
        if kind not in ENDS:
            if running:
                raise RequestError(f"The response {previous!r} has not ended yet.", param="previous_response_id")
            output = await _interrupted_output(previous, log)
        size += len(record.request) + len(output)
        if size > MAX_EARLIER:
            if truncate:
                break
            raise RequestError(
                f"The responses that previous_response_id continues hold more than {MAX_EARLIER} bytes. Begin anew, or "
                'leave the oldest out with "truncation": "auto".',
                code="context_length_exceeded",
                param="previous_response_id",
            )
        turns.append([*json.loads(record.request)["input"], *json.loads(output)])
        previous = record.previous
    return [item for turn in reversed(turns) for item in turn]


async def _interrupted_output(response: str, log: EventLog) -> str:
    """The output of a response that has no end and that this process is not writing."""
    rows = await log.all(response)
    if not rows:
        raise _missing(response)
    last = [*rows, *close_interrupted(rows)][-1]  # the process that writes it may have ended it by now
    return json.dumps(json.loads(last.data)["response"]["output"])


def _missing(previous: str) -> RequestError:
    return RequestError(
        f"Previous response with id {previous!r} not found.",
        code="previous_response_not_found",
        param="previous_response_id",
    )


async def prepare(service: Service, asked: ResponseRequest, request: GenerateRequest) -> Generation:
    """Admit the request. With `truncation: auto`, drop as few of the oldest messages as make it fit the context.

    Where the model has to be loaded first, it is admitted when it is run, and may be refused then.
    """
    if must_load(service, request.model):
        await service.wait_for_room(request.owner)
        return LateGeneration(partial(_prepare_now, service, asked, request))
    return await _prepare_now(service, asked, request)


async def _prepare_now(service: Service, asked: ResponseRequest, request: GenerateRequest) -> Generation:
    """Holds one admission at a time, and none when this raises or is cancelled: a trial is closed at once."""
    try:
        return await service.prepare(request)
    except RequestError as error:
        if error.code != "context_length_exceeded" or asked.truncation != "auto":
            raise
        too_long = error
    messages = request.messages
    fixed = sum(1 for message in messages[:1] if asked.instructions and message["role"] == "system")

    def without(count: int) -> GenerateRequest:
        return replace(request, messages=(*messages[:fixed], *messages[fixed + count :]))

    low, high = 1, len(messages) - fixed - 1  # messages to drop
    max_dropped = high
    while low <= high:
        middle = (low + high) // 2
        if await _fits(service, without(middle)):
            high = middle - 1
        else:
            low = middle + 1
    if low > max_dropped:
        raise too_long
    return await service.prepare(without(low))


async def _fits(service: Service, request: GenerateRequest) -> bool:
    try:
        generation = await service.prepare(request)
    except RequestError as error:
        if error.code != "context_length_exceeded":
            raise
        return False
    await generation.aclose()
    return True
