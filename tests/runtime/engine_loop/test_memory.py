"""Answers of several documents in little memory: every admitted answer ends, under any load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paceline.core.batching.segment import SeqId
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer, FakeEngine
from paceline.errors import RequestError
from paceline.runtime.node import Node
from paceline.runtime.service import GenerateRequest
from paceline.strategies.base import SIDES
from tests.requests import a_request, changed
from tests.runtime.test_node import bench_of, collect, side_by_side, stores_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

QUESTION = "Where is the key of the mill?"
TEXTS = {"0.txt": "The key of the mill is red.", "1.txt": "The key of the mill is lost."}


def request_of(number: int, tokens: int | None = 60) -> GenerateRequest:
    return a_request(
        messages=({"role": "user", "content": QUESTION},),
        sampling=SamplingParams(temperature=1.0, seed=number),
        max_tokens=tokens,
        documents=2,
    )


@asynccontextmanager
async def serving(
    folder: Path, rows: int | None, *, max_positions: int = 1024
) -> AsyncIterator[tuple[Node, FakeEngine]]:
    engine = FakeEngine(1, spread=0.3, max_positions=max_positions, capacity_rows=rows)
    with stores_of(folder, {"cloud": TEXTS}) as stores:
        model = LoadedModel(engine, ByteTokenizer())
        async with asyncio.timeout(60), Node("cloud", model, stores["cloud"]) as node:
            yield node, engine
    assert not [seq for seq in range(1, 400) if engine.length(SeqId(seq))], "rows leaked"


async def answers(
    folder: Path, rows: int | None, count: int, tokens: int | None = 60, strategy: str = "auto"
) -> list[tuple[str, str]]:
    """(text, finish reason) of concurrent answers."""
    async with serving(folder, rows) as (node, _):

        async def one(number: int) -> tuple[str, str]:
            session = await node.prepare(changed(request_of(number, tokens), strategy=strategy))
            assert len(session.prepared.prompts.branches) == 2
            text, done = await collect(session)
            return text, done.reason

        return list(await asyncio.gather(*(one(number) for number in range(count))))


async def test_answers_of_two_documents_that_do_not_fit_at_once_all_end(tmp_path: Path) -> None:
    unlimited = await answers(tmp_path / "docs", None, 12)
    for rows, count in ((560, 12), (1500, 8)):
        assert await answers(tmp_path / "docs", rows, count) == unlimited[:count]


async def test_growing_answers_wait_for_memory(tmp_path: Path) -> None:
    """Each answer fits alone; all begin while short, and none may fail because of its growth."""
    unlimited = await answers(tmp_path / "docs", None, 8, 100, "autoregressive")
    assert max(len(text) for text, _ in unlimited) > 60
    for strategy in ("autoregressive", "pipeline"):
        assert await answers(tmp_path / "docs", 1000, 8, 100, strategy) == unlimited, strategy


async def test_a_request_that_can_never_fit_is_refused_at_once_and_others_are_served(tmp_path: Path) -> None:
    async with serving(tmp_path / "docs", 160) as (node, _):
        with pytest.raises(RequestError, match="memory") as refused:
            await node.prepare(request_of(1))
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
        text, done = await collect(await node.prepare(changed(request_of(1), documents=0)))
        assert text and done.reason in ("stop", "length")


async def test_an_answer_without_a_limit_ends_with_its_memory(tmp_path: Path) -> None:
    (whole,) = await answers(tmp_path / "docs", None, 1, None)
    ((text, reason),) = await answers(tmp_path / "docs", 320, 1, None)
    assert whole[0].startswith(text) and (reason == "length" or text == whole[0])


async def test_clients_that_leave_free_memory_for_waiting_ones(tmp_path: Path) -> None:
    async with serving(tmp_path / "docs", 560) as (node, engine):
        leaving = [await node.prepare(request_of(number)) for number in range(6)]
        staying = [await node.prepare(request_of(number)) for number in range(6, 12)]

        async def leave(number: int) -> None:
            events = leaving[number].run()
            await anext(events)
            await events.aclose()  # type: ignore[attr-defined]  # an async generator

        results = await asyncio.gather(*(leave(number) for number in range(6)), *(collect(each) for each in staying))
        assert all(isinstance(each, tuple) and each[1].reason in ("stop", "length") for each in results[6:])
        engine.check()


async def test_prompts_scored_beside_answers_end_and_fail_none(tmp_path: Path) -> None:
    async with serving(tmp_path / "docs", 600) as (node, _):
        prompt = [97 + number % 26 for number in range(500)]
        scores = [node.score(prompt, 2) for _ in range(6)]
        chats = [collect(await node.prepare(request_of(number))) for number in range(8)]
        results = await asyncio.gather(*scores, *chats)
        assert all(len(each) == len(prompt) - 1 for each in results[:6])
        assert {each[1].reason for each in results[6:]} <= {"stop", "length"}  # type: ignore[union-attr]  # (text, done)


async def joint_answers(folder: Path, rows: int | None, count: int) -> list[tuple[str, str, str | None]]:
    """(text, finish reason, why it is not joint) of concurrent answers, in turn for clients of each side."""
    models = {
        side: LoadedModel(FakeEngine(number, spread=0.3, capacity_rows=rows), ByteTokenizer())
        for number, side in enumerate(SIDES)
    }
    with stores_of(folder, dict.fromkeys(SIDES, TEXTS)) as stores:
        async with side_by_side(bench := bench_of(models, stores)):

            async def one(number: int) -> tuple[str, str, str | None]:
                node = bench.of(SIDES[number % 2])
                text, done = await collect(await node.prepare(changed(request_of(number, 16), strategy="aggregate")))
                return text, done.reason, done.degraded

            results = await asyncio.gather(*(one(number) for number in range(count)))
    for model in models.values():
        assert not [seq for seq in range(1, 400) if model.engine.length(SeqId(seq))], "rows leaked"
    return results


async def test_joint_answers_have_their_texts_when_both_sides_are_short_of_memory(tmp_path: Path) -> None:
    """None is written by one side alone, and none waits for one that waits for it. One side: `test_short_memory`."""
    assert await joint_answers(tmp_path, 700, 4) == await joint_answers(tmp_path, None, 4)
