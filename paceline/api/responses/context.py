"""What a response is asked after: the turns it continues, and what of it all is left out when that was asked for.

A chain of responses may be longer than any request, so it is read no further than what could be asked at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from paceline.api.chat.schema import MAX_MESSAGES
from paceline.api.http.body import MAX_BODY
from paceline.api.responses.event_log import EventLog
from paceline.api.responses.events import ENDS, Json
from paceline.api.responses.replay import close_interrupted
from paceline.api.responses.schema import ResponseRequest
from paceline.errors import RequestError
from paceline.runtime.service import GenerateRequest, Generation, Service

MAX_EARLIER = 4 * MAX_BODY  # bytes of earlier turns


async def conversation_of(asked: ResponseRequest, given: Sequence[Json], log: EventLog, owner: str) -> list[Json]:
    """Inputs and outputs of the responses that are continued, oldest first, and what is `given` now.

    With `truncation: auto` without the oldest, where there are too many. Raises RequestError (400).
    """
    cut = asked.truncation == "auto"
    room = MAX_MESSAGES - bool(asked.instructions and cut)  # they are a message too
    items = [*await _earlier(asked.previous_response_id, log, owner, room - len(given), cut=cut), *given]
    if len(items) <= room:
        return items
    if not cut:
        raise RequestError(f"A conversation may have {MAX_MESSAGES} items at most.", param="input")
    return items[-room:]


async def _earlier(previous: str | None, log: EventLog, owner: str, room: int, *, cut: bool) -> list[Json]:
    """All of them, or as many of the last as are more than `room` items or, with `cut`, nearly MAX_EARLIER bytes."""
    turns: list[list[Json]] = []
    size = 0
    while previous is not None and (not turns or sum(map(len, turns)) <= room):  # the first is looked for in any case
        running = log.running(previous) is not None  # first: one that ends meanwhile has its end among the rows
        header = await log.find(previous)
        last = None if header is None else await log.output(previous)
        if header is None or last is None or header.owner != owner:
            raise _missing(previous)
        kind, output = last
        if kind not in ENDS:
            if running:
                raise RequestError(f"The response {previous!r} has not ended yet.", param="previous_response_id")
            output = await _cut(previous, log)
        size += len(header.request) + len(output)
        if size > MAX_EARLIER:
            if cut:
                break
            raise RequestError(
                f"The responses that previous_response_id continues hold more than {MAX_EARLIER} bytes. Begin anew, or "
                'leave the oldest out with "truncation": "auto".',
                code="context_length_exceeded",
                param="previous_response_id",
            )
        turns.append([*json.loads(header.request)["input"], *json.loads(output)])
        previous = header.previous
    return [item for turn in reversed(turns) for item in turn]


async def _cut(response: str, log: EventLog) -> str:
    """The output of one that nobody here writes and that has no end."""
    rows = await log.all(response)
    if not rows:
        raise _missing(response)
    last = [*rows, *close_interrupted(rows)][-1]  # or it has its end by now, from the process that writes it
    return json.dumps(json.loads(last.data)["response"]["output"])


def _missing(previous: str) -> RequestError:
    return RequestError(
        f"Previous response with id {previous!r} not found.",
        code="previous_response_not_found",
        param="previous_response_id",
    )


async def prepare(service: Service, asked: ResponseRequest, generation: GenerateRequest) -> Generation:
    """With `truncation: auto`, without the fewest oldest messages that make it fit the context.

    One place at a time is held, and none when this raises or is cancelled: what is only tried is closed at once.
    """
    try:
        return await service.prepare(generation)
    except RequestError as error:
        if error.code != "context_length_exceeded" or asked.truncation != "auto":
            raise
        too_long = error
    messages = generation.messages
    fixed = sum(1 for message in messages[:1] if asked.instructions and message["role"] == "system")

    def without(count: int) -> GenerateRequest:
        return replace(generation, messages=(*messages[:fixed], *messages[fixed + count :]))

    least, most = 1, len(messages) - fixed - 1  # messages to drop
    shortest = most
    while least <= most:
        middle = (least + most) // 2
        if await _fits(service, without(middle)):
            most = middle - 1
        else:
            least = middle + 1
    if least > shortest:
        raise too_long
    return await service.prepare(without(least))


async def _fits(service: Service, generation: GenerateRequest) -> bool:
    try:
        prepared = await service.prepare(generation)
    except RequestError as error:
        if error.code != "context_length_exceeded":
            raise
        return False
    await prepared.aclose()
    return True
