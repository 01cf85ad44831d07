"""The head of a row: the ids that a choice most likely falls on, and bounds for all others.

An engine hands it over in place of a distribution. `core.aggregation.head_exactness` tests whether two sides' heads
determine the token of their mixture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.core.sampling.dist import Dist, IndexArray, ProbArray, best_indices
from paceline.core.sampling.noise import gumbel
from paceline.core.sampling.ranking import top_by_score
from paceline.core.sampling.sampler import SamplingParams

HEAD_BY_SCORE = 32  # ids with the best log p + G
HEAD_BY_PROB = 128  # most probable ids
HEAD_ERROR = 1e-4  # relative error of probabilities that an engine has computed in float32, and of their sums


@dataclass(frozen=True, slots=True, eq=False)
class RowHead:
    """Some ids of a row with their probabilities, exact up to `HEAD_ERROR`."""

    dist: Dist
    best: IndexArray  # indices of its ids with the best log p + G (log p at temperature 0), falling
    scores: ProbArray  # of those
    max_score: float  # no other id has a larger score than this; -inf: there are no others
    max_prob: float  # no other id is more probable; 0: there are no others

    @property
    def whole(self) -> bool:
        """True if no other id has a probability above 0."""
        return self.max_prob == 0.0


def row_head(dist: Dist, params: SamplingParams, position: int) -> RowHead:
    """The definition. dist: dense, after processing, before top-k, top-p and min-p."""
    best = top_by_score(dist, params, position, HEAD_BY_SCORE)
    with np.errstate(divide="ignore"):
        scores = np.log(dist.probs[best])
    if params.temperature > 0.0:
        scores = scores + gumbel(params.seed, position, dist.ids[best])
    if len(dist.ids) <= HEAD_BY_PROB:
        return RowHead(dist, best, scores, -math.inf, 0.0)
    likely = best_indices(dist.probs, HEAD_BY_PROB)
    max_prob = float(dist.probs[likely[-1]])
    max_score = float(scores[-1]) if params.temperature > 0.0 else math.log(max_prob) if max_prob else -math.inf
    kept = np.union1d(likely, best)
    return RowHead(dist.kept_at(kept), np.searchsorted(kept, best), scores, max_score, max_prob)
