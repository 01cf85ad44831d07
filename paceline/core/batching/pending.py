"""Pending segments in order of arrival, and what is to be computed again before them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.core.batching.segment import Segment, SeqId

# Groups of sequences: which sequences belong together, which hold rows, and which group is served before which.
#
# The older group is served first. Two engines that write answers together must agree which one is older: else each
# could prefer an answer that waits for the other engine. Such groups stand in the line of their link, where each has a
# place that both sides know.


_MIN_IDLE_TICKS = 2  # so that a whole interval between two ticks has passed


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are admitted, preempted and released together, as the branches of one answer are."""

    key: int
    claim: int  # most rows of all of them together, in whole blocks; 0: not known
    priority: int = 0  # smaller ones run first; ones that come without end starve all larger ones
    line: tuple[Hashable, int] | None = None  # a link to another engine, and the place there of an answer they share
    owner: str = ""  # owners take turns where a step has no room for all; memory is given by age alone
    criticality: float = 0.0  # s of its workflow that wait for it; 0 without one. See `turns`


@dataclass(slots=True, eq=False)
class GroupState:
    """A group as long as one of its sequences is known."""

    group: Group
    rank: tuple[int, int, int]  # the smaller one is served first, and preempted by a larger one only if it is idle
    seqs: set[SeqId] = field(default_factory=set)
    resident: dict[SeqId, None] = field(default_factory=dict)  # sequences that hold rows, in order
    active_tick: int = 0  # the last tick by which a segment of it was pending


class GroupTable:
    """Groups by their sequences. Ticks stand for time: see `tick`."""

    def __init__(self) -> None:
        self._by_seq: dict[SeqId, GroupState] = {}
        self._by_key: dict[int, GroupState] = {}
        self._running: set[SeqId] = set()
        self._next_age = 0
        self._ticks = 0

    @property
    def running(self) -> Collection[SeqId]:
        """Sequences that hold rows."""
        return self._running

    def join(self, seq: SeqId, group: Group | None) -> GroupState:
        """The group of a sequence, which is given when the sequence is first named; None: one of its own."""
        state = self._by_seq.get(seq)
        if state is None:
            group = group or Group(-1 - seq, 0)
            state = self._by_key.get(group.key)
            if state is None:
                state = self._by_key[group.key] = GroupState(group, self._rank(group))
            self._by_seq[seq] = state
            state.seqs.add(seq)
        state.active_tick = self._ticks
        return state

    def _rank(self, group: Group) -> tuple[int, int, int]:
        """Priority, age, and place in its line. Those behind it that came before it count as no older from now on."""
        self._next_age += 1
        if group.line is None:
            return group.priority, self._next_age, 0
        link, place = group.line
        for state in self._by_key.values():
            if state.group.line is not None and state.group.line[0] == link and state.group.line[1] > place:
                state.rank = state.group.priority, self._next_age, state.group.line[1]
        return group.priority, self._next_age, place

    def leave(self, seq: SeqId) -> None:
        """The sequence has been released."""
        self.give_up_rows(seq)
        state = self._by_seq.pop(seq, None)
        if state is not None:
            state.seqs.discard(seq)
            if not state.seqs:
                del self._by_key[state.group.key]

    def of(self, seq: SeqId) -> GroupState:
        return self._by_seq[seq]

    def take_rows(self, seq: SeqId) -> None:
        self._running.add(seq)
        self._by_seq[seq].resident[seq] = None

    def give_up_rows(self, seq: SeqId) -> None:
        if seq in self._running:
            self._running.discard(seq)
            del self._by_seq[seq].resident[seq]

    def holders(self) -> Iterator[GroupState]:
        """Groups that hold rows."""
        return (state for state in self._by_key.values() if state.resident)

    def tick(self) -> None:
        """Time has passed, enough for an answer to be continued if nothing but this side holds it up."""
        self._ticks += 1

    def stay_active(self, state: GroupState) -> None:
        """Note that a segment of the group is pending."""
        state.active_tick = self._ticks

    def is_idle(self, state: GroupState) -> bool:
        """True if nothing of the group was pending for a whole interval between two ticks."""
        return self._ticks - state.active_tick >= _MIN_IDLE_TICKS

    def check(self) -> None:
        assert set(self._by_key.values()) == set(self._by_seq.values())
        assert {seq for state in self._by_key.values() for seq in state.resident} == self._running
        for key, state in self._by_key.items():
            assert key == state.group.key and state.seqs and set(state.resident) <= state.seqs, state
            assert all(self._by_seq[seq] is state for seq in state.seqs), state


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


# What the scheduler knows of the engine's memory and may ask of it.


class Memory:
    """Memory without a bound in which nothing is cached; the base of those that differ."""

    def free_rows(self) -> int | None:
        """Rows that can still be written if no two sequences share any; None: any number."""
        return None

    def held(self, seq: SeqId) -> int:  # noqa: ARG002  # for those that differ, here and below
        """Rows written of a sequence."""
        return 0

    def begin(self, key: int, segment: Segment) -> int | None:  # noqa: ARG002
        """Begin a sequence with this chain, for whose rows there is memory. Returns the number of its first rows that
        have now been written from a cache, fewer than there are, or None if it is to wait for another segment in
        progress. key: `RECOMPUTED` where the sequence has been preempted; it does not wait then."""
        return 0

    def preempt(self, seqs: Sequence[SeqId]) -> None:
        """Release the rows of these sequences; `rows_of` must know them."""

    def rows_of(self, seq: SeqId) -> Sequence[Segment]:  # noqa: ARG002
        """Segments that write the rows of a preempted sequence again: all that its later segments rely on."""
        return ()
