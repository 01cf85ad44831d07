"""Processing units of a node: lanes of its engine, threads of its host, the link to the other side.

A lane is one sequence's place in the engine's steps: launches on several lanes are batched, and slow each other down as
units of one memory do. A host unit is one thread, on cores of its own where those are given.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from paceline.configuration.units import TASKS, Task
from paceline.core.side import Zone
from paceline.rag.compute_threads import compute_here
from paceline.runtime.cores import allowed_cores, pin
from paceline.workflow.units import ProcessingUnit, WorkflowModels

T = TypeVar("T")
ENGINE: Final = "engine"  # kind of a lane
HOST: Final = "cpu"
LINK: Final = "link"
CLOUD: Final = "cloud"  # kind of a text that the cloud's model writes for a device
LANES: Final = 4  # of an engine, by default
SEARCHES: Final = 4  # at once, of the other side: a mute one takes seconds
TEXTS: Final = 4  # at once, that the cloud writes
MAX_LEFT: Final = 8  # threads of a node whose work took too long and has not ended
PAGES: Final = 4  # of the web, at once, and searches for them


@dataclass(frozen=True, slots=True)
class HostUnit:
    """A thread for work without a language model. cores: the only ones it runs on; empty: wherever there is time."""

    name: str
    cores: frozenset[int] = frozenset()
    does: frozenset[Task] = frozenset(TASKS)

    @property
    def kind(self) -> str:
        """Threads of a kind take the same time: those with the same number of cores."""
        return HOST if len(self.cores) < 2 else f"{HOST} x{len(self.cores)}"


@dataclass(frozen=True, slots=True)
class NodeUnits:
    """Units that a node is to have. engine_cores: the only ones that the engine's thread runs on; empty: any."""

    hosts: tuple[HostUnit, ...] = (HostUnit("cpu"),)
    lanes: int = LANES
    engine: str = ENGINE
    engine_cores: frozenset[int] = frozenset()

    def registry(self, zone: Zone, *, shared: bool = False, web: bool = False, cloud: bool = False) -> UnitRegistry:
        """shared: the engine computes on this host's processor, and on its memory. web, cloud: see `UnitRegistry`."""
        memory = "host" if shared else "engine"
        return UnitRegistry(
            zone, self.lanes, self.hosts, web=web, cloud=cloud, engine=self.engine, engine_memory=memory
        )

    def __str__(self) -> str:
        """In words that are equal where profiles of them may be believed."""
        hosts = sorted(f"{host.kind} {'+'.join(map(str, sorted(host.cores)))}".strip() for host in self.hosts)
        lanes = f"{self.lanes} lanes {'+'.join(map(str, sorted(self.engine_cores)))}".strip()
        return ", ".join((lanes, *hosts))


@dataclass(slots=True)
class UnitRegistry:
    """All units of one node. `close` ends the threads.

    engine: name of its lanes. web: pages can be searched for and fetched. cloud: the cloud's model may write texts, for
    a device. The link, the cloud and the web are units that are waited for, and take none of this host's time.
    """

    zone: Zone
    lanes: int = LANES
    hosts: Sequence[HostUnit] = (HostUnit("cpu"),)
    models: WorkflowModels = field(default_factory=WorkflowModels)
    web: bool = False
    cloud: bool = False
    engine: str = ENGINE
    engine_memory: str = "engine"  # that the lanes share; "host" where they compute on this host's processor
    units: tuple[ProcessingUnit, ...] = field(init=False)
    under_way: Counter[str] = field(init=False, default_factory=Counter)  # launches of each host unit
    _threads: dict[str, ThreadPoolExecutor] = field(init=False)
    _left: set[Future[Any]] = field(init=False, default_factory=set)  # that nobody waits for any more

    def __post_init__(self) -> None:
        """Raises ValueError for cores that this process may not use."""
        names, lanes = self.models, self.engine_memory
        generating = frozenset({names.agent, names.chat})
        tasks: dict[Task, str] = {"embed": names.embed, "rerank": names.rerank, "search": names.host}
        allowed = allowed_cores()
        if wrong := {core for host in self.hosts for core in host.cores} - allowed:
            raise ValueError(f"this process may not run on the cores {sorted(wrong)}; it may on {sorted(allowed)}")
        if missing := set(TASKS) - {task for host in self.hosts for task in host.does}:
            raise ValueError(f"no unit does {' and '.join(sorted(missing))}")
        self.units = (
            *(
                ProcessingUnit(host.name, host.kind, frozenset(tasks[task] for task in host.does), self.zone, "host")
                for host in self.hosts
            ),
            *(ProcessingUnit(f"{self.engine} {n}", ENGINE, generating, self.zone, lanes) for n in range(self.lanes)),
            *(ProcessingUnit(f"link {n}", LINK, frozenset({names.far}), "cloud", "far") for n in range(SEARCHES)),
            *(
                ProcessingUnit(f"{CLOUD} {n}", CLOUD, frozenset({names.agent}), "cloud", CLOUD)
                for n in range(TEXTS if self.cloud else 0)
            ),
            *(
                ProcessingUnit(f"web {n}", "web", frozenset({names.web}), "cloud", "web")
                for n in range(PAGES if self.web else 0)
            ),
        )
        self._threads = {host.name: _thread(host) for host in self.hosts}

    async def run(self, unit: str, work: Callable[[], T]) -> T:
        """Call `work` on a host unit's thread. Cancelled, as when it takes too long, it runs to its end there and its
        result is dropped; what comes next has another thread, unless `MAX_LEFT` such ends are waited for already."""
        self.under_way[unit] += 1
        working = self._threads[unit].submit(work)
        try:
            return await asyncio.wrap_future(working)
        except asyncio.CancelledError:
            if not working.done() and len(self._left) < MAX_LEFT:
                self._left.add(working)
                working.add_done_callback(self._left.discard)
                self._threads[unit].shutdown(wait=False)
                self._threads[unit] = _thread(next(host for host in self.hosts if host.name == unit))
            raise
        finally:
            self.under_way[unit] -= 1

    def close(self) -> None:
        """Drop what waits for the threads; what they are at ends by itself."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)


def _thread(host: HostUnit) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, f"unit {host.name}", initializer=_settle, initargs=(host.cores,))


def _settle(cores: frozenset[int]) -> None:
    """Keep this thread on its cores; what embedders and rerankers compute for it is computed there."""
    pin(cores)
    compute_here(max(1, len(cores)))
