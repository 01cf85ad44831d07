"""Placement of the aggregator: a rule that decides anew at each rejection, after DRAGON's model of the time per token.

The side that aggregates is `here`, the other `there`. All times are seconds. Knows nothing of
clocks or messages: the caller supplies speeds, delays and acceptance (see `estimation.timing`).

The model is that of chains, whose holder keeps its drafts to itself. Where both sides send all they compute, as with
trees, either knows each target as soon as it has both distributions, whoever decides: both places take equally long,
and a move would only cost its delay. Such a placement is `fixed`.

The paper compares both places in the long run. But where the last target rejected the other side's draft, that side
must hear of it in any case, and can decide the next target as soon as it has drafted anew, if the aggregator comes with
the news; else its draft must first come back. So a move then saves a one-way delay, at any other time it costs one.

Not modelled, as in the paper: that a rejection of the holder's own drafts costs its queue even where the other side is
the bottleneck; bounds on drafting ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.core.estimation import AcceptanceRate, DecodeSpeed
from paceline.core.side import SIDES, Side, other

LEAST_SHARE = 0.15  # of the slower side's decode time, that a move must save: speeds and delays are not known better


def lasting_seconds(here: float, there: float, round_trip: float, acceptance_there: float) -> float:
    """Expected seconds per token of an aggregator that may follow a rejection to the other side: DRAGON's equation 7
    with the quicker of both ways on from a rejection, the round trip or the move."""
    rejected = min(max(here, there + round_trip), max(here, there) + round_trip / 2.0)
    return acceptance_there * max(here, there) + (1.0 - acceptance_there) * rejected


@dataclass(slots=True)
class DeciderPlacement:
    """The choice of the aggregating side, made by the holder after each burst of targets.

    Both sides see every target and may keep one each; only the holder's decides. `fixed`: never moves from there. Never
    moves while a speed or the round trip is unknown.
    """

    holder: Side
    fixed: Side | None = None
    acceptance: dict[Side, AcceptanceRate] = field(default_factory=lambda: {side: AcceptanceRate() for side in SIDES})
    _decode: dict[Side, float] = field(default_factory=dict)
    _round_trip: float | None = None
    _last: Mapping[Side, bool] = field(default_factory=dict)  # what the last target accepted, where it is known

    def __post_init__(self) -> None:
        if self.fixed is not None:
            self.holder = self.fixed

    def observe_speed(self, side: Side, speed: DecodeSpeed, rows: int = 1) -> None:
        """Set the time of one of the side's drafting steps, of `rows` rows."""
        self._decode[side] = speed.forward(rows)

    def observe_round_trip(self, seconds: float) -> None:
        self._round_trip = seconds

    def observe_target(self, accepted: Mapping[Side, bool]) -> None:
        """Record one target; True for a side whose drafting continued without a round trip."""
        self._last = accepted
        for side, was_accepted in accepted.items():
            self.acceptance[side].add(was_accepted)

    def choose(self, left: int, *, ready: bool) -> Side:
        """The side that should decide the next target. Changes no state: call `moved` on a move.

        left: targets still to be decided. ready: the holder's next draft is there.
        """
        here, there, trip = self.holder, other(self.holder), self._round_trip
        if self.fixed is not None or trip is None or len(self._decode) < len(SIDES) or self._last.get(there, True):
            return here
        if self._decode[here] >= trip + self._decode[there]:
            return here  # its own drafting hides the round trip
        own = 0.0 if ready else self._decode[here]
        staying = max(own, trip + self._decode[there])
        moving = trip / 2.0 + max(own, self._decode[there])
        before_next = min(1.0 / (1.0 - min(self.acceptance[here].value, 0.99)), left)  # targets until it may come back
        lasting = self._lasting(there) - self._lasting(here)
        return there if staying - moving - lasting * before_next >= LEAST_SHARE * max(self._decode.values()) else here

    def moved(self, holder: Side) -> None:
        """Record that the aggregator is on `holder` from now on, for whatever reason."""
        self.holder = holder

    def _lasting(self, side: Side) -> float:
        assert self._round_trip is not None
        decode, rate = self._decode, self.acceptance[other(side)].value
        return lasting_seconds(decode[side], decode[other(side)], self._round_trip, rate)
