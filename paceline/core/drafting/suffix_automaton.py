"""An online suffix automaton: the longest ending of a text that occurred in it before, and what came next there.

Blumer et al. 1985, built token by token in amortised constant time; used for drafting as SAM decoding does (Hu et al.
2025), but with the most recent occurrence in place of the first, and with all continuations instead of one. Several
texts (documents, a prompt) stand one after another with `separate` between them, and nothing matches across.
Most states have one way on: that one stands in two arrays, and only states that branch have a dict.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final, NamedTuple

MAX_TOKENS: Final = 1 << 17  # of all texts together; about 100 bytes each
_TOUCHED: Final = 32  # endings of a text, longest first, whose latest occurrence is noted with every token
_WAYS: Final = 8  # a state with more ways on says little: of those only the latest is named

ROOT: Final = 0


class Match(NamedTuple):
    """An ending that occurred before: a state of the automaton, and how many tokens of it are the same."""

    state: int
    length: int


NOTHING: Final = Match(ROOT, 0)


class SuffixAutomaton:
    """States are numbered from 0, the empty text. A full automaton learns no more, and goes on matching."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.match = NOTHING  # of the text so far
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._separators = 0
        self._text = array("i")
        self._last = ROOT  # the state of the whole text
        self._length = array("i", [0])  # of the longest text of a state
        self._link = array("i", [-1])  # to the state of its longest ending that is in another state
        self._latest = array("i", [0])  # number of tokens up to the end of its latest occurrence but the present one
        self._count = array("i", [0])  # occurrences, not of short endings in repetitive text
        self._token = array("i", [-1])  # the first way on: its token, -1 while there is none,
        self._next = array("i", [-1])  # and where it leads
        self._branches: dict[int, dict[int, int]] = {}  # further ways on

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the text. Tokens are 0 or more."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        if self.num_tokens >= self._max_tokens:
            self.match = self.advance(self.match, token)
            return
        self._append(token)
        state = self._link[self._last]  # what is shorter than the whole text and of another state occurred before
        self.match = Match(state, self._length[state])

    def separate(self) -> None:
        """Begin another text: a token of its own follows, which nothing matches."""
        self.match = NOTHING
        if self.num_tokens < self._max_tokens:
            self._separators += 1
            self._append(-1 - self._separators)

    def advance(self, match: Match, token: int) -> Match:
        """The match of a text that goes on with `token`, without learning it."""
        state, length = match
        while True:
            after = self._follow(state, token)
            if after >= 0:
                return Match(after, length + 1)
            state = self._link[state]
            if state < 0:
                return NOTHING
            length = self._length[state]

    def continuations(self, match: Match) -> list[tuple[int, int]]:
        """(token, occurrences) of what came next after earlier occurrences of the match.

        The latest one first, then the most frequent. Nothing for a match of length 0.
        """
        state = match.state
        if state == ROOT or self._token[state] == -1:
            return []
        further = self._branches.get(state)
        after = self._latest[state]
        latest = self._text[after] if after < len(self._text) else -1
        if further is None or len(further) >= _WAYS:
            ways = [(self._token[state], self._next[state])] if further is None else []
        else:
            ways = [(self._token[state], self._next[state]), *further.items()]
        found = [(token, max(self._count[way], 1)) for token, way in ways if token >= 0 and token != latest]
        if len(found) > 1:
            found.sort(key=lambda each: -each[1])
        if latest >= 0:
            found.insert(0, (latest, max(self._count[self._follow(state, latest)], 1)))
        return found

    def chain(self, match: Match, limit: int) -> list[int]:
        """At most `limit` tokens that followed the latest earlier occurrence of the match."""
        tokens: list[int] = []
        while len(tokens) < limit and (ways := self.continuations(match)):
            tokens.append(ways[0][0])
            match = self.advance(match, ways[0][0])
        return tokens

    @property
    def num_states(self) -> int:
        return len(self._length)

    @property
    def num_bytes(self) -> int:
        """Roughly: a branching state's dict counts 232 bytes for each five ways on."""
        dicts = sum(232 * (1 + len(ways) // 5) for ways in self._branches.values())
        return 24 * self.num_states + 4 * self.num_tokens + dicts

    def _follow(self, state: int, token: int) -> int:
        """Where `token` leads, -1 for nowhere."""
        if self._token[state] == token:
            return self._next[state]
        further = self._branches.get(state)
        return -1 if further is None else further.get(token, -1)

    def _lead(self, state: int, token: int, after: int) -> None:
        first = self._token[state]
        if first == -1 or first == token:
            self._token[state], self._next[state] = token, after
        else:
            self._branches.setdefault(state, {})[token] = after

    def _state(self, length: int, link: int, latest: int, count: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._latest.append(latest)
        self._count.append(count)
        self._token.append(-1)
        self._next.append(-1)
        return len(self._length) - 1

    def _append(self, token: int) -> None:
        self._note()
        self.num_tokens += 1
        self._text.append(token)
        whole = self._state(self._length[self._last] + 1, ROOT, self.num_tokens, 0)
        state, self._last = self._last, whole
        while state >= 0 and self._follow(state, token) < 0:
            self._lead(state, token, whole)
            state = self._link[state]
        if state < 0:
            return
        after = self._follow(state, token)
        if self._length[state] + 1 == self._length[after]:
            self._link[whole] = after
            return
        clone = self._state(self._length[state] + 1, self._link[after], self._latest[after], self._count[after])
        self._token[clone], self._next[clone] = self._token[after], self._next[after]
        if after in self._branches:
            self._branches[clone] = dict(self._branches[after])
        while state >= 0 and self._follow(state, token) == after:
            self._lead(state, token, clone)
            state = self._link[state]
        self._link[after] = self._link[whole] = clone

    def _note(self) -> None:
        """The endings of the text so far belong to the past now; the longest `_TOUCHED` of them are told so."""
        state = self._last
        for _ in range(_TOUCHED):
            if state <= ROOT:
                return
            self._latest[state] = self.num_tokens
            self._count[state] += 1
            state = self._link[state]
