"""How many rows of long prompts a step takes beside answers that are being written, from the times of steps.

A token of an answer waits for the whole step, so what a step takes longer for the prompts' rows is every answer's gap.
It is held to a share of the time that the answers' rows take alone, whatever a row costs: on a CPU a chunk of some
thousand rows takes seconds, on a GPU milliseconds, and behind 30,000 rows most of it is attention. Both times are
measured: that of the answers' rows in steps without prompts, of which there is one now and then, and the seconds of a
prompt's row in the last steps with them. Knows no clock: the caller measures. After the idea of Sarathi-Serve's token
budget (Agrawal et al. 2024), which is a constant found by profiling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from paceline.core.estimation.running import RecentMedian

SHARE: Final = 0.75  # of the answers' own time that prompts may add to a step, so that a gap is less than doubled
REFRESH: Final = 48  # steps with prompts, after which one without them measures the answers' time again
FIRST_ROWS: Final = 16  # while the time of a prompt's row is unknown
_GROWTH: Final = 2.0  # of the rows from one step to the next: what a row costs depends on their number
_LEAST: Final = 0.05  # of the time allowed for the rows that they take at least: two steps' times differ by chance


@dataclass(slots=True)
class PrefillPace:
    """Each step: `rows`, then `record`."""

    _alone: dict[int, RecentMedian] = field(default_factory=dict)  # by size class: seconds of steps without prompts
    _since: dict[int, int] = field(default_factory=dict)  # by size class: steps with prompts since the last such one
    _row_s: RecentMedian = field(default_factory=lambda: RecentMedian(5))  # of a prompt's row
    _last: int = FIRST_ROWS

    def rows(self, answer_rows: int, share: float = SHARE) -> int | None:
        """Most rows of prompts beside so many rows of answers: 0 in a step that measures the answers' time. None
        without a limit: nothing has been recorded. share: of the answers' own time that the prompts may add."""
        if not self._alone and not self._since:
            return None
        size = _size_class(answer_rows)
        alone = self._alone[size].value if size in self._alone else None
        if alone is None or self._since.get(size, 0) >= REFRESH:
            return 0
        row_s = self._row_s.value
        if row_s is None:
            return FIRST_ROWS
        return max(1, int(min(share * alone / row_s, _GROWTH * self._last)))

    def record(self, answer_rows: int, prompt_rows: int, seconds: float) -> None:
        """The step took so long. Steps of prompts alone tell nothing: their rows have another price."""
        if answer_rows == 0 or seconds <= 0.0:
            return
        size = _size_class(answer_rows)
        if prompt_rows == 0:
            self._alone.setdefault(size, RecentMedian(3)).add(seconds)
            self._since[size] = 0
            return
        self._since[size] = self._since.get(size, 0) + 1
        alone = self._alone[size].value if size in self._alone else None
        if alone is not None:
            self._row_s.add(max(seconds - alone, _LEAST * SHARE * alone) / prompt_rows)
            self._last = prompt_rows


def _size_class(rows: int) -> int:
    """The smallest number of rows of a class, whose sizes differ by less than an eighth."""
    shift = max(0, rows.bit_length() - 4)
    return (rows >> shift) << shift
