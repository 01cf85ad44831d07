"""Token trees: what is drafted when one guess is not enough, and how a target's rows verify it.

Verification is sample-then-match: at each node the target's own token is chosen, by noise that depends on the position
alone, and the walk goes on if a child holds it. So the output is the target's, whatever the tree (exact for any draft,
at any temperature). Masks and positions are `segments.Segment`'s; how a tree is drafted is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.batching.segment import LogitsMode, Segment, SeqId


class Walk(NamedTuple):
    """Result of a verification."""

    accepted: tuple[int, ...]  # nodes, a path from a root
    output: tuple[int, ...]  # tokens: those of the accepted nodes and one more, recovered (or bonus, below a leaf)


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Drafted tokens below a common prefix; more than one root is a forest below that prefix, and may be empty.

    Children of one parent have distinct tokens, so that a path of tokens names at most one node. Raises ValueError
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
        """Nodes right below `node`, in order; the roots for -1."""
        return tuple(i for i, parent in enumerate(self.parents) if parent == node)

    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of each root-to-leaf path, by rising leaf."""
        inner = set(self.parents)
        return tuple(self.path(leaf) for leaf in range(len(self)) if leaf not in inner)

    def segment(self, seq: SeqId, start: int, *, logits: LogitsMode = "all") -> Segment:
        """The rows to score this tree with, right below `start` cached rows. Raises ValueError for an empty tree."""
        return Segment(seq, start, self.tokens, self.parents, logits)

    def walk(self, choose: Callable[[int], int]) -> Walk:
        """choose(node): the target's token after this node's path, -1 asking for the one after the prefix.

        Asked along one path only, a parent before its child. The last output token is not in the tree below the
        accepted path: its row is still to be written.
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
        """The subtree under `node`, its children becoming roots: what is left once the path to it is output."""
        place = {node: -1}
        for i, parent in enumerate(self.parents):
            if parent in place and i != node:
                place[i] = len(place) - 1
        kept = [i for i in place if i != node]
        return TokenTree(tuple(self.tokens[i] for i in kept), tuple(place[self.parents[i]] for i in kept))


def merge(trees: Iterable[TokenTree]) -> TokenTree:
    """All paths of all trees, each once. The first tree's nodes keep their places; new ones follow in order."""
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
