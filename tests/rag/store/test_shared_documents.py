"""Documents of several servers over one real database: found alike, read once, gone everywhere."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import psycopg
import pytest

from paceline.errors import ConfigError, RequestError
from paceline.postgres import Postgres
from paceline.rag.embedder import HashEmbedder, unit
from paceline.rag.records import MANAGED, MIN_SCORE, Selection, Vectors
from paceline.rag.store import library as ingest_module
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.files import STEP
from paceline.rag.store.library import Library
from paceline.rag.store.vector_stores import Counts, FileSpec
from tests.postgres import RealPostgres
from tests.rag.store.test_library import ANN, Gated, settled, texts, upload

BOAT = "The red boat belongs to Ann Bell."


class Untied(HashEmbedder):
    """No two texts are equally similar to a third."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        noise = np.stack([np.random.default_rng(crc32(text.encode())).normal(size=self.dimensions) for text in texts])
        return unit(super().embed(texts) + noise / 50)


class Server(NamedTuple):
    database: Postgres
    documents: DocumentStore
    library: Library
    embedder: Gated


@pytest.fixture
def url(postgres: RealPostgres) -> str:
    return postgres.new_database()


@pytest.fixture
def servers(url: str, tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """Two, of which neither reads files yet."""
    with ExitStack() as stack:
        made = []
        for name in ("a", "b"):
            database = stack.enter_context(closing(Postgres(url)))
            database.join(f"http://{name}")
            embedder = Gated()
            documents = stack.enter_context(DocumentStore.open(tmp_path / name, embedder, side="cloud", home=database))
            library = stack.enter_context(closing(Library(documents, "cloud")))
            made.append(Server(database, documents, library, embedder))
        yield made[0], made[1]


def cells(url: str) -> Iterator[tuple[str, object]]:
    """(table, value) of every value of every table, bytes as text."""
    with psycopg.connect(url) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'paceline'").fetchall()
        for (table,) in tables:
            for row in connection.execute(f'SELECT * FROM paceline."{table}"'):
                yield from ((table, each.decode("latin-1") if isinstance(each, bytes) else str(each)) for each in row)


def where_is(url: str, text: str) -> set[str]:
    return {table for table, value in cells(url) if text in str(value)}


def test_the_same_documents_give_the_same_passages_and_scores_as_in_a_file(url: str, tmp_path: Path) -> None:
    with closing(Postgres(url)) as database, ExitStack() as stack:
        stores = [
            stack.enter_context(DocumentStore.open(tmp_path / str(number), Untied(), home=home))
            for number, home in enumerate((None, database))
        ]
        for store in stores:
            for i in range(120):
                note = f"The {('red', 'blue', 'green')[i % 3]} boat of berth {7000 + 3 * i} costs {i % 11} euros."
                store.add_text(f"note{i}.txt", note, zone="cloud")
            for i in range(8):
                store.add_text(f"copy{i}.txt", f"{BOAT}{' ' * i}\n\nFollows {i // 4}.", zone="cloud")
        some = Selection(document_ids=frozenset(document.id for document in stores[0].documents()[::7]))
        for query in (
            "who owns the red boat",
            "berth 7123",
            "7288",
            "the blue boat costs 7 euros",
            "tax report",
            "Bell",
        ):
            for selection in (MANAGED, some, Selection(document_ids=frozenset()), Selection(("other",))):
                for min_score in (-1.0, MIN_SCORE, 0.5):
                    plain, shared = (store.search(query, 20, selection, min_score=min_score) for store in stores)
                    assert [each.score for each in shared] == pytest.approx([each.score for each in plain], abs=1e-6)
                    assert [each.text for each in shared] == [each.text for each in plain]
                    assert [each.chunk_id for each in shared] == [each.chunk_id for each in plain]


def test_what_is_uploaded_at_one_server_is_read_and_found_at_the_other_and_deleted_everywhere(
    servers: tuple[Server, Server], url: str
) -> None:
    first, second = servers
    content = b"\0\xff" * STEP + b"zanzibar"  # of more than one part
    big = first.library.uploads.add(ANN, "big.bin", "user_data", io.BytesIO(content)).id
    with second.library.uploads.open(big) as opened:
        assert opened.read() == content
    file = upload(first.library, "The quixotic boat is Ann's.")
    store = first.library.stores.create(ANN, "", {}, [FileSpec(file)]).id
    second.library.start()
    assert settled(first.library, store) == Counts(completed=1)
    for server in servers:
        assert texts(server.library, store) == ["The quixotic boat is Ann's."]
        server.documents.add_text("plain.txt", "A quixotic sloop.", zone="cloud")
        assert [each.document for each in server.documents.search("quixotic sloop", 2)] == ["plain.txt"]
    assert where_is(url, "quixotic") == {"chunks", "texts", "file_parts"}
    (seen,) = second.documents.search("quixotic sloop", 1)
    removals = second.documents.removals()
    first.library.delete_file(ANN, file)
    first.library.delete_file(ANN, big)
    first.documents.remove("plain.txt")
    assert where_is(url, "quixotic") == where_is(url, "zanzibar") == set()
    assert not {table for table, _ in cells(url)} & {"chunks", "texts", "file_parts", "documents", "file_readers"}
    assert second.documents.removals() == removals + 2
    assert texts(second.library, store) == second.documents.search("quixotic sloop", 2) == []
    assert not second.documents.chunks([seen.chunk_id])
    with pytest.raises(RequestError, match="not here"):
        second.library.passage(ANN, seen.chunk_id)
    with pytest.raises(FileNotFoundError):
        second.library.uploads.open(file)


def test_a_file_is_read_by_one_server_and_by_another_when_that_one_is_gone(
    servers: tuple[Server, Server], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_module, "LOOK_S", 0.02)
    first, second = servers
    first.embedder.go.clear()
    store = first.library.stores.create(ANN, "", {}, [FileSpec(upload(first.library, BOAT))]).id
    first.library.start()
    assert first.embedder.asked.wait(60)
    looks = 0
    following = ingest_module.Ingester._next

    def counted(self: ingest_module.Ingester) -> object:
        nonlocal looks
        found = following(self)
        looks += self is second.library._ingester
        return found

    monkeypatch.setattr(ingest_module.Ingester, "_next", counted)
    second.library.start()
    while looks < 3:
        pass
    assert not second.embedder.asked.is_set(), "the first server reads it"
    assert second.database.fleet is not None and first.database.fleet is not None
    with psycopg.connect(url, autocommit=True) as connection:  # as of a server that stands still
        connection.execute("ALTER TABLE paceline.servers DISABLE TRIGGER ALL")
        monkeypatch.setattr("paceline.fleet._RENEW", "SELECT %s, %s")
        connection.execute("UPDATE paceline.servers SET until = '-infinity' WHERE id = %s", (first.database.fleet.id,))
        connection.execute("UPDATE paceline.servers SET until = 'infinity' WHERE id = %s", (second.database.fleet.id,))
    assert settled(second.library, store) == Counts(completed=1)
    first.embedder.go.set()
    first.library.close()
    assert texts(second.library, store) == [BOAT]
    assert second.library.stores.get(ANN, store).counts == Counts(completed=1)


def test_a_database_without_pgvector_is_refused_with_advice(url: str, tmp_path: Path) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'permission denied'; END $$"
        )
        connection.execute(
            "CREATE EVENT TRIGGER no_extension ON ddl_command_start WHEN TAG IN ('CREATE EXTENSION') "
            "EXECUTE FUNCTION refuse()"
        )
    with closing(Postgres(url)) as database, pytest.raises(ConfigError, match="pgvector: install it"):
        DocumentStore.open(tmp_path, HashEmbedder(), home=database)
