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

from paceline.api.answers import summary
from paceline.api.body import read_body, while_connected
from paceline.api.encoding import decode_object, encode_json
from paceline.api.file_search import check_ranking, filter_of, reading_stores
from paceline.api.gate import Gate
from paceline.api.keys import Identity
from paceline.api.lists import PageQuery, answer, listing, parse_query
from paceline.api.log_rows import Header
from paceline.api.requests import ChatCall, chat_call, parse
from paceline.api.responses_call import as_written, chat_body, check, first_state, search_of
from paceline.api.responses_events import ENDS, Json, Narration, Search
from paceline.api.responses_fold import close_cut, fold
from paceline.api.responses_items import kept
from paceline.api.responses_runs import Run, Runs
from paceline.api.responses_schema import DeletedResponse, ResponseRequest, RetrieveQuery
from paceline.api.responses_stream import LoggedStream
from paceline.api.routes import Route
from paceline.api.schema import MAX_MESSAGES
from paceline.api.token_log import TokenLog
from paceline.errors import RequestError
from paceline.runtime.service import Done, GenerateRequest, Prepared, Service


class ResponsesEndpoint:
    """The routes, with what they need."""

    def __init__(self, service: Service, log: TokenLog, gate: Gate, *, documents: int, keep_alive: float) -> None:
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
        items = [*await self._earlier(asked.previous_response_id, identity), *given]
        if len(items) > MAX_MESSAGES:
            raise RequestError(f"A conversation may have {MAX_MESSAGES} items at most.", param="input")
        with as_written(asked):
            call = chat_call(chat_body(asked, items), self._service, identity, documents=self._documents)
            generation = await self._searching(asked, call, identity)
            prepared = await while_connected(request.receive, self._prepare(asked, generation))
        run = self._start(asked, call, identity, given, prepared)
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
        self, asked: ResponseRequest, call: ChatCall, identity: Identity, given: Sequence[Json], prepared: Prepared
    ) -> Run:
        now = time.time()
        response = new_id("resp")

        def notes(done: Done) -> Json:
            note = summary(call, [done])
            return {} if note is None else {"paceline": note}

        narration = Narration(
            first_state(asked, response, int(now)),
            calls=call.tools is not None,
            search=_search(asked, call.generations[0]),
            new_id=new_id,
            clock=lambda: int(time.time()),
            notes=notes,
        )
        kept_request = encode_json({"input": given, "background": asked.background})
        header = Header(response, identity.key, now, asked.previous_response_id, kept_request)
        return self.runs.start(header, prepared, narration, stored=asked.store, background=asked.background)

    async def _searching(self, asked: ResponseRequest, call: ChatCall, identity: Identity) -> GenerateRequest:
        """With what a `file_search` tool says of the documents to read. Its stores come before `paceline`'s.

        Raises RequestError: 404 for a store that is not the key's, 400 for filters that cannot be used.
        """
        generation, stores, condition = call.generations[0], call.vector_stores, None
        index, tool = search_of(asked)
        if tool is not None:
            stores = tuple(tool.vector_store_ids or ()) or stores
            condition = filter_of(tool.filters, f"tools[{index}].filters")
            least = check_ranking(tool.ranking_options, f"tools[{index}].ranking_options")
            generation = replace(
                generation,
                documents=tool.max_num_results or generation.documents,
                min_score=least or generation.min_score,
            )
        (reading,) = await reading_stores([generation], self._service, identity, stores, condition)
        return reading

    async def _prepare(self, asked: ResponseRequest, generation: GenerateRequest) -> Prepared:
        """With `truncation: auto`, without the fewest oldest messages that make it fit the context."""
        try:
            return await self._service.prepare(generation)
        except RequestError as error:
            if error.code != "context_length_exceeded" or asked.truncation != "auto":
                raise
            too_long = error
        messages = generation.messages
        fixed = sum(1 for message in messages[:1] if asked.instructions and message["role"] == "system")
        least, most = 1, len(messages) - fixed - 1  # messages to drop
        found: Prepared | None = None
        while least <= most:
            middle = (least + most) // 2
            shorter = replace(generation, messages=(*messages[:fixed], *messages[fixed + middle :]))
            try:
                fits = await self._service.prepare(shorter)
            except RequestError as error:
                if error.code != "context_length_exceeded":
                    raise
                least = middle + 1
                continue
            if found is not None:
                await found.aclose()
            found, most = fits, middle - 1
        if found is None:
            raise too_long
        return found

    async def _earlier(self, previous: str | None, identity: Identity) -> list[Json]:
        """Inputs and outputs of the responses that are continued, oldest first."""
        turns: list[list[Json]] = []
        while previous is not None:
            header = await self._log.find(previous)
            last = None if header is None else await self._log.last(previous)
            if header is None or last is None or header.owner != identity.key:
                raise RequestError(
                    f"Previous response with id {previous!r} not found.",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            if last.type not in ENDS:
                if self._log.running(previous):
                    raise RequestError(f"The response {previous!r} has not ended yet.", param="previous_response_id")
                last = close_cut(await self._log.all(previous))[0]
            turns.append([*json.loads(header.request)["input"], *json.loads(last.data)["response"]["output"]])
            if sum(map(len, turns)) > MAX_MESSAGES:
                break
            previous = header.previous
        return [item for turn in reversed(turns) for item in turn]

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
        header = await self._found(request)
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

    async def _found(self, request: Request) -> Header:
        """The response of the path. Raises RequestError (404) when there is none, or another key made it."""
        response = request.path_params["response_id"]
        header = await self._log.find(response)
        if header is None or header.owner != request.state.identity.key:
            raise RequestError(f"Response with id {response[:64]!r} not found.", status=404, param="response_id")
        return header

    async def _now(self, response: str) -> Json:
        """As it is now; one that another process left unfinished as failed."""
        last = await self._log.last(response)
        if last is not None and last.type in ENDS:
            return fold([last])
        rows = await self._log.all(response)
        return fold(rows if self._log.running(response) else [*rows, *close_cut(rows)])


def _search(asked: ResponseRequest, generation: GenerateRequest) -> Search | None:
    if search_of(asked)[1] is None:
        return None
    question = next((message["content"] for message in reversed(generation.messages) if message["role"] == "user"), "")
    return Search(question, "file_search_call.results" in asked.include)


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"
