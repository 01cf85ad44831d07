"""Plain requests on the units of a node: at once beside launches, where least runs, and told to whoever schedules."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from functools import partial

import pytest

from paceline.rag.parsing.process import ParserPool, memory_file
from paceline.runtime.units import THREADS, HostUnit, NodeUnits, PlainWork, UnitRegistry

pytestmark = pytest.mark.anyio
CORE = min(os.sched_getaffinity(0))
HOSTS = (HostUnit("left", frozenset({CORE})), HostUnit("right", does=frozenset({"search", "embed"})))


@pytest.fixture
async def plain() -> AsyncIterator[tuple[UnitRegistry, PlainWork]]:
    registry = UnitRegistry("device", NodeUnits(HOSTS))
    work = PlainWork(registry)
    yield registry, work
    assert not work._busy, "nothing is under way"
    work.close()
    registry.close()


def look() -> tuple[set[int], str]:
    return os.sched_getaffinity(0), threading.current_thread().name


Plain = tuple[UnitRegistry, PlainWork]


async def test_a_request_waits_for_no_launch_and_goes_where_least_runs(plain: Plain) -> None:
    registry, work = plain
    held, let_go = threading.Event(), threading.Event()
    assert (await work.run("search", look, ""))[1].startswith("requests left")

    def hold() -> None:
        held.set()
        let_go.wait(60)

    launch = asyncio.create_task(registry.run("left", hold))
    await asyncio.to_thread(held.wait, 60)
    assert (await work.run("search", look, ""))[1].startswith("requests right")
    cores, thread = await work.run("rerank", look, "")  # which only the busy unit does: beside its launch, on its core
    assert thread.startswith("requests left") and cores == {CORE}
    let_go.set()
    await launch
    assert (await work.run("embed", look, ""))[1].startswith("requests left")


async def test_what_has_failed_or_was_left_no_longer_counts(plain: Plain) -> None:
    _, work = plain
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        let_go.wait(60)

    with pytest.raises(ZeroDivisionError):
        await work.run("embed", lambda: 1 // 0, "")
    left = asyncio.create_task(work.run("search", hold, ""))
    await asyncio.to_thread(held.wait, 60)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    let_go.set()


async def test_the_thread_that_embeds_files_stays_on_the_cores_of_its_unit(plain: Plain) -> None:
    _, work = plain

    def index() -> set[int]:
        with work.indexing():
            return look()[0]

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(_failing, work.indexing)
    thread: Callable[[], set[int]] = index
    assert await asyncio.to_thread(thread) == {CORE}


async def test_a_file_is_parsed_on_the_cores_of_another_unit_than_it_is_embedded_on_where_there_is_one(
    plain: Plain,
) -> None:
    _, work = plain
    with closing(ParserPool(1)) as parsers:
        parsing = parsers.submit("notes.md", lambda: memory_file(b"# Keys\n\nIn the hall.\n"), work.parsing)
        parsed = await asyncio.wrap_future(parsing)
    assert parsed.title == "Keys"


def _failing(indexing: Callable[[], object]) -> None:
    with indexing():  # type: ignore[attr-defined]  # a context manager
        raise ZeroDivisionError


async def test_one_owners_many_searches_leave_the_next_turn_to_anothers(plain: Plain) -> None:
    _, work = plain
    began, let_go, order = threading.Semaphore(0), threading.Semaphore(0), list[str]()

    def search(owner: str) -> None:
        order.append(owner)
        began.release()
        let_go.acquire()

    async with asyncio.TaskGroup() as tasks:
        for owner in ["many"] * 3 * THREADS + ["one"]:
            tasks.create_task(work.run("search", partial(search, owner), owner))
        for _ in range(THREADS):
            await asyncio.to_thread(began.acquire)
        assert "one" not in order, "all threads are taken"
        let_go.release(2)
        for _ in range(2):
            await asyncio.to_thread(began.acquire)
        assert "one" in order
        let_go.release(3 * THREADS)
