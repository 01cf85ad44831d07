"""The energy of a step is divided among the requests that were in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.batching.segment import Segment, SeqId
from paceline.core.energy import Energy
from paceline.engine.fake import FakeEngine
from paceline.runtime.engine_loop.executor import StepExecutor
from paceline.runtime.engine_loop.requests import ForwardRequest, SequenceOp
from tests.runtime.engine_loop.test_executor import run_all


class Fixed:
    """Every step takes 12 J."""

    name = "fixed"

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def begin(self) -> None:
        self.begun += 1

    def end(self, segments: Sequence[Segment]) -> Energy:
        assert segments
        self.ended += 1
        return Energy(12.0)


def asked(steps: StepExecutor, seq: int, rows: int) -> ForwardRequest:
    request = ForwardRequest(Segment(SeqId(seq), 0, (65,) * rows), lambda _: None)
    steps.submit(request)
    return request


def test_a_shared_batch_is_divided_by_rows() -> None:
    steps = StepExecutor(FakeEngine(), meter=Fixed())
    small, large = asked(steps, 1, 1), asked(steps, 2, 5)
    run_all(steps)
    assert (small.energy.joules, large.energy.joules) == (pytest.approx(2.0), pytest.approx(10.0))
    assert small.energy.measured


def test_a_prompt_in_chunks_has_the_energy_of_all_its_steps() -> None:
    meter = Fixed()
    steps = StepExecutor(FakeEngine(), 8, meter)
    request = asked(steps, 1, 20)
    run_all(steps)
    assert request.energy.joules == pytest.approx(12.0 * meter.ended) and meter.ended == meter.begun == 3


def test_what_was_cancelled_is_nobodys_and_no_meter_means_no_energy() -> None:
    steps = StepExecutor(FakeEngine(), 8, Fixed())
    gone, stays = asked(steps, 1, 20), asked(steps, 2, 4)
    steps.submit(SequenceOp.release(SeqId(1)))
    run_all(steps)
    assert gone.energy.joules == 0.0 and stays.energy.joules == pytest.approx(12.0)
    without = StepExecutor(FakeEngine())
    request = asked(without, 1, 3)
    run_all(without)
    assert request.energy == Energy()
