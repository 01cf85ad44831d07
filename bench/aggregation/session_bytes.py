"""Bytes of whole answers on the link, both directions, over a vocabulary of 151,936 ids, in virtual time.

The machines that are served, with their default trees, on the codec that is served. Counted are all messages of the
session but its opening, which holds the conversation. Their times show what the bytes buy.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from lab.configs import a_config, changed
from lab.simulation import Network, SimulatedRequest, Simulation
from lab.simulation.host import StepCost
from paceline.core.aggregation.aggregators import AggregatorName
from paceline.core.drafting.budget import OnlineStats
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import SIDES, Side
from paceline.strategies.base import Branch
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import AggregateOptions, OpenSession

from ..bootstrap import Estimate, median_of
from .wide_engine import VOCAB, WideEngine

QUESTION = b"user: What is there to know of the harbour library of Tarnwick?\nassistant: "
BRANCHES: Mapping[str, tuple[Branch, ...]] = {
    "cloud": (Branch(tuple(b"The harbour library of Tarnwick was built in 1820.\n" + QUESTION), 1.0),),
    "device": (Branch(tuple(b"I left my card in the harbour library.\n" + QUESTION), 1.0),),
}
SPREAD = 0.6
ROW_S = 0.0003  # s, each further row of a forward
PACES: Mapping[str, Mapping[Side, float]] = {
    "device 10x slower": {"cloud": 0.006, "device": 0.06},
    "equal": {"cloud": 0.03, "device": 0.03},
}
LEVELS = ("document-private", "open")


def rows(
    answers: int, tokens: int, round_trips: tuple[float, ...], aggregator: AggregatorName
) -> list[tuple[dict[str, object], Estimate]]:
    """A row for each pace, round trip and level, and the bytes an output token."""
    found: list[tuple[dict[str, object], Estimate]] = []
    for pace, forward in PACES.items():
        for trip in round_trips:
            for level in LEVELS:
                sizes, s_per_token = _measured(forward, trip, level, aggregator, answers, tokens)
                row = {"pace": pace, "rtt_s": trip, "way": f"session, {aggregator}, {level}", "bytes": sizes.value}
                found.append((row | {"interval_90": sizes.interval, "s_per_token": s_per_token}, sizes))
    return found


def _measured(
    forward: Mapping[Side, float], trip: float, level: str, aggregator: AggregatorName, answers: int, tokens: int
) -> tuple[Estimate, float]:
    """Medians of bytes and seconds over answers one after another, the first not counted: it calibrates both sides."""
    stats = {side: OnlineStats() for side in SIDES}
    sizes: list[float] = []
    times: list[float] = []
    for seed in range(answers + 1):
        world = _world(forward, trip, level, aggregator, tokens, seed, stats)
        front = world.run(checks=False)
        if seed:
            counted = [each for each in world.messages if not isinstance(each.message, OpenSession)]
            sizes.append(sum(each.num_bytes for each in counted) / len(front.tokens))
            times.append(world.now / len(front.tokens))
    return median_of(sizes), statistics.median(times)


def _world(
    forward: Mapping[Side, float],
    trip: float,
    level: str,
    aggregator: AggregatorName,
    tokens: int,
    seed: int,
    stats: Mapping[Side, OnlineStats],
) -> Simulation:
    config = a_config(
        "device",
        True,
        SamplingParams(seed=seed),
        tokens,
        frozenset(),
        VOCAB,
        AggregateOptions(aggregator=aggregator),
        private=level != "open",
        needs_dists=False,
    )
    request = SimulatedRequest(STRATEGIES["aggregate"], "device", config, BRANCHES)
    world = Simulation(
        request,
        {side: WideEngine(seed=1, spread=SPREAD) for side in SIDES},
        seed=seed,
        network=Network((trip / 2.0, trip / 2.0)),
        forward={side: StepCost(forward[side], ROW_S) for side in SIDES},
    )
    for side in SIDES:  # each keeps what it has measured
        session = world.session(side)
        session.request = replace(request, config=changed(config, stats=stats[side]))
    return world
