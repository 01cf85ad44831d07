"""Engines of a draft and a target model whose acceptance depends on the draft model's entropy as in GELATO.

Entropies are exponentially distributed with mean 0.3175 nats, and a draft is accepted with probability exp(-0.35 H),
0.9 in the mean (the paper's figure 2 and ρ0). Where both models agree their distributions are equal, elsewhere they
have no token in common: then every verifier, with common noise or by accepting and rejecting, accepts at just this
rate, and ways differ in what they send and draft alone. Ids are those of a vocabulary of 152k, so that messages have
a real model's size. An id tells the entropy it was drawn at, from which the paper's payload follows (eq. 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.segment import Batch
from paceline.core.sampling.dist import Dist, IdArray, mixed_number
from paceline.engine.base import Output
from paceline.engine.fake import FakeEngine, FakeRow

VOCAB: Final = 151_936  # Qwen2.5's
MEAN_NATS: Final = 0.3175
SLOPE: Final = 0.35  # 1/nat
_LEVELS: Final = 1000  # entropies that occur, each as often as the others
_STRIDE: Final = VOCAB // _LEVELS
_SUPPORT: Final = 64  # ids of a distribution, whose entropy is at most ln 64

_PROB_BITS: Final = 16  # b_prob of eq. 2
_INDEX_BITS: Final = math.ceil(math.log2(VOCAB))
ENTRY_BITS: Final = _PROB_BITS + _INDEX_BITS
WHOLE_BITS: Final = _PROB_BITS * VOCAB  # of a distribution with all ids


def _entropies() -> NDArray[np.float64]:
    """(levels,) quantiles of the exponential distribution."""
    return -MEAN_NATS * np.log1p(-(np.arange(_LEVELS) + 0.5) / _LEVELS)


def _geometric(ratio: float) -> NDArray[np.float64]:
    probs = ratio ** np.arange(_SUPPORT)
    return np.asarray(probs / probs.sum())


def _distributions() -> list[NDArray[np.float64]]:
    """One geometric distribution for each entropy."""
    ratios = 1.0 - np.geomspace(1.0, 1e-3, 2000)  # 0: one id has all the mass
    known = [-float(np.sum(probs[probs > 0] * np.log(probs[probs > 0]))) for probs in map(_geometric, ratios)]
    return [_geometric(float(np.interp(nats, known, ratios))) for nats in ENTROPIES]


ENTROPIES: Final = _entropies()
_DISTRIBUTIONS: Final = _distributions()


def nats_of(token: int) -> float:
    """Entropy of the draft model's distribution that an id was drawn from."""
    return float(ENTROPIES[min(token // _STRIDE, _LEVELS - 1)])


class PairedEngine(FakeEngine):
    """One of both models."""

    def __init__(self, *, target: bool) -> None:
        super().__init__(seed=1, vocab_size=VOCAB)
        self._target = target
        self.forwards = 0

    def forward(self, batch: Batch) -> Output:
        self.forwards += 1
        return super().forward(batch)

    def _dist(self, row: FakeRow) -> Dist:
        drawn = mixed_number(row.digest)
        level = drawn % _LEVELS
        agrees = mixed_number(drawn) / 2.0**64 < math.exp(-SLOPE * ENTROPIES[level])
        first = level * _STRIDE + (_SUPPORT if self._target and not agrees else 0)
        ids: IdArray = np.arange(first, first + _SUPPORT, dtype=np.int32)
        return Dist(ids, _DISTRIBUTIONS[level])


@dataclass(frozen=True, slots=True)
class Payload:
    """Sizes of top-p sets: |S| = least · 2^(slope · H) ids, at most the vocabulary.

    slope: 1/nat. factor: ids at p = 0.99998 for each at 0.99995, an assumption.
    """

    least: float
    slope: float = 3.0
    factor: float = 1.6

    def ids(self, nats: float, top_p: float) -> float:
        """|S| of a distribution with that entropy."""
        wider = self.factor if top_p > 0.99995 else 1.0
        return min(wider * self.least * math.pow(2.0, self.slope * nats), VOCAB)

    def mean_bits(self, top_p: float) -> float:
        """The payload of one drafted token, in bits (eq. 2)."""
        return ENTRY_BITS * float(np.mean([self.ids(float(nats), top_p) for nats in ENTROPIES]))

    @staticmethod
    def with_mean_bits(bits: float, slope: float = 3.0) -> Payload:
        """The sizes whose mean at p = 0.99995 is so many bits a draft."""
        low, high = 1e-3, float(VOCAB)
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if Payload(middle, slope).mean_bits(0.99995) < bits else (low, middle)
        return Payload(math.sqrt(low * high), slope)
