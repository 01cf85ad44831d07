"""The fake model with another spread from some row of the answer on: a text that turns from one side's documents."""

from __future__ import annotations

from paceline.core.sampling.dist import Dist
from paceline.engine.fake import FakeEngine, FakeRow


class TurningEngine(FakeEngine):
    """spread, later: before and from `turn` rows of the answer on. Owns its sequences."""

    def __init__(self, spread: float, later: float, turn: int) -> None:
        super().__init__(seed=1, spread=spread)
        self._first, self._later, self._turn = spread, later, turn

    def _dist(self, row: FakeRow) -> Dist:
        self._spread = self._first if row.answer_rows < self._turn else self._later
        return super()._dist(row)
