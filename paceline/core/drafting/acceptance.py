"""Acceptance rates of drafts by rank, which determine how broad and how deep a draft tree should be.

Counted separately by the margin between the best and the second score (log p plus the common noise), with a prior and
slowly decaying weights, since the character of a text changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_RANKS: Final = 8
_MARGIN_EDGES: Final = (0.5, 1.5, 4.0)  # nats between the two best scores
_FIRSTS: Final = (0.5, 0.65, 0.85, 0.97)  # prior acceptance rate of the first draft, by margin class
_STRENGTH: Final = 6.0  # weight of the prior, in observations
_MEMORY: Final = 0.98  # about the last fifty observations count


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


def _prior(first: float) -> list[float]:
    """(MAX_RANKS,) prior by rank: each rank after the first half as likely as the one before; the remainder is none."""
    others = [(1.0 - first) * 0.5**rank for rank in range(1, MAX_RANKS)]
    return [first, *others]


@dataclass(slots=True)
class AcceptanceByRank:
    """P(the target is the draft of rank r | class), r from 0. By default a class is a `margin_class`."""

    firsts: tuple[float, ...] = _FIRSTS  # prior acceptance rate of the first draft, by class
    memory: float = _MEMORY  # factor on older observations, per new one
    _counts: list[list[float]] = field(init=False)
    _totals: list[float] = field(init=False)
    _known: dict[int, list[float]] = field(default_factory=dict)  # cached `probs`, by class

    def __post_init__(self) -> None:
        self._counts = [[0.0] * MAX_RANKS for _ in self.firsts]
        self._totals = [0.0] * len(self.firsts)

    def add(self, group: int, rank: int | None) -> None:
        """Record the rank of the target among the drafts; None: the target was not drafted."""
        self._known.pop(group, None)
        counts = self._counts[group]
        for place in range(MAX_RANKS):
            counts[place] *= self.memory
        self._totals[group] = self._totals[group] * self.memory + 1.0
        if rank is not None and rank < MAX_RANKS:
            counts[rank] += 1.0

    def probs(self, group: int) -> list[float]:
        """(MAX_RANKS,) sums to less than 1, because the target may not be drafted at all."""
        if group not in self._known:
            total = self._totals[group] + _STRENGTH
            self._known[group] = [
                (count + _STRENGTH * prior) / total
                for count, prior in zip(self._counts[group], _prior(self.firsts[group]), strict=True)
            ]
        return self._known[group]


def beside_choice_rates() -> AcceptanceByRank:
    """Acceptance rates of drafts beside a peer's choice before any answer. Its classes are those of `beside_choice`."""
    return AcceptanceByRank(_BESIDE_FIRSTS)


def model_rates() -> AcceptanceByRank:
    """Acceptance rates of a draft model before any answer. Its classes are `model_margin_class`."""
    return AcceptanceByRank(_MODEL_FIRSTS, _MODEL_MEMORY)
