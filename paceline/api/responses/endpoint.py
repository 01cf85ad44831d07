"""`/v1/responses`: create, stream, resume, fetch, verify, cancel and delete responses.

A response belongs to the key that created it; another key gets 404. A client that leaves cancels a foreground response;
a background response goes on, and its stream can be resumed from `starting_after`. A generation that fails after the
response was created is reported in its stream or, without one, as an HTTP error.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.api.generation.attachments import ConversationRoute
from paceline.api.generation.streaming import EventStream, HeldOpen, sse_named
from paceline.api.http.body import Json, PageQuery, answer, encode_json, listing, page_of, while_connected
from paceline.api.http.errors import failure_of
from paceline.api.http.routing import Caller, ServiceDep, SettingsDep, of_app
from paceline.api.models import switch_of
from paceline.api.openapi import answered, keyed_router
from paceline.api.responses.begun import AskedResponse, conversation_of, proof_of, turn_of
from paceline.api.responses.log import EventLog
from paceline.api.responses.request import (
    DeletedResponse,
    ResponseRequest,
    RetrieveQuery,
    Verification,
    input_items,
    new_id,
    verification,
)
from paceline.api.responses.runs import Responses, Run
from paceline.api.responses.store import EventRow, ResponseRecord
from paceline.errors import PacelineError, RequestError
from paceline.runtime.service import AUTO


class LoggedAnswer(EventStream):
    """The events of a response above sequence number `after`, from the log, named as OpenAI's clients expect them.
    There is no [DONE] at the end. `on_gone`: awaited when the client leaves before the end."""

    def __init__(
        self, log: EventLog, response: str, *, after: int = -1, on_gone: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        super().__init__(self._pieces(log.follow(response, after), after))
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self.ended and self._on_gone is not None:
                await self._on_gone()

    async def _pieces(self, events: AsyncIterator[list[EventRow]], after: int) -> AsyncIterator[bytes]:
        try:
            async for rows in events:
                yield b"".join(sse_named(row.type, row.data) for row in rows)
                after = rows[-1].sequence
        except PacelineError as error:  # the log cannot be written or read: this event is not in it
            event = {"type": "error", "code": "server_error", "message": failure_of(error).message, "param": None}
            yield sse_named("error", encode_json(event | {"sequence_number": after + 1}))
        self.ended = True


# ---- the routes -----------------------------------------------------------------------------------------------------
ResponsesDep = Annotated[Responses, of_app("responses")]


async def _found(response_id: str, responses: ResponsesDep, caller: Caller) -> ResponseRecord:
    return await responses.find(response_id, caller.key)


Found = Annotated[ResponseRecord, Depends(_found)]
_SHAPE = answered("responses.Response")
_STREAMED = answered("responses.Response", stream="responses.ResponseStreamEvent")

router = keyed_router("responses", "responses", prefix="/v1/responses", route=ConversationRoute)


@router.post("", responses=_STREAMED)
async def create_response(
    asked: ResponseRequest,
    request: Request,
    service: ServiceDep,
    settings: SettingsDep,
    caller: Caller,
    responses: ResponsesDep,
) -> Response:
    """Answer an input, with what both sides' documents say."""
    workflows = ("workflow", asked.paceline.workflow), switch_of(asked.model, service)
    is_long = asked.background and ("workflow", "long") in workflows
    goes_on = is_long or responses.log.fleet is not None  # another server, or this one when it is back, ends it
    if goes_on and asked.store and asked.seed is None:
        asked = asked.model_copy(update={"seed": secrets.randbits(63)})
    now, response_id = time.time(), new_id("resp")
    begun = AskedResponse(
        service, settings, caller, asked, response_id, int(now), settings.addresses.of(request), new_id
    )
    given = input_items(asked.input) if "input" in asked.model_fields_set else []
    items = await conversation_of(asked, given, responses.log, caller)
    generation, call, response_events = await while_connected(request.receive, begun.prepared(items))
    request.state.model = call.requests[0].model  # for the log, and the metrics
    request.state.auto = call.requests[0].wish.strategy == AUTO  # likewise
    kept: Json = {"input": given, "background": asked.background}
    if is_long:
        kept["goes_on"] = True  # this server ends it when it is back
    if asked.store:
        kept["again"] = begun.again(await request.json(), len(items) - len(given), call.requests[0].joining)
    record = ResponseRecord(response_id, caller.key, now, asked.previous_response_id, encode_json(kept))
    watch = request.app.state.observer.answer(request.scope["state"])
    try:
        run = responses.start(asked, record, turn_of(asked, given), generation, watch, response_events)
    except RequestError:
        await generation.aclose()  # it has not begun
        raise
    if asked.background and not asked.stream:
        await responses.log.wait_begun(run.live)
        return answer(response_events.first)
    if asked.stream:
        cancel = None if asked.background else lambda: responses.stop(response_id)
        return LoggedAnswer(responses.log, response_id, on_gone=cancel)
    return HeldOpen(lambda: _whole(responses, run))


async def _whole(responses: Responses, run: Run) -> bytes:
    """The response once it has ended. Cancels it when this is cancelled."""
    try:
        final = await responses.ended(run)
    except BaseException:
        await responses.stop(run.live.record.id)
        raise
    if run.failure is not None:
        raise run.failure
    return encode_json(final)


@router.get("/{response_id}", responses=_STREAMED)
async def show_response(record: Found, query: Annotated[RetrieveQuery, Query()], responses: ResponsesDep) -> Response:
    """Fetch a stored response, or follow its events from any of them on."""
    if query.stream:
        after = -1 if query.starting_after is None else query.starting_after
        return LoggedAnswer(responses.log, record.id, after=after)
    if query.starting_after is not None:
        raise RequestError("starting_after is only allowed when stream is true.", param="starting_after")
    return answer(await responses.now(record.id))


async def _its_writer(request: Request, responses: Responses, response_id: str) -> Response | None:
    """The answer of the other server that writes a response; None where none does."""
    hops = request.app.state.admission.hops
    return None if hops is None else await hops.to(request, await responses.log.holder(response_id) or "")


@router.delete("/{response_id}", response_model=DeletedResponse)
async def delete_response(
    response_id: str, responses: ResponsesDep, caller: Caller, service: ServiceDep, request: Request
) -> DeletedResponse | Response:
    """Delete a response, and what answers of its key have taught look-up tables; one that is running is cancelled
    first."""
    record = await responses.find(response_id, caller.key, expired=True)
    if (passed := await _its_writer(request, responses, record.id)) is not None:
        return passed
    await responses.stop(record.id)
    live = responses.log.running(record.id)
    if live is not None:
        await responses.log.wait_committed(live)
    await responses.log.delete(record.id)
    await service.forget_answers(caller.key)
    return DeletedResponse(id=record.id)


@router.post("/{response_id}/cancel", responses=_SHAPE)
async def cancel_response(record: Found, responses: ResponsesDep, request: Request) -> Response:
    """Cancel a response in the background."""
    if not json.loads(record.request)["background"]:
        raise RequestError("Only a response in the background can be cancelled; close the others' connection.")
    if (passed := await _its_writer(request, responses, record.id)) is not None:
        return passed
    await responses.stop(record.id)
    return answer(await responses.now(record.id))


@router.post("/{response_id}/verify", responses=answered(Verification))
async def verify_response(
    record: Found, request: Request, responses: ResponsesDep, service: ServiceDep, settings: SettingsDep, caller: Caller
) -> Response:
    """Compute a stored answer again, from its seed, models and documents, and say of each token whether it is the one
    that the strategy gives after those before it."""
    if responses.log.running(record.id) is not None or await responses.log.elsewhere(record.id):
        raise RequestError("This response has not ended yet.", param="response_id")
    links = settings.addresses.of(request)

    def asking(asked: ResponseRequest) -> AskedResponse:
        return AskedResponse(service, settings, caller, asked, record.id, int(record.created), links, new_id)

    async def verified() -> bytes:
        return encode_json(verification(record.id, await proof_of(record, responses.log, asking)))

    return HeldOpen(verified)


@router.get("/{response_id}/input_items", responses=answered("SyncCursorPage[responses.ResponseItem]"))
async def list_input(record: Found, query: Annotated[PageQuery, Query()]) -> Response:
    """List what a response was asked."""
    return listing(*page_of(json.loads(record.request)["input"], query))
