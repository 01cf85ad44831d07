"""Which rows a side computes next: the tree of drafts, grown best first.

The paper drafts one continuation, so a target that was the second guess costs a round trip. Here every node has several
children, weighed by how often such guesses were right, and a forward takes as many of the most likely nodes as pay for
themselves: one more row costs every forward a little, and saves what a miss costs when targets go through it.
The peer's laws serve as guesses too: with both laws known a node's only child is certain, and a slow side verifies in
one forward what a fast one has drafted. Width 1 is DRAGON's chain.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.core.aggregation.registry import Aggregator
from paceline.core.drafting.acceptance import margin_class
from paceline.core.drafting.online_stats import OnlineStats
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.noise import gumbel
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import Side, other
from paceline.strategies.aggregate.ngram_drafts import NgramDrafts
from paceline.strategies.decoding.prefix_tree import Guess, PrefixNode
from paceline.wire.messages import DraftLimits

Weigh = Callable[
    [PrefixNode], Mapping[Side, float] | None
]  # eta of both sides after a prefix; None while it is not known

LEAST_WEIGHT = 0.002  # a node less likely than this is not computed, however idle the engine
MAX_VISITS = 64  # nodes looked at for one forward, and so about the most that are alive: laws are large


class DraftTreePlanner:
    """Chooses nodes, and learns from targets how good guesses are."""

    def __init__(
        self,
        side: Side,
        rule: Aggregator,
        sampling: SamplingParams,
        drafting: DraftLimits,
        ends: frozenset[int],
        experience: OnlineStats | None = None,
        *,
        weigh: Weigh,
        forecast: NgramDrafts | None = None,
    ) -> None:
        """ends: tokens that nothing follows. forecast: guesses where no law is known."""
        self._weigh = weigh
        self._forecast = forecast
        self._side = side
        self._rule = rule
        self._sampling = sampling
        self._drafting = drafting
        self._ends = ends
        known = OnlineStats() if experience is None else experience
        self._own_ranks, self._peer_ranks = known.own_ranks, known.peer_ranks

    def select(
        self, head: PrefixNode, seconds: Callable[[int], float], delay: float, limit: int, *, alone: bool
    ) -> list[PrefixNode]:
        """Nodes to compute, parents first, `head` included if its row is missing.

        seconds(rows): what a forward costs. delay: what a miss costs besides a forward, s: the round trip for a side
        that follows. limit: no node at this position or beyond. alone: nothing but the head.
        """
        ahead = 0 if alone else self._drafting.ahead
        picked: list[PrefixNode] = []
        gained: list[float] = []
        order = 0
        waiting: list[tuple[float, int, PrefixNode | None, int]] = [(-1.0, 0, None, head.token)]
        for _ in range(MAX_VISITS):
            if not waiting or len(picked) >= self._drafting.rows:
                break
            negative, _, parent, token = heapq.heappop(waiting)
            node = head if parent is None else parent.child(token)
            if not node.cached:
                picked.append(node)
                gained.append(-negative)
            if node.position - head.position >= ahead or node.position + 1 >= limit:
                continue
            for child, share in self._children(node, head):
                weight = -negative * share
                if weight >= LEAST_WEIGHT and child not in self._ends:
                    order += 1
                    heapq.heappush(waiting, (-weight, order, node, child))
        return picked[: _cut_at_break_even(gained, seconds, delay + seconds(1))]

    def observe_target(self, head: PrefixNode, target: int) -> None:
        """The target after `head` is known."""
        for ranks, guess in ((self._own_ranks, self._own(head)), (self._peer_ranks, self._peer(head))):
            if guess is not None:
                ranks.add(guess.clear, guess.tokens.index(target) if target in guess.tokens else None)

    def first_guesses(self, head: PrefixNode) -> dict[Side, int]:
        """What each side whose law is known here would have said."""
        guesses = {self._side: self._own(head), other(self._side): self._peer(head)}
        return {side: guess.tokens[0] for side, guess in guesses.items() if guess is not None and guess.tokens}

    def was_drafted(self, head: PrefixNode, target: int) -> dict[Side, bool]:
        """Was the target among what each side with a known law would have drafted here?"""
        guesses = {self._side: self._own(head), other(self._side): self._peer(head)}
        width = self._drafting.width
        return {side: target in guess.tokens[:width] for side, guess in guesses.items() if guess is not None}

    def derivable_by_peer(self, node: PrefixNode) -> bool:
        """Would a law that is known here have led to this node from the one above it, a look-up or not?

        Where it would not, the node was a guess from other texts, documents and earlier answers, and tells of them.
        """
        above = node.parent
        if self._forecast is None or above is None:
            return True
        guesses = (self._own(above), self._peer(above))
        drafted = any(node.token in guess.tokens[: self._drafting.width] for guess in guesses if guess is not None)
        return drafted or self._predicted(above) == node.token

    # ---- guesses ----------------------------------------------------------------------------------------------------
    def _children(self, node: PrefixNode, head: PrefixNode) -> Sequence[tuple[int, float]]:
        """Tokens that may follow, each with the probability that it does."""
        settled = self._predicted(node)
        if settled is not None:
            return [(settled, 1.0)]
        own, theirs = self._own(node), self._peer(node)
        guess, ranks = (own, self._own_ranks) if own is not None else (theirs, self._peer_ranks)
        if guess is None:
            return () if self._forecast is None else self._forecast.children(node, head)[: self._drafting.width]
        return list(zip(guess.tokens[: self._drafting.width], ranks.probs(guess.clear), strict=False))

    def _predicted(self, node: PrefixNode) -> int | None:
        known = node.own_dist is not None, -1 if node.peer_dist is None else node.peer_dist.level
        if node.predicted is None and node.tried != known and (weights := self._weigh(node)) is not None:
            node.tried = known
            decision = self._rule.decide(self._side, node.own_dist, node.peer_dist, weights, node.position)
            node.predicted = None if decision is None else decision.token
        return node.predicted

    def _own(self, node: PrefixNode) -> Guess | None:
        if node.own_guess is None and node.own_dist is not None:
            node.own_guess = self._guess(self._side, node.own_dist, node)
        return node.own_guess

    def _peer(self, node: PrefixNode) -> Guess | None:
        if node.peer_guess is None and node.peer_dist is not None:
            share = node.peer_dist
            node.peer_guess = (
                Guess((share.token,), margin_class(0.0))
                if share.head is None
                else self._guess(other(self._side), share.head, node)
            )
        return node.peer_guess

    def _guess(self, side: Side, dist: Dist, node: PrefixNode) -> Guess:
        tokens = tuple(self._rule.draft_tokens(side, dist, self._weigh(node), node.position, self._drafting.width))
        return Guess(tokens, margin_class(self._margin(dist, tokens, node.position)))

    def _margin(self, dist: Dist, tokens: tuple[int, ...], position: int) -> float:
        """How far the first guess's score stands above the second's."""
        if len(tokens) < 2:
            return math.inf
        first, second = (max(dist.prob(token), 1e-300) for token in tokens[:2])
        gap = math.log(first) - math.log(second)
        if self._sampling.temperature > 0.0:
            noise = gumbel(self._sampling.seed, position, np.array(tokens[:2], dtype=np.int32))
            gap += float(noise[0] - noise[1])
        return gap


def _cut_at_break_even(gained: list[float], seconds: Callable[[int], float], saved: float) -> int:
    """How many nodes to compute: up to the first whose row costs more than it is likely to save."""
    before = seconds(1)
    for count, weight in enumerate(gained, start=1):
        now = seconds(count)
        if weight * saved < now - before:
            return count - 1
        before = now
    return len(gained)
