"""Conversion of the common request fields to a `GenerateRequest`: defaults filled in, one seed per choice.

Knows what the service can do (models, strategies, vocabulary), starts nothing.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from paceline.api.generation.schema import SamplingFields
from paceline.api.http.auth import Identity
from paceline.api.observation.request_id import request_id
from paceline.core.sampling.sampler import SamplingDefaults, SamplingParams, usable_temperature
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import DRAFT_MODES, GenerateRequest, Service

_SEEDS = 2**64


def generation_of(
    asked: SamplingFields, model: ModelInfo, service: Service, identity: Identity, *, documents: int, limit: int | None
) -> GenerateRequest:
    """The request of one generation that the common fields describe; the caller adds its messages or prompt.

    `documents`: passages per side where the request sets none. `limit`: maximum of tokens; None: up to the context.
    """
    extension = asked.paceline
    return GenerateRequest(
        messages=(),
        sampling=sampling_of(asked, model),
        max_tokens=None if limit is None else min(limit, model.max_positions),
        stop=tuple(asked.stop),
        model=model.name,
        strategy=strategy_of(extension.strategy, service.strategies()),
        device=device_of(extension.device, service, identity),
        names_device=extension.device is not None,
        any_device=not identity.key,
        asker=identity.name,
        documents=documents if extension.documents is None else extension.documents,
        on_loss=extension.on_device_loss,
        privacy=extension.privacy,
        seeded=asked.seed is not None,
        options={
            "aggregator": extension.aggregator or "",
            "drafting": DRAFT_MODES[extension.drafts],
            "rescoring": extension.rescoring,
            "search_every": extension.search_every or 0,
            "verifier": extension.verifier,
        }
        | ({} if extension.energy is None else extension.energy.model_dump(exclude_none=True)),
        owner=identity.key,
        workflow=extension.workflow,
        steps=extension.steps,
        trace=request_id.get(),
    )


def sampling_of(asked: SamplingFields, model: ModelInfo) -> SamplingParams:
    """Sampling parameters of the request, then of this side's settings, then of the model's recommendation.

    Without a seed one is drawn.
    """
    wanted = SamplingDefaults(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=None if asked.top_k is None else max(asked.top_k, 0),  # front ends say -1 for no limit
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
    ).over(model.sampling)
    if wanted.temperature is not None:
        wanted = replace(wanted, temperature=usable_temperature(wanted.temperature))
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
    if name is not None and identity.device is None and not identity.may("devices"):
        raise RequestError(
            "This key may not name a device: it needs the scope 'devices', or to be bound to one.",
            status=403,
            code="device_not_allowed",
            param="paceline.device",
        )
    return identity.device or name


def choices_of(request: GenerateRequest, count: int) -> tuple[GenerateRequest, ...]:
    """Requests of `count` choices. Choice i has the first seed plus i, so that it can be requested again alone."""
    first = request.sampling
    return tuple(replace(request, sampling=replace(first, seed=seed_of(first.seed, index))) for index in range(count))


def seed_of(seed: int | None, offset: int) -> int:
    drawn = secrets.randbits(63) if seed is None else seed
    return (drawn + offset + 2**63) % _SEEDS - 2**63  # wraps like an int64
