"""Best-first search for draft trees (DIAA, Tian et al. 2026, eq. 1 and 2), and static trees as baselines.

The candidate with the highest score is added to the tree, and its children become candidates. As long as no child
scores higher than its parent, the nodes are the B best of all, and each prefix of their order is the best tree of its
size. A `DraftSource` supplies the candidates.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from paceline.core.batching.segment import LogitsMode, Segment, SeqId

# Token trees and their verification.
#
# Verification is sample-then-match: at each node the target samples its own token, with noise that depends on the
# position alone, and the walk continues if a child has that token. So the output is the target's for any tree and at
# any temperature. Masks and positions are in `batching.segment.Segment`. Knows nothing of drafting.


class Walk(NamedTuple):
    """Result of a verification."""

    accepted: tuple[int, ...]  # nodes, a path from a root
    output: tuple[int, ...]  # accepted tokens and one more: recovered, or bonus below a leaf


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Draft tokens below a common prefix. May have several roots, and may be empty.

    Children of one parent have distinct tokens, so that a path of tokens identifies at most one node. Raises ValueError
    otherwise, and for parents that do not come before their children.
    """

    tokens: tuple[int, ...]  # (n,)
    parents: tuple[int, ...]  # (n,) parents[i] < i, -1 = the prefix

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens):
            raise ValueError(f"{len(self.parents)} parents for {len(self.tokens)} tokens")
        if any(not -1 <= parent < i for i, parent in enumerate(self.parents)):
            raise ValueError(f"each parent must come before its child: {self.parents}")
        if len(set(zip(self.parents, self.tokens, strict=True))) != len(self.tokens):
            raise ValueError("two children of one parent have the same token")

    @staticmethod
    def chain(tokens: Sequence[int]) -> TokenTree:
        return TokenTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from a root down to `node`, both included; empty for -1, the prefix."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def text(self, node: int) -> tuple[int, ...]:
        """Tokens along `path(node)`."""
        return tuple(self.tokens[i] for i in self.path(node))

    def depth(self, node: int) -> int:
        """0 for a root, -1 for the prefix."""
        return len(self.path(node)) - 1

    def children(self, node: int) -> tuple[int, ...]:
        """Children of `node`, in order; the roots for -1."""
        return tuple(i for i, parent in enumerate(self.parents) if parent == node)

    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of each root-to-leaf path, by rising leaf."""
        inner = set(self.parents)
        return tuple(self.path(leaf) for leaf in range(len(self)) if leaf not in inner)

    def segment(self, seq: SeqId, start: int, *, logits: LogitsMode = "all") -> Segment:
        """The segment that scores this tree behind `start` cached rows. Raises ValueError for an empty tree."""
        return Segment(seq, start, self.tokens, self.parents, logits)

    def walk(self, choose: Callable[[int], int]) -> Walk:
        """Verify the tree. choose(node): the target's token after the path to this node; -1: after the prefix.

        Called along one path only, from the root down. The last output token is not a node of the tree, so its row is
        not in the KV cache yet.
        """
        below = {(parent, token): i for i, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))}
        accepted: list[int] = []
        output: list[int] = []
        node: int | None = -1
        while node is not None:
            token = choose(node)
            output.append(token)
            node = below.get((node, token))
            if node is not None:
                accepted.append(node)
        return Walk(tuple(accepted), tuple(output))

    def below(self, node: int) -> TokenTree:
        """The subtree under `node`, its children becoming roots: the remaining drafts once the path to it is output."""
        place = {node: -1}
        for i, parent in enumerate(self.parents):
            if parent in place and i != node:
                place[i] = len(place) - 1
        kept = [i for i in place if i != node]
        return TokenTree(tuple(self.tokens[i] for i in kept), tuple(place[self.parents[i]] for i in kept))


def merge(trees: Iterable[TokenTree]) -> TokenTree:
    """The union of the trees' paths. The first tree's nodes keep their indices; new ones follow in order."""
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for tree in trees:
        place = {-1: -1}
        for i, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
            key = place[parent], token
            if key not in known:
                known[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
            place[i] = known[key]
    return TokenTree(tuple(tokens), tuple(parents))


Context = TypeVar("Context")


class DraftSource(Protocol, Generic[Context]):
    """Supplies candidate tokens. A context is the source's own state of a node; the caller supplies the root's."""

    def children(self, context: Context) -> Sequence[tuple[int, float]]:
        """Distinct tokens, best first, with their probabilities of coming next. Called once per node."""

    def child(self, context: Context, token: int) -> Context:
        """The context one token further. Called once per node, in the order of the tree's nodes."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """s(child) = s(parent) * prob * depth_decay * width_decay**rank; no depth decay for the roots."""

    depth_decay: float = 1.0  # delta, in (0, 1]
    width_decay: float = 1.0  # alpha, in (0, 1]
    threshold: float = 0.0  # tau: lower scores are dropped
    literal: bool = False  # the equation as printed: only the last rank counts, so a child can outscore its parent


PLAIN: Final = Scoring()
PAPER: Final = Scoring(0.8, 0.7, 5e-3)  # the values of DIAA's figure 7


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree's structure without its tokens: `ranks[i]` is the rank of node i among the candidates after its parent."""

    parents: tuple[int, ...]  # (n,) parents[i] < i, -1 = the prefix
    ranks: tuple[int, ...]  # (n,) from 0


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A token tree, best nodes first, with the drafter's probabilities."""

    tree: TokenTree
    probs: tuple[float, ...] = ()  # (n,) that the node is accepted: the product along its path
    ranks: tuple[int, ...] = ()  # (n,) as in `TreeShape`

    def __len__(self) -> int:
        return len(self.probs)

    @property
    def expected_accepted(self) -> float:
        """U: expected accepted tokens of a forward; the output tokens are one more."""
        return sum(self.probs)

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.tree.parents, self.ranks)

    def first(self, count: int) -> DraftTree:
        """The tree of the first nodes; the best of that size if the tree was grown best first."""
        if count >= len(self):
            return self
        tree = TokenTree(self.tree.tokens[:count], self.tree.parents[:count])
        return DraftTree(tree, self.probs[:count], self.ranks[:count])


NO_DRAFT: Final = DraftTree(TokenTree((), ()))


def grow_tree(source: DraftSource[Context], root: Context, budget: int, scoring: Scoring = PLAIN) -> DraftTree:
    """Draft at most `budget` nodes, by falling score; of equals the one found first."""
    delta, alpha, literal, threshold = scoring.depth_decay, scoring.width_decay, scoring.literal, scoring.threshold
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    ranks: list[int] = []
    # Only the best child of a node is a candidate; the next one follows once that has been added.
    waiting: list[tuple[float, int, int, _Siblings[Context]]] = []
    order = 0

    def expand(node: int, context: Context, prob: float, base: float) -> None:
        """Add the children of a node as candidates. base: score of the first child divided by its own probability."""
        nonlocal order
        scored: list[tuple[float, int, int, float]] = []
        decayed = base
        for rank, (token, share) in enumerate(source.children(context)):
            if share > 0.0 and decayed * share >= threshold:
                scored.append((-decayed * share, rank, token, prob * share))
            decayed *= alpha
        if scored:
            scored.sort()
            order += 1
            heapq.heappush(waiting, (scored[0][0], order, 0, (node, context, scored)))

    if budget > 0:
        expand(-1, root, 1.0, 1.0)
    while waiting:
        _, age, index, siblings = waiting[0]
        parent, above, scored = siblings
        if index + 1 < len(scored):
            heapq.heapreplace(waiting, (scored[index + 1][0], age, index + 1, siblings))
        else:
            heapq.heappop(waiting)
        negative, rank, token, prob = scored[index]
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        probs.append(prob)
        ranks.append(rank)
        if len(tokens) == budget:
            break
        bare = -negative / alpha**rank if literal else -negative
        expand(node, source.child(above, token), prob, bare * delta)
    return DraftTree(TokenTree(tuple(tokens), tuple(parents)), tuple(probs), tuple(ranks))


# The children of one node: the node, its context, and (-score, rank, token, probability of the path), best first.
_Siblings = tuple[int, Context, list[tuple[float, int, int, float]]]


def fill(source: DraftSource[Context], root: Context, shape: TreeShape) -> DraftTree:
    """A tree of this shape with the source's tokens. Nodes whose rank has no candidate are left out with their
    subtrees."""
    contexts: dict[int, Context] = {-1: root}
    candidates: dict[int, Sequence[tuple[int, float]]] = {}
    place: dict[int, int] = {-1: -1}
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    ranks: list[int] = []
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
        ranks.append(rank)
    return DraftTree(TokenTree(tuple(tokens), tuple(parents)), tuple(probs), tuple(ranks))


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


# ---- static trees: the baselines -------------------------------------------------------------------------------------
HALVING: Final = tuple(0.5 ** (rank + 1) for rank in range(8))  # each rank half as likely as the one before
RECYCLING_LEVELS: Final = (8, 21, 25, 15, 8, 3)  # nodes by depth of Token Recycling's tree of 80 (Luo et al. 2025)


@dataclass(frozen=True, slots=True)
class _SameEverywhere:
    """Rank r is accepted with the same probability in every context."""

    shares: tuple[float, ...]

    def children(self, context: None) -> list[tuple[int, float]]:  # noqa: ARG002
        return list(enumerate(self.shares))

    def child(self, context: None, token: int) -> None:  # noqa: ARG002
        return None


def static_shape(budget: int, shares: Sequence[float] = HALVING) -> TreeShape:
    """The best tree of this size independent of the text, if rank r is accepted with probability `shares[r]`."""
    return grow_tree(_SameEverywhere(tuple(shares)), None, budget).shape


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
