"""Who gets rows in one step: what is free, what each group holds, and whose rows may be taken for whom.

The rule. Groups are served by rank: priority, then age. A group may take the rows of every group of a larger rank, the
largest first; and those of a group of smaller rank that has been idle, because that waits for something else than
memory. So no group waits for one that cannot go on, and the first of the pending ones always goes on: it may take all
rows there are, if need be after the others' ticks.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.batching.groups import GroupState, GroupTable
from paceline.core.batching.segment import SeqId

RESERVE_ROWS = 64  # of each sequence, for growth: left free where a group is admitted, so that none is soon preempted


class RowAccounts:
    """Rows of one step. Groups must be asked for in order of rank."""

    def __init__(self, free: int, capacity: int, groups: GroupTable, held: Callable[[SeqId], int]) -> None:
        """held: rows of a sequence, in whole blocks. capacity: rows in total."""
        self._free = free
        self._capacity = capacity
        self._groups = groups
        self._held = held
        self._allocated: dict[GroupState, int] = {}  # in this step, or to chains with chunks left to run
        self._num_allocated = 0
        self._holders: list[GroupState] | None = None  # at the beginning of the step, by rank; found on demand
        self._num_passed = 0  # of them: those before the last group that was asked for
        self._growth = 0  # rows into which the groups asked for so far, and those passed, will soon grow

    @property
    def left(self) -> int:
        return self._free - self._num_allocated

    def allocate(self, state: GroupState, rows: int) -> None:
        self._allocated[state] = self._allocated.get(state, 0) + rows
        self._num_allocated += rows
        if not state.resident:
            self._growth += self._growth_of(state, self._allocated[state])  # for which later groups leave room

    def held(self, state: GroupState) -> int:
        """Rows the group holds, with those allocated to it."""
        return sum(map(self._held, state.resident)) + self._allocated.get(state, 0)

    def released(self, state: GroupState, free: int) -> None:
        """The group's rows have been released. free: rows that are free now."""
        self._num_allocated -= self._allocated.pop(state, 0)
        self._free = free

    def need(self, state: GroupState, rows: int) -> int:
        """Rows that must be left for the group to have `rows` more. A group without rows is admitted only beside the
        growth of those before it and its own: else it would soon be preempted, and all its rows computed in vain."""
        if state.resident:
            return rows
        return rows + self._growth_before(state) + self._growth_of(state, rows)

    def victims(self, state: GroupState, need: int) -> list[GroupState] | None:
        """Groups whose rows must be released for `need` rows to be left, in order; None if all of them are not
        enough."""
        found: list[GroupState] = []
        left = self.left
        for other in reversed(self._ranked()):
            if left >= need:
                return found
            if other is not state and other.resident and (other.rank > state.rank or self._groups.is_idle(other)):
                found.append(other)
                left += self.held(other)
        return found if left >= need else None

    def _growth_before(self, state: GroupState) -> int:
        holders = self._ranked()
        while self._num_passed < len(holders) and holders[self._num_passed].rank < state.rank:
            passed = holders[self._num_passed]
            if passed.resident and not self._groups.is_idle(passed):
                self._growth += self._growth_of(passed, self.held(passed))
            self._num_passed += 1
        return self._growth

    def _growth_of(self, state: GroupState, held: int) -> int:
        return max(0, min(RESERVE_ROWS * len(state.seqs), min(state.group.claim, self._capacity) - held))

    def _ranked(self) -> list[GroupState]:
        if self._holders is None:
            self._holders = sorted(self._groups.holders(), key=lambda state: state.rank)
        return self._holders
