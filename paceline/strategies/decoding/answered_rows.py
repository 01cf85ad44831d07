"""Rows of the forward answered last: each branch's distributions, or the tokens that the engine has sampled."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import NOT_SAMPLED, SampledRow
from paceline.strategies.decoding.prefix_tree import PrefixNode


class AnsweredRows:
    """Store of one decoder. Keeps rows until the next answer, or until they are taken: distributions are large."""

    def __init__(self) -> None:
        self.dists: dict[PrefixNode, tuple[Dist, ...]] = {}  # each branch's row after a node
        self.sampled: dict[PrefixNode, SampledRow] = {}
        self._parts: dict[int, tuple[Dist, ...]] = {}  # branch -> rows of the batch that is being answered
        self._prompt: tuple[Dist, ...] = ()
        self._prompt_of: int | None = None  # branch whose first answer has more rows than its last

    def expect_prompt(self, branch: int) -> None:
        """The next answer of this branch begins with rows of its prompt's end."""
        self._prompt_of = branch

    def add(self, branch: int, dists: Sequence[Dist]) -> None:
        """Rows of one branch."""
        if branch == self._prompt_of:
            self._prompt, dists, self._prompt_of = tuple(dists[:-1]), dists[-1:], None
        self._parts[branch] = (*self._parts.get(branch, ()), *dists)

    def complete(self, nodes: Sequence[PrefixNode]) -> None:
        """Every branch has answered: the rows after these nodes are known."""
        parts = [self._parts[branch] for branch in range(len(self._parts))]
        self.dists = dict(zip(nodes, zip(*parts, strict=True), strict=True))
        self._parts.clear()

    def add_sampled(self, nodes: Sequence[PrefixNode], rows: Sequence[SampledRow]) -> None:
        """The tokens after these nodes, of the only branch."""
        if self._prompt_of is not None:
            self._prompt = tuple(row.top for row in rows[:-1] if row.top is not None)
            rows, self._prompt_of = rows[-1:], None
        self.sampled = {node: row for node, row in zip(nodes, rows, strict=True) if row is not NOT_SAMPLED}

    def pop(self) -> dict[PrefixNode, tuple[Dist, ...]]:
        """Each branch's row after each node; the head of a sampled one."""
        dists, self.dists = self.dists, {}
        sampled, self.sampled = self.sampled, {}
        return dists | {node: (row.top,) for node, row in sampled.items() if row.top is not None}

    def pop_prompt(self) -> tuple[Dist, ...]:
        """Rows of the prompt's end, all but its very last."""
        rows, self._prompt = self._prompt, ()
        return rows
