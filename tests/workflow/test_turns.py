"""Owners take turns on the units, whatever each of them asks for; alone, criticality decides as before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from paceline.workflow.graph import Added, Ended, Launch, SubStage
from paceline.workflow.profiling import OperationProfile, ProfileStore, ShapePoint
from paceline.workflow.scheduler import WorkflowScheduler
from tests.workflow.made import task, unit

PROFILES = ProfileStore({("m/run", "a"): OperationProfile([ShapePoint(1, 1.0, 0.0)])})


def owned(owner: str, number: int, *after: int) -> SubStage:
    return replace(task(number, *after), owner=owner, request=len(owner))


def drive(nodes: list[SubStage], late: list[SubStage], until: int) -> list[str]:
    """Owners of launches on one unit, one second each; `late` come after the first."""
    machine = WorkflowScheduler([unit("a")], PROFILES)
    effects, now, owners = machine.on(Added(0.0, nodes)), 0.0, list[str]()
    by_id = {node.id: node for node in (*nodes, *late)}
    while len(owners) < until and (launches := [each for each in effects if isinstance(each, Launch)]):
        (launch,) = launches
        owners.append(by_id[launch.sub_stage].owner)
        if len(owners) == 1:
            machine.on(Added(now, late))
        now += 1.0
        effects = machine.on(Ended(now, launch.id))
    return owners


def test_one_owner_s_many_requests_leave_another_every_second_turn() -> None:
    """The first one's are more critical besides: chains of three."""
    many = [owned("busy", 3 * n + k, *([3 * n + k - 1] if k > 1 else [])) for n in range(12) for k in (1, 2, 3)]
    few = [owned("calm", 100 + n) for n in range(6)]
    owners = drive(many, few, until=13)
    assert Counter(owners[1:]) == {"busy": 6, "calm": 6}


def test_who_comes_late_has_saved_nothing_up() -> None:
    early = [owned("early", n) for n in range(1, 9)]
    late = [owned("late", n) for n in range(11, 19)]
    machine_owners = drive(early, late, until=9)
    assert Counter(machine_owners[1:]) == {"early": 4, "late": 4}


def test_alone_the_most_critical_goes_first() -> None:
    chain = [owned("one", 1), owned("one", 2), owned("one", 3, 2), owned("one", 4, 3)]
    machine = WorkflowScheduler([unit("a")], PROFILES)
    (launch,) = machine.on(Added(0.0, chain))
    assert isinstance(launch, Launch) and launch.sub_stage == 2
