"""Online suffix automaton: the longest suffix of a text that occurred in it before, and its continuations.

Blumer et al. 1985, built token by token in amortised constant time; used for drafting as in SAM decoding (Hu et al.
2025), but with the most recent occurrence instead of the first, and all continuations instead of one. Several texts
(documents, a prompt) are appended with `separate` between them, and matches do not cross the boundary.
Most states have one transition, stored in two arrays; only branching states have a dict.

`TextMemory` is one over earlier answers of an owner, as in SuffixDecoding (Oliaro et al. 2024).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
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
        """What `array` was. Raises ValueError for what it cannot have been."""
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
