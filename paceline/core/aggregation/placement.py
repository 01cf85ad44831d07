"""Where the aggregator belongs: DRAGON's model of the time per token, its greedy rule, and hysteresis around the rule.

`l` of the paper is the side that aggregates (`here`), `r` the other (`there`). All times are seconds. Knows nothing of
clocks or messages: speeds, delays and acceptance are brought by the caller, see `profile` for where they come from.

Not modelled, as in the paper: that a rejection of the holder's own drafts costs its queue even where the other side is
the bottleneck, bounds on drafting ahead, and trees (a tree's second guesses count as accepted: measure them so).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.core.estimation.timing import AcceptanceRate, DecodeSpeed
from paceline.core.side import SIDES, Side, other

# A move must promise this share of the time per token: the model leaves out terms of second order, and its inputs are
# measured. In replays (bench/rules), 5 and 10 % did equally well on five links; 0 and 2 % moved more often for nothing.
MARGIN = 0.05
# Targets decided on one side before the aggregator may leave it again. A move silences it for one one-way delay: where
# conditions change all the time that needs a bound. Rests from 0 to 16 differed by 1 % in replays; on a real link one
# of 4 moved up to five times in 64 tokens, for the noise of an acceptance just begun to be measured.
MIN_DWELL = 8


def remaining(total: float, began: float, now: float) -> float:
    """phi: how much of `total` seconds is left at `now` of what began at `began`."""
    return max(0.0, total + began - now)


@dataclass(frozen=True, slots=True)
class Speeds:
    """One step as seen from the holder of the aggregator. Delays are one-way: of `here`, from here to there."""

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
    """When the decoding of the next drafts began, for `waiting`; before `now` where it was not interrupted."""

    here: float
    there: float
    now: float


def waiting(speeds: Speeds, begun: DraftStart, accepted_here: bool, accepted_there: bool) -> float:
    """Seconds until both drafts of the next step are at the holder (Table 1).

    A rejected side starts afresh: the holder at once, the other when the target has reached it.
    """
    own = remaining(speeds.decode_here, begun.here, begun.now) if accepted_here else speeds.decode_here
    incoming = speeds.decode_there + speeds.delay_there
    theirs = remaining(incoming, begun.there, begun.now) if accepted_there else speeds.delay_here + incoming
    return max(own, theirs)


def token_seconds(here: float, there: float, round_trip: float, acceptance_there: float) -> float:
    """Z of the side whose decode time is `here`: expected seconds per token while it aggregates.

    Equation 7 with its last term read as c_trans^l + c_trans^r, as Table 1 and equation 8 have it; printed is twice
    c_trans^l.
    """
    kept, redone = max(here, there), max(here, there + round_trip)
    return acceptance_there * kept + (1.0 - acceptance_there) * redone


def synchronous_seconds(here: float, there: float, round_trip: float) -> float:
    """Z~: seconds per token when every token waits for both sides, equation 7 with nothing accepted."""
    return token_seconds(here, there, round_trip, 0.0)


def speed_up(here: float, there: float, round_trip: float, acceptance_there: float) -> float:
    """S = Z~ / Z of Theorem 3, at least 1; 1 where nothing is accepted or `here` hides the round trip.

    Raises ValueError where nothing takes any time.
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
        """Delta Z (equation 8): what a token gains if the aggregator leaves `holder`; negative: it loses."""
        return self.on(holder) - self.on(other(holder))


def outlook(decode: Mapping[Side, float], round_trip: float, acceptance: Mapping[Side, float]) -> ExpectedTokenTime:
    """Z with the aggregator on each side (equation 7)."""
    cloud, device = (
        token_seconds(decode[side], decode[other(side)], round_trip, acceptance[other(side)]) for side in SIDES
    )
    return ExpectedTokenTime(cloud, device)


@dataclass(slots=True)
class Placement:
    """One side's opinion of where the aggregator belongs. The holder asks it after each burst of targets.

    Both sides see every target and so may keep one each; only the holder's is asked. Without margin and rest it is the
    paper's rule: hand over as soon as Delta Z > 0. `fixed` says that privacy leaves no choice: the holder is that side.
    While a speed or the round trip is not known, nothing moves.
    """

    holder: Side
    margin: float = MARGIN
    min_dwell: int = MIN_DWELL  # targets
    fixed: Side | None = None
    acceptance: dict[Side, AcceptanceRate] = field(default_factory=lambda: {side: AcceptanceRate() for side in SIDES})
    _decode: dict[Side, float] = field(default_factory=dict)
    _round_trip: float | None = None
    _moved: int | None = None  # position of the last hand-over; None: it has never moved

    def __post_init__(self) -> None:
        if self.fixed is not None:
            self.holder = self.fixed

    def observe_speed(self, side: Side, pace: DecodeSpeed, rows: int = 1) -> None:
        """What one of its drafting steps takes now; `rows` as it drafts."""
        self._decode[side] = pace.forward(rows)

    def observe_round_trip(self, seconds: float) -> None:
        self._round_trip = seconds

    def observe_target(self, accepted: Mapping[Side, bool]) -> None:
        """One target was decided; a side is True when its drafting went on without a round trip."""
        for side, kept in accepted.items():
            self.acceptance[side].add(kept)

    def outlook(self) -> ExpectedTokenTime | None:
        """None while a speed or the round trip is not known."""
        if self._round_trip is None or len(self._decode) < len(SIDES):
            return None
        return outlook(self._decode, self._round_trip, {side: self.acceptance[side].value for side in SIDES})

    def choose(self, position: int) -> Side:
        """Where the target after `position` decided ones should be made. Changes nothing: say `moved` if it is done."""
        expected = self.outlook()
        if self.fixed is not None or expected is None:
            return self.holder
        if self._moved is not None and position - self._moved < self.min_dwell:
            return self.holder
        gain = expected.gain(self.holder)
        return other(self.holder) if gain > 0.0 and gain >= self.margin * expected.on(self.holder) else self.holder

    def moved(self, holder: Side, position: int) -> None:
        """The aggregator is on `holder` from `position` on, however that came about."""
        if holder != self.holder:
            self.holder, self._moved = holder, position
