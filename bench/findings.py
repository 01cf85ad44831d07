"""Rows, claims and intervals of a part of a bench."""

from __future__ import annotations

from dataclasses import dataclass, field

from .bootstrap import Estimate
from .report import Claim


@dataclass(slots=True)
class Findings:
    """Rows and claims of a part, with the intervals of those claims that are medians."""

    rows: list[dict[str, object]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    intervals: dict[str, list[float]] = field(default_factory=dict)  # claim -> bounds

    def claim(self, claim: Claim, estimate: Estimate | None = None) -> None:
        self.claims.append(claim)
        if estimate is not None:
            self.intervals[claim.name] = estimate.interval

    def add(self, other: Findings) -> None:
        self.rows += other.rows
        self.claims += other.claims
        self.intervals |= other.intervals
