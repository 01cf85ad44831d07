"""Best-first search for draft trees (DIAA, Tian et al. 2026, eq. 1 and 2), and the acceptance rates that rank drafts.

The candidate with the highest probability of being accepted is added to the tree, and its children become candidates.
As no child is likelier than its parent, the nodes are the B best of all, and each prefix of their order is the best
tree of its size. A `DraftSource` supplies the candidates.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from paceline.core.clock import AcceptanceByRank

Context = TypeVar("Context")
Candidates = Sequence[tuple[int, float]]  # distinct tokens, best first, with their probabilities of being accepted


class DraftSource(Protocol, Generic[Context]):
    """Supplies candidate tokens. A context is the source's own state of a node; the caller supplies the root's."""

    def children(self, context: Context) -> Candidates:
        """Candidates for the next token. Called once per node."""

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
_BESIDE_FIRSTS: Final = (0.55, 0.97)  # prior of the peer's choice, where it is another than the own one and where not
_MODEL_EDGES: Final = (0.15, 0.3, 0.6, 1.0, 1.5, 2.2, 3.0, 4.0, 6.0)  # likewise, of a draft model's scores
_MODEL_FIRSTS: Final = (0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.87, 0.93, 0.97)
_MODEL_MEMORY: Final = 0.995  # about the last two hundred of a class count


def margin_class(margin: float) -> int:
    """Class of the margin between the two best scores; infinite for a single draft."""
    return sum(margin >= edge for edge in _MARGIN_EDGES)


def model_margin_class(margin: float) -> int:
    """Likewise of a draft model, by finer classes: its scores say more than those of n-grams."""
    return bisect_right(_MODEL_EDGES, margin)


def beside_choice(drafts: Sequence[int], choice: int) -> tuple[tuple[int, ...], int]:
    """Own drafts and the peer's choice after the same prefix as one list, best first, and its class."""
    agree = len(drafts) > 0 and drafts[0] == choice
    return (choice, *(token for token in drafts if token != choice)), int(agree)


def beside_choice_rates() -> AcceptanceByRank:
    """Acceptance rates of drafts beside a peer's choice before any answer. Its classes are those of `beside_choice`."""
    return AcceptanceByRank(_BESIDE_FIRSTS)


def model_rates() -> AcceptanceByRank:
    """Acceptance rates of a draft model before any answer. Its classes are `model_margin_class`."""
    return AcceptanceByRank(_MODEL_FIRSTS, _MODEL_MEMORY)
