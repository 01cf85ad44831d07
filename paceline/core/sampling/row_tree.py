"""Rows of a draft tree of which only those are sampled that the tokens lead to.

Verification reads one path: the token after a row leads to the child that holds it. No token is needed of the rows
beside that path, and of eight rows they are most.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from paceline.core.sampling.row import SampledRow

NOT_SAMPLED: Final = SampledRow(-1)  # in place of a row to which no token leads


class RowTree(NamedTuple):
    """Children of one row hold distinct tokens."""

    parents: tuple[int, ...]  # (rows,) parents[i] < i, -1: none, so the row is sampled in any case
    tokens: tuple[int, ...]  # (rows,) that each row holds

    @property
    def roots(self) -> list[int]:
        return [row for row, parent in enumerate(self.parents) if parent < 0]

    def child(self, row: int, token: int) -> int | None:
        """The row to which the token sampled after `row` leads."""
        for at in range(row + 1, len(self.parents)):
            if self.parents[at] == row and self.tokens[at] == token:
                return at
        return None
