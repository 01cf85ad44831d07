"""The three aggregators: from both sides' distributions after one prefix to the target (DRAGON).

An aggregator determines what a side sends of its distribution (`to_wire`), when that suffices and which token follows
(`decide`), and what to draft (`draft_tokens`); `wire.codec` and `wire.payloads` encode what is sent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from paceline.core.aggregation.exactness import Ranking, TruncatedRow, sample_is_exact, settled_token
from paceline.core.aggregation.weights import mix_weighted
from paceline.core.sampling.dist import MIN_CODED_PROB, ROUNDING, Dist, IndexArray, ProbArray, quantize, uniform
from paceline.core.sampling.sampler import (
    RowHead,
    SamplingParams,
    best_margin,
    filter_top,
    sample,
    scores_at,
    top_by_score,
)
from paceline.core.side import SIDES, Side, other
from paceline.core.verification import drawn, excess, renormalised

# A side's own distribution after one prefix: the head that an engine hands over, and the whole on demand.


@dataclass(slots=True, eq=False)
class OwnDist:
    """The mixture over this side's documents, after `process_logits`, before `filter_top`."""

    head: RowHead | None = None
    _token: int | None = None  # the side's own sample
    _read: Callable[[], Dist] | None = None  # the whole distribution, dense; takes milliseconds
    _whole: Dist | None = None

    @staticmethod
    def of(dist: Dist) -> OwnDist:
        """A distribution that is known as a whole. dist: dense."""
        return OwnDist(_whole=dist)

    @property
    def known(self) -> Dist:
        """The head's ids, or all of them: for drafts, which may be wrong."""
        if self.head is not None:
            return self.head.dist
        assert self._whole is not None
        return self._whole

    @property
    def whole(self) -> Dist:
        if self._whole is None:
            assert self._read is not None
            self._whole, self._read = self._read(), None
        return self._whole

    def token(self, params: SamplingParams, position: int) -> int:
        """The side's own sample, by its request's parameters."""
        if self._token is None:
            self._token = sample(filter_top(self.whole, params), params, position)
        return self._token

    def second(self, params: SamplingParams, position: int, *, within: float) -> int | None:
        """The id that would be sampled if `token` were not; None where it scores more than so many nats below it, or
        filters have changed the order. Read from `known`: right enough for drafts."""
        ids = self.known.ids[top_by_score(self.known, params, position, 2)].tolist()
        if len(ids) < 2 or ids[0] != self.token(params, position):
            return None
        return int(ids[1]) if best_margin(self.known, params, position, ids) <= within else None


# The interface of the aggregators `mixture`, `coin` and `paper`, and what the two sides send each other under one.
#
# Every target is a function of the seed, the position, both distributions and the weights alone, whichever side
# aggregates: a hand-over changes no token.


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


class Aggregator(ABC):
    """Aggregator of one request. `own` is a side's mixture over its documents, `dist` as much of it, or of the peer's,
    as is known."""

    sends_choices: ClassVar[bool] = False  # a side sends what it would choose after a prefix, and no distribution
    reads_heads: ClassVar[bool] = True  # the head of a side's own distribution suffices for most targets

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling

    @abstractmethod
    def to_wire(self, side: Side, own: OwnDist, position: int, level: int = 0) -> PeerDist:
        """The part of its distribution that `side` sends. level: 0 to `LAST_LEVEL`."""

    @abstractmethod
    def from_wire(
        self, side: Side, head: Dist | None, choice: int | None, position: int, level: int
    ) -> PeerDist | None:
        """Rebuild what `side` sent from the payload; None if the payload is unusable, which is treated as lost."""

    @abstractmethod
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

    def draft_tokens(
        self, side: Side, dist: Dist, weights: Mapping[Side, float] | None, position: int, count: int
    ) -> list[int]:
        """At most `count` distinct draft tokens of this side after this prefix, best first."""
        final = filter_top(dist, self._sampling)
        places = top_by_score(final, self._sampling, position, count)
        return [int(token) for token in final.ids[places[final.probs[places] > 0.0]]]


def lane_of(token: int, dists: Mapping[Side, Dist]) -> Side | None:
    """The side whose documents decided the target; None if both sides find it about equally likely.

    A token missing from a head counts as probability 0, so near the boundary (`CLEAR_MARGIN`) the two sides may get
    different lanes; their tokens never differ.
    """
    probs = {side: dist.prob(token) for side, dist in dists.items()}
    best = max(probs, key=lambda side: probs[side])
    rest = max((prob for side, prob in probs.items() if side != best), default=0.0)
    return best if probs[best] >= CLEAR_MARGIN * rest else None


# `coin`: the target is the token of one side, picked by a coin weighted with eta.
#
# The target follows the mixture, and neither side sends a distribution. Both sides sample with the same noise, so that
# their tokens mostly agree whichever side is picked. Each side applies top-k, top-p and min-p to its own distribution,
# before the mixture. At temperature 0 the target is a random choice between two argmaxes, so `default_aggregator`
# never picks `coin` there.


class Coin(Aggregator):
    sends_choices: ClassVar[bool] = True

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
        return super().draft_tokens(side, dist, weights, position, count)

    def flip(self, weights: Mapping[Side, float], position: int) -> Side:
        """The side that the coin picks; never one of weight 0."""
        return "cloud" if uniform(self._sampling.seed, position, "coin") < weights["cloud"] else "device"


# `mixture`: the target is argmax(log p + G) of the mixture of both sides' distributions (DRAGON eq. 4).
#
# Exact although a side sends only the head of its distribution: `exactness` tests whether the head determines the
# token; if it does not, a larger head is requested. In a vocabulary of more than `HEADS[LAST_LEVEL]` ids even the last
# level may not determine it; then both distributions are cut to what that level sends, so that both sides would still
# decide alike. Only in that case may ids beyond the first 16,384 make the target differ from that of the whole rows.


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


class Mixture(Aggregator):
    """needs_dists: the target's distribution is needed too, so heads are ranked by probability and contain 99.9 %.
    Must be equal on both sides: it determines which bound a head's last id sets for the missing ones.
    vocab_size: allows a side without a distribution of its own to test exactness.
    """

    def __init__(self, sampling: SamplingParams, *, needs_dists: bool = False, vocab_size: int | None = None) -> None:
        super().__init__(sampling)
        self._needs_dists, self._vocab_size = needs_dists, vocab_size
        self._ranking: Ranking = "probability" if needs_dists else "score"
        self._negligible = NEGLIGIBLE_FILTERED if sampling.filters or needs_dists else NEGLIGIBLE_WEIGHT

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
        return settled_token(own, self._truncated(theirs, weight), self._sampling, position)

    def _truncated(self, theirs: PeerDist, weight: float) -> TruncatedRow:
        assert theirs.head is not None
        return TruncatedRow(theirs.head, weight, ROUNDING if theirs.level == 0 else 0.0, self._ranking)

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
        exact = own
        if own is None and self._vocab_size is not None:  # a side without weight
            exact = Dist.dense(np.zeros(self._vocab_size))
        if _whole(head, theirs.level, None if exact is None else len(exact.ids)):
            head = Dist(head.ids, head.probs)  # its tail is only rounding
        elif exact is None or not sample_is_exact(
            exact, self._truncated(theirs, weights[peer]), self._sampling, position
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

    def _small_head(self, own: RowHead, position: int) -> Dist | None:
        """Level 0 from the own head; None where that does not contain the first ids of the ranking.

        Its probabilities may be too high by float32's rounding, which no bound on the other side allows for, so they
        are lowered first.
        """
        if self._needs_dists:
            return None
        count = HEADS[0] if self._sampling.filters else OPEN_HEAD
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
        if level == 0 and not self._sampling.filters:
            size = OPEN_HEAD
        by_probability = self._needs_dists or self._sampling.temperature == 0.0
        places = top_by_score(dist, _GREEDY if by_probability else self._sampling, position, size)
        if level == 0:
            scores = scores_at(dist, self._sampling, position, places)
            places = _pruned(dist, places, scores, self._negligible)
        return dist.kept_at(np.sort(places))


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


# `paper`: DRAGON's Algorithm 1, with every draw and coin a function of seed, position and purpose.
#
# Each side drafts from its own distribution, with noise of its own. Each draft is accepted or resampled so that it
# follows the mixture, and one of the two is picked: the cloud's with probability gamma. The distributions are those
# that the sides send: each after top-k, top-p and min-p, cut to 99.9 % and 512 ids, rounded to 16 bits and
# renormalised, then mixed. With top-k, top-p or min-p, which apply before the mixture here, the target's distribution
# differs from that of `mixture`. At temperature 0 it is the argmax of the mixture, which `make_aggregator` makes.


class Dragon(Aggregator):
    """gamma: probability that the cloud's token is picked."""

    reads_heads: ClassVar[bool] = False

    def __init__(self, sampling: SamplingParams, *, gamma: float = 0.5) -> None:
        """sampling: at a temperature above 0."""
        super().__init__(sampling)
        self._gamma = gamma

    def to_wire(self, side: Side, own: OwnDist, position: int, level: int = 0) -> PeerDist:
        head = self._truncated(own.whole)
        return PeerDist(self._draft(side, head, position), head, level)

    def from_wire(
        self, side: Side, head: Dist | None, choice: int | None, position: int, level: int
    ) -> PeerDist | None:
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
        head = self._truncated(dist)
        draft = self._draft(side, head, position)
        likely = [token for token, _ in head.top(count) if token != draft]
        return [draft, *likely][:count]

    def _truncated(self, dist: Dist) -> Dist:
        return quantize(filter_top(dist, self._sampling), top_p=DIST_TOP_P, max_ids=DIST_MAX_IDS)

    def _draft(self, side: Side, dist: Dist, position: int) -> int:
        """The draft of that side, which both sides can compute from its distribution."""
        return drawn(renormalised(dist), uniform(self._sampling.seed, position, f"paper draft {side}"))

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
        return drawn(residual, uniform(seed, position, f"paper recover {side}"))


def make_aggregator(
    name: AggregatorName,
    sampling: SamplingParams,
    *,
    needs_dists: bool = False,
    gamma: float = 0.5,
    vocab_size: int | None = None,
) -> Aggregator:
    """The aggregator of one request; both sides must use the same values.

    needs_dists: the target's distribution is needed too, for logprobs; used by `mixture` only. gamma: of `paper`, the
    probability that the cloud's token is picked. vocab_size: saves a side without a distribution of its own from
    requesting the whole row.
    """
    match name:
        case "coin":
            return Coin(sampling)
        case "paper" if sampling.temperature > 0.0:
            return Dragon(sampling, gamma=gamma)
        case "mixture" | "paper":
            return Mixture(sampling, needs_dists=needs_dists, vocab_size=vocab_size)


def default_aggregator(sampling: SamplingParams, *, logprobs: bool, seeded: bool) -> AggregatorName:
    """The aggregator of a request that names none.

    `coin`, whose messages are smallest and whose drafts are accepted as often, unless the request rules it out: at
    temperature 0 the target is the mixture's argmax, which a coin between two argmaxes is not; logprobs need the
    mixture's distribution; top-k, top-p and min-p apply to the mixture, not to each side; and a seed promises the text
    of every other strategy, which is the mixture's with common noise. `paper` must be requested by name.
    """
    return "mixture" if sampling.temperature == 0.0 or logprobs or seeded or sampling.filters else "coin"
