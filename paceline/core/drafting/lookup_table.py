"""Look-up tables: which tokens followed a token, and how probable the target thought them.

DIAA's t-LUT and p-LUT (Tian et al. 2026) in one: the K best successors of each token.

A row is the head of a target's law after that token. Rows are held sparsely, since most of a large vocabulary never
occurs; a table may lie over another one, whose rows show through where it has none of its own. Knows no model, tree or
file. What it remembers is text somebody saw: its owner decides who reads it and when it is erased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_SUCCESSORS: Final = 8  # successors of a token
PAIR_KEYS: Final = 1 << 17  # contexts of two tokens are told apart by a hash of so many values
PAIR_ROWS: Final = 1 << 14  # with their keys 1.6 MiB
_FIRST: Final = 256  # rows room is made for at first
_LEAST: Final = float(np.finfo(np.float32).tiny)  # what is less may be 0 as it is stored, and then is none
_PAIR: Final = "pair_"

Ids = NDArray[np.int32]
Probs = NDArray[np.float32]
Arrays = dict[str, NDArray[np.generic]]


class _Rows(NamedTuple):
    """Replaced as a whole, so that a reader never holds arrays of two generations."""

    place: Ids  # (keys,) the row of a key, -1: none
    tokens: Ids  # (rows,) the reverse: keys
    ids: Ids  # (rows, K) by falling probability, -1: empty
    probs: Probs  # (rows, K) 0: empty
    used: NDArray[np.bool_]  # (rows,) written since the search for a row to drop passed by

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
    """The key of a context of two tokens in `LookupTable.pairs`. Saved tables depend on it."""
    return (before * 0x9E3779B1 + token * 0x85EBCA6B >> 7) % PAIR_KEYS


class LookupTable:
    """One writer at a time; any thread may read meanwhile and sees each row whole, as it was before or after a write.

    That is by a version number which is odd while rows are being written: a reader that finds it changed reads again.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        base: LookupTable | None = None,
        capacity: int | None = None,
        keys: int | None = None,
        pairs: int = PAIR_ROWS,
    ) -> None:
        """base: read where this table has no row; of the same vocabulary and keys. capacity: rows at most, of which
        those that were not written for longest go (second chance); None: one for every key. keys: how many contexts
        are told apart; None: one for every token. pairs: rows of a second table, for contexts of two tokens; 0: none.
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
        self._hand = 0  # where the search for a row to drop goes on
        self._rows = _Rows.empty(self.keys)
        self.bigrams: LookupTable | None = None  # keys: `pair_key`
        if pairs:
            below = None if base is None else base.bigrams
            self.bigrams = LookupTable(vocab_size, base=below, capacity=pairs, keys=PAIR_KEYS, pairs=0)

    def erase(self) -> None:
        """Forget every row. The base keeps its own."""
        self._count = self._hand = 0
        self._rows = _Rows.empty(self.keys)
        self._version += 2
        if self.bigrams is not None:
            self.bigrams.erase()

    def __len__(self) -> int:
        """Rows of its own."""
        return self._count

    @property
    def num_bytes(self) -> int:
        """Held by its own rows, spare room included; the pairs count for themselves."""
        return sum(array.nbytes for array in self._rows)

    def successors(self, token: int) -> tuple[list[int], list[float]]:
        """At most K ids and their probabilities, falling; none for a token nothing is known of."""
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

    def record(self, token: int, ids: Sequence[int], probs: Sequence[float], *, overwrite: bool) -> None:
        """The head of the target's law after `token`: distinct ids and their probabilities, in any order.

        overwrite: it becomes the row. Otherwise ids that are there get their new probability, new ones are added, and
        of more than K the least probable go (DIAA's add and replacement; an older id goes before a newer equal).
        """
        known = dict(zip(ids, probs, strict=True))
        if not overwrite:
            for old, prob in zip(*self.successors(token), strict=True):
                known.setdefault(old, prob)
        best = sorted(known.items(), key=lambda item: -item[1])[:NUM_SUCCESSORS]
        row = [entry for entry in best if entry[1] >= _LEAST]
        empty = NUM_SUCCESSORS - len(row)
        new_ids = [entry[0] for entry in row] + [-1] * empty
        new_probs = [entry[1] for entry in row] + [0.0] * empty
        self._version += 1
        slot, rows = self._slot(token), self._rows
        rows.ids[slot], rows.probs[slot], rows.used[slot] = new_ids, new_probs, True
        self._version += 1

    def blend(self, token: int, ids: Sequence[int], probs: Sequence[float], weight: float) -> None:
        """Move the row towards this law by `weight` of the way; it becomes the row where there is none.

        A row then is the mean law after its token, over the contexts it was seen in, the later ones counting more.
        """
        old_ids, old_probs = self.successors(token)
        if not old_ids:
            self.record(token, ids, probs, overwrite=True)
            return
        mean = {old: prob * (1.0 - weight) for old, prob in zip(old_ids, old_probs, strict=True)}
        for new, prob in zip(ids, probs, strict=True):
            mean[new] = mean.get(new, 0.0) + prob * weight
        self.record(token, list(mean), list(mean.values()), overwrite=True)

    def harvest(self, tokens: NDArray[np.integer], ids: NDArray[np.integer], probs: NDArray[np.floating]) -> None:
        """Overwrite many rows, as a prefill yields them: tokens (n,), ids and probs (n, <= K), -1 and 0 for empty.

        Of several rows for one token the last one stays: it saw the most text.
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
        known = sorted_probs >= _LEAST
        sorted_ids = np.where(known, np.take_along_axis(ids[which], order, axis=1), -1)
        self._version += 1
        slots = np.array([self._slot(token) for token in unique.tolist()], dtype=np.intp)
        rows = self._rows
        rows.ids[slots, :width], rows.ids[slots, width:] = sorted_ids, -1
        rows.probs[slots, :width], rows.probs[slots, width:] = np.where(known, sorted_probs, 0.0), 0.0
        rows.used[slots] = True
        self._version += 1

    def arrays(self) -> Arrays:
        """A copy of its own rows, by rising token: "tokens" (n,), "ids" (n, K), "probs" (n, K); and of the pairs'
        ("pair_tokens" and so on). Not while writing."""
        rows = self._rows
        order = np.argsort(rows.tokens[: self._count], kind="stable")
        arrays: Arrays = {"tokens": rows.tokens[order], "ids": rows.ids[order], "probs": rows.probs[order]}
        if self.bigrams is not None:
            arrays |= {f"{_PAIR}{name}": array for name, array in self.bigrams.arrays().items()}
        return arrays

    def load(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Add what `arrays` gave, over what is there. Raises ValueError for arrays that cannot be of such a table, and
        then has changed nothing."""
        rows = _checked(arrays, self.keys, self.vocab_size)
        pairs = {name.removeprefix(_PAIR): array for name, array in arrays.items() if name.startswith(_PAIR)}
        if self.bigrams is not None and pairs:
            self.bigrams.load(pairs)
        if len(rows[0]):
            self.harvest(*rows)

    def check(self) -> None:
        """Assert that tokens and rows name each other, and that rows fall and end in what is empty."""
        assert not self._version & 1
        if self.bigrams is not None:
            self.bigrams.check()
        place, tokens, ids, probs, _ = self._rows
        tokens, ids, probs = tokens[: self._count], ids[: self._count], probs[: self._count]
        assert (place[tokens] == np.arange(self._count)).all()
        assert int((place >= 0).sum()) == self._count <= self.capacity
        assert (np.diff(probs, axis=1) <= 0.0).all()
        assert ((ids >= 0) == (probs > 0.0)).all()

    def _slot(self, token: int) -> int:
        """The token's row, made if need be; only while the version is odd."""
        slot = int(self._rows.place[token])
        if slot >= 0:
            return slot
        if self._count < self.capacity:
            slot, room = self._count, len(self._rows.tokens)
            if slot == room:
                self._rows = self._rows.grown(min(max(room, _FIRST), self.capacity - room))
            self._count += 1
        else:
            slot = self._least_used()
            self._rows.place[self._rows.tokens[slot]] = -1
        rows = self._rows
        rows.tokens[slot], rows.place[token], rows.used[slot] = token, slot, True
        return slot

    def _least_used(self) -> int:
        used = self._rows.used
        while True:
            slot, self._hand = self._hand, (self._hand + 1) % self.capacity
            if not used[slot]:
                return slot
            used[slot] = False


def _checked(arrays: Mapping[str, NDArray[np.generic]], keys: int, vocab_size: int) -> tuple[Ids, Ids, Probs]:
    """Raises ValueError."""
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
