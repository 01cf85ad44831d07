"""The scheduler: every segment runs, in order, under the budget, and none starves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.pending import Group, Memory
from paceline.core.batching.scheduler import Scheduler, SchedulerOutput, _shares
from paceline.core.batching.segment import LogitsMode, Segment, SeqId

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


def test_a_decode_never_waits_for_a_prefill() -> None:
    scheduler = Scheduler(BUDGET, 8)
    scheduler.add(0, chain(0, 0, 1000))
    for step in range(50):
        scheduler.add(100 + step, chain(1, step, 1))
        assert rows_of(scheduler.schedule()) == {100 + step: 1, 0: BUDGET - 1}


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
