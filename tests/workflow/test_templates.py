"""Templates: what is expected by hand, damped loops, what workflows have shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.workflow.builder import DAMPING, MAX_DEPTH, PRIOR_WEIGHT, WorkflowTemplate
from paceline.workflow.graph import Added, Dependency, Ended, Launch, SubStageId
from paceline.workflow.profiling import OperationProfile, ProfileStore, ShapePoint
from paceline.workflow.scheduler import WorkflowScheduler
from tests.workflow.made import task, unit


def test_the_future_is_that_of_the_formula() -> None:
    template = WorkflowTemplate(
        "w",
        {
            "plan": ("m/run", 1, {"fetch": 0.5, "rank": 0.2}),
            "fetch": ("m/get", 2, {"rank": 1.0}),
            "rank": ("m/run", 3, {}),
        },
    )
    seconds = {("m/run", 3): 4.0, ("m/get", 2): 10.0}
    future = template.future("plan", lambda operation, items: seconds[operation, items])
    assert future == pytest.approx(DAMPING * (0.5 * (10.0 + DAMPING * 4.0) + 0.2 * 4.0))
    assert template.future("unknown", lambda *_: 1.0) == 0.0 == template.future("rank", lambda *_: 1.0)


def test_loops_end() -> None:
    template = WorkflowTemplate("w", {"look": ("m/run", 1, {"look": 1.0})})
    expected = sum(DAMPING**hop for hop in range(1, MAX_DEPTH + 1))
    assert template.future("look", lambda *_: 1.0) == pytest.approx(expected)


def test_a_template_learns_what_a_decision_led_to_and_how_long_texts_were() -> None:
    template = WorkflowTemplate("w", {"s1": ("m/run", 8, {"s3": 0.5}), "s3": ("m/run", 1, {})})
    profiles = ProfileStore({("m/run", "a"): OperationProfile([ShapePoint(n, float(n), 0.0) for n in (1, 2, 4, 8)])})
    scheduler = WorkflowScheduler([unit("a")], profiles, {"w": template})
    decider = task(1, items=8, decides=True, ordered=True, open_ended=True, workflow="w")
    (launch,) = scheduler.on(Added(0.0, [decider, task(2, 1, workflow="w")]))
    assert isinstance(launch, Launch)
    added = replace(task(3, workflow="w", feeds=(SubStageId(2),)), needs=(Dependency(SubStageId(1), "emitted"),))
    scheduler.on(Added(2.0, [added]))
    effects = scheduler.on(Ended(2.0, launch.id, finished=True, items=2))
    for now in (3.0, 4.0):
        effects = scheduler.on(Ended(now, next(each.id for each in effects if isinstance(each, Launch))))
    chance = (0.5 * PRIOR_WEIGHT + 1.0) / (PRIOR_WEIGHT + 1.0)
    assert template.future("s1", lambda *_: 1.0) == pytest.approx(DAMPING * chance)
    assert template.expected_items("s1") == round((8 * PRIOR_WEIGHT + 2) / (PRIOR_WEIGHT + 1.0))
