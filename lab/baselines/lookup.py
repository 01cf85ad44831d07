"""DIAA's parts one by one, for `lookup_tree`: what it is compared with, and what it is without one of its features."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeVar

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.budget import AdaptiveBudget, BudgetStats
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS, LookupTable, SuffixAutomaton
from paceline.core.drafting.ngram_drafter import (
    DrafterStats,
    DraftSource,
    DraftTree,
    NgramDrafter,
    TokenProbs,
    grow_tree,
)
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.base import FinishReason
from paceline.strategies.lookup_tree import LookupTree

Context = TypeVar("Context")


class FixedBudget(AdaptiveBudget):
    """A constant number of draft tokens, whatever a step takes."""

    def __init__(self, rows: int) -> None:
        super().__init__(BudgetStats(), rows=rows)
        self.awake = True

    def take_prompt_rows(self, most: int) -> int:
        return most

    def max_draft_tokens(self) -> int:
        return self._rows

    def choose(self, probs: Sequence[float]) -> int:
        return min(len(probs), self._rows)

    def record(
        self,
        drafted: int,
        expected: float,
        accepted: int,
        step: StepSize,
        seconds: float,
        *,
        waited: float = 0.0,
        others: int = 0,
    ) -> None:
        """No effect."""

    @property
    def resting(self) -> bool:
        return False

    @property
    def paused(self) -> bool:
        return self._rows == 0

    def stats(self) -> dict[str, float]:
        return {}


# ---- trees ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Scoring:
    """s(child) = s(parent) * prob * depth_decay * width_decay**rank; no depth decay for the roots."""

    depth_decay: float = 1.0  # delta, in (0, 1]
    width_decay: float = 1.0  # alpha, in (0, 1]
    threshold: float = 0.0  # tau: lower scores are dropped


PAPER: Final = Scoring(0.8, 0.7, 5e-3)  # the values of DIAA's figure 7


def grow_scored(source: DraftSource[Context], root: Context, budget: int, scoring: Scoring) -> DraftTree:
    """Draft at most `budget` nodes, by falling score; of equals the one found first."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    waiting: list[tuple[float, int, int, int, float, Context]] = []

    def expand(node: int, context: Context, prob: float, base: float) -> None:
        for rank, (token, share) in enumerate(source.children(context)):
            score = base * scoring.width_decay**rank * share
            if share > 0.0 and score >= scoring.threshold:
                heapq.heappush(waiting, (-score, len(tokens), rank, token, prob * share, context))
                above[len(tokens), token] = node

    above: dict[tuple[int, int], int] = {}  # parent of a candidate, by when it was found and its token
    if budget > 0:
        expand(-1, root, 1.0, 1.0)
    while waiting and len(tokens) < budget:
        negative, found, _, token, prob, context = heapq.heappop(waiting)
        node = len(tokens)
        tokens.append(token)
        parents.append(above[found, token])
        probs.append(prob)
        expand(node, source.child(context, token), prob, -negative * scoring.depth_decay)
    return DraftTree(tuple(tokens), tuple(parents), tuple(probs))


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree's structure without its tokens: `ranks[i]` is the rank of node i among the candidates after its parent."""

    parents: tuple[int, ...]  # (n,) parents[i] < i, -1 = the prefix
    ranks: tuple[int, ...]  # (n,) from 0


def fill(source: DraftSource[Context], root: Context, shape: TreeShape) -> DraftTree:
    """A tree of this shape with the source's tokens. Nodes whose rank has no candidate are left out with their
    subtrees."""
    contexts: dict[int, Context] = {-1: root}
    candidates: dict[int, Sequence[tuple[int, float]]] = {}
    place: dict[int, int] = {-1: -1}
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        if parent not in place:
            continue
        if parent not in candidates:
            candidates[parent] = source.children(contexts[parent])
        if rank >= len(candidates[parent]):
            continue
        token, share = candidates[parent][rank]
        place[node] = len(tokens)
        contexts[node] = source.child(contexts[parent], token)
        probs.append(share if parent < 0 else share * probs[place[parent]])
        tokens.append(token)
        parents.append(place[parent])
    return DraftTree(tuple(tokens), tuple(parents), tuple(probs))


HALVING: Final = tuple(0.5 ** (rank + 1) for rank in range(8))  # each rank half as likely as the one before
RECYCLING_LEVELS: Final = (8, 21, 25, 15, 8, 3)  # nodes by depth of Token Recycling's tree of 80 (Luo et al. 2025)


@dataclass(frozen=True, slots=True)
class _SameEverywhere:
    """Rank r, as a token, is accepted with the same probability in every context."""

    shares: tuple[float, ...]

    def children(self, context: None) -> list[tuple[int, float]]:  # noqa: ARG002
        return list(enumerate(self.shares))

    def child(self, context: None, token: int) -> None:  # noqa: ARG002
        return None


def static_shape(budget: int, shares: Sequence[float] = HALVING) -> TreeShape:
    """The best tree of this size independent of the text, if rank r is accepted with probability `shares[r]`."""
    grown = grow_tree(_SameEverywhere(tuple(shares)), None, budget)
    return TreeShape(grown.parents, grown.tokens)


def levelled_shape(levels: Sequence[int] = RECYCLING_LEVELS, shares: Sequence[float] = HALVING) -> TreeShape:
    """A shape with these numbers of nodes by depth, each depth the most probable children of the depth before."""
    parents: list[int] = []
    ranks: list[int] = []
    above = [(1.0, -1)]
    for count in levels:
        options = [(-prob * share, node, rank) for prob, node in above for rank, share in enumerate(shares)]
        above = []
        for negative, node, rank in sorted(options)[:count]:
            above.append((-negative, len(parents)))
            parents.append(node)
            ranks.append(rank)
    return TreeShape(tuple(parents), tuple(ranks))


# ---- drafters -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """Features of a drafter, by default those of the served one."""

    tables: bool = True
    automaton: bool = True
    noise: bool = True  # rank with the common noise
    probs: Literal["learnt", "dist"] = "learnt"  # of drafts: acceptance rates, or the tables' probabilities
    bigrams: bool = True  # use rows for the last two tokens too
    blend: bool = True  # rows are means, else overwritten or added to (DIAA)
    scoring: Scoring | None = None  # None: nodes by probability
    shape: TreeShape | None = None  # a static tree of this shape
    interval: int = 1  # steps from one update of the tables to the next (DIAA's N)


AS_PUBLISHED: Final = DrafterOptions(automaton=False, probs="dist", bigrams=False, blend=False)  # and its scores


class VariedDrafter(NgramDrafter):
    """The served drafter with other features."""

    def __init__(
        self,
        table: LookupTable,
        sampling: SamplingParams,
        *,
        eos_ids: frozenset[int] = frozenset(),
        stats: DrafterStats | None = None,
        options: DrafterOptions,
    ) -> None:
        """table: nobody else's without `options.tables`."""
        super().__init__(table, sampling, eos_ids=eos_ids, stats=stats)
        self._options = options
        self._noisy = self._noisy and options.noise
        if not (options.tables and options.bigrams):
            self._bigrams = None
        if not options.automaton:
            self._automaton = SuffixAutomaton(max_tokens=0)
        if not (options.automaton and options.tables):
            self._memories = []
        self._steps = 0
        self._held: list[Callable[[], None]] = []  # lessons for the next update

    def learn(self, token: int, dist: Dist, *, before: int | None = None, accepted: bool = True) -> None:
        if self._options.interval > 1:
            self._held.append(partial(self._learn, token, dist, before, accepted))
        else:
            self._learn(token, dist, before, accepted)

    def _update(self) -> None:
        """A step is drafted for: learn what has come in the interval, if it is over."""
        self._steps += 1
        if self._steps % self._options.interval == 0:
            held, self._held = self._held, []
            for lesson in held:
                lesson()

    def _learn(self, token: int, dist: Dist, before: int | None, accepted: bool) -> None:
        if not self._options.tables:
            return
        if self._options.blend:
            super().learn(token, dist, before=before, accepted=accepted)
        elif head := dist.top(NUM_SUCCESSORS):
            row = dict(head)
            if not accepted:  # DIAA's add and replacement
                row |= {old: prob for old, prob in zip(*self._table.successors(token), strict=True) if old not in row}
            self._table.record(token, list(row), list(row.values()))

    def draft(self, budget: int, position: int) -> DraftTree:
        self._update()
        shape, scoring = self._options.shape, self._options.scoring
        if self._last >= 0 and budget > 0:
            if shape is not None:
                return fill(self, self.root(position), shape).first(budget)
            if scoring is not None:
                return grow_scored(self, self.root(position), budget, scoring)
        return super().draft(budget, position)

    def _rated(self, ranked: TokenProbs, group: int) -> TokenProbs:
        return super()._rated(ranked, group) if self._options.probs == "learnt" else ranked


class LessonsFirst(LookupTree):
    """The served machine, which learns before the next forward is asked for, not while it runs."""

    def _walked(self, output: list[int], reason: FinishReason | None) -> None:
        super()._walked(output, reason)
        self._tables.feed.finish()
