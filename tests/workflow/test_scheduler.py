"""The scheduler of workflows, turns of owners, and units elsewhere."""

from __future__ import annotations

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from lab.scheduling import AblatedScheduler, Ablation, GivenProfiles, PaddedProfile, static_map
from lab.simulation.workflows import Ran, Truth, WorkflowSimulation
from paceline.workflow.flows import FLOWS, JOBS, WorkflowName, WorkflowSizes, WorkflowStages
from paceline.workflow.graph import (
    Cancel,
    Ended,
    Failed,
    Launch,
    Left,
    Outcome,
    ProcessingUnit,
    Request,
    Stage,
    StagesAdded,
    StagesDone,
    UnitsBack,
    UnitsLost,
    Unrunnable,
    WorkflowEffect,
)
from paceline.workflow.profiles import Key, OperationProfile, Profiles
from paceline.workflow.scheduler import WorkflowScheduler
from tests.workflow.made import REQUEST, RISING, Known, ordered, seconds_of, simulate, single_launch_graph, task, unit

ABLATIONS = [
    Ablation(),
    Ablation(partition=False),
    Ablation(criticality=False),
    Ablation(look_ahead=False),
]


def fuzzed(seed: int) -> tuple[list[Stage], list[ProcessingUnit], dict[Key, Truth], Known]:
    """Random graph with everything that a stage can be, units in all zones, contention."""
    rng = random.Random(seed)
    models = ["a", "b", "c"]
    pool = [unit("cpu", models)]
    pool += [unit(name, [m for m in models if rng.random() < 0.7]) for name in ("gpu", "npu")]
    pool.append(unit("far", models, zone="cloud", memory="far", latency_s=0.1, bytes_per_s=1e4))
    stages: list[Stage] = []
    lengths: dict[Stage, int] = {}
    for _ in range(1, rng.randint(4, 14)):
        open_ended = rng.random() < 0.3
        stage = task(
            *(each for each in stages[-6:] if rng.random() < 0.3),
            model=rng.choice(models),
            items=rng.randint(1, 24),
            operation={
                "ordered": open_ended or rng.random() < 0.3,
                "open_ended": open_ended,
                "group": rng.choice([None, 4, 16]),
                "item_bytes": rng.uniform(0.0, 1e3),
            },
            private=rng.random() < 0.2,
        )
        stages.append(stage)
        lengths[stage] = rng.randint(1, 2 * stage.items)
    truth = {
        (f"{model}/run", each.kind): Truth(
            rng.choice((OperationProfile, PaddedProfile))({n: rng.uniform(0.05, 0.3) * n**0.7 for n in (1, 4, 16)}),
            {n: rng.uniform(1.0, 60.0) for n in (1, 4, 16)},
            RISING,
        )
        for model in models
        for each in pool
    }
    return stages, pool, truth, Known(lengths)


def check_rules(stages: Sequence[Stage], simulation: WorkflowSimulation, script: Known) -> None:
    """Precedence, one launch a unit, each item once, private inputs on the device."""
    spans: dict[Stage, list[Ran]] = defaultdict(list)
    for ran in simulation.ran:
        spans[ran.stage].append(ran)
        assert not ran.private or ran.launch.unit != "far"
    for stage in stages:
        first = min(ran.began for ran in spans[stage])
        assert all(ran.ended <= first + 1e-9 for need in stage.needs for ran in spans[need.on])
        taken = sorted((ran.launch.first, ran.launch.count) for ran in spans[stage])
        assert [at for at, _ in taken] == [sum(count for _, count in taken[:i]) for i in range(len(taken))]
        items = sum(count for _, count in taken)
        assert items == stage.items or (stage.operation.open_ended and items >= script.lengths[stage])
    for name in {ran.launch.unit for ran in simulation.ran}:
        held = sorted((ran.began, ran.ended) for ran in simulation.ran if ran.launch.unit == name)
        assert all(ended <= began + 1e-9 for (_, ended), (began, _) in pairwise(held))


@pytest.mark.parametrize("ablation", ABLATIONS, ids=["none", "partition", "criticality", "look-ahead"])
def test_every_workflow_ends_and_no_rule_is_broken(ablation: Ablation) -> None:
    """Fuzzed graphs; the simulation itself raises where the scheduler stands still or uses a unit wrongly."""
    for seed in range(16):
        stages, pool, truth, script = fuzzed(seed)
        check_rules(stages, simulate(stages, pool, truth, ablation, script), script)


def test_the_same_events_give_the_same_effects() -> None:
    def run(seed: int) -> list[tuple[object, ...]]:
        stages, pool, truth, script = fuzzed(seed)
        ran = simulate(stages, pool, truth, None, script).ran
        return [
            (each.stage.progress.number, each.launch.unit, each.launch.first, each.began, each.ended) for each in ran
        ]

    for seed in range(3):
        assert run(seed) == run(seed)


def shortest(stages: Sequence[Stage], pool: Sequence[ProcessingUnit], profiles: Profiles, most: float) -> float:
    """Least makespan of all schedules without idle time that is not needed, by trying them all."""
    seconds = {(stage, each.name): seconds_of(profiles, stage, each) for stage in stages for each in pool}
    best = most

    def descend(ends: dict[Stage, float], free: dict[str, float], makespan: float) -> None:
        nonlocal best
        if makespan >= best:
            return
        if len(ends) == len(stages):
            best = makespan
            return
        for stage in stages:
            if stage in ends or any(need.on not in ends for need in stage.needs):
                continue
            ready = max((ends[need.on] for need in stage.needs), default=0.0)
            for each in pool:
                end = max(ready, free[each.name]) + seconds[stage, each.name]
                descend(ends | {stage: end}, free | {each.name: end}, max(makespan, end))

    descend({}, {each.name: 0.0 for each in pool}, 0.0)
    return best


def test_small_graphs_end_within_5_percent_of_the_best_schedule_on_average() -> None:
    """Without criticality within 10 %, without looking ahead within 12 %."""
    ratios = []
    for seed in range(40):
        stages, pool, profiles = single_launch_graph(seed, 5, 2 + seed % 2)
        taken = simulate(stages, pool, profiles).now
        ratios.append(taken / shortest(stages, pool, profiles, taken + 1e-6))
    assert min(ratios) >= 1.0 - 1e-5
    assert statistics.fmean(ratios) <= 1.045 and max(ratios) <= 1.28, "as it is: wrong ties and ranks are worse"


def test_a_busy_unit_that_ends_work_sooner_is_waited_for_and_idle_ones_help_where_that_is_sooner() -> None:
    pool = [unit("slow"), unit("fast")]
    profiles = GivenProfiles(
        {("m/run", "fast"): OperationProfile({1: 1.0}), ("m/run", "slow"): OperationProfile({1: 5.0})}
    )
    assert {ran.launch.unit for ran in simulate([ordered(), ordered()], pool, profiles).ran} == {"fast"}
    assert simulate([ordered(), ordered()], pool, profiles, Ablation(look_ahead=False)).now == 5.0
    shared = simulate([task(items=12)], pool, profiles)
    assert shared.now == 10.0 and sum(ran.launch.unit == "slow" for ran in shared.ran) == 2
    assert simulate([task(items=4)], pool, profiles).now == 4.0


class Agents:
    """Truth of the three workflows: sub-questions after each 8 tokens, two pages, one more after the second look."""

    def __init__(self, stages: WorkflowStages) -> None:
        self.stages = stages
        self.added = 0

    def items(self, stage: Stage, first: int, count: int) -> int:
        return min(count, 17 - first) if stage.operation.open_ended else count

    def after(self, stage: Stage, done: int) -> Outcome:
        rewrite, plan, look = (
            text and text.write for text in (self.stages.rewrite, self.stages.plan, self.stages.look)
        )
        added: list[Stage] = []
        if stage is rewrite and done in (8, 16):
            added = self.stages.search().stages
        elif (stage is plan and done in (8, 16)) or (stage is look and done == 8):
            added = self.stages.page(stage, 5, planned=stage is plan).stages
        self.added += bool(added)
        return Outcome(added=added, finished=stage.operation.open_ended and done >= 17)


@pytest.mark.parametrize(("name", "decisions"), [("fast", 0), ("advanced", 2), ("research", 5), ("long", 2)])
def test_the_workflows_run_private_documents_never_leave_the_device(name: WorkflowName, decisions: int) -> None:
    models = ["embed", "rerank", "agent", "chat", "host"]
    pool = [
        unit("gpu", models),
        unit("npu", models),
        unit("far", models, zone="cloud", memory="far", latency_s=0.01),
        unit("web", ["web"], zone="cloud", memory="web"),
    ]
    phases = ["host/search", "web/fetch", "embed/encode", "rerank/score", "agent/job"]
    phases += [f"{model}/{phase}" for model in ("agent", "chat") for phase in ("prefill", "decode")]
    slow, quick = ({n: 0.01 * n**0.8 for n in (1, 4, 16, 64)}, {n: 0.0002 * n for n in (1, 4, 16, 64)})
    known = {(p, u.kind): OperationProfile(quick if u.name == "far" else slow) for p in phases for u in pool}
    stages = WorkflowStages(FLOWS[name], WorkflowSizes(question=20, chunks=9))
    first, script = stages.begin(), Agents(stages)
    first += stages.search(rewritten=False).stages if stages.rewrite is not None else []
    truth = {key: Truth(profile, {1: 20.0}, RISING) for key, profile in known.items()}
    simulation = WorkflowSimulation(WorkflowScheduler(pool, GivenProfiles(known)), pool, truth, script)
    simulation.run(first)
    assert script.added == decisions
    units: dict[str, set[str]] = defaultdict(set)
    texts: dict[object, set[bool]] = defaultdict(set)
    for ran in simulation.ran:
        units[ran.stage.name].add(ran.launch.unit)
        assert ran.launch.unit in ("gpu", "npu") or not ran.private
        if ran.stage.text is not None:
            texts[ran.stage.text].add(ran.launch.unit == "far")
    assert "far" not in units["search"] | units["answer.prefill"] | units["answer.decode"]
    if name != "fast":
        assert "far" in units["embed question"] | units["rewrite"], "questions are not private"
    assert all(len(places) == 1 for places in texts.values()), "a text's state lies in one memory"
    if name == "long":
        assert sum(ran.launch.count for ran in simulation.ran if ran.stage.name == "jobs") == 3 * JOBS, "each is done"
    if name == "research":
        assert units["fetch"] == {"web"}, "requests to the web, of the second look too, hold nothing private"


def test_a_lost_units_launch_is_repeated_elsewhere_and_its_late_end_means_nothing() -> None:
    profiles = GivenProfiles({("m/run", "a"): OperationProfile({4: 1.0}), ("m/run", "b"): OperationProfile({4: 9.0})})
    scheduler = WorkflowScheduler([unit("a"), unit("b")], profiles)
    (first,) = scheduler.on(StagesAdded(0.0, [task(items=4)]))
    assert isinstance(first, Launch) and first.unit == "a"
    (second,) = scheduler.on(UnitsLost(0.5, ["a"]))
    assert isinstance(second, Launch) and (second.unit, second.first, second.count) == ("b", 0, 4)
    assert scheduler.on(Ended(1.0, first.id)) == []
    assert scheduler.on(UnitsBack(2.0, ["a"])) == []
    assert scheduler.on(Ended(9.5, second.id)) == [StagesDone(REQUEST)]


def test_a_launch_that_fails_is_tried_again_then_elsewhere_then_refused() -> None:
    scheduler, stage = WorkflowScheduler([unit("a"), unit("b")], Profiles()), task()
    effects = scheduler.on(StagesAdded(0.0, [stage]))
    tried = []
    while isinstance(effects[0], Launch):
        tried.append(effects[0].unit)
        effects = scheduler.on(Failed(float(len(tried)), effects[0].id))
    assert tried == ["a", "a", "b", "b"] and effects == [Unrunnable(stage)]


def test_what_an_outcome_adds_keeps_its_workflow_open_and_what_it_drops_is_not_done() -> None:
    scheduler, first, other = WorkflowScheduler([unit("a")], Profiles()), task(), task()
    (launch,) = scheduler.on(StagesAdded(0.0, [first, other]))
    assert isinstance(launch, Launch) and launch.stage is first
    added = task(first)
    (again,) = scheduler.on(Ended(1.0, launch.id, Outcome(added=[added], dropped=[other])))
    assert isinstance(again, Launch) and again.stage is added
    assert scheduler.on(Ended(2.0, again.id)) == [StagesDone(REQUEST)]


def test_work_that_nobody_waits_for_is_cancelled() -> None:
    scheduler, gone = WorkflowScheduler([unit("a")], Profiles()), Request()
    first = task(request=gone)
    (launch,) = scheduler.on(StagesAdded(0.0, [first, task(first, request=gone)]))
    assert isinstance(launch, Launch)
    assert scheduler.on(Left(0.5, gone)) == [Cancel(launch.id), StagesDone(gone)]
    assert scheduler.on(Failed(0.6, launch.id)) == []
    (again,) = scheduler.on(StagesAdded(1.0, [task()]))
    assert isinstance(again, Launch), "the unit is free again"


# ---- owners take turns on the units, whatever each of them asks for; alone, criticality decides as before -----------
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


# ---- units across a link --------------------------------------------------------------------------------------------
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
