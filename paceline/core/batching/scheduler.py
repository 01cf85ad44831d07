"""The scheduler: merges the segments of many sequences into one ragged batch per forward pass.

No phases: a prefill is a long chain, cut into chunks under the row budget so that decodes and trees never wait for it;
a tree is never cut. Once the caller has told what steps take (`took`), the chunks beside answers are also limited by
time (`PrefillPace`), and so are one owner's rows beside others' (`OwnerLimits`). Owners
take turns by the rows they have had (`core.fair.Turns`), each with its oldest segments first, except for long prompts,
of which the shortest runs beside the one whose turn it is; the first segment that has memory always advances, so
nothing starves. Which segments have memory, and which groups are preempted for them,
`MemoryAdmission` decides by age alone. The caller runs each batch before it asks for the next. After Orca (Yu et al.
2022) and Sarathi (Agrawal et al. 2023).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from paceline.core.batching.pending import PROMPT_SHARE as SHARE
from paceline.core.batching.pending import (
    Group,
    GroupState,
    Memory,
    OwnerLimits,
    PendingSegment,
    PrefillPace,
    SequenceQueue,
    SequenceQueues,
    scheduler_clock,
)
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.fair import Turns

# Who gets rows in one step: what is free, what each group holds, and whose rows may be taken for whom.
#
# The rule. Groups are served by rank, which is their age. A group may take the rows of every group of a larger rank,
# the largest first; and those of a group of smaller rank that has been idle, because that waits for something else
# than memory. So no group waits for one that cannot go on, and the first of the pending ones always goes on: it may
# take all rows there are, if need be after the others' ticks.


RESERVE_ROWS = 64  # of each sequence, for growth: left free where a group is admitted, so that none is soon preempted


class RowAccounts:
    """Rows of one step. Groups must be asked for in order of rank."""

    def __init__(self, free: int, capacity: int, queues: SequenceQueues, held: Callable[[SeqId], int]) -> None:
        """held: rows of a sequence, in whole blocks. capacity: rows in total."""
        self._free = free
        self._capacity = capacity
        self._queues = queues
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
            if other is not state and other.resident and (other.rank > state.rank or self._queues.is_idle(other)):
                found.append(other)
                left += self.held(other)
        return found if left >= need else None

    def _growth_before(self, state: GroupState) -> int:
        holders = self._ranked()
        while self._num_passed < len(holders) and holders[self._num_passed].rank < state.rank:
            passed = holders[self._num_passed]
            if passed.resident and not self._queues.is_idle(passed):
                self._growth += self._growth_of(passed, self.held(passed))
            self._num_passed += 1
        return self._growth

    def _growth_of(self, state: GroupState, held: int) -> int:
        return max(0, min(RESERVE_ROWS * len(state.seqs), min(state.group.claim, self._capacity) - held))

    def _ranked(self) -> list[GroupState]:
        if self._holders is None:
            self._holders = sorted(self._queues.holders(), key=lambda state: state.rank)
        return self._holders


# Admission and preemption: which pending segments have memory for their rows.
#
# Sequences that end together, as the branches of one answer do, form a `Group`, which is admitted and
# preempted as a whole. A group is admitted when its pending rows fit beside some growth of those before it. Where a
# group then lacks rows, the youngest is preempted (`RowAccounts`): its rows are released, and computed again before
# its next segment. Every group ends if each asks for finitely many rows and would fit alone:
#
# - Groups that hold rows but wait for something else, such as a peer, are preempted like younger ones once they are
#   idle.
#   So the first of the pending groups is given what it lacks, after two ticks at the latest, and its segments run. The
#   engine never stands still for lack of memory, and answers on two engines cannot block each other through it.
# - A group loses rows only to one before it, or while nothing of it is pending. So the first of the pending groups
#   finishes its segments, and those are finitely many.


class MemoryAdmission:
    """Gives the pending segments of `queues` the rows they need, group by group."""

    def __init__(self, queues: SequenceQueues, block_size: int) -> None:
        self._queues = queues
        self._block_size = block_size
        self._capacity = 0  # the most rows that were ever free
        self.short: frozenset[Group] = frozenset()  # groups with pending segments that lack memory
        self.preemptions = 0  # of groups

    def reject_oversized(self, arrived: Collection[PendingSegment], free_rows: int) -> list[int]:
        """Drop the segments that would not fit even alone, and the later ones of their sequences; return their keys."""
        self._capacity = max(self._capacity, free_rows)
        too_long = [item.queue for item in arrived if self._ceil(item.end) > self._capacity]
        return [key for queue in dict.fromkeys(too_long) for key in self._queues.drop(queue)]

    def admit(self, memory: Memory, free_rows: int) -> tuple[list[PendingSegment], list[int]]:
        """The segments that may run, and the keys of those dropped because their group exceeds all memory.

        While a group waits no later one is admitted, otherwise small ones would overtake it forever.
        """
        pending = self._queues.by_group()
        accounts = RowAccounts(free_rows, self._capacity, self._queues, lambda seq: self._ceil(memory.held(seq)))
        for state, queues in pending.items():
            for queue in queues:
                if queue.pending[0].started:
                    accounts.allocate(state, self._cost(queue))
        admitted: list[PendingSegment] = []
        rejected: list[int] = []
        short: set[Group] = set()
        for state in sorted(pending, key=lambda state: state.rank):
            asking = [queue for queue in pending[state] if not queue.pending[0].started]
            cost = sum(map(self._cost, asking))
            if cost == 0 or ((state.resident or not short) and self._make_room(accounts, memory, state, cost)):
                accounts.allocate(state, cost)
                for queue in asking:
                    if queue.preempted:
                        queue.restore(memory.rows_of(queue.seq))
                admitted += [queue.head for queue in pending[state]]
            elif accounts.held(state) + cost > self._capacity:
                rejected += [key for queue in pending[state] for key in self._queues.drop(queue)]
            else:
                short.add(state.group)
                admitted += [queue.head for queue in pending[state] if queue not in asking]
        self.short = frozenset(short)
        return admitted, rejected

    def _make_room(self, accounts: RowAccounts, memory: Memory, state: GroupState, cost: int) -> bool:
        """True if so many rows are left for the group now."""
        need = accounts.need(state, cost)
        victims = accounts.victims(state, need) if accounts.left < need else []
        for victim in victims or ():
            resident = dict(victim.resident)
            for queue in resident.values():
                self._queues.preempt(queue)
            memory.preempt([*resident])
            accounts.released(victim, memory.free_rows() or 0)
            self.preemptions += 1
        return accounts.left >= need

    def _cost(self, queue: SequenceQueue) -> int:
        """Free rows that the first pending segment needs, with those to be computed again, in whole blocks."""
        return self._ceil(queue.pending[0].end) - self._ceil(queue.rows_written)

    def _ceil(self, rows: int) -> int:
        return -(-rows // self._block_size) * self._block_size


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
    A chain starts only if all of its rows fit. Not accounted for: rows of sequences the scheduler never saw;
    for these the engine itself may run out of blocks.
    """

    def __init__(self, max_batched_tokens: int, max_num_seqs: int, *, block_size: int = 1) -> None:
        if max_batched_tokens < 2 or max_num_seqs < 2 or block_size < 1:
            raise ValueError(f"a step needs room for two: {max_batched_tokens} rows, {max_num_seqs} segments")
        self._max_batched_tokens = max_batched_tokens
        self._max_num_seqs = max_num_seqs
        # Chains above this are cut into chunks; together they are guaranteed this many rows per step.
        self._quantum = max(1, max_batched_tokens // 4)
        self._queues = SequenceQueues()
        self._admission = MemoryAdmission(self._queues, block_size)
        self._turns = Turns()
        times = scheduler_clock()
        self._pace, self._limits = PrefillPace(times), OwnerLimits(times)
        self._last_rows = 0, 0  # of the last step: short segments', and long ones'
        self._arrived: list[PendingSegment] = []  # since the last step: not yet compared with the capacity

    @property
    def idle(self) -> bool:
        return not self._queues.pending

    @property
    def running(self) -> Collection[SeqId]:
        """Sequences that hold rows, as far as the scheduler knows."""
        return self._queues.running

    @property
    def short(self) -> frozenset[Group]:
        """Groups with pending segments that lacked memory in the last step, preempted ones included."""
        return self._admission.short

    @property
    def preemptions(self) -> int:
        """Groups that lost their rows, so far."""
        return self._admission.preemptions

    def add(self, key: int, segment: Segment, *, group: Group | None = None) -> None:
        """Queue a segment. Those of one sequence run in the order they are added.

        key: of no other pending segment. group: of the sequence, given with its first segment.
        """
        self._arrived.append(self._queues.add(key, segment, group))

    def last(self, seq: SeqId) -> int | None:
        """The key of the last pending segment of this sequence."""
        queue = self._queues.get(seq)
        return queue.pending[-1].key if queue is not None and queue.pending else None

    def tick(self) -> None:
        """Time has passed. Call it in regular intervals, longer than usual waits for a peer, while groups are `short`:
        a group that was idle for a whole interval no longer keeps its rows from younger ones."""
        self._queues.tick()

    def took(self, seconds: float) -> None:
        """Record the time of the last step, s, from its call until its answers can be continued. Only for steps beside
        which none ran."""
        self._pace.record(*self._last_rows, seconds)

    def cancel(self, seq: SeqId, from_row: int = 0) -> list[int]:
        """Cancel the pending rows of this sequence from `from_row` on. Returns the keys of dropped segments.

        A chain that begins below `from_row` is shortened to end there and keeps its key, because later segments rely on
        its rows. With `from_row` 0 the sequence counts as released.
        """
        queue = self._queues.get(seq)
        dropped = []
        for item in [] if queue is None else list(queue.pending):
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
            self._queues.leave(seq)
        return dropped

    def stop_restoring(self, seq: SeqId) -> bool:
        """If rows of this sequence are being computed again, count it as preempted. True then: the caller must release
        what is there. To be called before the rows change that it had."""
        queue = self._queues.get(seq)
        if queue is None or not queue.restoring:
            return False
        self._queues.preempt(queue)
        return True

    def schedule(self, memory: Memory = UNBOUNDED) -> SchedulerOutput | None:
        """The next step, and rejected segments. None: nothing is pending, or nothing fits until something is released
        or time has passed (`tick`).

        Rejected are segments that need more rows than were ever free, alone or with what their group holds: only a
        group that exceeds its claim does.
        """
        arrived, self._arrived = self._arrived, []
        free_rows, rejected = memory.free_rows(), list[int]()
        if free_rows is None:
            admitted = [queue.head for queue in self._queues.pending.values()]
        else:
            left = [item for item in arrived if item in item.queue.pending]
            oversized = self._admission.reject_oversized(left, free_rows)
            admitted, too_many = self._admission.admit(memory, free_rows)
            rejected = oversized + too_many
        admitted.sort(key=lambda item: item.order)
        scheduled = self._fill([item for item in admitted if self._begin(item, memory)])
        return SchedulerOutput(tuple(scheduled), tuple(rejected)) if scheduled or rejected else None

    def check(self) -> None:
        self._queues.check()

    def _begin(self, item: PendingSegment, memory: Memory) -> bool:
        """Ask for cached rows before a sequence's first chain runs. False if the chain is to wait."""
        segment = item.segment
        if segment.start or segment.parents is not None or segment.seq in self._queues.running:
            return True
        rows = memory.begin(item.key, segment)
        if rows is None:
            return False
        assert rows < len(segment.tokens), (rows, item)
        # From now on its memory is its own, even if it has no rows in this step: another chain may wait for it.
        item.num_computed_tokens, item.started = rows, True
        self._queues.take_rows(item.queue)
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
        if long:
            most = self._pace.alone()
            if short:
                most = self._pace.rows(short_rows, self._prompt_share(zip(short, scheduled, strict=False), long))
            left = left if most is None else min(left, most)
        cuts = _shares([item.rows for item in long], left)
        running = [(item, rows) for item, rows in zip(long, cuts, strict=True) if rows]
        scheduled += [self._chunk(item, rows) for item, rows in running[: self._max_num_seqs - len(scheduled)]]
        self._last_rows = short_rows, sum(len(each.segment.tokens) for each in scheduled) - short_rows
        return scheduled

    def _in_turn(self, admitted: list[PendingSegment]) -> tuple[list[PendingSegment], list[PendingSegment]]:
        """Short segments that may run, and long ones, of which each step runs a part, in the order of their turns."""
        waiting = [(item.group.owner, item) for item in admitted]
        self._limits.begin()
        if not waiting:
            return [], []
        turns = self._turns
        turns.begin({owner for owner, _ in waiting})
        # In every second step what most of a workflow waits for goes first (HeRo's criticality), of equals the older
        # one, so that neither starves the other.
        if turns.number % 2 and any(item.group.criticality for item in admitted):
            waiting.sort(key=lambda each: -each[1].group.criticality)
        cut = [self._is_long(item) for _, item in waiting]
        limits = self._limits_of(waiting, cut)
        if limits:
            cut = [self._is_long(item, limits.get(owner)) for owner, item in waiting]
        short = turns.order([each for each, is_cut in zip(waiting, cut, strict=True) if not is_cut], _rows)
        if limits:
            short = list(
                itertools.compress(short, self._limits.within([(each.group, each.rows) for each in short], limits))
            )
        return short, turns.order(list(itertools.compress(waiting, cut)), _rows)

    def _limits_of(self, waiting: Sequence[tuple[str, PendingSegment]], cut: Sequence[bool]) -> Mapping[str, int]:
        """Rows that each owner may have, if not all, by what the owners' answers want: of a chain no more than drafts
        may be, since a longer one can be cut."""
        wanted = Counter[str]()
        with_prompts = set()
        for (owner, item), is_cut in zip(waiting, cut, strict=True):
            if is_cut:
                with_prompts.add(owner)
            else:
                rows = item.rows if item.segment.parents is not None else min(item.rows, FAR_ROWS)
                wanted[owner] += rows
        return self._limits.limits(wanted, with_prompts)

    def _prompt_share(
        self, answers: Iterable[tuple[PendingSegment, ScheduledSegment]], prompts: Sequence[PendingSegment]
    ) -> float:
        """Share of a step's time that prompts may add beside these answers, less what their owners' answers add."""
        rows = Counter[str]()
        for item, scheduled in answers:
            rows[item.group.owner] += len(scheduled.segment.tokens)
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
        most = min(self._quantum, self._pace.alone() or self._quantum)
        if limit is not None:
            most = min(most, max(limit, FAR_ROWS))
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
        self._queues.take_rows(item.queue)
        self._turns.served(item.group.owner, rows)
        if final:
            self._queues.remove(item)
        return ScheduledSegment(item.key, segment, final)


def _rows(item: PendingSegment) -> int:
    return item.rows


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
