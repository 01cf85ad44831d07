"""The scheduler: segments run whole, in order and in bounded time; turns of owners; prompts beside answers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.pending import Group, Memory
from paceline.core.batching.scheduler import FAR, FAR_ROWS, Scheduler, SchedulerOutput, _shares
from paceline.core.batching.segment import LogitsMode, Segment, SeqId
from tests.core.batching.loads import Load

BUDGET = 12
QUANTUM = 3  # a quarter of the budget: longer chains are cut into chunks


def chain(seq: int, start: int, rows: int, logits: LogitsMode = "last") -> Segment:
    return Segment(SeqId(seq), start, tuple(range(start, start + rows)), None, logits)


def tree(seq: int, start: int, rows: int) -> Segment:
    return Segment(SeqId(seq), start, tuple(range(rows)), (-1,) * rows, "all")


class Room(Memory):
    """So many free rows, of which none may be taken from a sequence that holds them."""

    def __init__(
        self,
        free: int | None,
        held: Callable[[SeqId], int] = lambda _: 0,
        begin: Callable[[int, Segment], int | None] = lambda *_: 0,
    ) -> None:
        self.free, self.held, self.begin = free, held, begin  # type: ignore[method-assign]  # one of each suffices

    def free_rows(self) -> int | None:
        return self.free

    def preempt(self, seqs: Sequence[SeqId]) -> None:
        raise AssertionError(f"{seqs} are preempted")


def rows_of(scheduled: SchedulerOutput | None) -> dict[int, int]:
    assert scheduled is not None
    return {each.key: len(each.segment.tokens) for each in scheduled.segments}


arrivals = st.lists(
    st.tuples(
        st.integers(0, 5),  # sequence
        st.integers(1, 40),  # rows
        st.booleans(),  # True: a tree
        st.sampled_from(["all", "last", "none"]),
        st.integers(0, 3),  # steps until the next arrives
    ),
    min_size=1,
    max_size=25,
)


@given(arrivals, st.integers(2, 6))
def test_every_segment_runs_whole_in_order_and_in_bounded_time(
    arrived: list[tuple[int, int, bool, LogitsMode, int]], max_segments: int
) -> None:
    scheduler = Scheduler(BUDGET, max_segments)
    lengths: dict[int, int] = {}
    segments: dict[int, Segment] = {}
    deadline: dict[int, int] = {}
    seen: dict[int, list[Segment]] = {}
    step = 0

    def run_step() -> None:
        scheduled = scheduler.schedule()
        scheduler.check()
        if scheduled is None:
            assert scheduler.idle
            return
        trees = [piece.segment for piece in scheduled.segments if piece.segment.parents is not None]
        largest = max((len(item.tokens) for item in trees), default=0)
        assert scheduled.batch.num_rows <= max(BUDGET, largest + QUANTUM)
        assert 1 <= len(scheduled.segments) <= max_segments
        for piece in scheduled.segments:
            seen.setdefault(piece.key, []).append(piece.segment)
            if piece.final:
                assert step <= deadline.pop(piece.key), "waited longer than all older segments need"

    for key, (seq, rows, is_tree, logits, pause) in enumerate(arrived):
        start = lengths.get(seq, 0)
        segments[key] = tree(seq, start, rows) if is_tree else chain(seq, start, rows, logits)
        lengths[seq] = start + rows
        scheduler.add(key, segments[key])
        # In each step the oldest segment advances by a quantum or ends.
        older = sum(-(-len(segments[k].tokens) // QUANTUM) for k in [*deadline, key])
        deadline[key] = step + older
        for _ in range(pause):
            run_step()
            step += 1
    while not scheduler.idle:
        run_step()
        step += 1
    assert not deadline
    for key, segment in segments.items():
        pieces = seen[key]
        assert tuple(token for piece in pieces for token in piece.tokens) == segment.tokens
        assert [piece.start for piece in pieces] == [
            segment.start + sum(len(before.tokens) for before in pieces[:i]) for i in range(len(pieces))
        ]
        if segment.parents is not None:
            assert pieces == [segment]
        expected = {"all": "all", "last": "none", "none": "none"}[segment.logits]
        assert [piece.logits for piece in pieces] == [expected] * (len(pieces) - 1) + [segment.logits]


def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_before_it() -> None:
    scheduler = Scheduler(512, 256)
    scheduler.add(0, chain(0, 0, 30_000))
    assert rows_of(scheduler.schedule()) == {0: 512}
    for number in range(1, 17):
        scheduler.add(number, chain(number, 0, 200))
    finished: dict[int, int] = {}
    step = 0
    while len(finished) < 16:
        step += 1
        rows = rows_of(scheduler.schedule())
        assert rows[0] >= 128, "the oldest advances in every step"
        assert sum(rows.values()) == 512
        finished |= {key: step for key in range(1, 17) if scheduler.last(SeqId(key)) is None and key not in finished}
    assert finished[1] == 1 and max(finished.values()) <= 13, "16 * 200 rows at 256 a step or more"


@given(st.lists(st.integers(1, 600), min_size=1, max_size=8), st.integers(1, 600))
def test_rows_of_a_step_are_shared_out_whole_and_the_oldest_has_its_half(lengths: list[int], rows: int) -> None:
    shares = _shares(lengths, rows)
    assert sum(shares) == min(rows, sum(lengths))
    assert all(0 <= share <= length for share, length in zip(shares, lengths, strict=True))
    assert shares[0] >= min(lengths[0], max(1, rows // 2))


def test_a_continued_tree_runs_whole_and_is_cancelled_whole() -> None:
    scheduler = Scheduler(BUDGET, 8)
    grown = Segment(SeqId(0), 10, tuple(range(30)), (-1,) * 30, "all", tuple(range(4, 34)))
    assert scheduler.last(SeqId(0)) is None
    scheduler.add(0, grown)
    scheduler.add(1, Segment(SeqId(0), 40, (1,), (-1,), ids=(34,)))
    assert scheduler.last(SeqId(0)) == 1
    scheduled = scheduler.schedule()
    assert scheduled is not None and [piece.segment for piece in scheduled.segments] == [grown]
    assert scheduler.cancel(SeqId(0), 6) == [1]
    assert scheduler.last(SeqId(0)) is None


def test_cancelled_rows_do_not_run_and_rows_before_them_do() -> None:
    scheduler = Scheduler(BUDGET, 8)
    scheduler.add(0, chain(1, 0, 20, "all"))
    scheduler.add(1, chain(1, 20, 2))
    scheduler.add(2, chain(2, 0, 1))
    assert rows_of(scheduler.schedule()) == {2: 1, 0: 11}
    assert scheduler.cancel(SeqId(1), 15) == [1]
    scheduler.add(3, chain(1, 15, 1))
    last = scheduler.schedule()
    assert last is not None
    assert [(piece.key, piece.segment.start, len(piece.segment.tokens), piece.final) for piece in last.segments] == [
        (0, 11, 4, True)
    ]
    assert rows_of(scheduler.schedule()) == {3: 1}


def test_a_small_new_sequence_does_not_overtake_one_that_waits_for_memory() -> None:
    scheduler = Scheduler(BUDGET, 8)
    scheduler.add(0, chain(0, 0, 5))
    assert rows_of(scheduler.schedule(Room(10))) == {0: 5}
    scheduler.add(1, chain(1, 0, 8))
    scheduler.add(2, chain(2, 0, 1))
    assert scheduler.schedule(Room(5)) is None
    scheduler.add(3, chain(0, 5, 1))  # holds rows already: it continues, because its end frees memory
    assert rows_of(scheduler.schedule(Room(5))) == {3: 1}
    scheduler.cancel(SeqId(0))
    assert rows_of(scheduler.schedule(Room(10))) == {2: 1, 1: 8}


def test_an_oversized_segment_is_rejected_with_the_later_ones_of_its_sequence() -> None:
    scheduler = Scheduler(BUDGET, 8, block_size=4)
    scheduler.add(0, chain(0, 0, 21))
    scheduler.add(1, chain(0, 21, 1))
    scheduler.add(2, chain(1, 0, 2))
    scheduled = scheduler.schedule(Room(20))
    assert scheduled is not None
    assert scheduled.rejected == (0, 1)
    assert rows_of(scheduled) == {2: 2}


def test_a_chain_starts_only_if_all_of_its_rows_fit() -> None:
    scheduler = Scheduler(BUDGET, 8)
    scheduler.add(0, chain(0, 0, 60))
    scheduler.add(1, chain(1, 0, 60))
    free = 100
    for rows in (12, 12, 12, 12, 12):
        assert rows_of(scheduler.schedule(Room(free))) == {0: rows}
        free -= rows
    assert scheduler.schedule(Room(free)) is None
    scheduler.cancel(SeqId(0))
    assert rows_of(scheduler.schedule(Room(100))) == {1: 12}


def cached(**rows: int | None) -> Callable[[int, Segment], int | None]:
    """Cached rows by key, as `k0=20`; no other segment begins with any."""
    return lambda key, _: rows.get(f"k{key}", 0)


def test_cached_rows_need_no_forward_but_memory() -> None:
    scheduler = Scheduler(BUDGET, 8, block_size=4)
    scheduler.add(9, chain(9, 0, 1))
    assert rows_of(scheduler.schedule(Room(40))) == {9: 1}
    scheduler.add(0, chain(0, 0, 30))
    scheduler.add(1, chain(1, 0, 1))
    begin = cached(k0=20, k2=20)
    assert scheduler.schedule(Room(28, begin=begin)) is None  # it waits for all of its 32 rows, and is not overtaken
    scheduled = scheduler.schedule(Room(36, begin=begin))
    assert rows_of(scheduled) == {0: 10, 1: 1}
    assert scheduled is not None
    (piece,) = (piece for piece in scheduled.segments if piece.key == 0)
    assert piece.final and (piece.segment.start, piece.segment.tokens) == (20, tuple(range(20, 30)))
    scheduler.add(2, chain(2, 0, 50))
    assert [rows_of(scheduler.schedule(Room(None, begin=begin)))[2] for _ in range(3)] == [12, 12, 6]
    scheduler.add(3, chain(3, 0, 44))
    last = scheduler.schedule(Room(32, begin=begin))
    assert last is not None and last.rejected == (3,)


def test_a_chain_that_waits_for_another_is_not_scheduled_and_holds_nobody_up() -> None:
    scheduler = Scheduler(BUDGET, 8)
    for number in range(3):
        scheduler.add(number, chain(number, 0, 3))
    assert rows_of(scheduler.schedule(Room(None, begin=cached(k1=None)))) == {0: 3, 2: 3}
    assert scheduler.schedule(Room(None, begin=cached(k1=None))) is None
    assert rows_of(scheduler.schedule(Room(None, begin=cached(k1=2)))) == {1: 1}


@pytest.mark.parametrize("from_row", [0, 8])
def test_a_chain_without_rows_left_to_run_is_dropped(from_row: int) -> None:
    """Those before `from_row` were cached, or have run."""
    scheduler = Scheduler(2, 2)
    scheduler.add(0, chain(0, 0, 10))
    assert rows_of(scheduler.schedule(Room(None, begin=cached(k0=6)))) == {0: 2}
    assert scheduler.cancel(SeqId(0), from_row) == [0] and scheduler.idle


def test_a_chain_that_others_wait_for_keeps_its_memory_though_it_has_no_rows_in_this_step() -> None:
    """Otherwise it could wait for memory of a younger group whose own chain waits for it."""
    scheduler = Scheduler(8, 8)
    scheduler.add(0, chain(0, 0, 8))
    scheduler.add(1, chain(1, 0, 8))
    assert rows_of(scheduler.schedule(Room(20))) == {0: 8}, "the step is full, but both have begun"
    scheduler.add(2, chain(2, 0, 5), group=Group(7, 5))
    assert rows_of(scheduler.schedule(Room(12))) == {1: 8}, "4 rows are left beside those of sequence 1"


# ---- turns of owners in the scheduler's steps -----------------------------------------------------------------------
def test_an_answer_of_one_owner_does_not_wait_for_the_many_of_another() -> None:
    load = Load(Scheduler(BUDGET, 4))
    for seq in range(100):
        load.add("many", seq, 1)
    last = load.add("one", 100, 1)
    assert load.step() == {"many": 3, "one": 1} and last not in load.waiting
    for _ in range(5):
        last = load.add("one", 100, 1)
        assert load.step()["one"] == 1, "and so on, from token to token"


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(1, 8)), min_size=2, max_size=5),
    st.integers(0, 999),
)
def test_owners_that_always_wait_have_equal_rows(owners: list[tuple[int, bool, int]], seed: int) -> None:
    """Owners of short segments, each with several pending at any time, whatever their sizes and numbers."""
    random, load, had = Random(seed), Load(Scheduler(BUDGET, 64)), Counter[str]()
    for _ in range(50):
        counts = Counter(owner for owner, *_ in load.waiting.values())
        for number, (largest, tree, wanted) in enumerate(owners):
            owner = f"owner {number}"
            # More than a step holds, so that all owners have segments left after it.
            while counts[owner] < BUDGET + wanted:
                rows = random.randint(1, largest if tree else QUANTUM)
                load.add(owner, load.next_key, rows, tree=tree)
                counts[owner] += 1
        had += load.step()
        rows = [had[f"owner {number}"] for number in range(len(owners))]
        assert max(rows) - min(rows) <= 2 * max(largest for largest, _, _ in owners) + QUANTUM


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(1, 30),
            st.booleans(),
            st.integers(0, 2),
            st.sampled_from((0.0, 1.0, 9.0)),
        ),
        min_size=1,
        max_size=40,
    ),
    st.integers(2, 5),
)
def test_nothing_starves_however_the_owners_come(
    arrivals: list[tuple[str, int, bool, int, float]], places: int
) -> None:
    """A segment has run once every owner could have run all it had pending by then, a quantum a step; two where
    every second step is that of the most critical."""
    load, deadline, step = Load(Scheduler(BUDGET, places)), dict[int, int](), 0

    def run() -> None:
        nonlocal step
        load.step()
        step += 1
        for key, until in list(deadline.items()):
            if key not in load.waiting:
                del deadline[key]
            else:
                assert step <= until, "it waited for more than the rows of all that were there"

    for number, (owner, rows, tree, pause, criticality) in enumerate(arrivals):
        key = load.add(owner, number, rows, tree=tree, criticality=criticality)
        own = sum(-(-left // QUANTUM) for other, _, left in load.waiting.values() if other == owner)
        most = max(left for *_, left in load.waiting.values())
        deadline[key] = step + 6 * (own + 1) * (-(-max(most, 30) // QUANTUM) + 1)
        for _ in range(pause):
            if load.waiting:
                run()
    while load.waiting:
        run()


@pytest.mark.parametrize("rows", [1, 30], ids=["decodes", "prompts"])
def test_of_an_owner_s_own_what_a_workflow_waits_for_goes_first_every_second_step(rows: int) -> None:
    """The other step stays with the oldest, so that answers without a workflow never stand still."""
    load = Load(Scheduler(BUDGET, 4))
    for seq in range(20):
        load.add("one", seq, rows)
    later, latest = (load.add("one", 100 + step, rows, criticality=seconds) for step, seconds in ((0, 2.0), (1, 8.0)))
    other = load.add("two", 200, rows)

    def left(key: int) -> int:
        return load.waiting.get(key, ("", 0, 0))[2]

    load.step()
    assert left(latest) < rows
    for _ in range(5):
        load.step()
    assert left(later) >= left(latest) and left(1) < rows and left(other) < rows


# ---- long prompts beside answers ------------------------------------------------------------------------------------
ANSWERS = 16
PROMPT = 30_000


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: one reading of the weights, each row, each row's attention, and reading a long sequence."""

    weights: float
    row: float
    pair: float  # of a row and a row before it
    cached: float  # of a row before a chunk, however long the chunk

    def seconds(self, scheduled: SchedulerOutput) -> float:
        total = self.weights
        for each in scheduled.segments:
            rows, start = len(each.segment.tokens), each.segment.start
            total += rows * self.row + rows * start * self.pair + (start * self.cached if rows > 1 else 0.0)
        return total


MACHINES = {
    "two cores": Machine(0.045, 1e-3, 3e-8, 5e-7),
    "two slow cores": Machine(0.1, 1e-2, 1e-7, 2e-6),
    "a GPU": Machine(0.008, 1e-5, 2e-10, 5e-9),
}


def steps_beside_answers(machine: Machine, noise: Callable[[], float] = lambda: 1.0) -> tuple[list[float], list[float]]:
    """Seconds of steps of answers alone, and of all steps until a prompt of 30,000 rows is done."""
    scheduler = Scheduler(512, 256)
    position = 100

    def step() -> float:
        nonlocal position
        for seq in range(ANSWERS):
            scheduler.add(position * ANSWERS + seq, Segment(SeqId(seq), position, (1,)))
        position += 1
        scheduled = scheduler.schedule()
        assert scheduled is not None
        assert sum(len(each.segment.tokens) == 1 for each in scheduled.segments) >= ANSWERS  # none waits
        seconds = machine.seconds(scheduled) * noise()
        scheduler.took(seconds)
        return seconds

    alone = [step() for _ in range(50)]
    scheduler.add(-2, Segment(SeqId(99), 0, tuple(range(PROMPT))))
    beside: list[float] = []
    while scheduler.last(SeqId(99)) is not None:
        beside.append(step())
    return alone, beside


def percentile_95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


@pytest.mark.parametrize(("name", "varies"), [*product(MACHINES, [0.0]), ("two cores", 0.2)])
def test_gaps_of_answers_are_at_most_doubled_beside_a_long_prompt(name: str, varies: float) -> None:
    """Times of steps may vary."""
    machine, draw = MACHINES[name], Random(1)
    alone, beside = steps_beside_answers(machine, lambda: draw.uniform(1.0 - varies, 1.0 + varies))
    assert percentile_95(beside) <= 2.0 * percentile_95(alone)
    assert max(beside) <= 4.0 * max(alone)
    # The prompt has two fifths of the time, less what its chunks cost however short they are.
    extra = sum(beside) - len(beside) * statistics.median(alone)
    assert extra >= 0.35 * sum(beside) or max(beside) < 1.75 * max(alone)


@pytest.mark.parametrize(
    ("row_s", "expected"),
    [
        (0.0005, [512, 512, 176, 100]),
        (0.004, [512, 125, 125, 125, 125, 125, 63, 100]),
        (0.1, [512, *[56] * 12, 16, 56, 44]),
    ],
)
def test_a_prompt_has_whole_steps_where_nobody_writes_but_no_long_ones(row_s: float, expected: list[int]) -> None:
    """A client that comes or leaves during a step waits for its end. The first step shows what a row takes."""
    scheduler = Scheduler(512, 256)
    rows = []
    for key, length in ((1, 1200), (2, 100)):
        scheduler.add(key, Segment(SeqId(key), 0, tuple(range(length))))
        while (scheduled := scheduler.schedule()) is not None:
            rows.append(scheduled.batch.num_rows)
            scheduler.took(row_s * rows[-1])
    assert rows == expected


def test_the_end_of_a_long_prompt_and_the_new_part_of_a_cached_one_are_limited_too() -> None:
    """Else a hundred rows behind thirty thousand stop all answers for seconds; drafts run whole everywhere."""
    scheduler = Scheduler(512, 256)
    for key in range(60):
        scheduler.add(key, Segment(SeqId(1), key, (1,)))
        assert scheduler.schedule() is not None
        scheduler.took(0.01)
    rows = []
    scheduler.add(100, Segment(SeqId(2), FAR + 1, tuple(range(100))))
    scheduler.add(101, Segment(SeqId(3), FAR + 1, tuple(range(FAR_ROWS)), None, "all"))
    for key in range(200, 400):
        scheduler.add(key, Segment(SeqId(1), key - 140, (1,)))
        scheduled = scheduler.schedule()
        assert scheduled is not None
        sizes = {each.key: len(each.segment.tokens) for each in scheduled.segments}
        assert sizes.get(101, FAR_ROWS) == FAR_ROWS
        rows.append(sizes.get(100, 0))
        scheduler.took(0.01 + 0.001 * rows[-1])
    assert sum(rows) == 100
    assert max(rows) <= 16
