"""The scheduler against the oracles of specs 8: rules, brute force, a list scheduler, privacy, standing still."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest

from lab.simulation.workflows import Ran, WorkflowSimulation
from paceline.workflow.builder import WORKFLOWS, WorkflowBuilder, WorkflowName, WorkflowSizes
from paceline.workflow.graph import (
    Added,
    Cancel,
    Dropped,
    Ended,
    Failed,
    Launch,
    ProcessingUnit,
    RequestDone,
    SubStage,
    SubStageId,
    UnitBack,
    UnitLost,
    Unrunnable,
)
from paceline.workflow.placement import SchedulingPolicy
from paceline.workflow.profiling import OperationProfile, ProfileStore, ShapePoint
from paceline.workflow.scheduler import WorkflowScheduler
from tests.workflow.made import PLAIN, RISING, Known, simulate, single_launch_graph, task, unit

POLICIES = [
    SchedulingPolicy(),
    PLAIN,
    SchedulingPolicy(partition=False),
    SchedulingPolicy(criticality=False),
    SchedulingPolicy(look_ahead=False),
    SchedulingPolicy(soft_limit=50.0),
]


def fuzzed(seed: int) -> tuple[list[SubStage], list[ProcessingUnit], ProfileStore, Known]:
    """Random graph with everything that a sub-stage can be, units in all zones, contention."""
    rng = random.Random(seed)
    models = ["a", "b", "c"]
    pool = [unit("cpu", models)]
    pool += [unit(name, [m for m in models if rng.random() < 0.7]) for name in ("gpu", "npu")]
    pool.append(unit("far", models, zone="cloud", memory="far", latency_s=0.1, bytes_per_s=1e4))
    nodes, lengths = [], {}
    for i in range(1, rng.randint(4, 14)):
        open_ended = rng.random() < 0.3
        node = task(
            i,
            *(j for j in range(max(1, i - 6), i) if rng.random() < 0.3),
            model=rng.choice(models),
            items=rng.randint(1, 24),
            ordered=open_ended or rng.random() < 0.3,
            open_ended=open_ended,
            group=rng.choice([None, 4, 16]),
            private=rng.random() < 0.2,
            item_bytes=rng.uniform(0.0, 1e3),
        )
        nodes.append(node)
        lengths[node.id] = rng.randint(1, 2 * node.items)
    profiles = {
        (f"{model}/run", each.kind): OperationProfile(
            [ShapePoint(n, rng.uniform(0.05, 0.3) * n**0.7, rng.uniform(1.0, 60.0)) for n in (1, 4, 16)],
            RISING,
            padded=rng.random() < 0.5,
        )
        for model in models
        for each in pool
    }
    return nodes, pool, ProfileStore(profiles), Known(lengths)


def check_rules(nodes: Sequence[SubStage], simulation: WorkflowSimulation, script: Known) -> None:
    """Precedence, one launch a unit, each item once, private inputs on the device."""
    spans: dict[SubStageId, list[Ran]] = defaultdict(list)
    for ran in simulation.ran:
        spans[ran.sub_stage.id].append(ran)
        assert not ran.private or ran.launch.unit != "far"
    for node in nodes:
        first = min(ran.began for ran in spans[node.id])
        assert all(ran.ended <= first + 1e-9 for need in node.needs for ran in spans[need.on])
        taken = sorted((ran.launch.first, ran.launch.count) for ran in spans[node.id])
        assert [at for at, _ in taken] == [sum(count for _, count in taken[:i]) for i in range(len(taken))]
        items = sum(count for _, count in taken)
        assert items == node.items or (node.open_ended and items >= script.lengths[node.id])
    for name in {ran.launch.unit for ran in simulation.ran}:
        held = sorted((ran.began, ran.ended) for ran in simulation.ran if ran.launch.unit == name)
        assert all(ended <= began + 1e-9 for (_, ended), (began, _) in pairwise(held))


@pytest.mark.parametrize("policy", POLICIES, ids=["all", "plain", "whole", "in order", "no look-ahead", "soft limit"])
def test_every_workflow_ends_and_no_rule_is_broken(policy: SchedulingPolicy) -> None:
    """Fuzzed graphs; the simulation itself raises where the scheduler stands still or uses a unit wrongly."""
    for seed in range(12):
        nodes, pool, profiles, script = fuzzed(seed)
        simulation = simulate(nodes, pool, profiles, policy, script)
        check_rules(nodes, simulation, script)
        if policy.soft_limit < 100.0:
            assert all(
                ran.launch.forced or ran.bandwidth <= policy.soft_limit + 1e-9
                for ran in simulation.ran
                if ran.launch.unit != "far"
            )


def test_the_same_events_give_the_same_effects() -> None:
    for seed in range(3):
        runs = []
        for _ in range(2):
            nodes, pool, profiles, script = fuzzed(seed)
            runs.append(
                [(ran.launch, ran.began, ran.ended) for ran in simulate(nodes, pool, profiles, None, script).ran]
            )
        assert runs[0] == runs[1]


def shortest(nodes: Sequence[SubStage], pool: Sequence[ProcessingUnit], profiles: ProfileStore, most: float) -> float:
    """Least makespan of all schedules without idle time that is not needed, by trying them all."""
    seconds = {(n.id, u.name): profiles.get(n.operation, u.kind).seconds(1) for n in nodes for u in pool}  # type: ignore[union-attr]  # all are there
    best = most

    def descend(ends: dict[SubStageId, float], free: dict[str, float], makespan: float) -> None:
        nonlocal best
        if makespan >= best:
            return
        if len(ends) == len(nodes):
            best = makespan
            return
        for node in nodes:
            if node.id in ends or any(need.on not in ends for need in node.needs):
                continue
            ready = max((ends[need.on] for need in node.needs), default=0.0)
            for each in pool:
                end = max(ready, free[each.name]) + seconds[node.id, each.name]
                descend(ends | {node.id: end}, free | {each.name: end}, max(makespan, end))

    descend({}, {each.name: 0.0 for each in pool}, 0.0)
    return best


def test_small_graphs_end_within_1_2_of_the_best_schedule_on_average() -> None:
    ratios = []
    for seed in range(40):
        nodes, pool, profiles = single_launch_graph(seed, 5, 2 + seed % 2)
        taken = simulate(nodes, pool, profiles, PLAIN).now
        best = shortest(nodes, pool, profiles, taken + 1e-6)
        ratios.append(taken / best)
    assert min(ratios) >= 1.0 - 1e-5
    assert statistics.fmean(ratios) <= 1.2 and max(ratios) <= 2.0


def list_schedule(
    nodes: Sequence[SubStage], pool: Sequence[ProcessingUnit], profiles: ProfileStore
) -> list[tuple[float, int, str]]:
    """A HEFT-like list scheduler, written apart: upward ranks over shortest-first durations; whenever a task ends,
    ready tasks in order of rank are planned on the unit that ends them soonest, and begin there if it is idle."""
    seconds = {(n.id, u.name): profiles.get(n.operation, u.kind).seconds(1) for n in nodes for u in pool}  # type: ignore[union-attr]  # all are there
    ends: dict[SubStageId, float] = {}
    begun: list[tuple[float, int, str]] = []
    free = {each.name: 0.0 for each in pool}
    now = 0.0
    while len(begun) < len(nodes):
        unfinished = [n for n in nodes if ends.get(n.id, 1e9) > now + 1e-9]
        running = {number: name for at, number, name in begun if ends[SubStageId(number)] > now + 1e-9}
        load = {each.name: 0.0 for each in pool}
        own: dict[SubStageId, float] = {}
        for n in sorted(unfinished, key=lambda n: (min(seconds[n.id, u.name] for u in pool), n.id)):
            name = min(load, key=lambda name: load[name] + seconds[n.id, name])
            load[name] += seconds[n.id, name]
            own[n.id] = ends[n.id] - now if n.id in running else seconds[n.id, name]
        rank: dict[SubStageId, float] = {}
        for n in reversed(unfinished):
            after = [rank[m.id] for m in unfinished if any(need.on == n.id for need in m.needs)]
            rank[n.id] = own[n.id] + max(after, default=0.0)
        plan = {name: max(now, at) for name, at in free.items()}
        for n in sorted(unfinished, key=lambda n: (-rank[n.id], n.id)):
            if n.id in ends or any(ends.get(need.on, 1e9) > now + 1e-9 for need in n.needs):
                continue
            name = min(plan, key=lambda name: (plan[name] + seconds[n.id, name], plan[name] > now))
            plan[name] += seconds[n.id, name]
            if free[name] <= now + 1e-9 and plan[name] - seconds[n.id, name] <= now + 1e-9:
                ends[n.id] = free[name] = plan[name]
                begun.append((now, n.id, name))
        now = min((end for end in ends.values() if end > now + 1e-9), default=now)
    return begun


def test_without_contention_and_future_it_is_a_list_scheduler() -> None:
    for seed in range(40):
        nodes, pool, profiles = single_launch_graph(seed, 9, 2 + seed % 2)
        ran = simulate(nodes, pool, profiles, PLAIN).ran
        ours = sorted((round(each.began, 6), int(each.sub_stage.id), each.launch.unit) for each in ran)
        theirs = sorted((round(at, 6), number, name) for at, number, name in list_schedule(nodes, pool, profiles))
        assert ours == theirs


def test_no_schedule_is_shorter_than_its_critical_path_or_its_share_of_work() -> None:
    for seed in range(20):
        nodes, pool, profiles = single_launch_graph(seed, 8, 3)
        best = {n.id: min(profiles.get(n.operation, u.kind).seconds(1) for u in pool) for n in nodes}  # type: ignore[union-attr]  # all are there
        path: dict[SubStageId, float] = {}
        for n in nodes:
            path[n.id] = best[n.id] + max((path[need.on] for need in n.needs), default=0.0)
        bound = max(*path.values(), sum(best.values()) / len(pool))
        assert simulate(nodes, pool, profiles, PLAIN).now >= bound - 1e-9


def test_a_busy_unit_that_ends_work_sooner_is_waited_for_and_idle_ones_help_where_that_is_sooner() -> None:
    fast, slow = OperationProfile([ShapePoint(1, 1.0, 0.0)]), OperationProfile([ShapePoint(1, 5.0, 0.0)])
    pool, profiles = [unit("slow"), unit("fast")], ProfileStore({("m/run", "fast"): fast, ("m/run", "slow"): slow})
    two = [task(1, ordered=True), task(2, ordered=True)]
    assert {ran.launch.unit for ran in simulate(two, pool, profiles, PLAIN).ran} == {"fast"}
    greedy = SchedulingPolicy(look_ahead=False, control=False)
    assert simulate(two, pool, profiles, greedy).now == 5.0
    shared = simulate([task(1, items=12)], pool, profiles, PLAIN)
    assert shared.now == 10.0 and sum(ran.launch.unit == "slow" for ran in shared.ran) == 2
    assert simulate([task(1, items=4)], pool, profiles, PLAIN).now == 4.0


def test_a_unit_is_left_idle_where_it_would_delay_the_critical_launch_by_more_than_it_gains() -> None:
    """A long critical sub-stage, and a short one that asks for the same bandwidth."""
    critical = OperationProfile([ShapePoint(1, 10.0, 45.0)], RISING)
    beside = OperationProfile([ShapePoint(1, 9.0, 60.0)], RISING)
    profiles = ProfileStore({("a/run", "gpu"): critical, ("b/run", "cpu"): beside})
    pool = [unit("gpu", ["a"]), unit("cpu", ["b"])]
    nodes = [task(1, model="a"), task(2, model="b"), task(3, 1, model="a"), task(4, 3, model="a")]
    eager = simulate(nodes, pool, profiles, PLAIN)
    patient = simulate(nodes, pool, profiles, SchedulingPolicy(contention_weight=4.0))
    assert [ran.began for ran in eager.ran if ran.sub_stage.id == 2] == [0.0]
    assert [ran.began for ran in patient.ran if ran.sub_stage.id == 2] >= [10.0]
    ends = [max(ran.ended for ran in run.ran if ran.sub_stage.id == 4) for run in (eager, patient)]
    assert ends[1] < ends[0]


def test_where_nothing_runs_the_least_bandwidth_is_launched_beyond_the_limit() -> None:
    profile = OperationProfile([ShapePoint(1, 1.0, 30.0), ShapePoint(4, 1.5, 60.0)])
    ran = simulate(
        [task(1, items=4)], [unit("gpu")], ProfileStore({("m/run", "gpu"): profile}), SchedulingPolicy(soft_limit=10.0)
    ).ran
    assert [(each.launch.shape, each.launch.forced) for each in ran] == [(1, True)] * 4


class Agents:
    """Truth of the three workflows: sub-questions after each 8 tokens, two pages, one more after the second look."""

    def __init__(self, builder: WorkflowBuilder) -> None:
        self.builder = builder
        self.added = 0

    def items(self, node: SubStage, first: int, count: int) -> int:
        return min(count, 17 - first) if node.open_ended else count

    def after(self, node: SubStage, done: int) -> object:
        from lab.simulation.workflows import Outcome

        added: list[SubStage] = []
        if node.decides and done in (8, 16):
            if node.id == self.builder.rewrite:
                added = self.builder.sub_question()
            elif node.id == self.builder.plan or done == 8:
                added = self.builder.web_request(node.id, 5)
        self.added += bool(added)
        return Outcome(added=added, finished=node.open_ended and done >= 17)


@pytest.mark.parametrize(("name", "decisions"), [("fast", 0), ("advanced", 2), ("research", 5)])
def test_the_three_workflows_run_private_documents_never_leave_the_device(name: WorkflowName, decisions: int) -> None:
    assert name in WORKFLOWS
    models = ["embed", "rerank", "agent", "chat", "host"]
    pool = [
        unit("gpu", models),
        unit("npu", models),
        unit("far", models, zone="cloud", memory="far", latency_s=0.01),
        unit("web", ["web"], zone="cloud", memory="web"),
    ]
    phases = ["host/split", "host/search", "web/fetch", "embed/encode", "rerank/score"]
    phases += [f"{model}/{phase}" for model in ("agent", "chat") for phase in ("prefill", "decode")]
    points = [ShapePoint(n, 0.01 * n**0.8, 20.0) for n in (1, 4, 16, 64)]
    quick = [ShapePoint(n, 0.0002 * n, 0.0) for n in (1, 4, 16, 64)]
    profiles = {
        (p, u.kind): OperationProfile(quick if u.name == "far" else points, RISING) for p in phases for u in pool
    }
    builder = WorkflowBuilder(name, WorkflowSizes(question=20, chunks=9))
    script = Agents(builder)
    simulation = WorkflowSimulation(
        WorkflowScheduler(pool, ProfileStore(profiles)),
        pool,
        ProfileStore(profiles),
        script,  # type: ignore[arg-type]  # its outcome is typed where it is made
    )
    simulation.run(builder.begin())
    assert script.added == decisions
    units: dict[str, set[str]] = defaultdict(set)
    for ran in simulation.ran:
        units[ran.sub_stage.stage].add(ran.launch.unit)
        assert ran.launch.unit in ("gpu", "npu") or not ran.private
    assert "far" not in units["embed"] | units["answer.prefill"] | units["answer.decode"]
    if name != "fast":
        assert "far" in units["embed question"] | units["rewrite.prefill"], "questions are not private"
    texts: dict[str, set[str]] = defaultdict(set)
    for ran in simulation.ran:
        if ran.sub_stage.context:
            texts[ran.sub_stage.context].add("far" if ran.launch.unit == "far" else "here")
    assert all(len(places) == 1 for places in texts.values()), "a text's state lies in one memory"
    if name == "research":
        assert units["fetch"] == {"web"}, "requests to the web, of the second look too, hold nothing private"


def test_a_sub_stage_that_no_unit_may_run_is_said_once() -> None:
    scheduler = WorkflowScheduler([unit("far", zone="cloud")], ProfileStore())
    effects = scheduler.on(Added(0.0, [task(1, private=True)]))
    assert effects == [Unrunnable(SubStageId(1))]
    assert scheduler.on(UnitBack(1.0, "far")) == []


def test_what_has_no_profile_runs_on_the_first_unit_and_is_known_then() -> None:
    profiles = ProfileStore()
    scheduler = WorkflowScheduler([unit("a"), unit("b")], profiles)
    (launch,) = scheduler.on(Added(0.0, [task(1, items=3)]))
    assert isinstance(launch, Launch) and (launch.unit, launch.count) == ("a", 3)
    assert scheduler.on(Ended(1.5, launch.id)) == [RequestDone(0)]
    learnt = profiles.get("m/run", "a")
    assert learnt is not None and learnt.seconds(3) == 1.5


def test_a_lost_units_launch_is_repeated_elsewhere_and_its_late_end_means_nothing() -> None:
    profile = OperationProfile([ShapePoint(4, 1.0, 0.0)])
    scheduler = WorkflowScheduler(
        [unit("a"), unit("b")],
        ProfileStore({("m/run", "a"): profile, ("m/run", "b"): OperationProfile([ShapePoint(4, 9.0, 0.0)])}),
    )
    (first,) = scheduler.on(Added(0.0, [task(1, items=4)]))
    assert isinstance(first, Launch) and first.unit == "a"
    (second,) = scheduler.on(UnitLost(0.5, "a"))
    assert isinstance(second, Launch) and (second.unit, second.first, second.count) == ("b", 0, 4)
    assert scheduler.on(Ended(1.0, first.id)) == []
    assert scheduler.on(UnitBack(2.0, "a")) == []
    assert scheduler.on(Ended(9.5, second.id)) == [RequestDone(0)]


def test_a_launch_that_fails_is_tried_again_then_elsewhere_then_refused() -> None:
    scheduler = WorkflowScheduler([unit("a"), unit("b")], ProfileStore())
    effects = scheduler.on(Added(0.0, [task(1)]))
    tried = []
    while isinstance(effects[0], Launch):
        tried.append(effects[0].unit)
        effects = scheduler.on(Failed(float(len(tried)), effects[0].id))
    assert tried == ["a", "a", "b", "b"] and effects == [Unrunnable(SubStageId(1))]


def test_speculative_work_that_is_dropped_is_cancelled() -> None:
    scheduler = WorkflowScheduler([unit("a")], ProfileStore())
    (launch,) = scheduler.on(Added(0.0, [task(1), task(2, 1)]))
    assert isinstance(launch, Launch)
    effects = scheduler.on(Dropped(0.5, [SubStageId(2)]))
    assert effects == [Cancel(launch.id), RequestDone(0)]
    assert scheduler.on(Failed(0.6, launch.id)) == []
    (again,) = scheduler.on(Added(1.0, [task(3, request=1)]))
    assert isinstance(again, Launch), "the unit is free again"
