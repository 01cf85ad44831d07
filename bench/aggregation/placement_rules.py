"""Placement rules of the aggregator, by name: the baselines, the paper's greedy rule, and the program's own.

The paper's rule knows the link's true delay and every decode time, as in its authors' simulator. The program's rule
knows only what each side can measure, and does not move for a small gain. Both decide with
`DeciderPlacement`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from lab.baselines.dragon import expected_token_time
from paceline.core.clock import DecodeSpeed, MovingAverage, Ratio, StepClock
from paceline.core.side import SIDES, Side, other
from paceline.strategies.aggregate.state import FIRST_ACCEPTANCE, DeciderPlacement

from .link_replay import Link, Rule, Trace

START: Final[Side] = "device"  # initial place of the aggregator under the rules that may move it


class Static:
    """Never move the aggregator. Base class of the other rules; ignores all observations."""

    def __init__(self, start: Side) -> None:
        self.start: Side = start

    def decoded(self, side: Side, step: int, seconds: float) -> DecodeSpeed:  # noqa: ARG002  # unused by this rule
        return DecodeSpeed(seconds)

    def received(self, side: Side, speed: DecodeSpeed, delay: float) -> None: ...

    def decided(self, side: Side, accepted: Mapping[Side, bool]) -> None: ...

    def choose(self, side: Side, targets: int, now: float, *, ready: bool) -> Side:  # noqa: ARG002  # unused by this rule
        return side

    def moved(self, side: Side, holder: Side, targets: int) -> None: ...


class Always(Static):
    """Move to the other side after every burst."""

    def choose(self, side: Side, targets: int, now: float, *, ready: bool) -> Side:  # noqa: ARG002  # unused by this rule
        return other(side)


class Random(Static):
    """Move to a side at random after every burst."""

    def __init__(self, start: Side, rng: np.random.Generator) -> None:
        super().__init__(start)
        self._rng = rng

    def choose(self, side: Side, targets: int, now: float, *, ready: bool) -> Side:  # noqa: ARG002  # unused by this rule
        return SIDES[int(self._rng.integers(2))]


class Greedy(Static):
    """The paper's rule: move as soon as Delta Z > 0, with the mean acceptance of all targets so far."""

    def __init__(self, start: Side, trace: Trace, link: Link) -> None:
        super().__init__(start)
        self._trace, self._link = trace, link
        acceptance = {side: Ratio(FIRST_ACCEPTANCE) for side in SIDES}
        self._placement = DeciderPlacement(start, acceptance=acceptance)

    def decided(self, side: Side, accepted: Mapping[Side, bool]) -> None:
        if side == self._placement.holder:
            self._placement.observe_target(accepted)

    def choose(self, side: Side, targets: int, now: float, *, ready: bool) -> Side:  # noqa: ARG002  # the placement has it
        decode = {each: self._trace.decode[each][targets] for each in SIDES}
        acceptance = {each: rate.value for each, rate in self._placement.acceptance.items()}
        expected = expected_token_time(decode, 2.0 * self._link.expected(now), acceptance)
        holder = self._placement.holder
        return other(holder) if expected.gain(holder) > 0.0 else holder

    def moved(self, side: Side, holder: Side, targets: int) -> None:  # noqa: ARG002  # both sides call it
        self._placement.holder = holder


class Shipped(Static):
    """The program's rule: each side has its own placement, fed with its measurements and with the peer's drafts."""

    def __init__(self, start: Side, tokens: int) -> None:
        super().__init__(start)
        self._profiles = {side: StepClock() for side in SIDES}
        self._delays = {side: MovingAverage() for side in SIDES}
        self._placements = {side: DeciderPlacement(start) for side in SIDES}
        self._tokens = tokens

    def decoded(self, side: Side, step: int, seconds: float) -> DecodeSpeed:  # noqa: ARG002  # unused by this rule
        self._profiles[side].add(1, seconds)
        speed = self._profiles[side].speed()
        self._placements[side].decode[side] = speed.decode_s
        return speed

    def received(self, side: Side, speed: DecodeSpeed, delay: float) -> None:
        """Use one direction's delay for both: only the sum is used."""
        self._delays[side].add(2.0 * delay)
        self._placements[side].decode[other(side)] = speed.decode_s
        self._placements[side].round_trip = self._delays[side].value or 0.0

    def decided(self, side: Side, accepted: Mapping[Side, bool]) -> None:
        self._placements[side].observe_target(accepted)

    def choose(self, side: Side, targets: int, now: float, *, ready: bool) -> Side:  # noqa: ARG002  # the rule uses no clock
        return self._placements[side].choose(self._tokens - targets, ready=ready)

    def moved(self, side: Side, holder: Side, targets: int) -> None:  # noqa: ARG002  # the rule counts none
        self._placements[side].holder = holder


RULES: Final[Mapping[str, Callable[[Trace, Link, np.random.Generator], Rule]]] = {
    "cloud": lambda trace, link, rng: Static("cloud"),  # noqa: ARG005  # common signature
    "device": lambda trace, link, rng: Static("device"),  # noqa: ARG005
    "always": lambda trace, link, rng: Always(START),  # noqa: ARG005
    "random": lambda trace, link, rng: Random(START, rng),  # noqa: ARG005
    "dragon": lambda trace, link, rng: Greedy(START, trace, link),  # noqa: ARG005
    "paceline": lambda trace, link, rng: Shipped(START, trace.tokens),  # noqa: ARG005
}
