"""The route `/v1/chat/completions`, and encoders of chat completions, in one piece and streamed: generation events to
OpenAI's JSON, nulls included.

Source: openai-openapi 2.3.0, CreateChatCompletionResponse and CreateChatCompletionStreamResponse.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.request import ChatCall, ChatRequest, ToolUse, chat_call
from paceline.api.chat.tools import ParsedOutput, TextOutput, ToolCallArguments, ToolCallStart
from paceline.api.generation.attachments import AnswerRoute
from paceline.api.generation.request import prepare_all
from paceline.api.generation.streaming import SSE_DONE, AnswerChunks, JsonAnswer, StreamedAnswer, sse_event
from paceline.api.http.body import encode_json, while_connected
from paceline.api.http.routing import NO_ADDRESSES, Addresses, Caller, ServiceDep, SettingsDep
from paceline.api.models import chat_model
from paceline.api.openapi import keyed_router, official
from paceline.api.vector_stores.search import select_stores
from paceline.core.energy import EnergyUse
from paceline.core.policy import Decision
from paceline.errors import RequestError
from paceline.runtime.service import (
    AUTO,
    Citation,
    GenerateEvent,
    Generation,
    GenerationResult,
    Moment,
    Service,
    TextDelta,
    TokenLogprob,
    WorkflowStep,
)
from paceline.strategies.base import Side

Json = dict[str, object]


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class MessageBuilder:
    """The message of one choice: `push` every event that is not the last, then `end`."""

    def __init__(self, tools: ToolUse | None, *, thinks: bool = True) -> None:
        """thinks: what the model thinks is told."""
        self._tools = tools
        self._thinks = thinks
        self._reasoning: list[str] = []  # a line for each step of a workflow, and what the model thinks
        self._parser = None if tools is None else tools.parser()
        self._content: list[str] = []
        self._calls: list[_Call] = []
        self.length = 0  # characters of the content

    def push(self, event: TextDelta) -> list[Json]:
        """The deltas of an event; none while its text may still become a tool call."""
        text = event.text if event.step is None else step_line(event.step)
        if event.step is not None or event.thinking:
            if not text or (event.thinking and not self._thinks):
                return []
            self._reasoning.append(text)
            return [{"reasoning_content": text}]
        if self._parser is not None:
            return [self._delta(output) for output in self._parser.push(text)]
        return [self._delta(TextOutput(text))] if text else []

    def end(self, done: GenerationResult) -> list[Json]:
        if self._parser is None:
            return []
        return [self._delta(output) for output in self._parser.flush(done.reason != "stop")]

    def reason(self, done: GenerationResult) -> str:
        """OpenAI's `finish_reason`. A call that was cut off by a limit or a stop string is not reported as one."""
        if self._tools is None or self._parser is None or not self._calls or not self._parser.complete:
            return done.reason
        if done.reason != "stop" or self._tools.named:
            return done.reason
        return "function_call" if self._tools.legacy else "tool_calls"

    def message(self) -> Json:
        """The whole message. Without text, content is null if functions may be called, as in `ChatChunks.begin`."""
        text = "".join(self._content)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._tools is not None and not text:
            message["content"] = None
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        calls: list[Json] = [{"name": call.name, "arguments": "".join(call.arguments)} for call in self._calls]
        if self._tools is not None and self._tools.legacy and calls:
            return message | {"function_call": calls[0]}
        tool_calls = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(self._calls, calls, strict=True)
        ]
        return message | ({"tool_calls": tool_calls} if tool_calls else {})

    def _delta(self, output: ParsedOutput) -> Json:
        legacy = self._tools is not None and self._tools.legacy
        match output:
            case TextOutput(text):
                self._content.append(text)
                self.length += len(text)
                return {"content": text}
            case ToolCallStart(index, name):
                call = _Call(f"call_{secrets.token_hex(12)}", name)
                self._calls.append(call)
                function: Json = {"name": name, "arguments": ""}
                if legacy:
                    return {"function_call": function}
                return {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]}
            case ToolCallArguments(index, text):
                self._calls[index].arguments.append(text)
                if legacy:
                    return {"function_call": {"arguments": text}}
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


UNNAMED = "private document"  # title of a device's document in a cloud's answer, which never has its name
WEB = "web"  # in place of a side, of a page
LOGPROB_FLOOR = -9999.0  # OpenAI's number for probability 0; minus infinity is not JSON


@dataclass(frozen=True, slots=True)
class ChatMeta:
    """Fields that all parts of one answer repeat."""

    id: str
    created: int  # Unix time, s
    fingerprint: str  # of the model
    call: ChatCall
    links: Addresses
    prompt_tokens: int = 0  # as known before the answer; 0: unknown

    def frame(self, kind: str) -> Json:
        """Fields before the choices. Of service tiers there is only the default, named if one was requested."""
        tier = {} if self.call.asked.service_tier is None else {"service_tier": "default"}
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.call.asked.model,
            "system_fingerprint": self.fingerprint,
            **tier,
        }


class ChoiceBuilder:
    def __init__(self, tools: ToolUse | None, *, thinks: bool = True) -> None:
        """thinks: see `MessageBuilder`."""
        self.message = MessageBuilder(tools, thinks=thinks)
        self.logprobs: list[Json] = []
        self.done: GenerationResult | None = None

    def take(self, event: GenerateEvent) -> list[Json]:
        """The deltas of the message."""
        if isinstance(event, GenerationResult):
            self.done = event
            return self.message.end(event)
        self.logprobs += logprob_items(event)
        return self.message.push(event)


def _choices(call: ChatCall) -> list[ChoiceBuilder]:
    return [ChoiceBuilder(call.tools, thinks=call.asked.include_reasoning) for _ in call.requests]


class WholeCompletion:
    def __init__(self, meta: ChatMeta) -> None:
        self._meta = meta
        self._choices = _choices(meta.call)

    def take(self, index: int, event: GenerateEvent) -> None:
        self._choices[index].take(event)

    def body(self) -> bytes:
        return encode_json(completion(self._meta, self._choices))


class ChatChunks(AnswerChunks):
    def __init__(self, meta: ChatMeta) -> None:
        self._meta = meta
        self._asked = meta.call.asked
        self._choices = _choices(meta.call)  # with log-probabilities that are not sent yet
        self._tokens = [0] * len(self._choices)  # of each choice so far

    def begin(self) -> bytes:
        """The role of each choice. Its content is null if functions may be called, since there may be no text."""
        content = "" if self._meta.call.tools is None else None
        role: Json = {"role": "assistant", "content": content, "refusal": None}
        return b"".join(self._chunk(index, role) for index in range(len(self._choices)))

    def take(self, index: int, event: GenerateEvent) -> bytes:
        choice = self._choices[index]
        deltas = choice.take(event)
        if isinstance(event, GenerationResult):
            held = [self._delta(index, delta) for delta in deltas]
            self._tokens[index] = event.completion_tokens
            return b"".join(held) + self._last(index, event)
        self._tokens[index] += event.tokens
        if event.step is not None:  # a line of reasoning, as front ends show it, and its parts
            return self._chunk(index, deltas[0], extension={"step": asdict(event.step)})
        if not deltas and choice.logprobs and self._meta.call.tools is None:
            deltas = [{"content": ""}]  # a token that is an incomplete character
        return b"".join(self._delta(index, delta, event.lane) for delta in deltas)

    def end(self) -> bytes:
        """Usage, if it was requested, with the summary again, so that the last event always has it."""
        if not self._asked.include_usage:
            return SSE_DONE
        dones = [choice.done for choice in self._choices if choice.done is not None]
        reported = _optional("paceline", summary(self._meta.call.report, dones, self._meta.links))
        return sse_event(self._frame() | {"choices": [], "usage": usage(dones)} | reported) + SSE_DONE

    def _delta(self, index: int, delta: Json, lane: Side | None = None) -> bytes:
        choice = self._choices[index]
        logprobs, choice.logprobs = choice.logprobs, []
        return self._chunk(index, delta, logprobs, {"lane": lane} if self._meta.call.report else None)

    def _last(self, index: int, done: GenerationResult) -> bytes:
        """The last chunk of a choice, with the log-probabilities of tokens in no earlier one."""
        choice, links = self._choices[index], self._meta.links
        reported = report(self._meta.call.report, done, links)
        delta = _annotations(choice, done.citations, links)
        return self._chunk(index, delta, choice.logprobs, reported, choice.message.reason(done))

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Sequence[Json] = (),
        extension: Json | None = None,
        reason: str | None = None,
    ) -> bytes:
        choice: Json = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": list(logprobs), "refusal": None} if logprobs else None,
            "finish_reason": reason,
        }
        chunk = self._frame() | {"choices": [choice]} | ({"usage": None} if self._asked.include_usage else {})
        if self._asked.running_usage:
            chunk |= running_usage(self._meta.prompt_tokens, sum(self._tokens))
        return sse_event(chunk | _optional("paceline", extension))

    def _frame(self) -> Json:
        return self._meta.frame("chat.completion.chunk")


# ---- whole ----------------------------------------------------------------------------------------------------------
def completion(meta: ChatMeta, choices: Sequence[ChoiceBuilder]) -> Json:
    dones = [choice.done for choice in choices if choice.done is not None]
    assert len(dones) == len(choices), "an answer is written when every choice has ended"
    call = meta.call
    body = meta.frame("chat.completion") | {
        "choices": [
            {
                "index": index,
                "message": choice.message.message() | _annotations(choice, done.citations, meta.links),
                "logprobs": _logprobs(call, choice.logprobs),
                "finish_reason": choice.message.reason(done),
            }
            | _optional("paceline", report(call.report, done, meta.links) if len(dones) > 1 else None)
            for index, (choice, done) in enumerate(zip(choices, dones, strict=True))
        ],
        "usage": usage(dones),
    }
    return body | _optional("paceline", summary(call.report, dones, meta.links))


def _annotations(choice: ChoiceBuilder, citations: Sequence[Citation], links: Addresses) -> Json:
    return {"annotations": annotations_of(citations, choice.message.length, links)} if citations else {}


def step_line(step: WorkflowStep) -> str:
    failed = " (failed)" if step.state == "failed" else ""
    unit = f" on {step.unit}" if step.unit else ""
    return f"{step.stage}{failed}, {step.seconds:.2f} s{unit}: {step.text}\n"


# ---- parts ----------------------------------------------------------------------------------------------------------
def usage(dones: Sequence[GenerationResult]) -> Json:
    """Tokens of the whole call: the prompt and its cached part once, completions summed."""
    prompt = dones[0].prompt_tokens if dones else 0
    completions = sum(done.completion_tokens for done in dones)
    cached = max((_stat(done, "cached_tokens") for done in dones), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completions,
        "total_tokens": prompt + completions,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": _total(dones, "reasoning_tokens"),
            "audio_tokens": 0,
            # An accepted EOS is not a completion token, and cost tables subtract one number from the other.
            "accepted_prediction_tokens": sum(min(_stat(done, "accepted"), done.completion_tokens) for done in dones),
            "rejected_prediction_tokens": _total(dones, "drafted") - _total(dones, "accepted"),
        },
    }


def running_usage(prompt: int, completions: int) -> Json:
    """The field `usage` of an event before the end, where every event is to have it."""
    tokens = {"prompt_tokens": prompt, "completion_tokens": completions, "total_tokens": prompt + completions}
    return {"usage": tokens}


def _total(dones: Sequence[GenerationResult], name: str) -> int:
    return sum(_stat(done, name) for done in dones)


def _stat(done: GenerationResult, name: str) -> int:
    return int(done.stats.get(name, 0))


def report(whole: bool, done: GenerationResult, links: Addresses = NO_ADDRESSES) -> Json | None:
    """The field `paceline` of a finished choice. whole: else a lost side is reported, with the reason, and no more."""
    if not whole:
        return None if done.degraded is None else {"degraded": done.degraded, "why": done.strategy_reason}
    return {
        "strategy": done.strategy,
        "why": done.strategy_reason,
        "degraded": done.degraded,
        **policy_of(done.policy),
        "citations": [
            {"side": WEB if one.url else one.side, "document": one.document, "passage": one.passage, "score": one.score}
            | ({"file_id": one.file_id} if one.file_id else {})
            | ({"place": one.place} if one.place else {})
            | ({"url": url} if (url := links.url(one)).startswith("http") else {})
            for one in done.citations
        ],
        "stats": dict(done.stats),
        **({"handoff": asdict(done.handoff)} if done.handoff else {}),
        **({"steps": [asdict(step) for step in done.steps]} if done.steps else {}),
        **({"timeline": [_moment(moment) for moment in done.timeline]} if done.timeline else {}),
        "energy": {side: _energy(use, done.completion_tokens) for side, use in done.energy.items()},
    }


def policy_of(decision: Decision | None) -> Json:
    """The rule that decided an answer's level, and documents that it has not read, as nobody has confirmed them."""
    if decision is None:
        return {}
    asks = [{"id": key, "document": name} for key, name in decision.asks]
    return ({"policy": {"rule": decision.rule, "level": decision.level}} if decision.rule else {}) | (
        {"confirmation_needed": asks} if asks else {}
    )


def _moment(moment: Moment) -> Json:
    return {name: value for name, value in asdict(moment).items() if value or name in ("ms", "number")}


def _energy(use: EnergyUse, tokens: int) -> Json:
    """The energy of an answer at one side, as JSON. The joules of sent bytes are always modelled."""
    return {
        "meter": use.meter,
        "joules": use.joules,
        "joules_per_token": use.joules / tokens if tokens else None,
        "computed": {"joules": use.computed.joules, "source": use.computed.source},
        "sent": {"joules": use.sent.joules, "source": use.sent.source},
    }


def summary(whole: bool, dones: Sequence[GenerationResult], links: Addresses = NO_ADDRESSES) -> Json | None:
    """The field `paceline` of the whole call: the first choice's report, degraded if any choice was."""
    if not dones:
        return None
    degraded = next((done for done in dones if done.degraded is not None), None)
    if not whole:
        return None if degraded is None else report(whole, degraded)
    return (report(whole, dones[0], links) or {}) | {"degraded": degraded and degraded.degraded}


def annotations_of(citations: Sequence[Citation], length: int, links: Addresses, *, places: bool = True) -> list[Json]:
    """OpenAI's `url_citation`, spanning the answer. places: titles say where in the document the passage is."""
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": 0,
                "end_index": length,
                "title": ", ".join(filter(None, (citation.document or UNNAMED, citation.place if places else ""))),
                "url": links.url(citation),
            },
        }
        for citation in citations
    ]


def _optional(name: str, value: Mapping[str, object] | None) -> Json:
    return {} if value is None else {name: value}


def _logprobs(call: ChatCall, items: list[Json]) -> Json | None:
    return {"content": items, "refusal": None} if call.requests[0].output.top_logprobs is not None else None


def logprob_items(delta: TextDelta) -> list[Json]:
    return [_logprob(chosen) | {"top_logprobs": [_logprob(other) for other in top]} for chosen, top in delta.logprobs]


def _logprob(one: TokenLogprob) -> Json:
    return {"token": one.token, "logprob": max(one.logprob, LOGPROB_FLOOR), "bytes": list(one.bytes)}


# ---- the route ------------------------------------------------------------------------------------------------------
async def admit_chat(request: Request, call: ChatCall, service: Service) -> list[Generation]:
    """All of the call's generations, or none, by `prepare_all`. Raises RequestError, and ClientGoneError when the
    client leaves."""
    request.state.model = call.requests[0].model  # for the log, and the metrics
    request.state.auto = call.requests[0].strategy.name == AUTO  # likewise
    requests, stores = call.requests, call.asked.paceline.vector_stores
    if stores is not None:
        requests, _ = await select_stores(requests, service, request.state.identity, stores)
    return await while_connected(request.receive, prepare_all(service, requests))


router = keyed_router("chat", "chat", route=AnswerRoute)


@router.post("/v1/chat/completions", responses=official("chat.ChatCompletion", stream="chat.ChatCompletionChunk"))
async def complete_chat(
    asked: ChatRequest, request: Request, service: ServiceDep, settings: SettingsDep, caller: Caller
) -> Response:
    """Answer a conversation, with what both sides' documents say."""
    call = chat_call(asked, service, caller, documents=settings.documents)
    model = chat_model(service, asked.model)
    try:
        generations = await admit_chat(request, call, service)
    except RequestError as error:
        if error.param == "tools" and call.tools is not None and call.tools.legacy:
            error.param = "functions"
        raise
    links = settings.addresses.of(request)
    name, fingerprint = f"chatcmpl-{secrets.token_hex(12)}", f"fp_{model.fingerprint[:12]}"
    meta = ChatMeta(name, int(time.time()), fingerprint, call, links, generations[0].prompt_tokens)
    # The answer starts when the response is sent: `GenerationFanIn` calls `run` of each generation.
    if not asked.stream:
        return JsonAnswer(generations, WholeCompletion(meta), settings.keep_alive)
    return StreamedAnswer(generations, ChatChunks(meta), settings.keep_alive, meta.id)
