"""Which rows run in the next forward pass: the segments of many sequences merged into one ragged batch.

No phases: a prefill is a long chain, cut into pieces under the row budget so that decodes and trees never wait for
it; a tree is never cut. Oldest first, and the oldest of all always moves, so nothing starves. Knows neither engine
nor clock. The caller runs each batch before it asks for the next. After Orca (Yu et al. 2022) and Sarathi (Agrawal et
al. 2023).

Sequences that end together, as the branches of one answer do, are a group, which says how many rows it claims at most.
Rows are given out only while all groups that have begun could still have their claims, one after the other (the
banker's algorithm, Dijkstra 1965): so none of them waits for rows that never come free. Groups that stay within their
claims are never refused. Nothing is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from paceline.core.batching.segment import Batch, Segment, SeqId


@dataclass(frozen=True, slots=True)
class ScheduledSegment:
    """A segment, or one piece of a chain that was cut: its outputs follow those of the pieces before it."""

    key: int
    segment: Segment
    final: bool  # the last piece of what was added under `key`


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that give their rows back together."""

    key: int
    claim: int  # rows of all of them together, in whole blocks, at most


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    segments: tuple[ScheduledSegment, ...]  # of distinct sequences
    rejected: tuple[int, ...] = ()  # keys of what can never fit; dropped

    @property
    def batch(self) -> Batch:
        return Batch(tuple(piece.segment for piece in self.segments))


@dataclass(slots=True)
class _Pending:
    key: int
    segment: Segment
    num_cached_tokens: int = 0  # first rows that need room, but no forward
    num_computed_tokens: int = 0  # rows already scheduled

    @property
    def rows(self) -> int:
        """Still to be run."""
        return len(self.segment.tokens) - max(self.num_computed_tokens, self.num_cached_tokens)

    @property
    def end(self) -> int:
        return self.segment.start + len(self.segment.tokens)

    @property
    def start(self) -> int:
        return self.segment.start + self.num_computed_tokens


class _Accounts:
    """Rows given out and rows claimed, for one step."""

    def __init__(
        self,
        free: int,
        groups: Mapping[SeqId, Group],
        holders: Collection[SeqId],
        held: Callable[[SeqId], int],
        capacity: int,
    ) -> None:
        """held: rows of a sequence, in whole blocks. capacity: rows in all, which no claim exceeds."""
        self._free = free
        self._capacity = capacity
        self._held_of = held
        self._seqs: dict[Group, list[SeqId]] = {}  # of groups that have begun: those that hold rows
        for seq in holders:
            self._seqs.setdefault(groups[seq], []).append(seq)
        self._given: dict[Group, int] = {}  # in this step, or to chains that are not run to their end
        self._held: dict[Group, int] | None = None  # looked at only where it matters
        self._largest = max((group.claim for group in self._seqs), default=0)

    def has_begun(self, group: Group) -> bool:
        return group in self._seqs or group in self._given

    def give(self, group: Group, rows: int) -> None:
        self._free -= rows
        self._given[group] = self._given.get(group, 0) + rows
        self._largest = max(self._largest, group.claim)

    def may_have(self, group: Group, rows: int) -> bool:
        """Could all that have begun, this group with so many rows more among them, still have their claims?"""
        left = self._free - rows
        if left < 0:
            return False
        if left >= max(self._largest, group.claim):
            return True
        if self._held is None:
            self._held = {each: sum(map(self._held_of, seqs)) for each, seqs in self._seqs.items()}
        needs: list[tuple[int, int]] = []
        for each in {**self._held, **self._given, group: 0}:
            has = self._held.get(each, 0) + self._given.get(each, 0) + (rows if each == group else 0)
            needs.append((max(0, min(each.claim, self._capacity) - has), has))
        for need, has in sorted(needs):
            if need > left:
                return False
            left += has
        return True


class Scheduler:
    """Pending segments in order of arrival.

    token_budget: rows per step, at least 2; a step exceeds it only by a tree that is larger than it or that stands
    beside a prefill. max_segments: at least 2. block_size: granularity of the engine's memory, in rows.
    A chain begins only when all of its rows have room. A sequence without a group claims what is pending of it. Rows of
    sequences the scheduler never saw, and copies that forks cause, are not accounted for: there the engine's own
    refusal remains.
    """

    def __init__(self, max_batched_tokens: int, max_num_seqs: int, *, block_size: int = 1) -> None:
        if max_batched_tokens < 2 or max_num_seqs < 2 or block_size < 1:
            raise ValueError(f"a step needs room for two: {max_batched_tokens} rows, {max_num_seqs} segments")
        self._budget = max_batched_tokens
        self._max_segments = max_num_seqs
        self._block_size = block_size
        # A chain above this is long: it is cut, and together the long ones are sure of this many rows a step.
        self._quantum = max(1, max_batched_tokens // 4)
        self._pending: dict[int, _Pending] = {}  # by key, in order of arrival
        self._running: set[SeqId] = set()  # sequences with rows written, as far as seen from here
        self._groups: dict[SeqId, Group] = {}  # of sequences that are pending or hold rows
        self._capacity = 0  # the most rows that were ever free
        self._short: frozenset[Group] = frozenset()  # groups that were not given the rows they asked for last

    @property
    def idle(self) -> bool:
        return not self._pending

    def add(self, key: int, segment: Segment, *, ready: int = 0, group: Group | None = None) -> None:
        """Segments of one sequence run in the order they are added. Raises ValueError for a key in use.

        group: the sequence's, told with its first segment.

        ready: how many first rows of a chain the caller has from elsewhere. Its first piece comes without them when
        there is room for all; the caller writes them before it runs that piece.
        """
        if key in self._pending:
            raise ValueError(f"key {key} is pending already")
        if ready and not (0 < ready < len(segment.tokens) and segment.parents is None):
            raise ValueError(f"{ready} rows cannot be ready of {segment}")
        self._pending[key] = _Pending(key, segment, ready)
        self._groups.setdefault(segment.seq, group or Group(-1 - segment.seq, 0))

    def last(self, seq: SeqId) -> int | None:
        """The key of the last pending segment of this sequence."""
        return next((key for key, item in reversed(self._pending.items()) if item.segment.seq == seq), None)

    def has_begun(self, group: Group) -> bool:
        """Does a sequence of it hold rows, as far as seen from here?"""
        return any(self._groups.get(seq) == group for seq in tuple(self._running))

    def lacks_memory(self, group: Group) -> bool:
        """Was it the memory, when the last step was chosen, that kept rows of this group from running?"""
        return group in self._short

    def cancel(self, seq: SeqId, from_row: int = 0) -> list[int]:
        """Rows of this sequence from `from_row` on will not be run. Returns the keys of what is dropped.

        A chain that begins below `from_row` is shortened to end there and keeps its key: later segments rely on its
        rows. With `from_row` 0 the sequence counts as released.
        """
        if from_row <= 0:
            self._running.discard(seq)
            self._groups.pop(seq, None)
        dropped = []
        for item in [item for item in self._pending.values() if item.segment.seq == seq]:
            segment = item.segment
            if segment.start + len(segment.tokens) <= from_row:
                continue
            if item.start >= from_row or segment.parents is not None:
                del self._pending[item.key]
                dropped.append(item.key)
            else:
                tokens = segment.tokens[: from_row - segment.start]
                item.segment = Segment(seq, segment.start, tokens, None, segment.logits)
                if item.num_cached_tokens >= len(tokens):
                    item.num_cached_tokens = 0
        return dropped

    def schedule(self, free_rows: int | None, held: Callable[[SeqId], int] = lambda _: 0) -> SchedulerOutput | None:
        """The next step, and what is refused. None: nothing is pending, or nothing fits before something is released.

        free_rows: rows the engine can still write, None without a bound. held: rows it has written of a sequence.
        What needs more than were ever free is refused. If all groups that hold rows wait for more, which takes one
        that has gone beyond its claim, the youngest of them is: else none would ever move.
        """
        refused = self._reject_oversized(free_rows)
        heads = list(self._heads())
        pieces = self._fill(self._admit(heads, free_rows, held))
        if not pieces and not refused and heads:
            refused = self._deadlocked(heads)
        if not pieces and not refused:
            return None
        return SchedulerOutput(tuple(pieces), tuple(refused))

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

    def _heads(self) -> Iterator[_Pending]:
        """The first pending segment of each sequence, oldest first."""
        seen: set[SeqId] = set()
        for item in self._pending.values():
            if item.segment.seq not in seen:
                seen.add(item.segment.seq)
                yield item

    def _reject_oversized(self, free_rows: int | None) -> list[int]:
        """Drop and return what could not run even alone, and what would follow it."""
        if free_rows is None:
            return []
        self._capacity = max(self._capacity, free_rows)
        too_long = [item.segment.seq for item in self._pending.values() if self._ceil(item.end) > self._capacity]
        return [key for seq in dict.fromkeys(too_long) for key in self._drop_with_followers(seq)]

    def _drop_with_followers(self, seq: SeqId) -> list[int]:
        keys = [key for key, item in self._pending.items() if item.segment.seq == seq]
        for key in keys:
            del self._pending[key]
        return keys

    def _deadlocked(self, heads: list[_Pending]) -> list[int]:
        """Drop and return what is pending of the youngest group that holds rows, where all of these wait."""
        holding = {self._groups[seq].key for seq in self._running}
        waiting = [self._groups[item.segment.seq].key for item in heads]
        if not holding or not holding <= set(waiting):
            return []
        youngest = next(key for key in reversed(waiting) if key in holding)
        seqs = [item.segment.seq for item in heads if self._groups[item.segment.seq].key == youngest]
        return [key for seq in seqs for key in self._drop_with_followers(seq)]

    def _admit(self, heads: list[_Pending], free_rows: int | None, held: Callable[[SeqId], int]) -> list[_Pending]:
        """Those that may run. Behind one that waits for room no new group begins, or small ones would overtake it for
        ever; groups that have begun go on, because only their end makes room."""
        if free_rows is None:
            return heads
        short: set[Group] = set()
        accounts = _Accounts(free_rows, self._groups, self._running, lambda seq: self._ceil(held(seq)), self._capacity)
        for item in heads:
            if item.num_computed_tokens:  # it was given all of its rows when it began
                accounts.give(self._groups[item.segment.seq], self._cost(item))
        admitted, waits = [], False
        for item in heads:
            group, cost = self._groups[item.segment.seq], self._cost(item)
            if item.num_computed_tokens:
                admitted.append(item)
            elif (accounts.has_begun(group) or not waits) and accounts.may_have(group, cost):
                accounts.give(group, cost)
                admitted.append(item)
            else:
                waits = True
                short.add(group)
        self._short = frozenset(short)
        return admitted

    def _fill(self, admitted: list[_Pending]) -> list[ScheduledSegment]:
        """Short ones in order while they fit beside the share of the long ones; these get what is left, in order."""
        long = [item for item in admitted if item.segment.parents is None and item.rows > self._quantum]
        short = [item for item in admitted if item.segment.parents is not None or item.rows <= self._quantum]
        left = self._budget - (self._quantum if long else 0)
        places = self._max_segments - (1 if long else 0)
        pieces: list[ScheduledSegment] = []
        for item in short[:places]:
            if pieces and item.rows > left:
                break
            left -= item.rows
            pieces.append(self._chunk(item, item.rows))
        left = max(left, 0) + self._quantum
        for item in long[: self._max_segments - len(pieces)]:
            if left == 0:
                break
            rows = min(item.rows, left)
            left -= rows
            pieces.append(self._chunk(item, rows))
        return pieces

    def _chunk(self, item: _Pending, rows: int) -> ScheduledSegment:
        """The next `rows` rows, as a segment of its own."""
        whole, final = item.segment, rows == item.rows
        segment, first = whole, max(item.num_computed_tokens, item.num_cached_tokens)
        if first or not final:
            tokens = whole.tokens[first : first + rows]
            logits = whole.logits if final or whole.logits == "all" else "none"
            segment = Segment(whole.seq, whole.start + first, tokens, None, logits)
        item.num_computed_tokens = first + rows
        self._running.add(whole.seq)
        if final:
            del self._pending[item.key]
        return ScheduledSegment(item.key, segment, final)

    def _cost(self, item: _Pending) -> int:
        """Rows the engine must take from its free ones for all that is left of it."""
        return self._ceil(item.end) - self._ceil(item.start)

    def _ceil(self, rows: int) -> int:
        return -(-rows // self._block_size) * self._block_size
