"""Rows computed of documents: shared by nobody else, gone with them, and their files open as long as an answer."""

from __future__ import annotations

import asyncio
import gc
import io
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine, LoadedModel
from paceline.engine.fake import VOCAB, ByteTokenizer
from paceline.rag import document_kv
from paceline.rag.document_kv import FOLDER, DocumentKvStore
from paceline.rag.embedder import HashEmbedder
from paceline.rag.records import Selection
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.library import Library
from paceline.rag.store.vector_stores import FileSpec
from paceline.runtime import node as node_module
from paceline.runtime.lookup_tables import FOLDER as TABLES
from paceline.runtime.lookup_tables import TableStore, table_files
from paceline.runtime.node import Node
from paceline.runtime.resources import Kept, NodeParts, Resources
from paceline.runtime.service import GenerateRequest, GenerationResult
from paceline.strategies.base import SIDES, DraftingMeans, Side, Strategy
from tests.requests import changed
from tests.runtime.engine_loop.test_document_prefill import MIB, REQUEST, fake, lazy, make, pair, tiny
from tests.runtime.test_node import collect

pytestmark = pytest.mark.anyio

__all__ = ["lazy", "make", "tiny"]  # fixtures

TEXT = "The red boat lies in the harbour behind the old mill, and its key hangs in the hall."
ASKED = changed(REQUEST, strategy="autoregressive")
PLAIN = changed(REQUEST, documents=0, strategy="lookup_tree", owner="ann")


async def result(node: Node, request: GenerateRequest) -> GenerationResult:
    return (await collect(await node.prepare(request)))[1]


# ---- keys and values ------------------------------------------------------------------------------------------------
@asynccontextmanager
async def cloud(folder: Path, make: Callable[[Side], Engine]) -> AsyncIterator[tuple[Node, Library]]:
    """A node with documents, whose engine has computed nothing yet. Pending KV is written when this ends."""
    with DocumentStore.open(folder, HashEmbedder()) as store:
        model, kv = LoadedModel(make("cloud"), ByteTokenizer()), DocumentKvStore(folder / FOLDER, MIB)
        async with asyncio.timeout(60), Node("cloud", model, store, NodeParts(kept=Kept(kv=kv))) as node:
            assert node.library is not None
            yield node, node.library


async def uploaded(library: Library, owner: str) -> str:
    """A vector store of this owner with the text."""
    file = library.uploads.add(owner, f"{owner}.txt", "assistants", io.BytesIO(TEXT.encode())).id
    store = library.stores.create(owner, "", {}, [FileSpec(file)])
    while library.stores.get(owner, store.id).counts.in_progress:
        await asyncio.sleep(0)
    return store.id


@pytest.mark.usefixtures("lazy")
async def test_stored_kv_of_a_text_tells_no_other_owner_that_somebody_has_it(
    tmp_path: Path, make: Callable[[Side], Engine]
) -> None:
    requests: dict[str, GenerateRequest] = {}
    async with cloud(tmp_path, make) as (node, library):
        for owner in ("ann", "bert"):
            requests[owner] = changed(ASKED, owner=owner, selection=Selection((await uploaded(library, owner),)))
        first = await result(node, requests["ann"])
        assert len(first.citations) == 1 and first.stats["cached_tokens"] == 0
    async with cloud(tmp_path, make) as (node, library):
        guess = await result(node, requests["bert"])
        assert len(guess.citations) == 1 and guess.stats["cached_tokens"] == 0 == node.worker.steps.prefixes.adopted
        library.stores.delete("bert", requests["bert"].sources.selection.collections[0])
        again = await result(node, requests["ann"])
        assert again.stats["cached_tokens"] > 50 < node.worker.steps.prefixes.adopted, "her own, not evicted by bert"
        library.stores.delete("ann", requests["ann"].sources.selection.collections[0])
    assert not list((tmp_path / FOLDER).iterdir())


@pytest.mark.usefixtures("lazy")
async def test_everybody_s_documents_are_computed_once_for_everybody(tmp_path: Path) -> None:
    for owner, cached in (("ann", False), ("bert", True)):
        with DocumentStore.open(tmp_path, HashEmbedder()) as store:
            store.add_text("boat.md", TEXT, zone="cloud")
        async with cloud(tmp_path, fake) as (node, _):
            assert ((await result(node, changed(ASKED, owner=owner))).stats["cached_tokens"] > 50) == cached


@pytest.mark.usefixtures("lazy")
async def test_rows_in_memory_are_not_used_again_after_a_removal(
    tmp_path: Path, make: Callable[[Side], Engine]
) -> None:
    async with pair(tmp_path, make, keep_kv=False) as linked:
        node, plain = linked.nodes["device"], changed(ASKED, documents=0)
        shares = (await result(node, plain)).stats["cached_tokens"], (await result(node, plain)).stats["cached_tokens"]
        assert shares[0] == 0
        linked.stores["device"].remove("private.md")
        assert (await result(node, plain)).stats["cached_tokens"] == 0
        assert (await result(node, plain)).stats["cached_tokens"] == shares[1]


# ---- look-up tables -------------------------------------------------------------------------------------------------
class Taught:
    """All look-up tables of a test that are in memory, whoever holds them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tables: weakref.WeakSet[LookupTable] = weakref.WeakSet()
        make, tables = LookupTable.__init__, self._tables

        def made(table: LookupTable, *arguments: Any, **more: Any) -> None:
            make(table, *arguments, **more)
            tables.add(table)

        monkeypatch.setattr(LookupTable, "__init__", made)

    @property
    def rows(self) -> int:
        gc.collect()
        return sum(map(len, self._tables))


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> Taught:
    return Taught(monkeypatch)


def filed(folder: Path) -> dict[tuple[Side, str], int]:
    """Rows of the tables on disk, by side and owner."""
    return {(side, each.owner): each.rows for side in SIDES for each in table_files(folder / side / TABLES)}


@pytest.fixture
def teaching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer teaches something, whether drafting pays or not."""
    means = Resources.means

    def taught(*arguments: Any, **more: Any) -> DraftingMeans:
        made = means(*arguments, **more)
        assert made.table is not None
        made.table.record(1, [2], [0.5])
        return made

    monkeypatch.setattr(Resources, "means", taught)


@pytest.mark.usefixtures("teaching")
@pytest.mark.parametrize(
    ("privacy", "front"),
    [
        *((privacy, front) for privacy in ("document-private", "open") for front in SIDES),
        ("answer-private", "device"),  # of a device's own clients alone
    ],
)
async def test_joint_answers_teach_no_table_that_outlives_them_but_one_in_memory_at_the_asking_device(
    tmp_path: Path, front: Side, privacy: str, taught: Taught
) -> None:
    strategy = "lookup_tree" if privacy == "answer-private" else "aggregate"
    request = changed(REQUEST, owner="ann", privacy=privacy, strategy=strategy)
    async with pair(tmp_path, fake) as linked:
        done = await result(linked.nodes[front], request)
        assert done.degraded is None and done.strategy == strategy and done.citations
        del done
        tables = [linked.nodes[side]._resources.table("ann", "documents", 0) for side in SIDES]
        kept = [len(each) for table in tables for each in (table, table.bigrams) if each is not None]
        assert any(kept[-2:]) == (front == "device" and strategy == "aggregate") and not any(kept[:2])
        while taught.rows > sum(kept):  # the other side's part ends after the answer
            await asyncio.sleep(0.05)
    assert filed(tmp_path) == {}


async def test_a_device_drafts_for_the_cloud_without_its_owner_s_earlier_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some were asked for with `local-only`, and a draft goes up word for word."""
    means, given = Resources.means, defaultdict[str, list[LookupTable]](list)

    def taken(self: Resources, strategy: Strategy, *arguments: Any, **more: Any) -> DraftingMeans:
        made = means(self, strategy, *arguments, **more)
        assert made.table is not None
        if self.side == "device":
            given[strategy.name].append(made.table)
        return made

    monkeypatch.setattr(Resources, "means", taken)
    async with pair(tmp_path, fake) as linked:
        owned = linked.nodes["device"]._resources.table("ann")
        owned.record(1, [2], [0.5])
        assert owned.texts is not None
        owned.texts.add([3, 4, 5, 6])
        for strategy in ("lookup_tree", "draft_verify"):
            done = await result(linked.nodes["device"], changed(REQUEST, owner="ann", strategy=strategy, documents=0))
            assert (done.strategy, done.degraded) == (strategy, None)
    assert given["draft_verify"] and all(
        not each.memories and each.successors(1)[0] != [2] for each in given["draft_verify"]
    )
    assert all(each.memories and each.successors(1)[0] == [2] for each in given["lookup_tree"])


@pytest.mark.usefixtures("teaching")
async def test_what_documents_taught_is_in_memory_only_until_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taught: Taught
) -> None:
    monkeypatch.setattr(node_module, "WATCH_S", 0.01)
    request = changed(PLAIN, documents=2)
    asked = PLAIN.prompt.messages
    answered = changed(PLAIN, messages=(*asked, {"role": "assistant", "content": TEXT}, *asked))
    async with pair(tmp_path, fake) as linked:
        node = linked.nodes["device"]
        for asked in (request, answered):
            assert len((await result(node, asked)).citations) == asked.wish.documents // 2
        assert taught.rows, "the next question about these documents is drafted better"
        learnt = node._resources.table("ann", "documents", 0)
        assert len(learnt) and not len(node._resources.table("ann"))
        linked.stores["device"].add_text("more.md", "Another text.", zone="device")
        await result(node, changed(PLAIN, owner="bert", sampling=SamplingParams(seed=9)))
        assert len(learnt), "nothing is erased when one is added"
        with DocumentStore.open(tmp_path / "device", HashEmbedder()) as other_process:
            assert other_process.remove("private.md") == 1
        while len(learnt):  # without another request
            await asyncio.sleep(0)
        plain = node._resources.table("bert")
        kept = [plain, plain.bigrams]
        while taught.rows > sum(len(each) for each in kept if each is not None):
            await asyncio.sleep(0.01)
    assert set(filed(tmp_path)) == {("device", "bert")}


async def test_a_table_that_an_answer_uses_is_empty_after_a_removal_and_ends_with_it(tmp_path: Path) -> None:
    async with pair(tmp_path, fake) as linked:
        resources = linked.nodes["device"]._resources
        used = resources.table("ann", "documents", 0)
        used.record(1, [2], [0.5])
        assert resources.table("ann", "documents", 0) is used and resources.table("bert", "documents", 0) is not used
        resources._document_tables.erase_older(1)
        assert not len(used) and used.successors(1) == ([], [])
        used.record(1, [2], [0.5])
        assert resources.table("ann", "documents", 1).successors(1) == ([], [])
        late = resources.table("ann", "documents", 0)  # its search began before the removal
        late.record(1, [2], [0.5])
        assert resources.table("ann", "documents", 1).successors(1) == ([], [])
        assert resources.table("ann").successors(1) == ([], [])


async def test_tables_of_owners_stay_below_and_are_erased_together(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tables = TableStore(tmp_path, tokenizer.fingerprint, VOCAB)
    with DocumentStore.open(tmp_path / "docs", HashEmbedder()) as store:
        model = LoadedModel(fake("cloud"), tokenizer)
        async with asyncio.timeout(60), Node("cloud", model, store, NodeParts(kept=Kept(tables=tables))) as node:
            resources = node._resources
            resources.table("ann").record(1, [2], [0.5])
            over = resources.table("ann", "documents", 0)
            assert over.successors(1) == ([2], [0.5]), "read where documents taught nothing"
            over.blend(1, [3], [1.0], 0.5)
            assert resources.table("ann").successors(1) == ([2], [0.5]), "and never changed"
            await tables.erase("ann")
            assert resources.table("ann", "documents", 0).successors(1) == ([], []) and not len(over)


async def test_a_node_tells_of_its_documents_while_others_write_them(tmp_path: Path) -> None:
    writing, told, waited = threading.Event(), threading.Event(), list[bool]()
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        store.add_text("note.md", "Velda is the landlord.", zone="cloud")

        def write() -> None:
            with store._database.writing():
                writing.set()
                waited.append(told.wait(10.0))

        async with asyncio.timeout(60), Node("cloud", LoadedModel(fake("cloud"), ByteTokenizer()), store) as node:
            writer = threading.Thread(target=write)
            writer.start()
            await asyncio.to_thread(writing.wait)
            assert node.readiness().detail["documents"] == 1
            told.set()
            await asyncio.to_thread(writer.join)
        assert waited == [True], "the event loop has waited for the writer"


# ---- stored KV is a mapped file: an answer that has ended holds none, without the garbage collector -----------------
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
