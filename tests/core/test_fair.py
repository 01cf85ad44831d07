"""The rule of fairness: nobody waits for more than a turn of each other, whatever requests cost and how many come."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.fair import EASE, FairQueue, Shares, Turns

owners = st.sampled_from("abcd")
Arrivals = list[tuple[str, int, int]]  # owner, cost, choices until the next one
ARRIVALS = st.lists(st.tuples(owners, st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=60)


class Waiting:
    """Requests of owners, of which one is chosen at a time."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.lines: dict[str, list[int]] = {}
        self.had = Counter[str]()

    def add(self, owner: str, *costs: int) -> None:
        self.lines.setdefault(owner, []).extend(costs)

    def choose(self) -> str:
        """The owner that is served next."""
        waiting = [(owner, (owner, cost)) for owner, costs in self.lines.items() for cost in costs]
        self.turns.begin(self.lines)
        owner, cost = self.turns.order(waiting, lambda each: float(each[1]))[0]
        assert self.lines[owner].pop(0) == cost, "an owner's own are in order"
        if not self.lines[owner]:
            del self.lines[owner]
        self.turns.served(owner, cost)
        self.had[owner] += cost
        return owner


@given(ARRIVALS)
def test_what_two_owners_have_while_both_wait_differs_by_one_request_of_each(arrivals: Arrivals) -> None:
    """So who comes, or comes back, waits for one request of each other owner at most before its first is served."""
    waiting, since = Waiting(), dict[tuple[str, str], tuple[int, int]]()
    largest = max(cost for _, cost, _ in arrivals)

    def choose() -> None:
        waiting.choose()
        pairs = {(one, other) for one in waiting.lines for other in waiting.lines if one < other}
        for pair in since.keys() - pairs:
            del since[pair]
        for one, other in pairs:
            before = since.setdefault((one, other), (waiting.had[one], waiting.had[other]))
            assert abs((waiting.had[one] - before[0]) - (waiting.had[other] - before[1])) <= 2 * largest

    for owner, cost, pause in arrivals:
        waiting.add(owner, cost)
        for _ in range(pause):
            if waiting.lines:
                choose()
    while waiting.lines:
        choose()


@given(st.lists(st.tuples(owners, st.integers(1, 9)), max_size=40), st.integers(1, 9))
def test_who_comes_waits_for_one_request_of_each_other_owner_at_most(served: list[tuple[str, int]], cost: int) -> None:
    waiting = Waiting()
    for owner, each in served:
        waiting.add(owner, *[each] * 20)
        waiting.choose()
    waiting.add("new", cost)
    before = Counter[str]()
    while (owner := waiting.choose()) != "new":
        before[owner] += 1
    assert max(before.values(), default=0) <= 1


@given(ARRIVALS)
def test_all_that_waits_is_in_the_order_of_turns_and_each_owners_first_before_any_second(arrivals: Arrivals) -> None:
    waiting = [(owner, (owner, number)) for number, (owner, _, _) in enumerate(arrivals)]
    order = Turns().order(waiting)
    assert sorted(order) == sorted(each for _, each in waiting)
    before = Counter[str]()
    for owner, _ in order:
        left = {each for each, _ in waiting if before[each] < Counter(each for each, _ in waiting)[each]}
        assert all(before[owner] <= before[each] for each in left)
        before[owner] += 1
    for owner in before:
        own = [number for each, number in order if each == owner]
        assert own == sorted(own)


def test_an_owner_that_was_ahead_gains_nothing_by_leaving_and_coming_back() -> None:
    waiting = Waiting()
    waiting.add("little", *[1] * 20)
    waiting.add("much", 9)
    while "much" in waiting.lines:
        waiting.choose()
    waiting.choose()
    waiting.add("much", 9)
    while waiting.had["little"] < 9:
        assert waiting.choose() == "little"


# Places.


def fill(shares: Shares, owner: str) -> int:
    """Take as many places as the owner is given."""
    while shares.take(owner):
        pass
    return shares.held(owner)


@given(st.integers(1, 40), st.lists(st.tuples(owners, st.booleans()), max_size=120))
def test_no_place_is_given_twice_and_every_place_comes_back(places: int, moves: list[tuple[str, bool]]) -> None:
    shares, held = Shares(places), Counter[str]()
    for owner, takes in moves:
        free = places - sum(held.values())
        if takes:
            given = shares.take(owner)
            assert given == (free > 0 and held[owner] < EASE * free)
            held[owner] += given
        elif held[owner]:
            shares.give_back(owner)
            held[owner] -= 1
        shares.check()
        assert shares.taken == sum(held.values()) <= places
        assert all(shares.held(each) == held[each] for each in "abcd")


@pytest.mark.parametrize(("places", "alone"), [(1, 1), (8, 8), (9, 8), (90, 80), (1152, 1024)])
def test_one_owner_holds_eight_ninths_and_another_gets_in(places: int, alone: int) -> None:
    shares = Shares(places)
    assert fill(shares, "a") == alone
    assert shares.take("b") == (places > 8)


@given(st.integers(50, 200), st.integers(2, 5), st.integers(0, 999))
def test_owners_that_want_all_they_can_get_come_to_hold_the_same(places: int, number: int, seed: int) -> None:
    """The first has filled its share when the others come; each place that comes free is asked for by all."""
    random, names = Random(seed), [f"owner {each}" for each in range(number)]
    shares = Shares(places)
    fill(shares, names[0])
    for _ in range(20 * places):
        asking = random.choice(names)
        shares.take(asking)
        ending = random.choice(names)
        if shares.held(ending):
            shares.give_back(ending)
        for each in random.sample(names, number):
            shares.take(each)
    for each in random.sample(names, number) * places:
        shares.take(each)
    held = [shares.held(each) for each in names]
    assert max(held) - min(held) <= EASE + 1
    if places > 2 * (EASE + 1) * number:  # else those who hold few places may take the last ones
        assert shares.taken < places, "something is left for who comes next"


@given(st.integers(0, 20))
def test_who_wants_little_has_it_whatever_the_others_take(little: int) -> None:
    shares = Shares(200)
    fill(shares, "a")
    for _ in range(little):
        assert shares.take("b")
        for _ in range(5):  # places of the first come free, and it wants them back
            shares.give_back("a")
        fill(shares, "a")
    assert shares.held("b") == little


def test_an_owner_that_is_alone_for_ever_has_all_places() -> None:
    shares = Shares(20)
    assert [shares.take("") for _ in range(21)] == [True] * 20 + [False]


def test_what_is_held_in_any_case_counts() -> None:
    shares = Shares(10)
    for _ in range(12):
        shares.force("a")
    assert not shares.take("b")
    for _ in range(3):
        shares.give_back("a")
    assert shares.take("b") and not shares.take("a")


def test_no_owner_holds_more_than_the_most() -> None:
    shares = Shares(100, most=5)
    assert fill(shares, "a") == fill(shares, "b") == 5


def test_an_owner_holds_so_much_and_one_thing_of_any_size() -> None:
    shares = Shares(1000, most=10)
    assert shares.take("ann", 15) and not shares.take("ann")
    assert shares.take("bert", 6) and shares.take("bert", 4) and not shares.take("bert")
    shares.give_back("ann", 15)
    shares.give_back("bert", 4)
    assert shares.take("ann") and shares.held("ann") == 1
    assert shares.take("bert", 4) and shares.held("bert") == 10


# Who waits for a place.


@given(
    st.integers(1, 12),
    st.sampled_from((1, 2, 100)),
    st.lists(st.tuples(owners, st.booleans(), st.booleans()), max_size=120),
)
def test_no_place_is_free_for_who_waits_and_who_has_none_waits_for_one_turn_of_each_other(
    places: int, most: int, moves: list[tuple[str, bool, bool]]
) -> None:
    queue, waiting = FairQueue(places, most=most), dict[int, str]()
    passed = Counter[tuple[str, str]]()  # calls of one owner while another waits that has no place

    def call(number: int, owner: str) -> None:
        assert number == min(each for each, whose in waiting.items() if whose == owner), "an owner's own are in order"
        del waiting[number]
        for each in {*waiting.values()} - {owner}:
            passed[owner, each] += 1

    for number, (owner, comes, gives_up) in enumerate(moves):
        if comes:
            waiting[number] = owner
            called = partial(call, number, owner)
            assert queue.enter(owner, called)
            if number in waiting and gives_up:
                queue.leave(called)
                del waiting[number]
        elif queue.shares.held(owner):
            queue.give_back(owner)
        queue.shares.check()
        assert queue.shares.taken <= places
        assert not any(queue.shares.has_room(each) for each in waiting.values())
        for pair in [pair for pair in passed if pair[1] not in waiting.values() or queue.shares.held(pair[1])]:
            del passed[pair]
        assert max(passed.values(), default=0) <= 1


def test_who_finds_no_room_to_wait_is_told_and_who_leaves_is_not_called() -> None:
    queue, called = FairQueue(9, waiting=2), list[str]()
    assert fill(queue.shares, "a") == 8
    queue.shares.force("b")
    first, second = (lambda: called.append("a1")), (lambda: called.append("b1"))
    assert queue.enter("a", first) and queue.enter("b", second)
    assert not queue.enter("c", lambda: called.append("c")), "two wait"
    queue.leave(first)
    queue.leave(first)
    assert queue.enter("a", lambda: called.append("a2"))
    queue.give_back("a")
    assert called == ["b1"], "of nine places eight are taken: the one with few may have the last"
    queue.give_back("b")
    assert called == ["b1", "a2"] and queue.enter("c", lambda: called.append("c"))
