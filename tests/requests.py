"""Requests of answers by the names of their fields, whichever part has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from paceline.core.sampling.sampler import SamplingParams
from paceline.runtime.service import Account, AskedPrompt, GenerateRequest, Joining, OutputForm, Sources
from paceline.strategies.base import RoutingContext, Wish

PARTS = {
    "prompt": AskedPrompt,
    "wish": Wish,
    "output": OutputForm,
    "sources": Sources,
    "joining": Joining,
    "account": Account,
}
PART_OF = {field.name: part for part, kind in PARTS.items() for field in fields(kind)}
SAMPLING = SamplingParams()


def a_request(
    messages: tuple[Mapping[str, str], ...] = (),
    sampling: SamplingParams = SAMPLING,
    max_tokens: int | None = None,
    **changes: Any,
) -> GenerateRequest:
    """tokens: a raw prompt. The rest by the fields of the parts."""
    changes |= {"messages": messages, "sampling": sampling, "max_tokens": max_tokens}
    return changed(GenerateRequest(AskedPrompt()), **changes)


def changed(request: GenerateRequest, **changes: Any) -> GenerateRequest:
    """The request with these fields, named as in `a_request`."""
    for name, value in changes.items():
        if name == "model":
            request = replace(request, model=value)
            continue
        part = PART_OF[name]
        request = replace(request, **{part: replace(getattr(request, part), **{name: value})})
    return request


FACTS = {
    **{field.name: ("wish", field.name) for field in fields(Wish)},
    **{name: ("own", name.removeprefix("own_")) for name in ("own_documents", "num_weights", "drafts", "costs")},
    "peer_documents": ("peer", "documents"),
    "peer_costs": ("peer", "costs"),
    "peer_weights": ("peer", "num_weights"),
}


def routed(context: RoutingContext, **changes: Any) -> RoutingContext:
    """The context with these facts, whichever part has them; those of the peer begin with `peer_`."""
    for name, value in changes.items():
        if name not in FACTS:
            context = replace(context, **{name: value})
            continue
        part, field = FACTS[name]
        context = replace(context, **{part: replace(getattr(context, part), **{field: value})})
    return context
