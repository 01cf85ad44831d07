"""Drafts for one answer, without a draft model: look-up tables and a suffix automaton, merged into one tree.

The automaton knows what came next after the longest ending that occurred before; the tables know what the target
thought after the last token alone. Both give a law over few tokens; they are mixed by how often the automaton has been
right after matches of such length, and ranked with the common noise, so that at any temperature the guesses are those
the target would choose if it thought so. How likely a guess of such rank and clearness is to be right is learnt live.
Knows no engine: what a target thinks is told by `learn`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np

from paceline.core.dist import Dist
from paceline.core.drafting import NO_DRAFT, PLAIN, DraftedTree, Scoring, Template, best_first, fill
from paceline.core.lookup import K, LookupTable
from paceline.core.noise import gumbel
from paceline.core.ranks import RankTable, clearness
from paceline.core.sampling import SamplingParams
from paceline.core.suffix_automaton import NOTHING, Match, SuffixAutomaton

Law = list[tuple[int, float]]  # tokens with probabilities, falling

_LENGTHS: Final = (2, 3, 5, 9, 17)  # classes of matches begin there
_MATCH_FIRSTS: Final = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # prior: the latest continuation is right, by class
_DISAGREE, _UNKNOWN, _AGREE = range(3)  # the tables' first guess is another, there is none, it is the same
_SOURCES: Final = 3  # of a law's first guess: the tables, a short match, a long one
_GUESS_FIRSTS: Final = (0.4, 0.5, 0.6, 0.5, 0.6, 0.7, 0.65, 0.7, 0.85, 0.8, 0.85, 0.95)  # by clearness and source
_LONG: Final = 5  # tokens of a match


@dataclass(slots=True)
class DraftingSkill:
    """How good guesses are; of answers that are sampled alike, and it outlives each of them."""

    matches: RankTable = field(default_factory=lambda: RankTable(tuple(f for f in _MATCH_FIRSTS for _ in range(3))))
    guesses: RankTable = field(default_factory=lambda: RankTable(_GUESS_FIRSTS))


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """What a drafter does; the default is all it can. The rest are baselines and ablations."""

    tables: bool = True
    automaton: bool = True
    noise: bool = True  # rank by what the common noise will make of it
    probs: Literal["learnt", "law"] = "learnt"  # of guesses: as often as they were right, or as the laws have it
    scoring: Scoring = PLAIN
    interval: int = 1  # trees until the structure is looked for again
    template: Template | None = None  # a static tree: this structure always


EVERYTHING: Final = DraftingOptions()


class _Guess(NamedTuple):
    """What may follow one context."""

    children: Law  # by rank
    group: int  # class of `DraftingSkill.guesses`
    continuations: tuple[int, ...]  # what the automaton named
    match_group: int  # class of `DraftingSkill.matches`


_NOTHING: Final = _Guess([], 0, (), 0)


@dataclass(slots=True, eq=False)
class Context:
    """A node of the tree that is being drafted, or its root."""

    token: int
    match: Match
    position: int  # of the token that follows
    guess: _Guess = _NOTHING
    after: dict[int, Context] = field(default_factory=dict)


class Drafter:
    """Told the tokens of prompt and answer in order, and what the target thought; drafts what may come next.

    For each step: `observe` all its output tokens first, then `learn` from its rows (on the accepted path last), so
    that guesses are judged by what was known when they were made. `tree` may come between the two: it then reads tables
    that are a step old, and what is learnt may be learnt while the next forward runs.
    """

    def __init__(
        self,
        table: LookupTable,
        sampling: SamplingParams,
        *,
        ends: frozenset[int] = frozenset(),
        skill: DraftingSkill | None = None,
        options: DraftingOptions = EVERYTHING,
    ) -> None:
        """table: read and written. ends: tokens that nothing follows."""
        self._table = table
        self._sampling = sampling
        self._ends = ends
        self._skill = DraftingSkill() if skill is None else skill
        self._options = options
        self._automaton = SuffixAutomaton()
        self._last = -1  # the last observed token
        self._at: Context | None = None  # its context in the last tree
        self._template = options.template
        self._trees = 0
        self._noisy = options.noise and sampling.temperature > 0.0
        self._heat = sampling.temperature if sampling.temperature > 0.0 else 1.0

    # ---- what is told -----------------------------------------------------------------------------------------------
    def read(self, tokens: Iterable[int]) -> None:
        """A whole text that is not the answer's beginning: a document, say. Before the prompt."""
        if self._options.automaton:
            self._automaton.extend(tokens)
            self._automaton.separate()

    def observe(self, token: int) -> None:
        """The next token of prompt or output."""
        if self._at is not None:
            self._judge(self._at.guess, token)
            self._at = self._at.after.get(token)
        if self._options.automaton:
            self._automaton.append(token)
        self._last = token

    def learn(self, token: int, dist: Dist, *, accepted: bool = True) -> None:
        """The target's law at temperature 1 after a row that held `token`: on the accepted path, or on another."""
        if self._options.tables:
            ids, probs = zip(*dist.top(K), strict=True)
            self._table.record(token, ids, probs, overwrite=accepted)

    def harvest(self, tokens: Sequence[int], dists: Sequence[Dist]) -> None:
        """The target's laws after these tokens of a prompt."""
        for token, dist in zip(tokens, dists, strict=True):
            self.learn(token, dist)

    # ---- what is asked ----------------------------------------------------------------------------------------------
    def tree(self, budget: int, position: int) -> DraftedTree:
        """At most `budget` nodes below the last observed token, best first. position: of the next output token."""
        if self._last < 0 or budget <= 0:
            self._at = None
            return NO_DRAFT
        root = self.root(position)
        again = self._template is None or (
            self._options.template is None and self._trees % max(self._options.interval, 1) == 0
        )
        self._trees += 1
        if not again and self._template is not None:
            return fill(self, root, self._template).first(budget)
        drafted = best_first(self, root, budget, self._options.scoring)
        if self._options.interval > 1:
            self._template = drafted.template
        return drafted

    def root(self, position: int) -> Context:
        """For who grows a tree of its own: the context after the last observed token. position: as for `tree`."""
        self._at = Context(self._last, self._automaton.match, position)
        return self._at

    # ---- a source of `drafting` -------------------------------------------------------------------------------------
    def children(self, context: Context) -> Law:
        context.guess = _NOTHING if context.token in self._ends else self._guess(context)
        return context.guess.children

    def child(self, context: Context, token: int) -> Context:
        match = self._automaton.advance(context.match, token) if self._options.automaton else NOTHING
        after = context.after[token] = Context(token, match, context.position + 1)
        return after

    # ---- inside -----------------------------------------------------------------------------------------------------
    def _guess(self, context: Context) -> _Guess:
        """The two laws mixed, ranked by noise, and the probabilities as they have been right."""
        law: Law = []
        if self._options.tables:
            ids, probs = self._table.successors(context.token)
            law = list(zip(ids, probs, strict=True))
        known = self._automaton.continuations(context.match)
        match_group = 0
        source = 0
        if known:
            match_group = _match_group(context.match.length, known[0][0], law)
            law = _mixed(known, self._skill.matches.probs(match_group), law)
            source = 1 + (context.match.length >= _LONG)
        if not law:
            return _NOTHING
        scores = self._scores(law, context.position)
        order = sorted(range(len(law)), key=lambda i: -scores[i])[:K]
        gap = scores[order[0]] - scores[order[1]] if len(order) > 1 else math.inf
        if known and law[order[0]][0] != known[0][0]:
            source = 0
        group = clearness(gap) * _SOURCES + source
        if self._options.probs == "law":
            children = [law[i] for i in order]
        else:
            children = list(zip([law[i][0] for i in order], self._skill.guesses.probs(group), strict=False))
        return _Guess(children, group, tuple([token for token, _ in known]), match_group)

    def _scores(self, law: Law, position: int) -> list[float]:
        scores = [math.log(prob) / self._heat for _, prob in law]
        if self._noisy:
            noise = gumbel(self._sampling.seed, position, np.array([token for token, _ in law], dtype=np.int32))
            return [score + extra for score, extra in zip(scores, noise.tolist(), strict=True)]
        return scores

    def _judge(self, guess: _Guess, token: int) -> None:
        """Which of the guesses the target was."""
        if guess is _NOTHING:
            return
        tokens = [child for child, _ in guess.children]
        self._skill.guesses.add(guess.group, tokens.index(token) if token in tokens else None)
        named = guess.continuations
        if named:
            self._skill.matches.add(guess.match_group, named.index(token) if token in named else None)


def _match_group(length: int, first: int, law: Law) -> int:
    agrees = _UNKNOWN if not law else _AGREE if law[0][0] == first else _DISAGREE
    return 3 * sum(length >= edge for edge in _LENGTHS) + agrees


def _mixed(known: list[tuple[int, int]], shares: list[float], law: Law) -> Law:
    """The automaton's continuations with their shares, and the tables' law for the rest."""
    mixed = {token: share for (token, _), share in zip(known, shares, strict=False)}
    taken = sum(mixed.values())
    theirs = sum(prob for token, prob in law if token in mixed)
    left = max(1.0 - taken, 0.0) / max(1.0 - theirs, 1e-6)
    rest = [(token, max(prob * left, 1e-9)) for token, prob in law if token not in mixed]
    return sorted([*mixed.items(), *rest], key=lambda entry: -entry[1])
