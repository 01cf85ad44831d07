"""How many rows of one owner a step takes while other owners have answers in it: no owner makes it much longer.

Every answer in a step waits for the whole step, so the rows of one owner with many answers are everybody's gap. The
rule: what an owner's rows add to a step is at most a `SHARE` of what the step takes without them. It is in time, so
that rows that are free are not held back, and by owner, so that many owners with few answers each are not: only who has
more than the others together allow is limited. Who asks for less than the limit has all of its rows in every step, and
each owner has its oldest segment, or the oldest branches of one answer, whatever they cost.

An owner that is alone is not limited, nor is anybody before the caller has told what steps take. Owners seen in the
last few steps count as there: else a step begun just before one's next row comes would be as long as others like. Not
bounded: what several owners add together, and a single tree, which cannot be cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from paceline.core.batching.groups import Group
from paceline.core.batching.pace.step_times import StepTimes

SHARE: Final = 0.45  # of a step's time without an owner's rows that these may add: gaps of at most 1.5 times, estimates
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
        whole, half = self._level(demands, SHARE), None
        limits = {}
        for owner in wanted:
            level = whole
            if owner in with_prompts:
                level = half = self._level(demands, SHARE / 2) if half is None else half
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
            return SHARE
        alone = self.times.at(total)
        return max(_LEAST_SHARE, (1.0 + SHARE) * self.times.at(total - own) / alone - 1.0)

    def _take(self, owner: str, rows: int, priority: int) -> None:
        self._taken[owner] = self._taken.get(owner, 0) + rows
        self._first.setdefault(owner, priority)
