"""Meters on counters and clocks made by hand, and the account of an answer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.segment import Segment, SeqId
from paceline.core.energy import (
    NOT_KNOWN,
    AnswerEnergy,
    CounterMeter,
    Energy,
    MeterReading,
    MeterUnreadable,
    MeterWithSubstitute,
    PowerMeter,
    Spent,
    WorkloadMeter,
)
from paceline.core.offloading import ModelShape


@given(st.lists(st.floats(0.0, 99.0), min_size=1, max_size=50), st.floats(100.0, 500.0))
def test_a_counter_that_begins_anew_loses_nothing(steps: list[float], span: float) -> None:
    """However often it wraps, no more than once a step."""
    total, seen = 0.0, []
    meter = CounterMeter("counter", lambda: [MeterReading(total % span, span)])
    meter.begin()
    for joules in steps:
        total += joules
        seen.append(meter.end(()).joules)
    assert sum(seen) == pytest.approx(sum(steps), abs=1e-6 * span)


def test_several_counters_are_added_and_what_lies_between_steps_is_nobodys() -> None:
    counters = ((1.0, 10.0), (2.0, 12.0), (5.0, 20.0), (5.5, 20.0))
    shown = [list(map(MeterReading, values)) for values in counters]
    meter = CounterMeter("counters", lambda: shown.pop(0))
    meter.begin()
    assert meter.end(()) == Energy(3.0, measured=True)
    meter.begin()  # the engine was idle meanwhile
    assert meter.end(()) == Energy(0.5, measured=True)


def test_a_counter_that_was_set_back_has_no_value() -> None:
    with pytest.raises(MeterUnreadable, match="set back"):
        MeterReading(1.0).since(MeterReading(2.0))
    with pytest.raises(MeterUnreadable, match="set back"):
        MeterReading(1.0, span=5.0).since(MeterReading(9.0, span=5.0))


def test_power_counts_the_time_of_steps_alone() -> None:
    now = 0.0
    meter = PowerMeter("power", lambda: 12.0, lambda: now, measured=False)
    meter.begin()
    now = 2.0
    assert meter.end(()) == Energy(24.0, measured=False)
    now = 5.0
    assert meter.end(()).joules == 36.0, "of steps that overlap, the later one has the time since the first one's end"
    meter.begin()
    assert meter.end(()).joules == 0.0


def test_operations_are_equation_1_of_the_rows_and_the_head_of_those_that_are_read() -> None:
    shape = ModelShape(layers=24, hidden=896, inner=4864, vocab=151_936)
    meter = WorkloadMeter("workload", shape, flops_per_s=40e9, watts=12.0)
    without = WorkloadMeter("workload", ModelShape(24, 896, 4864), flops_per_s=40e9, watts=12.0)
    row, prompt = Segment(SeqId(1), 500, (1,)), Segment(SeqId(2), 0, (1,) * 100)
    assert without.end([row]).joules == pytest.approx(0.185, rel=0.01)  # specs 2.1, by hand
    head = 272e6 * 12.0 / 40e9
    assert meter.end([row, prompt]).joules - without.end([row, prompt]).joules == pytest.approx(2 * head, rel=0.01)
    assert meter.end([row]) == Energy(pytest.approx(0.185 + head, rel=0.01), measured=False)


class Patchy:
    """A meter that works when it is told to."""

    name = "patchy"
    works = True

    def begin(self) -> None:
        self._check()

    def end(self, segments: object) -> Energy:  # noqa: ARG002  # a meter's signature
        self._check()
        return Energy(1.0)

    def _check(self) -> None:
        if not self.works:
            raise MeterUnreadable("it rests")


def test_a_meter_that_fails_is_stood_in_for_and_says_so_once() -> None:
    now, patchy, said = 0.0, Patchy(), list[str]()
    meter = MeterWithSubstitute(patchy, PowerMeter("power", lambda: 2.0, lambda: now, measured=False), said.append)
    meter.begin()
    assert meter.end(()) == Energy(1.0, measured=True)
    patchy.works = False
    now = 3.0
    assert meter.end(()) == Energy(6.0, measured=False)
    assert meter.end(()) == Energy(0.0, measured=False)
    assert said == ["it rests"]
    patchy.works = True
    assert meter.end(()) == Energy(1.0, measured=True)
    patchy.works = False
    meter.begin()
    assert said == ["it rests", "it rests"]


@given(st.lists(st.integers(1, 64), min_size=1, max_size=20), st.floats(0.0, 1e3))
def test_the_shares_of_a_batch_are_all_of_it(rows: list[int], joules: float) -> None:
    energy = Energy(joules)
    assert math.fsum(energy.share(each, sum(rows)).joules for each in rows) == pytest.approx(joules)
    assert energy.share(0, 0) == Energy(0.0)


def test_an_answer_is_told_of_each_forward_and_of_what_was_sent_since() -> None:
    account = AnswerEnergy("rapl", send_w=0.2)
    account.send(1_000, 500.0)
    account.send(1_000, None)
    assert account.compute(Energy(3.0)) == Spent(3.0, pytest.approx(0.4), 2_000)
    assert account.compute(Energy(2.0, measured=False)) == Spent(2.0, 0.0)
    use = account.use
    assert use is not None and use.joules == pytest.approx(5.4)
    assert (use.meter, use.computed.source, use.sent.source) == ("rapl", "modelled", "modelled")
    unknown = AnswerEnergy("", send_w=0.2)
    assert unknown.compute(Energy(3.0)) == NOT_KNOWN and unknown.use is None
