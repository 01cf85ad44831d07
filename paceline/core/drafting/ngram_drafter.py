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

from paceline.core.drafting.acceptance import AcceptanceByRank, margin_class
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS, LookupTable, bigram_key
from paceline.core.drafting.suffix_automaton import NOTHING, Match, SuffixAutomaton
from paceline.core.drafting.tree_search import NO_DRAFT, PLAIN, DraftTree, Scoring, TreeShape, fill, grow_tree
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.noise import gumbel_of
from paceline.core.sampling.sampler import SamplingParams

Law = list[tuple[int, float]]  # tokens with probabilities, falling

_LENGTHS: Final = (2, 3, 5, 9, 17)  # classes of matches begin there
_MATCH_FIRSTS: Final = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # prior: the latest continuation is right, by class
_DISAGREE, _UNKNOWN, _AGREE = range(3)  # the tables' first guess is another, there is none, it is the same
_TOKEN, _SHORT, _PAIR, _LONG = range(4)  # where a law's first guess is from: last token, match, last two tokens, match
_SOURCES: Final = 4
_GUESS_FIRSTS: Final = tuple(clear + more for clear in (0.3, 0.45, 0.6, 0.75) for more in (0.0, 0.05, 0.1, 0.2))
_LEAST_MATCH: Final = 3  # tokens: of what follows two, the pairs know more if they know it
_LONG_MATCH: Final = 5
_WEIGHT: Final = 0.25  # of a new law in a row, on the path of the output
_WEIGHT_ASIDE: Final = 0.1  # and beside it
_MEMORY: Final = 0.99  # of what was learnt of guesses: the last hundred of a class count
_LEAST_PROB: Final = 5e-4  # noise that would lift a less likely token to the top comes once in thousands of tokens
_FLOOR: Final = 1e-300  # in place of a probability of 0, whose logarithm there is not


@dataclass(slots=True)
class DrafterStats:
    """How good guesses are; of answers that are sampled alike, and it outlives each of them."""

    matches: AcceptanceByRank = field(
        default_factory=lambda: AcceptanceByRank(tuple(f for f in _MATCH_FIRSTS for _ in range(3)), _MEMORY)
    )
    guesses: AcceptanceByRank = field(default_factory=lambda: AcceptanceByRank(_GUESS_FIRSTS, _MEMORY))


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """What a drafter does; the default is all it can. The rest are baselines and ablations."""

    tables: bool = True
    automaton: bool = True
    noise: bool = True  # rank by what the common noise will make of it
    probs: Literal["learnt", "law"] = "learnt"  # of guesses: as often as they were right, or as the laws have it
    pairs: bool | None = None  # rows for the last two tokens too; None: unless `probs` are the laws'
    blend: bool | None = None  # rows are means of laws, else overwritten or added to (DIAA); None: likewise
    scoring: Scoring = PLAIN
    interval: int = 1  # trees until the structure is looked for again
    template: TreeShape | None = None  # a static tree: this structure always


EVERYTHING: Final = DrafterOptions()


class _Guess(NamedTuple):
    """What may follow one context."""

    candidates: Law  # by rank
    group: int  # class of `DraftingSkill.guesses`
    continuations: tuple[int, ...]  # what the automaton named
    match_group: int  # class of `DraftingSkill.matches`


_NOTHING: Final = _Guess([], 0, (), 0)


@dataclass(slots=True, eq=False)
class Context:
    """A node of the tree that is being drafted, or its root."""

    before: int  # -1: unknown
    token: int
    match: Match
    position: int  # of the token that follows
    guess: _Guess = _NOTHING
    after: dict[int, Context] = field(default_factory=dict)


class NgramDrafter:
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
        skill: DrafterStats | None = None,
        options: DrafterOptions = EVERYTHING,
    ) -> None:
        """table: read and written. ends: tokens that nothing follows."""
        self._table = table
        self._sampling = sampling
        self._ends = ends
        self._skill = DrafterStats() if skill is None else skill
        self._options = options
        self._automaton = SuffixAutomaton()
        learnt = options.probs == "learnt"
        self._blend = learnt if options.blend is None else options.blend
        self._pairs = table.bigrams if options.tables and (learnt if options.pairs is None else options.pairs) else None
        self._last = self._before = -1  # the last observed token, and the one before
        self._at: Context | None = None  # its context in the last tree
        self._template = options.template
        self._trees = 0
        self._noisy = options.noise and sampling.temperature > 0.0
        self._temperature = sampling.temperature if sampling.temperature > 0.0 else 1.0

    # ---- what is told -----------------------------------------------------------------------------------------------
    def read(self, tokens: Iterable[int]) -> None:
        """A whole text that is not the answer's beginning: a document, say. Before the prompt."""
        if self._options.automaton:
            self._automaton.extend(tokens)
            self._automaton.separate()

    def observe(self, token: int) -> None:
        """The next token of prompt or output."""
        if self._at is not None:
            self._verify_guess(self._at.guess, token)
            self._at = self._at.after.get(token)
        if self._options.automaton:
            self._automaton.append(token)
        self._before, self._last = self._last, token

    def learn(self, token: int, dist: Dist, *, before: int | None = None, accepted: bool = True) -> None:
        """The target's law at temperature 1 after a row that held `token`: on the accepted path, or on another.

        before: the token above that row. None where nothing stands there, or nobody knows what.
        """
        if not self._options.tables:
            return
        head = dist.top(NUM_SUCCESSORS)
        if not head:
            return
        ids, probs = zip(*head, strict=True)
        if self._blend:
            self._table.blend(token, ids, probs, _WEIGHT if accepted else _WEIGHT_ASIDE)
        else:
            self._table.record(token, ids, probs, overwrite=accepted)
        if accepted and self._pairs is not None and before is not None:
            self._pairs.blend(bigram_key(before, token), ids, probs, _WEIGHT)

    # ---- what is asked ----------------------------------------------------------------------------------------------
    def draft(self, budget: int, position: int) -> DraftTree:
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
        drafted = grow_tree(self, root, budget, self._options.scoring)
        if self._options.interval > 1:
            self._template = drafted.shape
        return drafted

    def root(self, position: int) -> Context:
        """For who grows a tree of its own: the context after the last observed token. position: as for `tree`."""
        self._at = Context(self._before, self._last, self._automaton.match, position)
        return self._at

    # ---- a source of `drafting` -------------------------------------------------------------------------------------
    def children(self, context: Context) -> Law:
        context.guess = _NOTHING if context.token in self._ends else self._guess(context)
        return context.guess.candidates

    def child(self, context: Context, token: int) -> Context:
        match = self._automaton.advance(context.match, token) if self._options.automaton else NOTHING
        after = context.after[token] = Context(context.token, token, match, context.position + 1)
        return after

    # ---- inside -----------------------------------------------------------------------------------------------------
    def _guess(self, context: Context) -> _Guess:
        """The two laws mixed, ranked by noise, and the probabilities as they have been right."""
        law: Law = []
        source = _TOKEN
        if self._options.tables:
            ids, probs = self._table.successors(context.token)
            law = list(zip(ids, probs, strict=True))
            if self._pairs is not None and context.before >= 0:
                ids, probs = self._pairs.successors(bigram_key(context.before, context.token))
                if ids:
                    law, source = _mixed(ids, probs, law)[:NUM_SUCCESSORS], _PAIR
        known: list[int] = []
        match_group = 0
        if context.match.length >= (_LEAST_MATCH if source == _PAIR else 1):
            known = [token for token, _ in self._automaton.continuations(context.match)]
        if known:
            match_group = _match_group(context.match.length, known[0], law)
            law = _mixed(known, self._skill.matches.probs(match_group), law)
        if not law:
            return _NOTHING
        law, gap = self._ranked(law, context.position)
        if known and law[0][0] == known[0]:
            source = max(source, _LONG if context.match.length >= _LONG_MATCH else _SHORT)
        group = margin_class(gap) * _SOURCES + source
        if self._options.probs == "learnt":
            shares = self._skill.guesses.probs(group)
            law = [(token, share) for (token, _), share in zip(law, shares, strict=False)]
        return _Guess(law, group, tuple(known), match_group)

    def _ranked(self, law: Law, position: int) -> tuple[Law, float]:
        """At most K of them by falling score, and how far the first stands above the second."""
        if not self._noisy:
            gap = (_log(law[0][1]) - _log(law[1][1])) / self._temperature if len(law) > 1 else math.inf
            return law[:NUM_SUCCESSORS], gap
        law = [each for each in law if each[1] >= _LEAST_PROB] or law[:1]
        noise = gumbel_of(self._sampling.seed, position, [token for token, _ in law])
        heat = self._temperature
        scored = [(_log(each[1]) / heat + extra, each) for each, extra in zip(law, noise, strict=True)]
        scored.sort(reverse=True)
        gap = scored[0][0] - scored[1][0] if len(scored) > 1 else math.inf
        return [each for _, each in scored[:NUM_SUCCESSORS]], gap

    def _verify_guess(self, guess: _Guess, token: int) -> None:
        """Which of the guesses the target was."""
        if guess is _NOTHING:
            return
        tokens = [child for child, _ in guess.candidates]
        self._skill.guesses.add(guess.group, tokens.index(token) if token in tokens else None)
        named = guess.continuations
        if named:
            self._skill.matches.add(guess.match_group, named.index(token) if token in named else None)


def _match_group(length: int, first: int, law: Law) -> int:
    agrees = _UNKNOWN if not law else _AGREE if law[0][0] == first else _DISAGREE
    return 3 * sum(length >= edge for edge in _LENGTHS) + agrees


def _mixed(known: Sequence[int], shares: Sequence[float], law: Law) -> Law:
    """What is known better, with its shares, and the other law for the rest."""
    mixed = dict(zip(known, shares, strict=False))
    taken = sum(mixed.values())
    theirs = sum([prob for token, prob in law if token in mixed])
    left = max(1.0 - taken, 0.0) / max(1.0 - theirs, 1e-6)
    found = [*mixed.items(), *[(token, prob * left + 1e-9) for token, prob in law if token not in mixed]]
    found.sort(key=_by_prob, reverse=True)
    return found


def _by_prob(entry: tuple[int, float]) -> float:
    return entry[1]


def _log(prob: float) -> float:
    return math.log(max(prob, _FLOOR))
