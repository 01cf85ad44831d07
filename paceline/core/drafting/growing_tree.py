"""The draft tree of continuous pipelined speculation (FlowSpec, section 3), of one answer.

The tree grows and is pruned while segments of it are under way. Its root, the `head`, is the last decided token. A node
is *waiting* until its row is sent, and *known* once the target's row after it has come. Rows are named by ids that rise
in the order of sending, over the whole answer, so that a prune is two sets of ids: those to commit and those that stay.

A known node is either passed by the walk or dropped with the walk's next step, because the walk goes on through known
nodes: so each row is needed once, and what a prune leaves has never been answered. Scores are estimates of P(the node
is accepted | the head); no node scores above its parent, so the order by falling score, equals by age, is topological.
Knows no engine, drafter or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from paceline.core.batching.segment import ROOT
from paceline.core.drafting.tree_search import DraftTree

Candidates = Sequence[tuple[int, float]]  # distinct tokens, best first, with their probabilities of being accepted

_LEAST: Final = 1e-12  # a score below is one that a drafter has rounded to nothing


class RowPrune(NamedTuple):
    """Rows by id, as `Engine.prune` takes them: rising, and each of `keep` before each of `live`."""

    keep: tuple[int, ...]  # accepted: the path from the root of the open rows
    live: tuple[int, ...]  # stay open


@dataclass(slots=True, eq=False)
class DraftNode:
    """The prefix that ends with `token`, `position` output tokens long."""

    token: int
    position: int
    parent: DraftNode | None
    score: float  # estimated probability that it is accepted, given the head; 1 for the head
    number: int  # of creation: above its parent's
    row: int | None = None  # id; None: not sent
    known: bool = False
    alive: bool = True  # the head, or below it
    children: dict[int, DraftNode] = field(default_factory=dict)


class GrowingTree:
    """Changed by `advance` (prune to a child of the head), `merge` (add drafts) and `take` (send)."""

    def __init__(self, position: int) -> None:
        """position: output tokens already decided. The first head needs no row of its own: a prompt's last one is
        its."""
        self.head = DraftNode(-1, position, None, 1.0, 0)
        self._nodes: list[DraftNode] = [self.head]  # alive, by number
        self._next_number = 1
        self._next_row = 0
        self._passed: list[int] = []  # rows of decided nodes that are not committed
        self._open: set[int] = set()  # rows sent that no prune has committed or dropped

    def __len__(self) -> int:
        """Nodes alive, the head included."""
        return len(self._nodes)

    @property
    def nodes(self) -> tuple[DraftNode, ...]:
        """The head and all below it, in the order of creation."""
        return tuple(self._nodes)

    @property
    def num_open_rows(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> list[DraftNode]:
        return [node for node in self._nodes if node.row is None and not node.known]

    # ---- growth -----------------------------------------------------------------------------------------------------
    def merge(
        self, drafted: DraftTree, admits: Callable[[DraftNode, int], bool] = lambda _, __: True
    ) -> list[DraftNode]:
        """Add what is new of a tree drafted below the head, by its paths of tokens; returns the new nodes.

        Nodes that are there keep their place and rows, and take the new score. admits: a child of this node with this
        token may be added; without it none of its drafted subtree is.
        """
        place: dict[int, DraftNode] = {-1: self.head}
        added: list[DraftNode] = []
        for index, (token, above, prob) in enumerate(zip(drafted.tokens, drafted.parents, drafted.probs, strict=True)):
            parent = place.get(above)
            if parent is None:
                continue
            node = parent.children.get(token)
            if node is None:
                if not admits(parent, token):
                    continue
                node = self.add(parent, token, parent.score)
                added.append(node)
            node.score = max(prob, _LEAST)
            place[index] = node
        for node in self._nodes:  # parents first
            if node.parent is not None and node is not self.head:
                node.score = min(node.score, node.parent.score)
        return added

    def add(self, parent: DraftNode, token: int, score: float) -> DraftNode:
        """One draft more. score: given the head; at most the parent's."""
        assert parent.alive and token not in parent.children
        score = min(max(score, _LEAST), parent.score)
        node = parent.children[token] = DraftNode(token, parent.position + 1, parent, score, self._next_number)
        self._next_number += 1
        self._nodes.append(node)
        return node

    def forget_waiting(self) -> None:
        """Drop the drafts that have not been sent; the head stays."""
        self._drop(lambda node: node.row is None and node is not self.head)

    def discard(self, node: DraftNode) -> None:
        """Drop a waiting draft and what hangs below it."""
        assert node.row is None and node is not self.head
        dropped = {node}
        for each in self._nodes:  # parents first
            if each.parent in dropped:
                dropped.add(each)
        self._drop(lambda each: each in dropped)

    # ---- verification -----------------------------------------------------------------------------------------------
    def advance(self, token: int) -> DraftNode:
        """The head, which is known, is followed by this token: prune to that child, which is made where it was not
        drafted. Returns the new head."""
        assert self.head.known
        before = self.head
        if before.row is not None:
            self._passed.append(before.row)
        head = before.children.get(token)
        if head is None:
            head = self.add(before, token, before.score)
        share = head.score
        below = {head}
        for node in self._nodes:  # parents first
            if node.parent in below:
                below.add(node)
        self._drop(lambda node: node not in below)
        before.children.clear()
        head.parent = None  # nobody refers to decided nodes
        for node in self._nodes:
            node.score = min(1.0, node.score / share)
        self.head = head
        return head

    def commit(self) -> RowPrune | None:
        """The prune by which the engine follows all `advance` since the last commit; None if every open row stays."""
        live = tuple(sorted(node.row for node in self._nodes if node.row is not None))
        keep, self._passed = tuple(self._passed), []
        if len(live) == len(self._open):
            return None
        self._open = set(live)
        return RowPrune(keep, live)

    # ---- sending ----------------------------------------------------------------------------------------------------
    def best(self, count: int) -> list[DraftNode]:
        """The first waiting nodes, by falling score. Parents come first."""
        return sorted(self.waiting, key=lambda node: (-node.score, node.number))[:count]

    def send(self, nodes: list[DraftNode]) -> None:
        """Give rows to waiting nodes whose parents are sent or among them, parents first. After `commit`."""
        assert not self._passed, "decided rows are to be committed first"
        for node in nodes:
            assert node.alive and node.row is None
            assert node is self.head or (node.parent is not None and node.parent.row is not None)
            node.row = self._next_row
            self._open.add(self._next_row)
            self._next_row += 1

    def parent_row(self, node: DraftNode) -> int:
        """The id that a segment names as the parent of this node, once all rows before the head are committed."""
        if node is self.head:
            return ROOT
        assert node.parent is not None and node.parent.row is not None
        return node.parent.row

    def _drop(self, condition: Callable[[DraftNode], bool]) -> None:
        kept: list[DraftNode] = []
        for node in self._nodes:
            if not condition(node):
                kept.append(node)
                continue
            node.alive = False
            if node.parent is not None and node.parent.children.get(node.token) is node:
                del node.parent.children[node.token]
        self._nodes = kept

    # ---- invariants -------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Assert the invariants; for tests."""
        seen: set[DraftNode] = set()
        assert self._nodes[0] is self.head and self.head.alive
        for node in self._nodes:
            assert node.alive
            if node is not self.head:
                parent = node.parent
                assert parent in seen and parent.children[node.token] is node and node.number > parent.number
                assert node.score <= parent.score and node.position == parent.position + 1
                assert node.row is None or (parent.row is not None and parent.row < node.row)
                assert not node.known or parent.known, "a row is answered before its parent's"
            seen.add(node)
        assert self._open >= {node.row for node in self._nodes if node.row is not None}
