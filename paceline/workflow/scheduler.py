"""The scheduler of workflows over all units, as a machine (HeRo, algorithm 1; `placement` says what differs).

On every event the observed graph and the criticality of its stages are brought up to date; then each stage that can
begin, the most critical first, is placed on an idle unit, or waits for a busy one. Work that several units could share
is shared. Owners take turns; within an owner's requests the most critical of all goes first.

Not handled: preemption of a launch, seconds to load a model, memory capacity. A text stays in the memory where it
began; when that is lost with its last unit, what computing it anew takes is not predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.workflow.graph import (
    Cancel,
    Ended,
    Failed,
    Launch,
    Left,
    ProcessingUnit,
    Request,
    Stage,
    StageGraph,
    StagesAdded,
    StagesDone,
    UnitPool,
    UnitsBack,
    UnitsLost,
    Unrunnable,
    WorkflowEffect,
    WorkflowEvent,
)
from paceline.workflow.placement import (
    Candidate,
    LaunchPlan,
    Placer,
    Predictions,
    Running,
    SchedulingPolicy,
    continued,
    criticality,
    predicted_seconds,
)
from paceline.workflow.profiles import Profiles


class OwnerTurns:
    """Turns of owners on the units: whoever asks for more workflows at once than others gets no more of the units.

    Start-time fair queueing over the predicted seconds of launches: each owner has a clock of what it was given, and
    those that are behind come first. One that comes anew begins with the clock of whoever is furthest behind, so nobody
    saves up turns. Alone, an owner's stages go by their criticality. Not handled: a launch under way is not ended for
    another owner.
    """

    def __init__(self) -> None:
        self._given: dict[str, float] = {}  # owners with unfinished stages -> s

    def see(self, owners: set[str]) -> None:
        """Owners that have unfinished stages now; others are forgotten."""
        kept = {owner: given for owner, given in self._given.items() if owner in owners}
        least = min(kept.values(), default=0.0)
        self._given = kept | dict.fromkeys(owners - set(kept), least)

    def give(self, owner: str, seconds: float) -> None:
        """A launch of that owner has begun, which takes so long."""
        self._given[owner] = self._given.get(owner, 0.0) + seconds

    def ordered(self, stages: Sequence[Stage], ranks: Mapping[Stage, float]) -> list[Stage]:
        """Each owner's first one, then each owner's second one, and so on; of one place, who was given least first.

        stages: each owner's in its own order.
        """
        if len(self._given) < 2:
            return list(stages)
        places: dict[str, int] = {}
        keys: dict[Stage, tuple[int, float, float]] = {}
        for stage in stages:
            owner = stage.request.owner
            place = places[owner] = places.get(owner, -1) + 1
            keys[stage] = place, self._given.get(owner, 0.0), -ranks[stage]
        return sorted(stages, key=lambda stage: keys[stage])


MAX_FAILURES = 2  # of a stage on a unit, then it is not tried there again


class WorkflowScheduler:
    """Decides what runs where. Events in, effects out; the times in events must not fall."""

    def __init__(
        self, units: Sequence[ProcessingUnit], profiles: Profiles, policy: SchedulingPolicy | None = None
    ) -> None:
        self.policy = policy or SchedulingPolicy()
        self.graph = StageGraph(whole_stages=self.policy.whole_stages)
        self._running: dict[int, Running] = {}
        self._units = UnitPool(units)
        self._profiles = profiles
        self._predictions = Predictions(profiles, self.policy)
        self._failures: dict[tuple[Stage, str], int] = {}
        self._memories: dict[object, str] = {}  # text -> memory that it lies in
        self._refused: set[Stage] = set()
        self._open: dict[Request, None] = {}
        self._launches = 0
        self._turns = OwnerTurns()

    def on(self, event: WorkflowEvent) -> list[WorkflowEffect]:
        """Raises ValueError for stages that cannot be added."""
        effects: list[WorkflowEffect] = []
        match event:
            case StagesAdded():
                effects += self._add(event.stages)
            case Ended():
                effects += self._end(event)
            case Failed():
                effects += self._fail(event)
            case Left():
                effects += self._drop(self.graph.of(event.request))
            case UnitsLost():
                for name in event.units:
                    self._units.lose(name)
                for running in [each for each in self._running.values() if each.launch.unit in event.units]:
                    self._remove(running.launch.id)
                kept = {unit.memory for unit in self._units}
                self._memories = {text: memory for text, memory in self._memories.items() if memory in kept}
            case UnitsBack():
                for name in event.units:
                    self._units.restore(name, event.latency_s, event.bytes_per_s)
        return effects + self._dispatch(event.now) + self._completed()

    def _add(self, stages: Sequence[Stage]) -> list[WorkflowEffect]:
        self.graph.add(stages)
        self._open |= dict.fromkeys(stage.request for stage in stages)
        return [effect for stage in stages for effect in self._refuse(stage)]

    def _refuse(self, stage: Stage) -> list[WorkflowEffect]:
        """Say once that no unit may run a stage, not even one that is lost now."""
        if stage in self._refused or self._able(stage, lost=True):
            return []
        self._refused.add(stage)
        return [Unrunnable(stage)]

    def _end(self, event: Ended) -> list[WorkflowEffect]:
        if event.launch not in self._running:
            return []  # of a unit that was lost
        running, outcome = self._running.pop(event.launch), event.outcome
        launch, stage = running.launch, running.launch.stage
        if stage not in self.graph:
            return []
        effects = [*self._add(outcome.added), *self._drop(outcome.dropped)]
        items = launch.count if outcome.items is None else outcome.items
        if items > 0:
            seconds = event.now - running.began - running.moving_s
            self._profiles.learn(stage.operation.name, self._units[launch.unit].kind, items, seconds)
        self.graph.end(stage, launch.count, done=outcome.items, finished=outcome.finished)
        return effects

    def _fail(self, event: Failed) -> list[WorkflowEffect]:
        if event.launch not in self._running:
            return []
        gone = self._remove(event.launch)
        if gone.stage not in self.graph or gone.stage.progress.finished:
            return []
        key = gone.stage, gone.unit
        self._failures[key] = self._failures.get(key, 0) + 1
        return self._refuse(gone.stage)

    def _remove(self, launch: int) -> Launch:
        """A launch has come to nothing."""
        gone = self._running.pop(launch).launch
        if gone.stage in self.graph:
            self.graph.give_up(gone.stage, gone.first, gone.count)
        return gone

    def _drop(self, stages: Sequence[Stage]) -> list[WorkflowEffect]:
        dropped = {each for stage in stages if stage in self.graph for each in self.graph.drop(stage)}
        return [Cancel(each.launch.id) for each in self._running.values() if each.launch.stage in dropped]

    def _able(self, stage: Stage, *, lost: bool = False) -> Sequence[ProcessingUnit]:
        units = self._units.able(stage.operation.model, private=self.graph.stays_here(stage), lost=lost)
        memory = self._memories.get(stage.text)
        return [
            unit
            for unit in self.policy.units(stage, units)
            if memory in (None, unit.memory) and self._failures.get((stage, unit.name), 0) < MAX_FAILURES
        ]

    def _dispatch(self, now: float) -> list[WorkflowEffect]:
        """Launch what can begin (lines 3 to 19)."""
        free = {unit.name: now for unit in self._units}
        for running in self._running.values():
            if running.launch.unit in free:
                free[running.launch.unit] = max(now, running.end)
        idle = set(free) - {running.launch.unit for running in self._running.values()}
        placer = Placer(now, self._predictions, self.policy, self._running.values(), free, idle)
        unfinished = list(self.graph.unfinished())
        if not placer.idle or not any(self.graph.available(stage) for stage in unfinished):
            return []
        able = {stage: self._able(stage) for stage in unfinished}
        busy = {running.launch.stage: running for running in self._running.values()}
        ranks = self._ranks(now, able)
        stages = sorted(unfinished, key=lambda stage: (-ranks[stage], stage.progress.number))
        self._turns.see({stage.request.owner for stage in stages})
        order = self._turns.ordered([each for each in stages if self.graph.available(each) or each in busy], ranks)
        effects: list[WorkflowEffect] = []
        for stage in order:
            if stage.operation.ordered and stage in busy:  # it goes on where it is
                unit = busy[stage].launch.unit
                rest = self._predictions.seconds(stage.operation, stage.remaining, self._units[unit].kind)
                placer.free[unit] += rest or 0.0
                continue
            while placer.idle and (available := self.graph.available(stage)):
                after = continued(self.graph, stage, able[stage], self._predictions)
                placement = placer.place(Candidate(stage, available, able[stage], after))
                if placement is None:
                    break
                effects.append(self._launch(now, stage, placement, ranks[stage]))
        return effects

    def _ranks(self, now: float, able: Mapping[Stage, Sequence[ProcessingUnit]]) -> dict[Stage, float]:
        if not self.policy.criticality:
            return dict.fromkeys(able, 0.0)
        seconds = predicted_seconds(able, self._predictions)
        for running in self._running.values():
            stage = running.launch.stage
            if stage in seconds:
                left = max(0.0, running.end - now)
                seconds[stage] = left + (seconds[stage] if stage.remaining else 0.0)
        return criticality(seconds)

    def _launch(self, now: float, stage: Stage, placement: LaunchPlan, rank: float) -> Launch:
        self._launches += 1
        if stage.text is not None:
            self._memories[stage.text] = placement.unit.memory
        seconds = placement.moving_s + placement.compute_s
        self._turns.give(stage.request.owner, seconds)
        first, count = self.graph.begin(stage, placement.count)
        launch = Launch(self._launches, stage, placement.unit.name, placement.shape, first, count, rank)
        self._running[launch.id] = Running(launch, placement.unit.memory, now, placement.moving_s, now + seconds)
        return launch

    def _completed(self) -> list[WorkflowEffect]:
        """Requests that have ended: their stages are forgotten."""
        unfinished = {stage.request for stage in self.graph.unfinished()}
        ended = [request for request in self._open if request not in unfinished]
        for request in ended:
            del self._open[request]
            for stage in self.graph.forget(request):
                self._memories.pop(stage.text, None)
                self._refused.discard(stage)
        gone = {key for key in self._failures if key[0] not in self.graph}
        for key in gone:
            del self._failures[key]
        return [StagesDone(request) for request in ended]
