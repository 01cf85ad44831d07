"""The scheduler of workflows over all units, as a machine (HeRo, algorithm 1, corrected as in specs 3.1).

On every event the observed graph and the criticality of its sub-stages are brought up to date; then each sub-stage that
can begin, the most critical first, is placed on an idle unit, or waits for a busy one. Where nothing runs, something is
launched even beyond the bandwidth limit, so a workflow never stands still.

Other than in the paper: the delay is that of the most critical launch under way, not of a sub-stage that has not begun;
it is marginal, in seconds; work that several units could share is shared.

Owners take turns (`turns`); within an owner's requests the most critical of all goes first.

Not handled: preemption of a launch, seconds to load a model, memory capacity. A context stays in the memory where it
began; when that is lost with its last unit, what computing it anew takes is not predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.workflow.activity import Activity, Other, Running
from paceline.workflow.builder import WorkflowTemplate
from paceline.workflow.graph import (
    Added,
    Cancel,
    Dropped,
    Ended,
    Failed,
    Launch,
    OtherBegan,
    OtherEnded,
    ProcessingUnit,
    RequestDone,
    Resized,
    StageGraph,
    SubStage,
    SubStageId,
    UnitBack,
    UnitLost,
    UnitMoved,
    UnitPool,
    Unrunnable,
    WorkflowEffect,
    WorkflowEvent,
)
from paceline.workflow.placement import (
    CriticalLaunch,
    Placement,
    Placer,
    Predictions,
    SchedulingPolicy,
    Work,
    continued,
    criticality,
    future_of,
    predicted_seconds,
)
from paceline.workflow.profiling import ProfileStore

# Work of no workflow on the scheduler's units: plain requests' searches, embeddings and answers.
#
# Nobody schedules it, so it may run beside a launch on the same unit. It asks for bandwidth as a launch does, so
# launches are predicted to take longer while it runs, and what it takes is learnt as of launches.


class OtherWork:
    def __init__(self, activity: Activity, units: UnitPool, profiles: ProfileStore) -> None:
        self._activity = activity
        self._units = units
        self._profiles = profiles
        self._began: dict[int, OtherBegan] = {}

    def begin(self, event: OtherBegan) -> None:
        """Raises KeyError for a unit that there is none of."""
        unit = self._units[event.unit]
        profile = self._profiles.get(event.operation, unit.kind)
        bandwidth = 0.0 if profile is None else profile.bandwidth(event.items)
        self._activity.add_other(event.id, Other(memory=unit.memory, bandwidth=bandwidth, began=event.now))
        self._began[event.id] = event

    def end(self, event: OtherEnded) -> None:
        """What never began is ignored."""
        began = self._began.pop(event.id, None)
        if began is None:
            return
        other = self._activity.remove_other(event.id)
        items = began.items if event.items is None else event.items
        if items > 0:
            seconds, kind = event.now - began.now, self._units[began.unit].kind
            self._profiles.learn(began.operation, kind, items, seconds, other.overlap(event.now))


# Turns of owners on the units: whoever asks for more workflows at once than others gets no more of the units for it.
#
# Start-time fair queueing over the predicted seconds of launches: each owner has a clock of what it was given, and
# those that are behind come first. One that comes anew begins with the clock of whoever is furthest behind, so nobody
# saves up turns. Alone, an owner's sub-stages go by their criticality, as without this. Not handled: a launch under
# way is not ended for another owner.


class OwnerTurns:
    def __init__(self) -> None:
        self._given: dict[str, float] = {}  # owners with unfinished sub-stages -> s

    def __len__(self) -> int:
        return len(self._given)

    def see(self, owners: set[str]) -> None:
        """Owners that have unfinished sub-stages now; others are forgotten."""
        kept = {owner: given for owner, given in self._given.items() if owner in owners}
        least = min(kept.values(), default=0.0)
        self._given = kept | dict.fromkeys(owners - set(kept), least)

    def give(self, owner: str, seconds: float) -> None:
        """A launch of that owner has begun, which takes so long."""
        self._given[owner] = self._given.get(owner, 0.0) + seconds

    def ordered(self, nodes: Sequence[SubStage], ranks: Mapping[SubStageId, float]) -> list[SubStage]:
        """Each owner's first one, then each owner's second one, and so on; of one place, who was given least first.

        nodes: each owner's in its own order.
        """
        if len(self._given) < 2:
            return list(nodes)
        places: dict[str, int] = {}
        keys: dict[SubStageId, tuple[int, float, float]] = {}
        for node in nodes:
            place = places[node.owner] = places.get(node.owner, -1) + 1
            keys[node.id] = place, self._given.get(node.owner, 0.0), -ranks[node.id]
        return sorted(nodes, key=lambda node: keys[node.id])


MAX_FAILURES = 2  # of a sub-stage on a unit, then it is not tried there again


class WorkflowScheduler:
    """Decides what runs where. Events in, effects out; the times in events must not fall.

    A decision is added before the event that ends the deciding sub-stage, so that the workflow does not seem to end.
    """

    def __init__(
        self,
        units: Sequence[ProcessingUnit],
        profiles: ProfileStore,
        templates: Mapping[str, WorkflowTemplate] | None = None,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self.policy = policy or SchedulingPolicy()
        self.graph = StageGraph(whole_stages=not self.policy.partition)
        self.activity = Activity()
        self._units = UnitPool(units)
        self._profiles = profiles
        self._templates = dict(templates or {})
        self._predictions = Predictions(profiles, None if self.policy.partition else self.policy.fixed_shape)
        kinds = tuple(dict.fromkeys(unit.kind for unit in units))
        self._future = future_of(self._templates, kinds, self._predictions)
        self._failures: dict[tuple[SubStageId, str], int] = {}
        self._revealed: dict[SubStageId, set[str]] = {}
        self._contexts: dict[str, str] = {}  # context -> memory that it lies in
        self._refused: set[SubStageId] = set()
        self._open: set[int] = set()
        self._launches = 0
        self._turns = OwnerTurns()
        self._others = OtherWork(self.activity, self._units, profiles)

    def on(self, event: WorkflowEvent) -> list[WorkflowEffect]:
        """Raises ValueError for sub-stages that cannot be added."""
        self.activity.advance(event.now)
        effects: list[WorkflowEffect] = []
        match event:
            case Added():
                effects += self._add(event.sub_stages)
            case Resized():
                self.graph.resize(event.sub_stage, event.items)
            case Ended():
                self._end(event)
            case Failed():
                effects += self._fail(event)
            case Dropped():
                effects += self._drop(event.sub_stages)
            case UnitLost():
                lost = {event.unit, *event.also}
                for name in lost:
                    self._units.lose(name)
                for running in [each for each in self.activity if each.launch.unit in lost]:
                    self._remove(running.launch.id)
                kept = {unit.memory for unit in self._units}
                self._contexts = {name: memory for name, memory in self._contexts.items() if memory in kept}
            case UnitBack():
                self._units.restore(event.unit)
            case UnitMoved():
                self._units.move(event.unit, event.latency_s, event.bytes_per_s)
            case OtherBegan():
                self._others.begin(event)
            case OtherEnded():
                self._others.end(event)
        return effects + self._dispatch(event.now) + self._completed()

    def _add(self, nodes: Sequence[SubStage]) -> list[WorkflowEffect]:
        before = {need.on for node in nodes for need in node.needs if need.on in self.graph}
        self.graph.add(nodes)
        for node in nodes:
            self._open.add(node.request)
            for need in node.needs:
                if need.on in before and self.graph[need.on].decides:
                    self._revealed.setdefault(need.on, set()).add(node.stage)
        return [effect for node in nodes for effect in self._refuse(node)]

    def _refuse(self, node: SubStage) -> list[WorkflowEffect]:
        """Say once that no unit may run a sub-stage, not even one that is lost now."""
        if node.id in self._refused or self._able(node, lost=True):
            return []
        self._refused.add(node.id)
        return [Unrunnable(node.id)]

    def _end(self, event: Ended) -> None:
        if event.launch not in self.activity:
            return  # of a unit that was lost
        running = self.activity.remove(event.launch)
        launch = running.launch
        if launch.sub_stage not in self.graph:
            return
        node = self.graph[launch.sub_stage]
        kind, took = self._units[launch.unit].kind, event.now - running.began
        items = launch.count if event.items is None else event.items
        if items > 0:
            self._profiles.learn(node.operation, kind, items, took - running.moving_s, running.overlap(event.now))
        self.graph.end(launch.sub_stage, launch.count, done=event.items, finished=event.finished)

    def _fail(self, event: Failed) -> list[WorkflowEffect]:
        if event.launch not in self.activity:
            return []
        gone = self._remove(event.launch)
        if gone.sub_stage not in self.graph or self.graph.is_finished(gone.sub_stage):
            return []
        key = gone.sub_stage, gone.unit
        self._failures[key] = self._failures.get(key, 0) + 1
        return self._refuse(self.graph[gone.sub_stage])

    def _remove(self, launch: int) -> Launch:
        """A launch has come to nothing."""
        gone = self.activity.remove(launch).launch
        if gone.sub_stage in self.graph:
            self.graph.give_up(gone.sub_stage, gone.first, gone.count)
        return gone

    def _drop(self, nodes: Sequence[SubStageId]) -> list[WorkflowEffect]:
        dropped = {each for node in nodes if node in self.graph for each in self.graph.drop(node)}
        return [Cancel(each.launch.id) for each in self.activity if each.launch.sub_stage in dropped]

    def _able(self, node: SubStage, *, lost: bool = False) -> list[ProcessingUnit]:
        units = self._units.able(node.model, private=self.graph.stays_private(node.id), lost=lost)
        if node.context in self._contexts:
            units = [unit for unit in units if unit.memory == self._contexts[node.context]]
        mapped = self.policy.static_map or {}
        if wanted := mapped.get(node.stage) or mapped.get(node.model):
            units = [unit for unit in units if wanted in (unit.name, unit.name.partition(" ")[0])]
        return [unit for unit in units if self._failures.get((node.id, unit.name), 0) < MAX_FAILURES]

    def _dispatch(self, now: float) -> list[WorkflowEffect]:
        """Launch what can begin (lines 3 to 19)."""
        placer = self._placer(now)
        unfinished = list(self.graph.unfinished())
        if not placer.idle or not any(self.graph.available(node.id) for node in unfinished):
            return []
        able = {node.id: self._able(node) for node in unfinished}
        busy = {running.launch.sub_stage: running for running in self.activity}
        ranks = self._ranks(able)
        nodes = sorted(unfinished, key=lambda node: (-ranks[node.id], node.id))
        nodes = nodes if self.policy.criticality else sorted(nodes, key=lambda node: node.id)
        self._turns.see({node.owner for node in nodes})
        order = self._turns.ordered([node for node in nodes if self.graph.available(node.id) or node.id in busy], ranks)
        effects: list[WorkflowEffect] = []
        for node in order:
            if node.ordered and node.id in busy:  # it goes on where it is
                placer.reserve(busy[node.id].launch.unit, self._rest(node, busy[node.id]))
                continue
            while placer.idle and (available := self.graph.available(node.id)):
                after = continued(self.graph, node, able[node.id], self._predictions)
                work = Work(node, self.graph.remaining(node.id), available, able[node.id], after)
                placement = placer.place(work, self._critical(node, ranks))
                if placement is None:
                    break
                effects.append(self._launch(now, node, placement, ranks[node.id]))
        if not self.activity:
            effects += self._forced(now, placer, order, ranks)
        return effects

    def _forced(
        self, now: float, placer: Placer, order: Sequence[SubStage], ranks: Mapping[SubStageId, float]
    ) -> list[WorkflowEffect]:
        for node in order:
            if available := self.graph.available(node.id):
                work = Work(node, self.graph.remaining(node.id), available, self._able(node))
                placement = placer.force(work)
                if placement is not None:
                    return [self._launch(now, node, placement, ranks[node.id])]
        return []

    def _placer(self, now: float) -> Placer:
        free = {unit.name: now for unit in self._units}
        for running in self.activity:
            if running.launch.unit in free:
                free[running.launch.unit] = max(now, self.activity.end(running))
        idle = set(free) - {running.launch.unit for running in self.activity}
        return Placer(now, self._profiles, self._predictions, self.policy, self.activity, free, idle)

    def _ranks(self, able: Mapping[SubStageId, Sequence[ProcessingUnit]]) -> dict[SubStageId, float]:
        if not (self.policy.criticality or self.policy.control):
            return dict.fromkeys(able, 0.0)
        seconds = predicted_seconds(self.graph, able, self._predictions)
        for running in self.activity:
            if running.launch.sub_stage in seconds:
                left = running.transfer_s + running.compute_s
                again = self.graph.remaining(running.launch.sub_stage)
                seconds[running.launch.sub_stage] = left + (seconds[running.launch.sub_stage] if again else 0.0)
        return criticality(self.graph, seconds, self._future, self.policy.future_weight)

    def _rest(self, node: SubStage, running: Running) -> float:
        """Seconds of a sub-stage after the launch that is under way, on the same unit."""
        kind = self._units[running.launch.unit].kind
        return self._predictions.seconds(node, self.graph.remaining(node.id), kind) or 0.0

    def _critical(self, candidate: SubStage, ranks: Mapping[SubStageId, float]) -> CriticalLaunch | None:
        """The most critical launch under way, if it is more critical than the candidate."""
        if not self.policy.control:
            return None
        others = [
            running
            for running in self.activity
            if running.launch.sub_stage != candidate.id
            and ranks.get(running.launch.sub_stage, -1.0) >= ranks[candidate.id]
        ]
        if not others:
            return None
        most = max(others, key=lambda each: (ranks[each.launch.sub_stage], -each.launch.id))
        node = self.graph[most.launch.sub_stage]
        return CriticalLaunch(most, most.compute_s + (self._rest(node, most) if node.ordered else 0.0))

    def _launch(self, now: float, node: SubStage, placement: Placement, rank: float) -> Launch:
        self._launches += 1
        if node.context:
            self._contexts[node.context] = placement.unit.memory
        self._turns.give(node.owner, placement.transfer_s + placement.compute_s)
        first, count = self.graph.begin(node.id, placement.count)
        launch = Launch(
            self._launches, node.id, placement.unit.name, placement.shape, first, count, placement.forced, rank
        )
        self.activity.add(
            Running(
                launch=launch,
                memory=placement.unit.memory,
                bandwidth=placement.bandwidth,
                slowdown=placement.slowdown,
                transfer_s=placement.transfer_s,
                moving_s=placement.transfer_s,
                compute_s=placement.compute_s,
                began=now,
            )
        )
        return launch

    def _completed(self) -> list[WorkflowEffect]:
        """Requests that have ended: their templates learn, their sub-stages are forgotten."""
        ended = self._open - {node.request for node in self.graph.unfinished()}
        for request in sorted(ended):
            for node, done in self.graph.forget(request):
                template = self._templates.get(node.workflow)
                revealed = self._revealed.pop(node.id, set())
                self._contexts.pop(node.context, None)
                if template is not None and done:
                    template.record_items(node.stage, done)
                    if node.decides:
                        template.record_decision(node.stage, revealed)
        self._open -= ended
        return [RequestDone(request) for request in sorted(ended)]
