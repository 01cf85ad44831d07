"""`POST /v1/chat/completions`: validates, admits the generations and sends the answer. `output` knows its shape."""

from __future__ import annotations

import secrets
import time

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.output import ChatBody, ChatChunks, ChatMeta
from paceline.api.chat.request import chat_call
from paceline.api.chat.schema import ChatRequest
from paceline.api.generation.fan_in import prepare_all
from paceline.api.generation.streaming import JsonAnswer, StreamedAnswer
from paceline.api.http.body import read_body, while_connected
from paceline.api.http.strict_json import decode_object
from paceline.api.models import chat_model
from paceline.api.routes import Route
from paceline.api.vector_stores.search import select_stores
from paceline.errors import RequestError
from paceline.runtime.service import Service


class ChatEndpoint:
    """The route and the service it uses. Holds no state of a request."""

    def __init__(self, service: Service, *, documents: int, keep_alive: float) -> None:
        self._service = service
        self._documents = documents
        self._keep_alive = keep_alive

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
        self._service.check_room(request.state.identity.key)
        body = decode_object(await read_body(request.receive, request.headers.get("content-length")))
        call = chat_call(body, self._service, request.state.identity, documents=self._documents)
        model = chat_model(self._service, call.model)
        identity = request.state.identity
        requests = await select_stores(call.requests, self._service, identity, call.vector_stores)
        try:
            generations = await while_connected(request.receive, prepare_all(self._service, requests))
        except RequestError as error:
            if error.param == "tools" and call.tools is not None and call.tools.legacy:
                error.param = "functions"
            raise
        meta = ChatMeta(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), f"fp_{model.fingerprint[:12]}", call)
        if not call.stream:
            return JsonAnswer(generations, ChatBody(meta))
        return StreamedAnswer(generations, ChatChunks(meta), self._keep_alive, meta.id)
