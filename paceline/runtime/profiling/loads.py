"""What runs beside a launch that is measured: other processes that copy memory, or other launches."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from paceline.errors import PacelineError
from paceline.runtime.profiling.operations import Clock, Operation

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
                    "paceline.runtime.profiling.streaming",
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
