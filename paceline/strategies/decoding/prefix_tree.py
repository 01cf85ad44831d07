"""The tree of continuations that one side knows of: what it has computed, what it was told, and where the targets go.

A node stands for a prefix: the output tokens on its path. What a side predicts after a prefix depends on that prefix
alone, so nothing computed on a path is ever stale: a target moves the head one node down, and what does not hang
below it is dead. Knows neither engine nor messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.core.aggregation.registry import PeerDist
from paceline.core.sampling.dist import Dist

MAX_NODES = 512  # alive below the head; more is not taken in
KEPT = 256  # decided nodes that can still be asked for by position


@dataclass(frozen=True, slots=True)
class Guess:
    """What one side's law says of the next target: tokens, best first, and how clear the first one is
    (core.drafting.acceptance).
    """

    tokens: tuple[int, ...]
    clear: int


@dataclass(slots=True, eq=False)
class PrefixNode:
    """The prefix that ends with `token`; `position` output tokens long, so its law is that of output `position`."""

    token: int
    position: int
    parent: PrefixNode | None
    own_dist: Dist | None = None  # this side's law after the prefix, mixed over its documents
    raw_head: Dist | None = None  # the head of this side's law before any warping, where somebody learns from it
    branch_dists: tuple[
        Dist, ...
    ] = ()  # what the next token is judged by: each document's, where scores follow the text
    evidence: tuple[float, ...] | None = None  # what the text so far adds to the score of each
    log_evidence: float | None = None  # of its documents after the prefix, where that follows the text
    peer_dist: PeerDist | None = None  # what the peer told of its own
    dead: bool = False  # the targets have gone another way
    row: int | None = None  # in this side's open tree of KV rows
    cached: bool = False  # its row is in the KV cache
    alive: bool = True  # the head, or below it
    own_id: int | None = None  # the name under which this side shipped it
    peer_id: int | None = None  # the name under which the peer did
    own_guess: Guess | None = None
    peer_guess: Guess | None = None
    predicted: int | None = None  # the token that would be the target here, where what is known settles it
    tried: tuple[bool, int] | None = None  # what was known when that was last looked at
    children: dict[int, PrefixNode] = field(default_factory=dict)

    def child(self, token: int) -> PrefixNode:
        """The node one token further, made if need be."""
        found = self.children.get(token)
        if found is None:
            found = self.children[token] = PrefixNode(token, self.position + 1, self, alive=self.alive)
        return found

    def set_peer(self, share: PeerDist, number: int) -> None:
        """The peer's law, or more of it."""
        self.peer_id = number
        if self.peer_dist is None or share.level > self.peer_dist.level:
            self.peer_dist, self.peer_guess = share, None

    def subtree(self) -> Iterator[PrefixNode]:
        """This node and all under it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


class PrefixTree:
    """`head` is the node of all targets. Nodes on the way to it keep their place but lose their laws."""

    def __init__(self, position: int) -> None:
        """position: output tokens already decided."""
        self.head = PrefixNode(-1, position, None)
        self._decided: dict[int, PrefixNode] = {position: self.head}

    def advance(self, token: int) -> PrefixNode:
        """The next target. All that does not hang below it dies."""
        before = self.head
        self.head = before.child(token)
        for sibling in before.children.values():
            if sibling is not self.head:
                for node in list(sibling.subtree()):
                    node.alive, node.dead = False, True
                    node.own_dist, node.peer_dist, node.branch_dists = (
                        None,
                        None,
                        (),
                    )  # a law of a large vocabulary is a megabyte
                    node.children.clear()
        # Nodes then know those above them alone: no cycles, of which each answer would leave the collector a thousand.
        before.alive = False
        before.children.clear()
        before.own_dist = before.raw_head = before.peer_dist = before.own_guess = before.peer_guess = None
        if self.head.evidence is not None:
            before.branch_dists = ()
        self._decided[self.head.position] = self.head
        self._decided.pop(self.head.position - KEPT, None)
        return self.head

    def decided(self, position: int) -> PrefixNode | None:
        """The node of the first `position` targets; None when they are not known here (any more, or yet)."""
        return self._decided.get(position)

    def find(self, parent: PrefixNode, token: int) -> PrefixNode | None:
        """The child of that token where there is one. Above the head only what is decided has one; a dead node none."""
        if parent.alive:
            return parent.children.get(token)
        child = self._decided.get(parent.position + 1)
        return child if child is not None and child.parent is parent and child.token == token else None

    def full(self) -> bool:
        return sum(1 for _ in self.head.subtree()) >= MAX_NODES

    def forget_peer_ids(self) -> None:
        """Another peer, or the same after a loss: what was told counts no more."""
        for node in self.head.subtree():
            node.peer_dist = node.peer_guess = node.predicted = node.tried = node.peer_id = node.own_id = None
