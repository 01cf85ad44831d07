"""Constraints compiled beside the loop: whose turn it is, and what goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator

import pytest

from paceline.core.sampling.sampler import Constraint
from paceline.engine.base import LoadedModel
from paceline.engine.fake import VOCAB, ByteTokenizer, FakeEngine
from paceline.engine.grammar.compiler import GrammarCompiler
from paceline.errors import RequestError
from paceline.runtime.node import Node
from paceline.runtime.resources import THREADS, CompilingThreads
from paceline.runtime.service import GenerateRequest
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes

pytestmark = pytest.mark.anyio

COSTLY = [Constraint("json_schema", json.dumps({"const": f"costly {number}"})) for number in range(2 * THREADS)]
CHEAP = [Constraint("json_schema", json.dumps({"const": f"cheap {number}"})) for number in range(3)]


class Gate:
    """Holds the compiling of costly constraints until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.begun = threading.Event(), threading.Semaphore(0)
        compile_one = GrammarCompiler._compiled

        def gated(self_: GrammarCompiler, constraint: Constraint, *others: object) -> object:
            if "costly" in constraint.text:
                self.begun.release()
                assert self.opened.wait(60)
            return compile_one(self_, constraint, *others)  # type: ignore[arg-type]

        monkeypatch.setattr(GrammarCompiler, "_compiled", gated)

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
async def compiling(gate: Gate) -> AsyncIterator[CompilingThreads]:
    threads = CompilingThreads(ByteTokenizer())
    await threads.start()
    yield threads
    gate.opened.set()
    await threads.stop()


async def test_an_owner_of_costly_schemas_waits_for_himself_and_others_do_not(
    compiling: CompilingThreads, gate: Gate
) -> None:
    await compiling.mask(CHEAP[0], "hostile")
    async with asyncio.TaskGroup() as tasks:
        costly = [tasks.create_task(compiling.mask(each, "hostile")) for each in COSTLY]
        last = tasks.create_task(compiling.mask(CHEAP[1], "hostile"))
        await gate.has_begun()
        await compiling.mask(CHEAP[0], "hostile")  # known: needs no turn
        await compiling.mask(CHEAP[1], "honest")
        await compiling.mask(CHEAP[2], "another")
        assert not any(each.done() for each in (*costly, last))
        assert not gate.begun.acquire(blocking=False), "one at a time"
        gate.opened.set()
    assert all(each.result() is not None for each in costly)
    assert not compiling._turns._queue.shares.taken


async def test_a_request_that_is_given_up_while_it_waits_leaves_its_turn_to_the_next(
    compiling: CompilingThreads, gate: Gate
) -> None:
    first, second, third = (asyncio.create_task(compiling.mask(each, "a")) for each in (*COSTLY[:2], CHEAP[0]))
    await gate.has_begun()
    second.cancel()
    gate.opened.set()
    assert await first is not None and await third is not None
    assert second.cancelled()
    assert not compiling._turns._queue.shares.taken


async def test_answers_go_on_while_a_schema_is_compiled(gate: Gate) -> None:
    async with nodes(linked=False) as (bench, _):
        device = bench.device
        hostile = asyncio.create_task(device.prepare(changed(REQUEST, constraint=COSTLY[0], owner="hostile")))
        await gate.has_begun()
        assert (await collect(await device.prepare(REQUEST)))[0]
        held = changed(REQUEST, constraint=CHEAP[0], owner="honest")
        assert json.loads((await collect(await device.prepare(held)))[0]) == "cheap 0"
        assert not hostile.done()
        gate.opened.set()
        assert json.loads((await collect(await hostile))[0]) == "costly 0"


class WideTokenizer(ByteTokenizer):
    """Bytes, and as many longer tokens as a real vocabulary has: three letters or signs each."""

    SIGNS = b'etaoinshrdlucmfwypvbgkjqxz0123456789 "{}[]:,.-_/ETAOIN'

    vocab_size = 151_646

    def token_bytes(self, token: int) -> bytes:
        if token < VOCAB:
            return super().token_bytes(token)
        base = len(self.SIGNS)
        return bytes(self.SIGNS[(token - VOCAB) // base**place % base] for place in range(3))


def _named(number: int, prefix: str) -> dict[str, object]:
    return {"type": "object", "properties": {f"{prefix}{i}": {"type": "string"} for i in range(number)}}


HOSTILE = {
    "names in alternatives": {"type": "array", "items": {"anyOf": [_named(100, f"p{k}_") for k in range(12)]}},
    "counted patterns": {"type": "string", "pattern": "(.*a.{200})|(.*b.{150})|(.*c.{170})"},
    "many patterns": {"type": "array", "items": {"anyOf": [{"pattern": f".*{i:05}.*"} for i in range(300)]}},
    "two mebibytes": {"enum": ["x" * (1 << 20), "y" * (1 << 20)]},
    "deep": json.loads('{"items":' * 200 + "true" + "}" * 200),
}


async def test_hostile_schemas_over_a_real_vocabulary_end_their_own_answers_and_no_other() -> None:
    tokenizer = WideTokenizer()
    engine = FakeEngine(1, vocab_size=tokenizer.vocab_size)
    honest = changed(REQUEST, strategy="autoregressive", max_tokens=24)
    held = changed(honest, constraint=CHEAP[0], owner="honest")
    async with Node("cloud", LoadedModel(engine, tokenizer), None) as node:

        async def text(request: GenerateRequest) -> str:
            return (await collect(await node.prepare(request)))[0]

        async def hostile(schema: object) -> str:
            constraint = Constraint("json_schema", json.dumps(schema))
            try:
                session = await node.prepare(changed(honest, constraint=constraint, owner="hostile"))
            except RequestError:
                return "refused"
            return (await collect(session))[1].reason

        alone = await text(honest)
        ends = asyncio.gather(*map(hostile, HOSTILE.values()))
        assert [await text(honest), await text(held)] == [alone, '"cheap 0"']
        reasons = dict(zip(HOSTILE, await ends, strict=True))
        assert await text(honest) == alone
        assert await text(held) == '"cheap 0"'
    assert set(reasons.values()) <= {"refused", "length"}, reasons
    assert reasons["two mebibytes"] == reasons["deep"] == "refused"
    assert reasons["names in alternatives"] == reasons["counted patterns"] == "length", "broken off, or at its limit"
