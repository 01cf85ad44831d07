"""Pending segments in order of arrival, and what is to be computed again before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.batching.groups import Group
from paceline.core.batching.segment import Segment, SeqId

RECOMPUTED: Final = -1  # key of rows that a preempted sequence had: nobody waits for an answer to them


@dataclass(slots=True)
class PendingSegment:
    key: int
    segment: Segment
    order: int  # of arrival
    group: Group
    num_computed_tokens: int = 0  # rows already scheduled, or found cached
    started: bool = False  # memory for all of its rows has been allocated

    @property
    def rows(self) -> int:
        """Rows still to be run."""
        return len(self.segment.tokens) - self.num_computed_tokens

    @property
    def end(self) -> int:
        return self.segment.start + len(self.segment.tokens)

    @property
    def start(self) -> int:
        return self.segment.start + self.num_computed_tokens


class PendingQueues:
    """By sequence: its pending segments, and after a preemption first the segments that write its rows again.

    A sequence without rows of its own is `preempted` until it is restored. That begins with its next turn, so a
    sequence that nothing is asked of stays without rows.
    """

    def __init__(self) -> None:
        self._by_key: dict[int, PendingSegment] = {}  # in order of arrival
        self._by_seq: dict[SeqId, list[PendingSegment]] = {}  # the same by sequence; none of them empty
        self._preempted: set[SeqId] = set()
        self._restoring: dict[SeqId, list[PendingSegment]] = {}  # what is left of their rows; none of them empty
        self._next_order = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[SeqId]:
        """Sequences with pending segments."""
        return iter(self._by_seq)

    def add(self, key: int, segment: Segment, group: Group) -> PendingSegment:
        """Raises ValueError for a key in use."""
        if key in self._by_key:
            raise ValueError(f"key {key} is pending already")
        item = PendingSegment(key, segment, self._next_order, group)
        self._next_order += 1
        self._by_key[key] = item
        self._by_seq.setdefault(segment.seq, []).append(item)
        return item

    def __contains__(self, item: PendingSegment) -> bool:
        return self._by_key.get(item.key) is item

    def of(self, seq: SeqId) -> Sequence[PendingSegment]:
        """Without what is to be computed again."""
        return self._by_seq.get(seq, ())

    def head(self, seq: SeqId) -> PendingSegment:
        """What the sequence runs next."""
        restoring = self._restoring.get(seq)
        return restoring[0] if restoring else self._by_seq[seq][0]

    def remove(self, item: PendingSegment) -> None:
        """Done, or cancelled."""
        seq = item.segment.seq
        queues = self._restoring if item.key == RECOMPUTED else self._by_seq
        queues[seq].remove(item)
        if not queues[seq]:
            del queues[seq]
        if item.key != RECOMPUTED:
            del self._by_key[item.key]

    def drop(self, seq: SeqId) -> list[int]:
        """Remove all pending segments of the sequence; returns their keys."""
        self._restoring.pop(seq, None)
        return [self._by_key.pop(item.key).key for item in self._by_seq.pop(seq, [])]

    # ---- preemption -------------------------------------------------------------------------------------------------
    def preempt(self, seq: SeqId) -> None:
        """The sequence's rows are gone: they are computed again before its first pending segment."""
        self._preempted.add(seq)
        self._restoring.pop(seq, None)
        for item in self._by_seq.get(seq, ()):
            item.started = False

    def restore(self, seq: SeqId, rows: Sequence[Segment]) -> None:
        """Memory has been allocated: compute these rows, then the first pending segment."""
        self._preempted.discard(seq)
        head = self._by_seq[seq][0]
        if rows:
            self._restoring[seq] = [
                PendingSegment(RECOMPUTED, each, head.order, head.group, started=True) for each in rows
            ]
            head.started = True

    def release(self, seq: SeqId) -> None:
        """Forget that the sequence was preempted."""
        self._preempted.discard(seq)
        self._restoring.pop(seq, None)

    def is_preempted(self, seq: SeqId) -> bool:
        return seq in self._preempted

    def is_started(self, seq: SeqId) -> bool:
        """Memory for its first pending segment has been allocated."""
        return self._by_seq[seq][0].started

    def is_restoring(self, seq: SeqId) -> bool:
        return seq in self._restoring

    def rows_written(self, seq: SeqId) -> int:
        """Rows the sequence has now; its first pending segment runs once all before it are there."""
        return 0 if seq in self._preempted else self.head(seq).start

    def end(self, seq: SeqId) -> int:
        """Rows the sequence has after its first pending segment."""
        return self._by_seq[seq][0].end

    def check(self) -> None:
        items = [item for queue in self._by_seq.values() for item in queue]
        assert all(item.rows > 0 for item in items), items
        assert all(item is self._by_key[item.key] for item in items) and len(items) == len(self._by_key), items
        assert all(item.num_computed_tokens == 0 or item.segment.parents is None for item in items), items
        begun = [item.segment.seq for item in items if item.num_computed_tokens]
        assert len(set(begun)) == len(begun), begun
        assert self._restoring.keys() <= self._by_seq.keys(), (self._restoring, self._by_seq)
        assert not self._restoring.keys() & self._preempted
