"""Encoders of answers in Ollama's shape, as lines of JSON (NDJSON) and in one piece. Times come from a clock.

Calls of tools come whole, before the last line: Ollama's arguments are an object. There are no citations, but in
`paceline`, where a report is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.api.chat.message_builder import Json, MessageBuilder
from paceline.api.chat.output import Reporting, logprob_items, step_line, summary
from paceline.api.chat.tool_calls import arguments_of
from paceline.api.chat.tools import ToolUse
from paceline.api.http import sse
from paceline.api.http.errors import Failure
from paceline.api.http.strict_json import encode_json
from paceline.api.ollama.errors import envelope
from paceline.runtime.service import GenerateEvent, GenerationResult

MEDIA_TYPE = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class LineMeta:
    model: str  # as asked
    chat: bool  # `/api/chat`, or `/api/generate`
    tools: ToolUse | None
    call: Reporting
    began: float  # s
    clock: Callable[[], float]  # s, monotonic
    now: Callable[[], str]  # the time of day (RFC 3339)


class AnswerLines:
    """Encoder of a streamed answer (`AnswerChunks`)."""

    headers: Mapping[str, str] = {**sse.HEADERS, "content-type": MEDIA_TYPE}

    def __init__(self, meta: LineMeta) -> None:
        self._meta = meta
        self._message = MessageBuilder(meta.tools)
        self._first: float | None = None  # when the first text came

    def ping(self) -> bytes:
        return self._line(self._said(""))

    def begin(self) -> bytes:
        return b""

    def take(self, index: int, event: GenerateEvent) -> bytes:  # noqa: ARG002  # there is one generation
        return b"".join(map(self._line, self.parts(event)))

    def parts(self, event: GenerateEvent) -> list[Json]:
        """Bodies of the lines that an event adds, without the fields that all lines repeat."""
        if isinstance(event, GenerationResult):
            text = _text(self._message.end(event))
            said = [self._said(text)] if text else []
            calls = _calls(self._message.message())
            said += [{"message": {"role": "assistant", "content": "", "tool_calls": calls}}] if calls else []
            return [*said, self._last(event)]
        if event.step is not None:
            return [self._said("", thinking=step_line(event.step))]
        self._first = self._first or self._meta.clock()
        text = _text(self._message.push(event.text))
        logprobs: Json = {"logprobs": logprob_items(event)} if event.logprobs else {}
        return [self._said(text) | logprobs] if text or logprobs else []

    def end(self) -> bytes:
        return b""

    def fail(self, failure: Failure) -> bytes:
        return encode_json(envelope(failure)) + b"\n"

    def frame(self, body: Json) -> Json:
        return {"model": self._meta.model, "created_at": self._meta.now(), **body}

    def _line(self, body: Json) -> bytes:
        return encode_json(self.frame({"done": False} | body)) + b"\n"

    def _said(self, text: str, **more: str) -> Json:
        if self._meta.chat:
            return {"message": {"role": "assistant", "content": text, **more}}
        return {"response": text, **more}

    def _last(self, done: GenerationResult) -> Json:
        end = self._meta.clock()
        first = self._first or end
        report = summary(self._meta.call, [done])
        return {
            **self._said(""),
            "done": True,
            "done_reason": done.reason,
            "total_duration": _ns(end - self._meta.began),
            "load_duration": 0,
            "prompt_eval_count": done.prompt_tokens,
            "prompt_eval_duration": _ns(first - self._meta.began),
            "eval_count": done.completion_tokens,
            "eval_duration": _ns(end - first),
            **({} if report is None else {"paceline": report}),
        }


class AnswerObject:
    """Encoder of an answer in one piece (`AnswerBody`): all that the lines would say."""

    def __init__(self, meta: LineMeta) -> None:
        self._meta = meta
        self._lines = AnswerLines(meta)
        self._parts: list[Json] = []

    def take(self, index: int, event: GenerateEvent) -> None:  # noqa: ARG002
        self._parts += self._lines.parts(event)

    def body(self) -> bytes:
        whole = self._parts[-1]
        logprobs = [item for part in self._parts for item in _items(part.get("logprobs"))]
        said = [part["message"] if self._meta.chat else part for part in self._parts]
        joined = {name: _joined(said, name) for name in ("content" if self._meta.chat else "response", "thinking")}
        if not joined["thinking"]:
            del joined["thinking"]
        calls = [call for part in said for call in _items(_field(part, "tool_calls"))]
        tool_calls: Json = {"tool_calls": calls} if calls else {}
        message: Json = {"message": {"role": "assistant", **joined, **tool_calls}} if self._meta.chat else {**joined}
        return encode_json(self._lines.frame({**whole, **message, **({"logprobs": logprobs} if logprobs else {})}))


def loaded(meta: LineMeta, reason: str) -> Json:
    """The answer to a request without a prompt, with which clients load a model, and unload it."""
    said: Json = {"message": {"role": "assistant", "content": ""}} if meta.chat else {"response": ""}
    return {"model": meta.model, "created_at": meta.now(), **said, "done": True, "done_reason": reason}


def _text(deltas: Sequence[Json]) -> str:
    return "".join(str(delta["content"]) for delta in deltas if "content" in delta)


def _calls(message: Mapping[str, Any]) -> list[Json]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [{"function": {"name": call["name"], "arguments": arguments_of(call["arguments"])}} for call in calls]


def _field(part: object, name: str) -> object:
    return part.get(name) if isinstance(part, dict) else None


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _joined(parts: Sequence[object], name: str) -> str:
    return "".join(str(_field(part, name) or "") for part in parts)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
