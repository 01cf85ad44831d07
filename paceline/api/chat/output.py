"""The route `/v1/chat/completions`, and its answers in OpenAI's JSON, nulls included, whole and streamed.

Source: openai-openapi 2.3.0, CreateChatCompletionResponse and CreateChatCompletionStreamResponse.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.request import ChatCall, ChatRequest, ToolUse, chat_call
from paceline.api.chat.tools import AnswerReader, Said, TextOutput, Thought, ToolCallArguments, ToolCallStart
from paceline.api.generation.attachments import AnswerRoute
from paceline.api.generation.request import prepare_all
from paceline.api.generation.schema import SamplingFields
from paceline.api.generation.streaming import AnswerWriter, sent
from paceline.api.http.body import Json, while_connected
from paceline.api.http.routing import NO_ADDRESSES, Addresses, Caller, ServiceDep, SettingsDep
from paceline.api.models import chat_model
from paceline.api.openapi import answered, keyed_router
from paceline.api.search import select_stores
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
)
from paceline.strategies.base import Side


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Choice:
    """One choice while it is written: what its message says so far, its log-probabilities, and its end."""

    def __init__(self, tools: ToolUse | None, *, thinks: bool = True) -> None:
        """thinks: what the model thinks is told."""
        self._tools = tools
        self._reader = AnswerReader(None if tools is None else tools.parser(), thinks=thinks)
        self._thoughts: list[str] = []
        self._content: list[str] = []
        self._calls: list[_Call] = []
        self.logprobs: list[Json] = []
        self._num_told = 0  # of them, those that `untold` has given
        self.tokens = 0
        self.done: GenerationResult | None = None

    def take(self, event: GenerateEvent) -> Sequence[Said]:
        """Parts that an event adds to the message."""
        if isinstance(event, GenerationResult):
            self.done, self.tokens = event, event.completion_tokens
        else:
            self.logprobs += logprob_items(event)
            self.tokens += event.tokens
        said = self._reader.read(event)
        for part in said:
            match part:
                case Thought(text):
                    self._thoughts.append(text)
                case TextOutput(text):
                    self._content.append(text)
                case ToolCallStart(_, name):
                    self._calls.append(_Call(f"call_{secrets.token_hex(12)}", name))
                case ToolCallArguments(index, text):
                    self._calls[index].arguments.append(text)
        return said

    def untold(self) -> list[Json]:
        """Log-probabilities since the last call of this."""
        new, self._num_told = self.logprobs[self._num_told :], len(self.logprobs)
        return new

    def delta(self, part: Said) -> Json:
        """A part as a stream tells of it."""
        match part:
            case Thought(text):
                return {"reasoning_content": text}
            case TextOutput(text):
                return {"content": text}
            case ToolCallStart(index, name):
                function: Json = {"name": name, "arguments": ""}
                call: Json = {"index": index, "id": self._calls[index].id, "type": "function", "function": function}
            case ToolCallArguments(index, text):
                function = {"arguments": text}
                call = {"index": index, "function": function}
        return {"function_call": function} if self._is_legacy else {"tool_calls": [call]}

    def message(self, links: Addresses = NO_ADDRESSES) -> Json:
        """The whole message. Without text, content is null if functions may be called, as at the beginning of a
        stream."""
        text = "".join(self._content)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._tools is not None and not text:
            message["content"] = None
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        functions = [{"name": call.name, "arguments": "".join(call.arguments)} for call in self._calls]
        if functions and self._is_legacy:
            message["function_call"] = functions[0]
        elif functions:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(self._calls, functions, strict=True)
            ]
        return message | self.annotations(links)

    def annotations(self, links: Addresses) -> Json:
        """OpenAI's `url_citation`s, each spanning the answer."""
        if self.done is None or not self.done.citations:
            return {}
        span = {"start_index": 0, "end_index": sum(map(len, self._content))}
        told = [{"type": "url_citation", "url_citation": span | cited(one, links)} for one in self.done.citations]
        return {"annotations": told}

    @property
    def reason(self) -> str | None:
        """OpenAI's `finish_reason`. A call that was cut off by a limit or a stop string is not reported as one."""
        if self.done is None:
            return None
        if self._tools is None or not self._reader.calls or self.done.reason != "stop" or self._tools.named:
            return self.done.reason
        return "function_call" if self._tools.legacy else "tool_calls"

    @property
    def _is_legacy(self) -> bool:
        return self._tools is not None and self._tools.legacy


UNNAMED = "private document"  # title of a device's document in a cloud's answer, which never has its name
WEB = "web"  # in place of a side, of a page
LOGPROB_FLOOR = -9999.0  # OpenAI's number for probability 0; minus infinity is not JSON


class ChatWriter(AnswerWriter):
    def __init__(self, call: ChatCall, fingerprint: str, links: Addresses, prompt_tokens: int) -> None:
        """fingerprint: of the model. prompt_tokens: as known before the answer; 0: unknown."""
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._call = call
        self._asked = call.asked
        self._fingerprint = f"fp_{fingerprint[:12]}"
        self._links = links
        self._prompt_tokens = prompt_tokens
        self._choices = [Choice(call.tools, thinks=call.asked.include_reasoning) for _ in call.requests]

    def begin(self) -> Sequence[Json]:
        """The role of each choice. Its content is null if functions may be called, since there may be no text."""
        role: Json = {"role": "assistant", "content": "" if self._call.tools is None else None, "refusal": None}
        return [self._chunk(index, role) for index in range(len(self._choices))]

    def take(self, index: int, event: GenerateEvent) -> Sequence[Json]:
        choice = self._choices[index]
        said = choice.take(event)
        if isinstance(event, GenerationResult):
            chunks = [self._delta(index, part) for part in said]
            # The last has the log-probabilities of tokens in no earlier one.
            extension = report(self._call.report, event, self._links)
            last = self._chunk(index, choice.annotations(self._links), choice.untold(), extension, choice.reason)
            return [*chunks, last]
        if not said and event.logprobs and self._call.tools is None:
            said = [TextOutput("")]  # a token that is an incomplete character
        return [self._delta(index, part, event.lane) for part in said]

    def end(self) -> Sequence[Json]:
        """Usage, if it was requested, with the summary again, so that the last event always has it."""
        return (
            [self._frame("chat.completion.chunk") | {"choices": []} | self._sum()] if self._asked.include_usage else ()
        )

    def whole(self) -> Json:
        told = self._call.requests[0].wish.top_logprobs is not None
        choices: list[Json] = []
        for index, choice in enumerate(self._choices):
            assert choice.done is not None, "an answer is written when every choice has ended"
            logprobs = {"content": choice.logprobs, "refusal": None} if told else None
            shown = {"message": choice.message(self._links), "logprobs": logprobs, "finish_reason": choice.reason}
            extension = report(self._call.report, choice.done, self._links) if len(self._choices) > 1 else None
            choices.append({"index": index} | shown | optional("paceline", extension))
        return self._frame("chat.completion") | {"choices": choices} | self._sum()

    def _delta(self, index: int, part: Said, lane: Side | None = None) -> Json:
        choice = self._choices[index]
        if isinstance(part, Thought) and part.step is not None:  # a line, as front ends show it, and its parts
            return self._chunk(index, choice.delta(part), extension={"step": asdict(part.step)})
        extension: Json | None = {"lane": lane} if self._call.report else None
        return self._chunk(index, choice.delta(part), choice.untold(), extension)

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Sequence[Json] = (),
        extension: Json | None = None,
        reason: str | None = None,
    ) -> Json:
        choice: Json = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": reason,
        }
        so_far = usage_so_far(self._asked, self._prompt_tokens, (each.tokens for each in self._choices))
        chunk = self._frame("chat.completion.chunk") | {"choices": [choice]}
        return chunk | so_far | optional("paceline", extension)

    def _sum(self) -> Json:
        dones = [choice.done for choice in self._choices if choice.done is not None]
        return {"usage": usage(dones)} | optional("paceline", summary(self._call.report, dones, self._links))

    def _frame(self, kind: str) -> Json:
        """Fields before the choices. Of service tiers there is only the default, named if one was requested."""
        tier = {} if self._asked.service_tier is None else {"service_tier": "default"}
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._asked.model,
            "system_fingerprint": self._fingerprint,
            **tier,
        }


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


def usage_so_far(asked: SamplingFields, prompt: int, tokens: Iterable[int]) -> Json:
    """The field `usage` of an event before the end: null, or the tokens so far. tokens: of each choice."""
    if not asked.running_usage:
        return {"usage": None} if asked.include_usage else {}
    written = sum(tokens)
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}}


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


def cited(citation: Citation, links: Addresses, *, places: bool = True) -> Json:
    """Title and address. places: titles say where in the document the passage is."""
    title = ", ".join(filter(None, (citation.document or UNNAMED, citation.place if places else "")))
    return {"title": title, "url": links.url(citation)}


def optional(name: str, value: Mapping[str, object] | None) -> Json:
    return {} if value is None else {name: value}


def logprob_items(delta: TextDelta) -> list[Json]:
    return [_logprob(chosen) | {"top_logprobs": [_logprob(other) for other in top]} for chosen, top in delta.logprobs]


def _logprob(one: TokenLogprob) -> Json:
    return {"token": one.token, "logprob": max(one.logprob, LOGPROB_FLOOR), "bytes": list(one.bytes)}


# ---- the route ------------------------------------------------------------------------------------------------------
async def admit_chat(request: Request, call: ChatCall, service: Service) -> list[Generation]:
    """All of the call's generations, or none, by `prepare_all`. Raises RequestError, and ClientGoneError when the
    client leaves."""
    request.state.model = call.requests[0].model  # for the log, and the metrics
    request.state.auto = call.requests[0].wish.strategy == AUTO  # likewise
    requests, stores = call.requests, call.asked.paceline.vector_stores
    if stores is not None:
        requests, _ = await select_stores(requests, service, request.state.identity, stores)
    return await while_connected(request.receive, prepare_all(service, requests))


router = keyed_router("chat", "chat", route=AnswerRoute)


@router.post("/v1/chat/completions", responses=answered("chat.ChatCompletion", stream="chat.ChatCompletionChunk"))
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
    writer = ChatWriter(call, model.fingerprint, links, generations[0].prompt_tokens)
    # The answer starts when the response is sent: `GenerationFanIn` calls `run` of each generation.
    return sent(generations, writer, stream=asked.stream)
