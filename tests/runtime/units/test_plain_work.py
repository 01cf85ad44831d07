"""Plain requests on the units of a node: at once beside launches, where least runs, and told to whoever schedules."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from paceline.core.sampling.sampler import SamplingParams
from paceline.rag.parsing.process import ParserPool, memory_file
from paceline.runtime.units import HostUnit, PlainWork, UnitRegistry
from tests.requests import a_request
from tests.runtime.test_node import nodes

pytestmark = pytest.mark.anyio
CORE = min(os.sched_getaffinity(0))
HOSTS = (HostUnit("left", frozenset({CORE})), HostUnit("right", does=frozenset({"search", "embed"})))


@dataclass
class Watching:
    began: list[tuple[int, str, str, int]] = field(default_factory=list)
    ended: list[tuple[int, int | None]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def other_began(self, number: int, unit: str, operation: str, items: int) -> None:
        self.began.append((number, unit, operation, items))

    def other_ended(self, number: int, items: int | None) -> None:
        self.ended.append((number, items))
        self.changed.set()


@pytest.fixture
async def plain() -> AsyncIterator[tuple[UnitRegistry, PlainWork, Watching]]:
    registry = UnitRegistry("device", hosts=HOSTS)
    work, watching = PlainWork(registry), Watching()
    work.start()
    work.watch(watching)
    yield registry, work, watching
    work.close()
    registry.close()


def look() -> tuple[set[int], str]:
    return os.sched_getaffinity(0), threading.current_thread().name


Plain = tuple[UnitRegistry, PlainWork, Watching]


async def test_a_request_waits_for_no_launch_and_goes_where_least_runs(plain: Plain) -> None:
    registry, work, watching = plain
    held, let_go = threading.Event(), threading.Event()
    assert (await work.search(look))[1].startswith("requests left")

    def hold() -> None:
        held.set()
        let_go.wait(60)

    launch = asyncio.create_task(registry.run("left", hold))
    await asyncio.to_thread(held.wait, 60)
    assert (await work.search(look))[1].startswith("requests right")
    cores, thread = await work.rerank(3, look)  # which only the busy unit does: beside its launch, on its core
    assert thread.startswith("requests left") and cores == {CORE}
    let_go.set()
    await launch
    assert (await work.embed(5, look))[1].startswith("requests left")
    assert [began[1:] for began in watching.began] == [
        ("left", "host/request", 1),
        ("right", "host/request", 1),
        ("left", "rerank/score", 3),
        ("left", "embed/encode", 5),
    ]
    assert watching.ended == [(number, None) for number, *_ in watching.began]


async def test_nothing_is_learnt_of_what_has_failed_or_was_left(plain: Plain) -> None:
    _, work, watching = plain
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        let_go.wait(60)

    with pytest.raises(ZeroDivisionError):
        await work.embed(1, lambda: 1 // 0)
    left = asyncio.create_task(work.search(hold))
    await asyncio.to_thread(held.wait, 60)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    let_go.set()
    assert [items for _, items in watching.ended] == [0, 0]


async def test_the_thread_that_embeds_files_stays_on_the_cores_of_its_unit_and_is_told_of(plain: Plain) -> None:
    _, work, watching = plain

    def index() -> set[int]:
        with work.indexing():
            return look()[0]

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(_failing, work.indexing)
    thread: Callable[[], set[int]] = index
    assert await asyncio.to_thread(thread) == {CORE}
    while len(watching.ended) < 2:
        watching.changed.clear()
        await watching.changed.wait()
    assert [began[1:3] for began in watching.began] == [("left", "embed/files")] * 2


async def test_a_file_is_parsed_on_the_cores_of_another_unit_than_it_is_embedded_on_where_there_is_one(
    plain: Plain,
) -> None:
    _, work, watching = plain
    with closing(ParserPool(1)) as parsers:
        parsing = parsers.submit("notes.md", lambda: memory_file(b"# Keys\n\nIn the hall.\n"), work.parsing)
        parsed = await asyncio.wrap_future(parsing)
    assert parsed.title == "Keys"
    while not watching.ended:
        watching.changed.clear()
        await watching.changed.wait()
    assert [began[1:3] for began in watching.began] == [("right", "host/parse")]


def _failing(indexing: Callable[[], object]) -> None:
    with indexing():  # type: ignore[attr-defined]  # a context manager
        raise ZeroDivisionError


async def test_an_answer_counts_from_its_admission_to_its_end() -> None:
    async with nodes() as (bench, _):
        watching = Watching()
        node = bench.cloud
        node._resources.work.watch(watching)
        generation = await node.prepare(
            a_request(messages=({"role": "user", "content": "hi"},), sampling=SamplingParams(), max_tokens=5)
        )
        assert [began[1:] for began in watching.began][-1] == ("engine 0", "chat/decode", 5)
        number = watching.began[-1][0]
        async for _ in generation.run():
            assert number not in dict(watching.ended)
        await generation.aclose()
        assert (number, 0) in watching.ended
