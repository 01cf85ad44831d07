"""`POST /v1/completions`: continues raw prompts, as editors and evaluations use it.

With `echo` and `logprobs` the prompt is scored before the answer is generated; with `max_tokens` 0 it is only scored.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.completions.output import CompletionBody, CompletionChunks, CompletionMeta, EchoedPrompt
from paceline.api.completions.request import CompletionCall, CompletionRequest, completion_call
from paceline.api.generation.fan_in import close_all, prepare_all
from paceline.api.generation.inputs import Input
from paceline.api.generation.late import LateGeneration, must_load
from paceline.api.generation.streaming import JsonAnswer, StreamedAnswer
from paceline.api.http.body import read_body, while_connected
from paceline.api.http.strict_json import decode_object
from paceline.api.routes import Route
from paceline.runtime.service import (
    GenerateEvent,
    GenerateRequest,
    Generation,
    GenerationResult,
    Logprobs,
    Service,
)

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


class CompletionsEndpoint:
    """The route and the service it uses. Holds no state of a request."""

    def __init__(self, service: Service, *, keep_alive: float) -> None:
        self._service = service
        self._keep_alive = keep_alive

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="POST",
                path="/v1/completions",
                endpoint=self.__call__,
                summary="Continue one or several texts.",
                scope="completions",
                request=CompletionRequest,
                response="Completion",
                stream=CompletionEvent,
                refusals=(404,),
            ),
        )

    async def __call__(self, request: Request) -> Response:
        await self._service.wait_for_room(request.state.identity.key)
        body = decode_object(await read_body(request.receive, request.headers.get("content-length")))
        call = completion_call(body, self._service, request.state.identity)
        request.state.model = call.model.name  # for the log
        meta, generations = await while_connected(request.receive, self._begin(call))
        if not call.stream:
            return JsonAnswer(generations, CompletionBody(meta), self._keep_alive)
        return StreamedAnswer(generations, CompletionChunks(meta), self._keep_alive, meta.id)

    async def _begin(self, call: CompletionCall) -> tuple[CompletionMeta, Sequence[Generation]]:
        """Admit the answers, then score the prompts: nothing is computed for a request that will be refused."""
        if call.write and not call.echo and must_load(self._service, call.model.name):
            await self._service.wait_for_room(call.request.owner)
            return await self._meta(call, ()), self._late(call)
        prompts = [await self._tokens(prompt, call.model.name) for prompt in call.prompts]
        for prompt in prompts if call.echo else ():
            await self._service.check(replace(call.request, prompt=prompt), room=int(call.write))
        if not call.write:
            empty = [_EmptyGeneration(len(prompt)) for prompt in prompts for _ in range(call.n)]
            return await self._meta(call, prompts), empty
        generations = await prepare_all(self._service, call.requests(prompts))
        try:
            return await self._meta(call, prompts), generations
        except BaseException:  # also a cancellation: the client may leave while its prompts are scored
            await close_all(generations)
            raise

    def _late(self, call: CompletionCall) -> list[Generation]:
        """The answers of a model that has to be loaded first."""

        async def prepare(asked: GenerateRequest, prompt: Input) -> Generation:
            return await self._service.prepare(replace(asked, prompt=await self._tokens(prompt, asked.model)))

        unread = call.requests([()] * len(call.prompts))
        return [
            LateGeneration(partial(prepare, asked, call.prompts[index // call.n])) for index, asked in enumerate(unread)
        ]

    async def _meta(self, call: CompletionCall, prompts: Sequence[Tokens]) -> CompletionMeta:
        return CompletionMeta(
            id=f"cmpl-{secrets.token_hex(12)}",
            created=int(time.time()),
            fingerprint=f"fp_{call.model.fingerprint[:12]}",
            call=call,
            echoes=await self._echoes(call, prompts) if call.echo else (),
            prompt_tokens=sum(map(len, prompts)),
        )

    async def _tokens(self, prompt: Input, model: str) -> Tokens:
        return await self._service.tokenize(prompt, model) if isinstance(prompt, str) else prompt

    async def _echoes(self, call: CompletionCall, prompts: Sequence[Tokens]) -> tuple[EchoedPrompt, ...]:
        """The prompts to echo. Equal prompts are scored once."""
        scored: dict[Tokens, tuple[Logprobs, ...] | None] = {}
        for prompt in prompts:
            if call.logprobs is not None and prompt not in scored:
                scored[prompt] = tuple(await self._service.score(prompt, call.logprobs, call.model.name))
        return tuple(
            [
                EchoedPrompt.of(
                    asked if isinstance(asked, str) else None,
                    await self._service.token_bytes(prompt, call.model.name),
                    scored.get(prompt),
                )
                for asked, prompt in zip(call.prompts, prompts, strict=True)
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
