"""A language model of counts: smoothed n-grams of what it has read, and copying from the text before.

p(x) = w_s · static(x) + Σ_m w_m · copy_m(x), where copy_m is the share of x among what followed the last m tokens
earlier in the context, and m runs from 0 to the longest such match. The weights depend on that longest match alone; EM
fits them on text of other articles with documents before it. static is interpolated Kneser-Ney (Kneser and Ney 1995;
Chen and Goodman 1999). It gains from documents as far as their words come again: it knows no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .scorers import Ids, Probabilities

ORDER = 4  # tokens of the longest n-gram; the key of one is below vocab ** 4, which must fit 63 bits
DISCOUNT = 0.75
COPIED = 4  # tokens of the longest match that copying tells apart
_PASSES = 30  # of EM; the likelihood moves by less than 1e-4 after about ten

IntArray = NDArray[np.int64]


class _Level(NamedTuple):
    """n-grams of one length: keys are ascending, histories are keys without their last token."""

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
            # Lower orders count in how many different contexts an n-gram occurs.
            before = np.unique(np.concatenate(parts[length])) % vocab_size**length
            keys, counts = np.unique(before, return_counts=True)
            self._levels.insert(0, _level(keys, counts, vocab_size))

    def probabilities(self, text: Ids, start: int) -> Probabilities:
        """(len(text) - start,): what reads no further back than ORDER - 1 tokens. start >= ORDER - 1."""
        ids = np.asarray(text, dtype=np.int64)
        found = np.full(len(ids) - start, 1.0 / self._vocab)
        for length, level in enumerate(self._levels, start=1):
            keys = _grams(ids, length, self._vocab)[start - length + 1 :]
            counts = _looked_up(level.keys, level.counts, keys)
            totals = _looked_up(level.histories, level.totals, keys // self._vocab)
            types = _looked_up(level.histories, level.types, keys // self._vocab)
            seen = totals > 0
            own = np.maximum(counts - DISCOUNT, 0.0)
            found = np.where(seen, (own + DISCOUNT * types * found) / np.where(seen, totals, 1.0), found)
        return found


def _grams(ids: IntArray, length: int, vocab: int) -> IntArray:
    """(len(ids) - length + 1,) the key of each run of `length` tokens."""
    keys = np.zeros(max(0, len(ids) - length + 1), dtype=np.int64)
    for place in range(length):
        keys = keys * vocab + ids[place : place + len(keys)]
    return keys


def _level(keys: IntArray, counts: NDArray[np.integer], vocab: int) -> _Level:
    histories, first = np.unique(keys // vocab, return_index=True)
    totals = np.add.reduceat(counts.astype(np.float64), first)
    return _Level(
        keys, counts.astype(np.float64), histories, totals, np.diff(np.append(first, len(keys))).astype(float)
    )


def _looked_up(keys: IntArray, values: NDArray[np.float64], wanted: IntArray) -> NDArray[np.float64]:
    """0 where a key is not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)


def copied(context: Ids, text: Ids, start: int) -> NDArray[np.float64]:
    """(len(text) - start, COPIED + 1): in column m, how often the token followed the m tokens before it until then.

    As a share of all that followed those m tokens; NaN where nothing did. Context and text so far count alike.
    """
    ids = np.asarray(context + text, dtype=np.int64)
    places = np.arange(len(context) + start, len(ids))
    earlier = np.arange(len(ids))[None, :] < places[:, None]  # (rows, ids): j comes before the row's token
    hit = ids[None, :] == ids[places][:, None]
    shares = np.full((len(places), COPIED + 1), np.nan)
    for length in range(COPIED + 1):
        if length:
            back = np.full(len(ids), -1, dtype=np.int64)
            back[length:] = ids[:-length]
            earlier = earlier & (back[None, :] == ids[places - length][:, None])
        total = earlier.sum(axis=1)
        np.divide((earlier & hit).sum(axis=1), total, out=shares[:, length], where=total > 0)
    return shares


class CopyingTables:
    """The whole model, a `Scorer`."""

    def __init__(self, static: Static, weights: NDArray[np.float64], description: str) -> None:
        """weights: (COPIED + 2, COPIED + 2), by longest match + 1, then static and copy_0 … copy_COPIED."""
        self._static, self._weights, self.description = static, weights, description

    def score(self, contexts: Sequence[Ids], text: Ids, start: int) -> list[Probabilities]:
        static = self._static.probabilities(text, start)
        found = []
        for context in contexts:
            parts, longest = _parts(static, copied(context, text, start))
            found.append((self._weights[longest] * parts).sum(axis=1))
        return found


def fit(static: Static, lessons: Iterable[tuple[Ids, Ids, int]], description: str) -> CopyingTables:
    """lessons: context, text, and where its scored part starts, of articles that `static` has not counted."""
    told = [_parts(static.probabilities(text, start), copied(context, text, start)) for context, text, start in lessons]
    parts = np.concatenate([each for each, _ in told])
    longest = np.concatenate([each for _, each in told])
    weights = np.zeros((COPIED + 2, COPIED + 2))
    for bucket in range(COPIED + 2):
        weights[bucket, : bucket + 1] = 1.0 / (bucket + 1)
        mine = parts[longest == bucket]
        for _ in range(_PASSES if len(mine) else 0):
            shares = weights[bucket] * mine
            weights[bucket] = (shares / shares.sum(axis=1, keepdims=True)).mean(axis=0)
    return CopyingTables(static, weights, description)


def _parts(static: Probabilities, shares: NDArray[np.float64]) -> tuple[NDArray[np.float64], IntArray]:
    """(rows, COPIED + 2) static and copies, 0 where there is no match; (rows,) longest match + 1."""
    longest = (~np.isnan(shares)).sum(axis=1)
    return np.column_stack([static, np.nan_to_num(shares)]), longest
