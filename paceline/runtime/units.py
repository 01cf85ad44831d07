"""Processing units of a node, through which all of its work passes: lanes of the engine, threads of the host, the
link.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Protocol, TypeVar

from paceline.core.side import Zone
from paceline.rag.compute_threads import compute_here
from paceline.settings import TASKS, Task
from paceline.workflow.graph import ProcessingUnit, WorkflowModels

# Cores of this machine that a thread may be kept on, where the system supports that.


def allowed_cores() -> frozenset[int]:
    """Cores that this process may use; none where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def pin(cores: Set[int]) -> None:
    """Keep the calling thread, and the threads that it will start, on these cores. Empty: wherever there is time."""
    if cores:
        os.sched_setaffinity(0, cores)


# Processing units of a node: lanes of its engine, threads of its host, the link to the other side.
#
# A lane is one sequence's place in the engine's steps: launches on several lanes are batched, and slow each other down
# as units of one memory do. A host unit is one thread, on cores of its own where those are given.


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


# Work of requests without a workflow, on the units of a node: searches, embeddings, uploaded files, answers.
#
# It never waits for a launch of a workflow: a host unit has further threads for it, on the same cores, and the engine
# batches it. It is done on the unit with least under way of those that do such work. The scheduler of workflows, once
# there is one, is told of it, so that launches beside it are predicted to take longer and profiles tell both apart.


THREADS: Final = min(32, (os.cpu_count() or 1) + 4)  # of a host unit, as asyncio's own; on two cores 8 cost 5 % more


class Watcher(Protocol):
    """Is told of work as it begins and as it ends."""

    def other_began(self, number: int, unit: str, operation: str, items: int) -> None: ...

    def other_ended(self, number: int, items: int | None) -> None:
        """items: that there were; None: all."""


class PlainWork:
    """Belongs to the event loop, which must run while `indexing` is entered. `close` ends the threads."""

    def __init__(self, registry: UnitRegistry) -> None:
        self._registry = registry
        self._threads = {
            host.name: ThreadPoolExecutor(THREADS, f"requests {host.name}", initializer=settle, initargs=(host.cores,))
            for host in registry.hosts
        }
        self._lane = next(unit.name for unit in registry.units if unit.kind == ENGINE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = count(1)
        self._under_way: dict[int, str] = {}  # unit
        self._texts: dict[object, int] = {}
        self._watcher: Watcher | None = None

    def start(self) -> None:
        """Begin, in the running loop."""
        self._loop = asyncio.get_running_loop()

    def watch(self, watcher: Watcher) -> None:
        """Tell it of what begins from now on."""
        self._watcher = watcher

    async def search(self, work: Callable[[], T]) -> T:
        """Call `work`, which embeds a question, searches for it and makes prompts of what it finds."""
        return await self._run("search", f"{self._registry.models.host}/request", 1, work)

    async def embed(self, texts: int, work: Callable[[], T]) -> T:
        """Call `work`, which embeds so many texts."""
        return await self._run("embed", f"{self._registry.models.embed}/encode", texts, work)

    async def rerank(self, passages: int, work: Callable[[], T]) -> T:
        """Call `work`, which scores so many passages."""
        return await self._run("rerank", f"{self._registry.models.rerank}/score", passages, work)

    def begin_text(self, answer: object, tokens: int) -> None:
        """An answer of so many tokens at most is being written."""
        number = self._texts[answer] = next(self._numbers)
        self._begun(number, self._lane, f"{self._registry.models.chat}/decode", max(1, tokens))

    def end_text(self, answer: object) -> None:
        """An answer has ended, if it was begun. What it took is not learnt: much of that was waiting."""
        if (number := self._texts.pop(answer, None)) is not None:
            self._end(number, 0)

    def indexing(self) -> AbstractContextManager[None]:
        """Around the embedding of files, in any thread but the loop's, which stays on the unit's cores."""
        return self._reading_in(f"{self._registry.models.embed}/files", 0)

    def parsing(self) -> AbstractContextManager[None]:
        """Around the parsing of a file, likewise: a process that the thread starts stays on these cores too. Where
        several units embed, it is not the one that embeds files."""
        return self._reading_in(f"{self._registry.models.host}/parse", -1)

    @contextmanager
    def _reading_in(self, operation: str, place: int) -> Iterator[None]:
        """place: of the unit among those that embed."""
        loop, number = self._loop, next(self._numbers)
        assert loop is not None
        host = [host for host in self._registry.hosts if "embed" in host.does][place]
        settle(host.cores)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._begun, number, host.name, operation, 1)
        try:
            yield
        finally:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end, number, None)

    def close(self) -> None:
        """Drop what waits for the threads; what they are at ends by itself."""
        for pool in self._threads.values():
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, task: Task, operation: str, items: int, work: Callable[[], T]) -> T:
        """Cancelled, it runs to its end and its result is dropped."""
        unit = self._least_busy(task)
        number = next(self._numbers)
        self._begun(number, unit, operation, max(1, items))
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._threads[unit], work)
        except BaseException:
            self._end(number, 0)
            raise
        self._end(number, None)
        return result

    def _least_busy(self, task: Task) -> str:
        """The unit for this with the least work, launches of workflows included; of equals, the first."""
        busy = Counter(self._under_way.values()) + self._registry.under_way
        return min((host.name for host in self._registry.hosts if task in host.does), key=lambda name: busy[name])

    def _begun(self, number: int, unit: str, operation: str, items: int) -> None:
        self._under_way[number] = unit
        if self._watcher is not None:
            self._watcher.other_began(number, unit, operation, items)

    def _end(self, number: int, items: int | None) -> None:
        self._under_way.pop(number, None)
        if self._watcher is not None:
            self._watcher.other_ended(number, items)


def settle(cores: frozenset[int]) -> None:
    """Keep this thread on these cores and have models compute in it there. Empty: it runs wherever there is time, and
    models compute on threads of their own."""
    if cores:
        pin(cores)
        compute_here(len(cores))
