"""Workflows in virtual time: drives the scheduler of `paceline.workflow` on units that take what true profiles say.

True profiles may differ from those that the scheduler has. Launches on one memory slow each other down as the true
slowdowns say. What agents decide and how long texts are is told by a script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.workflow.activity import Activity, Running
from paceline.workflow.graph import (
    Added,
    Cancel,
    Ended,
    Failed,
    Launch,
    ProcessingUnit,
    RequestDone,
    Resized,
    SubStage,
    SubStageId,
    Unrunnable,
    WorkflowEffect,
    WorkflowEvent,
)
from paceline.workflow.profiling import ProfileStore
from paceline.workflow.scheduler import WorkflowScheduler


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a launch leads to."""

    added: Sequence[SubStage] = ()
    resized: Sequence[tuple[SubStageId, int]] = ()
    finished: bool = False  # of an open-ended sub-stage


class Script(Protocol):
    """The truth about a workflow that the scheduler does not know."""

    def items(self, node: SubStage, first: int, count: int) -> int:
        """Of the items of a launch, those that there are; at least 1."""

    def after(self, node: SubStage, done: int) -> Outcome:
        """What happens when so many items of a sub-stage are done."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A launch that has ended."""

    launch: Launch
    sub_stage: SubStage
    private: bool
    began: float  # s
    ended: float
    bandwidth: float  # GB/s in use with it, when it began


@dataclass(slots=True)
class WorkflowSimulation:
    """One request in virtual time."""

    scheduler: WorkflowScheduler
    units: Sequence[ProcessingUnit]
    truth: ProfileStore
    script: Script
    jitter: Callable[[Launch], float] = lambda _: 1.0  # factor on a launch's seconds
    now: float = 0.0
    ran: list[Ran] = field(default_factory=list)
    done: bool = False
    _nodes: dict[SubStageId, SubStage] = field(default_factory=dict)
    _done: dict[SubStageId, int] = field(default_factory=dict)
    _items: dict[int, int] = field(default_factory=dict)
    _used: dict[int, float] = field(default_factory=dict)
    _private: dict[SubStageId, bool] = field(default_factory=dict)
    _activity: Activity = field(default_factory=Activity)

    def run(self, first: Sequence[SubStage]) -> float:
        """Seconds until all is finished. Raises RuntimeError where the scheduler stands still or breaks a rule."""
        self._activity.advance(self.now)
        self._tell(Added(self.now, first))
        while self._activity:
            running = min(self._activity, key=lambda each: (self._activity.end(each), each.launch.id))
            self.now = self._activity.end(running)
            self._activity.advance(self.now)
            self._end(running)
        if not self.done:
            raise RuntimeError("the workflow stands still")
        return self.now

    def _end(self, running: Running) -> None:
        launch = self._activity.remove(running.launch.id).launch
        node, items = self._nodes[launch.sub_stage], self._items[launch.id]
        private = self._private[node.id]
        self.ran.append(Ran(launch, node, private, running.began, self.now, self._used[launch.id]))
        self._done[node.id] = self._done.get(node.id, 0) + items
        outcome = self.script.after(node, self._done[node.id])
        if outcome.added:
            self._tell(Added(self.now, outcome.added))
        for resized, count in outcome.resized:
            self._tell(Resized(self.now, resized, count))
        self._tell(Ended(self.now, launch.id, outcome.finished, items))

    def _tell(self, event: WorkflowEvent) -> None:
        if isinstance(event, Added):
            self._nodes |= {node.id: node for node in event.sub_stages}
        for effect in self.scheduler.on(event):
            self._carry_out(effect)

    def _carry_out(self, effect: WorkflowEffect) -> None:
        match effect:
            case Launch():
                self._begin(effect)
            case Cancel():
                if effect.launch in self._activity:
                    self._activity.remove(effect.launch)
                    self._tell(Failed(self.now, effect.launch))
            case RequestDone():
                self.done = True
            case Unrunnable():
                raise RuntimeError(f"no unit may run {self._nodes[effect.sub_stage]}")

    def _begin(self, launch: Launch) -> None:
        node = self._nodes[launch.sub_stage]
        unit = next(unit for unit in self.units if unit.name == launch.unit)
        self._private[node.id] = private = self.scheduler.graph.is_private(node.id)
        if any(each.launch.unit == unit.name for each in self._activity) or not unit.may_run(
            node.model, private=private
        ):
            raise RuntimeError(f"{launch} on a unit that is busy or may not run it")
        profile = self.truth.get(node.operation, unit.kind)
        if profile is None:
            raise RuntimeError(f"no true profile of {node.operation} on {unit.kind}")
        items = self.script.items(node, launch.first, launch.count)
        self._items[launch.id] = items
        transfer = 0.0 if node.open_ended else unit.transfer_s(items * node.item_bytes)  # a text comes as it is written
        bandwidth = profile.bandwidth(launch.shape)
        seconds = profile.seconds(items) * self.jitter(launch)
        self._activity.add(
            Running(
                launch=launch,
                memory=unit.memory,
                bandwidth=bandwidth,
                slowdown=profile.slowdown,
                transfer_s=transfer,
                compute_s=seconds,
                began=self.now,
            )
        )
        self._used[launch.id] = self._activity.used(unit.memory)
