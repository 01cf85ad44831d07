"""`/tokenize` and `/detokenize`, in vLLM's shape: texts and conversations as the model's tokens, and back.

A prompt is tokenized as `/v1/completions` does, a conversation as `/v1/chat/completions` does without documents. Not
handled: prompts without the model's own beginning, templates of the client.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from paceline.api.chat.request import MAX_MESSAGES, ChatRequest, Message, Tool, begun, conversation, tool_use
from paceline.api.generation.attachments import ConversationRoute
from paceline.api.generation.schema import MAX_TOOLS
from paceline.api.http.body import Schema
from paceline.api.http.routing import Route, ServiceDep
from paceline.api.models import chat_model
from paceline.api.openapi import keyed_router
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import Service

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

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, body: object) -> object:
        """Raises RequestError for a prompt that is never sent to the model like this."""
        for name, usual in (
            ("add_special_tokens", isinstance(body, dict) and body.get("messages") is None),
            ("chat_template", None),
            ("chat_template_kwargs", {}),
        ):
            if isinstance(body, dict) and body.get(name) not in (None, usual):
                raise RequestError(
                    f"Only what the model is sent is tokenized: {name} may be {usual} only.",
                    code="unsupported_parameter",
                    param=name,
                )
        return body


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


router = keyed_router("service", route=ConversationRoute)


@router.post("/tokenize")
async def tokenize(asked: TokenizeRequest, service: ServiceDep) -> Tokenized:
    """Turn a text or a conversation into tokens."""
    model = _model(service, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("Give either prompt or messages.", param="prompt")
    if asked.messages is None:
        tokens = await service.tokenize(asked.prompt or "", model.name)
    else:
        chat = ChatRequest(
            model=model.name,
            messages=asked.messages,
            tools=asked.tools,
            continue_final_message=asked.continue_final_message,
            add_generation_prompt=asked.add_generation_prompt,
        )
        tools = tool_use(chat, model)
        messages = begun(chat, conversation(chat.messages, model, [] if tools is None else [tools.instructions()]))
        tokens = await service.tokenize_chat(messages, model.name)
    texts = await service.token_bytes(tokens, model.name) if asked.return_token_strs else None
    return Tokenized(
        count=len(tokens),
        max_model_len=model.max_positions,
        tokens=list(tokens),
        token_strs=None if texts is None else [text.decode("utf-8", "replace") for text in texts],
    )


async def detokenize(asked: DetokenizeRequest, service: ServiceDep) -> Detokenized:
    """Turn tokens into text."""
    model = _model(service, asked.model)
    highest = max(asked.tokens, default=0)
    if highest >= model.vocab_size:
        where = f"tokens[{asked.tokens.index(highest)}]"
        raise RequestError(f"{where} is {highest}; ids are 0 to {model.vocab_size - 1}.", param=where)
    parts = await service.token_bytes(asked.tokens, model.name)
    return Detokenized(prompt=b"".join(parts).decode("utf-8", "replace"))


router.add_api_route("/detokenize", detokenize, methods=["POST"], route_class_override=Route)  # no conversation


def _model(service: Service, name: str | None) -> ModelInfo:
    """The first where none is named, as at vLLM. Raises RequestError 404."""
    return service.models()[0] if name is None else chat_model(service, name)
