"""Turns of owners in the scheduler's steps: equal rows for those that want all, no wait behind another's many."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.pending import Group
from paceline.core.batching.scheduler import Scheduler
from paceline.core.batching.segment import Segment, SeqId

BUDGET = 12
QUANTUM = 3
PLACES = 4


class Load:
    """Sequences of owners, one pending segment each. `pending` is by key."""

    def __init__(self, places: int = PLACES) -> None:
        self.scheduler = Scheduler(BUDGET, places)
        self.pending: dict[int, tuple[str, int]] = {}  # owner, rows that are left
        self.lengths: Counter[int] = Counter()
        self.busy: set[int] = set()
        self.next_key = 0

    def add(self, owner: str, seq: int, rows: int, *, tree: bool = False, criticality: float = 0.0) -> int:
        self.next_key += 1
        start = self.lengths[seq]
        segment = Segment(SeqId(seq), start, tuple(range(rows)), (-1,) * rows if tree else None, "all")
        self.scheduler.add(self.next_key, segment, group=Group(seq, 0, owner=owner, criticality=criticality))
        self.pending[self.next_key] = owner, rows
        self.lengths[seq] += rows
        return self.next_key

    def step(self) -> Counter[str]:
        """Rows that each owner had in it."""
        scheduled = self.scheduler.schedule()
        self.scheduler.check()
        rows = Counter[str]()
        assert scheduled is not None
        for piece in scheduled.segments:
            owner, left = self.pending.pop(piece.key)
            rows[owner] += len(piece.segment.tokens)
            if not piece.final:
                self.pending[piece.key] = owner, left - len(piece.segment.tokens)
        return rows


def test_an_answer_of_one_owner_does_not_wait_for_the_many_of_another() -> None:
    load = Load()
    for seq in range(100):
        load.add("many", seq, 1)
    last = load.add("one", 100, 1)
    assert load.step() == {"many": 3, "one": 1} and last not in load.pending
    for _ in range(5):
        last = load.add("one", 100, 1)
        assert load.step()["one"] == 1, "and so on, from token to token"


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(1, 8)), min_size=2, max_size=5),
    st.integers(0, 999),
)
def test_owners_that_always_wait_have_equal_rows(owners: list[tuple[int, bool, int]], seed: int) -> None:
    """Owners of short segments, each with several pending at any time, whatever their sizes and numbers."""
    random, load, had = Random(seed), Load(places=64), Counter[str]()
    for _ in range(80):
        counts = Counter(owner for owner, _ in load.pending.values())
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
    load, deadline, step = Load(places), dict[int, int](), 0

    def run() -> None:
        nonlocal step
        load.step()
        step += 1
        for key, until in list(deadline.items()):
            if key not in load.pending:
                del deadline[key]
            else:
                assert step <= until, "it waited for more than the rows of all that were there"

    for number, (owner, rows, tree, pause, criticality) in enumerate(arrivals):
        key = load.add(owner, number, rows, tree=tree, criticality=criticality)
        own = sum(-(-left // QUANTUM) for other, left in load.pending.values() if other == owner)
        most = max(left for _, left in load.pending.values())
        deadline[key] = step + 6 * (own + 1) * (-(-max(most, 30) // QUANTUM) + 1)
        for _ in range(pause):
            if load.pending:
                run()
    while load.pending:
        run()


@pytest.mark.parametrize("rows", [1, 30], ids=["decodes", "prompts"])
def test_of_an_owner_s_own_what_a_workflow_waits_for_goes_first_every_second_step(rows: int) -> None:
    """The other step stays with the oldest, so that answers without a workflow never stand still."""
    load = Load()
    for seq in range(20):
        load.add("one", seq, rows)
    later, latest = (load.add("one", 100 + step, rows, criticality=seconds) for step, seconds in ((0, 2.0), (1, 8.0)))
    other = load.add("two", 200, rows)

    def left(key: int) -> int:
        return load.pending.get(key, ("", 0))[1]

    load.step()
    assert left(latest) < rows
    for _ in range(5):
        load.step()
    assert left(later) >= left(latest) and left(1) < rows and left(other) < rows


def test_a_stream_of_critical_segments_leaves_half_of_the_steps_to_the_others() -> None:
    load = Load()
    last = [load.add("one", seq, 1) for seq in range(40)][-1]
    for _ in range(40):
        for _ in range(BUDGET):
            load.add("one", load.next_key + 1000, 1, criticality=5.0)
        load.step()
        if last not in load.pending:
            break
    assert last not in load.pending
