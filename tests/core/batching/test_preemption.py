"""Preemption: every group ends in memory that holds one of them, none loses rows to a younger one while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching import scheduler as scheduler_module
from paceline.core.batching.pending import RECOMPUTED, Group, Memory
from paceline.core.batching.scheduler import Scheduler, SchedulerOutput
from paceline.core.batching.segment import Segment, SeqId

BUDGET = 12


class HonestMemory(Memory):
    """Rows that are written one after the other and fit; those of a preempted sequence must be written again, the same.

    cached: first rows of each sequence that are found in a cache when it begins, also when it begins again.
    """

    def __init__(self, capacity: int, block_size: int = 1, cached: int = 0) -> None:
        self.capacity, self.block_size, self.cached = capacity, block_size, cached
        self.written: dict[SeqId, list[int]] = {}  # tokens of the rows that are there
        self.known: dict[SeqId, list[int]] = {}  # of all rows that were computed and not dropped
        self.trees: dict[SeqId, int] = {}  # rows of its open tree, the last ones
        self.preempted: list[tuple[SeqId, ...]] = []  # in this step
        self.recomputed = 0

    def ceil(self, rows: int) -> int:
        return -(-rows // self.block_size) * self.block_size

    def free_rows(self) -> int:
        return self.capacity - sum(self.ceil(len(rows)) for rows in self.written.values())

    def held(self, seq: SeqId) -> int:
        return len(self.written.get(seq, ()))

    def begin(self, key: int, segment: Segment) -> int:  # noqa: ARG002
        assert segment.seq not in self.written
        rows = min(self.cached, len(segment.tokens) - 1)
        self.written[segment.seq] = list(segment.tokens[:rows])
        self.known.setdefault(segment.seq, list(segment.tokens[:rows]))
        return rows

    def preempt(self, seqs: Sequence[SeqId]) -> None:
        self.preempted.append(tuple(seqs))
        for seq in seqs:
            del self.written[seq]
            if not self.known[seq]:
                del self.known[seq]

    def rows_of(self, seq: SeqId) -> Sequence[Segment]:
        tokens, tree = tuple(self.known.get(seq, ())), self.trees.get(seq, 0)
        split = len(tokens) - tree
        chain = [Segment(seq, 0, tokens[:split], None, "none")] if split else []
        return [*chain, Segment(seq, split, tokens[split:], (-1,) * tree, "none")] if tree else chain

    def run(self, step: SchedulerOutput) -> None:
        for piece in step.segments:
            segment = piece.segment
            rows = self.written.setdefault(segment.seq, [])
            assert segment.start == len(rows), "rows are written one after the other"
            rows += segment.tokens
            if piece.key == RECOMPUTED:
                self.recomputed += len(segment.tokens)
                assert segment.logits == "none" and rows == self.known[segment.seq][: len(rows)]
                continue
            known = self.known.setdefault(segment.seq, [])
            known += segment.tokens
            assert known == rows, "a segment runs once all rows before it are there"
            if segment.parents is not None:
                self.trees[segment.seq] = self.trees.get(segment.seq, 0) + len(segment.tokens)
        assert self.free_rows() >= 0, "memory is exceeded"

    def commit(self, seq: SeqId, keep: int) -> None:
        """Keep so many rows of the open tree, and drop the others."""
        drop = self.trees.pop(seq, 0) - keep
        for rows in (self.written.get(seq), self.known.get(seq)):
            if rows is not None and drop > 0:
                del rows[len(rows) - drop :]

    def release(self, seq: SeqId) -> None:
        for each in (self.written, self.known, self.trees):
            each.pop(seq, None)


@dataclass
class Work:
    """A request: a prompt for each branch, then steps, each of a row, or of a tree of which one row stays."""

    prompts: list[int]
    steps: int
    tree: int
    owner: str = ""
    grown: int = -1
    seqs: list[SeqId] = field(default_factory=list)
    waiting: set[SeqId] = field(default_factory=set)

    def claim(self, block_size: int) -> int:
        return sum(-(-(rows + self.steps + self.tree) // block_size) * block_size for rows in self.prompts)


class Load:
    """Requests on one scheduler, each continued when the test says so."""

    def __init__(self, works: list[Work], spare: int, block_size: int, cached: int = 0) -> None:
        self.works = works
        self.claims = [work.claim(block_size) for work in works]
        self.memory = HonestMemory(max(self.claims) + spare * block_size, block_size, cached)
        self.scheduler = Scheduler(BUDGET, 4, block_size=block_size)
        self.keys: dict[int, tuple[int, SeqId]] = {}
        self.ready: list[int] = []  # requests that wait for something other than the engine
        self.ended: set[int] = set()
        for number, work in enumerate(works):
            work.seqs = [SeqId(100 * number + branch) for branch in range(len(work.prompts))]

    def submit(self, number: int) -> None:
        work = self.works[number]
        for seq, rows in zip(work.seqs, work.prompts, strict=True):
            start = len(self.memory.known.get(seq, ())) if work.grown >= 0 else 0
            tokens = tuple(seq * 1000 + start + i for i in range(rows if start == 0 else max(1, work.tree)))
            parents = None if start == 0 or not work.tree else (-1,) * work.tree
            key = len(self.keys)
            self.keys[key] = number, seq
            work.waiting.add(seq)
            group = Group(number, self.claims[number], owner=work.owner)
            self.scheduler.add(key, Segment(seq, start, tokens, parents), group=group)

    def end(self, number: int) -> None:
        for seq in self.works[number].seqs:
            self.scheduler.cancel(seq)
            self.memory.release(seq)
        self.works[number].waiting.clear()
        self.ended.add(number)

    def step(self) -> bool:
        """False if nothing can run for now."""
        pending = {number for number, work in enumerate(self.works) if work.waiting}  # they begin in order
        self.memory.preempted.clear()
        scheduled = self.scheduler.schedule(self.memory)
        self.scheduler.check()
        for seqs in self.memory.preempted:
            (victim,) = {seq // 100 for seq in seqs}
            assert victim > min(pending) or victim not in pending, "the first of all was preempted"
        if scheduled is None:
            return False
        assert not scheduled.rejected
        self.memory.run(scheduled)
        for piece in scheduled.segments:
            if piece.key != RECOMPUTED and piece.final:
                self.answered(*self.keys[piece.key])
        return True

    def answered(self, number: int, seq: SeqId) -> None:
        work = self.works[number]
        work.waiting.discard(seq)
        if work.waiting:
            return
        if work.grown >= 0 and work.tree:
            for branch in work.seqs:
                self.memory.commit(branch, 1)
        work.grown += 1
        if work.grown < work.steps:
            self.ready.append(number)
        else:
            self.end(number)


works = st.lists(
    st.builds(
        Work,
        st.lists(st.integers(1, 30), min_size=1, max_size=3),
        st.integers(0, 25),
        st.sampled_from([0, 0, 1, 5]),
        st.sampled_from(["", "", "another's"]),
    ),
    min_size=1,
    max_size=9,
)


@given(
    works,
    st.integers(0, 20),
    st.sampled_from([1, 4]),
    st.sampled_from([0, 7]),
    st.sampled_from([0, 0, 5, scheduler_module.RESERVE_ROWS]),
    st.randoms(use_true_random=False),
)
def test_in_memory_for_the_largest_group_all_end(
    requests: list[Work], spare: int, block_size: int, cached: int, reserve: int, random: Random
) -> None:
    """Whatever runs, waits and is cancelled in whatever order; no group is rejected, no row is lost."""
    with patch.object(scheduler_module, "RESERVE_ROWS", reserve):
        play(Load(requests, spare, block_size, cached), random)


def play(load: Load, random: Random) -> None:
    requests = load.works
    coming, ticks = list(range(len(requests))), 0
    while len(load.ended) < len(requests):
        if coming and random.random() < 0.3:
            load.submit(coming.pop(0))
        elif load.ready and random.random() < 0.4:
            load.submit(load.ready.pop(random.randrange(len(load.ready))))
        elif random.random() < 0.02:
            number = random.randrange(len(requests))
            if number not in coming:
                load.end(number)
                load.ready = [each for each in load.ready if each != number]
        elif load.step():
            ticks = 0
        elif not load.scheduler.idle:
            load.scheduler.tick()
            ticks += 1
            assert ticks <= 3, "the first of the pending groups is given what it lacks after two ticks"
    assert load.scheduler.idle and not load.memory.written and not load.scheduler.running


def chain(seq: int, start: int, rows: int) -> Segment:
    return Segment(SeqId(seq), start, tuple(range(start, start + rows)))


def group(number: int, claim: int = 100, place: int | None = None) -> Group:
    return Group(number, claim, None if place is None else ("link", place))


def run(scheduler: Scheduler, memory: HonestMemory) -> dict[int, int] | None:
    """Rows of the next step by key."""
    scheduled = scheduler.schedule(memory)
    if scheduled is None:
        return None
    memory.run(scheduled)
    return {piece.key: len(piece.segment.tokens) for piece in scheduled.segments}


def test_the_youngest_group_gives_its_rows_to_one_that_grows_and_takes_them_back_later() -> None:
    memory, scheduler = HonestMemory(20), Scheduler(BUDGET, 8)
    for seq in range(3):
        scheduler.add(seq, chain(seq, 0, 6), group=group(seq, 8))
    assert run(scheduler, memory) == {0: 6, 1: 6}, "the third does not fit beside the growth of the others"
    scheduler.add(3, chain(0, 6, 2))
    scheduler.add(4, chain(1, 6, 2))
    assert run(scheduler, memory) == {3: 2, 4: 2}
    scheduler.cancel(SeqId(0))
    memory.release(SeqId(0))
    assert run(scheduler, memory) == {2: 6}
    scheduler.add(5, chain(2, 6, 5))
    scheduler.add(6, chain(1, 8, 9))  # more than it has claimed
    assert run(scheduler, memory) == {6: 9} and memory.preempted == [(SeqId(2),)]
    assert run(scheduler, memory) is None and scheduler.short == {group(2, 8)}
    scheduler.cancel(SeqId(1))
    memory.release(SeqId(1))
    assert run(scheduler, memory) == {RECOMPUTED: 6}
    assert run(scheduler, memory) == {5: 5} and not scheduler.short and scheduler.preemptions == 1


def test_an_idle_group_keeps_its_rows_from_younger_ones_for_two_ticks() -> None:
    memory, scheduler = HonestMemory(10), Scheduler(BUDGET, 8)
    scheduler.add(0, chain(0, 0, 6), group=group(0, 10))
    assert run(scheduler, memory) == {0: 6}
    scheduler.add(1, chain(1, 0, 6), group=group(1, 10))
    for _ in range(2):
        assert run(scheduler, memory) is None
        scheduler.tick()
    assert run(scheduler, memory) == {1: 6} and memory.preempted == [(SeqId(0),)]
    scheduler.add(2, chain(0, 6, 1))  # it goes on, and as the older one takes its rows back
    assert run(scheduler, memory) == {RECOMPUTED: 6} and memory.preempted[1:] == [(SeqId(1),)]
    assert run(scheduler, memory) == {2: 1}


def test_two_engines_serve_the_answers_that_they_share_in_one_order() -> None:
    """A smaller place in the line that comes late goes ahead of the larger one, and of no other group."""
    memory, scheduler = HonestMemory(30), Scheduler(BUDGET, 8)
    for key, place in enumerate((None, 7, 9, None, 4)):
        scheduler.add(key, chain(key, 0, 4), group=group(key, 5, place=place))
        assert run(scheduler, memory) == {key: 4}
    scheduler.add(5, chain(5, 0, 14), group=group(5, 14, place=5))
    assert run(scheduler, memory) == {5: BUDGET}
    assert memory.preempted == [(SeqId(2),), (SeqId(1),)]
    scheduler.add(6, chain(6, 0, 4), group=group(6, 5, place=11))
    assert run(scheduler, memory) == {5: 2} and scheduler.short == {group(6, 5, place=11)}


@pytest.mark.parametrize("claim", [0, 20])
def test_a_group_that_can_never_fit_is_rejected_whole(claim: int) -> None:
    memory, scheduler = HonestMemory(20), Scheduler(BUDGET, 8)
    for seq in range(2):
        scheduler.add(seq, chain(seq, 0, 6), group=group(0, claim))
    assert run(scheduler, memory) == {0: 6, 1: 6}
    for seq in range(2):
        scheduler.add(2 + seq, chain(seq, 6, 5))
    scheduled = scheduler.schedule(memory)
    assert scheduled is not None and (scheduled.rejected, scheduled.segments) == ((2, 3), ()) and scheduler.idle
