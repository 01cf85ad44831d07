"""Owners take turns on the units, whatever each of them asks for; alone, criticality decides as before."""

from __future__ import annotations

from collections import Counter

from lab.scheduling import GivenProfiles
from paceline.workflow.graph import Ended, Launch, Request, Stage, StagesAdded
from paceline.workflow.profiles import OperationProfile
from paceline.workflow.scheduler import WorkflowScheduler
from tests.workflow.made import task, unit

PROFILES = GivenProfiles({("m/run", "a"): OperationProfile({1: 1.0})})


def many(owner: str, count: int, chain: int = 1) -> list[Stage]:
    """Chains of stages."""
    request, found = Request(owner), list[Stage]()
    for _ in range(count):
        last: list[Stage] = []
        for _ in range(chain):
            last = [task(*last, request=request)]
            found += last
    return found


def drive(stages: list[Stage], late: list[Stage], until: int) -> list[str]:
    """Owners of launches on one unit, one second each; `late` come after the first."""
    machine = WorkflowScheduler([unit("a")], PROFILES)
    effects, now, owners = machine.on(StagesAdded(0.0, stages)), 0.0, list[str]()
    while len(owners) < until and (launches := [each for each in effects if isinstance(each, Launch)]):
        (launch,) = launches
        owners.append(launch.stage.request.owner)
        if len(owners) == 1:
            machine.on(StagesAdded(now, late))
        now += 1.0
        effects = machine.on(Ended(now, launch.id))
    return owners


def test_one_owner_s_many_requests_leave_another_every_second_turn() -> None:
    """The first one's are more critical besides: chains of three."""
    owners = drive(many("busy", 12, 3), many("calm", 6), until=13)
    assert Counter(owners[1:]) == {"busy": 6, "calm": 6}


def test_who_comes_late_has_saved_nothing_up() -> None:
    assert Counter(drive(many("early", 8), many("late", 8), until=9)[1:]) == {"early": 4, "late": 4}


def test_alone_the_most_critical_goes_first() -> None:
    machine = WorkflowScheduler([unit("a")], PROFILES)
    short, (first, *_) = many("one", 1), (chain := many("one", 1, 3))
    (launch,) = machine.on(StagesAdded(0.0, [*short, *chain]))
    assert isinstance(launch, Launch) and launch.stage is first
