"""Counts of one side of one answer, for its report."""

from __future__ import annotations

from paceline.core.side import SIDES, Side, other
from paceline.strategies.decoding.branch_decoder import BranchDecoder


class AggregateStats:
    """Drafts and how many were accepted, hand-overs, and what was computed."""

    def __init__(self) -> None:
        self.alone = 0  # targets that this side decided alone
        self.handovers = 0  # by this side
        self._drafted = dict.fromkeys(SIDES, 0)  # first drafts of each side, where its distribution was known here
        self._accepted = dict.fromkeys(SIDES, 0)
        self._follower_drafted = 0  # the same, of whichever side followed
        self._follower_accepted = 0

    def count_target(self, token: int, first_drafts: dict[Side, int], holder: Side) -> None:
        """Count one target of both sides. first_drafts: of each side whose distribution is known here."""
        for side, draft in first_drafts.items():
            self._drafted[side] += 1
            self._accepted[side] += draft == token
        follower = other(holder)
        if follower in first_drafts:
            self._follower_drafted += 1
            self._follower_accepted += first_drafts[follower] == token

    def report(self, decoder: BranchDecoder) -> dict[str, float]:
        """Values for `Finish.stats`."""
        counts: dict[str, int] = {"drafted": self._follower_drafted, "accepted": self._follower_accepted}
        for side in SIDES:
            counts |= {f"drafted_{side}": self._drafted[side], f"accepted_{side}": self._accepted[side]}
        counts |= {"alone": self.alone, "handovers": self.handovers}
        counts |= {"forwards": decoder.forwards, "rows": decoder.rows}
        return {name: float(count) for name, count in counts.items()}
