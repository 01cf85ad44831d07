"""Masks on threads: never on the loop's own, in turns of owners, with the same texts; what waits for them, what not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.sampling.sampler import Constraint, Mask, T
from paceline.engine.fake import fake_model
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.service import GenerateRequest
from paceline.runtime.sessions.base import (
    MOST_OF_ONE,
    THREADS,
    MaskBesideLoop,
    MaskThreads,
    can_wait,
    run_apart,
    wait_for,
)
from paceline.strategies.registry import STRATEGIES
from tests.requests import changed
from tests.runtime.test_node import REQUEST, Bench, collect, nodes

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bari", "Oslo"]}, "rooms": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "rooms"],
    "additionalProperties": False,
}
HELD = changed(REQUEST, max_tokens=40, constraint=Constraint("json_schema", json.dumps(SCHEMA)))


@dataclass
class Watched:
    """A mask that keeps the threads it was computed on, and can be held up."""

    mask: Mask
    threads: set[int] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        self.threads.add(threading.get_ident())
        self.begun.set()
        self.gate.wait()
        return self.mask.allowed(path)

    def complete(self, path: Sequence[int]) -> bool:
        self.threads.add(threading.get_ident())
        return self.mask.complete(path)

    def at_once(self, work: Callable[[], T]) -> T:
        return work()


def watch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """All masks of both nodes from now on."""
    watched: list[Watched] = []
    for node in (bench.cloud, bench.device):
        grammars = node._resources._compiling._grammars

        def made(constraint: Constraint, owner: str, mask: Callable[[Constraint, str], Mask] = grammars.mask) -> Mask:
            watched.append(Watched(mask(constraint, owner)))
            return watched[-1]

        monkeypatch.setattr(grammars, "known", lambda *_: None)
        monkeypatch.setattr(grammars, "mask", made)
    return watched


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("top_logprobs", [None, 2])
async def test_no_mask_of_any_strategy_is_computed_on_the_loop(
    strategy: str, top_logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes() as (bench, _):
        watched = watch(bench, monkeypatch)
        for node in (bench.cloud, bench.device) if top_logprobs is None else (bench.device,):
            asked = changed(HELD, strategy=strategy, top_logprobs=top_logprobs)
            text, done = await collect(await node.prepare(asked))
            assert set(json.loads(text)) == {"city", "rooms"}
            assert (done.reason, done.degraded, done.strategy) == ("stop", None, strategy)
        threads = set[int]().union(*(each.threads for each in watched))
    assert threads and threading.get_ident() not in threads


async def text_of(bench: Bench, request: GenerateRequest) -> str:
    return (await collect(await bench.device.prepare(request)))[0]


async def test_other_answers_are_written_while_a_mask_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = changed(REQUEST, strategy="autoregressive")
    async with nodes(linked=False) as (bench, _):
        watched = watch(bench, monkeypatch)
        expected, held = await text_of(bench, alone), await text_of(bench, changed(HELD, owner="honest"))
        stuck = await bench.device.prepare(changed(HELD, strategy="autoregressive", owner="hostile"))
        mask = watched[-1]
        mask.gate.clear()
        answer = asyncio.create_task(collect(stuck))
        await asyncio.to_thread(mask.begun.wait)
        assert await text_of(bench, alone) == expected
        assert await text_of(bench, changed(HELD, owner="honest")) == held
        assert not answer.done()
        mask.gate.set()
        assert json.loads((await answer)[0])["city"] in ("Bari", "Oslo")


async def test_a_mask_that_fails_ends_its_answer_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes(linked=False) as (bench, _):
        watched = watch(bench, monkeypatch)
        session = await bench.device.prepare(HELD)

        def fails(_: Sequence[int]) -> None:
            raise ArithmeticError("of a mask")

        monkeypatch.setattr(watched[-1], "allowed", fails)
        with pytest.raises(Exception, match="the answer cannot go on: of a mask"):
            await collect(session)
        assert await text_of(bench, REQUEST)


async def test_an_owner_has_some_of_the_threads_and_others_the_rest() -> None:
    worker = EngineWorker(fake_model().engine)
    threads = MaskThreads(worker)
    gate, begun = threading.Event(), asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    order: list[str] = []

    def held() -> None:
        loop.call_soon_threadsafe(begun.release)
        gate.wait()

    for number in range(THREADS + 2):
        threads.submit("hostile", held, lambda number=number: order.append(f"hostile {number}"))  # type: ignore[misc]
    for _ in range(MOST_OF_ONE):
        await begun.acquire()
    served = asyncio.Event()
    threads.submit("honest", lambda: None, served.set)
    await served.wait()
    assert not order and begun.locked()
    gate.set()
    for _ in range(THREADS + 2 - MOST_OF_ONE):
        await begun.acquire()
    await asyncio.to_thread(threads.stop)
    await asyncio.sleep(0)
    assert sorted(order) == [f"hostile {number}" for number in range(THREADS + 2)]
    assert not threads._queue.shares.taken


async def test_a_step_waits_for_a_mask_unless_it_took_long_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = EngineWorker(fake_model().engine)
    told: list[str] = []
    monkeypatch.setattr(worker, "expect", lambda: told.append("expected"))
    monkeypatch.setattr(worker, "continued", lambda: told.append("continued"))
    threads = MaskThreads(worker)
    clock = iter([0.0, 0.001, 1.0, 1.03, 2.0, 2.001, 3.0, 3.001])  # s, of each mask's beginning and end
    monkeypatch.setattr("paceline.runtime.sessions.base.time.perf_counter", lambda: next(clock))
    mask = MaskBesideLoop(Watched(_Anything()), threads, "")
    for _ in range(4):
        done = asyncio.Event()

        def ask(done: asyncio.Event = done) -> None:
            assert mask.allowed(()) is None
            done.set()

        run_apart(ask)
        told.append("waits")
        await done.wait()
    await asyncio.to_thread(threads.stop)
    expected = ["expected", "waits", "continued"]
    assert told == [*expected, *expected, "waits", *expected]


class _Anything:
    def allowed(self, _: Sequence[int]) -> None:
        return None

    def complete(self, _: Sequence[int]) -> bool:
        return True

    def at_once(self, work: Callable[[], T]) -> T:
        return work()


# ---- code that stands still on the event loop, and what of it happens when ------------------------------------------
def test_code_that_waits_goes_on_where_it_was_when_it_is_called_back() -> None:
    seen: list[str] = []
    waiting: list[Callable[[], None]] = []

    def code() -> None:
        for name in ("first", "second"):
            wait_for(waiting.append)
            seen.append(name)

    run_apart(code)
    assert seen == []
    waiting.pop()()
    assert seen == ["first"]
    waiting.pop()()
    assert seen == ["first", "second"] and not waiting


def test_only_code_that_runs_apart_can_wait() -> None:
    found: list[bool] = []
    run_apart(lambda: found.append(can_wait()))
    assert found == [True] and not can_wait()


def test_code_has_the_context_of_its_caller_after_a_wait_too() -> None:
    name: ContextVar[str] = ContextVar("name", default="")
    seen: list[str] = []
    waiting: list[Callable[[], None]] = []

    def code() -> None:
        seen.append(name.get())
        wait_for(waiting.append)
        seen.append(name.get())

    name.set("caller")
    run_apart(code)
    name.set("loop")
    waiting.pop()()
    assert seen == ["caller", "caller"] and name.get() == "loop"


def test_code_begun_by_other_code_comes_back_to_whoever_calls_it_back() -> None:
    """The inner one waits longer than the outer one, or not as long: neither is entered by the end of the other."""
    for inner_first in (True, False):
        seen: list[str] = []
        waiting: dict[str, Callable[[], None]] = {}

        def wait(name: str, seen: list[str] = seen, waiting: dict[str, Callable[[], None]] = waiting) -> None:
            wait_for(lambda go_on: waiting.update({name: go_on}))
            seen.append(name)

        def outer(wait: Callable[[str], None] = wait, seen: list[str] = seen) -> None:
            run_apart(lambda: wait("inner"))
            seen.append("begun")
            wait("outer")

        run_apart(outer)
        order = ["inner", "outer"] if inner_first else ["outer", "inner"]
        for name in order:
            waiting[name]()
            seen.append(f"after {name}")
        assert seen == ["begun", order[0], f"after {order[0]}", order[1], f"after {order[1]}"]
