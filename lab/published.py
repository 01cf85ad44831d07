"""Strategies as papers describe them, for requests to a real server: `python -m lab.published serve --debug-options …`.

It is the command `paceline` with these names added to those of `paceline.strategy`; both sides of a joint answer must
be started so. Their options, and those of the served strategies, are fields of `paceline.debug`.

diaa                 tables alone: the paper's scores, rows and update interval, and trees of one size
dragon               Algorithm 1: the cloud's token is picked with probability `gamma`; the decision may stay at a side
flowspec-naive, …    the other rows of FlowSpec's evaluation
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec

from lab.baselines.flowspec import WAYS
from lab.baselines.lookup import AS_PUBLISHED, FixedBudget, Scoring, VariedDrafter
from paceline.core.aggregation.aggregators import make_aggregator
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.side import Side
from paceline.strategies.aggregate.machine import Aggregate, aggregate
from paceline.strategies.base import Machine, MachineConfig, RoutingContext, Strategy, asked_options
from paceline.strategies.lookup_tree import LookupTree, lookup_tree
from paceline.strategies.pipeline import pipeline
from paceline.strategies.registry import register
from paceline.wire.messages import AggregateOptions, Options

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

# GELATO and what its evaluation compares with, as `paceline.debug` of `draft_verify`.
GELATO: Final[dict[str, Any]] = {
    "verifier": "truncated",
    "waits": True,
    "overlap": False,
    "least": 1,
    "second_guesses": False,
}
STATIC: Final[dict[str, Any]] = GELATO | {"fixed": True, "gate": False, "most": 5}  # likewise 7 and 9
DSSD: Final[dict[str, Any]] = STATIC | {"verifier": "rejection"}


class DiaaOptions(Options, frozen=True):
    """Options of DIAA, by default those of its figure 7."""

    depth_decay: Share = 0.8  # delta
    width_decay: Share = 0.7  # alpha
    threshold: Share = 5e-3  # tau
    interval: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1  # steps from one update of the tables to the next: N
    nodes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 64  # of each tree


class DragonOptions(AggregateOptions, frozen=True):
    """Options of DRAGON."""

    gamma: Share = 0.5  # probability that the cloud's token is picked where both sides have drawn one
    keep_at: Side | None = None  # the decision stays there; None: where the scheduler places it


def _diaa(config: MachineConfig) -> Machine:
    asked = config.options if isinstance(config.options, DiaaOptions) else DiaaOptions()
    table = LookupTable(config.output.vocab_size) if config.means.table is None else config.means.table
    scoring = Scoring(asked.depth_decay, asked.width_decay, asked.threshold)
    drafter = VariedDrafter(
        table,
        config.output.sampling,
        eos_ids=config.output.eos_ids,
        options=replace(AS_PUBLISHED, scoring=scoring, interval=asked.interval),
    )
    return LookupTree(config, drafter=drafter, budget=FixedBudget(asked.nodes))


def _dragon(config: MachineConfig) -> Machine:
    asked = config.options if isinstance(config.options, DragonOptions) else DragonOptions()
    aggregator = make_aggregator("paper", config.output.sampling, needs_dists=asked.needs_dists, gamma=asked.gamma)
    return Aggregate(config, keep_at=asked.keep_at, aggregator=aggregator)


def _choose(context: RoutingContext) -> DragonOptions:
    asked = asked_options(DragonOptions, context)
    return msgspec.structs.replace(asked, aggregator="paper", needs_dists=context.wish.logprobs)


PUBLISHED: Final[tuple[Strategy, ...]] = (
    replace(lookup_tree, name="diaa", machine=_diaa, options=DiaaOptions, uses_draft_model=False),
    replace(aggregate, name="dragon", machine=_dragon, options=DragonOptions, messages=(), choose=_choose),
    *(
        replace(pipeline, name=f"flowspec-{way.lower().replace(' ', '-')}", machine=machine)
        for way, machine in WAYS.items()
        if way != "full"
    ),
)


def register_published() -> None:
    """Make them known to this process."""
    for strategy in PUBLISHED:
        register(strategy)


if __name__ == "__main__":
    from paceline.commands.main import main

    register_published()
    main()
