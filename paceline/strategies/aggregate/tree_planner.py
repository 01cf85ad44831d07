"""Choice of the rows a side computes next: the draft tree, grown best first.

The paper drafts one continuation, so a target that was the second draft costs a round trip. Here every node has several
children, weighed by their acceptance rate by rank, and a forward takes as many of the most likely nodes as pay for
themselves: one more row costs every forward a little, and saves a miss when targets go through it.
The peer's distributions serve as drafts too: with both known a node's only child is certain, and a slow side verifies
in one forward what a fast one has drafted. Width 1 is DRAGON's chain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from paceline.core.aggregation.aggregators import Aggregator
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.ngram_drafter import beside_choice, margin_class
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import best_margin
from paceline.core.side import Side, other
from paceline.strategies.aggregate.options import draft_limits
from paceline.strategies.base import MachineConfig
from paceline.strategies.decoding.prefix_tree import DraftTokens, NgramDrafts, PrefixNode

# eta of both sides after a prefix; None while it is not known.
Weigh = Callable[[PrefixNode], Mapping[Side, float] | None]

MIN_WEIGHT = 0.002  # a node less likely than this is not computed, however idle the engine
# A node less likely than this is not sent until it is more so. At 0.05 and 0.1 an answer took 8 and 11 % longer than
# with all nodes sent at a round trip of 300 ms, and equally long at 50 ms, for a half and a third of the bytes. At 0.06
# a token of a session's answer takes 236 bytes, at 0.05 272.
LEAST_USE = 0.06
MAX_VISITS = 64  # nodes visited for one forward, and so about the most that are alive: distributions are large


class DraftTreePlanner:
    """Selects nodes to compute, and learns acceptance rates from targets."""

    def __init__(
        self,
        config: MachineConfig,
        aggregator: Aggregator,
        online_stats: OnlineStats,
        *,
        weigh: Weigh,
        ngram_drafts: NgramDrafts | None,
    ) -> None:
        """ngram_drafts: drafts where no distribution is known."""
        self._weigh = weigh
        self._ngram_drafts = ngram_drafts
        self._side, self._peer_side = config.seat.side, other(config.seat.side)
        self._aggregator, self._drafting = aggregator, draft_limits(config)
        self._sampling, self._eos_ids = config.output.sampling, config.output.eos_ids
        self._own_ranks, self._peer_ranks = online_stats.own_ranks, online_stats.peer_ranks
        self._beside_choice = online_stats.beside_choice

    def select(
        self, head: PrefixNode, seconds: Callable[[int], float], delay: float, limit: int, *, alone: bool
    ) -> list[PrefixNode]:
        """Nodes to compute, parents first, `head` included if its row is missing.

        seconds(rows): cost of a forward. delay: cost of a miss besides a forward, s: the round trip for a side that
        follows. limit: no node at this position or beyond. alone: nothing but the head.
        """
        ahead = 0 if alone else self._drafting.ahead
        selected: list[PrefixNode] = []
        weights: list[float] = []
        order = 0
        waiting: list[tuple[float, int, PrefixNode | None, int]] = [(-1.0, 0, None, head.token)]
        for _ in range(MAX_VISITS):
            if not waiting or len(selected) >= self._drafting.rows:
                break
            negative, _, parent, token = heapq.heappop(waiting)
            node = head if parent is None else parent.child(token)
            if not node.cached:
                selected.append(node)
                weights.append(-negative)
            if node.position - head.position >= ahead or node.position + 1 >= limit:
                continue
            for child, prob in self._children(node, head):
                weight = -negative * prob
                if weight >= MIN_WEIGHT and child not in self._eos_ids:
                    order += 1
                    heapq.heappush(waiting, (-weight, order, node, child))
        return selected[: _cut_at_break_even(weights, seconds, delay + seconds(1))]

    def uses(self, head: PrefixNode) -> Mapping[PrefixNode, float] | None:
        """Nodes that targets go through with at least `LEAST_USE`, each with that probability. None: of chains."""
        if self._drafting.rows == 1:
            return None
        found = {head: 1.0}
        waiting = [(head, 1.0)]
        while waiting and len(found) < MAX_VISITS:
            node, weight = waiting.pop()
            for token, prob in self._children(node, head):
                child = node.children.get(token)
                if child is not None and weight * prob >= LEAST_USE:
                    found[child] = weight * prob
                    waiting.append((child, weight * prob))
        return found

    def observe_target(self, head: PrefixNode, target: int) -> None:
        """Count the rank of the target after `head` among the drafts of each side."""
        own, peer = self._own(head), self._peer(head)
        both = self._with_choice(head, own)
        for ranks, drafts in ((self._own_ranks, own), (self._peer_ranks, peer), (self._beside_choice, both)):
            if drafts is not None:
                ranks.add(drafts.margin_class, drafts.tokens.index(target) if target in drafts.tokens else None)

    def drafted(self, head: PrefixNode) -> dict[Side, tuple[int, ...]]:
        """Drafts after `head`, best first, of each side whose distribution is known here."""
        both = {self._side: self._own(head), self._peer_side: self._peer(head)}
        return {side: drafts.tokens[: self._drafting.width] for side, drafts in both.items() if drafts is not None}

    def derivable_by_peer(self, node: PrefixNode) -> bool:
        """A distribution known here drafts this node after its parent, with or without an n-gram look-up.

        Else the node was drafted from other texts, documents and earlier answers, and would reveal them.
        """
        parent = node.parent
        if self._ngram_drafts is None or parent is None:
            return True
        both = (self._own(parent), self._peer(parent))
        width = self._drafting.width
        drafted = any(node.token in drafts.tokens[:width] for drafts in both if drafts is not None)
        return drafted or self._predicted(parent) == node.token

    def expected(self, node: PrefixNode) -> int:
        """The token that this side expects after a node it has computed: the target if it is known, else its own."""
        predicted = self._predicted(node)
        assert node.own_dist is not None, "computed"
        return node.own_dist.token(self._sampling, node.position) if predicted is None else predicted

    def may_be_announced(self, node: PrefixNode) -> bool:
        """The peer may see this node where it is shown choices alone: it is what this side expects after its parent.

        A second draft would tell of the distribution behind the first. What the peer has drafted needs no word either:
        it has computed that itself.
        """
        parent = node.parent
        return parent is None or (parent.own_dist is not None and self.expected(parent) == node.token)

    # ---- drafts -----------------------------------------------------------------------------------------------------
    def _children(self, node: PrefixNode, head: PrefixNode) -> Sequence[tuple[int, float]]:
        """Tokens that may follow, each with its probability of being the target."""
        predicted = self._predicted(node)
        if predicted is not None:
            return [(predicted, 1.0)]
        own, peer = self._own(node), self._peer(node)
        drafts, ranks = (peer, self._peer_ranks) if own is None else (own, self._own_ranks)
        if (both := self._with_choice(node, own)) is not None:
            drafts, ranks = both, self._beside_choice
        width = self._drafting.width
        if drafts is None:
            return () if self._ngram_drafts is None else self._ngram_drafts.children(node, head)[:width]
        return list(zip(drafts.tokens[:width], ranks.probs(drafts.margin_class), strict=False))

    def _with_choice(self, node: PrefixNode, own: DraftTokens | None) -> DraftTokens | None:
        """The own drafts and the peer's choice, where both are known, and no more of the peer's distribution."""
        share = node.peer_dist
        if own is None or share is None or share.head is not None:
            return None
        return DraftTokens(*beside_choice(own.tokens, share.token))

    def _predicted(self, node: PrefixNode) -> int | None:
        """The token that is the target after this node, if what is known determines it."""
        known = node.own_dist is not None, -1 if node.peer_dist is None else node.peer_dist.level
        if node.predicted is None and node.predicted_from != known and (weights := self._weigh(node)) is not None:
            node.predicted_from = known
            target = self._aggregator.decide(
                self._side, node.own_dist, node.peer_dist, weights, node.position, from_heads=True
            )
            node.predicted = None if target is None else target.token
        return node.predicted

    def _own(self, node: PrefixNode) -> DraftTokens | None:
        if node.own_drafts is None and node.own_dist is not None:
            node.own_drafts = self._drafts(self._side, node.own_dist.known, node)
        return node.own_drafts

    def _peer(self, node: PrefixNode) -> DraftTokens | None:
        if node.peer_drafts is None and node.peer_dist is not None:
            share = node.peer_dist
            node.peer_drafts = (
                DraftTokens((share.token,), margin_class(0.0))
                if share.head is None
                else self._drafts(self._peer_side, share.head, node)
            )
        return node.peer_drafts

    def _drafts(self, side: Side, dist: Dist, node: PrefixNode) -> DraftTokens:
        width = self._drafting.width
        tokens = tuple(self._aggregator.draft_tokens(side, dist, self._weigh(node), node.position, width))
        return DraftTokens(tokens, margin_class(best_margin(dist, self._sampling, node.position, tokens)))


def _cut_at_break_even(weights: list[float], seconds: Callable[[int], float], saved: float) -> int:
    """Number of nodes to compute: up to the first whose row costs more than it is likely to save."""
    before = seconds(1)
    for count, weight in enumerate(weights, start=1):
        cost = seconds(count)
        if weight * saved < cost - before:
            return count - 1
        before = cost
    return len(weights)
