"""Carries out the launches of the scheduler of all workflows of a node, and tells it how they end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

from paceline.errors import PacelineError
from paceline.runtime.units import UnitRegistry
from paceline.workflow.builder import templates
from paceline.workflow.graph import (
    Added,
    Cancel,
    Dropped,
    Ended,
    Failed,
    Launch,
    OtherBegan,
    OtherEnded,
    RequestDone,
    Resized,
    SubStage,
    SubStageId,
    UnitBack,
    UnitLost,
    UnitMoved,
    Unrunnable,
    WorkflowEvent,
)
from paceline.workflow.placement import SchedulingPolicy
from paceline.workflow.profiling import ProfileStore
from paceline.workflow.scheduler import WorkflowScheduler

log = logging.getLogger("paceline.workflow")


class Work(Protocol):
    """What a sub-stage does."""

    async def __call__(self, launch: Launch) -> Outcome:
        """Do a launch's part. Raises whatever goes wrong: the launch is tried again, then given up with the run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a launch has led to."""

    items: int | None = None  # that were done: fewer than the launch's where a text ends, more of a prompt; None: all
    finished: bool = False  # its sub-stage ends with it
    added: Sequence[tuple[SubStage, Work]] = ()
    resized: Sequence[tuple[SubStageId, int]] = ()
    dropped: Sequence[SubStageId] = ()


class WorkflowDriver:
    """Belongs to the event loop. Requests are numbered by `next_request`, sub-stages by `ids`."""

    def __init__(
        self,
        registry: UnitRegistry,
        profiles: ProfileStore | None = None,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self.registry = registry
        self.ids: Iterator[int] = count(1)
        self.profiles = profiles or ProfileStore()
        self._requests = count(1)
        self._scheduler = WorkflowScheduler(registry.units, self.profiles, templates(registry.models), policy)
        self._work: dict[SubStageId, tuple[SubStage, Work]] = {}
        self._tasks: dict[int, asyncio.Task[Outcome]] = {}  # by launch
        self._ended: dict[int, Callable[[PacelineError | None], None]] = {}  # by request
        self._begins: dict[int, float] = {}  # by launch under way
        self._units: dict[int, str] = {}  # likewise
        self._closed = False

    def begin(self, ended: Callable[[PacelineError | None], None]) -> int:
        """The number of a new request. ended: called once, with None when all its sub-stages have ended, or with the
        reason why it cannot go on."""
        request = next(self._requests)
        self._ended[request] = ended
        return request

    def add(self, nodes: Sequence[tuple[SubStage, Work]]) -> None:
        self._work |= {node.id: (node, work) for node, work in nodes}
        self._tell(Added(self._now(), [node for node, _ in nodes]))

    def cancel(self, request: int) -> None:
        """Stop every launch of a request and forget it. Its sub-stages' generations are the caller's to close."""
        self._ended.pop(request, None)
        self._tell(Dropped(self._now(), [node.id for node, _ in self._work.values() if node.request == request]))
        self._forget(request)

    def other_began(self, number: int, unit: str, operation: str, items: int) -> None:
        """See `plain_work`."""
        self._tell(OtherBegan(self._now(), number, unit, operation, items))

    def other_ended(self, number: int, items: int | None) -> None:
        self._tell(OtherEnded(self._now(), number, items))

    def reach(self, units: Sequence[str], latency_s: float, bytes_per_s: float) -> None:
        """Units elsewhere may be used, and this is what the way there takes."""
        for name in units:
            self._tell(UnitMoved(self._now(), name, latency_s, bytes_per_s))
            self._tell(UnitBack(self._now(), name))

    def lose(self, units: Sequence[str]) -> None:
        """Units are gone, all at once. What ran there, the caller's own launch included, begins again on others."""
        for number, running in list(self._tasks.items()):
            if self._units[number] in units:
                running.cancel()
        if units:
            self._tell(UnitLost(self._now(), units[0], units[1:]))

    def waits_for(self, node: SubStageId) -> set[str]:
        """Stages that a sub-stage needs, directly or not, and that have not ended."""
        return {each.stage for each in self._scheduler.graph.before(node)}

    @property
    def under_way(self) -> int:
        """Launches."""
        return len(self._tasks)

    def seconds(self, launch: Launch) -> float:
        """Seconds since a launch began that is under way."""
        return self._now() - self._begins[launch.id]

    async def close(self) -> None:
        """Cancel all, and tell each request so. Nothing may be added after."""
        self._closed = True
        for request in list(self._ended):
            self._end(request, PacelineError("the program is shutting down"))
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.registry.close()

    def _tell(self, event: WorkflowEvent) -> None:
        if self._closed:
            return
        for effect in self._scheduler.on(event):
            match effect:
                case Launch():
                    _, work = self._work[effect.sub_stage]
                    task = asyncio.get_running_loop().create_task(work(effect))
                    self._tasks[effect.id] = task
                    self._begins[effect.id], self._units[effect.id] = self._now(), effect.unit
                    task.add_done_callback(partial(self._done, effect))
                case Cancel(launch):
                    if (running := self._tasks.get(launch)) is not None:  # else it has just ended, and says so next
                        running.cancel()
                case RequestDone(request):
                    self._end(request, None)
                case Unrunnable(sub_stage):
                    node, _ = self._work[sub_stage]
                    fault = f"The workflow cannot go on: its stage {node.stage} has failed everywhere."
                    self._end(node.request, PacelineError(fault))

    def _done(self, launch: Launch, task: asyncio.Task[Outcome]) -> None:
        """A launch has ended; also one that was cancelled before its first step, of which its work knows nothing."""
        del self._tasks[launch.id], self._begins[launch.id], self._units[launch.id]
        if task.cancelled():
            log.debug("launch %s on %s was cancelled", launch.id, launch.unit)
        elif (error := task.exception()) is not None:
            log.error("a part of a workflow has failed on %s", launch.unit, exc_info=error)
        else:
            self._took(launch, task.result())
            return
        self._tell(Failed(self._now(), launch.id))

    def _took(self, launch: Launch, outcome: Outcome) -> None:
        if launch.sub_stage in self._work:  # else its request was cancelled
            if outcome.added:
                self.add(outcome.added)
            for node, items in outcome.resized:
                self._tell(Resized(self._now(), node, items))
            if outcome.dropped:
                self._tell(Dropped(self._now(), outcome.dropped))
        self._tell(Ended(self._now(), launch.id, outcome.finished, outcome.items))

    def _end(self, request: int, fault: PacelineError | None) -> None:
        if (ended := self._ended.pop(request, None)) is not None:
            ended(fault)
        if fault is None:
            self._forget(request)

    def _forget(self, request: int) -> None:
        self._work = {number: item for number, item in self._work.items() if item[0].request != request}

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
