"""`mixture`: the target is argmax(log p + G) of the mixture of both sides' distributions (DRAGON eq. 4; specs 1.6,
mode C).

Exact although a side sends only the head of its distribution: `exactness` tests whether the head determines the token;
if it does not, a larger head is requested (specs 7.3). In a vocabulary of more than `HEADS[LAST_LEVEL]` ids even the
last level may not determine it; then both distributions are cut to what that level sends, so that both sides would
still decide alike. Only in that case may ids beyond the first 16,384 make the target differ from that of the whole
rows.
"""
# ruff: noqa: ARG002  # the signatures are those of `aggregator.Aggregator`

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from paceline.core.aggregation.aggregator import (
    DIST_MAX_IDS,
    DIST_TOP_P,
    LAST_LEVEL,
    PeerDist,
    TargetToken,
    lane_of,
)
from paceline.core.aggregation.exactness import Ranking, sample_is_exact
from paceline.core.aggregation.head_exactness import settled_token
from paceline.core.aggregation.own_dist import OwnDist
from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import Dist, IndexArray, ProbArray
from paceline.core.sampling.noise import gumbel
from paceline.core.sampling.quantize import MIN_CODED_PROB, ROUNDING, quantize
from paceline.core.sampling.ranking import top_by_score
from paceline.core.sampling.row_head import RowHead
from paceline.core.sampling.sampler import SamplingParams, filter_top, sample
from paceline.core.side import SIDES, Side, other

# Ids in a head, by level; fewer at level 0 if the row is peaked. The first 16 ids settled all Zipf-like rows of 152,000
# ids without top-k, top-p and min-p; with top-p, where mass counts too, a few more help a little.
HEADS = (24, 256, 16_384)
OPEN_HEAD = 16  # at level 0 without top-k, top-p and min-p
WIDE_HEAD = 2048  # at level 1, where distributions are needed
# An id whose p * exp(G) is below this share of the best one's rarely affects the target: without filters, and with
# them, where the mass of ids counts, too.
NEGLIGIBLE_WEIGHT, NEGLIGIBLE_FILTERED = 0.1, 0.02
LOWERED = 1e-5  # of an engine's probabilities before they are sent: more than float32's rounding

_GREEDY = SamplingParams(temperature=0.0)


class Mixture:
    """Aggregator of one request.

    needs_dists: the target's distribution is needed too, so heads are ranked by probability and contain 99.9 %. Must be
    equal on both sides: it determines which bound a head's last id sets for the missing ones.
    vocab_size: allows a side without a distribution of its own to test exactness.
    """

    sends_choices: ClassVar[bool] = False
    reads_heads: ClassVar[bool] = True

    def __init__(self, sampling: SamplingParams, *, needs_dists: bool = False, vocab_size: int | None = None) -> None:
        self._sampling, self._needs_dists, self._vocab_size = sampling, needs_dists, vocab_size
        self._ranking: Ranking = "probability" if needs_dists else "score"
        self._filters = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
        self._negligible = NEGLIGIBLE_FILTERED if self._filters or needs_dists else NEGLIGIBLE_WEIGHT

    def to_wire(self, side: Side, own: OwnDist, position: int, level: int = 0) -> PeerDist:
        head = self._small_head(own.head, position) if level == 0 and own.head is not None else None
        if head is None:
            head = self._head(own.whole, position, level)
        return PeerDist(own.token(self._sampling, position), head, level)

    def from_wire(
        self, side: Side, head: Dist | None, choice: int | None, position: int, level: int
    ) -> PeerDist | None:
        if head is None:
            return None
        if not (head.probs > 0.0).any():  # at level 0 all ids may be too unlikely for 16 bits
            return PeerDist(0, head, level) if level == 0 else None
        return PeerDist(sample(filter_top(head, self._sampling), self._sampling, position), head, level)

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
        peer = other(side)
        if weights[peer] <= 0.0:
            return None if own is None else self._own_target(side, own, position)
        if theirs is None or theirs.head is None or (own is None and weights[side] > 0.0):
            return None
        # At the last level the heads are no smaller than the rows.
        if own is not None and own.head is not None and weights[side] > 0.0 and theirs.level < LAST_LEVEL:
            token = self._settled(own.head, theirs, weights[peer], position)
            if token is not None:
                return TargetToken(token, None, lane_of(token, {side: own.head.dist, peer: theirs.head}))
            if from_heads or not self._may_settle(own.head, theirs, weights[peer], position):
                return None
        return self._decide_by_whole(side, None if own is None else own.whole, theirs, weights, position)

    def _own_target(self, side: Side, own: OwnDist, position: int) -> TargetToken:
        token = own.token(self._sampling, position)
        dist = None if own.head is not None else filter_top(own.whole, self._sampling)
        return TargetToken(token, dist, lane_of(token, {side: own.known}))

    def _settled(self, own: RowHead, theirs: PeerDist, weight: float, position: int) -> int | None:
        """The target, where both sides' heads determine it."""
        assert theirs.head is not None
        rounding = ROUNDING if theirs.level == 0 else 0.0
        return settled_token(
            own, theirs.head, self._sampling, position, weight=weight, rounding=rounding, ranking=self._ranking
        )

    def _may_settle(self, own: RowHead, theirs: PeerDist, weight: float, position: int) -> bool:
        """False where more of the peer's distribution is needed anyway: the own head, as if nothing were missing, does
        not determine the target either."""
        if theirs.level > 0:
            return True
        whole = RowHead(Dist(own.dist.ids, own.dist.probs), own.best, own.scores, -math.inf, 0.0)
        return self._settled(whole, theirs, weight, position) is not None

    def _decide_by_whole(
        self, side: Side, own: Dist | None, theirs: PeerDist, weights: Mapping[Side, float], position: int
    ) -> TargetToken | None:
        peer, head = other(side), theirs.head
        assert head is not None
        exact = self._zero_dist() if own is None else own
        if _whole(head, theirs.level, None if exact is None else len(exact.ids)):
            head = Dist(head.ids, head.probs)  # its tail is only rounding
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
        dists = {peer: head}
        if exact is not None and weights[side] > 0.0:
            dists[side] = exact
        final = filter_top(_mixed(dists, weights), self._sampling)
        token = sample(final, self._sampling, position)
        return TargetToken(token, final, lane_of(token, dists))

    def draft_tokens(
        self, side: Side, dist: Dist, weights: Mapping[Side, float] | None, position: int, count: int
    ) -> list[int]:
        final = filter_top(dist, self._sampling)
        places = top_by_score(final, self._sampling, position, count)
        return [int(token) for token in final.ids[places[final.probs[places] > 0.0]]]

    def _small_head(self, own: RowHead, position: int) -> Dist | None:
        """Level 0 from the own head; None where that does not contain the first ids of the ranking.

        Its probabilities may be too high by float32's rounding, which no bound on the other side allows for, so they
        are lowered first.
        """
        if self._needs_dists:
            return None
        count = HEADS[0] if self._filters else OPEN_HEAD
        if not own.whole:
            count = min(count, int(np.count_nonzero(own.scores >= own.max_score)))
        if not count:
            return None
        lowered = Dist(own.dist.ids, own.dist.probs * (1.0 - LOWERED), own.dist.tail)
        places = _pruned(lowered, own.best[:count], own.scores[:count], self._negligible)
        return lowered.kept_at(np.sort(places))

    def _head(self, dist: Dist, position: int, level: int) -> Dist:
        if self._needs_dists and level == 0:
            return quantize(dist, top_p=DIST_TOP_P, max_ids=DIST_MAX_IDS)
        size = WIDE_HEAD if self._needs_dists and level == 1 else HEADS[level]
        if level > 0 and len(dist.ids) <= size:
            return dist
        if level == 0 and not self._filters:
            size = OPEN_HEAD
        by_probability = self._needs_dists or self._sampling.temperature == 0.0
        places = top_by_score(dist, _GREEDY if by_probability else self._sampling, position, size)
        if level == 0:
            with np.errstate(divide="ignore"):
                scores = np.log(dist.probs[places])
            if self._sampling.temperature > 0.0:
                scores = scores + gumbel(self._sampling.seed, position, dist.ids[places])
            places = _pruned(dist, places, scores, self._negligible)
        return dist.kept_at(np.sort(places))

    def _zero_dist(self) -> Dist | None:
        """Placeholder for the distribution of a side without weight."""
        return None if self._vocab_size is None else Dist.dense(np.zeros(self._vocab_size))


def _pruned(dist: Dist, places: IndexArray, scores: ProbArray, least: float) -> IndexArray:
    """The ranked ids that matter and survive rounding to 16 bits: a prefix, as the bounds rely on the ranking.

    places: indices of ids, of falling score or probability. scores: theirs.
    """
    survive = dist.probs[places] >= MIN_CODED_PROB
    count = len(places) if survive.all() else int(np.argmin(survive))
    near = int(np.count_nonzero(scores >= scores[0] + np.log(least)))
    return places[: min(count, near + 1)]


def _mixed(dists: Mapping[Side, Dist], weights: Mapping[Side, float]) -> Dist:
    """dists: of the sides with a weight. Added in a fixed order, so that both sides get equal bits."""
    known = [side for side in SIDES if side in dists]
    return mix_weighted([dists[side] for side in known], [weights[side] if len(known) > 1 else 1.0 for side in known])


def _whole(head: Dist, level: int, vocab_size: int | None) -> bool:
    """True if the head is the whole row with exact probabilities."""
    if level == 0 or not head.leading:
        return False
    return len(head.ids) == vocab_size if vocab_size is not None else level == LAST_LEVEL and len(head.ids) < HEADS[-1]
