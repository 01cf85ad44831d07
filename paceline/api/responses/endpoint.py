"""`/v1/responses`: made, streamed, resumed, fetched, cancelled, deleted.

A response belongs to the key that made it; to another key it is not there. A client that leaves cancels a response in
the foreground and changes nothing for one in the background: its stream goes on where `starting_after` says. What a
generation fails at after the response was made is told in its stream or, without one, as the HTTP error.
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
from paceline.api.http.admission import AdmissionControl
from paceline.api.http.auth import Identity
from paceline.api.http.body import read_body, while_connected
from paceline.api.http.pagination import PageQuery, answer, listing, parse_query
from paceline.api.http.strict_json import decode_object, encode_json
from paceline.api.http.validation import parse
from paceline.api.responses.context import conversation_of, prepare
from paceline.api.responses.event_log import EventLog
from paceline.api.responses.event_store import Header
from paceline.api.responses.events import ENDS, Json, ResponseEvents, Search
from paceline.api.responses.items import kept
from paceline.api.responses.replay import close_interrupted, replay
from paceline.api.responses.request import as_written, chat_body, check, first_state, search_of
from paceline.api.responses.runs import Run, Runs
from paceline.api.responses.schema import DeletedResponse, ResponseRequest, RetrieveQuery
from paceline.api.responses.stream import LoggedStream
from paceline.api.routes import Route
from paceline.api.vector_stores.search import check_ranking, filter_of, reading_stores, searching_stores
from paceline.errors import RequestError
from paceline.runtime.service import GenerateRequest, Generation, GenerationResult, Service


class ResponsesEndpoint:
    """The routes, with what they need."""

    def __init__(
        self, service: Service, log: EventLog, gate: AdmissionControl, *, documents: int, keep_alive: float
    ) -> None:
        self._service = service
        self._log = log
        self._documents = documents
        self._keep_alive = keep_alive
        self.runs = Runs(log, gate)

    async def close(self) -> None:
        """The server stops: what still runs is cut, and all that was said is written."""
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

    # ---- making -----------------------------------------------------------------------------------------------------
    async def create(self, request: Request) -> Response:
        body = decode_object(await read_body(request.receive, request.headers.get("content-length")))
        asked = parse(ResponseRequest, body)
        check(body, asked)
        identity: Identity = request.state.identity
        given = kept(asked.input, new_id) if body.get("input") is not None else []
        items = await conversation_of(asked, given, self._log, identity.key)
        with as_written(asked):
            call = chat_call(chat_body(asked, items), self._service, identity, documents=self._documents)
            generation, search = await self._searching(asked, call, identity)
            prepared = await while_connected(request.receive, prepare(self._service, asked, generation))
        run = self._start(asked, call, identity, given, search, prepared)
        if asked.background and not asked.stream:
            return answer(run.narration.first)
        cancel = None if asked.background else lambda: self.runs.stop(run.track.header.id)
        if asked.stream:
            return LoggedStream(self._log.follow_track(run.track), self._keep_alive, cancel)
        try:
            final = await while_connected(request.receive, self.runs.ended(run))
        except BaseException:
            await self.runs.stop(run.track.header.id)
            raise
        if run.failure is not None:
            raise run.failure
        return answer(final)

    def _start(
        self,
        asked: ResponseRequest,
        call: ChatCall,
        identity: Identity,
        given: Sequence[Json],
        search: Search | None,
        prepared: Generation,
    ) -> Run:
        now = time.time()
        response = new_id("resp")

        def notes(done: GenerationResult) -> Json:
            note = summary(call, [done])
            return {} if note is None else {"paceline": note}

        narration = ResponseEvents(
            first_state(asked, response, int(now), call.generations[0].sampling),
            calls=call.tools is not None,
            search=search,
            new_id=new_id,
            clock=lambda: int(time.time()),
            notes=notes,
        )
        kept_request = encode_json({"input": given, "background": asked.background})
        header = Header(response, identity.key, now, asked.previous_response_id, kept_request)
        return self.runs.start(header, prepared, narration, stored=asked.store, background=asked.background)

    async def _searching(
        self, asked: ResponseRequest, call: ChatCall, identity: Identity
    ) -> tuple[GenerateRequest, Search | None]:
        """With what a `file_search` tool says of the documents to read. Its stores come before `paceline`'s.

        Raises RequestError: 404 for a store that is not the key's, 400 for filters that cannot be used.
        """
        generation = call.generations[0]
        index, tool = search_of(asked)
        if tool is None:
            (reading,) = await reading_stores([generation], self._service, identity, call.vector_stores)
            return reading, None
        condition = filter_of(tool.filters, f"tools[{index}].filters")
        least = check_ranking(tool.ranking_options, f"tools[{index}].ranking_options")
        generation = replace(
            generation,
            documents=tool.max_num_results or generation.documents,
            min_score=least or generation.min_score,
        )
        stores = tuple(tool.vector_store_ids or ()) or call.vector_stores
        (reading,), attributes = await searching_stores([generation], self._service, identity, stores, condition)
        said = (message["content"] for message in reversed(generation.messages) if message["role"] == "user")
        return reading, Search(next(said, ""), "file_search_call.results" in asked.include, attributes)

    # ---- what was made ----------------------------------------------------------------------------------------------
    async def retrieve(self, request: Request) -> Response:
        asked = parse_query(RetrieveQuery, request.query_params)
        header = await self._found(request)
        if asked.stream:
            after = -1 if asked.starting_after is None else asked.starting_after
            return LoggedStream(self._log.follow(header.id, after), self._keep_alive)
        if asked.starting_after is not None:
            raise RequestError("starting_after is only allowed when stream is true.", param="starting_after")
        return answer(await self._now(header.id))

    async def delete(self, request: Request) -> Response:
        header = await self._found(request, expired=True)
        await self.runs.stop(header.id)
        track = self._log.running(header.id)
        if track is not None:
            await self._log.settled(track)
        await self._log.delete(header.id)
        return answer(DeletedResponse(id=header.id).model_dump())

    async def cancel(self, request: Request) -> Response:
        header = await self._found(request)
        if not json.loads(header.request)["background"]:
            raise RequestError("Only a response in the background can be cancelled; close the others' connection.")
        await self.runs.stop(header.id)
        return answer(await self._now(header.id))

    async def list_input(self, request: Request) -> Response:
        asked = parse_query(PageQuery, request.query_params)
        items = json.loads((await self._found(request)).request)["input"]
        if asked.order == "desc":
            items.reverse()
        for name, id in (("after", asked.after), ("before", asked.before)):
            if id is None:
                continue
            at = next((index for index, item in enumerate(items) if item["id"] == id), None)
            if at is None:
                raise RequestError(f"This response has no input item {id!r}.", param=name)
            items = items[at + 1 :] if name == "after" else items[:at]
        return listing(items[: asked.limit], len(items) > asked.limit)

    async def _found(self, request: Request, *, expired: bool = False) -> Header:
        """The response of the path. Raises RequestError (404) when there is none, or another key made it."""
        response = request.path_params["response_id"]
        header = await self._log.find(response, expired=expired)
        if header is None or header.owner != request.state.identity.key:
            raise _missing(response)
        return header

    async def _now(self, response: str) -> Json:
        """As it is now; one that another process left unfinished as failed.

        Raises RequestError (404) when it has been deleted meanwhile.
        """
        running = self._log.running(response) is not None  # first: one that ends meanwhile has its end among the rows
        last = await self._log.last(response)
        if last is not None and last.type in ENDS:
            return replay([last])
        rows = await self._log.all(response)
        if not rows:
            first = self.runs.first(response)  # it has been made, and nothing of it is written yet
            if first is None:
                raise _missing(response)
            return first
        return replay(rows if running else [*rows, *close_interrupted(rows)])


def _missing(response: str) -> RequestError:
    return RequestError(f"Response with id {response[:64]!r} not found.", status=404, param="response_id")


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"
