"""A language model of counts: smoothed n-grams of its training text, and copying from the context.

p(x) = w_s · static(x) + Σ_m w_m · copy_m(x), where copy_m is the share of x among the tokens that followed the last m
tokens earlier in the context, and m runs from 0 to the longest such match. The weights depend only on the length of the
longest match; EM fits them on text of other articles, with documents before it. static is interpolated Kneser-Ney
(Kneser and Ney 1995; Chen and Goodman 1999). Documents help it only by repeated words: it knows no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .scorers import Ids, Probabilities

ORDER = 4  # tokens of the longest n-gram; its key is below vocab ** 4, which must fit 63 bits
DISCOUNT = 0.75
COPIED = 4  # tokens; longer matches of copying count as this length
_PASSES = 30  # of EM; the likelihood changes by less than 1e-4 after about ten

IntArray = NDArray[np.int64]


class _Level(NamedTuple):
    """n-grams of one length. Keys are ascending; a history is a key without its last token."""

    keys: IntArray
    counts: NDArray[np.float64]
    histories: IntArray
    totals: NDArray[np.float64]  # of a history's counts
    types: NDArray[np.float64]  # different tokens after a history


class Static:
    """Interpolated Kneser-Ney over token ids."""

    def __init__(self, texts: Iterable[Sequence[int]], vocab_size: int) -> None:
        if vocab_size**ORDER >= 1 << 63:
            raise ValueError(f"keys of {ORDER} tokens out of {vocab_size} do not fit 63 bits")
        self._vocab = vocab_size
        parts: list[list[IntArray]] = [[] for _ in range(ORDER)]
        for text in texts:
            ids = np.asarray(text, dtype=np.int64)
            for length in range(1, ORDER + 1):
                parts[length - 1].append(_grams(ids, length, vocab_size))
        self._levels: list[_Level] = []
        longest, counts = np.unique(np.concatenate(parts[-1]), return_counts=True)
        self._levels.append(_level(longest, counts, vocab_size))
        for length in range(ORDER - 1, 0, -1):
            # Lower orders count the different contexts of an n-gram.
            before = np.unique(np.concatenate(parts[length])) % vocab_size**length
            keys, counts = np.unique(before, return_counts=True)
            self._levels.insert(0, _level(keys, counts, vocab_size))

    def probabilities(self, text: Ids, start: int) -> Probabilities:
        """(len(text) - start,) probabilities given at most ORDER - 1 previous tokens. start >= ORDER - 1."""
        ids = np.asarray(text, dtype=np.int64)
        probs = np.full(len(ids) - start, 1.0 / self._vocab)
        for length, level in enumerate(self._levels, start=1):
            keys = _grams(ids, length, self._vocab)[start - length + 1 :]
            counts = _looked_up(level.keys, level.counts, keys)
            totals = _looked_up(level.histories, level.totals, keys // self._vocab)
            types = _looked_up(level.histories, level.types, keys // self._vocab)
            seen = totals > 0
            discounted = np.maximum(counts - DISCOUNT, 0.0)
            probs = np.where(seen, (discounted + DISCOUNT * types * probs) / np.where(seen, totals, 1.0), probs)
        return probs


def _grams(ids: IntArray, length: int, vocab: int) -> IntArray:
    """(len(ids) - length + 1,) key of each run of `length` tokens."""
    keys = np.zeros(max(0, len(ids) - length + 1), dtype=np.int64)
    for offset in range(length):
        keys = keys * vocab + ids[offset : offset + len(keys)]
    return keys


def _level(keys: IntArray, counts: NDArray[np.integer], vocab: int) -> _Level:
    histories, first = np.unique(keys // vocab, return_index=True)
    totals = np.add.reduceat(counts.astype(np.float64), first)
    return _Level(
        keys, counts.astype(np.float64), histories, totals, np.diff(np.append(first, len(keys))).astype(float)
    )


def _looked_up(keys: IntArray, values: NDArray[np.float64], queries: IntArray) -> NDArray[np.float64]:
    """Values of the queried keys; 0 for an unknown key."""
    at = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[at] == queries, values[at], 0.0)


def copied(context: Ids, text: Ids, start: int) -> NDArray[np.float64]:
    """(len(text) - start, COPIED + 1): in column m, copy_m of each token.

    copy_m is the share of the token among all that earlier followed the m tokens before it; NaN if none did. The
    context and the text so far are treated alike.
    """
    ids = np.asarray(context + text, dtype=np.int64)
    positions = np.arange(len(context) + start, len(ids))
    earlier = np.arange(len(ids))[None, :] < positions[:, None]  # (rows, ids): j comes before the row's token
    hit = ids[None, :] == ids[positions][:, None]
    shares = np.full((len(positions), COPIED + 1), np.nan)
    for length in range(COPIED + 1):
        if length:
            back = np.full(len(ids), -1, dtype=np.int64)
            back[length:] = ids[:-length]
            earlier = earlier & (back[None, :] == ids[positions - length][:, None])
        total = earlier.sum(axis=1)
        np.divide((earlier & hit).sum(axis=1), total, out=shares[:, length], where=total > 0)
    return shares


class CopyingTables:
    """The complete model, a `Scorer`."""

    def __init__(self, static: Static, weights: NDArray[np.float64], description: str) -> None:
        """weights: (COPIED + 2, COPIED + 2), rows by longest match + 1, columns static and copy_0 … copy_COPIED."""
        self._static, self._weights, self.description = static, weights, description

    def score(self, contexts: Sequence[Ids], text: Ids, start: int) -> list[Probabilities]:
        static = self._static.probabilities(text, start)
        scores = []
        for context in contexts:
            parts, longest = _parts(static, copied(context, text, start))
            scores.append((self._weights[longest] * parts).sum(axis=1))
        return scores


def fit(static: Static, samples: Iterable[tuple[Ids, Ids, int]], description: str) -> CopyingTables:
    """Fit the weights by EM. samples: (context, text, start of its scored part) of articles not counted in `static`."""
    scored = [
        _parts(static.probabilities(text, start), copied(context, text, start)) for context, text, start in samples
    ]
    parts = np.concatenate([each for each, _ in scored])
    longest = np.concatenate([each for _, each in scored])
    weights = np.zeros((COPIED + 2, COPIED + 2))
    for bucket in range(COPIED + 2):
        weights[bucket, : bucket + 1] = 1.0 / (bucket + 1)
        in_bucket = parts[longest == bucket]
        for _ in range(_PASSES if len(in_bucket) else 0):
            shares = weights[bucket] * in_bucket
            weights[bucket] = (shares / shares.sum(axis=1, keepdims=True)).mean(axis=0)
    return CopyingTables(static, weights, description)


def _parts(static: Probabilities, shares: NDArray[np.float64]) -> tuple[NDArray[np.float64], IntArray]:
    """(rows, COPIED + 2) static and copies, 0 without a match; (rows,) longest match + 1."""
    longest = (~np.isnan(shares)).sum(axis=1)
    return np.column_stack([static, np.nan_to_num(shares)]), longest
