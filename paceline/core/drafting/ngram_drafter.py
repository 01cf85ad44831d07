"""Drafts for one request without a draft model: look-up tables and a suffix automaton, merged into one tree.

The automaton gives the continuations of the longest suffix that occurred before, the tables the target's distribution
after the last one or two tokens. Both are distributions over few tokens; they are mixed by the automaton's acceptance
rate at that match length, and ranked with the common noise, so that at any temperature the drafts are those the target
would sample under that distribution. Acceptance rates by rank and margin are estimated online. `learn` receives the
target's distributions.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import itemgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from paceline.core.clock import AcceptanceByRank
from paceline.core.drafting.lookup_table import (
    NOTHING,
    NUM_SUCCESSORS,
    LookupTable,
    Match,
    SuffixAutomaton,
    TextMemory,
    bigram_key,
)
from paceline.core.sampling.dist import Dist, gumbel_of
from paceline.core.sampling.sampler import SamplingParams

# ---- draft trees, best first (DIAA, Tian et al. 2026, eq. 1 and 2), and the acceptance rates that rank drafts --------
# The candidate with the highest probability of being accepted is added to the tree, and its children become candidates.
# As no child is likelier than its parent, the nodes are the B best of all, and each prefix of their order is the best
# tree of its size. A `DraftSource` supplies the candidates.
Place = TypeVar("Place")
Candidates = Sequence[tuple[int, float]]  # distinct tokens, best first, with their probabilities of being accepted


class DraftSource(Protocol, Generic[Place]):
    """Supplies candidate tokens. A context is the source's own state of a node; the caller supplies the root's."""

    def children(self, context: Place) -> Candidates:
        """Candidates for the next token. Called once per node."""

    def child(self, context: Place, token: int) -> Place:
        """The context one token further. Called once per node, in the order of the tree's nodes."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens below a common prefix, best first; children of one parent have distinct tokens. There may be several
    roots, or no token."""

    tokens: tuple[int, ...] = ()  # (n,)
    parents: tuple[int, ...] = ()  # (n,) parents[i] < i, -1 = the prefix
    probs: tuple[float, ...] = ()  # (n,) that the node is accepted: the product along its path

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> DraftTree:
        """The tree of the first nodes; the best of that size if the tree was grown best first."""
        return self if count >= len(self) else DraftTree(self.tokens[:count], self.parents[:count], self.probs[:count])


NO_DRAFT: Final = DraftTree()


def grow_tree(source: DraftSource[Place], root: Place, budget: int) -> DraftTree:
    """Draft at most `budget` nodes, by falling probability; of equals the one found first."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    # Only the best child of a node is a candidate; the next one follows once that has been added.
    waiting: list[tuple[float, int, int, _Siblings[Place]]] = []
    order = 0

    def expand(node: int, context: Place, prob: float) -> None:
        """Add the children of a node as candidates."""
        nonlocal order
        scored = [
            (-prob * share, rank, token) for rank, (token, share) in enumerate(source.children(context)) if share > 0.0
        ]
        if scored:
            scored.sort()
            order += 1
            heapq.heappush(waiting, (scored[0][0], order, 0, (node, context, scored)))

    if budget > 0:
        expand(-1, root, 1.0)
    while waiting:
        _, age, index, siblings = waiting[0]
        parent, above, scored = siblings
        if index + 1 < len(scored):
            heapq.heapreplace(waiting, (scored[index + 1][0], age, index + 1, siblings))
        else:
            heapq.heappop(waiting)
        negative, _, token = scored[index]
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        probs.append(-negative)
        if len(tokens) == budget:
            break
        expand(node, source.child(above, token), -negative)
    return DraftTree(tuple(tokens), tuple(parents), tuple(probs))


# The children of one node: the node, its context, and (-probability of the path, rank, token), best first.
_Siblings = tuple[int, Place, list[tuple[float, int, int]]]


def best_budget(probs: Sequence[float], seconds: Callable[[int], float], tokens: float = 1.0) -> int:
    """Number of a tree's first nodes that maximises output tokens per second, (1 + U(B)) / T_forward(B).

    seconds(rows): time of a forward, which has a row more than the tree has nodes. tokens: expected of a forward
    without any. 0: draft nothing.
    """
    best, best_rate, expected = 0, tokens / seconds(1), tokens
    for count, prob in enumerate(probs, start=1):
        expected += prob
        rate = expected / seconds(count + 1)
        if rate > best_rate:
            best, best_rate = count, rate
    return best


# Classes of drafts whose acceptance is counted separately (`core.clock.AcceptanceByRank`), by the margin between the
# best and the second score (log p plus the common noise): they determine how broad and how deep a draft tree should be.


_MARGIN_EDGES: Final = (0.5, 1.5, 4.0)  # nats between the two best scores
BESIDE_FIRSTS: Final = (0.55, 0.97)  # prior of the peer's choice, where it is another than the own one and where not
_MODEL_EDGES: Final = (0.15, 0.3, 0.6, 1.0, 1.5, 2.2, 3.0, 4.0, 6.0)  # likewise, of a draft model's scores
MODEL_FIRSTS: Final = (0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.87, 0.93, 0.97)
MODEL_MEMORY: Final = 0.995  # about the last two hundred of a class count


def margin_class(margin: float) -> int:
    """Class of the margin between the two best scores; infinite for a single draft."""
    return bisect_right(_MARGIN_EDGES, margin)


def model_margin_class(margin: float) -> int:
    """Likewise of a draft model, by finer classes: its scores say more than those of n-grams."""
    return bisect_right(_MODEL_EDGES, margin)


def beside_choice(drafts: Sequence[int], choice: int) -> tuple[tuple[int, ...], int]:
    """Own drafts and the peer's choice after the same prefix as one list, best first, and its class."""
    agree = len(drafts) > 0 and drafts[0] == choice
    return (choice, *(token for token in drafts if token != choice)), int(agree)


TokenProbs = list[tuple[int, float]]  # tokens with probabilities, falling

_LENGTHS: Final = (2, 3, 5, 9, 17)  # lower bounds of the classes of match lengths
_MATCH_CLASSES: Final = 18  # of matches in the text itself; as many follow of those in earlier ones
_MIN_REMEMBERED: Final = 4  # tokens of a match in an earlier text: shorter ones are everywhere
_MATCH_FIRSTS: Final = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # prior acceptance rate of the latest continuation, by class
_DISAGREE, _UNKNOWN, _AGREE = range(3)  # the tables' first token is another, there is none, it is the same
_TOKEN, _SHORT, _BIGRAM, _LONG = range(4)  # source of the first draft: last token, short match, bigram, long match
_SOURCES: Final = 4
# Prior acceptance rate of the first draft, by margin class and source.
_DRAFT_FIRSTS: Final = tuple(base + more for base in (0.3, 0.45, 0.6, 0.75) for more in (0.0, 0.05, 0.1, 0.2))
_MIN_MATCH: Final = 3  # tokens, where there is a row for the bigram, which is better than a match of two tokens
_LONG_MATCH: Final = 5  # tokens
_WEIGHT: Final = 0.25  # of a new distribution in a row, on the accepted path
_REJECTED_WEIGHT: Final = 0.1  # likewise, off the accepted path
_MEMORY: Final = 0.99  # factor on older outcomes of drafts: about the last hundred of a class count
_MIN_PROB: Final = 5e-4  # noise lifts a less likely token to the top once in thousands of tokens
_FLOOR: Final = 1e-300  # replaces a probability of 0, so that the logarithm is finite


@dataclass(slots=True)
class DrafterStats:
    """Acceptance rates of drafts, shared by requests with alike sampling and kept beyond them."""

    matches: AcceptanceByRank = field(
        default_factory=lambda: AcceptanceByRank(tuple(f for f in 2 * _MATCH_FIRSTS for _ in range(3)), _MEMORY)
    )
    drafts: AcceptanceByRank = field(default_factory=lambda: AcceptanceByRank(_DRAFT_FIRSTS, _MEMORY))


class _Candidates(NamedTuple):
    """Candidate tokens after one context."""

    tokens: TokenProbs  # by rank
    group: int  # class of `DrafterStats.drafts`
    continuations: tuple[int, ...]  # from the automaton
    match_group: int  # class of `DrafterStats.matches`


_NO_CANDIDATES: Final = _Candidates([], 0, (), 0)


_Remembered = tuple[SuffixAutomaton, Match]


@dataclass(slots=True, eq=False)
class Context:
    """A node of the tree that is being drafted, or its root."""

    before: int  # -1: unknown
    token: int
    match: Match
    position: int  # of the next token
    remembered: _Remembered | None = None  # a longer match in an earlier text
    candidates: _Candidates = _NO_CANDIDATES
    after: dict[int, Context] = field(default_factory=dict)


class NgramDrafter:
    """Drafter of one request. Receives the tokens of prompt and output in order, and the target's distributions.

    For each step: `observe` all its output tokens first, then `learn` from its rows (those of the accepted path last),
    so that drafts are judged by the tables they came from. `draft` may come between the two: it then reads tables that
    are a step old, and `learn` may run during the next forward.
    """

    def __init__(
        self,
        table: LookupTable,
        sampling: SamplingParams,
        *,
        eos_ids: frozenset[int] = frozenset(),
        stats: DrafterStats | None = None,
        predicted: TextMemory | None = None,
    ) -> None:
        """table: read and written. predicted: what the text may turn out to be."""
        self._table = table
        self._sampling = sampling
        self._eos_ids = eos_ids
        self._stats = DrafterStats() if stats is None else stats
        self._automaton = SuffixAutomaton()
        self._bigrams = table.bigrams
        self._memories = table.memories if predicted is None else [predicted, *table.memories]
        self._cursors: list[_Remembered] = []  # into them, once something has been observed
        self._last = self._before = -1  # the last observed token, and the one before
        self._at: Context | None = None  # its context in the last tree
        self._noisy = sampling.temperature > 0.0
        self._temperature = sampling.temperature if sampling.temperature > 0.0 else 1.0

    # ---- input ------------------------------------------------------------------------------------------------------
    def read(self, tokens: Iterable[int]) -> None:
        """Add a separate text, such as a document; empty: what is observed next does not continue what was before."""
        self._at, self._cursors = None, []
        self._automaton.extend(tokens)
        self._automaton.separate()

    def observe(self, token: int) -> None:
        """Add the next token of prompt or output."""
        if self._at is not None:
            self._record_outcome(self._at.candidates, token)
            self._at = self._at.after.get(token)
        self._automaton.append(token)
        if self._memories:
            self._cursors = [self._advanced(*each, token) for each in zip_longest(self._memories, self._cursors)]
        self._before, self._last = self._last, token

    def learn(self, token: int, dist: Dist, *, before: int | None = None, accepted: bool = True) -> None:
        """Add the target's distribution at temperature 1 after `token`, on the accepted path or off it.

        before: the token before `token`; None if there is none or it is unknown.
        """
        head = dist.top(NUM_SUCCESSORS)
        if not head:
            return
        ids, probs = zip(*head, strict=True)
        self._table.blend(token, ids, probs, _WEIGHT if accepted else _REJECTED_WEIGHT)
        if accepted and self._bigrams is not None and before is not None:
            self._bigrams.blend(bigram_key(before, token), ids, probs, _WEIGHT)

    # ---- drafts -----------------------------------------------------------------------------------------------------
    def draft(self, budget: int, position: int) -> DraftTree:
        """At most `budget` nodes after the last observed token, best first. position: of the next output token."""
        if self._last < 0 or budget <= 0:
            self._at = None
            return NO_DRAFT
        return grow_tree(self, self.root(position), budget)

    def root(self, position: int) -> Context:
        """The context after the last observed token, for callers that grow the tree themselves. position: as in
        `draft`."""
        best = max(self._cursors, key=lambda each: each[1].length, default=None)
        remembered = None if best is None or best[1].length < _MIN_REMEMBERED else best
        self._at = Context(self._before, self._last, self._automaton.match, position, remembered)
        return self._at

    # ---- the `DraftSource` ------------------------------------------------------------------------------------------
    def children(self, context: Context) -> TokenProbs:
        context.candidates = _NO_CANDIDATES if context.token in self._eos_ids else self._candidates(context)
        return context.candidates.tokens

    def child(self, context: Context, token: int) -> Context:
        match = self._automaton.advance(context.match, token)
        remembered = None
        if context.remembered is not None:
            automaton, at = context.remembered
            at = automaton.advance(at, token)
            remembered = (automaton, at) if at.length >= _MIN_REMEMBERED else None
        after = context.after[token] = Context(context.token, token, match, context.position + 1, remembered)
        return after

    # ---- internals --------------------------------------------------------------------------------------------------
    @staticmethod
    def _advanced(memory: TextMemory, cursor: _Remembered | None, token: int) -> _Remembered:
        """The cursor behind a further token; from nothing where the memory has begun anew."""
        automaton = memory.automaton
        match = NOTHING if cursor is None or cursor[0] is not automaton else cursor[1]
        return automaton, automaton.advance(match, token)

    def _candidates(self, context: Context) -> _Candidates:
        """Mix the tables' and the automaton's distributions, rank them with the noise, assign acceptance rates."""
        source = _TOKEN
        ids, probs = self._table.successors(context.token)
        dist = list(zip(ids, probs, strict=True))
        if self._bigrams is not None and context.before >= 0:
            ids, probs = self._bigrams.successors(bigram_key(context.before, context.token))
            if ids:
                dist, source = _mixed(ids, probs, dist)[:NUM_SUCCESSORS], _BIGRAM
        continuations: list[int] = []
        match_group = 0
        automaton, match, first_class = self._automaton, context.match, 0
        if context.remembered is not None and context.remembered[1].length > match.length:
            (automaton, match), first_class = context.remembered, _MATCH_CLASSES
        if match.length >= (_MIN_MATCH if source == _BIGRAM else 1):
            continuations = [token for token, _ in automaton.continuations(match)]
        if continuations:
            match_group = first_class + _match_group(match.length, continuations[0], dist)
            dist = _mixed(continuations, self._stats.matches.probs(match_group), dist)
        if not dist:
            return _NO_CANDIDATES
        dist, margin = self._ranked(dist, context.position)
        if continuations and dist[0][0] == continuations[0]:
            source = max(source, _LONG if match.length >= _LONG_MATCH else _SHORT)
        group = margin_class(margin) * _SOURCES + source
        return _Candidates(self._rated(dist, group), group, tuple(continuations), match_group)

    def _rated(self, ranked: TokenProbs, group: int) -> TokenProbs:
        """These tokens, best first, each with the acceptance rate of its rank in this class."""
        rates = self._stats.drafts.probs(group)
        return [(token, rate) for (token, _), rate in zip(ranked, rates, strict=False)]

    def _ranked(self, dist: TokenProbs, position: int) -> tuple[TokenProbs, float]:
        """At most `NUM_SUCCESSORS` tokens by falling score, and the margin between the first two scores."""
        if not self._noisy:
            margin = (_log(dist[0][1]) - _log(dist[1][1])) / self._temperature if len(dist) > 1 else math.inf
            return dist[:NUM_SUCCESSORS], margin
        dist = [each for each in dist if each[1] >= _MIN_PROB] or dist[:1]
        noise = gumbel_of(self._sampling.seed, position, [token for token, _ in dist])
        temperature = self._temperature
        scored = [(_log(each[1]) / temperature + extra, each) for each, extra in zip(dist, noise, strict=True)]
        scored.sort(reverse=True)
        margin = scored[0][0] - scored[1][0] if len(scored) > 1 else math.inf
        return [each for _, each in scored[:NUM_SUCCESSORS]], margin

    def _record_outcome(self, candidates: _Candidates, token: int) -> None:
        """Record the rank of the target among the candidates."""
        if candidates is _NO_CANDIDATES:
            return
        tokens = [child for child, _ in candidates.tokens]
        self._stats.drafts.add(candidates.group, tokens.index(token) if token in tokens else None)
        continuations = candidates.continuations
        if continuations:
            rank = continuations.index(token) if token in continuations else None
            self._stats.matches.add(candidates.match_group, rank)


def _match_group(length: int, first: int, dist: TokenProbs) -> int:
    agreement = _UNKNOWN if not dist else _AGREE if dist[0][0] == first else _DISAGREE
    return 3 * sum(length >= edge for edge in _LENGTHS) + agreement


def _mixed(tokens: Sequence[int], probs: Sequence[float], backoff: TokenProbs) -> TokenProbs:
    """These tokens with their probabilities; the remaining mass goes to the other tokens of `backoff`."""
    mixed = dict(zip(tokens, probs, strict=False))
    mass = sum(mixed.values())
    common = sum([prob for token, prob in backoff if token in mixed])
    scale = max(1.0 - mass, 0.0) / max(1.0 - common, 1e-6)
    found = [*mixed.items(), *[(token, prob * scale + 1e-9) for token, prob in backoff if token not in mixed]]
    found.sort(key=itemgetter(1), reverse=True)
    return found


def _log(prob: float) -> float:
    return math.log(max(prob, _FLOOR))
