"""The tree of continuations that one side knows of: what it has computed, what it received, and the path of targets.

A node stands for a prefix: the output tokens on its path. A side's distribution after a prefix depends on that prefix
alone, so nothing computed on a path is ever stale: a target moves the head one node down, and nodes that are not below
the new head are dead. Knows neither engine nor messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.core.aggregation.aggregators import OwnDist, PeerDist
from paceline.core.sampling.dist import Dist

MAX_LIVE_NODES = 512  # the head and below; more are not added for the peer
KEPT_POSITIONS = 256  # decided nodes that can still be found by position


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Drafts of one side after a prefix, best first, and the class of the first one's margin
    (`core.drafting.acceptance`).
    """

    tokens: tuple[int, ...]
    margin_class: int


@dataclass(slots=True, eq=False)
class PrefixNode:
    """The prefix that ends with `token`; `position` output tokens long, so its distribution is that of output
    `position`.
    """

    token: int
    position: int
    parent: PrefixNode | None
    own_dist: OwnDist | None = None  # this side's distribution after the prefix, mixed over its documents
    plain: Dist | None = None  # the same before any processing, where logprobs are wanted
    raw_head: Dist | None = None  # head of that, where an n-gram table learns from it
    sampled: int | None = None  # the token that this side alone would decide here, where the engine samples
    decided_by: frozenset[int] | None = None  # of that token: branches of this side, where not all alike
    branch_dists: tuple[Dist, ...] = ()  # heads of each document's, where scores follow the text
    evidence: tuple[float, ...] | None = None  # what the text so far adds to the score of each document
    log_evidence: float | None = None  # log h of this side after the prefix, where scores follow the text
    peer_dist: PeerDist | None = None  # as received
    dead: bool = False  # the targets have gone another way
    row: int | None = None  # id of its row in this side's open tree of KV rows
    cached: bool = False  # its row is in the KV cache
    alive: bool = True  # the head, or below it
    own_id: int | None = None  # id under which this side sent it
    peer_id: int | None = None  # id under which the peer sent it
    sent_choice: int | None = None  # this side's choice after the prefix, as it was sent
    own_drafts: DraftTokens | None = None
    peer_drafts: DraftTokens | None = None
    predicted: int | None = None  # the token that would be the target here, where what is known determines it
    predicted_from: tuple[bool, int] | None = None  # what was known when `predicted` was last computed
    children: dict[int, PrefixNode] = field(default_factory=dict)

    def child(self, token: int) -> PrefixNode:
        """The node one token further, made if need be."""
        found = self.children.get(token)
        if found is None:
            found = self.children[token] = PrefixNode(token, self.position + 1, self, alive=self.alive)
        return found

    def set_peer(self, share: PeerDist, node_id: int) -> None:
        """Set the peer's distribution; one already here is replaced only by one in more detail."""
        self.peer_id = node_id
        if self.peer_dist is None or share.level > self.peer_dist.level:
            self.peer_dist, self.peer_drafts = share, None

    @property
    def peer_choice(self) -> int | None:
        """The choice that the peer has sent after the prefix; None: it has sent none, or a distribution."""
        return None if self.peer_dist is None or self.peer_dist.head is not None else self.peer_dist.token

    def subtree(self) -> Iterator[PrefixNode]:
        """This node and all under it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


class PrefixTree:
    """`head` is the node of all targets. Nodes on the path to it keep their place but lose their distributions."""

    def __init__(self, position: int) -> None:
        """position: output tokens already decided."""
        self.head = PrefixNode(-1, position, None)
        self._decided: dict[int, PrefixNode] = {position: self.head}

    def advance(self, token: int) -> PrefixNode:
        """Move the head to the next target. Everything that does not hang below it dies."""
        before = self.head
        self.head = before.child(token)
        for sibling in before.children.values():
            if sibling is not self.head:
                for node in list(sibling.subtree()):
                    node.alive, node.dead = False, True
                    node.own_dist = node.plain = node.peer_dist = None  # a megabyte for a large vocabulary
                    node.branch_dists = ()
                    node.children.clear()
        # Decided nodes refer to their parents alone: each answer would leave the garbage collector a thousand cycles.
        before.alive = False
        before.children.clear()
        before.own_dist = before.plain = before.raw_head = before.peer_dist = None
        before.own_drafts = before.peer_drafts = None
        if self.head.evidence is not None:
            before.branch_dists = ()
        self._decided[self.head.position] = self.head
        self._decided.pop(self.head.position - KEPT_POSITIONS, None)
        return self.head

    def decided(self, position: int) -> PrefixNode | None:
        """The node of the first `position` targets; None when they are not known here (any more, or yet)."""
        return self._decided.get(position)

    def find(self, parent: PrefixNode, token: int) -> PrefixNode | None:
        """The child of that token, if any. Above the head only decided nodes are found, below a dead one none."""
        if parent.alive:
            return parent.children.get(token)
        child = self._decided.get(parent.position + 1)
        return child if child is not None and child.parent is parent and child.token == token else None

    def full(self) -> bool:
        return sum(1 for _ in self.head.subtree()) >= MAX_LIVE_NODES

    def forget_peer_ids(self) -> None:
        """Forget everything received from the peer, and which nodes were sent to it."""
        for node in self.head.subtree():
            node.peer_dist = node.peer_drafts = node.peer_id = node.own_id = node.sent_choice = None
            node.predicted = node.predicted_from = None
