"""The interface of the aggregators `mixture`, `coin` and `dragon`, and what the two sides send each other under one.

Every target is a function of the seed, the position, both distributions and the weights alone, whichever side
aggregates: a hand-over changes no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from paceline.core.aggregation.own_dist import OwnDist
from paceline.core.sampling.dist import Dist
from paceline.core.side import Side

AggregatorName = Literal["mixture", "coin", "paper"]
LAST_LEVEL = 2  # levels of detail: 0 a small head, 1 a larger one with exact float64 probabilities, 2 nearly all ids
DIST_TOP_P, DIST_MAX_IDS = 0.999, 512  # truncation of a distribution that is sent whole (`needs_dists`, `paper`)
CLEAR_MARGIN = 2.0  # a token belongs to the side whose probability is at least this multiple of the other side's


@dataclass(frozen=True, slots=True, eq=False)
class PeerDist:
    """The part of a side's distribution after one prefix that it sends to the other."""

    token: int  # the side's own draft, as far as the head determines it
    head: Dist | None  # None under `coin`
    level: int = 0
    log_evidence: float | None = None  # of its documents after this prefix, where documents are rescored


@dataclass(frozen=True, slots=True, eq=False)
class TargetToken:
    token: int
    dist: Dist | None  # the target's distribution after top-k, top-p, min-p; None under `coin` and from heads
    lane: Side | None  # the side whose documents decided it; None if both sides find it about equally likely


class Aggregator(Protocol):
    """`own` is a side's mixture over its documents, `dist` as much of it, or of the peer's, as is known."""

    sends_choices: ClassVar[bool]  # a side sends what it would choose after a prefix, and no distribution
    reads_heads: ClassVar[bool]  # the head of a side's own distribution suffices for most targets

    def to_wire(self, side: Side, own: OwnDist, position: int, level: int = 0) -> PeerDist:
        """The part of its distribution that `side` sends. level: 0 to `LAST_LEVEL`."""
        ...

    def from_wire(
        self, side: Side, head: Dist | None, choice: int | None, position: int, level: int
    ) -> PeerDist | None:
        """Rebuild what `side` sent from the payload; None if the payload is unusable, which is treated as lost."""
        ...

    def decide(
        self,
        side: Side,
        own: OwnDist | None,
        theirs: PeerDist | None,
        weights: Mapping[Side, float],
        position: int,
        *,
        from_heads: bool = False,
    ) -> TargetToken | None:
        """The target; None if the peer's distribution is needed at the next level. At `LAST_LEVEL` never None.

        side: the side that `own` belongs to. weights: of both sides, summing to 1. own, theirs: may be None if that
        side's weight is 0 or the aggregator does not need it; if one that is needed is None, the result is None too.
        from_heads: None also where the own distribution would have to be read as a whole, which takes milliseconds.
        """
        ...

    def draft_tokens(
        self, side: Side, dist: Dist, weights: Mapping[Side, float] | None, position: int, count: int
    ) -> list[int]:
        """At most `count` distinct draft tokens of this side after this prefix, best first."""
        ...


def lane_of(token: int, dists: Mapping[Side, Dist]) -> Side | None:
    """The side whose documents decided the target; None if both sides find it about equally likely.

    A token missing from a head counts as probability 0, so near the boundary (`CLEAR_MARGIN`) the two sides may get
    different lanes; their tokens never differ.
    """
    probs = {side: dist.prob(token) for side, dist in dists.items()}
    best = max(probs, key=lambda side: probs[side])
    rest = max((prob for side, prob in probs.items() if side != best), default=0.0)
    return best if probs[best] >= CLEAR_MARGIN * rest else None
