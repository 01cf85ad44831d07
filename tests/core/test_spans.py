"""Plans of spans: whole, within memory, and as fast as any."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.runtime.stages.members import ModelSize, Span, StageSpeed, describe_plan, plan_spans

TIMES = st.integers(1, 9).map(float)
SPEEDS = st.builds(StageSpeed, TIMES, TIMES, st.none() | st.integers(0, 60))
SIZES = st.builds(ModelSize, st.integers(1, 7), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))


def all_plans(model: ModelSize, stages: list[StageSpeed]) -> list[list[tuple[float, int]]]:
    """(seconds, bytes) of each stage in every plan."""
    plans = []
    for cuts in itertools.combinations(range(1, model.layers), len(stages) - 1):
        edges = [0, *cuts, model.layers]
        plan = []
        for number, (stage, first, stop) in enumerate(zip(stages, edges, edges[1:], strict=False)):
            last = number == len(stages) - 1
            seconds = (stop - first) * stage.layer_s + (stage.head_s if last else 0.0)
            size = (stop - first) * model.layer_bytes
            size += (model.embedding_bytes if number == 0 else 0) + (model.head_bytes if last else 0)
            plan.append((seconds, size))
        plans.append(plan)
    return plans


@given(SIZES, st.lists(SPEEDS, min_size=1, max_size=4))
def test_the_slowest_stage_is_as_fast_as_in_any_plan_that_fits(model: ModelSize, stages: list[StageSpeed]) -> None:
    fitting = [
        plan
        for plan in (all_plans(model, stages) if len(stages) <= model.layers else [])
        if all(s.free_bytes is None or size <= s.free_bytes for s, (_, size) in zip(stages, plan, strict=True))
    ]
    if not fitting:
        with pytest.raises(ConfigError):
            plan_spans(model, stages)
        return
    spans = plan_spans(model, stages)
    assert [span.first for span in spans] == [0, *(span.stop for span in spans[:-1])] and spans[-1].stop == model.layers
    best = min((max(s for s, _ in plan), sum(s for s, _ in plan)) for plan in fitting)
    assert (max(span.seconds for span in spans), sum(span.seconds for span in spans)) == best
    for stage, span in zip(stages, spans, strict=True):
        assert stage.free_bytes is None or span.num_bytes <= stage.free_bytes


def test_a_plan_can_be_read() -> None:
    (line,) = describe_plan([Span(0, 6, 0.0123, 3 << 20)])
    assert line == "stage 1: layers 0:6, 12.30 ms a row, 3 MiB of weights"


def test_what_does_not_fit_is_said_with_numbers() -> None:
    with pytest.raises(ConfigError, match="take 12 MiB and do not fit: 2 stages have 8 MiB"):
        plan_spans(ModelSize(6, 2 << 20), [StageSpeed(1.0, 0.0, 4 << 20)] * 2)
