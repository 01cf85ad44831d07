"""`paper`: DRAGON's Algorithm 1 (specs 1.1, step 4), with every draw and coin a function of seed, position and purpose.

Each side drafts from its own law, with noise of its own. Each draft is kept or resampled so that it follows the
mixture, and one of the two is picked: the cloud's with probability gamma. The laws are what the sides ship: each
truncated (top-k, top-p, min-p), cut to 99.9 % and 512 ids, rounded to 16 bits and renormalised, then mixed.
Truncate-then-mix, so with truncation the target's law is not that of `mixture`. At temperature 0 the algorithm is the
argmax of the mixture, which `Mixture` decides.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.core.aggregation.aggregator import (
    DIST_MAX_IDS,
    DIST_TOP_P,
    AggregatorName,
    PeerDist,
    TargetToken,
    lane_of,
)
from paceline.core.aggregation.mixture import Mixture
from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import Dist, ProbArray
from paceline.core.sampling.noise import uniform
from paceline.core.sampling.quantize import quantize
from paceline.core.sampling.sampler import SamplingParams, filter_top
from paceline.core.side import SIDES, Side, other


class Dragon:
    """One request's rule. gamma: with what probability the cloud's token is picked."""

    def __init__(self, sampling: SamplingParams, *, gamma: float = 0.5, vocab_size: int | None = None) -> None:
        self._sampling, self._gamma = sampling, gamma
        self._greedy = Mixture(sampling, vocab_size=vocab_size) if sampling.temperature == 0.0 else None

    @property
    def name(self) -> AggregatorName:
        return "paper"

    def to_wire(self, side: Side, dist: Dist, position: int, level: int = 0) -> PeerDist:
        if self._greedy is not None:
            return self._greedy.to_wire(side, dist, position, level)
        law = self._processed(dist)
        return PeerDist(self._draft(side, law, position), law, level)

    def from_wire(
        self, side: Side, head: Dist | None, choice: int | None, position: int, level: int
    ) -> PeerDist | None:
        if self._greedy is not None:
            return self._greedy.from_wire(side, head, choice, position, level)
        head = None if head is None else quantize(head)  # as both sides round their own
        if head is None or not len(head.ids):
            return None
        return PeerDist(self._draft(side, head, position), head, level)

    def decide(
        self, side: Side, own: Dist | None, theirs: PeerDist | None, weights: Mapping[Side, float], position: int
    ) -> TargetToken | None:
        if self._greedy is not None:
            return self._greedy.decide(side, own, theirs, weights, position)
        peer = other(side)
        laws: dict[Side, Dist] = {}
        if own is not None and weights[side] > 0.0:
            laws[side] = self._processed(own)
        if theirs is not None and theirs.head is not None and weights[peer] > 0.0:
            laws[peer] = theirs.head
        if any(weights[each] > 0.0 and each not in laws for each in SIDES):
            return None
        if len(laws) == 1:
            ((only, law),) = laws.items()
            return TargetToken(self._draft(only, law, position), renormalised(law), only)
        drafts = {each: self._draft(each, laws[each], position) for each in SIDES}
        laws = {each: renormalised(laws[each]) for each in SIDES}
        kept = {each: self._sample(each, drafts[each], laws, weights, position) for each in SIDES}
        picked: Side = "cloud" if uniform(self._sampling.seed, position, "paper pick") < self._gamma else "device"
        token = kept[picked]
        mixed = mix_weighted([laws[each] for each in SIDES], [weights[each] for each in SIDES])
        return TargetToken(token, mixed, lane_of(token, laws))

    def draft_tokens(
        self, side: Side, dist: Dist, weights: Mapping[Side, float] | None, position: int, count: int
    ) -> list[int]:
        if self._greedy is not None:
            return self._greedy.draft_tokens(side, dist, weights, position, count)
        law = self._processed(dist)
        draft = self._draft(side, law, position)
        likely = [token for token, _ in law.top(count) if token != draft]
        return [draft, *likely][:count]

    def _processed(self, dist: Dist) -> Dist:
        return quantize(filter_top(dist, self._sampling), top_p=DIST_TOP_P, max_ids=DIST_MAX_IDS)

    def _draft(self, side: Side, law: Dist, position: int) -> int:
        """What that side drafts: known to both from the law alone."""
        return _draw(renormalised(law), uniform(self._sampling.seed, position, f"paper draft {side}"))

    def _sample(
        self, side: Side, token: int, laws: Mapping[Side, Dist], weights: Mapping[Side, float], position: int
    ) -> int:
        """The side's draft, or if it is rejected a token of what the other law has more: together the mixture's law."""
        peer, seed = other(side), self._sampling.seed
        ours, theirs = laws[side].prob(token), laws[peer].prob(token)
        # As a product: no division, no case of zero. A draft that the peer likes as well is never rejected.
        if uniform(seed, position, f"paper accept {side}") * ours >= weights[peer] * (ours - theirs):
            return token
        recovered = excess(laws[peer], laws[side])
        if not recovered.probs.any():
            return token  # the laws are equal but for the last bits
        return _draw(recovered, uniform(seed, position, f"paper recover {side}"))


def renormalised(law: Dist) -> Dist:
    """The same with its tail spread over it in proportion. Raises ValueError when nothing is kept."""
    total = float(law.probs.sum())
    if not total > 0.0:
        raise ValueError("a law without any token")
    return Dist(law.ids, law.probs / total)


def excess(more: Dist, less: Dist) -> Dist:
    """(more - less)_+ on the ids of `more`, not normalised. All zeros where the two are equal."""
    places = np.searchsorted(less.ids, more.ids)
    inside = places < len(less.ids)
    inside[inside] = less.ids[places[inside]] == more.ids[inside]
    probs: ProbArray = more.probs.copy()
    probs[inside] -= less.probs[places[inside]]
    return Dist(more.ids, np.maximum(probs, 0.0))


def _draw(law: Dist, u: float) -> int:
    """By inversion, in the order of ids. law: some mass, normalised or not. u: in (0, 1)."""
    places = np.flatnonzero(law.probs > 0.0)
    reached = np.cumsum(law.probs[places])
    at = int(np.searchsorted(reached, u * reached[-1], side="right"))
    return int(law.ids[places[min(at, len(places) - 1)]])
