"""Carries out the launches of the scheduler of all workflows of a node, and tells it how they end."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

from paceline.errors import PacelineError
from paceline.runtime.units import UnitRegistry
from paceline.workflow import graph
from paceline.workflow.profiles import Profiles
from paceline.workflow.scheduler import WorkflowScheduler

log = logging.getLogger("paceline.workflow")
Heard = Callable[[PacelineError | None], None]


class WorkflowDriver:
    """Belongs to the event loop."""

    def __init__(self, registry: UnitRegistry) -> None:
        self.registry = registry
        self.profiles = Profiles()
        self._scheduler = WorkflowScheduler(registry.units, self.profiles)
        self._running: dict[int, tuple[graph.Launch, asyncio.Future[graph.Outcome], float]] = {}  # with when it began
        self._ended: dict[graph.Request, Heard] = {}
        self._closed = False

    def begin(self, request: graph.Request, stages: Sequence[graph.Stage], ended: Heard) -> None:
        """Run a request's stages. ended: called once, with None when all have ended, or with the reason why it cannot
        go on."""
        self._ended[request] = ended
        self._tell(graph.StagesAdded(self._now(), stages))

    def cancel(self, request: graph.Request) -> None:
        """Stop every launch of a request and forget it. Its stages' generations are the caller's to close."""
        self._ended.pop(request, None)
        self._tell(graph.Left(self._now(), request))

    def reach(self, units: Sequence[str], latency_s: float, bytes_per_s: float | None) -> None:
        """Units elsewhere may be used, and this is what the way there takes. bytes_per_s: None: not known."""
        self._tell(graph.UnitsBack(self._now(), units, latency_s, math.inf if bytes_per_s is None else bytes_per_s))

    def lose(self, units: Sequence[str]) -> None:
        """Units are gone, all at once. What ran there, the caller's own launch included, begins again on others."""
        for launch, running, _ in list(self._running.values()):
            if launch.unit in units:
                running.cancel()
        self._tell(graph.UnitsLost(self._now(), units))

    def seconds(self, launch: graph.Launch) -> float:
        """Seconds since a launch began that is under way."""
        return self._now() - self._running[launch.id][2]

    async def close(self) -> None:
        """Cancel all, and tell each request so. Nothing may be added after."""
        self._closed = True
        for request in list(self._ended):
            self._end(request, PacelineError("the program is shutting down"))
        tasks = [task for _, task, _ in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tell(self, event: graph.WorkflowEvent) -> None:
        if self._closed:
            return
        for effect in self._scheduler.on(event):
            match effect:
                case graph.Launch(stage=stage):
                    task = asyncio.ensure_future(stage.run(effect))
                    self._running[effect.id] = effect, task, self._now()
                    task.add_done_callback(partial(self._done, effect))
                case graph.Cancel(launch):
                    if launch in self._running:  # else it has just ended, and says so next
                        self._running[launch][1].cancel()
                case graph.StagesDone(request):
                    self._end(request, None)
                case graph.Unrunnable(stage):
                    fault = f"The workflow cannot go on: its stage {stage.name} has failed everywhere."
                    self._end(stage.request, PacelineError(fault))

    def _done(self, launch: graph.Launch, task: asyncio.Future[graph.Outcome]) -> None:
        """A launch has ended; also one that was cancelled before its first step, of which its work knows nothing."""
        del self._running[launch.id]
        if task.cancelled():
            log.debug("launch %s on %s was cancelled", launch.id, launch.unit)
        elif (error := task.exception()) is not None:
            log.error("a part of a workflow has failed on %s", launch.unit, exc_info=error)
        else:
            self._tell(graph.Ended(self._now(), launch.id, task.result()))
            return
        self._tell(graph.Failed(self._now(), launch.id))

    def _end(self, request: graph.Request, fault: PacelineError | None) -> None:
        if (ended := self._ended.pop(request, None)) is not None:
            ended(fault)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
