"""`/v1/completions`: the endpoint, its requests, answers and log-probabilities in the older form.

Source: openai-openapi 2.3.0, CreateCompletionRequest and CreateCompletionResponse.
"""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

from pydantic import BaseModel, Field, PlainValidator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.output import LOGPROB_FLOOR, Json, report, running_usage, summary, usage
from paceline.api.generation.attachments import PromptRoute
from paceline.api.generation.request import (
    Input,
    Inputs,
    LateGeneration,
    check_relations,
    choices_of,
    close_all,
    form_of,
    generation_of,
    inputs,
    must_load,
    prepare_all,
    refuse_forms,
)
from paceline.api.generation.schema import SamplingFields
from paceline.api.generation.streaming import SSE_DONE, AnswerChunks, JsonAnswer, StreamedAnswer, sse_event
from paceline.api.http.auth import Identity
from paceline.api.http.body import encode_json, while_connected
from paceline.api.http.routing import Caller, ServiceDep, SettingsDep
from paceline.api.models import chat_model
from paceline.api.openapi import keyed_router, official
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import (
    AskedPrompt,
    GenerateEvent,
    GenerateRequest,
    Generation,
    GenerationResult,
    Logprobs,
    Service,
    TokenLogprob,
)

# Log-probabilities: four parallel lists with one entry per token. Unlike those of chat they have no field for bytes, so
# a token that is not valid UTF-8 is named by its bytes, `bytes:\xe2\x82`, as by OpenAI: two alternatives have the same
# name only if they have the same text.


@dataclass(slots=True)
class LegacyLogprobs:
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(self, more: LegacyLogprobs) -> None:
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset

    def json(self, top: int) -> dict[str, object]:
        """`top`: number of alternatives requested; `top_logprobs` is null for 0."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs if top else None,
            "text_offset": self.text_offset,
        }


class Offsets:
    """Offset of each token in the choice's text, in characters. All tokens of one character have its offset."""

    def __init__(self) -> None:
        self._at = 0  # below 0 where the first tokens are no part of the text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, data: bytes) -> int:
        at = self._at
        self._at += len(self._decoder.decode(data))
        return max(at, 0)

    def restart(self, at: int) -> None:
        """Drop an incomplete character, and continue at offset `at`."""
        self._at = at
        self._decoder.reset()


def entries(logprobs: Sequence[Logprobs], offsets: Offsets) -> LegacyLogprobs:
    result = LegacyLogprobs()
    for chosen, top in logprobs:
        _add(result, chosen, top, offsets.next(bytes(chosen.bytes)))
    return result


def prompt_entries(token_bytes: Sequence[bytes], logprobs: Sequence[Logprobs], offsets: Offsets) -> LegacyLogprobs:
    """Entries of a prompt. Its first token has no probability: null, as lm-evaluation-harness expects.

    `logprobs`: of all tokens but the first.
    """
    first = token_bytes[0]
    result = LegacyLogprobs([_name(first.decode("utf-8", "replace"), first)], [None], [None], [offsets.next(first)])
    for data, (chosen, top) in zip(token_bytes[1:], logprobs, strict=True):
        _add(result, chosen, top, offsets.next(data))
    return result


def _add(result: LegacyLogprobs, chosen: TokenLogprob, top: Sequence[TokenLogprob], offset: int) -> None:
    result.tokens.append(_token(chosen))
    result.token_logprobs.append(max(chosen.logprob, LOGPROB_FLOOR))
    alternatives: dict[str, float] = {}
    for one in (*top, chosen):  # `top` may lack the chosen token
        name, logprob = _token(one), max(one.logprob, LOGPROB_FLOOR)
        alternatives[name] = max(alternatives.get(name, LOGPROB_FLOOR), logprob)
    result.top_logprobs.append(alternatives)
    result.text_offset.append(offset)


def _token(one: TokenLogprob) -> str:
    return _name(one.token, bytes(one.bytes))


def _name(token: str, data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return token


# A prompt is continued without a chat template and without documents, by one side alone.
MAX_PROMPTS = 128
MAX_CHOICES = 128  # prompts times n
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields):
    model: str
    prompt: Annotated[
        tuple[Input, ...], PlainValidator(inputs("prompt", MAX_PROMPTS), json_schema_input_type=Inputs)
    ] = ("",)
    max_tokens: Annotated[int, Field(ge=0)] = DEFAULT_MAX_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _served(cls, body: object) -> object:
        """Raises RequestError for a field that asks for what is not done here."""
        if isinstance(body, dict):
            refuse_forms(body, served=("echo",))
            if body.get("suffix"):
                raise RequestError(
                    "Nothing can be written in front of a suffix here: the model only continues.",
                    code="unsupported_parameter",
                    param="suffix",
                )
        return body


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One HTTP call. Choices are numbered by prompt: `n` of the first, then `n` of the second."""

    asked: CompletionRequest
    model: ModelInfo
    request: GenerateRequest  # common to all choices; the prompt is still to be filled in

    @property
    def report(self) -> bool:
        return self.asked.paceline.report

    @property
    def write(self) -> bool:
        """False where the prompts are only scored."""
        return self.asked.max_tokens > 0

    def requests(self, prompts: Sequence[tuple[int, ...]]) -> list[GenerateRequest]:
        """One request per choice. With a seed, a prompt has the same answers alone and among others; without one,
        all answers differ."""
        if self.request.strategy.seeded:
            choices = choices_of(self.request, self.asked.n) * len(prompts)
        else:
            choices = choices_of(self.request, self.asked.n * len(prompts))
        return [
            replace(one, prompt=AskedPrompt(tokens=prompts[index // self.asked.n])) for index, one in enumerate(choices)
        ]


def completion_call(asked: CompletionRequest, service: Service, identity: Identity) -> CompletionCall:
    """Raises RequestError: 400 that names the field, 404 for an unknown model."""
    model = chat_model(service, asked.model)
    check_relations(asked)
    if asked.best_of is not None and asked.best_of != asked.n:
        raise RequestError(
            f"best_of is {asked.best_of}; every choice is returned, so it must be equal to n, {asked.n}.",
            code="unsupported_parameter",
            param="best_of",
        )
    extension = asked.paceline
    for name, wanted in (
        ("documents", extension.documents),
        ("vector_stores", extension.vector_stores),
        ("workflow", extension.workflow),
    ):
        if wanted:
            raise RequestError(
                "A prompt is continued as it stands, without documents; /v1/chat/completions reads them.",
                code="unsupported_parameter",
                param=f"paceline.{name}",
            )
    if asked.max_tokens == 0 and not asked.echo:
        raise RequestError("max_tokens can only be 0 with echo: else there would be no answer.", param="max_tokens")
    if len(asked.prompt) * asked.n > MAX_CHOICES:
        raise RequestError(f"{len(asked.prompt)} prompts times n is more than {MAX_CHOICES} answers.", param="n")
    limit = max(asked.max_tokens, 1)
    request = generation_of(asked, model, service, identity, documents=0, limit=limit, form=form_of(asked))
    return CompletionCall(
        asked,
        model,
        replace(
            request,
            output=replace(request.output, top_logprobs=asked.logprobs),
            sources=replace(request.sources, documents=0),
        ),
    )


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    text: str
    token_bytes: tuple[bytes, ...]  # of each token
    logprobs: tuple[Logprobs, ...] | None  # of all tokens but the first; None: not requested

    @staticmethod
    def of(prompt: str | None, token_bytes: tuple[bytes, ...], logprobs: tuple[Logprobs, ...] | None) -> EchoedPrompt:
        """`prompt`: the text that was sent; None where token ids were sent."""
        return EchoedPrompt(_text(token_bytes) if prompt is None else prompt, token_bytes, logprobs)

    def entries(self, offsets: Offsets) -> LegacyLogprobs:
        """The entries of the prompt's tokens. Tokens before the text, such as a BOS token, have its offset."""
        assert self.logprobs is not None, "entries need log-probabilities"
        offsets.restart(len(self.text) - len(_text(self.token_bytes)))
        return prompt_entries(self.token_bytes, self.logprobs, offsets)


def _text(token_bytes: Sequence[bytes]) -> str:
    return b"".join(token_bytes).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class CompletionMeta:
    id: str
    created: int  # Unix time, s
    fingerprint: str  # of the model
    call: CompletionCall
    echoes: tuple[EchoedPrompt, ...]  # one per prompt; none without `echo`
    prompt_tokens: int = 0  # of all prompts, as known before the answer; 0: unknown

    @property
    def num_choices(self) -> int:
        return len(self.call.asked.prompt) * self.call.asked.n

    def echo(self, index: int) -> EchoedPrompt | None:
        return self.echoes[index // self.call.asked.n] if self.echoes else None

    def tail(self, dones: Mapping[int, GenerationResult]) -> Json:
        """Usage, which counts each prompt once, and the field `paceline`. `dones`: by index of the choice."""
        ordered = [dones[index] for index in sorted(dones)]
        prompt = sum(done.prompt_tokens for done in ordered[:: self.call.asked.n])
        completions = sum(done.completion_tokens for done in ordered)
        tokens = usage(ordered) | {"prompt_tokens": prompt, "total_tokens": prompt + completions}
        extension = summary(self.call.report, ordered)
        return {"usage": tokens} if extension is None else {"usage": tokens, "paceline": extension}

    def frame(self) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.call.asked.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class ChoiceDelta:
    text: str
    logprobs: LegacyLogprobs
    reason: str | None = None
    report: Json | None = None  # the field `paceline`

    def json(self, index: int, top: int | None) -> Json:
        """`top`: number of alternatives requested; None: no log-probabilities."""
        logprobs = None if top is None else self.logprobs.json(top)
        choice: Json = {"text": self.text, "index": index, "logprobs": logprobs, "finish_reason": self.reason}
        return choice if self.report is None else choice | {"paceline": self.report}


class ChoiceEncoder:
    """Converts the events of one choice to its parts. Token offsets count over all parts."""

    def __init__(self, meta: CompletionMeta, index: int) -> None:
        self._call = meta.call
        self._echo = meta.echo(index)
        self._offsets = Offsets()

    def begin(self) -> ChoiceDelta | None:
        """The prompt, if it is to be echoed."""
        echo = self._echo
        if echo is None:
            return None
        logprobs = LegacyLogprobs() if echo.logprobs is None else echo.entries(self._offsets)
        self._offsets.restart(len(echo.text))
        return ChoiceDelta(echo.text, logprobs)

    def take(self, event: GenerateEvent) -> ChoiceDelta | None:
        """The part for an event; None if it has neither text nor log-probabilities."""
        if isinstance(event, GenerationResult):
            end = () if event.end is None else (event.end,)
            return ChoiceDelta("", entries(end, self._offsets), event.reason, report(self._call.report, event))
        if not event.text and not event.logprobs:
            return None
        return ChoiceDelta(event.text, entries(event.logprobs, self._offsets))


class CompletionChunks(AnswerChunks):
    def __init__(self, meta: CompletionMeta) -> None:
        self._meta = meta
        self._encoders = [ChoiceEncoder(meta, index) for index in range(meta.num_choices)]
        self._dones: dict[int, GenerationResult] = {}
        self._tokens = [0] * meta.num_choices  # of each choice so far

    def begin(self) -> bytes:
        return b"".join(self._chunk(index, encoder.begin()) for index, encoder in enumerate(self._encoders))

    def take(self, index: int, event: GenerateEvent) -> bytes:
        if isinstance(event, GenerationResult):
            self._dones[index] = event
            self._tokens[index] = event.completion_tokens
        else:
            self._tokens[index] += event.tokens
        return self._chunk(index, self._encoders[index].take(event))

    def end(self) -> bytes:
        if not self._meta.call.asked.include_usage:
            return SSE_DONE
        return sse_event(self._meta.frame() | {"choices": []} | self._meta.tail(self._dones)) + SSE_DONE

    def _chunk(self, index: int, delta: ChoiceDelta | None) -> bytes:
        if delta is None:
            return b""
        call = self._meta.call
        choice = delta.json(index, call.asked.logprobs if delta.logprobs.tokens else None)
        usage_of: Json = {"usage": None} if call.asked.include_usage else {}
        if call.asked.running_usage:
            usage_of = running_usage(self._meta.prompt_tokens, sum(self._tokens))
        return sse_event(self._meta.frame() | {"choices": [choice]} | usage_of)


class CompletionBody:
    """Encoder of a completion in one piece (`AnswerBody`): joins the parts of each choice."""

    def __init__(self, meta: CompletionMeta) -> None:
        self._meta = meta
        self._encoders = [ChoiceEncoder(meta, index) for index in range(meta.num_choices)]
        self._deltas = [[delta] if (delta := encoder.begin()) is not None else [] for encoder in self._encoders]
        self._dones: dict[int, GenerationResult] = {}

    def take(self, index: int, event: GenerateEvent) -> None:
        if isinstance(event, GenerationResult):
            self._dones[index] = event
        delta = self._encoders[index].take(event)
        if delta is not None:
            self._deltas[index].append(delta)

    def body(self) -> bytes:
        """Every choice must be done."""
        top = self._meta.call.asked.logprobs
        choices = [_joined(deltas).json(index, top) for index, deltas in enumerate(self._deltas)]
        if len(choices) == 1:
            choices[0].pop("paceline", None)  # equal to that of the whole answer
        return encode_json(self._meta.frame() | {"choices": choices} | self._meta.tail(self._dones))


def _joined(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    logprobs = LegacyLogprobs()
    for delta in deltas:
        logprobs.extend(delta.logprobs)
    return ChoiceDelta("".join(delta.text for delta in deltas), logprobs, deltas[-1].reason, deltas[-1].report)


Tokens = tuple[int, ...]


class EventChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, object] | None
    finish_reason: Literal["stop", "length"] | None


class CompletionEvent(BaseModel):
    """One event of a stream: a completion whose `finish_reason` is null until a choice has ended."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[EventChoice]


router = keyed_router("completions", "completions", route=PromptRoute)


@router.post("/v1/completions", responses=official("Completion", stream=CompletionEvent))
async def complete(
    asked: CompletionRequest, request: Request, service: ServiceDep, settings: SettingsDep, caller: Caller
) -> Response:
    """Continue one or several texts. With `echo` and `logprobs` they are scored first, with `max_tokens` 0 nothing
    else."""
    call = completion_call(asked, service, caller)
    request.state.model = call.model.name  # for the log
    meta, generations = await while_connected(request.receive, begin(service, call))
    if not call.asked.stream:
        return JsonAnswer(generations, CompletionBody(meta), settings.keep_alive)
    return StreamedAnswer(generations, CompletionChunks(meta), settings.keep_alive, meta.id)


async def begin(service: Service, call: CompletionCall) -> tuple[CompletionMeta, Sequence[Generation]]:
    """Admit the answers, then score the prompts: nothing is computed for a request that will be refused."""
    if call.write and not call.asked.echo and must_load(service, call.model.name):
        return await _meta(service, call, ()), _late(service, call)
    prompts = [await _tokens(service, prompt, call.model.name) for prompt in call.asked.prompt]
    for prompt in prompts if call.asked.echo else ():
        await service.check(replace(call.request, prompt=AskedPrompt(tokens=prompt)), room=int(call.write))
    if not call.write:
        empty = [_EmptyGeneration(len(prompt)) for prompt in prompts for _ in range(call.asked.n)]
        return await _meta(service, call, prompts), empty
    generations = await prepare_all(service, call.requests(prompts))
    try:
        return await _meta(service, call, prompts), generations
    except BaseException:  # also a cancellation: the client may leave while its prompts are scored
        await close_all(generations)
        raise


def _late(service: Service, call: CompletionCall) -> list[Generation]:
    """The answers of a model that has to be loaded first."""

    async def prepare(asked: GenerateRequest, prompt: Input) -> Generation:
        tokens = await _tokens(service, prompt, asked.model)
        return await service.prepare(replace(asked, prompt=AskedPrompt(tokens=tokens)))

    unread = call.requests([()] * len(call.asked.prompt))
    return [
        LateGeneration(partial(prepare, asked, call.asked.prompt[index // call.asked.n]))
        for index, asked in enumerate(unread)
    ]


async def _meta(service: Service, call: CompletionCall, prompts: Sequence[Tokens]) -> CompletionMeta:
    return CompletionMeta(
        id=f"cmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        fingerprint=f"fp_{call.model.fingerprint[:12]}",
        call=call,
        echoes=await _echoes(service, call, prompts) if call.asked.echo else (),
        prompt_tokens=sum(map(len, prompts)),
    )


async def _tokens(service: Service, prompt: Input, model: str) -> Tokens:
    return await service.tokenize(prompt, model) if isinstance(prompt, str) else prompt


async def _echoes(service: Service, call: CompletionCall, prompts: Sequence[Tokens]) -> tuple[EchoedPrompt, ...]:
    scored: dict[Tokens, tuple[Logprobs, ...] | None] = {}
    for prompt in prompts:
        if call.asked.logprobs is not None and prompt not in scored:
            owner = call.request.account.owner
            scored[prompt] = tuple(await service.score(prompt, call.asked.logprobs, call.model.name, owner))
    return tuple(
        [
            EchoedPrompt.of(
                asked if isinstance(asked, str) else None,
                await service.token_bytes(prompt, call.model.name),
                scored.get(prompt),
            )
            for asked, prompt in zip(call.asked.prompt, prompts, strict=True)
        ]
    )


@dataclass(frozen=True, slots=True)
class _EmptyGeneration:
    """A generation without tokens, for `max_tokens` 0."""

    prompt_tokens: int

    async def run(self) -> AsyncIterator[GenerateEvent]:
        yield GenerationResult("length", self.prompt_tokens, 0, "autoregressive", "nothing was to be written")

    async def aclose(self) -> None:
        pass
