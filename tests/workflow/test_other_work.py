"""Work that nobody schedules, beside launches: it slows them, is learnt of, and never holds them back."""

from __future__ import annotations

import pytest

from paceline.workflow.graph import Added, Ended, Launch, OtherBegan, OtherEnded
from paceline.workflow.profiling import LearningProfiles, OperationProfile, ShapePoint
from paceline.workflow.scheduler import WorkflowScheduler
from tests.workflow.made import RISING, task, unit

RUN = ("m/run", "cpu")


def profiles() -> LearningProfiles:
    return LearningProfiles({RUN: OperationProfile([ShapePoint(1, 4.0, 50.0)], RISING)})


def launched(scheduler: WorkflowScheduler, now: float, number: int) -> Launch:
    [launch] = scheduler.on(Added(now, [task(number)]))
    assert isinstance(launch, Launch)
    return launch


def test_a_launch_is_predicted_to_take_longer_while_other_work_asks_for_bandwidth() -> None:
    scheduler = WorkflowScheduler([unit("cpu")], profiles())
    launch = launched(scheduler, 0.0, 1)
    [running] = scheduler.activity
    alone = scheduler.activity.end(running)
    scheduler.on(OtherBegan(0.0, 7, "cpu", "m/run", 1))
    assert scheduler.activity.used("device") == 100.0
    assert scheduler.activity.end(running) > alone * 1.3
    scheduler.on(OtherEnded(2.0, 7))
    assert scheduler.activity.used("device") == 50.0
    assert alone < scheduler.activity.end(running) < alone * 1.5
    scheduler.on(Ended(8.0, launch.id))
    assert not scheduler.activity


def test_a_launch_beside_other_work_tells_of_slowdown_and_not_of_its_own_seconds() -> None:
    store = profiles()
    scheduler = WorkflowScheduler([unit("cpu")], store)
    launch = launched(scheduler, 0.0, 1)
    scheduler.on(OtherBegan(0.0, 7, "cpu", "m/run", 1))
    scheduler.on(Ended(40.0, launch.id))
    found = store.get(*RUN)
    assert found is not None and found.seconds(1) == 4.0
    assert list(store.samples(*RUN)) == [(100.0, 10.0)]


@pytest.mark.parametrize(("items", "shapes"), [(None, (1, 3)), (2, (1, 2)), (0, (1,))])
def test_what_other_work_takes_alone_is_learnt(items: int | None, shapes: tuple[int, ...]) -> None:
    store = profiles()
    scheduler = WorkflowScheduler([unit("cpu")], store)
    scheduler.on(OtherBegan(0.0, 7, "cpu", "m/run", 3))
    scheduler.on(OtherEnded(6.0, 7, items))
    scheduler.on(OtherEnded(9.0, 7))  # once is enough
    found = store.get(*RUN)
    assert found is not None and found.shapes == shapes
    assert not items or found.seconds(items) == 6.0


def test_other_work_neither_holds_a_launch_back_nor_counts_as_one() -> None:
    scheduler = WorkflowScheduler([unit("cpu")], profiles())
    scheduler.on(OtherBegan(0.0, 7, "cpu", "m/run", 1))
    assert not scheduler.activity
    assert launched(scheduler, 1.0, 1).unit == "cpu"
