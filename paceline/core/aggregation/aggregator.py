"""What an aggregation rule is, and what two sides tell each other under one. The rules: `mixture`, `coin`, `paper`.

Every decision is a function of the seed, the position, both laws and the weights alone, the same whichever of the two
sides takes it: handing the aggregator over changes no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.core.sampling.dist import Dist
from paceline.core.side import Side

AggregatorName = Literal["mixture", "coin", "paper"]
LAST_LEVEL = 2  # levels of detail: 0 a small head, 1 a larger one with exact float64 probabilities, 2 nearly everything
DIST_TOP_P, DIST_MAX_IDS = 0.999, 512  # a law that is shipped whole (`wide`, `paper`) is cut to this
CLEAR_MARGIN = 2.0  # a token is one side's when that side thought it so many times as likely as the other did


@dataclass(frozen=True, slots=True, eq=False)
class PeerDist:
    """What one side tells the other of its law after one prefix."""

    token: int  # what this side alone would choose there: its draft, as far as the head shows it
    head: Dist | None  # None under `coin`
    level: int = 0
    log_evidence: float | None = None  # of its documents after this prefix, where scores follow the text


@dataclass(frozen=True, slots=True, eq=False)
class TargetToken:
    token: int
    dist: Dist | None  # the target's distribution as far as it is known, after top-k, top-p, min-p; None under `coin`
    lane: Side | None  # whose documents decided it; None where both sides would have said much the same


class Aggregator(Protocol):
    """`dist` and `own` are a side's mixed distribution over its documents: dense, warped, not truncated."""

    @property
    def name(self) -> AggregatorName: ...

    def to_wire(self, side: Side, dist: Dist, position: int, level: int = 0) -> PeerDist:
        """What `side` ships of its law. level: 0 to `LAST_LEVEL`."""
        ...

    def from_wire(
        self, side: Side, head: Dist | None, choice: int | None, position: int, level: int
    ) -> PeerDist | None:
        """The share of `side` from what the wire carried of it; None when that is of no use, as good as lost."""
        ...

    def decide(
        self, side: Side, own: Dist | None, theirs: PeerDist | None, weights: Mapping[Side, float], position: int
    ) -> TargetToken | None:
        """The target, or None: ask the peer for its share at the next level. At `LAST_LEVEL` it always decides.

        side: whose `own` it is. weights: of both sides, summing to 1. own, theirs: may be None where that side's
        weight is 0, or where the rule does not need it; where it does, None is the answer too.
        """
        ...

    def draft_tokens(
        self, side: Side, dist: Dist, weights: Mapping[Side, float] | None, position: int, count: int
    ) -> list[int]:
        """At most `count` distinct tokens, best first, that this side would draft after this prefix."""
        ...


def lane_of(token: int, laws: Mapping[Side, Dist]) -> Side | None:
    """Whose documents a target came from: None where both sides would have said much the same.

    Of a head, a token left off counts as impossible. So near the boundary, a factor of `CLEAR`, the two sides may see
    it differently; tokens never differ.
    """
    probs = {side: dist.prob(token) for side, dist in laws.items()}
    best = max(probs, key=lambda side: probs[side])
    rest = max((prob for side, prob in probs.items() if side != best), default=0.0)
    return best if probs[best] >= CLEAR_MARGIN * rest else None
