"""Owners' sequences on one scheduler, one pending segment each."""

from __future__ import annotations

from collections import Counter

from paceline.core.batching.pending import Group
from paceline.core.batching.scheduler import Scheduler, SchedulerOutput
from paceline.core.batching.segment import Segment, SeqId


class Load:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.waiting: dict[int, tuple[str, int, int]] = {}  # by key: owner, sequence, rows that are left
        self.lengths: Counter[int] = Counter()
        self.next_key = 0

    def add(
        self,
        owner: str,
        seq: int,
        rows: int = 1,
        *,
        group: int | None = None,
        tree: bool = False,
        criticality: float = 0.0,
    ) -> int:
        self.next_key += 1
        segment = Segment(SeqId(seq), self.lengths[seq], tuple(range(rows)), (-1,) * rows if tree else None, "all")
        of = Group(seq if group is None else group, 0, owner=owner, criticality=criticality)
        self.scheduler.add(self.next_key, segment, group=of)
        self.waiting[self.next_key] = owner, seq, rows
        self.lengths[seq] += rows
        return self.next_key

    def step(self) -> Counter[str]:
        """Rows that each owner had in it."""
        scheduled = self.scheduler.schedule()
        self.scheduler.check()
        assert scheduled is not None
        self.ran(scheduled)
        had = Counter[str]()
        for each in scheduled.segments:
            owner, seq, rows = self.waiting.pop(each.key)
            had[owner] += len(each.segment.tokens)
            if not each.final:
                self.waiting[each.key] = owner, seq, rows - len(each.segment.tokens)
        return had

    def ran(self, scheduled: SchedulerOutput) -> None:
        """Called before what has run is no longer `waiting`."""
