"""From a body to the generations it asks for: validated, defaults filled in, one seed per choice.

Knows what the service can do (models, strategies, vocabulary), starts nothing.
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from pydantic import ValidationError

from paceline.api.chat.messages import conversation
from paceline.api.chat.tools import ToolUse, format_constraint, format_told, tool_use
from paceline.api.generation.schema import ChatRequest, SamplingFields, Schema
from paceline.api.generation.unsupported import refuse_unsupported
from paceline.api.http.auth import Identity
from paceline.api.names import chat_model
from paceline.core.sampling.sampler import SamplingDefaults, SamplingParams
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import GenerateRequest, Service

_SEEDS = 2**64
# The branches of a union, which are no part of a field's path.
_BRANCH = re.compile(r"<.*|str|bool|int|float|constrained-str|list\[.*\]")

S = TypeVar("S", bound=Schema)


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One HTTP call: what its answer looks like, and the generations it is made of."""

    model: str  # as asked for, and echoed
    stream: bool
    include_usage: bool
    report: bool
    vector_stores: tuple[str, ...] | None  # what this side reads in place of its own documents
    tools: ToolUse | None  # that may be called
    service_tier: bool  # whether one was asked for
    generations: tuple[GenerateRequest, ...]  # one per choice


def chat_call(body: Mapping[str, object], service: Service, identity: Identity, *, documents: int) -> ChatCall:
    """Raises RequestError: 400 that names the field, 403 for a device of another key, 404 for an unknown model."""
    asked = parse_chat(body)
    model = chat_model(service, asked.model)
    check_relations(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    tools = tool_use(asked)
    wanted = format_constraint(asked)
    told = [text for text in (tools and tools.told(), format_told(asked, tools)) if text]
    generation = replace(
        generation_of(asked, model, service, identity, documents=documents, limit=limit),
        messages=conversation(asked.messages, told),
        top_logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        constraint=wanted if tools is None else tools.constraint(wanted),
    )
    return ChatCall(
        model=asked.model,
        stream=asked.stream,
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        report=asked.paceline.report,
        vector_stores=None if asked.paceline.vector_stores is None else tuple(asked.paceline.vector_stores),
        tools=tools,
        service_tier=asked.service_tier is not None,
        generations=choices_of(generation, asked.n),
    )


def parse_chat(body: Mapping[str, object]) -> ChatRequest:
    refuse_unsupported(body)
    return parse(ChatRequest, body)


def parse(schema: type[S], body: Mapping[str, object]) -> S:
    """Raises RequestError (400) for the first fault, with the path of the field."""
    try:
        return schema.model_validate(dict(body))
    except ValidationError as error:
        raise _refusal(error) from None


def generation_of(
    asked: SamplingFields, model: ModelInfo, service: Service, identity: Identity, *, documents: int, limit: int | None
) -> GenerateRequest:
    """What every endpoint's fields say of a generation; what it continues is the caller's to add.

    `documents`: passages per side unless the request says. `limit`: tokens at most, None up to the context.
    """
    extension = asked.paceline
    return GenerateRequest(
        messages=(),
        sampling=sampling_of(asked, model),
        max_tokens=None if limit is None else min(limit, model.max_positions),
        stop=tuple(asked.stop),
        strategy=strategy_of(extension.strategy, service.strategies()),
        device=device_of(extension.device, service, identity),
        documents=documents if extension.documents is None else extension.documents,
        on_loss=extension.on_device_loss,
        privacy=extension.privacy,
        seeded=asked.seed is not None,
        aggregator=extension.aggregator,
        drafts=extension.drafts,
        rescoring=extension.rescoring,
        owner=identity.key,
    )


def sampling_of(asked: SamplingFields, model: ModelInfo) -> SamplingParams:
    """What the request says, then what this side is set to, then what the model recommends. Without a seed one is
    drawn."""
    wanted = SamplingDefaults(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=None if asked.top_k is None else max(asked.top_k, 0),  # front ends say -1 for no limit
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
    ).over(model.sampling)
    return replace(
        SamplingParams(
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=biases_of(asked.logit_bias, model.vocab_size),
            seed=seed_of(asked.seed, 0),
        ),
        **{name: value for name, value in asdict(wanted).items() if value is not None},
    )


def check_relations(asked: SamplingFields) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")


def biases_of(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, bias in biases.items():
        token = int(key[:12]) if key.isascii() and key.isdigit() else -1
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias has the key {key[:32]!r}; keys are token ids from 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
        result[token] = bias
    return result


def strategy_of(name: str | None, known: Sequence[str]) -> str:
    choices = list(dict.fromkeys(["auto", *known]))
    if name is None or name in choices:
        return name or "auto"
    near = difflib.get_close_matches(name[:64], choices, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise RequestError(f"Unknown strategy {name[:64]!r}; known: {', '.join(choices)}.{hint}", param="paceline.strategy")


def device_of(name: str | None, service: Service, identity: Identity) -> str | None:
    if service.side == "device":
        if name is not None:
            raise RequestError("A device is named at the server; this is the device itself.", param="paceline.device")
        return None
    if identity.device is not None and name not in (None, identity.device):
        raise RequestError(
            "This key is bound to another device.", status=403, code="device_not_allowed", param="paceline.device"
        )
    return identity.device or name


def choices_of(generation: GenerateRequest, count: int) -> tuple[GenerateRequest, ...]:
    """Choice i has the seed of the first plus i, so that one choice can be asked for again alone."""
    first = generation.sampling
    return tuple(
        replace(generation, sampling=replace(first, seed=seed_of(first.seed, index))) for index in range(count)
    )


def seed_of(seed: int | None, offset: int) -> int:
    drawn = secrets.randbits(63) if seed is None else seed
    return (drawn + offset + 2**63) % _SEEDS - 2**63  # wraps like the int64 it is


def _refusal(error: ValidationError) -> RequestError:
    """The first fault as a sentence, with the path of the field."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ""
    for step in fault["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif not _BRANCH.fullmatch(step):
            param += f".{step}" if param else step
    if fault["type"] == "missing":
        message = f"The field {param} is required."
    elif fault["type"] == "extra_forbidden":
        message = f"Unknown field {param[:128]}."
    else:
        message = f"{param[:128]} cannot be used: {fault['msg'][:1].lower()}{fault['msg'][1:]}."
    return RequestError(message, param=param[:128] or None)
