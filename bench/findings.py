"""Rows, claims and intervals of a part of a bench."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from .bootstrap import Estimate
from .report import Claim


def claimed(
    name: str, found: Estimate, target: float | None, better: Literal["higher", "lower"], paper: str | None = None
) -> Claim:
    """A claim with the interval of its value."""
    return Claim(name, found.value, target, better, paper, found.bounds)


@dataclass(slots=True)
class Findings:
    """Rows and claims of a part, with the intervals of those claims that are medians."""

    rows: list[dict[str, object]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    intervals: dict[str, list[float]] = field(default_factory=dict)  # claim -> bounds

    def claim(self, claim: Claim, estimate: Estimate | None = None) -> None:
        self.claims.append(claim if estimate is None else replace(claim, interval=estimate.bounds))
        if estimate is not None:
            self.intervals[claim.name] = estimate.interval

    def add(self, other: Findings) -> None:
        self.rows += other.rows
        self.claims += other.claims
        self.intervals |= other.intervals
