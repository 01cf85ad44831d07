"""Rules for the aggregator's place, by name: the baselines, the paper's greedy rule, and the one that ships.

The paper's rule knows the link's true delay and every decode time, as its authors' simulator lets it. The shipped one
knows what each side can measure, and keeps still where little is to be gained. Both decide with
core.aggregation.placement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from paceline.core.aggregation.placement import Placement
from paceline.core.estimation.running import MovingAverage
from paceline.core.estimation.timing import AcceptanceRate, DecodeSpeed, TimingModel
from paceline.core.side import SIDES, Side, other

from .link_replay import Link, Rule, Trace

START: Final[Side] = "device"  # where a rule that may move it has the aggregator at first


class Static:
    """The aggregator stays where it is. Base of the others: it learns nothing."""

    def __init__(self, start: Side) -> None:
        self.start: Side = start

    def decoded(self, side: Side, step: int, seconds: float) -> DecodeSpeed:  # noqa: ARG002  # not of interest to it
        return DecodeSpeed(seconds)

    def received(self, side: Side, pace: DecodeSpeed, delay: float) -> None: ...

    def decided(self, side: Side, accepted: Mapping[Side, bool]) -> None: ...

    def choose(self, side: Side, targets: int, now: float) -> Side:  # noqa: ARG002  # not of interest to it
        return side

    def moved(self, side: Side, holder: Side, targets: int) -> None: ...


class Always(Static):
    """To the other side after every burst."""

    def choose(self, side: Side, targets: int, now: float) -> Side:  # noqa: ARG002  # not of interest to it
        return other(side)


class Random(Static):
    """To either side, a coin after every burst."""

    def __init__(self, start: Side, rng: np.random.Generator) -> None:
        super().__init__(start)
        self._rng = rng

    def choose(self, side: Side, targets: int, now: float) -> Side:  # noqa: ARG002  # not of interest to it
        return SIDES[int(self._rng.integers(2))]


class Greedy(Static):
    """The paper's: to the other side as soon as Delta Z > 0, acceptance being the mean of all targets so far."""

    def __init__(self, start: Side, trace: Trace, link: Link) -> None:
        super().__init__(start)
        self._trace, self._link = trace, link
        acceptance = {side: AcceptanceRate(memory=1.0, strength=0.0) for side in SIDES}
        self._placement = Placement(start, margin=0.0, min_dwell=0, acceptance=acceptance)

    def decided(self, side: Side, accepted: Mapping[Side, bool]) -> None:
        if side == self._placement.holder:
            self._placement.observe_target(accepted)

    def choose(self, side: Side, targets: int, now: float) -> Side:  # noqa: ARG002  # the placement knows it
        for each in SIDES:
            self._placement.observe_speed(each, DecodeSpeed(self._trace.decode[each][targets]))
        self._placement.observe_round_trip(2.0 * self._link.expected(now))
        return self._placement.choose(targets)

    def moved(self, side: Side, holder: Side, targets: int) -> None:  # noqa: ARG002  # said twice: by both sides
        self._placement.moved(holder, targets)


class Shipped(Static):
    """Each side has its own placement, fed with what it measures and what the other's drafts tell."""

    def __init__(self, start: Side) -> None:
        super().__init__(start)
        self._profiles = {side: TimingModel() for side in SIDES}
        self._delays = {side: MovingAverage() for side in SIDES}
        self._placements = {side: Placement(start) for side in SIDES}

    def decoded(self, side: Side, step: int, seconds: float) -> DecodeSpeed:
        self._profiles[side].add(step, 1, seconds)
        pace = self._profiles[side].speed(step)
        self._placements[side].observe_speed(side, pace)
        return pace

    def received(self, side: Side, pace: DecodeSpeed, delay: float) -> None:
        """A delay counts for both directions: only their sum is used."""
        self._delays[side].add(2.0 * delay)
        self._placements[side].observe_speed(other(side), pace)
        self._placements[side].observe_round_trip(self._delays[side].value or 0.0)

    def decided(self, side: Side, accepted: Mapping[Side, bool]) -> None:
        self._placements[side].observe_target(accepted)

    def choose(self, side: Side, targets: int, now: float) -> Side:  # noqa: ARG002  # nothing reads clocks
        return self._placements[side].choose(targets)

    def moved(self, side: Side, holder: Side, targets: int) -> None:
        self._placements[side].moved(holder, targets)


RULES: Final[Mapping[str, Callable[[Trace, Link, np.random.Generator], Rule]]] = {
    "cloud": lambda trace, link, rng: Static("cloud"),  # noqa: ARG005  # one shape for all
    "device": lambda trace, link, rng: Static("device"),  # noqa: ARG005
    "always": lambda trace, link, rng: Always(START),  # noqa: ARG005
    "random": lambda trace, link, rng: Random(START, rng),  # noqa: ARG005
    "dragon": lambda trace, link, rng: Greedy(START, trace, link),  # noqa: ARG005
    "paceline": lambda trace, link, rng: Shipped(START),  # noqa: ARG005
}
