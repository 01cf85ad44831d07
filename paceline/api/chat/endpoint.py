"""`POST /v1/chat/completions`: validates, admits the generations and sends the answer. `output` knows its shape."""

from __future__ import annotations

import secrets
import time

from fastapi import APIRouter, Security
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.output import ChatChunks, ChatMeta, WholeCompletion
from paceline.api.chat.request import ChatCall, chat_call
from paceline.api.chat.schema import ChatRequest
from paceline.api.dependencies import Caller, ServiceDep, SettingsDep
from paceline.api.generation.attachments import AnswerRoute
from paceline.api.generation.fan_in import prepare_all
from paceline.api.generation.streaming import JsonAnswer, StreamedAnswer
from paceline.api.http.body import while_connected
from paceline.api.http.routing import key
from paceline.api.models import chat_model
from paceline.api.openapi import REFUSALS, official
from paceline.api.vector_stores.search import select_stores
from paceline.errors import RequestError
from paceline.runtime.service import Generation, Service


async def admit_chat(request: Request, call: ChatCall, service: Service) -> list[Generation]:
    """All of the call's generations, or none, by `prepare_all`. Raises RequestError, and ClientGoneError when the
    client leaves."""
    request.state.model = call.requests[0].model  # for the log
    requests, _ = await select_stores(call.requests, service, request.state.identity, call.asked.paceline.vector_stores)
    return await while_connected(request.receive, prepare_all(service, requests))


router = APIRouter(
    route_class=AnswerRoute,
    dependencies=[Security(key, scopes=["chat"])],
    responses=REFUSALS,
    tags=["chat"],
)


@router.post("/v1/chat/completions", responses=official("chat.ChatCompletion", stream="chat.ChatCompletionChunk"))
async def complete_chat(
    asked: ChatRequest, request: Request, service: ServiceDep, settings: SettingsDep, caller: Caller
) -> Response:
    """Answer a conversation, with what both sides' documents say."""
    call = chat_call(asked, service, caller, documents=settings.documents)
    model = chat_model(service, asked.model)
    try:
        generations = await admit_chat(request, call, service)
    except RequestError as error:
        if error.param == "tools" and call.tools is not None and call.tools.legacy:
            error.param = "functions"
        raise
    links = settings.addresses.links(request)
    name, fingerprint = f"chatcmpl-{secrets.token_hex(12)}", f"fp_{model.fingerprint[:12]}"
    meta = ChatMeta(name, int(time.time()), fingerprint, call, links, generations[0].prompt_tokens)
    # The answer starts when the response is sent: `GenerationFanIn` calls `run` of each generation.
    if not asked.stream:
        return JsonAnswer(generations, WholeCompletion(meta), settings.keep_alive)
    return StreamedAnswer(generations, ChatChunks(meta), settings.keep_alive, meta.id)
