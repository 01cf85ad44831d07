"""`coin`: the target is the token of one side, picked by a coin weighted with eta (specs 1.6, mode B).

The target follows the mixture, and neither side sends a distribution. Both sides sample with the same noise, so that
their tokens mostly agree whichever side is picked. Each side applies top-k, top-p and min-p to its own distribution,
before the mixture. At temperature 0 the target is a random choice between two argmaxes, so `default_aggregator` never
picks `coin` there.
"""
# ruff: noqa: ARG002  # the signatures are those of `aggregator.Aggregator`

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from paceline.core.aggregation.aggregator import PeerDist, TargetToken
from paceline.core.aggregation.own_dist import OwnDist
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.noise import uniform
from paceline.core.sampling.ranking import top_by_score
from paceline.core.sampling.sampler import SamplingParams, filter_top
from paceline.core.side import Side, other


class Coin:
    """Aggregator of one request."""

    sends_choices: ClassVar[bool] = True
    reads_heads: ClassVar[bool] = True

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling

    def to_wire(self, side: Side, own: OwnDist, position: int, level: int = 0) -> PeerDist:
        return PeerDist(own.token(self._sampling, position), None, level)

    def from_wire(
        self, side: Side, head: Dist | None, choice: int | None, position: int, level: int
    ) -> PeerDist | None:
        return None if choice is None else PeerDist(choice, None, level)

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
        picked = self.flip(weights, position)
        ours = None if own is None or weights[side] <= 0.0 else own.token(self._sampling, position)
        token = ours if picked == side else None if theirs is None else theirs.token
        if token is None:
            return None
        agree = ours is not None and theirs is not None and weights[other(side)] > 0.0 and ours == theirs.token
        return TargetToken(token, None, None if agree else picked)

    def draft_tokens(
        self, side: Side, dist: Dist, weights: Mapping[Side, float] | None, position: int, count: int
    ) -> list[int]:
        if weights is not None and self.flip(weights, position) == side:
            count = min(count, 1)
        final = filter_top(dist, self._sampling)
        places = top_by_score(final, self._sampling, position, count)
        return [int(token) for token in final.ids[places[final.probs[places] > 0.0]]]

    def flip(self, weights: Mapping[Side, float], position: int) -> Side:
        """The side that the coin picks; never one of weight 0."""
        return "cloud" if uniform(self._sampling.seed, position, "coin") < weights["cloud"] else "device"
