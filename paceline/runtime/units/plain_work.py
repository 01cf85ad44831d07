"""Work of requests without a workflow, on the units of a node: searches, embeddings, uploaded files, answers.

It never waits for a launch of a workflow: a host unit has further threads for it, on the same cores, and the engine
batches it. It is done on the unit with least under way of those that do such work. The scheduler of workflows, once
there is one, is told of it, so that launches beside it are predicted to take longer and profiles tell both apart.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from typing import Final, Protocol, TypeVar

from paceline.configuration.units import Task
from paceline.rag.compute_threads import compute_here
from paceline.runtime.cores import pin
from paceline.runtime.units.registry import ENGINE, UnitRegistry

T = TypeVar("T")
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
