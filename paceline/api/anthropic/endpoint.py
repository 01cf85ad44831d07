"""`POST /v1/messages` and `POST /v1/messages/count_tokens`. The header `anthropic-version` may say anything."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.anthropic.errors import SHAPE
from paceline.api.anthropic.output import MessageBody, MessageEvents, MessageMeta
from paceline.api.anthropic.request import chat_body, check
from paceline.api.anthropic.schema import CountRequest, MessageAnswer, MessageEvent, MessagesRequest, TokenCount
from paceline.api.chat.admit import admit_chat, read_chat
from paceline.api.chat.request import chat_call
from paceline.api.generation.links import Addresses
from paceline.api.generation.streaming import JsonAnswer, StreamedAnswer
from paceline.api.http.pagination import answer
from paceline.api.http.validation import parse
from paceline.api.routes import Route
from paceline.runtime.service import Service


class MessagesEndpoint:
    """The routes and the service they use. Holds no state of a request."""

    def __init__(self, service: Service, *, documents: int, keep_alive: float, addresses: Addresses) -> None:
        self._service = service
        self._documents = documents
        self._keep_alive = keep_alive
        self._addresses = addresses

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="POST",
                path="/v1/messages",
                endpoint=self.create,
                summary="Answer a conversation, in Anthropic's shape.",
                scope="chat",
                request=MessagesRequest,
                response=MessageAnswer,
                stream=MessageEvent,
                errors=SHAPE,
                refusals=(404,),
            ),
            Route(
                method="POST",
                path="/v1/messages/count_tokens",
                endpoint=self.count,
                summary="Count the tokens of a conversation, without documents.",
                scope="chat",
                request=CountRequest,
                response=TokenCount,
                errors=SHAPE,
                refusals=(404,),
            ),
        )

    async def create(self, request: Request) -> Response:
        body = await read_chat(request, self._service)
        asked = parse(MessagesRequest, body)
        check(body)
        call = chat_call(chat_body(asked), self._service, request.state.identity, documents=self._documents)
        generations = await admit_chat(request, call, self._service)
        links = self._addresses.links(request)
        meta = MessageMeta(f"msg_{secrets.token_hex(12)}", call, generations[0].prompt_tokens, links)
        if not call.stream:
            return JsonAnswer(generations, MessageBody(meta), self._keep_alive)
        return StreamedAnswer(generations, MessageEvents(meta), self._keep_alive, meta.id)

    async def count(self, request: Request) -> Response:
        body = await read_chat(request, self._service)
        asked = parse(CountRequest, body)
        check(body)
        call = chat_call(chat_body(asked), self._service, request.state.identity, documents=0)
        tokens = await self._service.tokenize_chat(call.requests[0].messages, call.requests[0].model)
        return answer(TokenCount(input_tokens=len(tokens)).model_dump())
