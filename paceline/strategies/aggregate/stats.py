"""What one side counts while it writes: for the report, and for placement."""

from __future__ import annotations

from paceline.core.side import SIDES, Side, other
from paceline.strategies.decoding.branch_decoder import BranchDecoder


class AggregateStats:
    """Whose drafts stood, how often the decision moved, and what was computed."""

    def __init__(self) -> None:
        self.alone = 0  # targets that this side wrote alone
        self.handovers = 0  # by this side
        self._drafted = dict.fromkeys(SIDES, 0)  # first guesses, of each side whose law was seen here
        self._accepted = dict.fromkeys(SIDES, 0)  # those that stood
        self._followed = [0, 0]  # the same of the side that followed: drafted, accepted

    def target(self, token: int, guesses: dict[Side, int], holder: Side) -> None:
        """One target that both sides took part in. guesses: what each side whose law is known here would have said."""
        for side, guess in guesses.items():
            self._drafted[side] += 1
            self._accepted[side] += guess == token
        follower = other(holder)
        if follower in guesses:
            self._followed[0] += 1
            self._followed[1] += guesses[follower] == token

    def stats(self, decoder: BranchDecoder) -> dict[str, float]:
        """For `Finish`."""
        counts: dict[str, int] = {"drafted": self._followed[0], "accepted": self._followed[1]}
        for side in SIDES:
            counts |= {f"drafted_{side}": self._drafted[side], f"accepted_{side}": self._accepted[side]}
        counts |= {"alone": self.alone, "handovers": self.handovers}
        counts |= {"forwards": decoder.forwards, "rows": decoder.rows}
        return {name: float(count) for name, count in counts.items()}
