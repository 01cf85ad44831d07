"""Measuring what operations take on a node's units, in advance: `paceline profile`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from statistics import median
from types import TracebackType
from typing import Final, Protocol, Self

import numpy as np
import psutil

from paceline.core.batching.segment import Segment, SeqId
from paceline.engine.base import LoadedModel
from paceline.errors import PacelineError
from paceline.rag.rerank import Reranker
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.engine_loop.executor import StepLimits
from paceline.runtime.engine_loop.requests import SequenceOp
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.units import ENGINE, LANES, NodeUnits, UnitRegistry
from paceline.runtime.workflows.kept_profiles import CONTEXT, KeptProfiles, StoredProfiles
from paceline.runtime.workflows.places import CANDIDATES
from paceline.runtime.workflows.run import own_reranker
from paceline.strategies.base import Side
from paceline.workflow.profiling import (
    ENOUGH,
    KEPT,
    LOWEST,
    ContentionSamples,
    Demand,
    LearningProfiles,
    OperationProfile,
    ShapePoint,
)

# Launches to be measured: prompts and tokens on the engine's lanes; embedding, reranking and search on a host thread.
#
# A decoded token has `CONTEXT` rows before it where the model has room for them. Sampling and texts are not part of
# the launches: what they add is learnt while workflows run.


PROMPTS: Final = (32, 128, 512)  # tokens
TEXTS: Final = (1, 4, 16)  # tokens
EMBEDDED: Final = (1, 4, 16)  # texts
RERANKED: Final = (1, 2, 4, 8)  # passages
QUESTION: Final = "When does the library open, and who keeps the key of the reading room?"
PASSAGE: Final = " ".join(["The reading room opens at nine, and its key hangs behind the broom in the hall."] * 8)
TOKEN: Final = 1

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Operation:
    """One that is measured. names: under which it is stored. launch: runs so many items and returns its seconds."""

    names: tuple[str, ...]
    kind: str  # of unit
    shapes: Sequence[int]  # rising
    launch: Callable[[int], Awaitable[float]]


@dataclass(slots=True)
class EngineLanes:
    """Launches of an engine whose worker runs; each has a sequence of its own. `close` releases them."""

    worker: EngineWorker
    clock: Clock
    max_positions: int
    _free: list[SeqId] = field(default_factory=list)  # with their context

    @property
    def context(self) -> int:
        """Rows before decoded tokens."""
        return max(1, min(CONTEXT, self.max_positions // 2))

    def fitting(self, shapes: Sequence[int]) -> tuple[int, ...]:
        """Shapes that the model has room for, behind the context."""
        return tuple(n for n in shapes if n <= self.max_positions - self.context) or (1,)

    async def prefill(self, tokens: int) -> float:
        seq = self.worker.allocate()
        try:
            began = self.clock()
            await self.worker.compute(Segment(seq, 0, (TOKEN,) * tokens))
            return self.clock() - began
        finally:
            self.worker.submit(SequenceOp.release(seq))

    async def decode(self, tokens: int) -> float:
        fresh = not self._free
        seq = self.worker.allocate() if fresh else self._free.pop()
        try:
            if fresh:
                await self.worker.compute(Segment(seq, 0, (TOKEN,) * self.context))
            began = self.clock()
            for row in range(tokens):
                await self.worker.compute(Segment(seq, self.context + row, (TOKEN,)))
            seconds = self.clock() - began
        except BaseException:
            self.worker.submit(SequenceOp.release(seq))
            raise
        self.worker.submit(SequenceOp.truncate(seq, self.context))
        self._free.append(seq)
        return seconds

    def close(self) -> None:
        for seq in self._free:
            self.worker.submit(SequenceOp.release(seq))
        self._free.clear()


def engine_operations(lanes: EngineLanes, registry: UnitRegistry) -> list[Operation]:
    """Agents and answers are written by one model on the same lanes, so they share their profiles."""
    models = dict.fromkeys((registry.models.agent, registry.models.chat))
    return [
        Operation(tuple(f"{model}/prefill" for model in models), ENGINE, lanes.fitting(PROMPTS), lanes.prefill),
        Operation(tuple(f"{model}/decode" for model in models), ENGINE, lanes.fitting(TEXTS), lanes.decode),
    ]


def host_operations(
    registry: UnitRegistry, store: DocumentStore, reranker: Reranker | None, clock: Clock
) -> list[Operation]:
    """On the first host unit of each kind that does it. A search only where there is something to find, reranking where
    it is done."""
    models, embedder = registry.models, store.embedder

    def on_each_kind(
        model: str, phase: str, shapes: Sequence[int], work: Callable[[int], object]
    ) -> Iterator[Operation]:
        units = {unit.kind: unit.name for unit in reversed(registry.units) if model in unit.models}
        for kind, unit in units.items():
            yield Operation((f"{model}/{phase}",), kind, shapes, partial(timed, unit, work))

    async def timed(unit: str, work: Callable[[int], object], items: int) -> float:
        began = clock()
        await registry.run(unit, lambda: work(items))
        return clock() - began

    def embed(texts: int) -> object:
        return embedder.embed([QUESTION] if texts == 1 else [PASSAGE] * texts)

    found = list(on_each_kind(models.embed, "encode", EMBEDDED, embed))
    if store.count():
        vector = embedder.embed([QUESTION])[0]

        def search(_: int) -> object:
            return store.search(QUESTION, CANDIDATES, vector=vector)

        found += on_each_kind(models.host, "search", (1,), search)
    if reranker is not None:

        def rerank(passages: int) -> object:
            return reranker.score(QUESTION, [PASSAGE] * passages)

        found += on_each_kind(models.rerank, "score", RERANKED, rerank)
    return found


# What runs beside a launch that is measured: other processes that copy memory, or other launches.


SHARES: Final = (0.25, 0.5, 1.0)  # of their time that copying processes copy
PROCESSES: Final = 8  # at most
CALIBRATION_S: Final = 0.3
ANSWER_S: Final = 20.0  # for which a copying process may be silent


class Load(Protocol):
    """begin and end in turns; between them it asks for `bandwidth`, in GB/s."""

    @property
    def name(self) -> str: ...

    @property
    def bandwidth(self) -> float: ...

    async def begin(self) -> None: ...

    async def end(self) -> None: ...


class CopyingProcesses:
    """Processes that stream memory, one on each core that the engine's threads leave, or on the last core if they
    leave none. Use as an async context manager."""

    def __init__(self, threads: int) -> None:
        """threads: of the engine."""
        cores = sorted(os.sched_getaffinity(0))
        self.shared = threads >= len(cores)  # they also take time from the engine's threads
        self.cores = (cores[-1:] if self.shared else cores[threads:])[:PROCESSES]
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_exit(self.__aexit__)
            for core in self.cores:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "paceline.runtime.profiling",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                self._processes.append(process)
                os.sched_setaffinity(process.pid, {core})
            await self.copy(0.0)  # they have begun
            stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.communicate()
        self._processes.clear()

    async def copy(self, share: float) -> float:
        """Copy for this share of the time from now on; returns GB that were moved so far."""
        return sum([await self._tell(process, share) for process in self._processes]) / 1e9

    async def loads(self, clock: Clock) -> list[Load]:
        """One for each share, with what it moves while nothing is measured."""
        found: list[Load] = []
        for share in SHARES:
            before, began = await self.copy(share), clock()
            await asyncio.sleep(CALIBRATION_S)
            moved, seconds = await self.copy(0.0) - before, clock() - began
            found.append(Copying(self, share, moved / max(seconds, 1e-9)))
        return found

    @staticmethod
    async def _tell(process: asyncio.subprocess.Process, share: float) -> int:
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                process.stdin.write(f"{share}\n".encode())
                await process.stdin.drain()
                return int(await process.stdout.readline())
        except (OSError, ValueError, TimeoutError) as error:
            raise PacelineError("a process that copies memory beside the measurement has ended or is mute") from error


@dataclass(frozen=True, slots=True)
class Copying:
    processes: CopyingProcesses
    share: float
    bandwidth: float

    @property
    def name(self) -> str:
        return f"copies of memory {self.share:.0%} of the time"

    async def begin(self) -> None:
        await self.processes.copy(self.share)

    async def end(self) -> None:
        await self.processes.copy(0.0)


@dataclass(slots=True)
class OtherLaunches:
    """Launches of another operation, or of the same one, one after the other on each of `lanes` units."""

    operation: Operation
    shape: int
    bandwidth: float
    lanes: int = 1
    _running: Sequence[asyncio.Task[None]] = ()
    _wanted: bool = False
    _warm: bool = False

    @property
    def name(self) -> str:
        times = f" on {self.lanes} lanes" if self.lanes > 1 else ""
        return f"{self.operation.names[-1]} of {self.shape}{times}"

    async def begin(self) -> None:
        self._wanted = True
        if not self._warm:
            await asyncio.gather(*(self.operation.launch(self.shape) for _ in range(self.lanes)))
            self._warm = True
        self._running = [asyncio.create_task(self._run()) for _ in range(self.lanes)]
        await asyncio.sleep(0)  # they are under way

    async def end(self) -> None:
        """The launches under way come to their ends."""
        self._wanted = False
        running, self._running = self._running, ()
        await asyncio.gather(*running)

    async def _run(self) -> None:
        while self._wanted:
            await self.operation.launch(self.shape)
            await asyncio.sleep(0)  # an operation of no time at all leaves the others their turns


# The plan of a measurement: seconds of each operation by shape, then slowdowns, all within a given time.
#
# A slowdown is measured in pairs: a launch beside a load, then the same alone, so that what else the machine does by
# and by is in both. Medians everywhere. Time is shared out evenly over what is left to do; a series that is out of
# time keeps what it has, and one that has less than three launches is left out, which a note says.


ALONE_SHARE: Final = 0.35  # of the time, for seconds by shape
MOST: Final = 15  # launches of a shape alone
FIT: Final = 8  # launches that a shape is to have room for in a series beside a load

Progress = Callable[[str, float], None]  # what is measured, and the share of the time that is over


@dataclass(slots=True)
class _Found:
    """What has been measured of an operation."""

    seconds: dict[int, list[float]] = field(default_factory=dict)  # by shape, alone
    samples: ContentionSamples = field(default_factory=ContentionSamples)


@dataclass(slots=True)
class Measurement:
    """budget: seconds in all; one launch may go beyond it. clock: seconds; it goes on while launches run."""

    operations: Sequence[Operation]
    demand: Demand
    budget: float
    clock: Clock
    progress: Progress = lambda _, __: None
    notes: list[str] = field(default_factory=list)
    _found: dict[str, _Found] = field(default_factory=dict)  # by the operation's first name
    _began: float = 0.0

    async def run(self, loads: Sequence[Load]) -> LearningProfiles:
        """Measure all. loads: beside every operation, besides the launches of other operations."""
        self._began = self.clock()
        await self._alone()
        measured = [operation for operation in self.operations if self._found[operation.names[0]].seconds]
        measured.sort(
            key=lambda each: min(map(median, self._found[each.names[0]].seconds.values()))
        )  # the slowest last
        series = [(each, load) for each in measured for load in [*loads, *self._others(each, measured)]]
        for place, (operation, load) in enumerate(series):
            self.progress(f"{operation.names[-1]} beside {load.name}", self._over)
            await self._beside(operation, load, self._left / (len(series) - place))
        self.progress("done", 1.0)
        return self._profiles()

    @property
    def _left(self) -> float:
        return max(0.0, self._began + self.budget - self.clock())

    @property
    def _over(self) -> float:
        return 1.0 - self._left / self.budget

    async def _alone(self) -> None:
        shapes = [(operation, shape) for operation in self.operations for shape in operation.shapes]
        end = self._began + ALONE_SHARE * self.budget
        slow: set[str] = set()  # operations whose larger shapes would take too long
        for place, (operation, shape) in enumerate(shapes):
            name = operation.names[0]
            found = self._found.setdefault(name, _Found())
            if name in slow:
                continue
            self.progress(f"{operation.names[-1]} of {shape}", self._over)
            slot = max(0.0, end - self.clock()) / (len(shapes) - place)
            began = self.clock()
            first = await operation.launch(shape)  # a warm-up
            seconds: list[float] = []
            while len(seconds) < MOST and (len(seconds) < ENOUGH or self.clock() - began < slot):
                if self.clock() + first > self._began + self.budget:
                    break
                seconds.append(await operation.launch(shape))
            if seconds:
                found.seconds[shape] = seconds
            larger = [each for each in operation.shapes if each > shape]
            if larger and (not seconds or first * larger[0] / shape * (1 + ENOUGH) > self._left / 2):
                slow.add(name)
                self.notes.append(f"{operation.names[-1]} of {larger[0]} and more takes too long to be measured.")

    def _others(self, operation: Operation, measured: Sequence[Operation]) -> list[Load]:
        """Launches of other kinds of units, and of the engine's other lanes."""
        found: list[Load] = []
        for other in measured:
            if other.kind == operation.kind and (other.kind != ENGINE or other.names[0] != operation.names[0]):
                continue
            seconds = self._found[other.names[0]].seconds
            shape = sorted(seconds)[len(seconds) // 2]
            each = self._bandwidth(other, shape, median(seconds[shape]))
            for lanes in (1, LANES - 1) if other is operation else (1,):
                found.append(OtherLaunches(other, shape, lanes * each, lanes))
        return found

    async def _beside(self, operation: Operation, load: Load, slot: float) -> None:
        found = self._found[operation.names[0]]
        known = {shape: median(seconds) for shape, seconds in found.seconds.items()}
        shape = max((n for n, seconds in known.items() if 2 * FIT * seconds <= slot), default=min(known))
        began = self.clock()
        pairs: list[tuple[float, float]] = []
        while len(pairs) < KEPT and (len(pairs) < ENOUGH or self.clock() - began < slot):
            if self.clock() + 2 * known[shape] > self._began + self.budget:
                break
            await load.begin()
            try:
                beside = await operation.launch(shape)
            finally:
                await load.end()
            pairs.append((beside, await operation.launch(shape)))
        if len(pairs) < ENOUGH:
            self.notes.append(f"There was no time for {operation.names[-1]} beside {load.name}.")
            return
        base = median(alone for _, alone in pairs)
        own = self._bandwidth(operation, shape, base)
        found.seconds[shape] += [alone for _, alone in pairs]
        for beside, alone in pairs:
            found.samples.add(max(own, LOWEST) + load.bandwidth, beside / base)
            found.samples.add(max(own, LOWEST), alone / base)

    def _bandwidth(self, operation: Operation, shape: int, seconds: float) -> float:
        """GB/s"""
        return self.demand(operation.names[0], operation.kind, shape) / 1e9 / seconds

    def _profiles(self) -> LearningProfiles:
        profiles, samples = {}, {}
        for operation in self.operations:
            found = self._found[operation.names[0]]
            if not found.seconds:
                self.notes.append(f"There was no time for {operation.names[-1]}.")
                continue
            points = [
                ShapePoint(shape, seconds, self._bandwidth(operation, shape, seconds))
                for shape, taken in found.seconds.items()
                for seconds in [max(median(taken), 1e-9)]
            ]
            for name in operation.names:
                profiles[name, operation.kind] = OperationProfile(points, found.samples.fit())
                samples[name, operation.kind] = ContentionSamples(found.samples)
        return LearningProfiles(profiles, samples, self.demand)


# The measurement of one side: its engine, its host threads, its documents.


BUSY: Final = 0.5  # processors that others keep busy, from which on a note says so


async def measure_side(
    side: Side,
    model: LoadedModel,
    store: DocumentStore,
    kept: KeptProfiles,
    units: NodeUnits,
    reranker: Reranker | None,
    *,
    limits: StepLimits,
    budget: float,
    progress: Progress,
) -> StoredProfiles:
    """Measure for so many seconds. Nothing is written. reranker: None for that of the store's own embedder, if it is
    one. Raises PacelineError."""
    others = psutil.getloadavg()[0]
    registry = units.registry(side, shared=kept.shared)
    worker = EngineWorker(model.engine, limits, cores=units.engine_cores)
    await worker.start()
    lanes = EngineLanes(worker, time.perf_counter, model.engine.info.max_positions)
    try:
        operations = [
            *engine_operations(lanes, registry),
            *host_operations(registry, store, reranker or own_reranker(store), time.perf_counter),
        ]
        measurement = Measurement(operations, kept.demand, budget, time.perf_counter, progress)
        async with CopyingProcesses(kept.conditions.threads) as copying:
            loads = await copying.loads(time.perf_counter)
            profiles = await measurement.run(loads)
    finally:
        lanes.close()
        await worker.stop()
        registry.close()
    notes = [
        f"{budget:g} s of measurement; medians; copies of memory on core {', '.join(map(str, copying.cores))} move "
        f"{' / '.join(f'{load.bandwidth:.3g}' for load in loads)} GB/s.",
        "GB/s of operations are estimates, from bytes of weights, keys and values over seconds; 0: unknown.",
    ]
    if copying.shared:
        notes.append("The engine's threads use every core, so slowdowns hold lost processor time, too.")
    if others > BUSY:
        notes.append(f"The machine was busy with other work: its load was {others:.1f} before.")
    if not store.count():
        notes.append("There are no documents, so searches were not measured.")
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    return StoredProfiles(kept.conditions, profiles, stamp, (*notes, *measurement.notes))


# A process that copies memory, for a share of its time, until its input ends: `python -m` this module.
#
# Each line of its input is the share from now on, 0 to 1; it answers with the bytes read and written so far.


BUFFER: Final = 64 << 20  # bytes, beyond what caches hold
PART: Final = 2 << 20  # bytes between two looks at the share
PAUSE_S: Final = 0.005  # between looks while it does nothing


class Copier:
    """Copies on the thread that calls `run`; `share` and `moved` may be used on any."""

    def __init__(self) -> None:
        self.share = 0.0
        self.moved = 0
        self.ended = False

    def run(self) -> None:
        source = np.ones(BUFFER // 8)
        target = np.zeros_like(source)
        rows, place = PART // 8, 0
        while not self.ended:
            share = self.share  # once: another thread sets it
            if share <= 0.0:
                time.sleep(PAUSE_S)
                continue
            began = time.perf_counter()
            target[place : place + rows] = source[place : place + rows]
            self.moved += 2 * PART
            place = (place + rows) % len(source)
            if share < 1.0:
                time.sleep((time.perf_counter() - began) * (1.0 / share - 1.0))


def main() -> None:
    copier = Copier()
    thread = threading.Thread(target=copier.run, daemon=True)
    thread.start()
    for line in sys.stdin:
        if not thread.is_alive():
            sys.exit("nothing is copied any more")
        copier.share = min(1.0, max(0.0, float(line)))
        sys.stdout.write(f"{copier.moved}\n")
        sys.stdout.flush()
    copier.ended = True
    thread.join()


if __name__ == "__main__":
    main()
