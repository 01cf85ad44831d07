"""Tests whether the heads of both sides' distributions determine the token of their mixture.

Neither row is known as a whole, so a choice costs a few hundred ids in place of two vocabularies. An id that a head
lacks is bounded by the head's last score, its least probability and its tail's mass (`core.sampling.row_head`,
`exactness`). Where these bounds do not determine the token, the own row must be read as a whole (`exactness`), or more
of the peer's requested. No false positives: bounds allow for the rounding of both heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.core.aggregation.exactness import Ranking
from paceline.core.sampling.dist import Dist, IdArray, ProbArray
from paceline.core.sampling.noise import gumbel
from paceline.core.sampling.row_head import HEAD_ERROR, RowHead
from paceline.core.sampling.sampler import SamplingParams

_MAX_EXPONENT = 600.0  # exp of it is finite


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Bounds of one side's probabilities: of the mixture's ids, and of all that neither head has."""

    lower: ProbArray  # (ids,)
    upper: ProbArray  # (ids,)
    max_score: float  # of ids in neither head: log p + G
    max_prob: float
    tail: float  # mass of the ids that this side's head lacks


def settled_token(
    own: RowHead,
    theirs: Dist,
    params: SamplingParams,
    position: int,
    *,
    weight: float,
    rounding: float = 0.0,
    ranking: Ranking = "probability",
) -> int | None:
    """`sample(filter_top(mixture))` of the whole rows, where the heads determine it; else None.

    theirs, rounding, ranking: as of `exactness.sample_is_exact`; at temperature 0 always ranked by probability.
    weight: of `theirs`, between 0 and 1.
    """
    greedy = params.temperature == 0.0
    if not len(theirs.ids) or (ranking == "probability" and not greedy):
        return None  # nothing bounds the scores of ids that a head ranked by probability lacks
    ids = np.union1d(own.dist.ids, theirs.ids)
    noise = np.zeros(len(ids)) if greedy else gumbel(params.seed, position, ids)
    ours = _own_side(own, ids, noise)
    peer = _peer_side(theirs, ids, noise, rounding, ranked_by_prob=greedy)
    lower = (1.0 - weight) * ours.lower + weight * peer.lower
    upper = (1.0 - weight) * ours.upper + weight * peer.upper
    rest = (1.0 - weight) * math.exp(ours.max_score) + weight * math.exp(peer.max_score)
    with np.errstate(divide="ignore"):
        low, high = np.log(lower) + noise, np.log(upper) + noise
    bounds = _Bounds(
        lower,
        upper,
        missing=(1.0 - weight) * ours.tail + weight * peer.tail,
        max_prob=(1.0 - weight) * ours.max_prob + weight * peer.max_prob,
    )
    best = _first_kept(bounds, high, params)
    if best is None or not low[best] > math.log(max(rest, 1e-300)):
        return None
    for rival in np.flatnonzero(high >= low[best]):
        if rival != best and not bounds.surely_dropped(int(rival), params):
            return None
    return int(ids[best])


def _first_kept(bounds: _Bounds, high: ProbArray, params: SamplingParams) -> int | None:
    """The id with the best score of those that are not surely dropped, if it is surely kept."""
    for candidate in np.argsort(-high, kind="stable").tolist():
        if bounds.surely_kept(candidate, params):
            return int(candidate)
        if not bounds.surely_dropped(candidate, params):
            return None
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Bounds:
    """Bounds of the mixture's probabilities: of the ids in either head, and of all others."""

    lower: ProbArray  # (ids,)
    upper: ProbArray  # (ids,)
    missing: float  # mass that is not in `lower`
    max_prob: float  # of an id in neither head

    def surely_kept(self, at: int, params: SamplingParams) -> bool:
        """True if top-k, top-p and min-p keep this id for all rows within the bounds."""
        least = float(self.lower[at])
        if not least > 0.0:
            return False
        before = self.upper >= least
        before[at] = False
        count, mass = int(np.count_nonzero(before)), float(self.upper[before].sum())
        if self.max_prob >= least:  # ids in neither head may come before it too
            count += int(self.missing / least)
            mass = min(mass, float(self.lower[before].sum())) + self.missing
        if params.top_k > 0 and count >= params.top_k:
            return False
        if params.top_p < 1.0 and mass >= params.top_p * (self._top_mass(params.top_k)[0] - HEAD_ERROR):
            return False
        return params.min_p <= 0.0 or least >= params.min_p * max(float(self.upper.max()), self.max_prob)

    def surely_dropped(self, at: int, params: SamplingParams) -> bool:
        """True if top-k, top-p or min-p drops this id for all rows within the bounds."""
        most = float(self.upper[at])
        if most < params.min_p * float(self.lower.max()):
            return True
        before = self.lower > most
        if params.top_k > 0 and int(np.count_nonzero(before)) >= params.top_k:
            return True
        share = params.top_p * (self._top_mass(params.top_k)[1] + HEAD_ERROR)
        return params.top_p < 1.0 and float(self.lower[before].sum()) >= share

    def _top_mass(self, k: int) -> tuple[float, float]:
        """Lower and upper bound for the mass of the k most probable ids; of all for k 0."""
        if k == 0:
            return 1.0, 1.0
        least = float(np.sort(self.lower)[-k:].sum())
        return least, min(float(np.sort(self.upper)[-k:].sum()) + k * self.max_prob, least + self.missing, 1.0)


def _own_side(own: RowHead, ids: IdArray, noise: ProbArray) -> _Side:
    tail = 0.0 if own.whole else max(own.dist.tail, 0.0) + HEAD_ERROR
    max_prob = min(own.max_prob * (1.0 + HEAD_ERROR), tail)
    max_score = own.max_score + HEAD_ERROR
    return _side(own.dist, ids, noise, max_score, max_prob, tail, 1.0 - HEAD_ERROR, 1.0 + HEAD_ERROR)


def _peer_side(theirs: Dist, ids: IdArray, noise: ProbArray, rounding: float, *, ranked_by_prob: bool) -> _Side:
    known = theirs.probs > 0.0  # ids that rounding has made 0 bound nothing
    among = np.searchsorted(ids, theirs.ids)
    above = 1.0 + rounding + HEAD_ERROR
    tail = max(theirs.tail, 0.0) + HEAD_ERROR
    scores = np.log(theirs.probs[known]) + noise[among[known]]
    max_score = float(scores.min(initial=math.inf)) + math.log(above)
    max_prob = min(math.exp(min(max_score, 0.0)), tail) if ranked_by_prob else tail
    return _side(theirs, ids, noise, max_score, max_prob, tail, 1.0 - HEAD_ERROR, above)


def _side(
    head: Dist,
    ids: IdArray,
    noise: ProbArray,
    max_score: float,
    max_prob: float,
    tail: float,
    below: float,
    above: float,
) -> _Side:
    among = np.searchsorted(ids, head.ids)
    upper = np.minimum(np.exp(np.minimum(max_score - noise, _MAX_EXPONENT)), max_prob)
    lower = np.zeros(len(ids))
    lower[among] = head.probs * below
    upper[among] = np.where(head.probs > 0.0, head.probs * above, upper[among])
    return _Side(lower, upper, min(max_score, _MAX_EXPONENT), max_prob, tail)
