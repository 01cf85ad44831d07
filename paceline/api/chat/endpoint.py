"""`POST /v1/chat/completions`: validates, admits the generations and sends the answer. `output` knows its shape."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.output import ChatBody, ChatChunks, ChatMeta
from paceline.api.chat.request import ChatCall, chat_call
from paceline.api.chat.schema import ChatRequest
from paceline.api.generation.attachments import read_conversation
from paceline.api.generation.fan_in import prepare_all
from paceline.api.generation.links import Addresses
from paceline.api.generation.streaming import JsonAnswer, StreamedAnswer
from paceline.api.http.body import while_connected
from paceline.api.models import chat_model
from paceline.api.routes import Route
from paceline.api.vector_stores.search import select_stores
from paceline.errors import RequestError
from paceline.runtime.service import Generation, Service

# Admission of a chat's generations, for every surface whose requests become chat bodies.


async def read_chat(request: Request, service: Service) -> Mapping[str, object]:
    """The body, unread where the key's answers have no room, with its files as text. Raises RequestError."""
    await service.wait_for_room(request.state.identity.key)
    return await read_conversation(request)


async def admit_chat(request: Request, call: ChatCall, service: Service) -> list[Generation]:
    """All of the call's generations, or none, by `prepare_all`. Raises RequestError, and ClientGoneError when the
    client leaves."""
    request.state.model = call.requests[0].model  # for the log
    requests = await select_stores(call.requests, service, request.state.identity, call.vector_stores)
    return await while_connected(request.receive, prepare_all(service, requests))


class ChatEndpoint:
    """The route and the service it uses. Holds no state of a request."""

    def __init__(self, service: Service, *, documents: int, keep_alive: float, addresses: Addresses) -> None:
        self._service = service
        self._documents = documents
        self._keep_alive = keep_alive
        self._addresses = addresses

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="POST",
                path="/v1/chat/completions",
                endpoint=self.__call__,
                summary="Answer a conversation, with what both sides' documents say.",
                scope="chat",
                request=ChatRequest,
                response="chat.ChatCompletion",
                stream="chat.ChatCompletionChunk",
                refusals=(404,),
            ),
        )

    async def __call__(self, request: Request) -> Response:
        body = await read_chat(request, self._service)
        call = chat_call(body, self._service, request.state.identity, documents=self._documents)
        model = chat_model(self._service, call.model)
        try:
            generations = await admit_chat(request, call, self._service)
        except RequestError as error:
            if error.param == "tools" and call.tools is not None and call.tools.legacy:
                error.param = "functions"
            raise
        links = self._addresses.links(request)
        name, fingerprint = f"chatcmpl-{secrets.token_hex(12)}", f"fp_{model.fingerprint[:12]}"
        meta = ChatMeta(name, int(time.time()), fingerprint, call, links, generations[0].prompt_tokens)
        if not call.stream:
            return JsonAnswer(generations, ChatBody(meta), self._keep_alive)
        return StreamedAnswer(generations, ChatChunks(meta), self._keep_alive, meta.id)
