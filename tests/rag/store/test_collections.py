"""Collections in one store: each is searched separately."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.rag.chunk import Chunk
from paceline.rag.database import Database
from paceline.rag.embedder import HashEmbedder
from paceline.rag.records import Document, Selection
from paceline.rag.rows import insert_document
from paceline.rag.store.documents import DocumentStore
from paceline.sql import Home

BOAT = "The red boat belongs to Ann Bell.\n"


@pytest.fixture
def store(tmp_path: Path, home: Home | None) -> Iterator[DocumentStore]:
    with DocumentStore.open(tmp_path, HashEmbedder(), home=home) as opened:
        yield opened


def put(store: DocumentStore, collection: str, file: str, *texts: str) -> None:
    """Insert a document of an uploaded file through a separate connection."""
    embedder = HashEmbedder()
    database = Database(store.directory, embedder=embedder.name, dimensions=embedder.dimensions, home=store.home)
    chunks = [Chunk(0, len(text), text, "") for text in texts]
    document = Document(f"doc-{collection}-{file}", "note.txt", "f" * 64, "device", time.time(), len(texts))
    with database.writing():
        insert_document(database, document, chunks, embedder.embed(texts), collection=collection, file=file)
    database.close()


def test_a_search_covers_exactly_its_selection(store: DocumentStore) -> None:
    own = store.add_text("boat.txt", BOAT, zone="device")
    for collection, file in (("a", "file-1"), ("a", "file-2"), ("b", "file-1")):
        put(store, collection, file, f"The red boat in {collection} of {file}.")

    def found(*collections: str, document_ids: frozenset[str] | None = None) -> set[tuple[str, str]]:
        passages = store.search("the red boat", 10, Selection(collections, document_ids), min_score=-1.0)
        return {(passage.file_id, passage.text) for passage in passages}

    assert [passage.file_id for passage in store.search("the red boat", 10)] == [own.id]
    assert found("a") == {(f"file-{i}", f"The red boat in a of file-{i}.") for i in (1, 2)}
    assert found("b", "default") == {("file-1", "The red boat in b of file-1."), (own.id, BOAT)}
    assert found("a", document_ids=frozenset({"doc-a-file-2", "doc-b-file-1"})) == {
        ("file-2", "The red boat in a of file-2.")
    }
    assert found("a", document_ids=frozenset()) == found("nothing") == found() == set()
    assert [store.count(Selection(names)) for names in (("default",), ("a",), ("a", "b"), ())] == [1, 2, 3, 0]
    assert store.count(Selection(("a",), frozenset({"doc-a-file-1", "doc-b-file-1"}))) == 1
    assert [document.name for document in store.documents()] == ["boat.txt"]
    assert store.remove("note.txt") == 0, "an upload is not removed by its name"


def test_other_collections_do_not_affect_ranks_and_scores(store: DocumentStore) -> None:
    for i in range(12):
        store.add_text(f"{i}.txt", f"The boat number {i} of Ann is {'red' if i % 3 else 'blue'}.", zone="device")
    before = [(p.text, p.score) for p in store.search("red boat of Ann", 12)]
    put(store, "other", "file-1", *(f"A boat of Ann, {i}" for i in range(60)))
    assert [(p.text, p.score) for p in store.search("red boat of Ann", 12)] == before
