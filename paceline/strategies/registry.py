"""Strategies by name, as read by routing, peers, the list of names that the API accepts, and the conformance tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from paceline.errors import RequestError
from paceline.strategies.aggregate.machine import aggregate
from paceline.strategies.base import Strategy
from paceline.strategies.draft_verify.machine import draft_verify
from paceline.strategies.lookup_tree import lookup_tree
from paceline.strategies.pipeline import pipeline
from paceline.strategies.solo import autoregressive
from paceline.wire import codec

STRATEGIES: dict[str, Strategy] = {}


def register(strategy: Strategy) -> None:
    """Make a strategy known, before links are up. Raises ValueError for a name or a message tag that is taken."""
    if strategy.name in STRATEGIES:
        raise ValueError(f"there is a strategy {strategy.name!r} already")
    codec.register(*strategy.messages)
    STRATEGIES[strategy.name] = strategy


def unregister(name: str) -> None:
    """Undo `register`, for a strategy whose messages no other one uses."""
    codec.unregister(*STRATEGIES.pop(name).messages)


_NOT_DEBUG: Final = {"needs_dists", "writer", "search_every", "joules_per_token", "joules_per_step"}  # said elsewhere


def debug_options(given: Mapping[str, object]) -> dict[str, object]:
    """Options that a request names by their fields, whichever strategy reads them, as {"verifier": "truncated"} does.
    Raises RequestError for an unknown field or a value that it cannot have."""
    known = {
        field.encode_name: field.type
        for strategy in STRATEGIES.values()
        for field in msgspec.structs.fields(strategy.options)
        if field.name not in _NOT_DEBUG
    }
    found: dict[str, object] = {}
    for name, value in given.items():
        param = f"paceline.debug.{name[:64]}"
        if name not in known:
            raise RequestError(f"{param} is not known; known: {', '.join(sorted(known))}.", param=param)
        try:
            found[name] = msgspec.convert(value, known[name])
        except msgspec.ValidationError as error:
            raise RequestError(f"{param}: {error}.", param=param) from None
    return found


for _strategy in (autoregressive, lookup_tree, aggregate, draft_verify, pipeline):
    register(_strategy)
