"""Distributions of logits, and the distance of two."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import Dist


def from_logits(logits: NDArray[np.floating]) -> Dist:
    """Softmax in float64. logits: (vocab,), -inf allowed."""
    scores = logits.astype(np.float64)
    best = float(scores.max())
    scores = np.exp(scores - best)
    total = float(scores.sum())
    return Dist.dense(scores / total, best + math.log(total))


def total_variation(a: Dist, b: Dist) -> float:
    """Half the L1 distance over the union of ids. Tails are compared as one token: a lower bound if sparse."""
    if a.leading and b.leading and len(a.ids) == len(b.ids):
        difference = float(np.abs(a.probs - b.probs).sum())
    else:
        ids = np.union1d(a.ids, b.ids)
        aligned = np.zeros(len(ids))
        aligned[np.searchsorted(ids, a.ids)] = a.probs
        aligned[np.searchsorted(ids, b.ids)] -= b.probs
        difference = float(np.abs(aligned).sum())
    return 0.5 * (difference + abs(a.tail - b.tail))
