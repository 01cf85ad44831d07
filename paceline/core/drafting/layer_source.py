"""Drafters that score many nodes at once, such as a draft model, which grow a tree layer by layer (FlowSpec, eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

Path = tuple[int, ...]
Candidates = Sequence[tuple[int, float]]  # distinct tokens, best first, with their probabilities of being accepted


@runtime_checkable
class LayerSource(Protocol):
    """Supplies candidates for many nodes at once."""

    def successors(self, paths: Sequence[Path]) -> Sequence[Candidates]:
        """Candidates after each path of tokens below the present context; the empty path is the context itself."""
