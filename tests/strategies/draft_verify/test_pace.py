"""How much a step drafts, by what steps have cost and given."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.offloading import EnergyQueue, OffloadStats
from paceline.strategies.draft_verify.pace import FIRST_EXAMINED, PROBE_STEPS, Pace
from paceline.wire.verify_messages import VerifyOptions

SURE, UNSURE = 0.01, 3.0  # nats


def drafted(pace: Pace, nats: float = SURE, *, ahead: int = 0, draft_s: float = 0.02, rtt: float | None = None) -> int:
    """Drafts of one step whose distributions all have this entropy."""
    if not pace.begin(ahead, draft_s, None, rtt):
        return 0
    count = 0
    while not pace.complete and pace.admits(nats):
        count += 1
    pace.end(4 * count, None)
    return count


def experienced(**fields: Any) -> OffloadStats:
    """Past the first drafts, and in the middle between two looks beyond the gate."""
    return OffloadStats(steps=1, examined=1000, **fields)


def within_budget(least: int = 0) -> Pace:
    return Pace(VerifyOptions(least=least), experienced(queue=EnergyQueue(1.2), compute_w=12.0))


def test_within_a_budget_sure_drafts_are_many_and_unsure_ones_stop_the_step() -> None:
    assert drafted(within_budget()) > 3
    assert drafted(within_budget(), UNSURE) == 0
    assert drafted(within_budget(least=1), UNSURE) == 1, "the paper drafts at least one"


def test_without_a_budget_unsure_drafts_cost_nothing() -> None:
    assert drafted(Pace(VerifyOptions(), experienced()), UNSURE) == VerifyOptions().most


def test_at_first_and_now_and_then_a_step_ignores_the_gate() -> None:
    """Else a model that is unsure and right would never be found out."""
    stats = OffloadStats(queue=EnergyQueue(1.2), compute_w=12.0)
    pace = Pace(VerifyOptions(), stats)
    assert drafted(pace, UNSURE) > 3
    for _ in range(FIRST_EXAMINED):
        pace.examined(SURE, accepted=True)
    looks = [drafted(pace, UNSURE) > 1 for _ in range(2 * PROBE_STEPS)]
    assert sum(looks) == 2


def test_drafts_that_are_never_accepted_are_tried_now_and_then_alone() -> None:
    stats = OffloadStats(queue=EnergyQueue(1.2), compute_w=12.0)
    pace = Pace(VerifyOptions(), stats)
    for _ in range(300):
        pace.examined(SURE, accepted=False)
        stats.estimates.verified.add(0.1)
    steps = [drafted(pace) for _ in range(2 * PROBE_STEPS)]
    assert sorted(set(steps)) == [0, 1] and sum(steps) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cloud_that_waits_decodes_alone_where_that_is_faster_than_drafts_and_is_asked_for_no_more(
    overlap: bool,
) -> None:
    """By round trip: a token a forward, without one, or several a forward with one. What is left out is still compared
    with the targets now and then."""
    stats = experienced()
    for number in range(300):
        stats.estimates.accepted.add(float(number % 4 > 0))
    pace = Pace(VerifyOptions(waits=True, overlap=overlap), stats)
    for rtt, streams in ((0.3, True), (0.01, False)):
        for _ in range(100):
            stats.estimates.verified.add(rtt + 0.03)
        steps = [(drafted(pace, draft_s=0.005, rtt=rtt), pace.looks) for _ in range(2 * PROBE_STEPS)]
        assert all((count == 0) is streams for count, _ in steps)
        assert sum(looks for _, looks in steps) == (2 if streams else 0)


def test_drafting_ahead_of_a_verdict_stops_where_it_is_hardly_wanted() -> None:
    stats = OffloadStats()
    for _ in range(200):
        stats.estimates.accepted.add(float(False))
        stats.estimates.accepted.add(float(True))
    pace = Pace(VerifyOptions(gate=False), stats)  # half of the drafts are accepted
    assert pace.begin(1, 0.001, None)
    pace.cancel()
    assert not pace.begin(4, 0.001, None)
    assert not Pace(VerifyOptions(overlap=False), stats).begin(1, 0.001, None)


def test_what_a_lost_cloud_leaves_out_is_no_round() -> None:
    stats = OffloadStats()
    pace = Pace(VerifyOptions(), stats)
    for step in range(50):
        pace.came(0.02 * step, 1, streamed=True)
    before = stats.estimates.streamed_s(None), stats.round_s.value
    pace.interrupt()
    pace.came(60.0, 1, streamed=True)
    assert (stats.estimates.streamed_s(None), stats.round_s.value) == before
    pace.came(60.02, 1, streamed=True)
    assert stats.estimates.streamed_s(None) == pytest.approx(0.02)
