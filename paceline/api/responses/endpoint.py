"""`/v1/responses`: create, stream, resume, fetch, cancel and delete responses.

A response belongs to the key that created it; another key gets 404. A client that leaves cancels a foreground response;
a background response goes on, and its stream can be resumed from `starting_after`. A generation that fails after the
response was created is reported in its stream or, without one, as an HTTP error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.api.chat.output import summary
from paceline.api.chat.request import ChatCall, chat_call
from paceline.api.chat.schema import MAX_MESSAGES
from paceline.api.generation.attachments import read_conversation
from paceline.api.generation.fan_in import LateGeneration, must_load
from paceline.api.generation.links import NO_ADDRESSES, Addresses, PassageLinks
from paceline.api.generation.streaming import HeldOpen, put, send_part
from paceline.api.http import sse
from paceline.api.http.admission import AdmissionControl
from paceline.api.http.auth import Identity
from paceline.api.http.body import MAX_BODY, ClientGoneError, parse, while_connected
from paceline.api.http.errors import encode_json, failure_of
from paceline.api.http.pagination import PageQuery, answer, listing, page_of, parse_query
from paceline.api.observation import AnswerWatch
from paceline.api.responses.conversations import Conversations
from paceline.api.responses.events import Json, ResponseEvents, Search
from paceline.api.responses.log import EventLog, EventReader
from paceline.api.responses.replay import close_interrupted, replay
from paceline.api.responses.request import (
    DeletedResponse,
    ResponseRequest,
    RetrieveQuery,
    as_written,
    chat_body,
    first_state,
    input_items,
    new_id,
    search_of,
)
from paceline.api.responses.runs import Run, Runs
from paceline.api.responses.store import ENDS, ResponseRecord, Turn
from paceline.api.routes import Route
from paceline.api.vector_stores.search import filter_of, min_score_of, select_stores, select_stores_with_attributes
from paceline.errors import PacelineError, RequestError
from paceline.runtime.service import GenerateRequest, Generation, GenerationResult, Service

# The conversation a response continues: earlier turns, truncated where `truncation` is `auto`.
#
# A chain of responses may be longer than any request; it is read no further than a request may be long.


PREFIX = "resp_"  # of ids: conversations, which lie in the same log, have another
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
        record = await log.find(previous) if previous.startswith(PREFIX) else None
        last = None if record is None else await log.output(previous)
        if record is None or last is None or record.owner != owner:
            raise _context_missing(previous)
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
        raise _context_missing(response)
    last = [*rows, *close_interrupted(rows)][-1]  # the process that writes it may have ended it by now
    return json.dumps(json.loads(last.data)["response"]["output"])


def _context_missing(previous: str) -> RequestError:
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


# Server-sent events of one response from the event log, named as OpenAI's clients expect them.


class EventLogAnswer(Response):
    """Sends the events of `reader`, and a comment after `keep_alive` seconds of silence. There is no [DONE] at the end.

    `on_gone`: called when the client leaves before the end.
    """

    def __init__(
        self, reader: EventReader, keep_alive: float, on_gone: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        super().__init__()
        self._reader = reader
        self._keep_alive = keep_alive
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's signature
        try:
            await while_connected(receive, self._write(send))
        except BaseException:
            if self._on_gone is not None:
                await self._on_gone()
            raise

    async def _write(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in sse.HEADERS.items()]
        await send_part(send, {"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while (rows := await self._reader.next(self._keep_alive)) != []:
                if rows is None:
                    await put(send, sse.PING)
                else:
                    await put(send, b"".join(sse.named(row.type, row.data) for row in rows))
            await put(send, b"", last=True)
        except ClientGoneError:
            raise
        except PacelineError as error:  # the log cannot be written or read: this event is not in it
            event = {"type": "error", "code": "server_error", "message": failure_of(error).message, "param": None}
            body = encode_json(event | {"sequence_number": self._reader.after + 1})
            await put(send, sse.named("error", body), last=True)


class ResponsesEndpoint:
    """The routes, and the service, event log and runs they use."""

    def __init__(
        self,
        service: Service,
        log: EventLog,
        admission: AdmissionControl,
        *,
        documents: int,
        keep_alive: float,
        addresses: Addresses = NO_ADDRESSES,
    ) -> None:
        self._service = service
        self._log = log
        self._documents = documents
        self._keep_alive = keep_alive
        self._addresses = addresses
        self.conversations = Conversations(log)
        self.runs = Runs(log, admission)

    async def close(self) -> None:
        """Interrupt running responses and write all their events: the server stops."""
        await self.runs.close()
        await asyncio.to_thread(self._log.close)

    def routes(self) -> tuple[Route, ...]:
        one = "/v1/responses/{response_id}"
        return (
            Route(
                method="POST",
                path="/v1/responses",
                endpoint=self.create,
                summary="Answer an input, with what both sides' documents say.",
                scope="responses",
                request=ResponseRequest,
                response="responses.Response",
                stream="responses.ResponseStreamEvent",
                refusals=(404,),
            ),
            Route(
                method="GET",
                path=one,
                endpoint=self.retrieve,
                summary="Fetch a stored response, or follow its events from any of them on.",
                scope="responses",
                query=RetrieveQuery,
                response="responses.Response",
                stream="responses.ResponseStreamEvent",
                refusals=(400, 404),
            ),
            Route(
                method="DELETE",
                path=one,
                endpoint=self.delete,
                summary="Delete a response; one that is running is cancelled first.",
                scope="responses",
                response=DeletedResponse,
                refusals=(404,),
            ),
            Route(
                method="POST",
                path=one + "/cancel",
                endpoint=self.cancel,
                summary="Cancel a response in the background.",
                scope="responses",
                response="responses.Response",
                refusals=(404,),
            ),
            Route(
                method="GET",
                path=one + "/input_items",
                endpoint=self.list_input,
                summary="List what a response was asked.",
                scope="responses",
                query=PageQuery,
                response="SyncCursorPage[responses.ResponseItem]",
                refusals=(400, 404),
            ),
        )

    # ---- creating ---------------------------------------------------------------------------------------------------
    async def create(self, request: Request) -> Response:
        asked = parse(ResponseRequest, await read_conversation(request))
        identity: Identity = request.state.identity
        given = input_items(asked.input) if "input" in asked.model_fields_set else []
        items = await conversation_of(asked, given, self._log, self.conversations, identity.key)
        with as_written(asked):
            call = chat_call(chat_body(asked, items), self._service, identity, documents=self._documents)
            request.state.model = call.requests[0].model  # for the log
            wanted, search = await self._searching(asked, call, identity)
            generation = await while_connected(request.receive, prepare(self._service, asked, wanted))
        try:
            watch = request.app.state.observer.answer(request.scope["state"])
            links = self._addresses.links(request)
            run = self._start(asked, call, identity, given, search, generation, watch, links)
        except RequestError:
            await generation.aclose()  # it has not begun
            raise
        if asked.background and not asked.stream:
            return answer(run.response_events.first)
        cancel = None if asked.background else lambda: self.runs.stop(run.live.record.id)
        if asked.stream:
            return EventLogAnswer(self._log.follow(run.live.record.id), self._keep_alive, cancel)
        return HeldOpen(lambda: self._whole(run), self._keep_alive)

    async def _whole(self, run: Run) -> bytes:
        """The response once it has ended. Cancels it when this is cancelled."""
        try:
            final = await self.runs.ended(run)
        except BaseException:
            await self.runs.stop(run.live.record.id)
            raise
        if run.failure is not None:
            raise run.failure
        return encode_json(final)

    def _start(
        self,
        asked: ResponseRequest,
        call: ChatCall,
        identity: Identity,
        given: Sequence[Json],
        search: Search | None,
        generation: Generation,
        watch: AnswerWatch,
        links: PassageLinks,
    ) -> Run:
        now = time.time()
        response = new_id("resp")

        def extension(done: GenerationResult) -> Json:
            note = summary(call, [done], links)
            return {} if note is None else {"paceline": note}

        response_events = ResponseEvents(
            first_state(asked, response, int(now), call.requests[0].sampling),
            calls=call.tools is not None,
            search=search,
            new_id=new_id,
            clock=lambda: int(time.time()),
            extension=extension,
            links=links,
        )
        stored_request = encode_json({"input": given, "background": asked.background})
        record = ResponseRecord(response, identity.key, now, asked.previous_response_id, stored_request)
        turn = None
        if asked.conversation_id is not None:
            turn = Turn(asked.conversation_id, tuple(encode_json(item) for item in given))
        return self.runs.start(
            record, generation, watch, response_events, stored=asked.store, background=asked.background, turn=turn
        )

    async def _searching(
        self, asked: ResponseRequest, call: ChatCall, identity: Identity
    ) -> tuple[GenerateRequest, Search | None]:
        """Apply a `file_search` tool to the request. Its stores take precedence over those of `paceline`.

        Raises RequestError: 404 for a store that is not the key's, 400 for filters that cannot be used.
        """
        request = call.requests[0]
        index, tool = search_of(asked)
        if tool is None:
            (request,) = await select_stores([request], self._service, identity, call.vector_stores)
            return request, None
        condition = filter_of(tool.filters, f"tools[{index}].filters")
        min_score = min_score_of(tool.ranking_options, f"tools[{index}].ranking_options")
        request = replace(
            request,
            documents=tool.max_num_results or request.documents,
            min_score=min_score or request.min_score,
        )
        stores = tuple(tool.vector_store_ids or ()) or call.vector_stores
        user_messages = (message["content"] for message in reversed(request.messages) if message["role"] == "user")
        query = next(user_messages, "")
        (request,), attributes = await select_stores_with_attributes(
            [request], self._service, identity, stores, condition
        )
        return request, Search(query, "file_search_call.results" in asked.include, attributes)

    # ---- stored responses -------------------------------------------------------------------------------------------
    async def retrieve(self, request: Request) -> Response:
        asked = parse_query(RetrieveQuery, request.query_params)
        record = await self._found(request)
        if asked.stream:
            after = -1 if asked.starting_after is None else asked.starting_after
            return EventLogAnswer(self._log.follow(record.id, after), self._keep_alive)
        if asked.starting_after is not None:
            raise RequestError("starting_after is only allowed when stream is true.", param="starting_after")
        return answer(await self._now(record.id))

    async def delete(self, request: Request) -> Response:
        record = await self._found(request, expired=True)
        await self.runs.stop(record.id)
        live = self._log.running(record.id)
        if live is not None:
            await self._log.wait_committed(live)
        await self._log.delete(record.id)
        return answer(DeletedResponse(id=record.id).model_dump())

    async def cancel(self, request: Request) -> Response:
        record = await self._found(request)
        if not json.loads(record.request)["background"]:
            raise RequestError("Only a response in the background can be cancelled; close the others' connection.")
        await self.runs.stop(record.id)
        return answer(await self._now(record.id))

    async def list_input(self, request: Request) -> Response:
        asked = parse_query(PageQuery, request.query_params)
        items = json.loads((await self._found(request)).request)["input"]
        return listing(*page_of(items, asked))

    async def _found(self, request: Request, *, expired: bool = False) -> ResponseRecord:
        """The response named in the path. Raises RequestError (404) when there is none, or another key created it."""
        response = request.path_params["response_id"]
        record = await self._log.find(response, expired=expired) if response.startswith(PREFIX) else None
        if record is None or record.owner != request.state.identity.key:
            raise _missing(response)
        return record

    async def _now(self, response: str) -> Json:
        """The current state of a response; failed if another process left it unfinished.

        Raises RequestError (404) when it has been deleted meanwhile.
        """
        running = self._log.running(response) is not None  # asked first: if it ends meanwhile, the rows hold its end
        last = await self._log.last(response)
        if last is not None and last.type in ENDS:
            return replay([last])
        rows = await self._log.all(response)
        if not rows:
            first = self.runs.first(response)  # it has been created, and nothing is written yet
            if first is None:
                raise _missing(response)
            return first
        return replay(rows if running else [*rows, *close_interrupted(rows)])


def _missing(response: str) -> RequestError:
    return RequestError(f"Response with id {response[:64]!r} not found.", status=404, param="response_id")
