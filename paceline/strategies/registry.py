"""Every strategy by name: what the command line, the API's enum, the docs and the conformance suite read."""

from __future__ import annotations

from paceline.strategies.aggregate.machine import aggregate
from paceline.strategies.autoregressive import autoregressive
from paceline.strategies.base import Strategy
from paceline.strategies.lookup_tree import lookup_tree

STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in (autoregressive, lookup_tree, aggregate)}
