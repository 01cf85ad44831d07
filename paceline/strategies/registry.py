"""Strategies by name, as read by routing, peers, the list of names that the API accepts, and the conformance tests."""

from __future__ import annotations

from paceline.strategies.aggregate.machine import aggregate
from paceline.strategies.autoregressive import autoregressive
from paceline.strategies.draft_verify.machine import draft_verify
from paceline.strategies.lookup_tree import lookup_tree
from paceline.strategies.pipeline.machine import pipeline
from paceline.strategies.strategy import Strategy
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


for _strategy in (autoregressive, lookup_tree, aggregate, draft_verify, pipeline):
    register(_strategy)
