"""The scheduler of workflows over all units, as a machine (HeRo, algorithm 1; `placement` says what differs).

On every event the observed graph and the criticality of its stages are brought up to date; then each stage that can
begin, the most critical first, is placed on an idle unit, or waits for a busy one. Work that several units could share
is shared. Owners take turns (`core.fair`); within an owner's requests the most critical of all goes first. A launch
under way is not ended for another owner.

Not handled: preemption of a launch, seconds to load a model, memory capacity. A text stays in the memory where it
began; when that is lost with its last unit, what computing it anew takes is not predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from paceline.core.fair import Turns
from paceline.workflow import graph, placement
from paceline.workflow.graph import Launch, Request, Stage
from paceline.workflow.profiles import Profiles

MAX_FAILURES = 2  # of a stage on a unit, then it is not tried there again


class WorkflowScheduler:
    """Decides what runs where. Events in, effects out; the times in events must not fall."""

    placer = placement.Placer

    def __init__(self, units: Sequence[graph.ProcessingUnit], profiles: Profiles) -> None:
        self.graph = graph.StageGraph()
        self._running: dict[int, placement.Running] = {}
        self._units = {unit.name: unit for unit in units}  # the first ones are the default
        assert len(self._units) == len(units), "two processing units have one name"
        self._lost: set[str] = set()  # names
        self._predictions = placement.Predictions(profiles)
        self._failures: dict[tuple[Stage, str], int] = {}
        self._memories: dict[object, str] = {}  # text -> memory that it lies in
        self._refused: set[Stage] = set()
        self._open: dict[Request, None] = {}
        self._launches = 0
        self._turns = Turns()  # of owners on the units, by predicted seconds of launches

    def on(self, event: graph.WorkflowEvent) -> list[graph.WorkflowEffect]:
        """Raises ValueError for stages that cannot be added."""
        effects: list[graph.WorkflowEffect] = []
        match event:
            case graph.StagesAdded():
                effects += self._add(event.stages)
            case graph.Ended():
                effects += self._end(event)
            case graph.Failed():
                effects += self._fail(event)
            case graph.Left():
                effects += self._drop(self.graph.of(event.request))
            case graph.UnitsLost():
                self._lost |= set(event.units)
                for running in [each for each in self._running.values() if each.launch.unit in event.units]:
                    self._remove(running.launch.id)
                kept = {unit.memory for name, unit in self._units.items() if name not in self._lost}
                self._memories = {text: memory for text, memory in self._memories.items() if memory in kept}
            case graph.UnitsBack():
                self._lost -= set(event.units)
                for name in event.units:
                    moved = replace(self._units[name], latency_s=event.latency_s, bytes_per_s=event.bytes_per_s)
                    self._units[name] = moved
        return effects + self._dispatch(event.now) + self._completed()

    def _add(self, stages: Sequence[Stage]) -> list[graph.WorkflowEffect]:
        self.graph.add(stages)
        self._open |= dict.fromkeys(stage.request for stage in stages)
        return [effect for stage in stages for effect in self._refuse(stage)]

    def _refuse(self, stage: Stage) -> list[graph.WorkflowEffect]:
        """Say once that no unit may run a stage, not even one that is lost now."""
        if stage in self._refused or self._able(stage, lost=True):
            return []
        self._refused.add(stage)
        return [graph.Unrunnable(stage)]

    def _end(self, event: graph.Ended) -> list[graph.WorkflowEffect]:
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
            self._predictions.profiles.learn(stage.operation.name, self._units[launch.unit].kind, items, seconds)
        self.graph.end(stage, launch.count, done=outcome.items, finished=outcome.finished)
        return effects

    def _fail(self, event: graph.Failed) -> list[graph.WorkflowEffect]:
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

    def _drop(self, stages: Sequence[Stage]) -> list[graph.WorkflowEffect]:
        dropped = {each for stage in stages if stage in self.graph for each in self.graph.drop(stage)}
        return [graph.Cancel(each.launch.id) for each in self._running.values() if each.launch.stage in dropped]

    def _able(self, stage: Stage, *, lost: bool = False) -> Sequence[graph.ProcessingUnit]:
        """lost: units that are lost now, too."""
        private, memory = self.graph.stays_here(stage), self._memories.get(stage.text)
        return [
            unit
            for name, unit in self._units.items()
            if (lost or name not in self._lost)
            and unit.may_run(stage.operation.model, private=private)
            and memory in (None, unit.memory)
            and unit.kind not in stage.request.barred
            and self._failures.get((stage, unit.name), 0) < MAX_FAILURES
        ]

    def _dispatch(self, now: float) -> list[graph.WorkflowEffect]:
        """Launch what can begin (lines 3 to 19)."""
        free = {name: now for name in self._units if name not in self._lost}
        for running in self._running.values():
            if running.launch.unit in free:
                free[running.launch.unit] = max(now, running.end)
        idle = set(free) - {running.launch.unit for running in self._running.values()}
        placer = self.placer(now, self._predictions, self._running.values(), free, idle)
        unfinished = list(self.graph.unfinished())
        if not placer.idle or not any(self.graph.available(stage) for stage in unfinished):
            return []
        able = {stage: self._able(stage) for stage in unfinished}
        busy = {running.launch.stage: running for running in self._running.values()}
        ranks = self._ranks(now, able)
        stages = sorted(unfinished, key=lambda stage: (-ranks[stage], stage.progress.number))
        self._turns.begin({stage.request.owner for stage in stages})
        waiting = [each for each in stages if self.graph.available(each) or each in busy]
        order = self._turns.order([(each.request.owner, each) for each in waiting], partial(self._least_seconds, able))
        effects: list[graph.WorkflowEffect] = []
        for stage in order:
            if stage.operation.ordered and stage in busy:  # it goes on where it is
                unit = busy[stage].launch.unit
                rest = self._predictions.seconds(stage.operation, stage.remaining, self._units[unit].kind)
                placer.free[unit] += rest or 0.0
                continue
            while placer.idle and self.graph.available(stage):
                after = placement.continued(self.graph, stage, able[stage], self._predictions)
                if (plan := placer.place(stage, able[stage], after)) is None:
                    break
                effects.append(self._launch(now, stage, plan, ranks[stage]))
        return effects

    def _least_seconds(self, able: Mapping[Stage, Sequence[graph.ProcessingUnit]], stage: Stage) -> float:
        """What is left of the stage takes where it is fastest, without a profile a second."""
        kinds = {unit.kind for unit in able[stage]}
        known = (self._predictions.seconds(stage.operation, max(stage.remaining, 1), kind) for kind in kinds)
        return min((seconds for seconds in known if seconds is not None), default=1.0)

    def _ranks(self, now: float, able: Mapping[Stage, Sequence[graph.ProcessingUnit]]) -> dict[Stage, float]:
        seconds = placement.predicted_seconds(able, self._predictions)
        for running in self._running.values():
            stage = running.launch.stage
            if stage in seconds:
                left = max(0.0, running.end - now)
                seconds[stage] = left + (seconds[stage] if stage.remaining else 0.0)
        return placement.criticality(seconds)

    def _launch(self, now: float, stage: Stage, plan: placement.LaunchPlan, rank: float) -> Launch:
        self._launches += 1
        if stage.text is not None:
            self._memories[stage.text] = plan.unit.memory
        seconds = plan.moving_s + plan.compute_s
        self._turns.served(stage.request.owner, seconds)
        first, count = self.graph.begin(stage, plan.count)
        launch = Launch(self._launches, stage, plan.unit.name, plan.shape, first, count, rank)
        self._running[launch.id] = placement.Running(launch, plan.unit.memory, now, plan.moving_s, now + seconds)
        return launch

    def _completed(self) -> list[graph.WorkflowEffect]:
        """Requests that have ended: their stages are forgotten."""
        unfinished = {stage.request for stage in self.graph.unfinished()}
        ended = [request for request in self._open if request not in unfinished]
        for request in ended:
            del self._open[request]
            for stage in self.graph.forget(request):
                self._memories.pop(stage.text, None)
                self._refused.discard(stage)
        self._failures = {key: count for key, count in self._failures.items() if key[0] in self.graph}
        return [graph.StagesDone(request) for request in ended]
