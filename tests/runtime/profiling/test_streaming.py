"""The process that copies memory, as a process."""

from __future__ import annotations

import asyncio
import os

import pytest

from paceline.errors import PacelineError
from paceline.runtime.profiling import CopyingProcesses, Operation, OtherLaunches

pytestmark = pytest.mark.anyio


async def test_copies_move_memory_while_they_are_wanted_on_the_cores_that_the_engine_leaves() -> None:
    cores = sorted(os.sched_getaffinity(0))
    async with CopyingProcesses(threads=len(cores)) as copying:
        assert copying.shared and copying.cores == cores[-1:]
        assert await copying.copy(1.0) == 0.0
        while not (moved := await copying.copy(1.0)):
            await asyncio.sleep(0)
        for share in (0.5, 0.0, 0.0):
            now = await copying.copy(share)
            assert now >= moved
            moved = now
        (process,) = copying._processes
        process.kill()
        await process.wait()
        with pytest.raises(PacelineError, match="ended or is mute"):
            await copying.copy(1.0)
    assert process.returncode is not None


async def test_other_launches_go_on_until_they_are_not_wanted_and_then_end() -> None:
    running, ended = 0, 0
    go = asyncio.Semaphore(0)

    async def launch(items: int) -> float:
        nonlocal running, ended
        running += 1
        await go.acquire()
        running, ended = running - 1, ended + 1
        return float(items)

    load = OtherLaunches(Operation(("a/b",), "cpu", (1,), launch), 1, 4.0, lanes=2)
    for _ in range(2):
        go.release()
    await load.begin()
    while running < 2:
        await asyncio.sleep(0)
    ending = asyncio.create_task(load.end())
    for _ in range(2):
        go.release()
    await ending
    assert (running, ended) == (0, 4) and "2 lanes" in load.name
