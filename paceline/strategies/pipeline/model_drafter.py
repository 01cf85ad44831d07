"""Drafts of one answer from a small model that runs on an engine of its own, beside the target's.

The best nodes below the head whose rows are missing are computed together, so that the tree grows best first (FlowSpec,
eq. 1: a path scores the product of its nodes); rows of accepted drafts stay, rows of others are dropped. Drafts are
ranked with the common noise, so that they are those the target samples where both models agree. Their probabilities
are measured: the share of targets at each rank, by the margin between the two best.

Not handled: an answer longer than the draft model's context is drafted up to there, and not beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.drafting.acceptance import MAX_RANKS, AcceptanceByRank, model_margin_class
from paceline.core.drafting.growing_tree import Candidates, Path
from paceline.core.drafting.tree_search import DraftTree, grow_tree
from paceline.core.estimation import MovingAverage
from paceline.core.sampling.row import best_margin, top_by_score
from paceline.strategies.base import (
    Branch,
    Effect,
    Forward,
    MachineConfig,
    OnDraftModel,
    Prune,
    Sampled,
    Scored,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder, take_answer
from paceline.strategies.decoding.prefix_tree import DraftTokens, PrefixNode, PrefixTree

FRONTIER: Final = 8  # nodes computed at once at most: k of FlowSpec's beam is 10
SHARE: Final = 0.75  # of a node's probability that its best child has, about: below that of the tree's last it is left
MIN_PROB: Final = 0.005  # nodes that are less likely are not computed
FIRST_S: Final = 0.01  # s of a forward, before one has been timed


class ModelDrafter:
    """Asks for forwards and never waits: `draft` returns what is known by now."""

    def __init__(self, config: MachineConfig, rates: AcceptanceByRank, *, rescoring: bool) -> None:
        """rates: of earlier answers, read and written. Its tokens must be the target's."""
        self.forwards = 0
        self._config, self._rates = config, rates
        self._tree = PrefixTree(len(config.targets))
        self._decoder = BranchDecoder(
            config.sampling,
            config.vocab_size,
            rescoring=rescoring,
            mask=config.mask,
            eos_ids=config.eos_ids,
            samples=True,
            heads=True,
        )
        self._room = 0  # output tokens that its context holds
        self._computing: list[PrefixNode] = []  # nodes of the forward under way
        self._seconds = MovingAverage(0.2)  # of a forward
        self._grown: tuple[int, DraftTree] | None = None  # the tree of so many nodes, while nothing changes it

    # ---- events -----------------------------------------------------------------------------------------------------
    def start(self, branches: Sequence[Branch], max_new_tokens: int | None) -> list[Effect]:
        """Prefill the prompts. Call only where `fits`."""
        self._room = self._config.draft_positions - max(len(branch.prompt) for branch in branches)
        room = self._room if max_new_tokens is None else min(self._room, max_new_tokens)
        return _wrapped(self._decoder.start(branches, self._config.targets, self._tree.head, room))

    @staticmethod
    def fits(config: MachineConfig, branches: Sequence[Branch]) -> bool:
        """There is a draft model, and its context is longer than the prompts and what has been decided."""
        longest = max(len(branch.prompt) for branch in branches)
        return config.draft_positions > longest + len(config.targets)

    def answered(self, answer: Scored | Sampled) -> None:
        nodes = take_answer(self._decoder, answer, answer.now)
        if not nodes:
            return
        self.forwards += 1
        self._computing, self._grown = [], None
        if self._decoder.timed is not None:
            self._seconds.add(self._decoder.timed[1])
        for node in nodes:
            if node.own_dist is not None:
                node.own_drafts = self._ranked(node)
                node.own_dist = None  # it holds on to all of the forward's logits

    def advance(self, token: int) -> None:
        """The next token is decided."""
        drafts = self._tree.head.own_drafts
        if drafts is not None:
            rank = drafts.tokens.index(token) if token in drafts.tokens else None
            self._rates.add(drafts.margin_class, rank)
        self._tree.advance(token)
        self._grown = None

    # ---- drafts -----------------------------------------------------------------------------------------------------
    def draft(self, budget: int) -> DraftTree:
        """The best nodes below the head that are known, best first."""
        if self._grown is None or self._grown[0] != budget:
            self._grown = budget, grow_tree(self, self._tree.head, budget)
        return self._grown[1]

    def complete(self, budget: int) -> bool:
        """More forwards would add nothing to the tree of so many nodes."""
        return self._decoder.idle and not (self._has_room and self._missing(budget))

    def knows(self, paths: Sequence[Path]) -> bool:
        """More forwards would add nothing to what is drafted after these paths below the head."""
        missing = any(node.own_drafts is None and self._may_follow(node) for node in map(self._node, paths))
        return not missing or (self._decoder.idle and not self._has_room)

    def successors(self, paths: Sequence[Path]) -> list[Candidates]:
        """Candidates after each path below the head, as far as they are known."""
        return [self.children(self._node(path)) for path in paths]

    def children(self, context: PrefixNode) -> Candidates:
        """Drafts after a node, best first; none while its row is missing. As of `DraftSource`."""
        drafts = context.own_drafts
        if drafts is None:
            return ()
        return list(zip(drafts.tokens, self._rates.probs(drafts.margin_class), strict=False))

    def child(self, context: PrefixNode, token: int) -> PrefixNode:
        """As of `DraftSource`."""
        return context.child(token)

    # ---- forwards ---------------------------------------------------------------------------------------------------
    def compute(self, budget: int, now: float, paths: Sequence[Path] = ()) -> list[Effect]:
        """A forward of the nodes that the tree of so many nodes lacks most, or of those at these paths; nothing while
        one is under way."""
        decoder, head = self._decoder, self._tree.head
        if not decoder.idle:
            return []
        effects = decoder.commit_to(head)
        rows = decoder.missing_rows(head)
        if not rows and paths:
            rows = [node for path in paths for node in self._up(self._node(path)) if self._lacks(node)]
            rows = list(dict.fromkeys(rows))
        elif not rows:
            rows = self._missing(budget)
        rows = [node for node in rows if node.position <= self._room]
        if not rows or (rows[0].position <= head.position and rows[-1] is not head):
            return _wrapped(effects)
        decided = rows[-1] is head
        rows = rows if decided else rows[: decoder.spare_rows(())]
        if not rows:
            return _wrapped(effects)
        self._computing = [head] if decided else rows
        return _wrapped([*effects, *decoder.append_rows(rows, head, now)])

    def coming(self) -> tuple[list[float], float]:
        """Probabilities of the nodes whose children the next forwards bring, falling, and s until then."""
        seconds = self._seconds.value or FIRST_S
        alive = [node for node in self._computing if node.alive]
        if alive:
            return [self._prob(node) for node in alive], seconds
        head = self._tree.head
        if self._computing and head.own_drafts is None and self._may_follow(head):
            return [1.0], 2 * seconds  # the forward under way is of no use any more
        return [], 0.0

    @property
    def _has_room(self) -> bool:
        return self._decoder.spare_rows(()) > 0

    def _missing(self, budget: int) -> list[PrefixNode]:
        """Nodes of the tree to compute next, parents first."""
        head = self._tree.head
        if head.own_drafts is None:
            return [head] if self._lacks(head) else []
        drafted = self.draft(budget)
        least = drafted.probs[-1] if len(drafted) == budget else 0.0
        nodes: list[PrefixNode] = []
        missing: list[PrefixNode] = []
        for token, parent, prob in zip(drafted.tree.tokens, drafted.tree.parents, drafted.probs, strict=True):
            if prob * SHARE <= least or prob < MIN_PROB or len(missing) == FRONTIER:
                break
            nodes.append((head if parent < 0 else nodes[parent]).child(token))
            if self._lacks(nodes[-1]):
                missing.append(nodes[-1])
        return missing

    def _lacks(self, node: PrefixNode) -> bool:
        return node.own_drafts is None and not node.cached and self._may_follow(node)

    def _may_follow(self, node: PrefixNode) -> bool:
        """Something may be drafted behind this node."""
        within = node.position + 1 < self._config.max_tokens and node.position <= self._room
        return within and (node is self._tree.head or node.token not in self._config.eos_ids)

    def _node(self, path: Path) -> PrefixNode:
        node = self._tree.head
        for token in path:
            node = node.child(token)
        return node

    def _up(self, node: PrefixNode) -> list[PrefixNode]:
        """The nodes below the head down to this one; the head where it is that."""
        nodes: list[PrefixNode] = []
        above: PrefixNode | None = node
        while above is not None and above is not self._tree.head:
            nodes.append(above)
            above = above.parent
        return nodes[::-1]

    def _prob(self, node: PrefixNode) -> float:
        """Estimated probability that the text goes through this node."""
        prob = 1.0
        for each in self._up(node):
            drafts = None if each.parent is None else each.parent.own_drafts
            if drafts is None or each.token not in drafts.tokens:
                return 0.0
            prob *= self._rates.probs(drafts.margin_class)[drafts.tokens.index(each.token)]
        return prob

    def _ranked(self, node: PrefixNode) -> DraftTokens:
        own, sampling = node.own_dist, self._config.sampling
        assert own is not None
        dist = own.known
        places = top_by_score(dist, sampling, node.position, MAX_RANKS)
        tokens = tuple(int(dist.ids[place]) for place in places if dist.probs[place] > 0.0)
        return DraftTokens(tokens, model_margin_class(best_margin(dist, sampling, node.position, tokens)))


def _wrapped(effects: Sequence[Effect]) -> list[Effect]:
    return [OnDraftModel(effect) for effect in effects if isinstance(effect, Forward | Prune)]
