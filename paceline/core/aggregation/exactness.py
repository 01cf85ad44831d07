"""Tests whether the head of one side's distribution determines the token (specs of the truncated payload).

One side's row is known exactly; of the other only the head and its tail's mass. A missing id cannot exceed the tail,
nor rank before the last id of the head: by probability, or, since the noise is common, by log p + G, which gives much
tighter bounds (`head_by_score`). Where these bounds do not determine the token, more of the row must be requested. No
false positives, provided the head consists of the first ids of that ranking.

`rounding`: relative error by which a probability of the head may be too low, because its payload truncates bits. It is
never too high: the lost mass is in the tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.core.sampling.dist import Dist, ProbArray, best_indices
from paceline.core.sampling.noise import contenders, gumbel
from paceline.core.sampling.ranking import top_by_score
from paceline.core.sampling.sampler import SamplingParams, filter_top, sample

_MAX_RIVALS = 64  # with more rivals the row is flat and has to be requested anyway
_SMALL_TAIL = 1e-3  # below this mass the tail itself is the tighter bound for each missing id
_TOLERANCE = 1e-12  # relative error of sums over a vocabulary's probabilities

Ranking = Literal["probability", "score"]


def head_by_score(dist: Dist, params: SamplingParams, position: int, k: int) -> Dist:
    """The first k ids of `top_by_score`, on which the target at this position most likely depends.

    Without top-k, top-p and min-p they include the side's draft, `sample(dist)`.
    """
    return dist if len(dist.ids) <= k else dist.kept_at(np.sort(top_by_score(dist, params, position, k)))


def greedy_is_exact(exact: Dist, truncated: Dist, *, weight: float, rounding: float = 0.0) -> bool:
    """True if the argmax of the mixture of the two is certainly that of the mixture with the whole row.

    exact: dense, without a tail. weight: of `truncated`; `exact` has the rest.
    """
    if _is_trivially_exact(exact, truncated, weight, rounding):
        return True
    bounds = _bounds(exact, truncated, _min_prob(truncated), weight, rounding)
    if bounds is None:
        return False
    best = int(np.argmax(bounds.lower))
    above = bounds.upper >= bounds.lower[best] * (1.0 - _TOLERANCE)
    above[best] = False
    return not above.any()


def sample_is_exact(
    exact: Dist,
    truncated: Dist,
    params: SamplingParams,
    position: int,
    *,
    weight: float,
    rounding: float = 0.0,
    ranking: Ranking = "probability",
) -> bool:
    """True if `sample(filter_top(mixture))` of the two is certainly that of the whole row. At any temperature.

    ranking: of the ids in `truncated`: the most probable, or those of `head_by_score` at this position.
    """
    if params.temperature == 0.0:
        return greedy_is_exact(exact, truncated, weight=weight, rounding=rounding)
    if _is_trivially_exact(exact, truncated, weight, rounding):
        return True
    if params.top_k == 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _sample_is_exact_unfiltered(exact, truncated, params, position, weight, rounding, ranking)
    caps: float | ProbArray = _min_prob(truncated)
    if ranking == "score":
        caps = np.exp(_min_score(truncated, params, position) - gumbel(params.seed, position, exact.ids)) * (
            1.0 + _TOLERANCE
        )
    bounds = _bounds(exact, truncated, caps, weight, rounding)
    if bounds is None:
        return False
    if not (bounds.lower > 0.0).any():
        return False
    mixed = Dist(exact.ids, bounds.lower, bounds.missing)
    token = sample(filter_top(mixed, params), params, position)
    if bounds.lower[token] <= 0.0 or not bounds.surely_kept(token, params):
        return False
    chosen = mixed.ids[token : token + 1]
    score = float(np.log(bounds.lower[token]) + gumbel(params.seed, position, chosen)[0]) - _TOLERANCE
    places = contenders(params.seed, position, mixed.ids, bounds.upper, score)
    places = places[places != token]
    reach = np.log(bounds.upper[places]) + gumbel(params.seed, position, mixed.ids[places])
    rivals = places[reach >= score]
    return len(rivals) <= _MAX_RIVALS and all(bounds.surely_dropped(int(rival), params) for rival in rivals)


def _sample_is_exact_unfiltered(
    exact: Dist,
    truncated: Dist,
    params: SamplingParams,
    position: int,
    weight: float,
    rounding: float,
    ranking: Ranking,
) -> bool:
    """`sample_is_exact` without top-k, top-p and min-p: scores only ids that can reach the best lower bound."""
    if not _comparable(exact, truncated):
        return False
    ours = (1.0 - weight) * exact.probs
    kept, theirs = truncated.ids, weight * truncated.probs
    tail = max(truncated.tail, 0.0) + _TOLERANCE
    sure = np.append(kept, np.int32(np.argmax(ours)))
    with np.errstate(divide="ignore"):
        scores = np.log(ours[sure] + np.append(theirs, 0.0))
    best = float((scores + gumbel(params.seed, position, sure)).max())  # some id certainly reaches this
    cap = tail if ranking == "score" else min(_min_prob(truncated) * (1.0 + rounding), tail)
    last = _min_score(truncated, params, position) if ranking == "score" else np.inf
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


def _min_prob(truncated: Dist) -> float:
    """Upper bound for an id missing from a head ranked by probability. Probabilities rounded to 0 give no bound."""
    return float(truncated.probs[truncated.probs > 0.0].min(initial=1.0))


def _min_score(truncated: Dist, params: SamplingParams, position: int) -> float:
    """Upper bound of log p + G for an id missing from a head ranked by score."""
    positive = truncated.probs > 0.0
    scores = np.log(truncated.probs[positive]) + gumbel(params.seed, position, truncated.ids[positive])
    return float(scores.min(initial=np.inf))


def _comparable(exact: Dist, truncated: Dist) -> bool:
    """True if the exact row is whole and contains all ids of the other."""
    ids = truncated.ids
    return exact.leading and exact.tail <= _TOLERANCE and (len(ids) == 0 or int(ids[-1]) < len(exact.ids))


def _is_trivially_exact(exact: Dist, truncated: Dist, weight: float, rounding: float) -> bool:
    whole = truncated.leading and len(truncated.ids) == len(exact.ids)
    return weight <= 0.0 or (whole and rounding == 0.0 and truncated.tail <= 0.0 and exact.tail <= 0.0)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Bounds of the mixture's probabilities, and the mass that cannot be assigned to ids."""

    lower: ProbArray  # (vocab,)
    upper: ProbArray  # (vocab,)
    missing: float

    def surely_kept(self, token: int, params: SamplingParams) -> bool:
        """True if top-k, top-p and min-p keep the token for all probabilities within the bounds."""
        uses_k, uses_p = 0 < params.top_k < len(self.lower), params.top_p < 1.0
        if uses_k or uses_p:
            before = self.upper >= self.lower[token] * (1.0 - _TOLERANCE)
            before[token] = False
            if uses_k and np.count_nonzero(before) >= params.top_k:
                return False
            mass = min(float(self.upper[before].sum()), float(self.lower[before].sum()) + self.missing)
            share = params.top_p * (self._top_mass(params.top_k)[0] if uses_k else 1.0)
            if uses_p and mass >= share * (1.0 - _TOLERANCE) - _TOLERANCE:
                return False
        floor = params.min_p * float(self.upper.max()) * (1.0 + _TOLERANCE)
        return params.min_p <= 0.0 or float(self.lower[token]) >= floor

    def surely_dropped(self, token: int, params: SamplingParams) -> bool:
        """True if top-k, top-p or min-p drops the token for all probabilities within the bounds."""
        uses_k, uses_p = 0 < params.top_k < len(self.lower), params.top_p < 1.0
        if float(self.upper[token]) < params.min_p * float(self.lower.max()) * (1.0 - _TOLERANCE):
            return True
        if not uses_k and not uses_p:
            return False
        before = self.lower > self.upper[token] * (1.0 + _TOLERANCE)
        if uses_k and np.count_nonzero(before) >= params.top_k:
            return True
        share = params.top_p * (self._top_mass(params.top_k)[1] if uses_k else 1.0)
        return uses_p and float(self.lower[before].sum()) >= share * (1.0 + _TOLERANCE) + _TOLERANCE

    def _top_mass(self, k: int) -> tuple[float, float]:
        """Lower and upper bound for the mass of the k most probable ids."""
        lower = float(self.lower[best_indices(self.lower, k)].sum())
        upper = float(self.upper[best_indices(self.upper, k)].sum())
        return lower, min(upper, lower + self.missing, 1.0 + _TOLERANCE)


def _bounds(exact: Dist, truncated: Dist, caps: float | ProbArray, weight: float, rounding: float) -> _Bounds | None:
    """Bounds of the mixture. caps: upper bound for a missing id, one for all or one for each of `exact.ids`.

    None if there are no bounds: the exact row is not whole, or the other has ids beyond it.
    """
    ids, probs = truncated.ids, truncated.probs
    if not _comparable(exact, truncated):
        return None
    tail = max(truncated.tail, 0.0) + _TOLERANCE
    lower = (1.0 - weight) * exact.probs
    upper = lower + weight * np.minimum(caps * (1.0 + rounding), tail)
    upper[ids] = lower[ids] + (weight * (1.0 + rounding)) * probs
    lower[ids] += weight * probs
    # The mass that rounding took from the head is in the tail too, so the tail bounds all that is misplaced.
    return _Bounds(lower, upper, weight * tail)
