"""Units of a machine, and work on them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import closing

import pytest

from paceline.errors import PacelineError
from paceline.rag.embedder import ComputeThreads
from paceline.rag.parsing.process import ParserPool, memory_file
from paceline.runtime.units import MAX_LEFT, HostUnit, NodeUnits, UnitRegistry
from paceline.runtime.workflows.lookup import within

pytestmark = pytest.mark.anyio

CORE = min(os.sched_getaffinity(0))


async def test_a_unit_does_what_it_is_for_on_its_cores_and_models_compute_there() -> None:
    hosts = (HostUnit("left", frozenset({CORE}), frozenset({"rerank"})), HostUnit("right", frozenset()))
    registry = UnitRegistry("device", NodeUnits(hosts, lanes=2, engine="gpu"))
    by_name = {unit.name: unit for unit in registry.units}
    assert by_name["left"].models == {"rerank"} and by_name["right"].models == {"rerank", "embed", "host"}
    assert {name for name in by_name if name.startswith("gpu")} == {"gpu 0", "gpu 1"}
    model = ComputeThreads(1, "model", 1)

    def look() -> tuple[set[int], str]:
        return model.run(lambda: (os.sched_getaffinity(0), threading.current_thread().name))

    cores, thread = await registry.run("left", look)
    assert cores == {CORE} and thread.startswith("unit left")
    assert (await registry.run("right", look))[1].startswith("unit right")
    assert (await asyncio.to_thread(look))[1].startswith("model")  # of the model, where the caller is no unit
    registry.close()


def test_what_no_unit_does_is_refused() -> None:
    with pytest.raises(ValueError, match="no unit does embed and search"):
        UnitRegistry("device", NodeUnits((HostUnit("left", does=frozenset({"rerank"})),)))
    with pytest.raises(ValueError, match="may not run on"):
        UnitRegistry("device", NodeUnits((HostUnit("cpu", frozenset({100_000})),)))


async def test_work_that_takes_too_long_keeps_nothing_else_waiting() -> None:
    registry, go, begun = UnitRegistry("device"), threading.Event(), threading.Semaphore(0)

    def stuck() -> bool:
        begun.release()
        return go.wait()

    async def run() -> None:
        await within(5, asyncio.to_thread(begun.acquire))

    try:
        for number in range(MAX_LEFT):
            working = asyncio.create_task(registry.run("cpu", stuck))
            await run()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            assert len(registry._left) == number + 1
            assert await within(10, registry.run("cpu", lambda: 5)) == 5
        working = asyncio.create_task(registry.run("cpu", stuck))
        await run()
        with pytest.raises(PacelineError, match="no end within"):
            await within(0.01, working)  # one too many: it keeps its thread
        assert len(registry._left) == MAX_LEFT
    finally:
        go.set()
        registry.close()


# ---- plain requests on the units of a node --------------------------------------------------------------------------
HOSTS = (HostUnit("left", frozenset({CORE})), HostUnit("right", does=frozenset({"search", "embed"})))


@pytest.fixture
async def units() -> AsyncIterator[UnitRegistry]:
    registry = UnitRegistry("device", NodeUnits(HOSTS))
    yield registry
    assert not registry._busy, "nothing is under way"
    registry.close()


def look() -> tuple[set[int], str]:
    return os.sched_getaffinity(0), threading.current_thread().name


async def test_a_request_waits_for_no_launch_and_goes_where_least_runs(units: UnitRegistry) -> None:
    held, let_go = threading.Event(), threading.Event()
    assert (await units.do("search", look, ""))[1].startswith("requests left")

    def hold() -> None:
        held.set()
        let_go.wait(60)

    launch = asyncio.create_task(units.run("left", hold))
    await asyncio.to_thread(held.wait, 60)
    assert (await units.do("search", look, ""))[1].startswith("requests right")
    cores, thread = await units.do("rerank", look, "")  # which only the busy unit does: beside its launch, on its core
    assert thread.startswith("requests left") and cores == {CORE}
    let_go.set()
    await launch
    assert (await units.do("embed", look, ""))[1].startswith("requests left")


async def test_the_thread_that_embeds_files_stays_on_the_cores_of_its_unit(units: UnitRegistry) -> None:
    def index(fault: int) -> set[int]:
        with units.indexing():
            return look()[0] if fault == 0 else {1 // 0}

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(index, 1)
    assert await asyncio.to_thread(index, 0) == {CORE}


async def test_a_file_is_parsed_on_the_cores_of_another_unit_than_it_is_embedded_on_where_there_is_one(
    units: UnitRegistry,
) -> None:
    with closing(ParserPool(1)) as parsers:
        parsing = parsers.submit("notes.md", lambda: memory_file(b"# Keys\n\nIn the hall.\n"), units.parsing)
        parsed = await asyncio.wrap_future(parsing)
    assert parsed.title == "Keys"
