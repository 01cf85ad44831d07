"""`POST /v1/messages` and `POST /v1/messages/count_tokens`. The header `anthropic-version` may say anything."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
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
from paceline.api.chat.output import admit_chat, annotations_of, step_line, summary
from paceline.api.chat.request import ChatCall, ChatRequest, chat_call
from paceline.api.chat.tools import (
    ParsedOutput,
    TextOutput,
    ToolCallArguments,
    ToolCallStart,
    arguments_of,
)
from paceline.api.generation.attachments import AnswerRoute
from paceline.api.generation.streaming import SSE_HEADERS, JsonAnswer, StreamedAnswer, sse_named
from paceline.api.http.body import encode_json, parse
from paceline.api.http.errors import ErrorShape, Failure
from paceline.api.http.routing import NO_ADDRESSES, Addresses, Caller, ServiceDep, SettingsDep
from paceline.api.observation import request_id
from paceline.api.openapi import answered, events, keyed_router
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


def envelope(failure: Failure) -> Mapping[str, object]:
    kind = _TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    message = (_TOO_LONG if failure.code == "context_length_exceeded" else "") + failure.message
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id.get()}


SHAPE = ErrorShape("/v1/messages", AnthropicError, envelope, id_header=b"request-id")


# Blocks of an answer in Anthropic's shape, while it is written: a whole answer holds what a streamed one adds up to.
#
# Citations belong to the text block that ends the answer; where a call ends it, it has none.


Json = dict[str, object]


class ContentBuilder:
    """`take` returns events of the stream, without their framing."""

    def __init__(self, call: ChatCall, links: Addresses) -> None:
        self._links = links
        self._thinks = call.asked.include_reasoning
        self.blocks: list[Json] = []
        self._parser = None if call.tools is None else call.tools.parser()
        self._open = ""  # type of the block being written
        self._pieces: list[str] = []  # of it

    def take(self, event: GenerateEvent) -> list[Json]:
        if isinstance(event, GenerationResult):
            return self._end(event)
        if event.step is not None:  # as thinking; one that ends within the text is in the report alone
            return [] if self._open == "text" else self._add("thinking", step_line(event.step))
        if event.thinking:
            return self._add("thinking", event.text) if event.text and self._thinks else []
        if self._parser is None:
            return self._add("text", event.text) if event.text else []
        return self._parsed(self._parser.push(event.text))

    def _end(self, done: GenerationResult) -> list[Json]:
        events = [] if self._parser is None else self._parsed(self._parser.flush(done.reason != "stop"))
        if self._open == "text":
            cited = [_citation(one, self._links) for one in done.citations]
            events += [self._delta({"type": "citations_delta", "citation": one}) for one in cited]
            self.blocks[-1] |= {"citations": cited} if cited else {}
        return events + self._close()

    def stop_reason(self, done: GenerationResult) -> str:
        if done.reason == "length":
            return "max_tokens"
        if done.stop:
            return "stop_sequence"
        calls = self._parser is not None and self._parser.num_calls and self._parser.complete
        return "tool_use" if calls else "end_turn"

    def _parsed(self, parts: list[ParsedOutput]) -> list[Json]:
        events: list[Json] = []
        for part in parts:
            match part:
                case TextOutput(text):
                    events += self._add("text", text)
                case ToolCallStart(_, name):
                    events += self._begin(
                        "tool_use", {"id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}
                    )
                case ToolCallArguments(_, text):
                    self._pieces.append(text)
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return events

    def _add(self, kind: str, text: str) -> list[Json]:
        """Text of that kind, in the block that is open if it is one."""
        signature = {"signature": ""} if kind == "thinking" else {}  # nobody signs it
        begun = [] if self._open == kind else self._begin(kind, {kind: ""} | signature)
        self._pieces.append(text)
        return [*begun, self._delta({"type": f"{kind}_delta", kind: text})]

    def _begin(self, kind: str, fields: Mapping[str, object]) -> list[Json]:
        closed = self._close()
        self._open = kind
        block: Json = {"type": kind, **fields}
        self.blocks.append(block)
        return [*closed, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _close(self) -> list[Json]:
        if not self._open:
            return []
        text, kind, self._open, self._pieces = "".join(self._pieces), self._open, "", []
        self.blocks[-1] |= {"input": arguments_of(text)} if kind == "tool_use" else {kind: text}
        signed = [self._delta({"type": "signature_delta", "signature": ""})] if kind == "thinking" else []
        return [*signed, {"type": "content_block_stop", "index": len(self.blocks) - 1}]


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


# Encoders of answers in Anthropic's shape, in one piece and as named events.


@dataclass(frozen=True, slots=True)
class MessageMeta:
    id: str
    call: ChatCall
    prompt_tokens: int  # as known before the answer; 0: unknown
    links: Addresses = NO_ADDRESSES  # of citations

    def message(self, content: list[Json], reason: str | None, stop: str | None, usage: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.call.asked.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


class MessageBody:
    def __init__(self, meta: MessageMeta) -> None:
        self._meta = meta
        self._content = ContentBuilder(meta.call, meta.links)
        self._done: GenerationResult | None = None

    def take(self, index: int, event: GenerateEvent) -> None:  # noqa: ARG002  # there is one generation
        self._content.take(event)
        self._done = event if isinstance(event, GenerationResult) else None

    def body(self) -> bytes:
        done = self._done
        assert done is not None, "an answer is written when it has ended"
        reason = self._content.stop_reason(done)
        message = self._meta.message(self._content.blocks, reason, done.stop or None, _usage(done))
        return encode_json(message | _extension(self._meta, done))


class MessageEvents:
    headers = SSE_HEADERS

    def __init__(self, meta: MessageMeta) -> None:
        self._meta = meta
        self._content = ContentBuilder(meta.call, meta.links)

    def ping(self) -> bytes:
        return _event({"type": "ping"})

    def begin(self) -> bytes:
        usage = _tokens(self._meta.prompt_tokens, 0, 0)
        return _event({"type": "message_start", "message": self._meta.message([], None, None, usage)})

    def take(self, index: int, event: GenerateEvent) -> bytes:  # noqa: ARG002
        made = self._content.take(event)
        if isinstance(event, GenerationResult):
            delta = {"stop_reason": self._content.stop_reason(event), "stop_sequence": event.stop or None}
            last: Json = {"type": "message_delta", "delta": delta, "usage": _usage(event)}
            made = [*made, last | _extension(self._meta, event)]
        return b"".join(map(_event, made))

    def end(self) -> bytes:
        return _event({"type": "message_stop"})

    def fail(self, failure: Failure) -> bytes:
        return _event(dict(envelope(failure)))


def _event(body: Json) -> bytes:
    return sse_named(str(body["type"]), encode_json(body))


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


def _extension(meta: MessageMeta, done: GenerationResult) -> Json:
    found = summary(meta.call.report, [done], meta.links)
    return {} if found is None else {"paceline": found}


# ---- POST /v1/messages -----------------------------------------------------------------------------------------------
router = keyed_router("anthropic", "chat", prefix="/v1/messages", route=AnswerRoute, error=AnthropicError)


@router.post("", responses=answered(MessageAnswer, events(MessageEvent)))
async def create_message(
    asked: MessagesRequest, request: Request, service: ServiceDep, settings: SettingsDep, caller: Caller
) -> Response:
    """Answer a conversation, in Anthropic's shape."""
    call = chat_call(parse(ChatRequest, chat_body(asked)), service, caller, documents=settings.documents)
    generations = await admit_chat(request, call, service)
    links = settings.addresses.of(request)
    meta = MessageMeta(f"msg_{secrets.token_hex(12)}", call, generations[0].prompt_tokens, links)
    if not call.asked.stream:
        return JsonAnswer(generations, MessageBody(meta), settings.keep_alive)
    return StreamedAnswer(generations, MessageEvents(meta), settings.keep_alive, meta.id)


@router.post("/count_tokens")
async def count_tokens(asked: CountRequest, service: ServiceDep, caller: Caller) -> TokenCount:
    """Count the tokens of a conversation, without documents."""
    call = chat_call(parse(ChatRequest, chat_body(asked)), service, caller, documents=0)
    tokens = await service.tokenize_chat(call.requests[0].prompt.messages, call.requests[0].model)
    return TokenCount(input_tokens=len(tokens))
