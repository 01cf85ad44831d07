"""Who is next: pending segments in order of arrival, and their groups.

Limits rows of long prompts, and of one owner, by measured step times.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from paceline.core.batching.segment import Segment, SeqId
from paceline.core.clock import DecodeSpeed, StepClock, row_class

# Sequences and their groups: what is pending of each, which of them hold rows, and which group is served before which.
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
    line: tuple[Hashable, int] | None = None  # a link to another engine, and the place there of an answer they share
    owner: str = ""  # owners take turns where a step has no room for all; memory is given by age alone
    criticality: float = 0.0  # s of its workflow that wait for it; 0 without one


@dataclass(slots=True, eq=False)
class GroupState:
    """A group as long as one of its sequences is known."""

    group: Group
    rank: tuple[int, int]  # the smaller one is served first, and preempted by a larger one only if it is idle
    seqs: set[SeqId] = field(default_factory=set)
    resident: dict[SeqId, SequenceQueue] = field(default_factory=dict)  # sequences that hold rows, in order
    active_tick: int = 0  # the last tick by which a segment of it was pending


RECOMPUTED: Final = -1  # key of rows that a preempted sequence had: nobody waits for an answer to them


@dataclass(slots=True, eq=False)
class PendingSegment:
    key: int
    segment: Segment
    order: int  # of arrival
    queue: SequenceQueue = field(repr=False)
    num_computed_tokens: int = 0  # rows already scheduled, or found cached
    started: bool = False  # memory for all of its rows has been allocated

    @property
    def group(self) -> Group:
        return self.queue.state.group

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


@dataclass(slots=True, eq=False)
class SequenceQueue:
    """A sequence: its pending segments, and after a preemption first the segments that write its rows again.

    One without rows of its own is `preempted` until it is restored. That begins with its next turn, so a sequence that
    nothing is asked of stays without rows.
    """

    seq: SeqId
    state: GroupState
    pending: list[PendingSegment] = field(default_factory=list)
    restoring: list[PendingSegment] = field(default_factory=list)  # what is left of its rows
    preempted: bool = False

    @property
    def head(self) -> PendingSegment:
        """The segment that the sequence runs next."""
        return (self.restoring or self.pending)[0]

    @property
    def rows_written(self) -> int:
        """Rows the sequence has now; its first pending segment runs once all before it are there."""
        return 0 if self.preempted else self.head.start

    def restore(self, rows: Sequence[Segment]) -> None:
        """Memory has been allocated: compute these rows, then the first pending segment."""
        self.preempted = False
        first = self.pending[0]
        if rows:
            self.restoring = [PendingSegment(RECOMPUTED, each, first.order, self, started=True) for each in rows]
            first.started = True


class SequenceQueues:
    """Sequences by their groups, and what is pending. Ticks stand for time: see `tick`."""

    def __init__(self) -> None:
        self._queues: dict[SeqId, SequenceQueue] = {}
        self._groups: dict[int, GroupState] = {}  # by key
        self.pending: dict[SeqId, SequenceQueue] = {}  # of sequences with pending segments
        self.running: set[SeqId] = set()  # sequences that hold rows
        self._next_age = self._next_order = self._ticks = 0

    def get(self, seq: SeqId) -> SequenceQueue | None:
        return self._queues.get(seq)

    def add(self, key: int, segment: Segment, group: Group | None) -> PendingSegment:
        """group: of the sequence, given when it is first named; None: one of its own."""
        queue = self._queues.get(segment.seq) or self._join(segment.seq, group or Group(-1 - segment.seq, 0))
        queue.state.active_tick = self._ticks
        item = PendingSegment(key, segment, self._next_order, queue)
        self._next_order += 1
        queue.pending.append(item)
        self.pending[segment.seq] = queue
        return item

    def _join(self, seq: SeqId, group: Group) -> SequenceQueue:
        state = self._groups.get(group.key)
        if state is None:
            state = self._groups[group.key] = GroupState(group, self._rank(group))
        state.seqs.add(seq)
        queue = self._queues[seq] = SequenceQueue(seq, state)
        return queue

    def _rank(self, group: Group) -> tuple[int, int]:
        """Age, and place in its line. Those behind it that came before it count as no older from now on."""
        self._next_age += 1
        if group.line is None:
            return self._next_age, 0
        link, place = group.line
        for state in self._groups.values():
            if state.group.line is not None and state.group.line[0] == link and state.group.line[1] > place:
                state.rank = self._next_age, state.group.line[1]
        return self._next_age, place

    def leave(self, seq: SeqId) -> None:
        """The sequence has been released."""
        queue = self._queues.pop(seq, None)
        if queue is not None:
            self.drop(queue)
            self.give_up_rows(queue)
            queue.state.seqs.discard(seq)
            if not queue.state.seqs:
                del self._groups[queue.state.group.key]

    def remove(self, item: PendingSegment) -> None:
        """Done, or cancelled."""
        queue = item.queue
        if item.key == RECOMPUTED:
            queue.restoring.remove(item)
            return
        queue.pending.remove(item)
        if not queue.pending:
            del self.pending[queue.seq]

    def drop(self, queue: SequenceQueue) -> list[int]:
        """Remove all pending segments of the sequence; returns their keys."""
        keys = [item.key for item in queue.pending]
        queue.pending, queue.restoring = [], []
        self.pending.pop(queue.seq, None)
        return keys

    def take_rows(self, queue: SequenceQueue) -> None:
        self.running.add(queue.seq)
        queue.state.resident[queue.seq] = queue

    def give_up_rows(self, queue: SequenceQueue) -> None:
        self.running.discard(queue.seq)
        queue.state.resident.pop(queue.seq, None)

    def preempt(self, queue: SequenceQueue) -> None:
        """The sequence's rows are gone: they are computed again before its first pending segment."""
        self.give_up_rows(queue)
        queue.preempted, queue.restoring = True, []
        for item in queue.pending:
            item.started = False

    def by_group(self) -> dict[GroupState, list[SequenceQueue]]:
        """Sequences with pending segments, by group."""
        found: dict[GroupState, list[SequenceQueue]] = {}
        for queue in self.pending.values():
            queue.state.active_tick = self._ticks
            found.setdefault(queue.state, []).append(queue)
        return found

    def holders(self) -> Iterator[GroupState]:
        """Groups that hold rows."""
        return (state for state in self._groups.values() if state.resident)

    def tick(self) -> None:
        """Time has passed, enough for an answer to be continued if nothing but this side holds it up."""
        self._ticks += 1

    def is_idle(self, state: GroupState) -> bool:
        """True if nothing of the group was pending for a whole interval between two ticks."""
        return self._ticks - state.active_tick >= _MIN_IDLE_TICKS

    def check(self) -> None:
        assert self.pending == {seq: queue for seq, queue in self._queues.items() if queue.pending}
        assert {seq for state in self._groups.values() for seq in state.resident} == self.running
        assert {key: queue.state for queue in self._queues.values() for key in [queue.state.group.key]} == self._groups
        for seq, queue in self._queues.items():
            assert seq == queue.seq and seq in queue.state.seqs, queue
            assert queue.state.resident.get(seq, queue) is queue, queue
            assert not queue.restoring or (queue.pending and not queue.preempted), queue
            assert all(item.rows > 0 and item.queue is queue for item in queue.pending), queue
            assert all(not item.num_computed_tokens or item.segment.parents is None for item in queue.pending), queue
            assert sum(item.num_computed_tokens > 0 for item in queue.pending) <= 1, queue
        assert sum(len(state.seqs) for state in self._groups.values()) == len(self._queues)
        keys = [item.key for queue in self.pending.values() for item in queue.pending]
        assert len({*keys}) == len(keys), keys


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


# How many rows of long prompts a step takes beside answers that are being written, from the times of steps.
#
# A token of an answer waits for the whole step, so what a step takes longer for the prompts' rows is every answer's
# gap. It is held to a share of the time that the answers' rows take alone, whatever a row costs: on a CPU a chunk of
# some thousand rows takes seconds, on a GPU milliseconds, and behind 30,000 rows most of it is attention. Both times
# are measured: that of the answers' rows in steps without prompts, of which there is one now and then, and the seconds
# of a prompt's row in the last steps with them. After the idea of Sarathi-Serve's token budget (Agrawal et al. 2024),
# which is a constant found by profiling.
#
# A step of prompts alone is somebody's gap as well: whoever comes during it waits for its end, and so do the places of
# a client that has left, and the end of the program. It is held to `ALONE_S`.


# Of the answers' own time that prompts may add to a step, so that a gap is less than doubled.
PROMPT_SHARE: Final = 0.75
REFRESH: Final = 48  # steps with prompts, after which one without them measures the answers' time again
FIRST_ROWS: Final = 16  # while the time of a prompt's row is unknown
_GROWTH: Final = 2.0  # of the rows from one step to the next: what a row costs depends on their number
ALONE_S: Final = 0.5  # of a step of prompts alone
LEAST_ALONE: Final = 56  # rows of one at least, and while their time is unknown: a row of fewer takes longer
_LEAST: Final = 0.05  # of the time allowed for the rows that they take at least: two steps' times differ by chance


def scheduler_clock() -> StepClock:
    """Clock of steps without prompts. Nothing is assumed of rows that were never seen, and what is old is forgotten,
    so that it is measured anew."""
    return StepClock(DecodeSpeed(1.0), remembers=MEMORY)


@dataclass(slots=True)
class PrefillPace:
    """Each step: `rows`, then `record`."""

    times: StepClock  # of steps without prompts
    _since: dict[int, int] = field(default_factory=dict)  # by class of rows: steps with prompts since the last such one
    _row_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))  # of a prompt's row, in the last steps
    _last: int = FIRST_ROWS
    _alone_row_s: deque[float] = field(default_factory=lambda: deque(maxlen=3))  # likewise, in steps of prompts alone

    def alone(self) -> int | None:
        """Most rows of prompts in a step without answers; None as `rows`."""
        if self._alone_row_s:
            return max(LEAST_ALONE, int(ALONE_S / median(self._alone_row_s)))
        return LEAST_ALONE if self.times or self._since else None

    def rows(self, answer_rows: int, share: float = PROMPT_SHARE) -> int | None:
        """Most rows of prompts beside so many rows of answers: 0 in a step that measures the answers' time. None
        without a limit: nothing has been recorded. share: of the answers' own time that the prompts may add."""
        if not self.times and not self._since:
            return None
        alone = self.times.near(answer_rows)
        if alone is None or self._since.get(row_class(answer_rows), 0) >= REFRESH:
            return 0
        if not self._row_s:
            return FIRST_ROWS
        return max(1, int(min(share * alone / median(self._row_s), _GROWTH * self._last)))

    def record(self, answer_rows: int, prompt_rows: int, seconds: float) -> None:
        """The step took so long. Rows of prompts alone have another price than those beside answers."""
        if seconds <= 0.0 or not (answer_rows or prompt_rows):
            return
        if answer_rows == 0:
            self._alone_row_s.append(seconds / prompt_rows)
            return
        size = row_class(answer_rows)
        if prompt_rows == 0:
            self.times.add(answer_rows, seconds)
            self._since[size] = 0
            return
        self._since[size] = self._since.get(size, 0) + 1
        alone = self.times.near(answer_rows)
        if alone is not None:
            self._row_s.append(max(seconds - alone, _LEAST * PROMPT_SHARE * alone) / prompt_rows)
            self._last = prompt_rows


# How many rows of one owner a step takes while other owners have answers in it: no owner makes it much longer. Turns
# (`core.fair`) say who is next where a step has no room for all; this, how much there is room for.
#
# Every answer in a step waits for the whole step, so the rows of one owner with many answers are everybody's gap. The
# rule: what an owner's rows add to a step is at most `OWNER_SHARE` of what the step takes without them. It is in time,
# so that rows that are free are not held back, and by owner, so that many owners with few answers each are not: only
# who has more than the others together allow is limited. Who asks for less than the limit has all of its rows in every
# step, and each owner has its oldest segment, or the oldest branches of one answer, whatever they cost.
#
# An owner that is alone is not limited, nor is anybody before the caller has told what steps take. Owners seen in the
# last few steps count as there: else a step begun just before one's next row comes would be as long as others like.
# Not bounded: what several owners add together, and a single tree, which cannot be cut.


# Of a step's time without an owner's rows that these may add: gaps of at most 1.5 times, as estimates are off by rows.
OWNER_SHARE: Final = 0.45
MEMORY: Final = 256  # steps for which a size seen often enough is remembered, and few rows are not measured anew
STAYS: Final = 4  # steps for which an owner that has nothing pending still counts
_LEAST_SHARE: Final = 0.05  # that prompts may add in any case


class OwnerLimits:
    """Each step: `begin`, then `limits` and `within`."""

    def __init__(self, times: StepClock) -> None:
        """times: of steps without prompts."""
        self.times = times
        self._recent: dict[str, tuple[int, int]] = {}  # owners: last step with rows of theirs, and rows
        self._step = 0
        self._taken = Counter[str]()  # owners: rows that each has in this step

    def begin(self) -> None:
        if self._taken:
            self._step += 1
        self._recent |= {owner: (self._step, rows) for owner, rows in self._taken.items()}
        self._recent = {owner: seen for owner, seen in self._recent.items() if self._step - seen[0] < STAYS}
        self._taken = Counter()

    def limits(self, wanted: Mapping[str, int], with_prompts: Collection[str] = ()) -> Mapping[str, int]:
        """Most rows of each of these owners; those without a limit are left out. If nobody is limited, all of them are
        taken to have what they want.

        with_prompts: owners with long prompts in the step, which are to have half of what their owner may add.
        """
        everybody = {owner: rows for owner, (_, rows) in self._recent.items()} | dict(wanted)
        if len(everybody) > 1 and self.times:
            demands = sorted(everybody.values())
            whole = self._level(demands, OWNER_SHARE)
            half = self._level(demands, OWNER_SHARE / 2) if with_prompts else whole
            levels = {owner: half if owner in with_prompts else whole for owner in wanted}
            if found := {owner: level for owner, level in levels.items() if level < wanted[owner]}:
                return found
        self._taken.update(wanted)
        return {}

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
            if total <= _GROWTH * self.times.most_rows and self.times.at(total) <= allowed:
                low = rows
            else:
                high = rows - 1
        return low

    def within(self, items: Sequence[tuple[Group, int]], limits: Mapping[str, int]) -> list[bool]:
        """Which of these run, where somebody is limited: groups with rows of segments, in the order of their turns.

        Segments of one group run together. One that has more rows than its owner may have runs in several steps, by
        itself; of each owner an older group goes before a younger one.
        """
        sizes = Counter[int]()  # rows by group
        for group, rows in items:
            sizes[group.key] += rows
        together: set[int] = set()  # groups of which all segments run
        full: dict[str, int | None] = {}  # owners that have what they may have, of whose groups this one alone begins
        chosen = []
        for group, rows in items:
            owner, key, limit = group.owner, group.key, limits.get(group.owner)
            taken = self._taken[owner]
            if limit is None or key in together:
                runs = True
            elif owner not in full and taken + sizes[key] <= limit:
                together.add(key)
                runs = True
            else:
                runs = taken == 0 or (full.get(owner) == key and taken + rows <= limit)
                full.setdefault(owner, key if taken == 0 else None)
            if runs:
                self._taken[owner] += rows
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
            return OWNER_SHARE
        alone = self.times.at(total)
        return max(_LEAST_SHARE, (1.0 + OWNER_SHARE) * self.times.at(total - own) / alone - 1.0)
