"""Processing units of a node, through which all of its work passes: lanes of the engine, threads of the host, the
link; and the turns that owners of work take.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from paceline.core.fair import FairQueue
from paceline.core.side import Zone
from paceline.rag.embedder import compute_here
from paceline.settings_tables import TASKS, Task
from paceline.system import Threads, cores
from paceline.workflow.flows import ANSWER, EMBED, FETCH, SCORE, SEARCH, SEARCH_FAR, WRITE
from paceline.workflow.graph import ProcessingUnit


class Turnstile:
    """`core.fair.FairQueue` of work that is waited for. Belongs to one event loop."""

    def __init__(self, places: float = math.inf, *, most: int = 1) -> None:
        """places: at once. most: of one owner."""
        self._queue = FairQueue(places, most=most)

    async def enter(self, owner: str) -> None:
        """Wait for a place, to be given back by `leave`. Cancelled, there is none to give back."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()

        def call() -> None:
            if turn.cancelled():
                loop.call_soon(self.leave, owner)
            else:
                turn.set_result(None)

        self._queue.enter(owner, call)
        try:
            await turn
        except asyncio.CancelledError:
            self._queue.leave(call)
            if not turn.cancelled():
                self.leave(owner)
            raise

    def leave(self, owner: str) -> None:
        self._queue.give_back(owner)

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        await self.enter(owner)
        try:
            yield
        finally:
            self.leave(owner)


T = TypeVar("T")


def pin(cores: Set[int]) -> None:
    """Keep the calling thread, and the threads that it will start, on these cores. Empty: wherever there is time."""
    if cores:
        os.sched_setaffinity(0, cores)


def settle(cores: Set[int], least: int = 0) -> None:
    """Keep this thread on these cores, and have models compute in it there. Empty: it runs wherever there is time, and
    models compute in it with `least` threads; 0: on threads of their own."""
    pin(cores)
    if threads := len(cores) or least:
        compute_here(threads)


# A lane is one sequence's place in the engine's steps: launches on several lanes are batched, and slow each other down
# as units of one memory do. A host unit is one thread, on cores of its own where those are given.
ENGINE: Final = "engine"  # kind of a lane
HOST: Final = "cpu"
LINK: Final = "link"
CLOUD: Final = "cloud"  # kind of a text that the cloud's model writes for a device
OUTSIDE: Final = "outside"  # likewise a stranger's endpoint; the strategy that asks for it, and the kind of its bytes
LANES: Final = 4  # of an engine, by default
SEARCHES: Final = 4  # at once, of the other side: a mute one takes seconds
TEXTS: Final = 4  # at once, that the cloud writes
MAX_LEFT: Final = 8  # threads of a node whose work took too long and has not ended
PAGES: Final = 4  # of the web, at once, and searches for them
THREADS: Final = min(32, (os.cpu_count() or 1) + 4)  # of a host unit, as asyncio's own; on two cores 8 cost 5 % more


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
    engine: str = ENGINE  # name of its lanes
    engine_cores: frozenset[int] = frozenset()


class UnitRegistry:
    """All units of one node, for launches of workflows (`run`) and for the work of requests without one (`do`, and
    uploaded files). Belongs to the event loop. `close` ends the threads.

    The link, the cloud, strangers and the web are units that are waited for, and take none of this host's time. The
    work of requests never waits for a launch: a host unit has further threads for it, on the same cores. It is done on
    the unit with least under way of those that do such work, and where there is more than threads, in turns of owners.
    """

    def __init__(
        self,
        zone: Zone,
        found: NodeUnits | None = None,
        *,
        web: bool = False,
        cloud: bool = False,
        outside: bool = False,
    ) -> None:
        """web: pages can be searched for and fetched. cloud: the cloud's model may write texts, for a device. outside:
        likewise a stranger's endpoint. Raises ValueError for cores that this process may not use."""
        found = found or NodeUnits()
        self.zone = zone
        self.hosts = found.hosts
        self._busy: list[str] = []  # host units, once for each work under way; changed in any thread
        self._left = set[Future[Any]]()  # that nobody waits for any more
        allowed = cores()
        if wrong := {core for host in self.hosts for core in host.cores} - allowed:
            raise ValueError(f"this process may not run on the cores {sorted(wrong)}; it may on {sorted(allowed)}")
        if missing := set(TASKS) - {task for host in self.hosts for task in host.does}:
            raise ValueError(f"no unit does {' and '.join(sorted(missing))}")
        tasks: dict[Task, str] = {"embed": EMBED.model, "rerank": SCORE.model, "search": SEARCH.model}
        units = [
            ProcessingUnit(host.name, host.kind, frozenset(tasks[task] for task in host.does), zone, "host")
            for host in self.hosts
        ]
        for name, kind, models, where, count in (
            (found.engine, ENGINE, {WRITE.model, ANSWER.model}, zone, found.lanes),
            (LINK, LINK, {SEARCH_FAR.model}, "cloud", SEARCHES),
            (CLOUD, CLOUD, {WRITE.model}, "cloud", TEXTS if cloud else 0),
            (OUTSIDE, OUTSIDE, {WRITE.model}, "cloud", TEXTS if outside else 0),
            ("web", "web", {FETCH.model}, "cloud", PAGES if web else 0),
        ):
            units += [ProcessingUnit(f"{name} {n}", kind, frozenset(models), where, kind) for n in range(count)]
        self.units = tuple(units)
        self._threads = {host.name: _thread(host) for host in self.hosts}
        self._plain = {
            host.name: Threads(THREADS, f"requests {host.name}", settle, (host.cores,)) for host in self.hosts
        }
        self._turns = Turnstile(THREADS, most=THREADS)

    async def run(self, unit: str, work: Callable[[], T]) -> T:
        """Call `work` on a host unit's thread. Cancelled, as when it takes too long, it runs to its end there and its
        result is dropped; what comes next has another thread, unless `MAX_LEFT` such ends are waited for already."""
        working = self._threads[unit].submit(work)
        with self._counted(unit):
            try:
                return await asyncio.wrap_future(working)
            except asyncio.CancelledError:
                if not working.done() and len(self._left) < MAX_LEFT:
                    self._left.add(working)
                    working.add_done_callback(self._left.discard)
                    self._threads[unit].shutdown(wait=False)
                    self._threads[unit] = _thread(next(host for host in self.hosts if host.name == unit))
                raise

    async def do(self, task: Task, work: Callable[[], T], owner: str) -> T:
        """Call `work` of a request. Cancelled, it runs to its end and its result is dropped."""
        async with self._turns.turn(owner):
            busy = Counter(self._busy)
            unit = min((host.name for host in self.hosts if task in host.does), key=lambda name: busy[name])
            with self._counted(unit):
                return await asyncio.get_running_loop().run_in_executor(self._plain[unit], work)

    def indexing(self) -> AbstractContextManager[None]:
        """Around the embedding of files, in any thread but the loop's, which stays on the unit's cores."""
        return self._reading_in(0)

    def parsing(self) -> AbstractContextManager[None]:
        """Around the parsing of a file, likewise: a process that the thread starts stays on these cores too. Where
        several units embed, it is not the one that embeds files."""
        return self._reading_in(-1)

    @contextmanager
    def _reading_in(self, place: int) -> Iterator[None]:
        """place: of the unit among those that embed."""
        host = [host for host in self.hosts if "embed" in host.does][place]
        settle(host.cores)
        with self._counted(host.name):
            yield

    @contextmanager
    def _counted(self, unit: str) -> Iterator[None]:
        self._busy.append(unit)
        try:
            yield
        finally:
            self._busy.remove(unit)

    def close(self) -> None:
        """Drop what waits for the threads; what they are at ends by itself."""
        for threads in (*self._threads.values(), *self._plain.values()):
            threads.shutdown(wait=False, cancel_futures=True)


def _thread(host: HostUnit) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, f"unit {host.name}", initializer=settle, initargs=(host.cores, 1))
