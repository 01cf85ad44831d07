"""Collections in one store: each is searched separately. Stores of versions 1 and 2 are migrated."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path

import pytest

from paceline.rag import database as database_module
from paceline.rag.chunk import Chunk
from paceline.rag.database import Database
from paceline.rag.embedder import HashEmbedder
from paceline.rag.index import faiss_index as index_module
from paceline.rag.records import Document, Selection
from paceline.rag.store.document_rows import insert_document
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.library import Library
from paceline.rag.store.vector_stores import FileSpec

BOAT = "The red boat belongs to Ann Bell.\n"

FORMAT_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE documents (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL UNIQUE,
    zone TEXT NOT NULL, added_at REAL NOT NULL, num_chunks INTEGER NOT NULL);
CREATE TABLE chunks (id INTEGER PRIMARY KEY AUTOINCREMENT,
    document TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE, position INTEGER NOT NULL, text TEXT NOT NULL,
    title TEXT NOT NULL, embedding BLOB NOT NULL, UNIQUE (document, position));
INSERT INTO meta VALUES ('generation', '1'), ('store', 'abc'), ('embedder', 'hash'), ('dimensions', '256');
INSERT INTO documents VALUES ('doc-1', 'boat.txt', 'f00', 'device', 12.5, 1);
PRAGMA user_version = 1;
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DocumentStore]:
    with DocumentStore.open(tmp_path, HashEmbedder()) as opened:
        yield opened


def put(folder: Path, collection: str, file: str, *texts: str) -> None:
    """Insert a document of an uploaded file through a separate connection."""
    embedder = HashEmbedder()
    database = Database(folder, embedder=embedder.name, dimensions=embedder.dimensions)
    chunks = [Chunk(0, len(text), text, "") for text in texts]
    document = Document(f"doc-{collection}-{file}", "note.txt", "f" * 64, "device", time.time(), len(texts))
    with database.writing():
        insert_document(database, document, chunks, embedder.embed(texts), collection=collection, file=file)
    database.close()


def test_a_search_covers_exactly_its_selection(store: DocumentStore, tmp_path: Path) -> None:
    own = store.add_text("boat.txt", BOAT, zone="device")
    for collection, file in (("a", "file-1"), ("a", "file-2"), ("b", "file-1")):
        put(tmp_path, collection, file, f"The red boat in {collection} of {file}.")

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


def test_other_collections_do_not_affect_ranks_and_scores(store: DocumentStore, tmp_path: Path) -> None:
    for i in range(12):
        store.add_text(f"{i}.txt", f"The boat number {i} of Ann is {'red' if i % 3 else 'blue'}.", zone="device")
    before = [(p.text, p.score) for p in store.search("red boat of Ann", 12)]
    put(tmp_path, "other", "file-1", *(f"A boat of Ann, {i}" for i in range(60)))
    assert [(p.text, p.score) for p in store.search("red boat of Ann", 12)] == before


def test_a_small_collection_in_an_inverted_file_is_searched_completely(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "IVF_ROWS", 400)
    put(tmp_path, "large", "file-1", *(f"word{i} of{i * 7} many{i * 13}" for i in range(900)))
    texts = {f"The red boat and thing{i}." for i in range(7)}
    put(tmp_path, "small", "file-2", *sorted(texts))
    found = store.search("unlike all of them", 20, Selection(("small",)), min_score=-1.0)
    assert {passage.text for passage in found} == texts


def test_a_store_of_version_1_opens_and_keeps_its_documents(tmp_path: Path) -> None:
    vector = HashEmbedder().embed([BOAT])[0].astype("<f4").tobytes()
    with closing(sqlite3.connect(tmp_path / database_module.FILE)) as connection:
        connection.executescript(FORMAT_1)
        connection.execute("INSERT INTO chunks VALUES (7, 'doc-1', 0, ?, '', ?)", (BOAT, vector))
        connection.commit()
    opened: list[list[str]] = []

    def look() -> None:  # two at once: one of them migrates the store
        with DocumentStore.open(tmp_path, HashEmbedder()) as store:
            opened.append([passage.file_id for passage in store.search("the red boat", 3)])

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert opened == [["doc-1"], ["doc-1"]]
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        assert store.add_text("boat.txt", BOAT, zone="device").status == "replaced"
        assert store.remove("boat.txt") == 1
        with closing(sqlite3.connect(tmp_path / database_module.FILE)) as connection:
            assert connection.execute("SELECT count(*) FROM chunks").fetchone() == (0,), (
                "chunks are removed with their document"
            )
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_a_store_of_version_2_keeps_its_documents_and_pending_files(tmp_path: Path) -> None:
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        store.add_text("boat.txt", BOAT, zone="device")
        library = Library(store, "device")
        file = library.upload("ann", "a.txt", "assistants", BytesIO(b"The red boat.")).id
        vectors = library.create_store("ann", "mine", {}, [FileSpec(file)]).id
        library.close()
    with closing(sqlite3.connect(tmp_path / "documents.sqlite")) as rows:
        rows.executescript(
            "DROP INDEX document_sources; ALTER TABLE documents DROP COLUMN source; "
            "ALTER TABLE documents DROP COLUMN key; ALTER TABLE documents DROP COLUMN sealed; "
            "ALTER TABLE chunks DROP COLUMN place; ALTER TABLE documents DROP COLUMN stamp; "
            "ALTER TABLE files DROP COLUMN key; ALTER TABLE attached DROP COLUMN starts; PRAGMA user_version = 2;"
        )
    (tmp_path / "boat.txt").write_text(BOAT)
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        assert [each.status for each in store.add(tmp_path / "boat.txt", zone="device")] == ["unchanged"]
        assert [Path(each.source) for each in store.documents()] == [tmp_path / "boat.txt"]
        library = Library(store, "device")
        library.start()
        while (status := library.stores.attached("ann", vectors, file).status) == "in_progress":
            pass
        assert status == "completed"
        library.close()
