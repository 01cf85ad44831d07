"""Tables that drafts are looked up in: likely successors of each token, and texts that have been read.

*Tables*: DIAA's t-LUT and p-LUT (Tian et al. 2026) in one, the `NUM_SUCCESSORS` best successors of each token, with the
target's probabilities. A row is the head of a target's distribution after that token. Rows are stored sparsely, since
most of a large vocabulary never occurs; a table may have a base table, which is read where it has no row itself. Rows
reveal text that somebody has read: the table's owner decides who reads it and when it is erased.

*Automata*: the longest suffix of a text that occurred in it before, and its continuations (Blumer et al. 1985), built
token by token in amortised constant time; used for drafting as in SAM decoding (Hu et al. 2025), but with the most
recent occurrence instead of the first, and all continuations instead of one. Several texts (documents, a prompt) are
appended with `separate` between them, and matches do not cross the boundary. Most states have one transition, stored in
two arrays; only branching states have a dict. `TextMemory` is one over earlier answers of an owner, as in
SuffixDecoding (Oliaro et al. 2024).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS: Final = 1 << 17  # of all texts together; about 100 bytes each
_MAX_UPDATED: Final = 32  # suffixes, longest first, whose latest occurrence is updated with every token
_MAX_BRANCHES: Final = 8  # a state with more transitions predicts little: only its latest continuation is returned

ROOT: Final = 0


class Match(NamedTuple):
    """A suffix that occurred before: its state in the automaton, and its length in tokens."""

    state: int
    length: int


NOTHING: Final = Match(ROOT, 0)


class SuffixAutomaton:
    """States are numbered from 0, the empty text. A full automaton adds no more text, and continues to match."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.match = NOTHING  # the longest suffix of the text so far that occurred before
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._separators = 0
        self._text = array("i")
        self._last = ROOT  # the state of the whole text
        self._length = array("i", [0])  # of the longest text of a state
        self._link = array("i", [-1])  # suffix link: state of the longest suffix that is in another state
        self._latest = array("i", [0])  # end position of the latest occurrence before the present one
        self._count = array("i", [0])  # occurrences; too low for short suffixes of repetitive text
        self._token = array("i", [-1])  # first transition: its token, -1: none,
        self._next = array("i", [-1])  # and its target state
        self._branches: dict[int, dict[int, int]] = {}  # further transitions

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the text. Tokens are 0 or more."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        if self.num_tokens >= self._max_tokens:
            self.match = self.advance(self.match, token)
            return
        self._append(token)
        state = self._link[self._last]  # the longest suffix in another state than the whole text occurred before
        self.match = Match(state, self._length[state])

    def separate(self) -> None:
        """Begin another text: append a separator token that never matches."""
        self.match = NOTHING
        if self.num_tokens < self._max_tokens:
            self._separators += 1
            self._append(-1 - self._separators)

    def advance(self, match: Match, token: int) -> Match:
        """The match after a further `token`, without appending it."""
        state, length = match
        while True:
            after = self._transition(state, token)
            if after >= 0:
                return Match(after, length + 1)
            state = self._link[state]
            if state < 0:
                return NOTHING
            length = self._length[state]

    def continuations(self, match: Match) -> list[tuple[int, int]]:
        """(token, occurrences) of the tokens that followed earlier occurrences of the match.

        The latest one first, then by falling frequency. Empty for a match of length 0.
        """
        state = match.state
        if state == ROOT or self._token[state] == -1:
            return []
        further = self._branches.get(state)
        end = self._latest[state]
        latest = self._text[end] if end < len(self._text) else -1
        if further is None or len(further) >= _MAX_BRANCHES:
            branches = [(self._token[state], self._next[state])] if further is None else []
        else:
            branches = [(self._token[state], self._next[state]), *further.items()]
        found = [(token, max(self._count[after], 1)) for token, after in branches if token >= 0 and token != latest]
        if len(found) > 1:
            found.sort(key=lambda each: -each[1])
        if latest >= 0:
            found.insert(0, (latest, max(self._count[self._transition(state, latest)], 1)))
        return found

    @property
    def num_states(self) -> int:
        return len(self._length)

    def _transition(self, state: int, token: int) -> int:
        """The state that `token` leads to; -1: none."""
        if self._token[state] == token:
            return self._next[state]
        further = self._branches.get(state)
        return -1 if further is None else further.get(token, -1)

    def _set_transition(self, state: int, token: int, after: int) -> None:
        first = self._token[state]
        if first == -1 or first == token:
            self._token[state], self._next[state] = token, after
        else:
            self._branches.setdefault(state, {})[token] = after

    def _add_state(self, length: int, link: int, latest: int, count: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._latest.append(latest)
        self._count.append(count)
        self._token.append(-1)
        self._next.append(-1)
        return len(self._length) - 1

    def _append(self, token: int) -> None:
        self._update_suffixes()
        self.num_tokens += 1
        self._text.append(token)
        whole = self._add_state(self._length[self._last] + 1, ROOT, self.num_tokens, 0)
        state, self._last = self._last, whole
        while state >= 0 and self._transition(state, token) < 0:
            self._set_transition(state, token, whole)
            state = self._link[state]
        if state < 0:
            return
        after = self._transition(state, token)
        if self._length[state] + 1 == self._length[after]:
            self._link[whole] = after
            return
        clone = self._add_state(self._length[state] + 1, self._link[after], self._latest[after], self._count[after])
        self._token[clone], self._next[clone] = self._token[after], self._next[after]
        if after in self._branches:
            self._branches[clone] = dict(self._branches[after])
        while state >= 0 and self._transition(state, token) == after:
            self._set_transition(state, token, clone)
            state = self._link[state]
        self._link[after] = self._link[whole] = clone

    def _update_suffixes(self) -> None:
        """Update the latest occurrence and the count of the `_MAX_UPDATED` longest suffixes of the text so far."""
        state = self._last
        for _ in range(_MAX_UPDATED):
            if state <= ROOT:
                return
            self._latest[state] = self.num_tokens
            self._count[state] += 1
            state = self._link[state]


MEMORY_TOKENS: Final = 1 << 14  # of the latest texts that are remembered; about 2 MiB, and 50 ms to read
_END: Final = -1  # of a text, among the tokens


class TextMemory:
    """The latest texts of an owner, and an automaton of them that answers read with cursors of their own.

    The automaton is behind: `catch_up` reads a few tokens at a time, so that no answer waits for it. One whose texts
    are mostly forgotten is begun anew, and cursors into the former one end: see `advance`.
    """

    def __init__(self, max_tokens: int = MEMORY_TOKENS) -> None:
        self._max_tokens = max_tokens
        self.erase()

    def erase(self) -> None:
        self._tokens: list[int] = []  # of all texts, an `_END` after each
        self._read = 0  # of them, that the automaton has
        self.automaton = SuffixAutomaton()

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, text: Sequence[int]) -> None:
        """Remember a text, and forget the oldest."""
        if not text:
            return
        self._tokens += (*text[-self._max_tokens :], _END)
        if len(self._tokens) > 2 * self._max_tokens:
            self._tokens = self._tokens[-self._max_tokens :]
            self._read, self.automaton = 0, SuffixAutomaton()

    def catch_up(self, count: int) -> bool:
        """Read so many tokens more; True if any are left."""
        tokens = list(islice(self._tokens, self._read, self._read + count))
        for token in tokens:
            if token == _END:
                self.automaton.separate()
            else:
                self.automaton.append(token)
        self._read += len(tokens)
        return self.is_behind

    @property
    def is_behind(self) -> bool:
        return self._read < len(self._tokens)

    def array(self) -> NDArray[np.int32]:
        """A copy of the tokens, for `load`."""
        return np.array(self._tokens[-self._max_tokens :], dtype=np.int32)

    @staticmethod
    def checked(tokens: NDArray[np.generic], vocab_size: int) -> NDArray[np.int32]:
        """The tokens that `array` has given. Raises ValueError for what it cannot have."""
        if tokens.dtype != np.int32 or tokens.ndim != 1:
            raise ValueError(f"texts of type {tokens.dtype} and shape {tokens.shape}")
        known = tokens.astype(np.int32)
        if len(known) and not (known.min() >= _END and known.max() < vocab_size):
            raise ValueError(f"a token of a text is not in the vocabulary of {vocab_size}")
        return known

    def load(self, tokens: NDArray[np.int32]) -> None:
        """Remember these instead."""
        self.erase()
        self._tokens = tokens[-self._max_tokens :].tolist()


def remembered(text: Sequence[int]) -> TextMemory:
    """A memory of one text, which has been read."""
    memory = TextMemory()
    memory.add(text)
    memory.catch_up(len(memory))
    return memory


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
        """Add the rows of `arrays` over the existing ones, the last of those that are more than the capacity. Raises
        ValueError for arrays that are not of such a table, and then changes nothing."""
        tokens, ids, probs = (rows[-self.capacity :] for rows in _checked(arrays, self.keys, self.vocab_size))
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
        self._version += 1
        slots = np.array([self._slot(token) for token in tokens.tolist()], dtype=np.intp)
        rows = self._rows
        rows.ids[slots], rows.probs[slots], rows.used[slots] = ids, probs, True
        self._version += 1

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
    """Saved arrays, each row by falling probability. Raises ValueError if they are not of a table with these keys and
    vocabulary."""
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
    order = np.argsort(-shares, axis=1, kind="stable")
    shares = np.take_along_axis(shares, order, axis=1)
    known = shares >= _MIN_PROB
    followers = np.where(known, np.take_along_axis(followers, order, axis=1), -1)
    return rows, followers, np.where(known, shares, np.float32(0.0))
