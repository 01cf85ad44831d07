"""Stored KV is a mapped file: an answer that has ended holds none, without the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import mmap
import weakref
from pathlib import Path

import pytest

from paceline.rag import document_kv
from paceline.strategies.base import SIDES, Side
from tests.requests import changed
from tests.runtime.engine_loop.test_document_prefill import REQUEST, fake, pair
from tests.runtime.test_isolation import result

pytestmark = pytest.mark.anyio


class Mapped(mmap.mmap):
    """A mapping that can be counted."""


@pytest.mark.parametrize("front", SIDES)
async def test_an_answer_that_has_ended_holds_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, front: Side
) -> None:
    opened: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def mapped(*arguments: object, **more: object) -> mmap.mmap:
        made = Mapped(*arguments, **more)  # type: ignore[arg-type]
        opened.add(made)
        return made

    async with pair(tmp_path, fake) as linked:
        node = linked.nodes[front]
        await result(node, changed(REQUEST, max_tokens=4))
        monkeypatch.setattr(document_kv.mmap, "mmap", mapped)
        gc.collect()
        gc.disable()
        try:
            for number in range(3):
                question = [{"role": "user", "content": f"Where does the boat number {number} lie?"}]
                done = await result(node, changed(REQUEST, messages=tuple(question), max_tokens=4))
                assert done.citations
            del done
            for _ in range(100):  # the other side's part ends after the answer
                await asyncio.sleep(0)
            assert len(opened) <= 1, len(opened)
        finally:
            gc.enable()
