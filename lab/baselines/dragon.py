"""DRAGON as published: shapes of `aggregate`'s drafts, as options and in `paceline.debug`, and its model of the time.

The paper's `l` is the side that aggregates (`here`), `r` the other (`there`). All times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from paceline.core.side import SIDES, Side, other
from paceline.wire.messages import DraftLimits

Shape = Literal["tree", "chain", "sequence", "none"]
SHAPES: Final[Mapping[Shape, DraftLimits]] = {
    "tree": DraftLimits(),
    "chain": DraftLimits(width=1, rows=1),  # DRAGON as published
    "sequence": DraftLimits(width=1, rows=1, ahead=20, whole_sequences=True),
    "none": DraftLimits(width=1, rows=1, ahead=0),  # token by token
}


def shaped(shape: Shape, **more: object) -> dict[str, object]:
    """The field `paceline.debug` of a request with drafts of this shape, and more options."""
    return {"debug": {"drafting": msgspec.structs.asdict(SHAPES[shape])} | more}


# ---- the time per token ---------------------------------------------------------------------------------------------
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
