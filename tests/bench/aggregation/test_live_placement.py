"""The served machines while conditions change: figures of virtual time, which repeat."""

from __future__ import annotations

import statistics

from bench.aggregation.live_placement import CHANGING, DRAFTING, WAYS, Conditions, Load, play

SMALL = Load(answers=1, tokens=24)


def test_every_way_writes_the_same_answers_and_fixed_ones_hand_nothing_over() -> None:
    halves = CHANGING["the text turns from the device's document to the cloud's"]
    taken = {way: play(DRAFTING["chains"], side, halves, SMALL) for way, side in WAYS.items()}
    assert len({tuple(each.texts) for each in taken.values()}) == 1
    assert [each.handovers > 0.0 for each in taken.values()] == [True, False, False]


def test_with_equal_speeds_and_a_long_link_moving_beats_both_places() -> None:
    conditions = Conditions(0.03, 0.03, 0.3)
    load = Load(answers=1, tokens=48)
    seconds = {
        way: statistics.fmean(play(DRAFTING["chains"], side, (conditions, conditions), load).s_per_token)
        for way, side in WAYS.items()
    }
    assert seconds["live"] < 0.9 * min(seconds["stays on device"], seconds["stays on cloud"])
