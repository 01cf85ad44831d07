"""`paper`: DRAGON's Algorithm 1 (specs 1.1, step 4), with every draw and coin a function of seed, position and purpose.

Each side drafts from its own distribution, with noise of its own. Each draft is accepted or resampled so that it
follows the mixture, and one of the two is picked: the cloud's with probability gamma. The distributions are those that
the sides send: each after top-k, top-p and min-p, cut to 99.9 % and 512 ids, rounded to 16 bits and renormalised, then
mixed. With top-k, top-p or min-p, which apply before the mixture here, the target's distribution differs from that of
`mixture`. At temperature 0 the algorithm is the argmax of the mixture and is left to `Mixture`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from paceline.core.aggregation.aggregator import (
    DIST_MAX_IDS,
    DIST_TOP_P,
    PeerDist,
    TargetToken,
    lane_of,
)
from paceline.core.aggregation.mixture import Mixture
from paceline.core.aggregation.own_dist import OwnDist
from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import Dist, ProbArray
from paceline.core.sampling.noise import uniform
from paceline.core.sampling.quantize import quantize
from paceline.core.sampling.sampler import SamplingParams, filter_top
from paceline.core.side import SIDES, Side, other


class Dragon:
    """Aggregator of one request. gamma: probability that the cloud's token is picked."""

    sends_choices: ClassVar[bool] = False
    reads_heads: ClassVar[bool] = False

    def __init__(self, sampling: SamplingParams, *, gamma: float = 0.5, vocab_size: int | None = None) -> None:
        self._sampling, self._gamma = sampling, gamma
        self._greedy = Mixture(sampling, vocab_size=vocab_size) if sampling.temperature == 0.0 else None

    def to_wire(self, side: Side, own: OwnDist, position: int, level: int = 0) -> PeerDist:
        if self._greedy is not None:
            return self._greedy.to_wire(side, own, position, level)
        head = self._truncated(own.whole)
        return PeerDist(self._draft(side, head, position), head, level)

    def from_wire(
        self, side: Side, head: Dist | None, choice: int | None, position: int, level: int
    ) -> PeerDist | None:
        if self._greedy is not None:
            return self._greedy.from_wire(side, head, choice, position, level)
        head = None if head is None else quantize(head)  # each side rounds its own distribution likewise
        if head is None or not len(head.ids):
            return None
        return PeerDist(self._draft(side, head, position), head, level)

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
        if self._greedy is not None:
            return self._greedy.decide(side, own, theirs, weights, position, from_heads=from_heads)
        peer = other(side)
        dists: dict[Side, Dist] = {}
        if own is not None and weights[side] > 0.0:
            dists[side] = self._truncated(own.whole)
        if theirs is not None and theirs.head is not None and weights[peer] > 0.0:
            dists[peer] = theirs.head
        if any(weights[each] > 0.0 and each not in dists for each in SIDES):
            return None
        if len(dists) == 1:
            ((only, dist),) = dists.items()
            return TargetToken(self._draft(only, dist, position), renormalised(dist), only)
        drafts = {each: self._draft(each, dists[each], position) for each in SIDES}
        dists = {each: renormalised(dists[each]) for each in SIDES}
        verified = {each: self._verify(each, drafts[each], dists, weights, position) for each in SIDES}
        picked: Side = "cloud" if uniform(self._sampling.seed, position, "paper pick") < self._gamma else "device"
        token = verified[picked]
        mixed = mix_weighted([dists[each] for each in SIDES], [weights[each] for each in SIDES])
        return TargetToken(token, mixed, lane_of(token, dists))

    def draft_tokens(
        self, side: Side, dist: Dist, weights: Mapping[Side, float] | None, position: int, count: int
    ) -> list[int]:
        if self._greedy is not None:
            return self._greedy.draft_tokens(side, dist, weights, position, count)
        head = self._truncated(dist)
        draft = self._draft(side, head, position)
        likely = [token for token, _ in head.top(count) if token != draft]
        return [draft, *likely][:count]

    def _truncated(self, dist: Dist) -> Dist:
        return quantize(filter_top(dist, self._sampling), top_p=DIST_TOP_P, max_ids=DIST_MAX_IDS)

    def _draft(self, side: Side, dist: Dist, position: int) -> int:
        """The draft of that side, which both sides can compute from its distribution."""
        return _draw(renormalised(dist), uniform(self._sampling.seed, position, f"paper draft {side}"))

    def _verify(
        self, side: Side, token: int, dists: Mapping[Side, Dist], weights: Mapping[Side, float], position: int
    ) -> int:
        """The side's draft, or if it is rejected a token of the residual, so that the result follows the mixture."""
        peer, seed = other(side), self._sampling.seed
        ours, theirs = dists[side].prob(token), dists[peer].prob(token)
        # As a product: no division, no zero case. A draft at least as likely for the peer is never rejected.
        if uniform(seed, position, f"paper accept {side}") * ours >= weights[peer] * (ours - theirs):
            return token
        residual = excess(dists[peer], dists[side])
        if not residual.probs.any():
            return token  # the distributions are equal up to rounding
        return _draw(residual, uniform(seed, position, f"paper recover {side}"))


def renormalised(dist: Dist) -> Dist:
    """The distribution scaled to sum to 1 without its tail. Raises ValueError if no id has a probability above 0."""
    total = float(dist.probs.sum())
    if not total > 0.0:
        raise ValueError("a distribution without any token")
    return Dist(dist.ids, dist.probs / total)


def excess(more: Dist, less: Dist) -> Dist:
    """The residual (more - less)_+ on the ids of `more`, not normalised; all zeros if the two are equal."""
    places = np.searchsorted(less.ids, more.ids)
    inside = places < len(less.ids)
    inside[inside] = less.ids[places[inside]] == more.ids[inside]
    probs: ProbArray = more.probs.copy()
    probs[inside] -= less.probs[places[inside]]
    return Dist(more.ids, np.maximum(probs, 0.0))


def _draw(dist: Dist, u: float) -> int:
    """Draw by inversion, in the order of ids. dist: mass above 0, not necessarily normalised. u: in (0, 1)."""
    places = np.flatnonzero(dist.probs > 0.0)
    reached = np.cumsum(dist.probs[places])
    at = int(np.searchsorted(reached, u * reached[-1], side="right"))
    return int(dist.ids[places[min(at, len(places) - 1)]])
