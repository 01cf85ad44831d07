"""The shapes of an answer: the whole completion, and the chunks of a streamed one.

Pure: from what a generation said to the JSON that OpenAI's clients expect, nulls included. Source: openai-openapi
2.3.0, CreateChatCompletionResponse and CreateChatCompletionStreamResponse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

from paceline.api.chat.message_builder import Json, MessageBuilder
from paceline.api.chat.request import ChatCall
from paceline.api.http import sse
from paceline.api.http.errors import Failure
from paceline.api.http.strict_json import encode_json
from paceline.runtime.service import Citation, GenerateEvent, GenerationResult, TextDelta, TokenLogprob
from paceline.strategies.base import Side

UNNAMED = "private document"  # a device tells a cloud's client that it read one, not which
LOGPROB_FLOOR = -9999.0  # OpenAI's number for what cannot happen; minus infinity is not JSON


@dataclass(frozen=True, slots=True)
class ResponseMeta:
    """What every part of one answer repeats."""

    id: str
    created: int  # Unix time, s
    fingerprint: str  # of the model
    call: ChatCall


class Choice:
    """One choice, gathered."""

    def __init__(self, call: ChatCall) -> None:
        self.text = MessageBuilder(call.tools)
        self.logprobs: list[Json] = []
        self.done: GenerationResult | None = None

    def take(self, event: GenerateEvent) -> None:
        if isinstance(event, GenerationResult):
            self.text.end(event)
            self.done = event
            return
        self.text.push(event.text)
        self.logprobs += logprob_items(event)


class Reporting(Protocol):
    """A call that may want our report."""

    @property
    def report(self) -> bool: ...


class ChatCompletion:
    """The answer to a call that does not stream."""

    def __init__(self, envelope: ResponseMeta) -> None:
        self._envelope = envelope
        self._choices = [Choice(envelope.call) for _ in envelope.call.generations]

    def take(self, index: int, event: GenerateEvent) -> None:
        self._choices[index].take(event)

    def body(self) -> bytes:
        return encode_json(completion(self._envelope, self._choices))


class ChatChunks:
    """The chunks of a streamed answer, in the order of the protocol."""

    def __init__(self, envelope: ResponseMeta) -> None:
        self._envelope = envelope
        self._texts = [MessageBuilder(envelope.call.tools) for _ in envelope.call.generations]
        self._logprobs: list[list[Json]] = [[] for _ in self._texts]  # of tokens that no chunk has told of
        self._dones: dict[int, GenerationResult] = {}

    def begin(self) -> bytes:
        return b"".join(sse.event(role_chunk(self._envelope, index)) for index in range(len(self._texts)))

    def take(self, index: int, event: GenerateEvent) -> bytes:
        text = self._texts[index]
        if isinstance(event, GenerationResult):
            self._dones[index] = event
            held = [self._chunk(index, delta) for delta in text.end(event)]
            return b"".join(held) + sse.event(self._final(index, event))
        self._logprobs[index] += logprob_items(event)
        deltas = text.push(event.text)
        if not deltas and self._logprobs[index] and self._envelope.call.tools is None:
            deltas = [{"content": ""}]  # half a character
        return b"".join(self._chunk(index, delta, event.lane) for delta in deltas)

    def _chunk(self, index: int, delta: Json, lane: Side | None = None) -> bytes:
        logprobs, self._logprobs[index] = self._logprobs[index], []
        return sse.event(delta_chunk(self._envelope, index, delta, logprobs, lane))

    def _final(self, index: int, done: GenerationResult) -> Json:
        text = self._texts[index]
        return final_chunk(self._envelope, index, done, text.reason(done), text.length, self._logprobs[index])

    def end(self) -> bytes:
        if not self._envelope.call.include_usage:
            return sse.DONE
        dones = [self._dones[index] for index in sorted(self._dones)]
        return sse.event(usage_chunk(self._envelope, dones)) + sse.DONE

    def fail(self, failure: Failure) -> bytes:
        return sse.event(failure.envelope()) + sse.DONE


# ---- whole ----------------------------------------------------------------------------------------------------------
def completion(envelope: ResponseMeta, choices: Sequence[Choice]) -> Json:
    """The answer to a call that does not stream. Every choice must be done."""
    dones = [choice.done for choice in choices if choice.done is not None]
    assert len(dones) == len(choices), "an answer is written when every choice has ended"
    call = envelope.call
    body: Json = {
        "id": envelope.id,
        "object": "chat.completion",
        "created": envelope.created,
        "model": call.model,
        "system_fingerprint": envelope.fingerprint,
        **_tier(call),
        "choices": [
            {
                "index": index,
                "message": _message(choice.text, done.citations),
                "logprobs": _logprobs(call, choice.logprobs),
                "finish_reason": choice.text.reason(done),
            }
            | _note("paceline", report(call, done) if len(dones) > 1 else None)
            for index, (choice, done) in enumerate(zip(choices, dones, strict=True))
        ],
        "usage": usage(dones),
    }
    return body | _note("paceline", summary(call, dones))


def _message(text: MessageBuilder, citations: Sequence[Citation]) -> Json:
    annotations: Json = {"annotations": annotations_of(citations, text.length)} if citations else {}
    return text.message() | annotations


# ---- streamed -------------------------------------------------------------------------------------------------------
def role_chunk(envelope: ResponseMeta, index: int) -> Json:
    """Where a function may be called, content is null until there is some: an answer may have none."""
    content = "" if envelope.call.tools is None else None
    return _chunk(envelope, index, {"role": "assistant", "content": content, "refusal": None})


def delta_chunk(envelope: ResponseMeta, index: int, delta: Json, logprobs: Sequence[Json], lane: Side | None) -> Json:
    chunk = _chunk(envelope, index, delta, logprobs=logprobs)
    return chunk | _note("paceline", {"lane": lane} if envelope.call.report else None)


def final_chunk(
    envelope: ResponseMeta, index: int, done: GenerationResult, reason: str, length: int, logprobs: Sequence[Json] = ()
) -> Json:
    """`length`: characters of the choice's content, which its annotations span. `logprobs`: not told of before."""
    delta: Json = {"annotations": annotations_of(done.citations, length)} if done.citations else {}
    chunk = _chunk(envelope, index, delta, logprobs=logprobs, finish_reason=reason)
    return chunk | _note("paceline", report(envelope.call, done))


def usage_chunk(envelope: ResponseMeta, dones: Sequence[GenerationResult]) -> Json:
    """The last event when usage was asked for. It repeats the summary, so that the last event is always marked."""
    chunk = _frame(envelope) | {"choices": [], "usage": usage(dones)}
    return chunk | _note("paceline", summary(envelope.call, dones))


def _chunk(
    envelope: ResponseMeta, index: int, delta: Json, *, logprobs: Sequence[Json] = (), finish_reason: str | None = None
) -> Json:
    choice: Json = {
        "index": index,
        "delta": delta,
        "logprobs": {"content": list(logprobs), "refusal": None} if logprobs else None,
        "finish_reason": finish_reason,
    }
    chunk = _frame(envelope) | {"choices": [choice]}
    return chunk | ({"usage": None} if envelope.call.include_usage else {})


def _frame(envelope: ResponseMeta) -> Json:
    return {
        "id": envelope.id,
        "object": "chat.completion.chunk",
        "created": envelope.created,
        "model": envelope.call.model,
        "system_fingerprint": envelope.fingerprint,
        **_tier(envelope.call),
    }


def _tier(call: ChatCall) -> Json:
    """There is one tier; who asked for any is told."""
    return {"service_tier": "default"} if call.service_tier else {}


# ---- parts ----------------------------------------------------------------------------------------------------------
def usage(dones: Sequence[GenerationResult]) -> Json:
    """Tokens of the whole call: the prompt once, and so what of it was cached; completions summed."""
    prompt = dones[0].prompt_tokens if dones else 0
    completions = sum(done.completion_tokens for done in dones)
    cached = max((_stat(done, "cached_tokens") for done in dones), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completions,
        "total_tokens": prompt + completions,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            # An accepted end of text is no completion token, and cost tables subtract one from the other.
            "accepted_prediction_tokens": sum(min(_stat(done, "accepted"), done.completion_tokens) for done in dones),
            "rejected_prediction_tokens": _total(dones, "drafted") - _total(dones, "accepted"),
        },
    }


def _total(dones: Sequence[GenerationResult], name: str) -> int:
    return sum(_stat(done, name) for done in dones)


def _stat(done: GenerationResult, name: str) -> int:
    return int(done.stats.get(name, 0))


def report(call: Reporting, done: GenerationResult) -> Json | None:
    """Our part of a choice's end. That an answer lost its other side is said whether a report was asked for or not."""
    if not call.report:
        return {"degraded": done.degraded} if done.degraded is not None else None
    return {
        "strategy": done.strategy,
        "why": done.why,
        "degraded": done.degraded,
        "citations": [
            {"side": one.side, "document": one.document, "passage": one.passage, "score": one.score}
            | ({"file_id": one.file_id} if one.file_id else {})
            for one in done.citations
        ],
        "stats": dict(done.stats),
    }


def summary(call: Reporting, dones: Sequence[GenerationResult]) -> Json | None:
    """Of the call: the first choice's report, degraded if any choice was."""
    if not dones:
        return None
    degraded = next((done.degraded for done in dones if done.degraded is not None), None)
    if not call.report:
        return {"degraded": degraded} if degraded is not None else None
    return (report(call, dones[0]) or {}) | {"degraded": degraded}


def annotations_of(citations: Sequence[Citation], length: int) -> list[Json]:
    """OpenAI's `url_citation`, spanning the answer. The URL names the side and the document; it cannot be fetched."""
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": 0,
                "end_index": length,
                "title": citation.document or UNNAMED,
                "url": f"paceline://{citation.side}/{quote(citation.document, safe='')}",
            },
        }
        for citation in citations
    ]


def _note(name: str, value: Mapping[str, object] | None) -> Json:
    return {} if value is None else {name: value}


def _logprobs(call: ChatCall, items: list[Json]) -> Json | None:
    return {"content": items, "refusal": None} if call.generations[0].top_logprobs is not None else None


def logprob_items(piece: TextDelta) -> list[Json]:
    return [_logprob(chosen) | {"top_logprobs": [_logprob(other) for other in top]} for chosen, top in piece.logprobs]


def _logprob(one: TokenLogprob) -> Json:
    return {"token": one.token, "logprob": max(one.logprob, LOGPROB_FLOOR), "bytes": list(one.bytes)}
