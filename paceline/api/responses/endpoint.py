"""`/v1/responses`: create, stream, resume, fetch, cancel and delete responses.

A response belongs to the key that created it; another key gets 404. A client that leaves cancels a foreground response;
a background response goes on, and its stream can be resumed from `starting_after`. A generation that fails after the
response was created is reported in its stream or, without one, as an HTTP error.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.output import summary
from paceline.api.chat.request import ChatCall, chat_call
from paceline.api.generation.attachments import read_conversation
from paceline.api.generation.held_open import HeldOpen
from paceline.api.generation.links import NO_ADDRESSES, Addresses, PassageLinks
from paceline.api.http.auth import Identity
from paceline.api.http.body import while_connected
from paceline.api.http.limits.admission import AdmissionControl
from paceline.api.http.pagination import PageQuery, answer, listing, page_of, parse_query
from paceline.api.http.strict_json import encode_json
from paceline.api.http.validation import parse
from paceline.api.observation.answers import AnswerWatch
from paceline.api.responses.context import conversation_of, prepare
from paceline.api.responses.event_log.conversation_rows import Turn
from paceline.api.responses.event_log.conversations import Conversations
from paceline.api.responses.event_log.log import EventLog
from paceline.api.responses.event_log.replay import close_interrupted, replay
from paceline.api.responses.event_log.store import ENDS, ResponseRecord
from paceline.api.responses.events import Json, ResponseEvents, Search
from paceline.api.responses.items import input_items
from paceline.api.responses.request import as_written, chat_body, check, first_state, search_of
from paceline.api.responses.runs import Run, Runs
from paceline.api.responses.schema import DeletedResponse, ResponseRequest, RetrieveQuery
from paceline.api.responses.stream import EventLogAnswer
from paceline.api.routes import Route
from paceline.api.vector_stores.search import filter_of, min_score_of, select_stores, select_stores_with_attributes
from paceline.errors import RequestError
from paceline.runtime.service import GenerateRequest, Generation, GenerationResult, Service


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
        body = await read_conversation(request)
        asked = parse(ResponseRequest, body)
        check(body, asked)
        identity: Identity = request.state.identity
        given = input_items(asked.input, new_id) if body.get("input") is not None else []
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
            return EventLogAnswer(self._log.follow_live(run.live), self._keep_alive, cancel)
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
        record = await self._log.find(response, expired=expired)
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


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"
