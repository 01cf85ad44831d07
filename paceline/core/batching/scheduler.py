"""The scheduler: merges the segments of many sequences into one ragged batch per forward pass.

No phases: a prefill is a long chain, cut into chunks under the row budget so that decodes and trees never wait for it;
a tree is never cut. Once the caller has told what steps take (`took`), the chunks beside answers are also limited by
time (`prefill_pace`), and so are one owner's rows beside others' (`owner_limits`). Among groups of one priority owners
take turns (`turns`), each with its oldest segments first, except for long prompts, of which the shortest runs beside
the one whose turn it is; the first segment of the first priority that has memory always advances, so within it nothing
starves. Which segments have memory, and which groups are preempted for them, is decided in `admission`, by age alone.
Knows neither engine nor clock. The caller runs each batch before it asks for the next. After Orca (Yu et al. 2022) and
Sarathi (Agrawal et al. 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from paceline.core.batching.admission import Admission
from paceline.core.batching.groups import Group, GroupTable
from paceline.core.batching.memory import Memory
from paceline.core.batching.owner_limits import OwnerLimits
from paceline.core.batching.pace.prefill_pace import SHARE, PrefillPace
from paceline.core.batching.pending import PendingQueues, PendingSegment
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.batching.turns import Turns

UNBOUNDED = Memory()
FAR = 2048  # rows before a chain, from which on attention to them is much of its time
FAR_ROWS = 16  # chains behind so many rows may have, and still run whole: drafts to be verified have fewer


class ScheduledSegment(msgspec.Struct, frozen=True):
    """A segment, or one chunk of a chain; the outputs of chunks follow one another."""

    key: int  # `pending.RECOMPUTED`: rows that a preempted sequence had
    segment: Segment
    final: bool  # the last chunk of the segment added under `key`


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    segments: tuple[ScheduledSegment, ...]  # of distinct sequences
    rejected: tuple[int, ...] = ()  # keys of dropped segments that can never fit

    @property
    def batch(self) -> Batch:
        return Batch(tuple(each.segment for each in self.segments))


class Scheduler:
    """Pending segments in order of arrival.

    max_batched_tokens: rows per step, at least 2; exceeded only by a tree that is larger or that runs beside a prefill.
    max_num_seqs: segments per step, at least 2. block_size: granularity of the engine's memory, in rows.
    A chain starts only if all of its rows fit. Not accounted for: rows of sequences the scheduler never saw, and copies
    caused by forks; for these the engine itself may run out of blocks.
    """

    def __init__(self, max_batched_tokens: int, max_num_seqs: int, *, block_size: int = 1) -> None:
        if max_batched_tokens < 2 or max_num_seqs < 2 or block_size < 1:
            raise ValueError(f"a step needs room for two: {max_batched_tokens} rows, {max_num_seqs} segments")
        self._max_batched_tokens = max_batched_tokens
        self._max_num_seqs = max_num_seqs
        # Chains above this are cut into chunks; together they are guaranteed this many rows per step.
        self._quantum = max(1, max_batched_tokens // 4)
        self._queues = PendingQueues()
        self._groups = GroupTable()
        self._admission = Admission(self._queues, self._groups, block_size)
        self._turns: dict[int, Turns] = {}  # by priority
        self._pace = PrefillPace()
        self._limits = OwnerLimits()
        self._last_rows = 0, 0  # of the last step: short segments', and long ones'
        self._arrived: list[PendingSegment] = []  # since the last step: not yet compared with the capacity

    @property
    def idle(self) -> bool:
        return not self._queues

    @property
    def running(self) -> Collection[SeqId]:
        """Sequences that hold rows, as far as the scheduler knows."""
        return self._groups.running

    @property
    def short(self) -> frozenset[Group]:
        """Groups with pending segments that lacked memory in the last step, preempted ones included."""
        return self._admission.short

    @property
    def preemptions(self) -> int:
        """Groups that lost their rows, so far."""
        return self._admission.preemptions

    def add(self, key: int, segment: Segment, *, group: Group | None = None) -> None:
        """Queue a segment. Those of one sequence run in the order they are added. Raises ValueError for a key in use.

        group: of the sequence, given with its first segment.
        """
        state = self._groups.join(segment.seq, group)
        self._arrived.append(self._queues.add(key, segment, state.group))

    def last(self, seq: SeqId) -> int | None:
        """The key of the last pending segment of this sequence."""
        queue = self._queues.of(seq)
        return queue[-1].key if queue else None

    def tick(self) -> None:
        """Time has passed. Call it in regular intervals, longer than usual waits for a peer, while groups are `short`:
        a group that was idle for a whole interval no longer keeps its rows from younger ones."""
        self._groups.tick()

    def took(self, seconds: float) -> None:
        """Record the time of the last step, s, from its call until its answers can be continued. Only for steps beside
        which none ran."""
        short, long = self._last_rows
        self._pace.record(short, long, seconds)
        if not long:
            self._limits.times.record(short, seconds)

    def cancel(self, seq: SeqId, from_row: int = 0) -> list[int]:
        """Cancel the pending rows of this sequence from `from_row` on. Returns the keys of dropped segments.

        A chain that begins below `from_row` is shortened to end there and keeps its key, because later segments rely on
        its rows. With `from_row` 0 the sequence counts as released.
        """
        dropped = []
        for item in list(self._queues.of(seq)):
            segment = item.segment
            if segment.start + len(segment.tokens) <= from_row:
                continue
            if item.start >= from_row or segment.parents is not None:
                self._queues.remove(item)
                dropped.append(item.key)
            else:
                tokens = segment.tokens[: from_row - segment.start]
                item.segment = Segment(seq, segment.start, tokens, None, segment.logits)
        if from_row <= 0:
            self._queues.release(seq)
            self._groups.leave(seq)
        return dropped

    def stop_restoring(self, seq: SeqId) -> bool:
        """If rows of this sequence are being computed again, count it as preempted. True then: the caller must release
        what is there. To be called before the rows change that it had."""
        if not self._queues.is_restoring(seq):
            return False
        self._queues.preempt(seq)
        self._groups.give_up_rows(seq)
        return True

    def schedule(self, memory: Memory = UNBOUNDED) -> SchedulerOutput | None:
        """The next step, and rejected segments. None: nothing is pending, or nothing fits until something is released
        or time has passed (`tick`).

        Rejected are segments that need more rows than were ever free, alone or with what their group holds: only a
        group that exceeds its claim does.
        """
        arrived, self._arrived = self._arrived, []
        free_rows, rejected, queues = memory.free_rows(), list[int](), self._queues
        if free_rows is None:
            admitted = [queues.head(seq) for seq in queues]
        else:
            oversized = self._admission.reject_oversized([item for item in arrived if item in queues], free_rows)
            admitted, too_many = self._admission.admit(memory, free_rows)
            rejected = oversized + too_many
        admitted.sort(key=lambda item: (item.group.priority, item.order))
        scheduled = self._fill([item for item in admitted if self._begin(item, memory)])
        return SchedulerOutput(tuple(scheduled), tuple(rejected)) if scheduled or rejected else None

    def check(self) -> None:
        self._queues.check()
        self._groups.check()
        assert all(self._groups.of(seq) for seq in self._queues)

    def _begin(self, item: PendingSegment, memory: Memory) -> bool:
        """Ask for cached rows before a sequence's first chain runs. False if the chain is to wait."""
        segment = item.segment
        if segment.start or segment.parents is not None or segment.seq in self._groups.running:
            return True
        rows = memory.begin(item.key, segment)
        if rows is None:
            return False
        assert rows < len(segment.tokens), (rows, item)
        # From now on its memory is its own, even if it has no rows in this step: another chain may wait for it.
        item.num_computed_tokens, item.started = rows, True
        self._groups.take_rows(segment.seq)
        return True

    def _fill(self, admitted: list[PendingSegment]) -> list[ScheduledSegment]:
        """Fill the step: short segments in turn while they fit beside the quantum of the long ones, which share the
        remaining rows."""
        short, long = self._in_turn(admitted)
        left = self._max_batched_tokens - (self._quantum if long else 0)
        places = self._max_num_seqs - (1 if long else 0)
        scheduled: list[ScheduledSegment] = []
        for item in short[:places]:
            if scheduled and item.rows > left:
                break
            left -= item.rows
            scheduled.append(self._chunk(item, item.rows))
        short_rows = sum(len(each.segment.tokens) for each in scheduled)
        left = max(left, 0) + self._quantum
        if short and long and short[0].group.priority <= long[0].group.priority:  # else nobody waits
            most = self._pace.rows(short_rows, self._prompt_share(scheduled, long))
            left = left if most is None else min(left, most)
        cuts = _shares([item.rows for item in long], left)
        running = [(item, rows) for item, rows in zip(long, cuts, strict=True) if rows]
        scheduled += [self._chunk(item, rows) for item, rows in running[: self._max_num_seqs - len(scheduled)]]
        self._last_rows = short_rows, sum(len(each.segment.tokens) for each in scheduled) - short_rows
        return scheduled

    def _in_turn(self, admitted: list[PendingSegment]) -> tuple[list[PendingSegment], list[PendingSegment]]:
        """Short segments that may run, and long ones, of which each step runs a part, in the order of their turns."""
        short: list[PendingSegment] = []
        long: list[PendingSegment] = []
        by_priority: dict[int, list[tuple[str, PendingSegment]]] = {}
        for item in admitted:
            by_priority.setdefault(item.group.priority, []).append((item.group.owner, item))
        self._limits.begin()
        for priority, waiting in by_priority.items():  # the first one first, as they are sorted
            turns = self._turns.setdefault(priority, Turns())
            turns.begin({owner for owner, _ in waiting})
            cut = [self._is_long(item) for _, item in waiting]
            limits = self._limits_of(waiting, cut, priority)
            if limits:
                cut = [self._is_long(item, limits.get(owner)) for owner, item in waiting]
            ordered = turns.order([each for each, is_cut in zip(waiting, cut, strict=True) if not is_cut])
            if limits:
                runs = self._limits.within([(item.group, item.rows) for item in ordered], limits)
                ordered = list(itertools.compress(ordered, runs))
            short += ordered
            long += turns.order(list(itertools.compress(waiting, cut)))
        return short, long

    def _limits_of(
        self, waiting: Sequence[tuple[str, PendingSegment]], cut: Sequence[bool], priority: int
    ) -> Mapping[str, int]:
        """Rows that each owner may have, if not all, by what the owners' answers want: of a chain no more than drafts
        may be, since a longer one can be cut."""
        wanted: dict[str, int] = {}
        with_prompts = set()
        for (owner, item), is_cut in zip(waiting, cut, strict=True):
            if is_cut:
                with_prompts.add(owner)
            else:
                rows = item.rows if item.segment.parents is not None else min(item.rows, FAR_ROWS)
                wanted[owner] = wanted.get(owner, 0) + rows
        return self._limits.limits(wanted, with_prompts, priority)

    def _prompt_share(self, answers: Sequence[ScheduledSegment], prompts: Sequence[PendingSegment]) -> float:
        """Share of a step's time that prompts may add beside these answers, less what their owners' answers add."""
        rows: dict[str, int] = {}
        for each in answers:
            owner = self._groups.of(each.segment.seq).group.owner
            rows[owner] = rows.get(owner, 0) + len(each.segment.tokens)
        shares = [self._limits.prompt_share(owner, rows) for owner in {item.group.owner for item in prompts}]
        return min([SHARE, *(share for share in shares if share is not None)])

    def _is_long(self, item: PendingSegment, limit: int | None = None) -> bool:
        """Also the end of a long prompt, and what is new in one that is cached: a row behind many takes far longer.

        limit: rows that its owner may have in the step.
        """
        if item.segment.parents is not None:
            return False
        if limit is not None and item.num_computed_tokens:
            return True  # the end of a prompt goes behind its owner's answers
        most = self._quantum if limit is None else min(self._quantum, max(limit, FAR_ROWS))
        return item.rows > (FAR_ROWS if item.start > FAR else most)

    def _chunk(self, item: PendingSegment, rows: int) -> ScheduledSegment:
        """Schedule the next `rows` rows, as a segment of their own."""
        whole, final = item.segment, rows == item.rows
        segment, first = whole, item.num_computed_tokens
        if first or not final:
            tokens = whole.tokens[first : first + rows]
            logits = whole.logits if final or whole.logits == "all" else "none"
            segment = Segment(whole.seq, whole.start + first, tokens, None, logits)
        item.num_computed_tokens, item.started = first + rows, True
        self._groups.take_rows(whole.seq)
        self._turns[item.group.priority].served(item.group.owner, rows)
        if final:
            self._queues.remove(item)
        return ScheduledSegment(item.key, segment, final)


def _shares(lengths: list[int], rows: int) -> list[int]:
    """Rows of a step for each of these chains, in turn; the sum is `rows`, or all that is left of them.

    Half is the first one's, so that none starves; the rest goes to those with the least left, of equals to the first,
    so that a prompt of 200 tokens does not wait for one of 30,000.
    """
    if not lengths:
        return []
    shares = [0] * len(lengths)
    shares[0] = min(lengths[0], rows, max(1, rows // 2))
    left = rows - shares[0]
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        more = min(lengths[place] - shares[place], left)
        shares[place] += more
        left -= more
    return shares
