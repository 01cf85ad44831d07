"""The score of difficulty: a function of the rows, bounded, ordered by level, and moved by what came of answers."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from paceline.core.difficulty import (
    HEAD,
    HELD,
    MOST_SHIFT,
    UNTAUGHT,
    WEIGHTS,
    WORTHS,
    Correction,
    Glance,
    Sureness,
    glance,
)
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import head
from paceline.core.side import HandoffLevel
from paceline.runtime.sessions.handoff import Outcomes, Watch
from paceline.strategies.base import Emit

LEVELS: tuple[HandoffLevel, ...] = ("quality", "balanced", "cheap")


def a_row(random_: random.Random, sharpness: float) -> Dist:
    scores = np.array([random_.gauss(0.0, sharpness) for _ in range(50)])
    probs = np.exp(scores - scores.max())
    return Dist.dense(probs / probs.sum())


def handed_over_at(level: HandoffLevel, rows: list[Dist], prompt: int) -> int:
    """The token that this device does not write; the number of rows where it writes all."""
    watch = Watch(Outcomes(), "", level, prompt)
    told = 0
    for row in rows:
        told += len(watch.take(Emit(row.argmax(), row)))
        if watch.over:
            return told
    told += len(watch.end(None))
    return told


def test_a_level_that_takes_more_risk_never_hands_over_earlier() -> None:
    assert 0.0 < WORTHS["quality"] < WORTHS["balanced"] < WORTHS["cheap"] < 1.0
    seen: set[int] = set()
    for seed in range(60):
        random_ = random.Random(seed)
        sharpness = random_.choice((1.0, 4.0, 12.0, 30.0))
        rows = [a_row(random_, sharpness) for _ in range(random_.choice((3, HELD, 30)))]
        prompt = random_.choice((5, 100, 900))
        at = [handed_over_at(level, rows, prompt) for level in LEVELS]
        assert at == sorted(at) and not {*range(1, min(HELD, len(rows)))} & {*at}
        assert at == [handed_over_at(level, rows, prompt) for level in LEVELS]
        seen |= {(number > 0) + (number == len(rows)) for number in at}
    assert {0, 2} <= seen, "some are the cloud's from the first token on, some the device's to the last"


def test_a_row_is_seen_as_its_head_and_one_other_token() -> None:
    row = a_row(random.Random(1), 3.0)
    of_head, likeliest = head(row, HEAD), row.top(HEAD)
    probs = [prob for _, prob in likeliest]
    rest = 1.0 - sum(probs)
    nats = -sum(prob * math.log(prob) for prob in [*probs, rest])
    seen = glance(of_head, likeliest[2][0])
    assert seen == pytest.approx((nats, probs[0] - probs[1], -math.log(probs[2])))
    unlikely = next(token for token in range(50) if token not in dict(likeliest))
    assert glance(of_head, unlikely).surprise == pytest.approx(-math.log(rest))
    sure = glance(Dist.dense(np.array([0.0, 1.0, 0.0])), 1)
    assert sure == (0.0, 1.0, 0.0) and glance(Dist.dense(np.array([0.0, 1.0])), 0).surprise < math.inf


def test_surer_rows_have_a_better_chance_and_every_chance_is_one() -> None:
    chances = []
    for unsure in (0.0, 0.3, 0.8):
        reading = Sureness(200)
        for _ in range(20):
            reading.add(Glance(2.0 * unsure, 1.0 - unsure, unsure))
        chances.append(reading.look(WEIGHTS).chance)
    assert chances == sorted(chances, reverse=True) and all(0.0 < chance < 1.0 for chance in chances)
    assert [reading.look(WEIGHTS, shift).chance for shift in (-1e9, 1e9)] == [0.0, 1.0]


def test_a_correction_finds_how_often_this_pair_agrees_and_stays_bounded() -> None:
    random_ = random.Random(0)
    assert UNTAUGHT.shift == 0.0
    shifts = []
    for really in (0.0, 0.6, WEIGHTS.agreement, 1.0):
        found = UNTAUGHT
        for number in range(600):
            found = found.after(min(1.0, max(0.0, really + random_.gauss(0.0, 0.05) * (0.0 < really < 1.0))))
            assert abs(found.shift) <= MOST_SHIFT
            if number == 0:
                assert abs(found.shift) < 1.5, "one answer does not settle it"
        assert (found.agreed, found.seen) == (pytest.approx(really, abs=0.02), 600)
        shifts.append(found.shift)
    assert shifts[0] == -MOST_SHIFT < shifts[1] < shifts[2] < shifts[3] == MOST_SHIFT
    assert shifts[2] == pytest.approx(0.0, abs=0.2)
    assert Correction.of(math.nan, -3) == UNTAUGHT and Correction.of(1e300, 1).agreed == 1.0
