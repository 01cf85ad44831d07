"""Every strategy by name: what the command line, the API's enum, the docs and the conformance suite read."""

from __future__ import annotations

from paceline.strategies.aggregate import aggregate
from paceline.strategies.autoregressive import autoregressive
from paceline.strategies.lookup_tree import lookup_tree
from paceline.strategies.machine import Strategy

STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in (autoregressive, lookup_tree, aggregate)}
