"""What a side has learnt that the next answer can use: how good guesses are, and how fast its engine is.

Changes which rows are computed and who decides, never a token. One for all answers of a kind on one engine; machines
write to it as they go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.acceptance import AcceptanceByRank
from paceline.core.drafting.budget import BudgetStats
from paceline.core.drafting.ngram_drafter import DrafterStats
from paceline.core.estimation.timing import TimingModel


@dataclass(slots=True)
class OnlineStats:
    """Of answers that are sampled alike: a guess at temperature 1 is worth something else than one at 0."""

    timing: TimingModel = field(default_factory=TimingModel)
    own_ranks: AcceptanceByRank = field(default_factory=AcceptanceByRank)
    peer_ranks: AcceptanceByRank = field(default_factory=AcceptanceByRank)
    budget: BudgetStats = field(default_factory=BudgetStats)
    drafter: DrafterStats = field(default_factory=DrafterStats)

    def begin(self, timed: Iterable[tuple[int, float]], position: int) -> None:
        """What was measured before the first answer: (rows, seconds) of forwards behind `position` rows."""
        for rows, seconds in timed:
            self.timing.add(position, rows, seconds)
            self.budget.record_step(StepSize(rows, 1), seconds)
            self.budget.plain += rows == 1
