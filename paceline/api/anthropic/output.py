"""Encoders of answers in Anthropic's shape, in one piece and as named events. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.api.anthropic.content import ContentBuilder, Json
from paceline.api.anthropic.errors import envelope
from paceline.api.chat.output import summary
from paceline.api.chat.request import ChatCall
from paceline.api.generation.links import NO_LINKS, PassageLinks
from paceline.api.http import sse
from paceline.api.http.errors import Failure
from paceline.api.http.strict_json import encode_json
from paceline.runtime.service import GenerateEvent, GenerationResult


@dataclass(frozen=True, slots=True)
class MessageMeta:
    id: str
    call: ChatCall
    prompt_tokens: int  # as known before the answer; 0: unknown
    links: PassageLinks = NO_LINKS  # of citations

    def message(self, content: list[Json], reason: str | None, stop: str | None, usage: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.call.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


class MessageBody:
    """Encoder of an answer in one piece (`AnswerBody`)."""

    def __init__(self, meta: MessageMeta) -> None:
        self._meta = meta
        self._content = ContentBuilder(meta.call.tools, meta.links)
        self._done: GenerationResult | None = None

    def take(self, index: int, event: GenerateEvent) -> None:  # noqa: ARG002  # there is one generation
        if isinstance(event, GenerationResult):
            self._content.end(event)
            self._done = event
        elif event.step is not None:
            self._content.step(event.step)
        else:
            self._content.push(event.text)

    def body(self) -> bytes:
        done = self._done
        assert done is not None, "an answer is written when it has ended"
        reason = self._content.stop_reason(done)
        message = self._meta.message(self._content.blocks, reason, done.stop or None, _usage(done))
        return encode_json(message | _extension(self._meta, done))


class MessageEvents:
    """Encoder of a streamed answer (`AnswerChunks`)."""

    headers = sse.HEADERS

    def __init__(self, meta: MessageMeta) -> None:
        self._meta = meta
        self._content = ContentBuilder(meta.call.tools, meta.links)

    def ping(self) -> bytes:
        return _event({"type": "ping"})

    def begin(self) -> bytes:
        usage = _tokens(self._meta.prompt_tokens, 0, 0)
        return _event({"type": "message_start", "message": self._meta.message([], None, None, usage)})

    def take(self, index: int, event: GenerateEvent) -> bytes:  # noqa: ARG002
        if isinstance(event, GenerationResult):
            delta = {"stop_reason": self._reason(event), "stop_sequence": event.stop or None}
            last: Json = {"type": "message_delta", "delta": delta, "usage": _usage(event)}
            events = [*self._content.end(event), last | _extension(self._meta, event)]
        elif event.step is not None:
            events = self._content.step(event.step)
        else:
            events = self._content.push(event.text)
        return b"".join(map(_event, events))

    def _reason(self, done: GenerationResult) -> str:
        return self._content.stop_reason(done)

    def end(self) -> bytes:
        return _event({"type": "message_stop"})

    def fail(self, failure: Failure) -> bytes:
        return _event(dict(envelope(failure)))


def _event(body: Json) -> bytes:
    return sse.named(str(body["type"]), encode_json(body))


def _usage(done: GenerationResult) -> Json:
    return _tokens(done.prompt_tokens, int(done.stats.get("cached_tokens", 0)), done.completion_tokens)


def _tokens(prompt: int, cached: int, output: int) -> Json:
    """Anthropic counts cached tokens apart from the others of the prompt."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _extension(meta: MessageMeta, done: GenerationResult) -> Json:
    found = summary(meta.call, [done], meta.links)
    return {} if found is None else {"paceline": found}
