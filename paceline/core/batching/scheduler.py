"""The scheduler: merges the segments of many sequences into one ragged batch per forward pass.

No phases: a prefill is a long chain, cut into chunks under the row budget so that decodes and trees never wait for it;
a tree is never cut. First come, first served among groups of one priority, except for long prompts, of which the
shortest runs beside the oldest; the oldest segment of the first priority always advances, so within it nothing starves.
Knows neither engine nor clock. The caller runs each batch
before it asks for the next. After Orca (Yu et al. 2022) and Sarathi (Agrawal et al. 2023).

Sequences that end together, as the branches of one request do, form a group. A group's claim is the maximum of rows
that it declares to need. Rows are allocated only while all running groups could still get their claims, one after the
other (the banker's algorithm, Dijkstra 1965), so none of them waits for rows that are never freed. Groups that stay
within their claims are never rejected. Nothing is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from paceline.core.batching.segment import Batch, Segment, SeqId


@dataclass(frozen=True, slots=True)
class ScheduledSegment:
    """A segment, or one chunk of a chain; the outputs of chunks follow one another."""

    key: int
    segment: Segment
    final: bool  # the last chunk of the segment added under `key`


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are released together."""

    key: int
    claim: int  # most rows of all of them together, in whole blocks
    priority: int = 0  # smaller ones run first; ones that come without end starve all larger ones


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    segments: tuple[ScheduledSegment, ...]  # of distinct sequences
    rejected: tuple[int, ...] = ()  # keys of dropped segments that can never fit

    @property
    def batch(self) -> Batch:
        return Batch(tuple(each.segment for each in self.segments))


@dataclass(slots=True)
class _Pending:
    key: int
    segment: Segment
    order: int  # of arrival
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


class _RowAccounts:
    """Allocated and claimed rows, for one step."""

    def __init__(
        self,
        free: int,
        groups: Mapping[SeqId, Group],
        holders: Collection[SeqId],
        held: Callable[[SeqId], int],
        capacity: int,
    ) -> None:
        """held: rows of a sequence, in whole blocks. capacity: rows in total; larger claims count as this."""
        self._free = free
        self._capacity = capacity
        self._held_of = held
        self._seqs: dict[Group, list[SeqId]] = {}  # of running groups: the sequences that hold rows
        for seq in holders:
            self._seqs.setdefault(groups[seq], []).append(seq)
        self._allocated: dict[Group, int] = {}  # allocated in this step, or to chains with chunks left to run
        self._held: dict[Group, int] | None = None  # computed on demand
        self._largest = max((group.claim for group in self._seqs), default=0)

    def has_begun(self, group: Group) -> bool:
        return group in self._seqs or group in self._allocated

    def allocate(self, group: Group, rows: int) -> None:
        self._free -= rows
        self._allocated[group] = self._allocated.get(group, 0) + rows
        self._largest = max(self._largest, group.claim)

    def can_allocate(self, group: Group, rows: int) -> bool:
        """True if all running groups, and this one with `rows` more, could still get their claims."""
        left = self._free - rows
        if left < 0:
            return False
        if left >= max(self._largest, group.claim):
            return True
        if self._held is None:
            self._held = {each: sum(map(self._held_of, seqs)) for each, seqs in self._seqs.items()}
        needs: list[tuple[int, int]] = []  # (rows up to the claim, rows freed at the end), by group
        for each in {**self._held, **self._allocated, group: 0}:
            has = self._held.get(each, 0) + self._allocated.get(each, 0) + (rows if each == group else 0)
            needs.append((max(0, min(each.claim, self._capacity) - has), has))
        for need, has in sorted(needs):
            if need > left:
                return False
            left += has
        return True


class Scheduler:
    """Pending segments in order of arrival.

    max_batched_tokens: rows per step, at least 2; exceeded only by a tree that is larger or that runs beside a prefill.
    max_num_seqs: segments per step, at least 2. block_size: granularity of the engine's memory, in rows.
    A chain starts only if all of its rows fit. A sequence without a group claims its pending rows. Not accounted for:
    rows of sequences the scheduler never saw, and copies caused by forks; for these the engine itself may run out of
    blocks.
    """

    def __init__(self, max_batched_tokens: int, max_num_seqs: int, *, block_size: int = 1) -> None:
        if max_batched_tokens < 2 or max_num_seqs < 2 or block_size < 1:
            raise ValueError(f"a step needs room for two: {max_batched_tokens} rows, {max_num_seqs} segments")
        self._max_batched_tokens = max_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        # Chains above this are cut into chunks; together they are guaranteed this many rows per step.
        self._quantum = max(1, max_batched_tokens // 4)
        self._pending: dict[int, _Pending] = {}  # by key, in order of arrival
        self._queues: dict[SeqId, list[_Pending]] = {}  # the same by sequence; none of them empty
        self._arrived: list[_Pending] = []  # since the last step: not yet compared with the capacity
        self._next_order = 0
        self._running: set[SeqId] = set()  # sequences with rows written, as far as the scheduler knows
        self._groups: dict[SeqId, Group] = {}  # of sequences that are pending or hold rows
        self._capacity = 0  # the most rows that were ever free
        self._short: frozenset[Group] = frozenset()  # groups that lacked memory in the last step

    @property
    def idle(self) -> bool:
        return not self._pending

    @property
    def running(self) -> Collection[SeqId]:
        """Sequences with rows written, as far as the scheduler knows."""
        return self._running

    def add(self, key: int, segment: Segment, *, group: Group | None = None) -> None:
        """Queue a segment. Those of one sequence run in the order they are added. Raises ValueError for a key in use.

        group: of the sequence, given with its first segment.
        """
        if key in self._pending:
            raise ValueError(f"key {key} is pending already")
        item = _Pending(key, segment, self._next_order)
        self._next_order += 1
        self._pending[key] = item
        self._queues.setdefault(segment.seq, []).append(item)
        self._arrived.append(item)
        self._groups.setdefault(segment.seq, group or Group(-1 - segment.seq, 0))

    def last(self, seq: SeqId) -> int | None:
        """The key of the last pending segment of this sequence."""
        queue = self._queues.get(seq)
        return queue[-1].key if queue else None

    def has_begun(self, group: Group) -> bool:
        """True if a sequence of the group holds rows, as far as the scheduler knows."""
        return any(self._groups.get(seq) == group for seq in tuple(self._running))

    def lacks_memory(self, group: Group) -> bool:
        """True if the last step left out rows of this group for lack of memory."""
        return group in self._short

    def cancel(self, seq: SeqId, from_row: int = 0) -> list[int]:
        """Cancel the pending rows of this sequence from `from_row` on. Returns the keys of dropped segments.

        A chain that begins below `from_row` is shortened to end there and keeps its key, because later segments rely on
        its rows. With `from_row` 0 the sequence counts as released.
        """
        if from_row <= 0:
            self._running.discard(seq)
            self._groups.pop(seq, None)
        dropped = []
        for item in list(self._queues.get(seq, ())):
            segment = item.segment
            if segment.start + len(segment.tokens) <= from_row:
                continue
            if item.start >= from_row or segment.parents is not None:
                self._remove(item)
                dropped.append(item.key)
            else:
                tokens = segment.tokens[: from_row - segment.start]
                item.segment = Segment(seq, segment.start, tokens, None, segment.logits)
        return dropped

    def schedule(
        self,
        free_rows: int | None,
        held: Callable[[SeqId], int] = lambda _: 0,
        begin: Callable[[int, Segment], int | None] = lambda *_: 0,
    ) -> SchedulerOutput | None:
        """The next step, and rejected segments. None: nothing is pending, or nothing fits until something is released.

        free_rows: rows the engine can still write; None: unlimited. held: rows the engine has written of a sequence.
        begin: called with key and segment of a sequence's first chain once there is memory for it; returns the number
        of its first rows that the caller has now written from a cache, fewer than there are, or None if it is to wait
        for another segment in progress.
        Segments that need more rows than were ever free are rejected. If all groups that hold rows wait for more, which
        is possible only if one has exceeded its claim, the youngest of them is rejected to resolve the deadlock.
        """
        rejected = self._reject_oversized(free_rows)
        heads = self._heads()
        scheduled = self._fill([item for item in self._admit(heads, free_rows, held) if self._begin(item, begin)])
        if not scheduled and not rejected and heads:
            rejected = self._reject_deadlocked(heads)
        if not scheduled and not rejected:
            return None
        return SchedulerOutput(tuple(scheduled), tuple(rejected))

    def check(self) -> None:
        assert all(item.rows > 0 for item in self._pending.values()), self._pending
        assert all(key == item.key for key, item in self._pending.items()), self._pending
        assert all(item.num_computed_tokens == 0 or item.segment.parents is None for item in self._pending.values()), (
            self._pending
        )
        begun = [item.segment.seq for item in self._pending.values() if item.num_computed_tokens]
        assert len(set(begun)) == len(begun), begun
        known = self._running | {item.segment.seq for item in self._pending.values()}
        assert known <= self._groups.keys(), (known, self._groups)

    def _heads(self) -> list[_Pending]:
        """The first pending segment of each sequence, by priority, then oldest first."""
        groups = self._groups
        return sorted(
            (queue[0] for queue in self._queues.values()),
            key=lambda item: (groups[item.segment.seq].priority, item.order),
        )

    def _remove(self, item: _Pending) -> None:
        del self._pending[item.key]
        queue = self._queues[item.segment.seq]
        queue.remove(item)
        if not queue:
            del self._queues[item.segment.seq]

    def _reject_oversized(self, free_rows: int | None) -> list[int]:
        """Drop the segments that would not fit even alone, and the later ones of their sequences; return their keys."""
        arrived, self._arrived = self._arrived, []
        if free_rows is None:
            return []
        self._capacity = max(self._capacity, free_rows)
        too_long = [
            item.segment.seq
            for item in arrived
            if self._pending.get(item.key) is item and self._ceil(item.end) > self._capacity
        ]
        return [key for seq in dict.fromkeys(too_long) for key in self._drop_with_followers(seq)]

    def _drop_with_followers(self, seq: SeqId) -> list[int]:
        items = self._queues.pop(seq, [])
        for item in items:
            del self._pending[item.key]
        return [item.key for item in items]

    def _reject_deadlocked(self, heads: list[_Pending]) -> list[int]:
        """If all groups that hold rows wait, drop the pending segments of the youngest and return their keys."""
        holding = {self._groups[seq].key for seq in self._running}
        waiting = [self._groups[item.segment.seq].key for item in heads]
        if not holding or not holding <= set(waiting):
            return []
        youngest = next(key for key in reversed(waiting) if key in holding)
        seqs = [item.segment.seq for item in heads if self._groups[item.segment.seq].key == youngest]
        return [key for seq in seqs for key in self._drop_with_followers(seq)]

    def _admit(self, heads: list[_Pending], free_rows: int | None, held: Callable[[SeqId], int]) -> list[_Pending]:
        """The segments that may run. While one waits for memory no new group starts, otherwise small ones would
        overtake it forever; running groups continue, because only their end frees memory."""
        if free_rows is None:
            return heads
        short: set[Group] = set()
        accounts = _RowAccounts(
            free_rows, self._groups, self._running, lambda seq: self._ceil(held(seq)), self._capacity
        )
        for item in heads:
            if item.started:
                accounts.allocate(self._groups[item.segment.seq], self._cost(item))
        admitted, waits = [], False
        for item in heads:
            group, cost = self._groups[item.segment.seq], self._cost(item)
            if item.started:
                admitted.append(item)
            elif (accounts.has_begun(group) or not waits) and accounts.can_allocate(group, cost):
                accounts.allocate(group, cost)
                admitted.append(item)
            else:
                waits = True
                short.add(group)
        self._short = frozenset(short)
        return admitted

    def _begin(self, item: _Pending, begin: Callable[[int, Segment], int | None]) -> bool:
        """Ask for cached rows before a sequence's first chain runs. False if the chain is to wait."""
        if item.started or item.segment.start or item.segment.parents is not None:
            return True
        rows = begin(item.key, item.segment)
        if rows is None:
            return False
        assert rows < len(item.segment.tokens), (rows, item)
        # From now on its memory is its own, even if it has no rows in this step: another chain may wait for it.
        item.num_computed_tokens, item.started = rows, True
        self._running.add(item.segment.seq)
        return True

    def _fill(self, admitted: list[_Pending]) -> list[ScheduledSegment]:
        """Fill the step: short segments in order while they fit beside the quantum of the long ones, which share the
        remaining rows."""
        long = [item for item in admitted if item.segment.parents is None and item.rows > self._quantum]
        short = [item for item in admitted if item.segment.parents is not None or item.rows <= self._quantum]
        left = self._max_batched_tokens - (self._quantum if long else 0)
        places = self._max_num_seqs - (1 if long else 0)
        scheduled: list[ScheduledSegment] = []
        for item in short[:places]:
            if scheduled and item.rows > left:
                break
            left -= item.rows
            scheduled.append(self._chunk(item, item.rows))
        shares = _shares([item.rows for item in long], max(left, 0) + self._quantum)
        running = [(item, rows) for item, rows in zip(long, shares, strict=True) if rows]
        return scheduled + [self._chunk(item, rows) for item, rows in running[: self._max_num_seqs - len(scheduled)]]

    def _chunk(self, item: _Pending, rows: int) -> ScheduledSegment:
        """Schedule the next `rows` rows, as a segment of their own."""
        whole, final = item.segment, rows == item.rows
        segment, first = whole, item.num_computed_tokens
        if first or not final:
            tokens = whole.tokens[first : first + rows]
            logits = whole.logits if final or whole.logits == "all" else "none"
            segment = Segment(whole.seq, whole.start + first, tokens, None, logits)
        item.num_computed_tokens, item.started = first + rows, True
        self._running.add(whole.seq)
        if final:
            self._remove(item)
        return ScheduledSegment(item.key, segment, final)

    def _cost(self, item: _Pending) -> int:
        """Free rows that the remaining rows of the segment need, in whole blocks."""
        return self._ceil(item.end) - self._ceil(item.start)

    def _ceil(self, rows: int) -> int:
        return -(-rows // self._block_size) * self._block_size


def _shares(lengths: list[int], rows: int) -> list[int]:
    """Rows of a step for each of these chains, oldest first; the sum is `rows`, or all that is left of them.

    Half is the oldest's, so that none starves; the rest goes to those with the least left, of equals to the oldest, so
    that a prompt of 200 tokens does not wait for one of 30,000.
    """
    if not lengths:
        return []
    shares = [0] * len(lengths)
    shares[0] = min(lengths[0], max(1, rows // 2))
    left = rows - shares[0]
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        more = min(lengths[place] - shares[place], left)
        shares[place] += more
        left -= more
    return shares
