"""Paths of draft trees, and their verification as every strategy does it."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.drafting.ngram_drafter import DraftTree


def text(drafted: DraftTree, node: int) -> tuple[int, ...]:
    """Tokens from a root down to this node; none for -1, the prefix."""
    tokens: list[int] = []
    while node >= 0:
        tokens.append(drafted.tokens[node])
        node = drafted.parents[node]
    return tuple(reversed(tokens))


def roots(drafted: DraftTree) -> list[int]:
    return [node for node, parent in enumerate(drafted.parents) if parent < 0]


def walk(drafted: DraftTree, choose: Callable[[int], int]) -> list[int]:
    """The output of a verification. choose(node): the target's token after the path to this node; -1: the prefix."""
    below = {(parent, token): i for i, (parent, token) in enumerate(zip(drafted.parents, drafted.tokens, strict=True))}
    output: list[int] = []
    node: int | None = -1
    while node is not None:
        output.append(choose(node))
        node = below.get((node, output[-1]))
    return output
