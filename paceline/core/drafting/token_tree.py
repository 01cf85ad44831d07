"""Token trees and their verification.

Verification is sample-then-match: at each node the target samples its own token, with noise that depends on the
position alone, and the walk continues if a child has that token. So the output is the target's for any tree and at any
temperature. Masks and positions are in `batching.segment.Segment`. Knows nothing of drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.batching.segment import LogitsMode, Segment, SeqId


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
