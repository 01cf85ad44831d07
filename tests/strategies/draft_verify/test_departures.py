"""Drafts leave in time for the forwards of a verifier that does not wait."""

from __future__ import annotations

from paceline.strategies.draft_verify.drafting import Departures


def steady(gap: float, count: int = 20) -> tuple[Departures, float]:
    """Verdicts every `gap` seconds; and when the last one came."""
    departures = Departures()
    for step in range(count):
        departures.verdict_came(step * gap)
    return departures, (count - 1) * gap


def test_before_a_gap_is_known_nothing_is_due() -> None:
    departures = Departures()
    departures.verdict_came(1.0)
    assert not departures.is_due(1.01, 0.01, 0.0)


def test_a_draft_leaves_when_the_next_would_miss_a_forward() -> None:
    departures, last = steady(0.1)
    assert not departures.is_due(last + 0.02, 0.03, 0.01), "the next is ready at 0.05, in time for 0.09"
    assert departures.is_due(last + 0.07, 0.03, 0.01), "at 0.10 it is too late"
    assert not departures.is_due(last + 0.08, 0.03, 0.01), "some have left for that forward"
    assert departures.is_due(last + 0.17, 0.03, 0.01), "the forward after it"


def test_over_a_long_link_drafts_leave_once_for_each_forward() -> None:
    departures, last = steady(0.03)
    left = [at for at in range(30) if departures.is_due(last + 0.01 * (at + 1), 0.01, 0.2)]
    assert 8 <= len(left) <= 11, "some 0.3 s of forwards, 0.03 s apart"
