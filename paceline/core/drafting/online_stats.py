"""What a side has learnt that the next answer can use: how good guesses are, and how fast its engine is.

Changes which rows are computed and who decides, never a token. One for all answers of a kind on one engine; machines
write to it as they go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.core.batching.segment import Step
from paceline.core.drafting.acceptance import RankTable
from paceline.core.drafting.budget import Record
from paceline.core.drafting.ngram_drafter import DraftingSkill
from paceline.core.estimation.timing import Profile


@dataclass(slots=True)
class Experience:
    """Of answers that are sampled alike: a guess at temperature 1 is worth something else than one at 0."""

    profile: Profile = field(default_factory=Profile)
    own_ranks: RankTable = field(default_factory=RankTable)
    their_ranks: RankTable = field(default_factory=RankTable)
    drafts: Record = field(default_factory=Record)
    drafting: DraftingSkill = field(default_factory=DraftingSkill)

    def begin(self, timed: Iterable[tuple[int, float]], position: int) -> None:
        """What was measured before the first answer: (rows, seconds) of forwards behind `position` rows."""
        for rows, seconds in timed:
            self.profile.add(position, rows, seconds)
            self.drafts.took(Step(rows, 1), seconds)
            self.drafts.plain += rows == 1
