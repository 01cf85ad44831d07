"""Ids of a row in the order in which `sample` prefers them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from paceline.core.sampling.dist import Dist, IndexArray, ProbArray, best_indices
from paceline.core.sampling.noise import contenders, gumbel, gumbel_of
from paceline.core.sampling.sampler import SamplingParams

_PROBE = 128  # the most probable ids that are scored first, for a lower bound of the k-th best score
_NUM_CACHED = 32  # first ids of a ranking that are cached in its distribution: enough for heads, the sample and drafts


def top_by_score(dist: Dist, params: SamplingParams, position: int, k: int) -> IndexArray:
    """(min(k, n),) indices of the ids with the largest log p + G, falling: the order in which `sample` prefers them.

    At temperature 0, where G is 0, the most probable. Equals by rising index; ids of probability 0 come last.
    """
    if k > _NUM_CACHED:
        return _ranked(dist, params, position, k)
    key = _key(params, position)
    if key not in dist.memo:
        dist.memo[key] = _ranked(dist, params, position, _NUM_CACHED)
    return cast(IndexArray, dist.memo[key])[:k]


def best_margin(dist: Dist, params: SamplingParams, position: int, tokens: Sequence[int]) -> float:
    """Score of the first of these tokens less that of the second, nats; infinite for a single one."""
    if len(tokens) < 2:
        return math.inf
    first, second = (max(dist.prob(token), 1e-300) for token in tokens[:2])
    margin = math.log(first) - math.log(second)
    if params.temperature > 0.0:
        noise, next_noise = gumbel_of(params.seed, position, tokens[:2])
        margin += noise - next_noise
    return margin


def set_ranking(dist: Dist, params: SamplingParams, position: int, best: IndexArray) -> None:
    """Set what `top_by_score` returns, where it is known. best: as many as are cached, or all of `dist`."""
    if len(best) >= min(_NUM_CACHED, len(dist.ids)):
        dist.memo[_key(params, position)] = best


def _key(params: SamplingParams, position: int) -> tuple[str, tuple[int, int] | None]:
    return "ranked", None if params.temperature == 0.0 else (params.seed, position)


def _ranked(dist: Dist, params: SamplingParams, position: int, k: int) -> IndexArray:
    probs = dist.probs
    if params.temperature == 0.0:
        return best_indices(probs, k)
    if 0 < k <= _PROBE // 4 and len(probs) > _PROBE * 64:
        # At least k ids reach the k-th best score of the most probable ones, and few others can: only those are scored.
        probe = best_indices(probs, _PROBE)
        probed = _scores(dist, params, position, probe[probs[probe] > 0.0])
        if len(probed) >= k:
            lowest = float(np.partition(probed, len(probed) - k)[len(probed) - k])
            places = contenders(params.seed, position, dist.ids, probs, lowest)
            return places[best_indices(_scores(dist, params, position, places), k)]
    places = np.flatnonzero(probs > 0.0)
    best = places[best_indices(_scores(dist, params, position, places), k)]
    if len(best) < min(k, len(probs)):
        best = np.concatenate([best, np.flatnonzero(probs <= 0.0)[: k - len(best)]])
    return best


def _scores(dist: Dist, params: SamplingParams, position: int, places: IndexArray) -> ProbArray:
    """log p + G at these indices, where p is positive."""
    return np.asarray(np.log(dist.probs[places]) + gumbel(params.seed, position, dist.ids[places]))
