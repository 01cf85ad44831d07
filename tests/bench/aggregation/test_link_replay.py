"""The replay against a recursion and closed forms, and invariants of all rules and links."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.aggregation.link_replay import Link, Replay, Result, Trace
from bench.aggregation.placement_rules import RULES, Static
from lab.baselines.dragon import token_seconds
from paceline.core.side import Side, other

acceptances = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30)
times = st.integers(1, 40).map(lambda hundredths: hundredths / 100)


def constant(delay: float) -> Link:
    """A link with a constant delay."""
    return Link(delay, base=0.0, noise=0.0, swing=0.0)


def trace(accepted: Sequence[tuple[bool, bool]], cloud: float, device: float) -> Trace:
    count = len(accepted)
    return Trace(
        {"cloud": [each[0] for each in accepted], "device": [each[1] for each in accepted]},
        {"cloud": [cloud] * count, "device": [device] * count},
    )


def by_recursion(answer: Trace, holder: Side, delay: float) -> float:
    """Total time with a static aggregator and unbounded drafting: Table 1 as a recursion over drafts."""
    peer, made, own, theirs = other(holder), 0.0, 0.0, 0.0
    redo_own = redo_theirs = True
    start_theirs = 0.0
    for step in range(answer.tokens):
        own = (made if redo_own else own) + answer.decode[holder][step]
        theirs = (start_theirs if redo_theirs else theirs) + answer.decode[peer][step]
        made = max(made, own, theirs + delay)
        redo_own, redo_theirs = not answer.accepted[holder][step], not answer.accepted[peer][step]
        start_theirs = made + delay
    return made


@given(acceptances, times, times, times, st.sampled_from(["cloud", "device"]))
@settings(deadline=None, derandomize=True, database=None, max_examples=100)
def test_a_static_aggregator_makes_its_targets_when_the_recursion_says(
    accepted: list[tuple[bool, bool]], cloud: float, device: float, delay: float, holder: Side
) -> None:
    answer = trace(accepted, cloud, device)
    result = Replay(answer, constant(delay), Static(holder), ahead=answer.tokens).run()
    assert result == Result(pytest.approx(by_recursion(answer, holder, delay)), 0)


@given(st.lists(st.booleans(), min_size=1, max_size=40), times, times)
@settings(deadline=None, derandomize=True, database=None, max_examples=60)
def test_a_holder_that_is_always_wrong_takes_equation_7_with_the_share_that_was_accepted(
    cloud_right: list[bool], slower: float, delay: float
) -> None:
    """Its queue is always empty, so the equation is exact."""
    cloud, device = 0.01, 0.01 + slower
    answer = trace([(right, False) for right in cloud_right], cloud, device)
    share = float(np.mean([*cloud_right[:-1], True])) if len(cloud_right) == 1 else float(np.mean(cloud_right[:-1]))
    first = max(device, cloud + delay)
    expected = first + (len(cloud_right) - 1) * token_seconds(device, cloud, 2 * delay, share)
    result = Replay(answer, constant(delay), Static("device"), ahead=len(cloud_right)).run().seconds
    late = max(0.0, delay + cloud - device)  # the first accepted drafts may be late
    assert expected - late - 1e-9 <= result <= expected + 1e-9


@given(acceptances, times, times, times, st.sampled_from(sorted(RULES)), st.integers(1, 12), st.integers(0, 99))
@settings(deadline=None, derandomize=True, database=None, max_examples=150)
def test_every_rule_finishes_and_none_outruns_the_slower_side(
    accepted: list[tuple[bool, bool]], cloud: float, device: float, extra: float, name: str, ahead: int, seed: int
) -> None:
    answer, link = trace(accepted, cloud, device), Link(extra)

    def once() -> Result:
        rule = RULES[name](answer, link, np.random.default_rng(seed))
        return Replay(answer, link, rule, ahead=ahead, seed=(seed,)).run()

    result = once()
    assert result.seconds >= answer.tokens * max(cloud, device) - 1e-9
    assert result.hand_overs < answer.tokens
    assert once() == result


@given(acceptances, times, times, times, st.sampled_from(["cloud", "device"]))
@settings(deadline=None, derandomize=True, database=None, max_examples=60)
def test_speculation_on_a_constant_link_is_never_slower_than_token_by_token(
    accepted: list[tuple[bool, bool]], cloud: float, device: float, delay: float, holder: Side
) -> None:
    answer, link = trace(accepted, cloud, device), constant(delay)
    ahead = Replay(answer, link, Static(holder)).run().seconds
    waiting = Replay(answer.synchronous(), link, Static(holder)).run().seconds
    assert ahead <= waiting + 1e-9


def test_a_hand_over_takes_one_message_and_loses_no_draft() -> None:
    """All accepted, equal speeds: the cloud waits for the hand-over, then has both drafts of many steps at once."""
    answer = trace([(True, True)] * 20, 0.1, 0.1)

    class Once(Static):
        def choose(self, side: Side, targets: int, now: float, *, ready: bool) -> Side:  # noqa: ARG002  # a rule's signature
            return "cloud"

    moved = Replay(answer, constant(0.5), Once("device"), ahead=20).run()
    assert moved == Result(pytest.approx(20 * 0.1 + 0.5), 1)


def test_the_link_swings_by_a_fifth_with_a_period_of_20_pi_seconds() -> None:
    link = Link(0.3)
    assert link.expected(0.0) == pytest.approx(0.305)
    assert link.expected(5 * np.pi) == pytest.approx(0.365)
    assert link.expected(15 * np.pi) == pytest.approx(0.245)
    rng = np.random.default_rng(0)
    drawn = [link.delay(0.0, rng) for _ in range(500)]
    assert 0.302 <= min(drawn) < 0.303
    assert 0.307 < max(drawn) <= 0.308
