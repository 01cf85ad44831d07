"""Is the token certain although one side sent only the head of its distribution? (specs of the truncated payload)

One side's row is known exactly; of the other some ids are known, and the mass of all others. No id left off can hold
more than the tail, nor rank before the last of those kept: by probability, or, since the noise is common, by
log p + G, which leaves far less open (`head_by_score`). With these bounds a choice often is certain; where it is not,
more of the row must be asked for. Never says yes wrongly as long as the kept ids are the first of that ranking.

`rounding`: by which share of itself a kept probability may be too low, as a payload that cuts bits off makes it. Never
too high: what it lost is in the tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from paceline.core.sampling.dist import Dist, IndexArray, ProbArray, best_indices
from paceline.core.sampling.noise import contenders, gumbel
from paceline.core.sampling.sampler import SamplingParams, filter_top, sample

_MANY = 64  # more rivals than this are not worth a closer look: the row is flat and will have to be asked for
_PROBE = 128  # of the most probable ids, to find out how high the bar is
_RANKED = 32  # first places of a ranking that are kept with their law: a head, a choice and guesses are all among them
_SMALL_TAIL = 1e-3  # with so little left off, what it could add to any id is the better bound
_MARGIN = 1e-12  # relative; sums of a vocabulary's probabilities are that good

Ranking = Literal["probability", "score"]


def top_by_score(dist: Dist, params: SamplingParams, position: int, k: int) -> IndexArray:
    """(min(k, n),) places of the ids whose log p + G is largest, falling: what `choose` would take first, second, ….

    At temperature 0, where G is 0, the most probable. Equals by rising place; ids of probability 0 come last.
    """
    if k > _RANKED:
        return _ranked(dist, params, position, k)
    key = "ranked", None if params.temperature == 0.0 else (params.seed, position)
    if key not in dist.memo:
        dist.memo[key] = _ranked(dist, params, position, _RANKED)
    return cast(IndexArray, dist.memo[key])[:k]


def _ranked(dist: Dist, params: SamplingParams, position: int, k: int) -> IndexArray:
    probs = dist.probs
    if params.temperature == 0.0:
        return best_indices(probs, k)
    if 0 < k <= _PROBE // 4 and len(probs) > _PROBE * 64:
        # The k-th best of the most probable is a bar that k reach for certain; few others can, and only these are seen.
        probe = best_indices(probs, _PROBE)
        bar = _scores(dist, params, position, probe[probs[probe] > 0.0])
        if len(bar) >= k:
            lowest = float(np.partition(bar, len(bar) - k)[len(bar) - k])
            places = contenders(params.seed, position, dist.ids, probs, lowest)
            return places[best_indices(_scores(dist, params, position, places), k)]
    places = np.flatnonzero(probs > 0.0)
    best = places[best_indices(_scores(dist, params, position, places), k)]
    if len(best) < min(k, len(probs)):
        best = np.concatenate([best, np.flatnonzero(probs <= 0.0)[: k - len(best)]])
    return best


def head_by_score(dist: Dist, params: SamplingParams, position: int, k: int) -> Dist:
    """The first k of `ranked`: what the other side's choice at this position most likely depends on.

    Without truncation the drafted token, `choose(dist)`, is always among them.
    """
    return dist if len(dist.ids) <= k else dist.kept_at(np.sort(top_by_score(dist, params, position, k)))


def _scores(dist: Dist, params: SamplingParams, position: int, places: IndexArray) -> ProbArray:
    """log p + G at these places, where p is positive."""
    return np.asarray(np.log(dist.probs[places]) + gumbel(params.seed, position, dist.ids[places]))


def greedy_is_exact(exact: Dist, truncated: Dist, *, weight: float, rounding: float = 0.0) -> bool:
    """Is the argmax of the mixture of these the argmax of the mixture with the untruncated row?

    exact: dense, without a tail. weight: of `truncated`; `exact` has the rest.
    """
    if _nothing_missing(exact, truncated, weight, rounding):
        return True
    bounds = _bounds(exact, truncated, _least(truncated), weight, rounding)
    if bounds is None:
        return False
    best = int(np.argmax(bounds.lower))
    above = bounds.upper >= bounds.lower[best] * (1.0 - _MARGIN)
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
    """Is `choose(truncate(mixture))` of these what the untruncated row would have given? At any temperature.

    ranking: which ids `truncated` has kept, the most probable or those of `head_by_score` for this position.
    """
    if params.temperature == 0.0:
        return greedy_is_exact(exact, truncated, weight=weight, rounding=rounding)
    if _nothing_missing(exact, truncated, weight, rounding):
        return True
    if params.top_k == 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _wins_the_race(exact, truncated, params, position, weight, rounding, ranking)
    caps: float | ProbArray = _least(truncated)
    if ranking == "score":
        caps = np.exp(_last(truncated, params, position) - gumbel(params.seed, position, exact.ids)) * (1.0 + _MARGIN)
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
    score = float(np.log(bounds.lower[token]) + gumbel(params.seed, position, chosen)[0]) - _MARGIN
    places = contenders(params.seed, position, mixed.ids, bounds.upper, score)
    places = places[places != token]
    reach = np.log(bounds.upper[places]) + gumbel(params.seed, position, mixed.ids[places])
    rivals = places[reach >= score]
    return len(rivals) <= _MANY and all(bounds.surely_cut(int(rival), params) for rival in rivals)


def _wins_the_race(
    exact: Dist,
    truncated: Dist,
    params: SamplingParams,
    position: int,
    weight: float,
    rounding: float,
    ranking: Ranking,
) -> bool:
    """`choice_certified` without top-k, top-p and min-p: only ids that can reach the best sure score are looked at."""
    if not _comparable(exact, truncated):
        return False
    ours = (1.0 - weight) * exact.probs
    kept, theirs = truncated.ids, weight * truncated.probs
    rest = max(truncated.tail, 0.0) + _MARGIN
    sure = np.append(kept, np.int32(np.argmax(ours)))
    with np.errstate(divide="ignore"):
        scores = np.log(ours[sure] + np.append(theirs, 0.0))
    best = float((scores + gumbel(params.seed, position, sure)).max())  # some id reaches this for certain
    cap = rest if ranking == "score" else min(_least(truncated) * (1.0 + rounding), rest)
    last = _last(truncated, params, position) if ranking == "score" else np.inf
    # Off the head log p + G is at most `last`, so there the noise drops out: ours * exp(G) must make up the rest.
    short = float(np.exp(min(best, 600.0))) - weight * float(np.exp(min(last, 600.0))) * (1.0 + rounding + _MARGIN)
    if short > 0.0 and rest > _SMALL_TAIL:
        places = contenders(params.seed, position, exact.ids, ours, float(np.log(short)))
    else:
        places = contenders(params.seed, position, exact.ids, ours + weight * cap, best)
    places = np.union1d(places, sure)
    noise = gumbel(params.seed, position, exact.ids[places])
    among = np.searchsorted(places, kept)
    caps = np.minimum(np.exp(np.minimum(last - noise, 600.0)) * (1.0 + rounding + _MARGIN), cap)
    lower = ours[places]
    upper = lower + weight * caps
    upper[among] = lower[among] + theirs * (1.0 + rounding)
    lower[among] += theirs
    with np.errstate(divide="ignore"):
        low, high = np.log(lower) + noise, np.log(upper) + noise
    winner = int(np.argmax(low))
    high[winner] = -np.inf
    return bool(low[winner] > high.max() + _MARGIN)


def _least(truncated: Dist) -> float:
    """What an id left off a head ranked by probability can hold at most. A probability rounded to 0 says nothing."""
    return float(truncated.probs[truncated.probs > 0.0].min(initial=1.0))


def _last(truncated: Dist, params: SamplingParams, position: int) -> float:
    """The score that no id left off a head ranked by score exceeds."""
    positive = truncated.probs > 0.0
    scores = np.log(truncated.probs[positive]) + gumbel(params.seed, position, truncated.ids[positive])
    return float(scores.min(initial=np.inf))


def _comparable(exact: Dist, truncated: Dist) -> bool:
    """Is the exact row whole, and are all ids of the other in it?"""
    ids = truncated.ids
    return exact.leading and exact.tail <= _MARGIN and (len(ids) == 0 or int(ids[-1]) < len(exact.ids))


def _nothing_missing(exact: Dist, truncated: Dist, weight: float, rounding: float) -> bool:
    whole = truncated.leading and len(truncated.ids) == len(exact.ids)
    return weight <= 0.0 or (whole and rounding == 0.0 and truncated.tail <= 0.0 and exact.tail <= 0.0)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What is sure of the mixture: for each id a lower and an upper bound, and how much mass is not placed."""

    lower: ProbArray  # (vocab,)
    upper: ProbArray  # (vocab,)
    missing: float

    def surely_kept(self, token: int, params: SamplingParams) -> bool:
        """Would top-k, top-p and min-p keep it, whatever the bounds leave open?"""
        cut_k, cut_p = 0 < params.top_k < len(self.lower), params.top_p < 1.0
        if cut_k or cut_p:
            before = self.upper >= self.lower[token] * (1.0 - _MARGIN)
            before[token] = False
            if cut_k and np.count_nonzero(before) >= params.top_k:
                return False
            mass = min(float(self.upper[before].sum()), float(self.lower[before].sum()) + self.missing)
            share = params.top_p * (self._head(params.top_k)[0] if cut_k else 1.0)
            if cut_p and mass >= share * (1.0 - _MARGIN) - _MARGIN:
                return False
        least = params.min_p * float(self.upper.max()) * (1.0 + _MARGIN)
        return params.min_p <= 0.0 or float(self.lower[token]) >= least

    def surely_cut(self, token: int, params: SamplingParams) -> bool:
        """Would one of them cut it, whatever the bounds leave open?"""
        cut_k, cut_p = 0 < params.top_k < len(self.lower), params.top_p < 1.0
        if float(self.upper[token]) < params.min_p * float(self.lower.max()) * (1.0 - _MARGIN):
            return True
        if not cut_k and not cut_p:
            return False
        before = self.lower > self.upper[token] * (1.0 + _MARGIN)
        if cut_k and np.count_nonzero(before) >= params.top_k:
            return True
        share = params.top_p * (self._head(params.top_k)[1] if cut_k else 1.0)
        return cut_p and float(self.lower[before].sum()) >= share * (1.0 + _MARGIN) + _MARGIN

    def _head(self, k: int) -> tuple[float, float]:
        """Between which the mass of the k most probable lies."""
        least = float(self.lower[best_indices(self.lower, k)].sum())
        most = float(self.upper[best_indices(self.upper, k)].sum())
        return least, min(most, least + self.missing, 1.0 + _MARGIN)


def _bounds(exact: Dist, truncated: Dist, caps: float | ProbArray, weight: float, rounding: float) -> _Bounds | None:
    """caps: what an id left off can hold at most, for all or for each of `exact.ids`.

    None when nothing can be said: the exact row is not whole, or the other has ids beyond it.
    """
    ids, probs = truncated.ids, truncated.probs
    if not _comparable(exact, truncated):
        return None
    tail = max(truncated.tail, 0.0) + _MARGIN
    lower = (1.0 - weight) * exact.probs
    upper = lower + weight * np.minimum(caps * (1.0 + rounding), tail)
    upper[ids] = lower[ids] + (weight * (1.0 + rounding)) * probs
    lower[ids] += weight * probs
    # What rounding took from the kept is in the tail too, so no more than the tail can be anywhere else.
    return _Bounds(lower, upper, weight * tail)
