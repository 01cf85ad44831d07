"""Request bodies of `/v1/completions`, and their conversion to requests of generations.

A prompt is continued without a chat template and without documents, by one side alone. `suffix` is refused: it needs a
model that was trained to fill in. Source: openai-openapi 2.3.0, CreateCompletionRequest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from paceline.api.generation.inputs import Input, Inputs, read_inputs
from paceline.api.generation.request import check_relations, choices_of, form_of, generation_of
from paceline.api.generation.schema import SamplingFields
from paceline.api.generation.unsupported import refuse_forms
from paceline.api.http.auth import Identity
from paceline.api.http.validation import parse
from paceline.api.models import chat_model
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import GenerateRequest, Service

MAX_PROMPTS = 128
MAX_CHOICES = 128  # prompts times n
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields):
    model: str
    prompt: Inputs = ""
    max_tokens: Annotated[int, Field(ge=0)] = DEFAULT_MAX_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One HTTP call. Choices are numbered by prompt: `n` of the first, then `n` of the second."""

    model: ModelInfo
    name: str  # of the model, as the request has it, and echoed
    stream: bool
    include_usage: bool
    running_usage: bool  # every event has the usage so far
    report: bool
    echo: bool
    logprobs: int | None  # number of alternatives per token; None: no log-probabilities
    n: int
    prompts: tuple[Input, ...]
    write: bool  # False: `max_tokens` is 0
    request: GenerateRequest  # common to all choices; the prompt is still to be filled in

    def requests(self, prompts: Sequence[tuple[int, ...]]) -> list[GenerateRequest]:
        """One request per choice. With a seed, a prompt has the same answers alone and among others; without one,
        all answers differ."""
        if self.request.seeded:
            choices = choices_of(self.request, self.n) * len(prompts)
        else:
            choices = choices_of(self.request, self.n * len(prompts))
        return [replace(one, prompt=prompts[index // self.n]) for index, one in enumerate(choices)]


def completion_call(body: Mapping[str, object], service: Service, identity: Identity) -> CompletionCall:
    """Raises RequestError: 400 that names the field, 404 for an unknown model."""
    prompt = body.get("prompt")
    refuse_forms(body, served=("echo",))
    prompts = read_inputs("" if prompt is None else prompt, "prompt", max_inputs=MAX_PROMPTS)
    asked = parse(CompletionRequest, body)
    model = chat_model(service, asked.model)
    check_relations(asked)
    if body.get("suffix"):
        raise RequestError(
            "Nothing can be written in front of a suffix here: the model only continues.",
            code="unsupported_parameter",
            param="suffix",
        )
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
    if len(prompts) * asked.n > MAX_CHOICES:
        raise RequestError(f"{len(prompts)} prompts times n is more than {MAX_CHOICES} answers.", param="n")
    limit = max(asked.max_tokens, 1)
    request = generation_of(asked, model, service, identity, documents=0, limit=limit, form=form_of(asked))
    return CompletionCall(
        model=model,
        name=asked.model,
        stream=asked.stream,
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        running_usage=asked.stream_options is not None and asked.stream_options.is_running,
        report=asked.paceline.report,
        echo=asked.echo,
        logprobs=asked.logprobs,
        n=asked.n,
        prompts=prompts,
        write=asked.max_tokens > 0,
        request=replace(request, documents=0, top_logprobs=asked.logprobs),
    )
