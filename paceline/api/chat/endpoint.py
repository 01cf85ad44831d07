"""`POST /v1/chat/completions`: validates, admits the generations and sends the answer. `output` knows its shape."""

from __future__ import annotations

import secrets
import time

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.admit import admit_chat, read_chat
from paceline.api.chat.output import ChatBody, ChatChunks, ChatMeta
from paceline.api.chat.request import chat_call
from paceline.api.chat.schema import ChatRequest
from paceline.api.generation.links import Addresses
from paceline.api.generation.streaming import JsonAnswer, StreamedAnswer
from paceline.api.models import chat_model
from paceline.api.routes import Route
from paceline.errors import RequestError
from paceline.runtime.service import Service


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
