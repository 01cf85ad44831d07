"""Passages that do not answer a question are not read, and where neither side has one that does, the answer says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from paceline.core.side import SIDES, Side
from paceline.engine.fake import ByteTokenizer
from paceline.engine.reader.pointer import Pointer, SpanReading
from paceline.errors import ConfigError
from paceline.rag.records import Passage
from paceline.runtime.questions import GENERALLY, UNANSWERED, Judge, unanswered_form
from paceline.runtime.service import GenerateRequest
from tests.requests import changed
from tests.runtime.test_node import Bench, collect
from tests.runtime.test_nothing_found import HELLO, LARGER_CLOUD, LARGER_DEVICE, Sizes, of, pair

pytestmark = pytest.mark.anyio


@dataclass
class Knows:
    """A reader that finds an answer where this stands."""

    words: str

    def read(self, question: str, document: str) -> SpanReading:  # noqa: ARG002
        return SpanReading(float(self.words in document), ())


def judge(words: str) -> Judge:
    return Judge(lambda: cast("Pointer", Knows(words)))


def asks(text: str, **fields: object) -> GenerateRequest:
    return changed(HELLO, messages=({"role": "user", "content": text},), **fields)


@asynccontextmanager
async def judged(folder: Path, words: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(ByteTokenizer, "one_document", False)
    async with pair(folder, sizes, monkeypatch) as (bench, _):
        for side in SIDES:
            of(bench, side)._resources.judge = judge(words)
        yield bench


BOTH_FIND = "When does the library of my landlord Velda open?"


@pytest.mark.parametrize("front", SIDES)
@pytest.mark.parametrize("sizes", [LARGER_CLOUD, LARGER_DEVICE])
async def test_an_answer_that_no_document_holds_says_so(
    front: Side, sizes: Sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judged(tmp_path, "seven o'clock", sizes, monkeypatch) as bench:
        node = of(bench, front)
        text, done = await collect(await node.prepare(asks(BOTH_FIND, max_tokens=60)))
        assert text == UNANSWERED and done.reason == "stop" and done.citations == () and done.degraded is None
        assert done.strategy_reason.startswith("documents were found, and none answers the question")
        text, _ = await collect(await node.prepare(asks("When does the harbour library open?", max_tokens=60)))
        assert text.startswith(UNANSWERED + GENERALLY) and len(text) > len(UNANSWERED + GENERALLY)
        await bench.unlink()
        text, done = await collect(await node.prepare(asks(BOTH_FIND, max_tokens=60)))
        assert text == UNANSWERED and done.degraded in (None, "cloud_missing")


@pytest.mark.parametrize(("front", "knows"), [(front, side) for front in SIDES for side in SIDES])
async def test_a_side_whose_passages_do_not_answer_reads_none(
    front: Side, knows: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"cloud": "opens at eight", "device": "called Velda"}[knows]
    async with judged(tmp_path, words, Sizes(10, 10), monkeypatch) as bench:
        _, done = await collect(await of(bench, front).prepare(asks(BOTH_FIND)))
        assert {citation.side for citation in done.citations} == {knows}


@pytest.mark.parametrize(
    "fields",
    [
        {"options": {"unanswered": "write"}},
        {"strategy": "aggregate"},
        {"messages": ({"role": "system", "content": "It is seven o'clock."}, {"role": "user", "content": BOTH_FIND})},
        {"messages": ({"role": "user", "content": f"{BOTH_FIND} I have forgotten it."},)},
        {
            "messages": (
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "Hello!"},
                {"role": "user", "content": BOTH_FIND},
            )
        },
    ],
    ids=["as asked", "strategy", "told by the system", "not a question alone", "goes on"],
)
async def test_who_asks_for_more_than_an_answer_from_documents_is_not_judged(
    fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judged(tmp_path, "seven o'clock", Sizes(10, 10), monkeypatch) as bench:
        text, done = await collect(await bench.device.prepare(changed(asks(BOTH_FIND), **fields)))
        assert not text.startswith(UNANSWERED) and len(done.found) == 1


def test_where_there_is_no_reader_every_passage_is_read() -> None:
    def missing() -> Pointer:
        raise ConfigError("not here")

    passage = Passage("a.md", 1, "a", "text", 0.5)
    assert Judge(missing).finds("What is it?", (passage,)) and not judge("word").finds("What is it?", (passage,))


def test_what_one_asks_of_oneself_nobody_knows_in_general() -> None:
    assert unanswered_form("What is my shoe size?").text == r"The documents do not say\."
    assert unanswered_form("How tall is the tower?").text.endswith(" In general: (.|\\n)+")


def test_the_reader_judges() -> None:
    from paceline.engine.reader.engine import load_pointer
    from paceline.models import READER

    reader = Judge(lambda: load_pointer(READER))
    passage = Passage("a.md", 1, "Harbour", "The harbour library opens at eight. Ruud keeps the key.", 0.5)
    assert reader.finds("When does the harbour library open?", (passage,))
    assert not reader.finds("How tall is the lighthouse?", (passage,))
    assert reader.question(({"role": "user", "content": "When does it open?"},)) == "When does it open?"
