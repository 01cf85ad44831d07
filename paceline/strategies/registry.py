"""Strategies by name, as read by routing, peers, the list of names that the API accepts, and the conformance tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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


_NOT_DEBUG: Final = {
    "needs_dists",
    "writer",
    "reading",
    "search_every",
    "joules_per_token",
    "joules_per_step",
}  # said elsewhere


def debug_options(given: Mapping[str, object], asked: str) -> dict[str, object]:
    """Options that a request names by their fields, as {"verifier": "truncated"} does: of the strategy that it asks
    for, or, with "auto", of whichever reads them. Raises RequestError for an unknown field or a value that it cannot
    have."""
    strategies = [STRATEGIES[asked]] if asked in STRATEGIES else STRATEGIES.values()
    known: dict[str, Any] = {}
    for strategy in strategies:
        known |= _fields(strategy.options)
    return _converted(given, {name: kind for name, kind in known.items() if name not in _NOT_DEBUG}, "paceline.debug")


def _fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _converted(given: Mapping[str, object], known: Mapping[str, Any], within: str) -> dict[str, Any]:
    """The fields by their types. Parts that are arrays on the link are objects here."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        param = f"{within}.{name[:64]}"
        if name not in known:
            raise RequestError(f"{param} is not known; known: {', '.join(sorted(known))}.", param=param)
        kind = known[name]
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            found[name] = kind(**_converted(value, _fields(kind), param))
            continue
        try:
            found[name] = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise RequestError(f"{param}: {error}.", param=param) from None
    return found


for _strategy in (autoregressive, lookup_tree, aggregate, draft_verify, pipeline):
    register(_strategy)
