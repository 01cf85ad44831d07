"""`/v1/completions`: the endpoint, its requests, answers and log-probabilities in the older form.

Source: openai-openapi 2.3.0, CreateCompletionRequest and CreateCompletionResponse.
"""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, Field, PlainValidator
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.output import LOGPROB_FLOOR, optional, report, summary, usage, usage_so_far
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
)
from paceline.api.generation.schema import SamplingFields
from paceline.api.generation.streaming import AnswerWriter, sent
from paceline.api.http.auth import Identity
from paceline.api.http.body import Json, while_connected
from paceline.api.http.routing import Caller, ServiceDep
from paceline.api.models import chat_model
from paceline.api.openapi import answered, keyed_router
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import (
    AskedPrompt,
    GenerateEvent,
    GenerateRequest,
    Generation,
    GenerationResult,
    Logprobs,
    OneModel,
    Service,
    TokenLogprob,
)

# Log-probabilities: four parallel lists with one entry per token. Unlike those of chat they have no field for bytes, so
# a token that is not valid UTF-8 is named by its bytes, `bytes:\xe2\x82`, as by OpenAI: two alternatives have the same
# name only if they have the same text.


class Entry(NamedTuple):
    token: str
    logprob: float | None  # None: of the first token of a prompt
    top: dict[str, float] | None
    offset: int  # in the choice's text, in characters; all tokens of one character have its offset


class Offsets:
    """Offset of each token in the choice's text."""

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


def entries(logprobs: Sequence[Logprobs], offsets: Offsets) -> list[Entry]:
    return [_entry(chosen, top, offsets.next(bytes(chosen.bytes))) for chosen, top in logprobs]


def _entry(chosen: TokenLogprob, top: Sequence[TokenLogprob], offset: int) -> Entry:
    alternatives: dict[str, float] = {}
    for one in (*top, chosen):  # `top` may lack the chosen token
        name, logprob = _name(one.token, bytes(one.bytes)), max(one.logprob, LOGPROB_FLOOR)
        alternatives[name] = max(alternatives.get(name, LOGPROB_FLOOR), logprob)
    return Entry(_name(chosen.token, bytes(chosen.bytes)), max(chosen.logprob, LOGPROB_FLOOR), alternatives, offset)


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
    refused: ClassVar = {"suffix": "Nothing can be written in front of a suffix here: the model only continues"}

    model: str
    prompt: Annotated[
        tuple[Input, ...], PlainValidator(inputs("prompt", MAX_PROMPTS), json_schema_input_type=Inputs)
    ] = ("",)
    max_tokens: Annotated[int, Field(ge=0)] = DEFAULT_MAX_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One HTTP call. Choices are numbered by prompt: `n` of the first, then `n` of the second."""

    asked: CompletionRequest
    model: ModelInfo
    request: GenerateRequest  # common to all choices; the prompt is still to be filled in

    @property
    def write(self) -> bool:
        """False where the prompts are only scored."""
        return self.asked.max_tokens > 0

    def requests(self, prompts: Sequence[tuple[int, ...]]) -> list[GenerateRequest]:
        """One request per choice. With a seed, a prompt has the same answers alone and among others; without one,
        all answers differ."""
        if self.request.wish.seeded:
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
    request = generation_of(
        asked,
        model,
        service,
        identity,
        AskedPrompt(),
        documents=0,
        limit=max(asked.max_tokens, 1),
        form=form_of(asked),
        top_logprobs=asked.logprobs,
    )
    return CompletionCall(asked, model, request)


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    text: str
    token_bytes: tuple[bytes, ...]  # of each token
    logprobs: tuple[Logprobs, ...] | None  # of all tokens but the first; None: not requested

    def entries(self, offsets: Offsets) -> list[Entry]:
        """Entries of the prompt's tokens. The first has no probability: null, as lm-evaluation-harness expects. Tokens
        before the text, such as a BOS token, have its offset."""
        if self.logprobs is None:
            return []
        offsets.restart(len(self.text) - len(_text(self.token_bytes)))
        first = self.token_bytes[0]
        result = [Entry(_name(first.decode("utf-8", "replace"), first), None, None, offsets.next(first))]
        for data, (chosen, top) in zip(self.token_bytes[1:], self.logprobs, strict=True):
            result.append(_entry(chosen, top, offsets.next(data)))
        return result


def _text(token_bytes: Sequence[bytes]) -> str:
    return b"".join(token_bytes).decode("utf-8", "replace")


class _Choice:
    """One choice while it is written. Token offsets count over all of its parts."""

    def __init__(self, echo: EchoedPrompt | None) -> None:
        self._offsets = Offsets()
        self.text = [] if echo is None else [echo.text]
        self.entries = [] if echo is None else echo.entries(self._offsets)
        self._offsets.restart(0 if echo is None else len(echo.text))
        self.tokens = 0
        self.done: GenerationResult | None = None

    def take(self, event: GenerateEvent) -> tuple[str, list[Entry]]:
        """Text and log probabilities that an event adds."""
        if isinstance(event, GenerationResult):
            self.done, self.tokens = event, event.completion_tokens
            text, new = "", entries(() if event.end is None else (event.end,), self._offsets)
        else:
            self.tokens += event.tokens
            text, new = event.text, entries(event.logprobs, self._offsets)
        self.text.append(text)
        self.entries += new
        return text, new


class CompletionWriter(AnswerWriter):
    def __init__(self, call: CompletionCall, echoes: Sequence[EchoedPrompt], prompt_tokens: int) -> None:
        """echoes: one per prompt; none without `echo`. prompt_tokens: of all prompts, as known now; 0: unknown."""
        self.id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._call = call
        self._asked = call.asked
        self._prompt_tokens = prompt_tokens
        indices = range(len(call.asked.prompt) * call.asked.n)
        self._choices = [_Choice(echoes[index // call.asked.n] if echoes else None) for index in indices]

    def begin(self) -> Sequence[Json]:
        """The prompts, if they are to be echoed."""
        if not self._asked.echo:
            return ()
        return [self._chunk(index, "".join(each.text), each.entries) for index, each in enumerate(self._choices)]

    def take(self, index: int, event: GenerateEvent) -> Sequence[Json]:
        text, new = self._choices[index].take(event)
        if isinstance(event, GenerationResult):
            return [self._chunk(index, text, new, event)]
        return [self._chunk(index, text, new)] if text or new else ()

    def end(self) -> Sequence[Json]:
        return [self._frame() | {"choices": []} | self._sum()] if self._asked.include_usage else ()

    def whole(self) -> Json:
        choices: list[Json] = []
        for index, choice in enumerate(self._choices):
            told = len(self._choices) > 1  # else its report is that of the whole answer
            choices.append(self._choice(index, "".join(choice.text), choice.entries, choice.done, told=told))
        return self._frame() | {"choices": choices} | self._sum()

    def _chunk(self, index: int, text: str, new: Sequence[Entry], done: GenerationResult | None = None) -> Json:
        choice = self._choice(index, text, new or None, done)
        so_far = usage_so_far(self._asked, self._prompt_tokens, (each.tokens for each in self._choices))
        return self._frame() | {"choices": [choice]} | so_far

    def _choice(
        self,
        index: int,
        text: str,
        new: Sequence[Entry] | None,
        done: GenerationResult | None,
        *,
        told: bool = True,
    ) -> Json:
        """new: None: no log-probabilities. told: with its report."""
        top = self._asked.logprobs
        logprobs: Json | None = None
        if top is not None and new is not None:
            logprobs = {
                "tokens": [entry.token for entry in new],
                "token_logprobs": [entry.logprob for entry in new],
                "top_logprobs": [entry.top for entry in new] if top else None,
                "text_offset": [entry.offset for entry in new],
            }
        reason = None if done is None else done.reason
        extension = report(self._asked.paceline.report, done) if told and done is not None else None
        choice: Json = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
        return choice | optional("paceline", extension)

    def _sum(self) -> Json:
        """Usage, which counts each prompt once, and the field `paceline`."""
        dones = [choice.done for choice in self._choices if choice.done is not None]
        prompt = sum(done.prompt_tokens for done in dones[:: self._asked.n])
        tokens = usage(dones)
        tokens |= {"prompt_tokens": prompt, "total_tokens": prompt + sum(done.completion_tokens for done in dones)}
        return {"usage": tokens} | optional("paceline", summary(self._asked.paceline.report, dones))

    def _frame(self) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._asked.model,
            "system_fingerprint": f"fp_{self._call.model.fingerprint[:12]}",
        }


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


@router.post("/v1/completions", responses=answered("Completion", stream=CompletionEvent))
async def complete(asked: CompletionRequest, request: Request, service: ServiceDep, caller: Caller) -> Response:
    """Continue one or several texts. With `echo` and `logprobs` they are scored first, with `max_tokens` 0 nothing
    else."""
    call = completion_call(asked, service, caller)
    request.state.model = call.model.name  # for the log
    writer, generations = await while_connected(request.receive, begin(service, call))
    return sent(generations, writer, stream=asked.stream)


async def begin(service: Service, call: CompletionCall) -> tuple[CompletionWriter, Sequence[Generation]]:
    """Admit the answers, then score the prompts: nothing is computed for a request that will be refused."""
    asked = call.asked
    if call.write and not asked.echo and must_load(service, call.model.name):
        unread = call.requests([()] * len(asked.prompt))
        late = [partial(_prepare, service, one, asked.prompt[index // asked.n]) for index, one in enumerate(unread)]
        return CompletionWriter(call, (), 0), [LateGeneration(each) for each in late]
    async with service.of(call.model.name) as served:
        prompts = [await _tokens(served, prompt, call.request.account.owner) for prompt in asked.prompt]
        for prompt in prompts if asked.echo else ():
            await served.check(replace(call.request, prompt=AskedPrompt(tokens=prompt)), room=int(call.write))
    generations: Sequence[Generation]
    if call.write:
        generations = await prepare_all(service, call.requests(prompts))
    else:
        generations = [_EmptyGeneration(len(prompt)) for prompt in prompts for _ in range(asked.n)]
    try:
        echoes = await _echoes(service, call, prompts) if asked.echo else ()
    except BaseException:  # also a cancellation: the client may leave while its prompts are scored
        await close_all(generations)
        raise
    return CompletionWriter(call, echoes, sum(map(len, prompts))), generations


async def _prepare(service: Service, asked: GenerateRequest, prompt: Input) -> Generation:
    async with service.of(asked.model) as served:
        tokens = await _tokens(served, prompt, asked.account.owner)
    return await service.prepare(replace(asked, prompt=AskedPrompt(tokens=tokens)))


async def _tokens(served: OneModel, prompt: Input, owner: str) -> Tokens:
    return await served.tokenize(prompt, owner) if isinstance(prompt, str) else prompt


async def _echoes(service: Service, call: CompletionCall, prompts: Sequence[Tokens]) -> list[EchoedPrompt]:
    top, owner = call.asked.logprobs, call.request.account.owner
    scored: dict[Tokens, tuple[Logprobs, ...] | None] = {}
    echoes: list[EchoedPrompt] = []
    async with service.of(call.model.name) as served:
        for asked, prompt in zip(call.asked.prompt, prompts, strict=True):
            if prompt not in scored:
                scored[prompt] = None if top is None else tuple(await served.score(prompt, top, owner))
            spelled = await served.token_bytes(prompt, owner)
            text = asked if isinstance(asked, str) else _text(spelled)
            echoes.append(EchoedPrompt(text, spelled, scored[prompt]))
    return echoes


@dataclass(frozen=True, slots=True)
class _EmptyGeneration:
    """A generation without tokens, for `max_tokens` 0."""

    prompt_tokens: int

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        yield GenerationResult("length", self.prompt_tokens, 0, "autoregressive", "nothing was to be written")

    async def aclose(self) -> None:
        pass
