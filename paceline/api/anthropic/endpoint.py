"""`POST /v1/messages` and `POST /v1/messages/count_tokens`. The header `anthropic-version` may say anything."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.anthropic.request import (
    CountRequest,
    MessageAnswer,
    MessageEvent,
    MessagesRequest,
    TokenCount,
    chat_body,
)
from paceline.api.chat.output import admit_chat, annotations_of, optional, summary
from paceline.api.chat.request import ChatCall, ChatRequest, chat_call
from paceline.api.chat.tools import AnswerReader, TextOutput, Thought, ToolCallArguments, ToolCallStart, arguments_of
from paceline.api.generation.attachments import AnswerRoute
from paceline.api.generation.streaming import AnswerWriter, sent, sse_named
from paceline.api.http.body import Json, encode_json, parse
from paceline.api.http.errors import ErrorShape, Failure
from paceline.api.http.routing import Addresses, Caller, ServiceDep, SettingsDep
from paceline.api.observation import request_id
from paceline.api.openapi import answered, keyed_router
from paceline.runtime.service import Citation, GenerateEvent, GenerationResult

# Anthropic's error envelope. Source: anthropic-sdk-python 2.13 and docs.anthropic.com, "Errors".
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "  # by these words agents know that they must shorten their history


class ErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """Every answer of `/v1/messages` that reports an error."""

    type: Literal["error"]
    error: ErrorDetail
    request_id: str


def envelope(failure: Failure) -> Json:
    kind = _TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    message = (_TOO_LONG if failure.code == "context_length_exceeded" else "") + failure.message
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id.get()}


SHAPE = ErrorShape("/v1/messages", AnthropicError, envelope, id_header=b"request-id")


class MessageWriter(AnswerWriter):
    """Content blocks while they are written, and the events that tell of them: a whole answer holds what a streamed one
    adds up to. Citations belong to the text that ends the answer; where a call ends it, it has none."""

    last = b""

    def __init__(self, call: ChatCall, prompt_tokens: int, links: Addresses) -> None:
        """prompt_tokens: as known before the answer; 0: unknown. links: of citations."""
        self.id = f"msg_{secrets.token_hex(12)}"
        self._call = call
        self._prompt_tokens = prompt_tokens
        self._links = links
        parser = None if call.tools is None else call.tools.parser()
        self._reader = AnswerReader(parser, thinks=call.asked.include_reasoning)
        self._blocks: list[Json] = []
        self._open = ""  # type of the block being written
        self._pieces: list[str] = []  # of it
        self._end: Json = {}  # fields of the message that its end has
        self._extension: Json = {}

    def framed(self, piece: Json) -> bytes:
        return sse_named(str(piece["type"]), encode_json(piece))

    def ping(self) -> bytes:
        return self.framed({"type": "ping"})

    def begin(self) -> Sequence[Json]:
        unended = {"stop_reason": None, "stop_sequence": None, "usage": _tokens(self._prompt_tokens, 0, 0)}
        return [{"type": "message_start", "message": self._message([]) | unended}]

    def take(self, index: int, event: GenerateEvent) -> Sequence[Json]:  # noqa: ARG002  # there is one generation
        events: list[Json] = []
        for part in self._reader.read(event):
            match part:
                case Thought(text, step):
                    if step is None or self._open != "text":  # one that ends within the text is in the report alone
                        events += self._add("thinking", text)
                case TextOutput(text):
                    events += self._add("text", text)
                case ToolCallStart(_, name):
                    events += self._begin("tool_use", id=f"toolu_{secrets.token_hex(12)}", name=name, input={})
                case ToolCallArguments(_, text):
                    self._pieces.append(text)
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return events + self._ended(event) if isinstance(event, GenerationResult) else events

    def end(self) -> Sequence[Json]:
        return [{"type": "message_stop"}]

    def whole(self) -> Json:
        return self._message(self._blocks) | self._end | self._extension

    def _message(self, content: list[Json]) -> Json:
        model = self._call.asked.model
        return {"id": self.id, "type": "message", "role": "assistant", "model": model, "content": content}

    def _ended(self, done: GenerationResult) -> list[Json]:
        events: list[Json] = []
        if self._open == "text" and (cited := [_citation(one, self._links) for one in done.citations]):
            events = [self._delta({"type": "citations_delta", "citation": one}) for one in cited]
            self._blocks[-1]["citations"] = cited
        reason = "max_tokens" if done.reason == "length" else "stop_sequence" if done.stop else "end_turn"
        if reason == "end_turn" and self._reader.calls:
            reason = "tool_use"
        stopped = {"stop_reason": reason, "stop_sequence": done.stop or None}
        self._end = stopped | {"usage": _usage(done)}
        self._extension = optional("paceline", summary(self._call.report, [done], self._links))
        last = {"type": "message_delta", "delta": stopped, "usage": _usage(done)} | self._extension
        return [*events, *self._close(), last]

    def _add(self, kind: str, text: str) -> list[Json]:
        """Text of that kind, in the block that is open if it is one."""
        signature = {"signature": ""} if kind == "thinking" else {}  # nobody signs it
        begun = [] if self._open == kind else self._begin(kind, **{kind: ""}, **signature)
        self._pieces.append(text)
        return [*begun, self._delta({"type": f"{kind}_delta", kind: text})]

    def _begin(self, kind: str, **fields: object) -> list[Json]:
        closed = self._close()
        self._open = kind
        self._blocks.append({"type": kind, **fields})
        start = {
            "type": "content_block_start",
            "index": len(self._blocks) - 1,
            "content_block": {"type": kind, **fields},
        }
        return [*closed, start]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Json]:
        if not self._open:
            return []
        text, kind, self._open, self._pieces = "".join(self._pieces), self._open, "", []
        self._blocks[-1] |= {"input": arguments_of(text)} if kind == "tool_use" else {kind: text}
        signed = [self._delta({"type": "signature_delta", "signature": ""})] if kind == "thinking" else []
        return [*signed, {"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _citation(citation: Citation, links: Addresses) -> Json:
    """As of a search by the server: what clients know to have a URL."""
    (annotation,) = annotations_of([citation], 0, links)
    named = annotation["url_citation"]
    assert isinstance(named, dict), "made by annotations_of"
    return {
        "type": "web_search_result_location",
        "cited_text": citation.passage,
        "url": named["url"],
        "title": named["title"],
        "encrypted_index": "",  # by which Anthropic finds its own results again
    }


def _usage(done: GenerationResult) -> Json:
    tokens = _tokens(done.prompt_tokens, int(done.stats.get("cached_tokens", 0)), done.completion_tokens)
    thought = done.stats.get("reasoning_tokens")
    return tokens | ({} if thought is None else {"output_tokens_details": {"thinking_tokens": int(thought)}})


def _tokens(prompt: int, cached: int, output: int) -> Json:
    """Anthropic counts cached tokens apart from the others of the prompt."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


# ---- POST /v1/messages -----------------------------------------------------------------------------------------------
router = keyed_router("anthropic", "chat", prefix="/v1/messages", route=AnswerRoute, error=AnthropicError)


@router.post("", responses=answered(MessageAnswer, stream=MessageEvent))
async def create_message(
    asked: MessagesRequest, request: Request, service: ServiceDep, settings: SettingsDep, caller: Caller
) -> Response:
    """Answer a conversation, in Anthropic's shape."""
    call = chat_call(parse(ChatRequest, chat_body(asked)), service, caller, documents=settings.documents)
    generations = await admit_chat(request, call, service)
    writer = MessageWriter(call, generations[0].prompt_tokens, settings.addresses.of(request))
    return sent(generations, writer, stream=asked.stream, keep_alive=settings.keep_alive)


@router.post("/count_tokens")
async def count_tokens(asked: CountRequest, service: ServiceDep, caller: Caller) -> TokenCount:
    """Count the tokens of a conversation, without documents."""
    call = chat_call(parse(ChatRequest, chat_body(asked)), service, caller, documents=0)
    tokens = await service.tokenize_chat(call.requests[0].prompt.messages, call.requests[0].model)
    return TokenCount(input_tokens=len(tokens))
