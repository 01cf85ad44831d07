"""Which of a side's guesses the target was: what says how broad and how deep a tree of drafts is worth growing.

A guess is clear when its score stands far above the next one's (score: log p plus the common noise). Frequencies are
kept apart by clearness, learnt live over a prior, and forgotten slowly, since an answer changes its character.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MAX_RANKS: Final = 8
_EDGES: Final = (0.5, 1.5, 4.0)  # of the gap between the first two scores, in nats
_FIRST: Final = (0.5, 0.65, 0.85, 0.97)  # prior share of the first guess, by clearness
_STRENGTH: Final = 6.0  # observations that the prior weighs
_MEMORY: Final = 0.98  # the last fifty count


def margin_class(gap: float) -> int:
    """Class of the gap between the two best scores; an only guess has an infinite one."""
    return sum(gap >= edge for edge in _EDGES)


def _prior(first: float) -> list[float]:
    """After the first guess each next one is half as likely; what is left over is no guess at all."""
    rest = [(1.0 - first) * 0.5**rank for rank in range(1, MAX_RANKS)]
    return [first, *rest]


@dataclass(slots=True)
class AcceptanceByRank:
    """P(the target is guess number r | how clear the first guess is), r from 0.

    Or given any other class of guesses: `firsts` says which there are.
    """

    firsts: tuple[float, ...] = _FIRST  # prior share of the first guess, by class
    memory: float = _MEMORY  # of older observations, per new one
    _counts: list[list[float]] = field(init=False)
    _totals: list[float] = field(init=False)
    _known: dict[int, list[float]] = field(default_factory=dict)  # what `probs` answers until something is learnt

    def __post_init__(self) -> None:
        self._counts = [[0.0] * MAX_RANKS for _ in self.firsts]
        self._totals = [0.0] * len(self.firsts)

    def add(self, clear: int, rank: int | None) -> None:
        """The target was guess `rank`, or none of them."""
        self._known.pop(clear, None)
        counts = self._counts[clear]
        for place in range(MAX_RANKS):
            counts[place] *= self.memory
        self._totals[clear] = self._totals[clear] * self.memory + 1.0
        if rank is not None and rank < MAX_RANKS:
            counts[rank] += 1.0

    def probs(self, clear: int) -> list[float]:
        """(MAX_RANKS,) sums to less than 1: the target may be no guess at all."""
        if clear not in self._known:
            total = self._totals[clear] + _STRENGTH
            self._known[clear] = [
                (count + _STRENGTH * before) / total
                for count, before in zip(self._counts[clear], _prior(self.firsts[clear]), strict=True)
            ]
        return self._known[clear]
