"""Mixing next-token distributions over documents and over sides: DRAGON, equations 2 and 4.

The mixture of a side weighs its documents with softmax(score); the two sides' weights follow from log h, the
logsumexp of the scores on each side, so that the whole is one softmax over all documents wherever they lie.
Knows nothing of drafts, epochs or messages. Whether a truncated row suffices is for `certificates`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from paceline.core.sampling.dist import Dist, ProbArray, best_indices

SideName = TypeVar("SideName", bound=str)


def log_weight(scores: Sequence[float]) -> float:
    """log h = logsumexp of the documents' scores. Never normalised per side: that would make all sides equal.

    Raises ValueError for no scores: a side without a document has no log h at all.
    """
    if not scores:
        raise ValueError("a side without documents has no weight")
    best = max(scores)
    if math.isinf(best):
        return best
    return best + math.log(math.fsum(math.exp(score - best) for score in scores))


def softmax(log_weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1. If all are -inf: equal weights."""
    best = max(log_weights)
    if best == -math.inf:
        return [1.0 / len(log_weights)] * len(log_weights)
    powers = [math.exp(weight - best) for weight in log_weights]
    total = math.fsum(powers)
    return [power / total for power in powers]


TRUST, FADING, DOUBT = 1.0, 0.5, 5.0  # chosen by measurement: bench/LOG.md
UNLIKELY = 0.5 * math.exp(-DOUBT)  # probabilities up to here are all the same evidence, with room for rounding


def decayed_evidence(before: float, log_probability: float) -> float:
    """What is added to R of a document after one more token of text, to which its branch gave this log-probability.

    DRAGON scores documents anew while the text grows. A branch that has just predicted the text well is a better
    witness than another search: it costs nothing, and follows the text token by token. Older tokens count less, or soon
    one document would be trusted for good (Bayes' rule for a text that is all of one document), and no single token
    counts more than `DOUBT` nats, so that a document that lacks one fact may still tell the next.
    """
    return FADING * before + TRUST * max(log_probability, -DOUBT)


def evidence_head(dist: Dist) -> Dist:
    """What `evidence` of this law can depend on: some hundred tokens at most, in place of a whole vocabulary."""
    return dist.kept(dist.probs > UNLIKELY)


_GRAIN = 256  # steps of a nat


def quantize_score(score: float) -> int:
    """A score as the wire carries it: whole steps of 1/256. Both sides must weigh with the rounded number."""
    return round(score * _GRAIN)


def dequantize_score(code: int) -> float:
    return code / _GRAIN


def side_weights(log_h: Mapping[SideName, float | None]) -> dict[SideName, float]:
    """eta of each side, summing to 1. None: it found no document, weight 0; all None: equal weights."""
    if not log_h:
        return {}
    values = [-math.inf if value is None else value for value in log_h.values()]
    return dict(zip(log_h, softmax(values), strict=True))


def mix(dists: Sequence[Dist], log_weights: Sequence[float]) -> Dist:
    """The mixture with weights softmax(log_weights). A single distribution is returned as it is.

    Sparse ones may take part: a token counts as 0 where it is not kept, and the tails are mixed, so that the tail says
    how much mass is not placed. Raises ValueError when the lengths differ or there is nothing to mix.
    """
    if not dists or len(dists) != len(log_weights):
        raise ValueError(f"{len(dists)} distributions and {len(log_weights)} weights")
    if len(dists) == 1:
        return dists[0]
    return mix_weighted(dists, softmax(log_weights))


def mix_heads(dists: Sequence[Dist], log_weights: Sequence[float], k: int) -> Dist:
    """Of their mixture the tokens that are among the k best of any one, for who wants its first few alone.

    It costs a search of each distribution and no sum over them. Only for dense ones of one vocabulary.
    """
    ids = np.unique(np.concatenate([best_indices(dist.probs, k) for dist in dists])).astype(np.int32)
    probs: ProbArray = np.zeros(len(ids))
    for dist, weight in zip(dists, softmax(log_weights), strict=True):
        probs += weight * dist.probs[ids]
    return Dist(ids, probs, max(1.0 - float(probs.sum()), 0.0))


def mix_weighted(dists: Sequence[Dist], weights: Sequence[float]) -> Dist:
    """The same with plain weights that sum to 1. A distribution of weight 1 is returned as it is."""
    parts = [(dist, weight) for dist, weight in zip(dists, weights, strict=True) if weight > 0.0]
    if len(parts) == 1:
        return parts[0][0]
    tail = math.fsum(weight * dist.tail for dist, weight in parts)
    widest = max((dist for dist, _ in parts), key=lambda dist: len(dist.ids))
    if widest.leading and all(not len(d.ids) or int(d.ids[-1]) < len(widest.ids) for d, _ in parts):
        ids = widest.ids  # an id is its own index: no search, no sort
    else:
        ids = np.unique(np.concatenate([dist.ids for dist, _ in parts]))
    probs: ProbArray = np.zeros(len(ids))
    for dist, weight in parts:
        if len(dist.ids) == len(ids):
            probs += weight * dist.probs
        else:
            probs[np.searchsorted(ids, dist.ids)] += weight * dist.probs
    return Dist(ids, probs, tail)
