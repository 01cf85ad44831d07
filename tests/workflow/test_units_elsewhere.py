"""Units across a link: what goes there, what it costs to reach them, and what happens when they are gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lab.scheduling import AblatedScheduler, GivenProfiles, static_map
from paceline.workflow.graph import Ended, Launch, Stage, StagesAdded, UnitsBack, UnitsLost, WorkflowEffect
from paceline.workflow.profiles import OperationProfile, Profiles
from paceline.workflow.scheduler import WorkflowScheduler
from tests.workflow.made import task, unit

HERE = unit("here", ["m", "n"])
AWAY = [replace(unit(f"away {n}", ["m", "n"]), kind="away", zone="cloud", memory="away") for n in range(2)]
NAMES = [each.name for each in AWAY]


def text(**changed: object) -> list[Stage]:
    """Its prompt, and its tokens."""
    same = object()
    read = task(model="m", items=4, operation={"ordered": True}, text=same, **changed)
    written = {"ordered": True, "open_ended": True, "group": 4}
    return [read, task(read, model="n", items=8, operation=written, text=same, **changed)]


def profile(seconds: float) -> OperationProfile:
    return OperationProfile({4: seconds})


def scheduler(reading: tuple[float, float], writing: tuple[float, float]) -> WorkflowScheduler:
    """Seconds of four items here and away."""
    known = {("m/run", "here"): reading[0], ("m/run", "away"): reading[1]}
    known |= {("n/run", "here"): writing[0], ("n/run", "away"): writing[1]}
    return WorkflowScheduler([HERE, *AWAY], GivenProfiles({key: profile(seconds) for key, seconds in known.items()}))


def launched(effects: Sequence[WorkflowEffect]) -> list[tuple[Stage, str]]:
    return [(effect.stage, effect.unit) for effect in effects if isinstance(effect, Launch)]


def test_a_prompt_is_read_where_the_text_is_written_soonest() -> None:
    asked = text()
    assert launched(scheduler((0.1, 0.5), (2.0, 0.2)).on(StagesAdded(0.0, asked))) == [(asked[0], "away 0")]
    asked = text()
    assert launched(scheduler((0.5, 0.1), (0.2, 2.0)).on(StagesAdded(0.0, asked))) == [(asked[0], "here")]


def test_a_long_way_is_worth_it_for_long_texts_alone() -> None:
    machine = scheduler((0.1, 0.1), (0.4, 0.1))
    machine.on(UnitsBack(0.0, NAMES, 2.0, 1e6))
    first, second = text(), text()
    assert launched(machine.on(StagesAdded(0.0, first))) == [(first[0], "here")]
    machine.on(UnitsBack(1.0, NAMES, 0.1, 1e6))
    assert launched(machine.on(StagesAdded(1.0, second))) == [(second[0], "away 0")]


def test_seconds_of_the_way_are_no_part_of_what_a_unit_is_known_to_take() -> None:
    profiles = Profiles()
    away = unit("away", ["m"], zone="cloud", memory="away", latency_s=0.5)
    profiles.learn("m/run", "away", 4, 1.0)
    machine = WorkflowScheduler([away], profiles)
    (launch,) = machine.on(StagesAdded(0.0, [task(items=4)]))
    assert isinstance(launch, Launch)
    machine.on(Ended(1.5, launch.id))
    known = profiles.get("m/run", "away")
    assert known is not None and known.seconds(4) == 1.0


def test_a_text_that_is_to_stay_here_stays_and_what_follows_it_need_not() -> None:
    machine, bound = scheduler((1.0, 0.1), (1.0, 0.1)), text(here=True)
    assert launched(machine.on(StagesAdded(0.0, bound))) == [(bound[0], "here")]
    (after,) = (each for each in machine.on(StagesAdded(0.0, [task(items=4)])) if isinstance(each, Launch))
    assert after.unit.startswith("away")


def test_units_that_are_lost_together_leave_nothing_on_each_other() -> None:
    machine, asked = scheduler((1.0, 0.1), (1.0, 0.1)), text()
    (first,) = machine.on(StagesAdded(0.0, asked))
    assert isinstance(first, Launch) and first.unit == "away 0"
    assert launched(machine.on(UnitsLost(0.05, NAMES))) == [(asked[0], "here")]
    assert machine.on(Ended(0.1, first.id)) == []
    machine.on(UnitsBack(0.2, NAMES))


def test_a_text_begun_where_all_is_lost_goes_on_here() -> None:
    machine, asked = scheduler((1.0, 0.1), (1.0, 0.1)), text()
    (first,) = machine.on(StagesAdded(0.0, asked))
    assert isinstance(first, Launch)
    assert launched(machine.on(Ended(0.1, first.id))) == [(asked[1], "away 0")]
    assert launched(machine.on(UnitsLost(0.2, NAMES))) == [(asked[1], "here")]


def test_a_kind_of_unit_that_was_never_used_is_tried_once_at_a_time() -> None:
    profiles = GivenProfiles({("m/run", "here"): profile(0.1)})
    machine = WorkflowScheduler([HERE, *AWAY], profiles)
    stages = [task(items=4) for _ in range(3)]
    effects = machine.on(StagesAdded(0.0, stages))
    assert launched(effects) == [(stages[0], "away 0"), (stages[1], "here")]
    first = effects[0]
    assert isinstance(first, Launch)
    assert launched(machine.on(Ended(9.0, first.id))) == []  # it was slow
    known = profiles.get("m/run", "away")
    assert known is not None and known.seconds(4) == 9.0


def test_a_map_may_name_a_stage_and_the_first_word_of_units() -> None:
    profiles = GivenProfiles({("m/run", kind): profile(1.0) for kind in ("here", "away")})
    machine = AblatedScheduler([HERE, *AWAY], profiles, static_map({"asked": "away", "m": "here"}))
    asked, other = task(items=4), task(items=4)
    asked.name = "asked"
    assert launched(machine.on(StagesAdded(0.0, [asked, other]))) == [(asked, "away 0"), (other, "here")]
