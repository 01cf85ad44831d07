"""Shares: never more than there are, something left for who comes next, and the same for all that want much."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.shares import EASE, Allowances, Shares, WaitingLine

owners = st.sampled_from("abcd")


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
    assert [shares.take("", alone=True) for _ in range(21)] == [True] * 20 + [False]


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
    allowances = Allowances(10)
    assert allowances.take("ann", 15) and not allowances.take("ann", 1)
    assert allowances.take("bert", 6) and allowances.take("bert", 4) and not allowances.take("bert", 1)
    allowances.give_back("ann", 15)
    allowances.give_back("bert", 4)
    assert allowances.take("ann", 1) and allowances.held("ann") == 1
    assert allowances.take("bert", 4) and allowances.held("bert") == 10


def test_a_place_that_is_given_back_is_the_first_one_s_who_may_have_it() -> None:
    shares = Shares(9)
    line, called = WaitingLine(shares, most=3), list[str]()
    assert fill(shares, "a") == 8
    shares.force("b")
    waits = [(owner, lambda name=name: called.append(name)) for owner, name in (("a", "a1"), ("b", "b1"), ("a", "a2"))]
    assert all(line.enter(owner, call) for owner, call in waits)  # type: ignore[arg-type]  # a lambda with a default
    assert not line.enter("c", lambda: called.append("c")), "three wait"
    line.leave(waits[0][1])
    line.leave(waits[0][1])
    line.give_back("a")
    assert called == ["b1"], "of nine places eight are taken: the one with few may have the last"
    line.give_back("b")
    assert called == ["b1", "a2"] and line.enter("c", lambda: called.append("c"))


def test_who_shares_with_nobody_is_called_for_the_last_place() -> None:
    shares = Shares(1)
    line, called = WaitingLine(shares, most=1), list[str]()
    assert shares.take("", alone=True)
    assert line.enter("", lambda: called.append("next"), alone=True)
    line.give_back("")
    assert called == ["next"]
