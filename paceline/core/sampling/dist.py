"""A next-token distribution: the one type that engines return, machines compare and the wire carries.

Knows nothing of sampling parameters or documents: see `sampling` and `aggregation`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

IdArray = NDArray[np.int32]
ProbArray = NDArray[np.float64]
IndexArray = NDArray[np.intp]


@lru_cache(maxsize=16)
def token_ids(vocab_size: int) -> IdArray:
    """(vocab_size,) 0, 1, …: read-only, one copy for all dense distributions of a vocabulary."""
    ids = np.arange(vocab_size, dtype=np.int32)
    ids.flags.writeable = False
    return ids


@dataclass(frozen=True, slots=True, eq=False)
class Dist:
    """Probabilities of some token ids, and the mass of all the others.

    Dense when it came from an engine (`ids` is 0..vocab-1 and `tail` 0), sparse after truncation or from the wire.
    Never renormalised behind the caller's back: probs.sum() + tail == 1 up to rounding.
    The arrays are shared, not copied: treat them as read-only.
    """

    ids: IdArray  # (kept,) ascending, distinct
    probs: ProbArray  # (kept,) >= 0
    tail: float = 0.0  # mass off `ids`
    log_norm: float = 0.0  # a model's score of an id is log(prob) + log_norm; 0 where there are no such scores
    # What costs a pass over the vocabulary and is asked for again: results of pure functions of this law, by their own
    # keys. Kept here so that it goes when the law goes.
    memo: dict[Hashable, object] = field(default_factory=dict, repr=False)

    @staticmethod
    def dense(probs: ProbArray, log_norm: float = 0.0) -> Dist:
        """probs: (vocab,), kept as it is, not copied."""
        return Dist(token_ids(len(probs)), probs, log_norm=log_norm)

    @staticmethod
    def from_logits(logits: NDArray[np.floating]) -> Dist:
        """logits: (vocab,), -inf allowed. Softmax in float64. Raises ValueError at a NaN or if all are -inf."""
        scores = logits.astype(np.float64)
        best = scores.max()
        if not np.isfinite(best):
            raise ValueError("a row of scores has no finite maximum")
        scores -= best
        np.exp(scores, out=scores)
        total = float(scores.sum())
        scores /= total
        return Dist.dense(scores, float(best) + math.log(total))

    @property
    def leading(self) -> bool:
        """Are the ids 0, 1, … without a gap, so that an id is its own index?"""
        return len(self.ids) > 0 and int(self.ids[-1]) == len(self.ids) - 1

    def index(self, token: int) -> int | None:
        """Where `token` stands in `ids`, None when it is not there."""
        if self.leading:
            return token if 0 <= token < len(self.ids) else None
        at = int(np.searchsorted(self.ids, token))
        return at if at < len(self.ids) and int(self.ids[at]) == token else None

    def prob(self, token: int) -> float:
        """0 for a token off `ids`, though the tail may hold some of its mass."""
        at = self.index(token)
        return 0.0 if at is None else float(self.probs[at])

    def within(self, vocab_size: int) -> Dist:
        """The law over the ids below `vocab_size`: what an engine's vocabulary is padded with means nothing.

        Returns this object when there are no others. Only for a dense distribution.
        """
        if len(self.ids) <= vocab_size:
            return self
        probs = self.probs[:vocab_size]
        total = float(probs.sum())
        return Dist.dense(probs / total, self.log_norm + math.log(total))

    def argmax(self) -> int:
        """The most probable of `ids`; of equals the lowest id. Raises ValueError when nothing is kept."""
        return int(self.ids[int(self.probs.argmax())])

    def top(self, k: int) -> list[tuple[int, float]]:
        """At most k (token, probability) by falling probability, equals by rising id. Zeros are left out."""
        best = best_indices(self.probs, k)
        return [(int(self.ids[i]), float(self.probs[i])) for i in best if self.probs[i] > 0.0]

    def entropy(self) -> float:
        """Nats. The tail counts as one token, so for a sparse distribution this is a lower bound."""
        positive = self.probs[self.probs > 0.0]
        tail = -self.tail * float(np.log(self.tail)) if self.tail > 0.0 else 0.0
        return tail - float(positive @ np.log(positive))

    def kept(self, which: NDArray[np.bool_] | NDArray[np.integer]) -> Dist:
        """Only these: a mask over `ids`, or token ids in any order (those off `ids` are ignored).

        What is dropped goes to the tail. Returns this object when nothing is dropped.
        """
        if which.dtype == np.bool_:
            index = np.flatnonzero(which)
        else:
            index = np.flatnonzero(np.isin(self.ids, which, assume_unique=False))
        return self.kept_at(index)

    def kept_at(self, index: IndexArray) -> Dist:
        """index: (kept,) places in `ids`, ascending and distinct. What is dropped goes to the tail."""
        if len(index) == len(self.ids):
            return self
        probs = self.probs[index]
        dropped = float(self.probs.sum()) - float(probs.sum())
        return Dist(self.ids[index], probs, self.tail + max(dropped, 0.0))


def best_indices(values: ProbArray, k: int) -> IndexArray:
    """(min(k, n),) places of the k largest values, falling; equals by rising place. No full sort for k << n.

    One pass for k << n: the k-th best of the groups' maxima is reached by at least k values, and by few more, all of
    them in groups whose maximum reaches it. A group is a column of a matrix: maxima down its columns take a fraction of
    the time of maxima along its rows.
    """
    n = len(values)
    if k <= 0 or n == 0:
        return np.empty(0, dtype=np.intp)
    groups = n // _GROUP
    if 4 * k <= groups:
        grouped = groups * _GROUP
        best = values[:grouped].reshape(_GROUP, groups).max(axis=0)
        floor = np.partition(best, groups - k)[groups - k]
        reaching = np.flatnonzero(best >= floor)
        if len(reaching) > 4 * k:  # a law that is flat behind its first tokens: of its ties the lowest places will do
            above = np.flatnonzero(values > floor)
            level = np.flatnonzero(values == floor)[: max(k - len(above), 0)]
            candidates: IndexArray = np.concatenate((above, level))
        else:
            inside = np.arange(_GROUP)[:, None] * groups + reaching  # rising when read by rows
            places = np.concatenate((inside.reshape(-1), np.arange(grouped, n)))
            candidates = places[values[places] >= floor]  # with all ties, so that these fall by place
    else:
        floor = np.partition(values, n - k)[n - k] if k < n else -np.inf
        candidates = np.flatnonzero(values >= floor)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:k]]


_GROUP = 64  # values


def total_variation(a: Dist, b: Dist) -> float:
    """Half the summed difference over the union of ids. Tails are compared as one token: a lower bound if sparse."""
    if a.leading and b.leading and len(a.ids) == len(b.ids):
        difference = float(np.abs(a.probs - b.probs).sum())
    else:
        ids = np.union1d(a.ids, b.ids)
        aligned = np.zeros(len(ids))
        aligned[np.searchsorted(ids, a.ids)] = a.probs
        aligned[np.searchsorted(ids, b.ids)] -= b.probs
        difference = float(np.abs(aligned).sum())
    return 0.5 * (difference + abs(a.tail - b.tail))
