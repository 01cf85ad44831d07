"""Times of steps as they were measured, and what follows: rows of long prompts and of one owner beside others'
answers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from paceline.core.batching.pending import Group
from paceline.core.estimation import RecentMedian

# How many rows of long prompts a step takes beside answers that are being written, from the times of steps.
#
# A token of an answer waits for the whole step, so what a step takes longer for the prompts' rows is every answer's
# gap. It is held to a share of the time that the answers' rows take alone, whatever a row costs: on a CPU a chunk of
# some thousand rows takes seconds, on a GPU milliseconds, and behind 30,000 rows most of it is attention. Both times
# are measured: that of the answers' rows in steps without prompts, of which there is one now and then, and the seconds
# of a prompt's row in the last steps with them. Knows no clock: the caller measures. After the idea of Sarathi-Serve's
# token budget (Agrawal et al. 2024), which is a constant found by profiling.


PROMPT_SHARE: Final = (
    0.75  # of the answers' own time that prompts may add to a step, so that a gap is less than doubled
)
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

    def rows(self, answer_rows: int, share: float = PROMPT_SHARE) -> int | None:
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
            self._row_s.add(max(seconds - alone, _LEAST * PROMPT_SHARE * alone) / prompt_rows)
            self._last = prompt_rows


def _size_class(rows: int) -> int:
    """The smallest number of rows of a class, whose sizes differ by less than an eighth."""
    shift = max(0, rows.bit_length() - 4)
    return (rows >> shift) << shift


# Seconds of a step by its rows, estimated from the last steps: how much longer a step becomes by more rows.
#
# No line is assumed: on a GPU rows are free until there are many, on a CPU each has its price, and beside both stands
# what the caller does for a row until its step counts as done. Times of sizes alike are taken together, by their lower
# third since a stall only adds; these are made to rise with the rows, and joined. What was seen of a size is forgotten
# when it is old, the sooner the less it was, and counts again when more is seen. Knows no clock.


MEMORY: Final = 256  # steps for which a size seen often enough is remembered, and few rows are not measured anew
SEEN: Final = 9  # steps of a size that are kept
_FEW: Final = 3  # steps of a size, with which what they take counts as known


@dataclass(slots=True)
class StepTimes:
    """Seconds of steps without chunks of prompts."""

    _steps: int = 0
    _seen: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)  # by size class: rows and seconds
    _last: dict[int, int] = field(default_factory=dict)  # by size class: the last step of it
    _curve: list[tuple[float, float]] = field(default_factory=list)  # rows and seconds, neither falls; empty: stale

    def record(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long, s."""
        if rows <= 0 or seconds <= 0.0:
            return
        self._steps += 1
        size = _row_class(rows)
        self._seen.setdefault(size, deque(maxlen=SEEN)).append((rows, seconds))
        self._last[size] = self._steps
        self._curve = []

    def __bool__(self) -> bool:
        """True once anything was recorded."""
        return bool(self._seen)

    @property
    def most_rows(self) -> int:
        """Rows up to which `at` is worth anything."""
        return int(_GROWTH * self._rising()[-1][0])

    def knows(self, rows: int) -> bool:
        """True if steps of about so many rows, or fewer, were seen, more than stalls are likely to be."""
        return any(
            len(seen) >= _FEW and seen[-1][0] <= 2 * rows
            for size, seen in self._seen.items()
            if self._is_remembered(size)
        )

    def at(self, rows: int) -> float:
        """Seconds of a step of so many rows. Something must have been recorded."""
        curve = self._rising()
        (low, low_s), (high, high_s) = curve[0], curve[-1]
        slope = (high_s - low_s) / (high - low) if high > low else 0.0
        if rows >= high:
            return high_s + slope * (rows - high)
        if rows <= low:
            return max(low_s + slope * (rows - low), low_s * rows / low)
        place = bisect_left(curve, (rows, 0.0))
        (left, left_s), (right, right_s) = curve[place - 1], curve[place]
        return left_s + (right_s - left_s) * (rows - left) / (right - left)

    def _rising(self) -> list[tuple[float, float]]:
        """Times of the sizes that are remembered. Neighbours that fall are replaced by their mean, weighted by the
        steps seen (pool adjacent violators)."""
        if self._curve:
            return self._curve
        pools: list[tuple[float, int, list[float]]] = []  # seconds, weight, and the rows that have them
        for size in sorted(self._seen):
            seen = self._seen[size]
            if not self._is_remembered(size):
                continue
            seconds, weight = sorted(seconds for _, seconds in seen)[(len(seen) - 1) // 3], len(seen)
            rows = [fmean(rows for rows, _ in seen)]
            while pools and pools[-1][0] >= seconds:
                before, others, smaller = pools.pop()
                seconds = (before * others + seconds * weight) / (others + weight)
                weight, rows = others + weight, smaller + rows
            pools.append((seconds, weight, rows))
        self._curve = [(each, seconds) for seconds, _, rows in pools for each in rows]
        return self._curve

    def _is_remembered(self, size: int) -> bool:
        return self._steps - self._last[size] <= MEMORY * len(self._seen[size]) // SEEN


def _row_class(rows: int) -> int:
    """The smallest number of rows of a class, whose sizes differ by less than a half."""
    shift = max(0, rows.bit_length() - 2)
    return (rows >> shift) << shift


# How many rows of one owner a step takes while other owners have answers in it: no owner makes it much longer.
#
# Every answer in a step waits for the whole step, so the rows of one owner with many answers are everybody's gap. The
# rule: what an owner's rows add to a step is at most a `SHARE` of what the step takes without them. It is in time, so
# that rows that are free are not held back, and by owner, so that many owners with few answers each are not: only who
# has more than the others together allow is limited. Who asks for less than the limit has all of its rows in every
# step, and each owner has its oldest segment, or the oldest branches of one answer, whatever they cost.
#
# An owner that is alone is not limited, nor is anybody before the caller has told what steps take. Owners seen in the
# last few steps count as there: else a step begun just before one's next row comes would be as long as others like.
# Not bounded: what several owners add together, and a single tree, which cannot be cut.


OWNER_SHARE: Final = (
    0.45  # of a step's time without an owner's rows that these may add: gaps of at most 1.5 times, estimates
)
# being off by some rows
STAYS: Final = 4  # steps for which an owner that has nothing pending still counts
_LEAST_SHARE: Final = 0.05  # that prompts may add in any case


class OwnerLimits:
    """Each step: `begin`, then `limits` and `within` for each priority, the first one first."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._recent: dict[str, tuple[int, int, int]] = {}  # owners: last step with rows of theirs, rows, priority
        self._step = 0
        self._wanted: dict[str, int] = {}  # rows that each owner wants in this step, of the priorities so far
        self._taken: dict[str, int] = {}  # likewise, rows it has
        self._first: dict[str, int] = {}  # the first priority in which it has any

    def begin(self) -> None:
        if self._first:
            self._step += 1
        self._recent |= {owner: (self._step, self._taken[owner], first) for owner, first in self._first.items()}
        self._recent = {owner: seen for owner, seen in self._recent.items() if self._step - seen[0] < STAYS}
        self._wanted, self._taken, self._first = {}, {}, {}

    def limits(
        self, wanted: Mapping[str, int], with_prompts: Collection[str] = (), priority: int = 0
    ) -> Mapping[str, int]:
        """Most rows of each of these owners, with those of earlier priorities; owners without a limit are left out.
        Nobody is limited for owners of later priorities. If nobody is, all of them are taken to have what they want.

        with_prompts: owners with long prompts in the step, which are to have half of what their owner may add.
        """
        for owner, rows in wanted.items():
            before = self._wanted[owner] if owner in self._taken else 0  # else: of former steps
            self._wanted[owner] = before + rows
            self._taken.setdefault(owner, 0)
        for owner, (_, rows, first) in self._recent.items():
            if first <= priority:
                self._wanted.setdefault(owner, rows)
        found = self._found(wanted, with_prompts) if len(self._wanted) > 1 and self.times else {}
        if not found:
            for owner, rows in wanted.items():
                self._take(owner, rows, priority)
        return found

    def _found(self, wanted: Collection[str], with_prompts: Collection[str]) -> Mapping[str, int]:
        demands = sorted(self._wanted.values())
        whole, half = self._level(demands, OWNER_SHARE), None
        limits = {}
        for owner in wanted:
            level = whole
            if owner in with_prompts:
                level = half = self._level(demands, OWNER_SHARE / 2) if half is None else half
            if level < self._wanted[owner]:
                limits[owner] = level
        return limits

    def _level(self, demands: Sequence[int], share: float) -> int:
        """The most rows of one owner by which the step still becomes no longer than `share` allows, at least 1.

        demands: rows that owners want, rising.
        """
        most = demands[-1]
        if not self.times.knows(sum(demands[:-1]) + 1):
            return 1  # this step shows what few rows take
        low, high = 1, most
        while low < high:
            rows = (low + high + 1) // 2
            total = sum(min(demand, rows) for demand in demands)
            allowed = (1.0 + share) * self.times.at(total - rows)
            if total <= self.times.most_rows and self.times.at(total) <= allowed:
                low = rows
            else:
                high = rows - 1
        return low

    def within(self, items: Sequence[tuple[Group, int]], limits: Mapping[str, int]) -> list[bool]:
        """Which of these run, where somebody is limited: groups with rows of segments, in the order of their turns.

        Segments of one group run together. One that has more rows than its owner may have runs in several steps, by
        itself; of each owner an older group goes before a younger one.
        """
        sizes: dict[int, int] = {}
        for group, rows in items:
            sizes[group.key] = sizes.get(group.key, 0) + rows
        together: set[int] = set()  # groups of which all segments run
        full: dict[
            str, int | None
        ] = {}  # owners that have what they may have: no other group of theirs begins but this one
        chosen = []
        for group, rows in items:
            owner, key, limit = group.owner, group.key, limits.get(group.owner)
            taken = self._taken.get(owner, 0)
            if limit is None or key in together:
                runs = True
            elif owner not in full and taken + sizes[key] <= limit:
                together.add(key)
                runs = True
            else:
                runs = taken == 0 or (full.get(owner) == key and taken + rows <= limit)
                full.setdefault(owner, key if taken == 0 else None)
            if runs:
                self._take(owner, rows, group.priority)
            chosen.append(runs)
        return chosen

    def prompt_share(self, owner: str, rows: Mapping[str, int]) -> float | None:
        """Share of a step's time without prompts by which the owner's prompts may lengthen it: what the owner's answers
        leave. None: nobody else has answers in it.

        rows: of answers in the step, by owner.
        """
        own, total = rows.get(owner, 0), sum(rows.values())
        if own == total:
            return None
        if not self.times:
            return OWNER_SHARE
        alone = self.times.at(total)
        return max(_LEAST_SHARE, (1.0 + OWNER_SHARE) * self.times.at(total - own) / alone - 1.0)

    def _take(self, owner: str, rows: int, priority: int) -> None:
        self._taken[owner] = self._taken.get(owner, 0) + rows
        self._first.setdefault(owner, priority)
