"""Placement of the aggregator: DRAGON's model of the time per token, and a rule that decides anew at each rejection.

The paper's `l` is the side that aggregates (`here`), `r` the other (`there`). All times are seconds. Knows nothing of
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


def remaining(total: float, began: float, now: float) -> float:
    """phi: seconds left at `now` of a task of `total` seconds that began at `began`."""
    return max(0.0, total + began - now)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Times of one step, seen from the aggregator's side. Delays are one-way: `delay_here` from here to there."""

    decode_here: float
    decode_there: float
    delay_here: float
    delay_there: float

    @property
    def round_trip(self) -> float:
        return self.delay_here + self.delay_there

    def swapped(self) -> Speeds:
        return Speeds(self.decode_there, self.decode_here, self.delay_there, self.delay_here)


@dataclass(frozen=True, slots=True)
class DraftStart:
    """Start times of the next drafts' decoding, for `waiting`; before `now` if it was not interrupted."""

    here: float
    there: float
    now: float


def waiting(speeds: Speeds, draft_start: DraftStart, accepted_here: bool, accepted_there: bool) -> float:
    """Seconds until both drafts of the next step are at the holder (Table 1).

    A rejected side restarts: the holder at once, the other when it has received the target.
    """
    own = remaining(speeds.decode_here, draft_start.here, draft_start.now) if accepted_here else speeds.decode_here
    incoming = speeds.decode_there + speeds.delay_there
    theirs = remaining(incoming, draft_start.there, draft_start.now) if accepted_there else speeds.delay_here + incoming
    return max(own, theirs)


def token_seconds(here: float, there: float, round_trip: float, acceptance_there: float) -> float:
    """Z of the side whose decode time is `here`: expected seconds per token while it aggregates.

    Equation 7 with its last term read as c_trans^l + c_trans^r, as in Table 1 and equation 8; the paper prints twice
    c_trans^l.
    """
    accepted, rejected = max(here, there), max(here, there + round_trip)
    return acceptance_there * accepted + (1.0 - acceptance_there) * rejected


def synchronous_seconds(here: float, there: float, round_trip: float) -> float:
    """Z~: seconds per token if every token waits for both sides, equation 7 with acceptance 0."""
    return token_seconds(here, there, round_trip, 0.0)


def speed_up(here: float, there: float, round_trip: float, acceptance_there: float) -> float:
    """S = Z~ / Z of Theorem 3, at least 1; 1 if the acceptance is 0 or `here` hides the round trip.

    Raises ValueError if both decode times are 0.
    """
    if max(here, there) <= 0.0:
        raise ValueError("a speed-up needs a side that takes time")
    return synchronous_seconds(here, there, round_trip) / token_seconds(here, there, round_trip, acceptance_there)


@dataclass(frozen=True, slots=True)
class ExpectedTokenTime:
    """Expected seconds per token with the aggregator on either side."""

    cloud: float
    device: float

    def on(self, side: Side) -> float:
        return self.cloud if side == "cloud" else self.device

    def gain(self, holder: Side) -> float:
        """Delta Z (equation 8): seconds gained per token if the aggregator leaves `holder`; negative for a loss."""
        return self.on(holder) - self.on(other(holder))


def expected_token_time(
    decode: Mapping[Side, float], round_trip: float, acceptance: Mapping[Side, float]
) -> ExpectedTokenTime:
    """Z (equation 7) with the aggregator on either side."""
    cloud, device = (
        token_seconds(decode[side], decode[other(side)], round_trip, acceptance[other(side)]) for side in SIDES
    )
    return ExpectedTokenTime(cloud, device)


def lasting_seconds(here: float, there: float, round_trip: float, acceptance_there: float) -> float:
    """Expected seconds per token of an aggregator that may follow a rejection to the other side: Z with the quicker of
    both ways on from a rejection, the round trip or the move."""
    rejected = min(max(here, there + round_trip), max(here, there) + round_trip / 2.0)
    return acceptance_there * max(here, there) + (1.0 - acceptance_there) * rejected


@dataclass(slots=True)
class Placement:
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

    def expected_token_time(self) -> ExpectedTokenTime | None:
        """None while a speed or the round trip is unknown."""
        if self._round_trip is None or len(self._decode) < len(SIDES):
            return None
        return expected_token_time(
            self._decode, self._round_trip, {side: self.acceptance[side].value for side in SIDES}
        )

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
