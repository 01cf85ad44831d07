"""What is learnt of answers of two models: chances that come true, levels in order, and the same index as is served."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from lab.training.difficulty import SPENDS, Answer, Record, as_good, batched, fit, looks, played, worths_of
from paceline.core.difficulty import HELD, Glance
from paceline.core.sampling.dist import Dist
from paceline.runtime.sessions import handoff
from paceline.runtime.sessions.handoff import Outcomes, Watch
from paceline.strategies.base import Emit

BINS = 5


def records(count: int, seed: int) -> list[Record]:
    """Of made-up models, of which the smaller one is wrong the more often, the less sure it is."""
    random_ = random.Random(seed)
    return [a_record(random_, f"{seed} {number}") for number in range(count)]


def a_record(random_: random.Random, name: str) -> Record:
    hard = random_.random()
    rows = []
    for _ in range(random_.choice((4, HELD, 25, 60))):
        unsure = min(1.0, max(0.0, hard + random_.gauss(0.0, 0.15)))
        rows.append(Glance(1.5 * unsure, 1.0 - unsure, 0.8 * unsure))
    cloud = random_.random() < 0.8
    device = random_.random() < 0.95 - 0.8 * hard
    agreed = tuple(random_.random() < 0.95 - 0.5 * hard for _ in range(30))
    answers = (Answer((1,) * len(rows), tuple(rows), "", device), Answer((1,) * 30, (), "", cloud))
    return Record(name, "made", random_.choice((20, 300)), *answers, agreed)


def test_chances_come_true_on_answers_that_nothing_was_learnt_of() -> None:
    learnt, others = fit(records(400, 1)), records(1500, 2)
    seen = sorted((looks(record, learnt.weights)[-1][1].chance, as_good(record)) for record in others)
    for part in batched(seen, len(seen) // BINS):
        expected, came = (sum(each[which] for each in part) / len(part) for which in (0, 1))
        assert came == pytest.approx(expected, abs=0.08)
    assert seen[0][0] < 0.5 < seen[-1][0], "they are told apart"
    assert learnt.weights.agreement == pytest.approx(0.7, abs=0.03)


def test_a_level_spends_what_it_may_where_it_was_learnt_and_right_answers_are_worth_it() -> None:
    found = records(300, 3)
    learnt = fit(found)
    whole = sum(len(record.cloud.tokens) for record in found)
    rights, spent = [], []
    for level, may in SPENDS.items():
        outcomes = [played(record, learnt.weights, learnt.worths[level]) for record in found]
        rights.append(sum(each.right for each in outcomes))
        spent.append(sum(each.written for each in outcomes) / whole)
        assert may - 0.02 < spent[-1] <= may
    assert rights == sorted(rights, reverse=True)
    device, cloud = (sum(each.right for each in of) for of in zip(*((r.device, r.cloud) for r in found), strict=True))
    by_lot = device + spent[1] * (cloud - device)
    assert rights[1] > by_lot + 0.04 * len(found), "more than the same tokens by lot"
    nothing = [played(record, learnt.weights, 1.0) for record in found]
    assert all(each.at is None and not each.written for each in nothing)
    everything = [played(record, learnt.weights, -1.0) for record in found]
    assert all((each.at, each.right) == (0, record.cloud.right) for each, record in zip(everything, found, strict=True))


def test_right_answers_are_bought_where_they_are_cheap() -> None:
    found = records(300, 7)
    dear = [replace(each, prompt=40, cloud=replace(each.cloud, tokens=(1,) * 300)) for each in found[::2]]
    found = [*dear, *(replace(each, prompt=900) for each in found[1::2])]  # their length can be told by the prompt's
    learnt = fit(found)
    expected = [looks(each, learnt.weights)[0][1].tokens for each in found]
    assert max(abs(a / len(each.cloud.tokens) - 1.0) for a, each in zip(expected, found, strict=True)) < 0.3
    outcomes = [played(each, learnt.weights, learnt.worths["balanced"]) for each in found]
    by_length = {length: [each for each in outcomes if each.written == length] for length in (30, 300)}
    assert len(by_length[30]) > 4 * len(by_length[300])


def test_what_is_reported_is_handed_over_where_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    found = records(120, 4)
    learnt = fit(found)
    monkeypatch.setattr(handoff, "WEIGHTS", learnt.weights)
    places = set()
    for record in found:
        worths = worths_of(record, learnt.weights)
        for worth in (max(worths) - 1e-9, worths[0] - 1e-9, 0.5 * (worths[0] + max(worths)), 1.0):
            expected = played(record, learnt.weights, worth).at
            assert served(record, worth, monkeypatch) == expected
            places.add(expected)
    assert {None, 0} < places, "some in their middle"


def served(record: Record, worth: float, monkeypatch: pytest.MonkeyPatch) -> int | None:
    monkeypatch.setattr(handoff, "WORTHS", {"balanced": worth})
    rows = iter(record.device.rows)
    monkeypatch.setattr(handoff, "glance", lambda _head, _token: next(rows))
    watch, told = Watch(Outcomes(), "", "balanced", record.prompt), 0
    token = Emit(0, Dist.dense(np.ones(1)))
    for _ in record.device.tokens[:-1]:
        told += len(watch.take(token))
        if watch.over:
            return told
    watch.end(token)
    return 0 if watch.over else None
