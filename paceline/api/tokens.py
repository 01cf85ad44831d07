"""`/tokenize` and `/detokenize`: texts and conversations as the model's tokens, and back."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.request import begun, conversation
from paceline.api.chat.schema import MAX_MESSAGES, ChatRequest, Message, Tool
from paceline.api.chat.tools import tool_use
from paceline.api.generation.attachments import read_conversation
from paceline.api.generation.schema import MAX_TOOLS
from paceline.api.http.body import Schema, parse, read_body
from paceline.api.http.errors import decode_object
from paceline.api.http.pagination import answer
from paceline.api.models import chat_model
from paceline.api.routes import Route
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import Service

# `POST /tokenize` and `POST /detokenize`, in vLLM's shape.
#
# A prompt is tokenized as `/v1/completions` does, a conversation as `/v1/chat/completions` does without documents. Not
# handled: prompts without the model's own beginning, templates of the client.


MAX_TOKENS = 1 << 16


class TokenizeRequest(Schema):
    """Either a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool = False


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Schema):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_TOKENS)]


class Detokenized(BaseModel):
    prompt: str


class TokensEndpoint:
    """The routes and the service they use. Holds no state of a request."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="POST",
                path="/tokenize",
                endpoint=self.tokenize,
                summary="Turn a text or a conversation into tokens.",
                scope=None,
                request=TokenizeRequest,
                response=Tokenized,
                refusals=(404,),
            ),
            Route(
                method="POST",
                path="/detokenize",
                endpoint=self.detokenize,
                summary="Turn tokens into text.",
                scope=None,
                request=DetokenizeRequest,
                response=Detokenized,
                refusals=(404,),
            ),
        )

    async def tokenize(self, request: Request) -> Response:
        body = await read_conversation(request)
        asked = parse(TokenizeRequest, body)
        refuse_variants(body)
        model = self._model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("Give either prompt or messages.", param="prompt")
        if asked.messages is None:
            tokens = await self._service.tokenize(asked.prompt or "", model.name)
        else:
            names = ("messages", "tools", "continue_final_message", "add_generation_prompt")
            chat = parse(ChatRequest, {"model": model.name, **{name: body.get(name) for name in names}})
            tools = tool_use(chat)
            messages = begun(chat, conversation(chat.messages, [] if tools is None else [tools.instructions()]))
            tokens = await self._service.tokenize_chat(messages, model.name)
        texts = await self._service.token_bytes(tokens, model.name) if asked.return_token_strs else None
        return answer(
            {
                "count": len(tokens),
                "max_model_len": model.max_positions,
                "tokens": list(tokens),
                "token_strs": None if texts is None else [text.decode("utf-8", "replace") for text in texts],
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request.receive, request.headers.get("content-length"))
        asked = await asyncio.to_thread(lambda: parse(DetokenizeRequest, decode_object(body)))
        model = self._model(asked.model)
        highest = max(asked.tokens, default=0)
        if highest >= model.vocab_size:
            where = f"tokens[{asked.tokens.index(highest)}]"
            raise RequestError(f"{where} is {highest}; ids are 0 to {model.vocab_size - 1}.", param=where)
        parts = await self._service.token_bytes(asked.tokens, model.name)
        return answer({"prompt": b"".join(parts).decode("utf-8", "replace")})

    def _model(self, name: str | None) -> ModelInfo:
        """The first where none is named, as at vLLM. Raises RequestError 404."""
        return self._service.models()[0] if name is None else chat_model(self._service, name)


def refuse_variants(body: dict[str, object]) -> None:
    """Raises RequestError (400) for a prompt that is never sent to the model like this."""
    for name, usual in (
        ("add_special_tokens", body.get("messages") is None),
        ("chat_template", None),
        ("chat_template_kwargs", {}),
    ):
        if body.get(name) not in (None, usual):
            raise RequestError(
                f"Only what the model is sent is tokenized: {name} may be {usual} only.",
                code="unsupported_parameter",
                param=name,
            )
