"""Units across a link: what goes there, what it costs to reach them, and what happens when they are gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.workflow.graph import Added, Ended, Launch, SubStage, UnitBack, UnitLost, UnitMoved, WorkflowEffect
from paceline.workflow.placement import SchedulingPolicy
from paceline.workflow.profiling import OperationProfile, ProfileStore, ShapePoint
from paceline.workflow.scheduler import WorkflowScheduler
from tests.workflow.made import task, unit

HERE = unit("here", ["m", "n"])
AWAY = [replace(unit(f"away {n}", ["m", "n"]), kind="away", zone="cloud", memory="away") for n in range(2)]
TEXT = [
    task(1, model="m", items=4, ordered=True, context="text"),
    task(2, 1, model="n", items=8, ordered=True, open_ended=True, group=4, context="text"),
]


def profile(seconds: float) -> OperationProfile:
    return OperationProfile([ShapePoint(4, seconds, 0.0)])


def scheduler(reading: tuple[float, float], writing: tuple[float, float]) -> WorkflowScheduler:
    """Seconds of four items here and away."""
    known = {("m/run", "here"): reading[0], ("m/run", "away"): reading[1]}
    known |= {("n/run", "here"): writing[0], ("n/run", "away"): writing[1]}
    profiles = ProfileStore({key: profile(seconds) for key, seconds in known.items()})
    return WorkflowScheduler([HERE, *AWAY], profiles)


def launched(effects: Sequence[WorkflowEffect]) -> list[tuple[int, str]]:
    return [(effect.sub_stage, effect.unit) for effect in effects if isinstance(effect, Launch)]


def test_a_prompt_is_read_where_the_text_is_written_soonest() -> None:
    assert launched(scheduler((0.1, 0.5), (2.0, 0.2)).on(Added(0.0, TEXT))) == [(1, "away 0")]
    assert launched(scheduler((0.5, 0.1), (0.2, 2.0)).on(Added(0.0, TEXT))) == [(1, "here")]


def test_a_long_way_is_worth_it_for_long_texts_alone() -> None:
    machine = scheduler((0.1, 0.1), (0.4, 0.1))
    for each in AWAY:
        machine.on(UnitMoved(0.0, each.name, 2.0, 1e6))
    assert launched(machine.on(Added(0.0, TEXT))) == [(1, "here")]
    for each in AWAY:
        machine.on(UnitMoved(1.0, each.name, 0.1, 1e6))
    another = [task(3, model="m", items=4, ordered=True, context="b"), *_written(4, 3, "b")]
    assert launched(machine.on(Added(1.0, another))) == [(3, "away 0")]


def test_seconds_of_the_way_are_no_part_of_what_a_unit_is_known_to_take() -> None:
    profiles = ProfileStore()
    away = unit("away", ["m"], zone="cloud", memory="away", latency_s=0.5)
    profiles.learn("m/run", "away", 4, 1.0)
    machine = WorkflowScheduler([away], profiles)
    (launch,) = machine.on(Added(0.0, [task(1, model="m", items=4)]))
    assert isinstance(launch, Launch)
    machine.on(Ended(1.5, launch.id))
    known = profiles.get("m/run", "away")
    assert known is not None and known.seconds(4) == 1.0


def test_a_text_that_is_to_stay_here_stays_and_what_follows_it_need_not() -> None:
    machine = scheduler((1.0, 0.1), (1.0, 0.1))
    bound = [_here(node) for node in TEXT]
    assert launched(machine.on(Added(0.0, bound))) == [(1, "here")]
    (after,) = (each for each in machine.on(Added(0.0, [task(3, model="m", items=4)])) if isinstance(each, Launch))
    assert after.unit.startswith("away")


def test_units_that_are_lost_together_leave_nothing_on_each_other() -> None:
    machine = scheduler((1.0, 0.1), (1.0, 0.1))
    (first,) = machine.on(Added(0.0, TEXT))
    assert isinstance(first, Launch) and first.unit == "away 0"
    assert launched(machine.on(UnitLost(0.05, "away 0", ["away 1"]))) == [(1, "here")]
    assert machine.on(Ended(0.1, first.id)) == []
    machine.on(UnitBack(0.2, "away 0"))


def test_a_text_begun_where_all_is_lost_goes_on_here() -> None:
    machine = scheduler((1.0, 0.1), (1.0, 0.1))
    (first,) = machine.on(Added(0.0, TEXT))
    assert isinstance(first, Launch)
    assert launched(machine.on(Ended(0.1, first.id))) == [(2, "away 0")]
    assert launched(machine.on(UnitLost(0.2, "away 0", ["away 1"]))) == [(2, "here")]


def test_a_kind_of_unit_that_was_never_used_is_tried_once_at_a_time() -> None:
    machine = WorkflowScheduler([HERE, *AWAY], ProfileStore({("m/run", "here"): profile(0.1)}))
    effects = machine.on(Added(0.0, [task(number, model="m", items=4) for number in (1, 2, 3)]))
    assert launched(effects) == [(1, "away 0"), (2, "here")]
    first = effects[0]
    assert isinstance(first, Launch)
    assert launched(machine.on(Ended(9.0, first.id))) == []  # it was slow
    known = machine._profiles.get("m/run", "away")
    assert known is not None and known.seconds(4) == 9.0


def _written(number: int, after: int, context: str) -> list[SubStage]:
    return [task(number, after, model="n", items=8, ordered=True, open_ended=True, group=4, context=context)]


def _here(node: SubStage) -> SubStage:
    return replace(node, here=True)


def test_a_map_may_name_a_stage_and_the_first_word_of_units() -> None:
    profiles = ProfileStore({("m/run", kind): profile(1.0) for kind in ("here", "away")})
    policy = SchedulingPolicy(static_map={"asked": "away", "m": "here"})
    machine = WorkflowScheduler([HERE, *AWAY], profiles, policy=policy)
    nodes = [replace(task(1, model="m", items=4), stage="asked"), task(2, model="m", items=4)]
    assert launched(machine.on(Added(0.0, nodes))) == [(1, "away 0"), (2, "here")]
