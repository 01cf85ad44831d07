"""Turns of owners in a step that has no room for all, whose segment is next; and in the delivery of what it computed.

The owner that has had the fewest rows is next, so owners that want all they can get have equal rows over time, however
many segments each has pending, and one that wants less is not kept waiting. An owner that comes, or returns, begins
where those that wait are: it is owed nothing for the time before. Of its own segments the oldest is next; in every
second step the one that most of a workflow waits for (HeRo's criticality), so that neither starves the other. Memory is
not given by turns but by age (`admission`). After Goyal, Vin and Cheng, Start-Time Fair Queueing (1996).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Sequence

from paceline.core.batching.pending import PendingSegment


def alternating(owners: Sequence[str]) -> list[int]:
    """Places of a step's answers, given with their owners, in the order of their delivery: the first of each owner,
    then the second of each, and so on. Of equals, who has the fewest goes first.
    """
    if len(set(owners)) < 2:
        return list(range(len(owners)))
    number, seen = Counter(owners), Counter[str]()
    keys = []
    for place, owner in enumerate(owners):
        keys.append((seen[owner], number[owner], place))
        seen[owner] += 1
    return [place for _, _, place in sorted(keys)]


class Turns:
    """Rows that owners have had, among segments of one priority. Each step: `begin`, `order`, then `served`."""

    def __init__(self) -> None:
        self._had: dict[str, int] = {}  # owners that wait, and those that were ahead of them when they last did
        self._last: dict[str, int] = {}  # of the same owners: the last step in which each was served
        self._steps = 0

    def begin(self, owners: Collection[str]) -> None:
        """A step begins, for which these owners wait."""
        self._steps += 1
        behind = min((self._had[owner] for owner in owners if owner in self._had), default=0)
        # Who does not wait and was not ahead is forgotten; the counts begin at 0 again, so that they stay small.
        kept = {owner: had - behind for owner, had in self._had.items() if owner in owners or had > behind}
        self._had = {**dict.fromkeys(owners, 0), **kept}
        self._last = {owner: self._last.get(owner, 0) for owner in self._had}

    def order(self, waiting: Sequence[tuple[str, PendingSegment]]) -> list[PendingSegment]:
        """Segments, given by age with their owners, in the order of their turns if each of them were run whole."""
        if self._steps % 2 and any(item.group.criticality for _, item in waiting):
            waiting = sorted(waiting, key=lambda each: -each[1].group.criticality)  # of equals the older one first
        queues: dict[str, deque[PendingSegment]] = {}
        for owner, item in waiting:
            queues.setdefault(owner, deque()).append(item)
        if len(queues) < 2:
            return [item for _, item in waiting]
        turns = [(self._had[owner], self._last[owner], queue[0].order, owner) for owner, queue in queues.items()]
        heapq.heapify(turns)
        ordered: list[PendingSegment] = []
        while turns:
            had, last, _, owner = turns[0]
            item = queues[owner].popleft()
            ordered.append(item)
            if queues[owner]:
                heapq.heapreplace(turns, (had + item.rows, last, queues[owner][0].order, owner))
            else:
                heapq.heappop(turns)
        return ordered

    def served(self, owner: str, rows: int) -> None:
        """So many rows of the owner run in this step."""
        self._had[owner] += rows
        self._last[owner] = self._steps
