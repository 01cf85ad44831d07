"""Look-up tables: the likely successors of each token, with the target's probabilities.

DIAA's t-LUT and p-LUT (Tian et al. 2026) in one: the `NUM_SUCCESSORS` best successors of each token.

A row is the head of a target's distribution after that token. Rows are stored sparsely, since most of a large
vocabulary never occurs; a table may have a base table, which is read where it has no row itself. Rows reveal text that
somebody has read: the table's owner decides who reads it and when it is erased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.drafting.suffix_automaton import TextMemory

NUM_SUCCESSORS: Final = 8  # per row
BIGRAM_KEYS: Final = 1 << 17  # values of the hash of two tokens
BIGRAM_ROWS: Final = 1 << 14  # with their keys 1.6 MiB
_FIRST_ROWS: Final = 256  # initial allocation
_MIN_PROB: Final = float(np.finfo(np.float32).tiny)  # a smaller one may be stored as 0 and is dropped
_BIGRAM_PREFIX: Final = "pair_"  # of array names in saved tables
_TEXTS: Final = "texts"  # name of the array of remembered texts

Ids = NDArray[np.int32]
Probs = NDArray[np.float32]
Arrays = dict[str, NDArray[np.generic]]


class _Rows(NamedTuple):
    """The arrays of a table, replaced as a whole so that a reader never sees arrays of two generations."""

    place: Ids  # (keys,) the row of a key, -1: none
    tokens: Ids  # (rows,) the key of a row
    ids: Ids  # (rows, NUM_SUCCESSORS) by falling probability, -1: empty
    probs: Probs  # (rows, NUM_SUCCESSORS) 0: empty
    used: NDArray[np.bool_]  # (rows,) second-chance bit: written since the hand last passed

    @staticmethod
    def empty(keys: int) -> _Rows:
        place = np.full(keys, -1, np.int32)
        return _Rows(place, np.empty(0, np.int32), *_blank(0), np.empty(0, np.bool_))

    def grown(self, more: int) -> _Rows:
        ids, probs = _blank(more)
        return _Rows(
            self.place,
            np.concatenate((self.tokens, np.zeros(more, np.int32))),
            np.concatenate((self.ids, ids)),
            np.concatenate((self.probs, probs)),
            np.concatenate((self.used, np.zeros(more, np.bool_))),
        )


def _blank(rows: int) -> tuple[Ids, Probs]:
    return np.full((rows, NUM_SUCCESSORS), -1, np.int32), np.zeros((rows, NUM_SUCCESSORS), np.float32)


def bigram_key(before: int, token: int) -> int:
    """The key of two tokens in `LookupTable.bigrams`. Saved tables depend on it."""
    return (before * 0x9E3779B1 + token * 0x85EBCA6B >> 7) % BIGRAM_KEYS


class LookupTable:
    """Successors by token. One writer at a time; any thread may read meanwhile and sees each row whole, as it was
    before or after a write.

    A version number is odd while rows are being written; a reader that finds it changed reads again.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        base: LookupTable | None = None,
        capacity: int | None = None,
        keys: int | None = None,
        bigram_rows: int = BIGRAM_ROWS,
    ) -> None:
        """base: read where this table has no row; of the same vocabulary and keys. capacity: most rows; the least
        recently written are evicted (second chance); None: one for every key. keys: number of distinct contexts; None:
        one for every token. bigram_rows: capacity of a second table, for contexts of two tokens; 0: none.
        """
        assert base is None or base.vocab_size == vocab_size, "two vocabularies"
        self.vocab_size: int = vocab_size
        self.keys: int = vocab_size if keys is None else keys
        self.capacity: int = self.keys if capacity is None else min(capacity, self.keys)
        assert self.capacity > 0
        assert base is None or base.keys == self.keys
        self._base = base
        self._version = 0  # even: all rows are whole
        self._count = 0  # rows used
        self._hand = 0  # next row to consider for eviction
        self._rows = _Rows.empty(self.keys)
        self.bigrams: LookupTable | None = None  # keys: `bigram_key`
        self.texts: TextMemory | None = None  # of answers
        if bigram_rows:
            self.texts = TextMemory()
            below = None if base is None else base.bigrams
            self.bigrams = LookupTable(vocab_size, base=below, capacity=bigram_rows, keys=BIGRAM_KEYS, bigram_rows=0)

    def erase(self) -> None:
        """Erase every row. The base keeps its own."""
        self._count = self._hand = 0
        self._rows = _Rows.empty(self.keys)
        self._version += 2
        if self.bigrams is not None:
            self.bigrams.erase()
        if self.texts is not None:
            self.texts.erase()

    @property
    def memories(self) -> list[TextMemory]:
        """Remembered texts of this table and of those below it, where there are any."""
        below = [] if self._base is None else self._base.memories
        return below if not self.texts else [self.texts, *below]

    def __len__(self) -> int:
        """Number of own rows, without the base's."""
        return self._count

    def successors(self, token: int) -> tuple[list[int], list[float]]:
        """At most `NUM_SUCCESSORS` ids and their probabilities, falling; empty for a token without a row."""
        while True:
            version, rows = self._version, self._rows
            slot = int(rows.place[token])
            if slot < 0:
                return self._base.successors(token) if self._base is not None else ([], [])
            ids, probs = rows.ids[slot].tolist(), rows.probs[slot].tolist()
            if version == self._version and not version & 1:
                break
        if ids[-1] < 0:
            known = ids.index(-1)
            return ids[:known], probs[:known]
        return ids, probs

    def record(self, token: int, ids: Sequence[int], probs: Sequence[float]) -> None:
        """Write the head of the target's distribution after `token`: distinct ids and their probabilities, in any
        order, of which the `NUM_SUCCESSORS` most probable are kept."""
        best = sorted(zip(ids, probs, strict=True), key=lambda item: -item[1])[:NUM_SUCCESSORS]
        row = [entry for entry in best if entry[1] >= _MIN_PROB]
        empty = NUM_SUCCESSORS - len(row)
        new_ids = [entry[0] for entry in row] + [-1] * empty
        new_probs = [entry[1] for entry in row] + [0.0] * empty
        self._version += 1
        slot, rows = self._slot(token), self._rows
        rows.ids[slot], rows.probs[slot], rows.used[slot] = new_ids, new_probs, True
        self._version += 1

    def blend(self, token: int, ids: Sequence[int], probs: Sequence[float], weight: float) -> None:
        """Move the row towards this distribution by the share `weight`; without a row, write it as one.

        A row then is the mean distribution after its token, over the contexts it occurred in, later ones counting more.
        """
        old_ids, old_probs = self.successors(token)
        if not old_ids:
            self.record(token, ids, probs)
            return
        mean = {old: prob * (1.0 - weight) for old, prob in zip(old_ids, old_probs, strict=True)}
        for new, prob in zip(ids, probs, strict=True):
            mean[new] = mean.get(new, 0.0) + prob * weight
        self.record(token, list(mean), list(mean.values()))

    def harvest(self, tokens: NDArray[np.integer], ids: NDArray[np.integer], probs: NDArray[np.floating]) -> None:
        """Overwrite many rows, as a prefill yields them: tokens (n,), ids and probs (n, <= NUM_SUCCESSORS), -1 and 0
        for empty.

        Of several rows for one token the last is kept, which has the longest context.
        """
        n, width = ids.shape
        assert tokens.shape == (n,) and probs.shape == (n, width) and width <= NUM_SUCCESSORS
        unique, from_end = np.unique(tokens[::-1], return_index=True)
        which = n - 1 - from_end
        if len(unique) > self.capacity:
            keep = np.sort(np.argsort(which, kind="stable")[-self.capacity :])
            unique, which = unique[keep], which[keep]
        order = np.argsort(-probs[which], axis=1, kind="stable")
        sorted_probs = np.take_along_axis(probs[which], order, axis=1)
        known = sorted_probs >= _MIN_PROB
        sorted_ids = np.where(known, np.take_along_axis(ids[which], order, axis=1), -1)
        self._version += 1
        slots = np.array([self._slot(token) for token in unique.tolist()], dtype=np.intp)
        rows = self._rows
        rows.ids[slots, :width], rows.ids[slots, width:] = sorted_ids, -1
        rows.probs[slots, :width], rows.probs[slots, width:] = np.where(known, sorted_probs, 0.0), 0.0
        rows.used[slots] = True
        self._version += 1

    def arrays(self) -> Arrays:
        """A copy of the own rows, by rising token: "tokens" (n,), "ids" and "probs" (n, NUM_SUCCESSORS); and of those
        of `bigrams` ("pair_tokens" and so on), and the remembered texts. Not while writing."""
        rows = self._rows
        order = np.argsort(rows.tokens[: self._count], kind="stable")
        arrays: Arrays = {"tokens": rows.tokens[order], "ids": rows.ids[order], "probs": rows.probs[order]}
        if self.bigrams is not None:
            arrays |= {f"{_BIGRAM_PREFIX}{name}": array for name, array in self.bigrams.arrays().items()}
        if self.texts:
            arrays[_TEXTS] = self.texts.array()
        return arrays

    def load(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Add the rows of `arrays` over the existing ones. Raises ValueError for arrays that are not of such a table,
        and then changes nothing."""
        rows = _checked(arrays, self.keys, self.vocab_size)
        texts = TextMemory.checked(arrays[_TEXTS], self.vocab_size) if _TEXTS in arrays else None
        bigrams = {
            name.removeprefix(_BIGRAM_PREFIX): array
            for name, array in arrays.items()
            if name.startswith(_BIGRAM_PREFIX)
        }
        if self.bigrams is not None and bigrams:
            self.bigrams.load(bigrams)
        if self.texts is not None and texts is not None:
            self.texts.load(texts)
        if len(rows[0]):
            self.harvest(*rows)

    def _slot(self, token: int) -> int:
        """The token's row, allocated if missing; only while the version is odd."""
        slot = int(self._rows.place[token])
        if slot >= 0:
            return slot
        if self._count < self.capacity:
            slot, room = self._count, len(self._rows.tokens)
            if slot == room:
                self._rows = self._rows.grown(min(max(room, _FIRST_ROWS), self.capacity - room))
            self._count += 1
        else:
            slot = self._evict()
            self._rows.place[self._rows.tokens[slot]] = -1
        rows = self._rows
        rows.tokens[slot], rows.place[token], rows.used[slot] = token, slot, True
        return slot

    def _evict(self) -> int:
        """The next row without its second-chance bit."""
        used = self._rows.used
        while True:
            slot, self._hand = self._hand, (self._hand + 1) % self.capacity
            if not used[slot]:
                return slot
            used[slot] = False


def _checked(arrays: Mapping[str, NDArray[np.generic]], keys: int, vocab_size: int) -> tuple[Ids, Ids, Probs]:
    """Convert saved arrays. Raises ValueError if they are not of a table with these keys and vocabulary."""
    tokens, ids, probs = (arrays.get(name) for name in ("tokens", "ids", "probs"))
    if tokens is None or ids is None or probs is None:
        raise ValueError("a table has tokens, ids and probs")
    n = len(tokens)
    if tokens.shape != (n,) or ids.shape != (n, NUM_SUCCESSORS) or probs.shape != (n, NUM_SUCCESSORS):
        raise ValueError(f"shapes {tokens.shape}, {ids.shape}, {probs.shape} are not those of a table")
    if tokens.dtype != np.int32 or ids.dtype != np.int32 or probs.dtype != np.float32:
        raise ValueError(f"types {tokens.dtype}, {ids.dtype}, {probs.dtype} are not those of a table")
    rows, followers, shares = tokens.astype(np.int32), ids.astype(np.int32), probs.astype(np.float32)
    if n and not (rows.min() >= 0 and rows.max() < keys and followers.min() >= -1 and followers.max() < vocab_size):
        raise ValueError(f"a token is not in the vocabulary of {vocab_size}")
    if not (np.isfinite(shares).all() and (shares >= 0.0).all() and (shares <= 1.0 + 1e-3).all()):
        raise ValueError("a probability is none")
    shares = np.where(followers >= 0, shares, np.float32(0.0))
    ordered = np.sort(np.where(shares > 0.0, followers, -1 - np.arange(NUM_SUCCESSORS)), axis=1)
    if (np.diff(ordered, axis=1) == 0).any() or len(np.unique(rows)) < n:
        raise ValueError("a token occurs twice")
    return rows, followers, shares
