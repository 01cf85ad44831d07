"""Plans of spans: whole, within memory, and as fast as any."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.runtime.stages.members import plan_spans, span_cost
from paceline.wire.stages.messages import StageCost


@st.composite
def models(draw: st.DrawFn) -> tuple[int, list[StageCost]]:
    """Layers, and what they cost at each stage; their sizes are the same everywhere."""
    sizes = [draw(st.integers(0, 9)) for _ in range(3)]
    times = st.integers(1, 9).map(float)
    costs = st.builds(StageCost, times, times, *map(st.just, sizes), st.integers(0, 60) | st.just(1 << 40))
    return draw(st.integers(1, 7)), draw(st.lists(costs, min_size=1, max_size=4))


def all_plans(layers: int, costs: list[StageCost]) -> list[list[tuple[float, int]]]:
    """(seconds, bytes) of each stage in every plan that fits."""
    plans = []
    for cuts in itertools.combinations(range(1, layers), len(costs) - 1):
        edges = [0, *cuts, layers]
        plan = []
        for number, (cost, first, stop) in enumerate(zip(costs, edges, edges[1:], strict=False)):
            last = number == len(costs) - 1
            seconds = (stop - first) * cost.layer_s + (cost.head_s if last else 0.0)
            size = (stop - first) * cost.layer_bytes
            size += (cost.embedding_bytes if number == 0 else 0) + (cost.head_bytes if last else 0)
            plan.append((seconds, size))
        if all(size <= cost.free_bytes for cost, (_, size) in zip(costs, plan, strict=True)):
            plans.append(plan)
    return plans


@given(models())
def test_the_slowest_stage_is_as_fast_as_in_any_plan_that_fits(model: tuple[int, list[StageCost]]) -> None:
    layers, costs = model
    fitting = all_plans(*model) if len(costs) <= layers else []
    if not fitting:
        with pytest.raises(ConfigError):
            plan_spans(layers, costs)
        return
    spans = plan_spans(layers, costs)
    assert [first for first, _ in spans] == [0, *(stop for _, stop in spans[:-1])] and spans[-1][1] == layers
    best = min((max(s for s, _ in plan), sum(s for s, _ in plan)) for plan in fitting)
    found = [span_cost(cost, *span, layers) for cost, span in zip(costs, spans, strict=True)]
    assert (max(seconds for seconds, _ in found), sum(seconds for seconds, _ in found)) == best
    assert found in fitting


def test_what_does_not_fit_is_said_with_numbers() -> None:
    with pytest.raises(ConfigError, match="take 12 MiB and do not fit: 2 stages have 8 MiB"):
        plan_spans(6, [StageCost(1.0, 0.0, 2 << 20, 0, 0, 4 << 20)] * 2)
