"""`mixture`: the target is argmax(log p + G) of the mixture of both sides' laws (DRAGON eq. 4; specs 1.6, mode C).

Exact although a side ships only the head of its law: a certificate says whether the head settles the choice, and where
it does not, more is asked for (specs 7.3). In a vocabulary of more than `HEADS[LAST_LEVEL]` ids even the last level
may leave a doubt; then both laws are cut to what that level ships, so that it still does not matter which side decides.
So there, and only there, the choice may be another than that of the whole rows, by ids beyond the first 16,384.
"""
# ruff: noqa: ARG002  # the signatures are those of `shares.Rule`

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.core.aggregation.aggregator import (
    DIST_MAX_IDS,
    DIST_TOP_P,
    LAST_LEVEL,
    AggregatorName,
    PeerDist,
    TargetToken,
    lane_of,
)
from paceline.core.aggregation.exactness import Ranking, sample_is_exact, top_by_score
from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import Dist, IndexArray
from paceline.core.sampling.noise import gumbel
from paceline.core.sampling.quantize import LEAST, ROUNDING, quantize
from paceline.core.sampling.sampler import SamplingParams, filter_top, sample
from paceline.core.side import SIDES, Side, other

# Ids in a head, by level; some fewer at level 0 where the row is peaked. Zipf-like rows of 152,000 ids were all settled
# by the first 16 where nothing is truncated; with top-p, where mass counts too, more of them help a little.
HEADS = (24, 256, 16_384)
OPEN_HEAD = 16  # at level 0 without top-k, top-p and min-p
WIDE_HEAD = 2048  # level 1, where distributions are wanted
FAR = 0.02  # an id whose noisy weight is below this share of the best one's hardly matters for a choice


_GREEDY = SamplingParams(temperature=0.0)


class Mixture:
    """One request's rule. `wide`: distributions are wanted too, so heads go by probability and hold 99.9 %.

    Both sides must be given the same `wide`: it says what a head's last id tells of those left off.
    vocab_size: lets a choice be certified that this side has no law for.
    """

    def __init__(self, sampling: SamplingParams, *, wide: bool = False, vocab_size: int | None = None) -> None:
        self._sampling, self._wide, self._vocab_size = sampling, wide, vocab_size
        self._ranking: Ranking = "probability" if wide else "score"
        self._cuts = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0

    @property
    def name(self) -> AggregatorName:
        return "mixture"

    def to_wire(self, side: Side, dist: Dist, position: int, level: int = 0) -> PeerDist:
        token = sample(filter_top(dist, self._sampling), self._sampling, position)
        return PeerDist(token, self._head(dist, position, level), level)

    def from_wire(
        self, side: Side, head: Dist | None, choice: int | None, position: int, level: int
    ) -> PeerDist | None:
        if head is None:
            return None
        if not (head.probs > 0.0).any():  # at level 0 all there was may have been too unlikely for 16 bits
            return PeerDist(0, head, level) if level == 0 else None
        return PeerDist(sample(filter_top(head, self._sampling), self._sampling, position), head, level)

    def decide(
        self, side: Side, own: Dist | None, theirs: PeerDist | None, weights: Mapping[Side, float], position: int
    ) -> TargetToken | None:
        peer = other(side)
        if weights[peer] <= 0.0:
            return None if own is None else self._decision({side: own}, weights, position)
        if theirs is None or theirs.head is None or (own is None and weights[side] > 0.0):
            return None
        head = theirs.head
        exact = self._nothing() if own is None else own
        if _whole(head, theirs.level, None if exact is None else len(exact.ids)):
            head = Dist(head.ids, head.probs)  # its tail is but what a sum in floating point lacks of 1
        elif exact is None or not sample_is_exact(
            exact,
            head,
            self._sampling,
            position,
            weight=weights[peer],
            rounding=ROUNDING if theirs.level == 0 else 0.0,
            ranking=self._ranking,
        ):
            if theirs.level < LAST_LEVEL:
                return None
            exact = None if own is None else self._head(own, position, LAST_LEVEL)
        laws = {peer: head}
        if exact is not None and weights[side] > 0.0:
            laws[side] = exact
        return self._decision(laws, weights, position)

    def draft_tokens(
        self, side: Side, dist: Dist, weights: Mapping[Side, float] | None, position: int, count: int
    ) -> list[int]:
        final = filter_top(dist, self._sampling)
        places = top_by_score(final, self._sampling, position, count)
        return [int(token) for token in final.ids[places[final.probs[places] > 0.0]]]

    def _decision(self, laws: Mapping[Side, Dist], weights: Mapping[Side, float], position: int) -> TargetToken:
        """laws: of the sides that have a weight. Always added in one order, so that both sides get the same bits."""
        known = {side: laws[side] for side in SIDES if side in laws}
        mixed = mix_weighted(list(known.values()), [weights[side] if len(known) > 1 else 1.0 for side in known])
        final = filter_top(mixed, self._sampling)
        token = sample(final, self._sampling, position)
        return TargetToken(token, final, lane_of(token, known))

    def _head(self, dist: Dist, position: int, level: int) -> Dist:
        if self._wide and level == 0:
            return quantize(dist, top_p=DIST_TOP_P, max_ids=DIST_MAX_IDS)
        size = WIDE_HEAD if self._wide and level == 1 else HEADS[level]
        if level > 0 and len(dist.ids) <= size:
            return dist
        if level == 0 and not self._cuts:
            size = OPEN_HEAD
        by_probability = self._wide or self._sampling.temperature == 0.0
        places = top_by_score(dist, _GREEDY if by_probability else self._sampling, position, size)
        if level == 0:
            places = self._near(dist, places, position)
        return dist.kept_at(np.sort(places))

    def _near(self, dist: Dist, places: IndexArray, position: int) -> IndexArray:
        """Of the first of the ranking those that matter and survive 16 bits: a prefix, or the bounds were unsound."""
        probs = dist.probs[places]
        survive = probs >= LEAST
        count = len(places) if survive.all() else int(np.argmin(survive))
        with np.errstate(divide="ignore"):
            scores = np.log(probs)
        if self._sampling.temperature > 0.0:
            scores = scores + gumbel(self._sampling.seed, position, dist.ids[places])
        near = int(np.count_nonzero(scores >= scores[0] + np.log(FAR)))
        return places[: min(count, near + 1)]

    def _nothing(self) -> Dist | None:
        """In place of the law of a side that has no weight."""
        return None if self._vocab_size is None else Dist.dense(np.zeros(self._vocab_size))


def _whole(head: Dist, level: int, vocab_size: int | None) -> bool:
    """Is nothing at all left off? Only exact probabilities count."""
    if level == 0 or not head.leading:
        return False
    return len(head.ids) == vocab_size if vocab_size is not None else level == LAST_LEVEL and len(head.ids) < HEADS[-1]
