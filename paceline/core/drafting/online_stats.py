"""Statistics of a side that the next request reuses: acceptance rates of drafts and times of its engine.

They affect which rows are computed and which side aggregates, never a token. Shared by all requests of a kind on one
engine; machines update them as they run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.acceptance import AcceptanceByRank, beside_choice_rates, model_rates
from paceline.core.drafting.budget import BudgetStats
from paceline.core.drafting.ngram_drafter import DrafterStats
from paceline.core.estimation.timing import TimingModel
from paceline.core.offloading.estimates import OffloadStats


@dataclass(slots=True)
class OnlineStats:
    """Statistics of requests with alike sampling: acceptance rates at temperature 1 differ from those at 0."""

    timing: TimingModel = field(default_factory=TimingModel)
    own_ranks: AcceptanceByRank = field(default_factory=AcceptanceByRank)
    peer_ranks: AcceptanceByRank = field(default_factory=AcceptanceByRank)
    beside_choice: AcceptanceByRank = field(default_factory=beside_choice_rates)
    budget: BudgetStats = field(default_factory=BudgetStats)
    drafter: DrafterStats = field(default_factory=DrafterStats)
    draft_model: AcceptanceByRank = field(default_factory=model_rates)
    offload: OffloadStats = field(default_factory=OffloadStats)

    def begin(self, timed: Iterable[tuple[int, float]], position: int) -> None:
        """Add measurements from before the first request: (rows, seconds) of forwards behind `position` rows."""
        for rows, seconds in timed:
            self.timing.add(position, rows, seconds)
            self.budget.record_step(StepSize(rows, 1), seconds)
