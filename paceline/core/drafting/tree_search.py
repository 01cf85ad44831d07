"""Best-first search for draft trees (DIAA, Tian et al. 2026, eq. 1 and 2).

The candidate with the highest probability of being accepted is added to the tree, and its children become candidates.
As no child is likelier than its parent, the nodes are the B best of all, and each prefix of their order is the best
tree of its size. A `DraftSource` supplies the candidates.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

Context = TypeVar("Context")


class DraftSource(Protocol, Generic[Context]):
    """Supplies candidate tokens. A context is the source's own state of a node; the caller supplies the root's."""

    def children(self, context: Context) -> Sequence[tuple[int, float]]:
        """Distinct tokens, best first, with their probabilities of coming next. Called once per node."""

    def child(self, context: Context, token: int) -> Context:
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


def grow_tree(source: DraftSource[Context], root: Context, budget: int) -> DraftTree:
    """Draft at most `budget` nodes, by falling probability; of equals the one found first."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    # Only the best child of a node is a candidate; the next one follows once that has been added.
    waiting: list[tuple[float, int, int, _Siblings[Context]]] = []
    order = 0

    def expand(node: int, context: Context, prob: float) -> None:
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
_Siblings = tuple[int, Context, list[tuple[float, int, int]]]


def best_budget(probs: Sequence[float], seconds: Callable[[int], float]) -> int:
    """Number of a tree's first nodes that maximises output tokens per second, (1 + U(B)) / T_forward(B).

    seconds(rows): time of a forward, which has a row more than the tree has nodes. 0: draft nothing.
    """
    best, best_rate, expected = 0, 1.0 / seconds(1), 1.0
    for count, prob in enumerate(probs, start=1):
        expected += prob
        rate = expected / seconds(count + 1)
        if rate > best_rate:
            best, best_rate = count, rate
    return best
