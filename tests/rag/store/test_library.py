"""Uploads and vector stores over one document store, without HTTP."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from paceline.errors import RequestError
from paceline.rag.document_kv import FOLDER as KV_FOLDER
from paceline.rag.document_kv import text_hash
from paceline.rag.embedder import HashEmbedder
from paceline.rag.records import Selection, Vectors
from paceline.rag.store import files as uploads_module
from paceline.rag.store import library as ingest_module
from paceline.rag.store import vector_stores as vector_stores_module
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.files import Paging, harmless
from paceline.rag.store.library import Library
from paceline.rag.store.vector_stores import Comparison, Counts, FileSpec
from paceline.sql import Home
from tests.rag.store.conftest import ON_DISK

BOAT = "The red boat belongs to Ann Bell."
TRAIN = "The night train to Lisbon leaves at nine."
ANN, BERT = "ann", "bert"


class Gated(HashEmbedder):
    """Embeds only while `go` is set; sets `asked` at each call."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        self.go.set()

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.asked.set()
        assert self.go.wait(60)
        return super().embed(texts)


@pytest.fixture
def embedder() -> Gated:
    return Gated()


@pytest.fixture
def documents(tmp_path: Path, embedder: Gated, home: Home | None) -> Iterator[DocumentStore]:
    with DocumentStore.open(tmp_path / "docs", embedder, home=home) as opened:
        yield opened


@pytest.fixture
def library(documents: DocumentStore) -> Iterator[Library]:
    opened = Library(documents, "cloud")
    opened.start()
    try:
        yield opened
    finally:
        opened.close()


def upload(library: Library, text: str | bytes, name: str = "note.txt", owner: str = ANN) -> str:
    data = text.encode() if isinstance(text, str) else text
    return library.uploads.add(owner, name, "assistants", io.BytesIO(data)).id


def settled(library: Library, store: str, owner: str = ANN) -> Counts:
    """Poll until every file has been read, and return the counts. The test's time limit ends an endless wait."""
    while (counts := library.stores.get(owner, store).counts).in_progress:
        pass
    return counts


def stored(library: Library, *files: str, owner: str = ANN) -> str:
    """A new store of these files, all of which have been read."""
    store = library.stores.create(owner, "", {}, [FileSpec(file) for file in files]).id
    settled(library, store, owner)
    return store


def texts(library: Library, store: str, query: str = "boat train", owner: str = ANN) -> list[str]:
    return [hit.passage.text for hit in library.search(owner, [store], [query], 10)]


def test_a_file_can_be_found_in_a_store_until_it_is_detached_or_deleted(
    library: Library, documents: DocumentStore
) -> None:
    boat, train = upload(library, BOAT, "boat.txt"), upload(library, TRAIN, "train.txt")
    store = library.stores.create(ANN, "mine", {}, [FileSpec(boat, {"year": 1999}), FileSpec(train)]).id
    assert settled(library, store) == Counts(completed=2)
    (hit,) = library.search(ANN, [store], ["who owns the red boat"], 1)
    assert (hit.passage.file_id, hit.passage.document, hit.attributes) == (boat, "boat.txt", {"year": 1999})
    assert 0 < hit.passage.score <= 1
    assert library.stores.get(ANN, store).usage_bytes > 2 * 256 * 4
    assert documents.count() == 0, "the default selection does not include vector stores"
    assert documents.count(library.stores.selection(ANN, [store])[0]) == 2
    library.stores.detach(ANN, store, train)
    assert texts(library, store) == [BOAT]
    library.delete_file(ANN, boat)
    assert texts(library, store) == []
    assert library.stores.get(ANN, store).counts.total == 0
    with pytest.raises(FileNotFoundError):
        library.uploads.open(boat)
    with library.uploads.open(train) as kept:
        assert kept.read() == TRAIN.encode()
    assert documents.count(Selection((store,))) == 0
    assert [file.id for file in library.uploads.page(ANN, Paging())[0]] == [train]


def test_stored_kv_of_a_file_is_removed_with_it(library: Library, documents: DocumentStore) -> None:
    file = upload(library, BOAT)
    store, others = stored(library, file), stored(library, upload(library, BOAT, owner=BERT), owner=BERT)
    folder = documents.directory / KV_FOLDER
    folder.mkdir()
    hashes = text_hash(BOAT, store), text_hash(TRAIN, store), text_hash(BOAT, others), text_hash(BOAT)
    assert len(set(hashes)) == len(hashes)
    paths = [folder / f"{each}-model-tokens.safetensors" for each in hashes]
    for path in paths:
        path.write_bytes(b"rows")
    library.delete_file(ANN, file)
    assert [path.exists() for path in paths] == [False, True, True, True]


def test_stored_kv_of_chunks_that_a_new_reading_replaces_is_removed(library: Library, documents: DocumentStore) -> None:
    file = upload(library, f"{BOAT} {TRAIN}")
    store = stored(library, file)
    folder = documents.directory / KV_FOLDER
    folder.mkdir()
    path = folder / f"{text_hash(f'{BOAT} {TRAIN}', store)}-model-tokens.safetensors"
    path.write_bytes(b"rows")
    library.stores.attach(ANN, store, FileSpec(file))
    settled(library, store)
    assert path.exists(), "the same chunk"
    library.stores.attach(ANN, store, FileSpec(file, chunk_tokens=8, overlap=0))
    settled(library, store)
    assert len(texts(library, store)) > 1
    while path.exists():  # the thread erases it after its transaction
        pass


def test_one_text_in_two_stores_under_one_name(library: Library) -> None:
    files = [upload(library, BOAT, "same.txt") for _ in range(2)]
    stores = [stored(library, *files) for _ in range(2)]
    for store in stores:
        assert settled(library, store) == Counts(completed=2)
        assert texts(library, store) == [BOAT], "each text is found once"
    library.stores.delete(ANN, stores[0])
    assert texts(library, stores[1]) == [BOAT]
    with pytest.raises(RequestError, match="No such vector store"):
        texts(library, stores[0])


def test_attributes_belong_to_a_file_in_one_store(library: Library) -> None:
    file = upload(library, BOAT)
    stores = [library.stores.create(ANN, "", {}, [FileSpec(file, {"side": side})]).id for side in ("port", "lee")]
    for store in stores:
        settled(library, store)
    port = Comparison("eq", "side", "port")
    (hit,) = library.search(ANN, stores, ["boat"], 5, condition=port)
    assert (hit.passage.collection, hit.attributes) == (stores[0], {"side": "port"})
    assert library.search(ANN, stores[1:], ["boat"], 5, condition=port) == []
    library.stores.modify_file(ANN, stores[1], file, {"side": "port"})
    assert len(library.search(ANN, stores[1:], ["boat"], 5, condition=port)) == 1


def test_files_that_cannot_be_read_fail_with_a_reason(library: Library) -> None:
    bad = {b"": "invalid_file", b"\0": "unsupported_file"}
    files = {upload(library, data): code for data, code in bad.items()}
    store = stored(library, *files, upload(library, BOAT))
    assert settled(library, store) == Counts(completed=1, failed=len(bad))
    for file, code in files.items():
        attached = library.stores.attached(ANN, store, file)
        assert (attached.status, attached.error_code) == ("failed", code)
        assert attached.error_message
        with pytest.raises(RequestError, match="failed"):
            library.text(ANN, store, file)


def test_a_file_removed_or_cancelled_while_it_is_read_leaves_nothing(library: Library, embedder: Gated) -> None:
    kept, gone, cancelled = (upload(library, f"{BOAT} {i}") for i in range(3))
    embedder.go.clear()
    embedder.asked.clear()
    store = library.stores.create(ANN, "", {}, [FileSpec(gone)]).id
    assert embedder.asked.wait(60)
    library.delete_file(ANN, gone)
    batch = library.stores.create_batch(ANN, store, [FileSpec(cancelled)])
    assert library.stores.cancel_batch(ANN, store, batch.id).counts == Counts(cancelled=1)
    embedder.go.set()
    library.stores.attach(ANN, store, FileSpec(kept))
    assert settled(library, store) == Counts(completed=1, cancelled=1)
    assert texts(library, store) == [f"{BOAT} 0"]


@ON_DISK
def test_bytes_of_an_unfinished_upload_are_removed_at_the_next_start(
    documents: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(documents, "cloud")
    whole = upload(library, BOAT)
    half, orphan = (library.uploads.path(name) for name in ("file-1.part", "file-2"))
    for path in (half, orphan):
        path.write_bytes(b"half")
    library.close()
    Library(documents, "cloud").close()
    assert not orphan.exists(), "it has no row"
    assert half.exists(), "it may be an upload of another process"
    monkeypatch.setattr(uploads_module, "_STALE_S", -1.0)
    Library(documents, "cloud").close()
    assert [path.name for path in library.uploads.path("x").parent.iterdir()] == [whole]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_together_are_the_whole_list(library: Library, order: str) -> None:
    files = [upload(library, str(i)) for i in range(7)]
    wanted = files if order == "asc" else files[::-1]
    seen: list[str] = []
    more, paging = True, Paging(3, order)  # type: ignore[arg-type]
    while more:
        rows, more = library.uploads.page(ANN, paging)
        seen += [row.id for row in rows]
        paging = Paging(3, order, after=seen[-1])  # type: ignore[arg-type]
    assert seen == wanted
    rows, more = library.uploads.page(ANN, Paging(3, order, before=wanted[5]))  # type: ignore[arg-type]
    assert ([row.id for row in rows], more) == (wanted[2:5], True)
    with pytest.raises(RequestError, match="not in this list"):
        library.uploads.page(ANN, Paging(after="file-0"))


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_list_goes_on_behind_what_was_deleted_from_it(library: Library, order: Literal["asc", "desc"]) -> None:
    for number in range(7):
        library.stores.create(ANN, str(number), {}, ())
        upload(library, str(number))
    for page, delete in ((library.stores.page, library.stores.delete), (library.uploads.page, library.delete_file)):
        listed: Any = page
        seen: list[str] = []
        more, paging = True, Paging(3, order)
        while more:
            rows, more = listed(ANN, paging)
            for row in rows:
                delete(ANN, row.id)
                seen.append(row.id)
            paging = Paging(3, order, after=seen[-1])
        assert len(seen) == 7 and seen == sorted(seen, reverse=order == "desc")


def test_a_cursor_need_not_fit_the_filter_any_more(library: Library) -> None:
    files = [upload(library, str(number)) for number in range(4)]
    store = library.stores.create(ANN, "store", {}, [FileSpec(file) for file in files])
    settled(library, store.id)
    read, _ = library.stores.files(ANN, store.id, Paging(order="asc", after=files[1]), status="completed")
    assert [each.file for each in read] == files[2:]
    assert library.stores.files(ANN, store.id, Paging(order="asc", after=files[1]), status="in_progress") == ([], False)


def test_names_become_harmless() -> None:
    odd = {"../../etc/passwd": "passwd", "a\\b.txt": "b.txt", "": "file", "..": "file", "a\0\nb": "a__b", "x/": "x"}
    assert {name: harmless(name) for name in odd} == odd
    assert harmless("ü" * 300 + ".md") == "ü" * 252 + ".md"
    assert harmless("\ud800.txt") == "_.txt"


@pytest.mark.parametrize(
    ("module", "limit", "value"),
    [
        (uploads_module, "MAX_FILES", 2),
        (uploads_module, "MAX_OWNED_BYTES", 2 * len(BOAT)),
        (vector_stores_module, "MAX_STORES", 2),
        (vector_stores_module, "MAX_STORE_FILES", 2),
    ],
)
def test_limits_apply_to_each_owner_separately(
    library: Library, monkeypatch: pytest.MonkeyPatch, module: ModuleType, limit: str, value: int
) -> None:
    monkeypatch.setattr(module, limit, value)

    def fill(owner: str) -> None:
        files = [upload(library, BOAT, owner=owner) for _ in range(2 if module is uploads_module else 3)]
        if limit == "MAX_STORE_FILES":
            store = library.stores.create(owner, "", {}, [FileSpec(file) for file in files[:2]]).id
            library.stores.attach(owner, store, FileSpec(files[2]))
        for _ in range(3):
            library.stores.create(owner, "", {}, [])
            upload(library, BOAT, owner=owner)

    for owner in (ANN, BERT):
        with pytest.raises(RequestError) as refused:
            fill(owner)
        assert (refused.value.status, refused.value.code) == (400, "limit_exceeded")


def test_an_upload_that_others_have_overtaken_meets_the_limit_too(
    library: Library, documents: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "MAX_OWNED_BYTES", 2 * len(BOAT))

    class Overtaken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() == 0:
                upload(library, BOAT)
                upload(library, BOAT)
            return super().read(size)

    with pytest.raises(RequestError, match="delete some first"):
        library.uploads.add(ANN, "late.txt", "assistants", Overtaken(BOAT.encode()))
    assert len(library.uploads.page(ANN, Paging())[0]) == 2
    left = len(list((documents.directory / uploads_module.FOLDER).iterdir()))
    assert left == (0 if documents.home is not None else 2), "its bytes are gone"


def test_an_owner_has_a_few_uploads_arrive_at_once(library: Library) -> None:
    receive = library.uploads.receive
    with ExitStack() as arriving:
        for _ in range(uploads_module.MAX_ARRIVING):
            arriving.enter_context(closing(receive(ANN)))
        with pytest.raises(RequestError) as refused:
            receive(ANN)
        assert (refused.value.status, refused.value.code) == (429, "too_many_uploads")
        receive(BERT).close()
    receive(ANN).close()


@ON_DISK
def test_uploads_that_arrive_together_are_within_the_limit_before_their_bytes_are_written(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "MAX_OWNED_BYTES", 100)
    folder = library.uploads.path("x").parent
    with closing(library.uploads.receive(ANN, 60)) as first, closing(library.uploads.receive(ANN)) as second:
        with pytest.raises(RequestError, match="what is arriving") as refused:
            library.uploads.receive(ANN, 41)
        assert refused.value.code == "limit_exceeded"
        second.write(b"x" * 40)
        for late in (first, second):
            late.write(b"x" * (60 - late.num_bytes) if late is first else b"")
            with pytest.raises(RequestError):
                late.write(b"x")
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 100
        library.uploads.receive(BERT, 100).close()
        assert library.uploads.keep(first, "first", "batch").num_bytes == 60
    assert [path.stat().st_size for path in folder.iterdir()] == [60], "the other was not kept"
    with closing(library.uploads.receive(ANN, 40)) as third:
        third.write(b"x" * 40)
        library.uploads.keep(third, "third", "batch")


def test_the_usage_limit_applies_to_each_owner_s_stores_together(
    library: Library, monkeypatch: pytest.MonkeyPatch, embedder: Gated
) -> None:
    usage = 4 * embedder.dimensions + len(BOAT)
    monkeypatch.setattr(ingest_module, "MAX_OWNED_USAGE", 2 * usage + 100)
    files = [upload(library, f"{BOAT[:-1]}{i}") for i in range(3)]
    first = stored(library, files[0])
    second = stored(library, *files)
    assert settled(library, second) == Counts(completed=1, failed=2)
    refused = library.stores.attached(ANN, second, files[2])
    assert refused.error_code == "invalid_file" and "take other files out" in refused.error_message
    theirs = stored(library, upload(library, BOAT, owner=BERT), owner=BERT)
    assert settled(library, theirs, BERT) == Counts(completed=1)

    library.stores.attach(ANN, first, FileSpec(files[0]))
    assert settled(library, first) == Counts(completed=1), "a new reading replaces the usage of the old one"
    embedder.go.clear()
    batch = library.stores.create_batch(ANN, first, [FileSpec(files[0])])
    library.stores.cancel_batch(ANN, first, batch.id)
    embedder.go.set()
    assert library.stores.get(ANN, first).usage_bytes == usage, "chunks that can still be found are counted"
    library.stores.attach(ANN, second, FileSpec(files[1]))
    assert settled(library, second) == Counts(completed=1, failed=2)
    library.stores.detach(ANN, first, files[0])
    library.stores.attach(ANN, second, FileSpec(files[1]))
    assert settled(library, second) == Counts(completed=2, failed=1)


def test_batches_whose_files_others_have_read_again_are_forgotten(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_stores_module, "MAX_PAST_BATCHES", 2)
    boat, train = upload(library, BOAT), upload(library, TRAIN)
    store, other = (library.stores.create(ANN, "", {}, []).id for _ in range(2))
    kept = library.stores.create_batch(ANN, store, [FileSpec(train)]).id
    elsewhere = library.stores.create_batch(ANN, other, [FileSpec(boat)]).id
    made = [library.stores.create_batch(ANN, store, [FileSpec(boat)]).id for _ in range(5)]
    for batch in (kept, *made[-2:]):
        library.stores.batch(ANN, store, batch)
    library.stores.batch(ANN, other, elsewhere)
    for batch in made[:-2]:
        with pytest.raises(RequestError):
            library.stores.batch(ANN, store, batch)


def test_owners_are_served_in_turn(documents: DocumentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    work = ingest_module.Ingester._work

    def noted(self: ingest_module.Ingester, job: ingest_module._Job) -> Iterator[object]:
        order.append(job.file)
        return work(self, job)

    monkeypatch.setattr(ingest_module.Ingester, "_work", noted)
    library = Library(documents, "cloud")
    ann, bert = (
        [upload(library, f"{BOAT} {i}") for i in range(5)],
        [upload(library, BOAT, owner=BERT) for _ in range(2)],
    )
    stores = [
        (library.stores.create(owner, "", {}, [FileSpec(file) for file in files]).id, owner)
        for owner, files in ((ANN, ann), (BERT, bert))
    ]
    library.start()
    for store, owner in stores:
        settled(library, store, owner)
    library.close()
    assert order[:2] == [ann[0], bert[0]]
    assert [file for file in order if file in ann] == ann
    assert [file for file in order if file in bert] == bert
