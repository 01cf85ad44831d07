"""Tests whether the head of one side's distribution determines the token.

One side's row is known exactly; of the other only the head and its tail's mass. A missing id cannot exceed the tail,
nor rank before the last id of the head: by probability, or, since the noise is common, by log p + G, which gives much
tighter bounds. Where these bounds do not determine the token, more of the row must be requested. No false
positives, provided the head consists of the first ids of that ranking.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.core.sampling.dist import Dist, IdArray, ProbArray, best_indices, contenders, gumbel
from paceline.core.sampling.sampler import HEAD_ERROR, RowHead, SamplingParams, filter_top, sample, scores_at

_MAX_RIVALS = 64  # with more rivals the row is flat and has to be requested anyway
_SMALL_TAIL = 1e-3  # below this mass the tail itself is the tighter bound for each missing id
_TOLERANCE = 1e-12  # relative error of sums over a vocabulary's probabilities

Ranking = Literal["probability", "score"]


@dataclass(frozen=True, slots=True, eq=False)
class TruncatedRow:
    """The other side's row, as far as it is known here."""

    head: Dist
    weight: float  # in the mixture; the row that is known exactly has the rest
    # Relative error by which a probability of the head may be too low, because its payload truncates bits. It is never
    # too high: the lost mass is in the tail.
    rounding: float = 0.0
    # Of the head's ids: the most probable, or, at a temperature above 0, the first of `top_by_score` at this position.
    ranking: Ranking = "probability"


def sample_is_exact(exact: Dist, truncated: TruncatedRow, params: SamplingParams, position: int) -> bool:
    """True if `sample(filter_top(mixture))` of the two is certainly that of the mixture with the whole row.

    exact: dense, without a tail.
    """
    head = truncated.head
    is_whole = head.leading and len(head.ids) == len(exact.ids) and head.tail <= 0.0 and exact.tail <= 0.0
    if truncated.weight <= 0.0 or (is_whole and truncated.rounding == 0.0):
        return True
    if not _comparable(exact, head):
        return False
    greedy = params.temperature == 0.0
    if not greedy and not params.filters:
        return _sample_is_exact_unfiltered(exact, truncated, params, position)
    caps: float | ProbArray = _min_prob(head)
    if truncated.ranking == "score" and not greedy:
        caps = np.exp(_min_score(head, params, position) - gumbel(params.seed, position, exact.ids)) * (
            1.0 + _TOLERANCE
        )
    bounds = _bounds(exact, truncated, caps)
    if not (bounds.lower > 0.0).any():
        return False
    if greedy:
        best = int(np.argmax(bounds.lower))
        return int(np.count_nonzero(bounds.upper >= bounds.lower[best] * (1.0 - _TOLERANCE))) == 1
    mixed = Dist(exact.ids, bounds.lower, bounds.missing)
    token = sample(filter_top(mixed, params), params, position)
    if not bounds.surely_kept(token, params):
        return False
    chosen = mixed.ids[token : token + 1]
    score = float(np.log(bounds.lower[token]) + gumbel(params.seed, position, chosen)[0]) - _TOLERANCE
    places = contenders(params.seed, position, mixed.ids, bounds.upper, score)
    places = places[places != token]
    reach = np.log(bounds.upper[places]) + gumbel(params.seed, position, mixed.ids[places])
    rivals = places[reach >= score]
    return len(rivals) <= _MAX_RIVALS and all(bounds.surely_dropped(int(rival), params) for rival in rivals)


def _sample_is_exact_unfiltered(exact: Dist, truncated: TruncatedRow, params: SamplingParams, position: int) -> bool:
    """`sample_is_exact` without top-k, top-p and min-p: scores only ids that can reach the best lower bound."""
    head, weight, rounding = truncated.head, truncated.weight, truncated.rounding
    ours = (1.0 - weight) * exact.probs
    kept, theirs = head.ids, weight * head.probs
    tail = max(head.tail, 0.0) + _TOLERANCE
    sure = np.append(kept, np.int32(np.argmax(ours)))
    with np.errstate(divide="ignore"):
        scores = np.log(ours[sure] + np.append(theirs, 0.0))
    best = float((scores + gumbel(params.seed, position, sure)).max())  # some id certainly reaches this
    by_score = truncated.ranking == "score"
    cap = tail if by_score else min(_min_prob(head) * (1.0 + rounding), tail)
    last = _min_score(head, params, position) if by_score else np.inf
    # Outside the head log p + G is at most `last`, a bound without noise: ours * exp(G) must cover the difference.
    short = float(np.exp(min(best, 600.0))) - weight * float(np.exp(min(last, 600.0))) * (1.0 + rounding + _TOLERANCE)
    if short > 0.0 and tail > _SMALL_TAIL:
        places = contenders(params.seed, position, exact.ids, ours, float(np.log(short)))
    else:
        places = contenders(params.seed, position, exact.ids, ours + weight * cap, best)
    places = np.union1d(places, sure)
    noise = gumbel(params.seed, position, exact.ids[places])
    among = np.searchsorted(places, kept)
    caps = np.minimum(np.exp(np.minimum(last - noise, 600.0)) * (1.0 + rounding + _TOLERANCE), cap)
    lower = ours[places]
    upper = lower + weight * caps
    upper[among] = lower[among] + theirs * (1.0 + rounding)
    lower[among] += theirs
    with np.errstate(divide="ignore"):
        low, high = np.log(lower) + noise, np.log(upper) + noise
    winner = int(np.argmax(low))
    high[winner] = -np.inf
    return bool(low[winner] > high.max() + _TOLERANCE)


def _min_prob(head: Dist) -> float:
    """Upper bound for an id missing from a head ranked by probability. Probabilities rounded to 0 give no bound."""
    return float(head.probs[head.probs > 0.0].min(initial=1.0))


def _min_score(head: Dist, params: SamplingParams, position: int) -> float:
    """Upper bound of log p + G for an id missing from a head ranked by score."""
    scores = scores_at(head, params, position, np.flatnonzero(head.probs > 0.0))
    return float(scores.min(initial=np.inf))


def _comparable(exact: Dist, head: Dist) -> bool:
    """True if the exact row is whole and contains all ids of the other."""
    ids = head.ids
    return exact.leading and exact.tail <= _TOLERANCE and (len(ids) == 0 or int(ids[-1]) < len(exact.ids))


@dataclass(frozen=True, slots=True, eq=False)
class _Bounds:
    """Bounds of the mixture's probabilities: of some ids, and of all others."""

    lower: ProbArray  # (ids,)
    upper: ProbArray  # (ids,)
    missing: float  # mass that is not in `lower`
    max_prob: float = 0.0  # of any other id; 0: there are none
    error: float = 2.0 * _TOLERANCE  # of sums

    def surely_kept(self, at: int, params: SamplingParams) -> bool:
        """True if top-k, top-p and min-p keep this id for all probabilities within the bounds."""
        least = float(self.lower[at])
        if not least > 0.0:
            return False
        before = self.upper >= least * (1.0 - _TOLERANCE)
        before[at] = False
        count, mass = int(np.count_nonzero(before)), float(self.lower[before].sum()) + self.missing + self.error
        if self.max_prob >= least:  # others may come before it too
            count += int(self.missing / least)
        else:
            mass = min(mass, float(self.upper[before].sum()))
        if params.top_k > 0 and count >= params.top_k:
            return False
        if params.top_p < 1.0 and mass >= params.top_p * (self._top_mass(params.top_k)[0] - self.error):
            return False
        largest = max(float(self.upper.max()), self.max_prob)
        return params.min_p <= 0.0 or least >= params.min_p * largest * (1.0 + _TOLERANCE)

    def surely_dropped(self, at: int, params: SamplingParams) -> bool:
        """True if top-k, top-p or min-p drops this id for all probabilities within the bounds."""
        most = float(self.upper[at])
        if most < params.min_p * float(self.lower.max()) * (1.0 - _TOLERANCE):
            return True
        before = self.lower > most * (1.0 + _TOLERANCE)
        if params.top_k > 0 and int(np.count_nonzero(before)) >= params.top_k:
            return True
        share = params.top_p * (self._top_mass(params.top_k)[1] + self.error)
        return params.top_p < 1.0 and float(self.lower[before].sum()) >= share

    def _top_mass(self, k: int) -> tuple[float, float]:
        """Lower and upper bound for the mass of the k most probable ids; of all for k 0."""
        if k == 0 or (k >= len(self.lower) and not self.max_prob):
            return 1.0, 1.0
        lower = float(self.lower[best_indices(self.lower, k)].sum())
        upper = float(self.upper[best_indices(self.upper, k)].sum()) + k * self.max_prob
        return lower, min(upper, lower + self.missing, 1.0 + _TOLERANCE)


def _bounds(exact: Dist, truncated: TruncatedRow, caps: float | ProbArray) -> _Bounds:
    """Bounds of the mixture. caps: upper bound for a missing id, one for all or one for each of `exact.ids`."""
    ids, probs, weight, rounding = truncated.head.ids, truncated.head.probs, truncated.weight, truncated.rounding
    tail = max(truncated.head.tail, 0.0) + _TOLERANCE
    lower = (1.0 - weight) * exact.probs
    upper = lower + weight * np.minimum(caps * (1.0 + rounding), tail)
    upper[ids] = lower[ids] + (weight * (1.0 + rounding)) * probs
    lower[ids] += weight * probs
    # The mass that rounding took from the head is in the tail too, so the tail bounds all that is misplaced.
    return _Bounds(lower, upper, weight * tail)


# Tests whether the heads of both sides' distributions determine the token of their mixture.
#
# Neither row is known as a whole, so a choice costs a few hundred ids in place of two vocabularies. An id that a head
# lacks is bounded by the head's last score, its least probability and its tail's mass. Where these bounds do not
# determine the token, the own row must be read as a whole (`sample_is_exact`), or more of the peer's requested. No
# false positives: bounds allow for the rounding of both heads.


_MAX_EXPONENT = 600.0  # exp of it is finite


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Bounds of one side's probabilities: of the mixture's ids, and of all that neither head has."""

    lower: ProbArray  # (ids,)
    upper: ProbArray  # (ids,)
    max_score: float  # of ids in neither head: log p + G
    max_prob: float
    tail: float  # mass of the ids that this side's head lacks


def settled_token(own: RowHead, theirs: TruncatedRow, params: SamplingParams, position: int) -> int | None:
    """`sample(filter_top(mixture))` of the whole rows, where the heads determine it; else None.

    theirs: of a weight between 0 and 1; at temperature 0 always ranked by probability.
    """
    greedy, weight = params.temperature == 0.0, theirs.weight
    if not len(theirs.head.ids) or (theirs.ranking == "probability" and not greedy):
        return None  # nothing bounds the scores of ids that a head ranked by probability lacks
    ids = np.union1d(own.dist.ids, theirs.head.ids)
    noise = np.zeros(len(ids)) if greedy else gumbel(params.seed, position, ids)
    ours = _own_side(own, ids, noise)
    peer = _peer_side(theirs.head, ids, noise, theirs.rounding, ranked_by_prob=greedy)
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
        error=HEAD_ERROR,
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


def _own_side(own: RowHead, ids: IdArray, noise: ProbArray) -> _Side:
    tail = 0.0 if own.whole else max(own.dist.tail, 0.0) + HEAD_ERROR
    max_prob = min(own.max_prob * (1.0 + HEAD_ERROR), tail)
    max_score = own.max_score + HEAD_ERROR
    return _side(own.dist, ids, noise, max_score, max_prob, tail, 1.0 + HEAD_ERROR)


def _peer_side(theirs: Dist, ids: IdArray, noise: ProbArray, rounding: float, *, ranked_by_prob: bool) -> _Side:
    known = theirs.probs > 0.0  # ids that rounding has made 0 bound nothing
    among = np.searchsorted(ids, theirs.ids)
    above = 1.0 + rounding + HEAD_ERROR
    tail = max(theirs.tail, 0.0) + HEAD_ERROR
    scores = np.log(theirs.probs[known]) + noise[among[known]]
    max_score = float(scores.min(initial=math.inf)) + math.log(above)
    max_prob = min(math.exp(min(max_score, 0.0)), tail) if ranked_by_prob else tail
    return _side(theirs, ids, noise, max_score, max_prob, tail, above)


def _side(
    head: Dist, ids: IdArray, noise: ProbArray, max_score: float, max_prob: float, tail: float, above: float
) -> _Side:
    """above: factor by which a probability of the head may be too low."""
    among = np.searchsorted(ids, head.ids)
    upper = np.minimum(np.exp(np.minimum(max_score - noise, _MAX_EXPONENT)), max_prob)
    lower = np.zeros(len(ids))
    lower[among] = head.probs * (1.0 - HEAD_ERROR)
    upper[among] = np.where(head.probs > 0.0, head.probs * above, upper[among])
    return _Side(lower, upper, min(max_score, _MAX_EXPONENT), max_prob, tail)
