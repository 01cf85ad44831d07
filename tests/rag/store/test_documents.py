"""The document store: adding, replacing, removing, searching, and its index file."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline import sql
from paceline.core.side import Side, other
from paceline.errors import ConfigError
from paceline.rag import database as database_module
from paceline.rag import rows
from paceline.rag.chunk import Chunk
from paceline.rag.database import Database, made_by
from paceline.rag.embedder import HashEmbedder
from paceline.rag.index import HybridIndex
from paceline.rag.records import (
    EXACT_SCORE,
    LEADING_COSINE,
    MANAGED,
    MIN_SCORE,
    Document,
    Selection,
    Vectors,
    Zone,
)
from paceline.rag.rows import insert_document, packed
from paceline.rag.store.documents import DocumentStore
from paceline.sql import Home
from tests.rag.store.conftest import ON_DISK

BOAT = "The red boat belongs to Ann Bell.\n"
TRAIN = "The night train to Lisbon leaves at nine.\n"


class Renamed(HashEmbedder):
    name = fingerprint = "renamed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path, home: Home | None) -> Iterator[DocumentStore]:
    with DocumentStore.open(folder, HashEmbedder(), home=home) as opened:
        yield opened


def names(store: DocumentStore, query: str, k: int = 5) -> list[str]:
    return [passage.document for passage in store.search(query, k)]


def test_a_document_is_stored_unchanged_also_after_a_restart(
    store: DocumentStore, folder: Path, home: Home | None
) -> None:
    added = store.add_text("boat.txt", BOAT, zone="device")
    assert (added.status, added.num_chunks) == ("added", 1)
    for opened in (store, DocumentStore.open(folder, HashEmbedder(), home=home)):
        (document,) = opened.documents()
        assert (document.id, document.name, document.zone, document.num_chunks) == (added.id, "boat.txt", "device", 1)
        assert opened.count() == 1
        (passage,) = opened.search("Who owns the red boat?", 3)
        assert (passage.document, passage.text, passage.title) == ("boat.txt", BOAT, "")
        query, text = HashEmbedder().embed(["Who owns the red boat?", BOAT])
        assert passage.score == pytest.approx(float(query @ text), abs=2e-3)
        opened.close()


def test_the_same_text_again_changes_nothing(store: DocumentStore) -> None:
    first = store.add_text("boat.txt", BOAT, zone="device")
    chunk = store.search("red boat", 1)[0].chunk_id
    assert store.add_text("boat.txt", BOAT.replace("\n", "\r\n"), zone="device").status == "unchanged"
    copy = store.add_text("copy.txt", BOAT, zone="device")
    assert (copy.status, copy.id, copy.note) == ("duplicate", first.id, "the same text as boat.txt")
    assert store.count() == 1
    assert store.search("red boat", 1)[0].chunk_id == chunk
    store.add_text("boat.txt", BOAT, zone="edge")
    assert store.documents()[0].zone == "edge"


def test_the_same_name_with_another_text_replaces_the_document(store: DocumentStore) -> None:
    store.add_text("note.txt", BOAT, zone="device")
    assert store.add_text("note.txt", TRAIN, zone="device").status == "replaced"
    assert store.count() == 1
    assert store.search("red boat Ann Bell", 3) == []
    assert names(store, "night train to Lisbon") == ["note.txt"]
    store.add_text("boat.txt", BOAT, zone="device")
    assert store.add_text("note.txt", BOAT, zone="device").status == "duplicate"
    assert [document.name for document in store.documents()] == ["boat.txt"]


def test_a_document_is_removed_by_id_or_name(store: DocumentStore) -> None:
    boat = store.add_text("boat.txt", BOAT, zone="device")
    store.add_text("train.txt", TRAIN, zone="device")
    assert store.remove("none.txt") == 0
    assert store.remove(boat.id) == 1
    assert store.remove("train.txt") == 1
    assert store.documents() == []
    assert store.search("red boat", 3) == []


def test_a_folder_is_added_with_a_result_for_every_entry(store: DocumentStore, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    (notes / "sub").mkdir(parents=True)
    (notes / "boat.txt").write_text(BOAT)
    (notes / "sub" / "train.md").write_text("# Trains\n\n" + (TRAIN + "\n") * 60)
    (notes / "empty.md").write_text("")
    (notes / "blank.txt").write_text(" \n\t\r\n", "utf-16")
    (notes / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (notes / "picture.png").write_bytes(b"\x89PNG")
    steps: list[tuple[str, int, int]] = []
    results = {item.name: item for item in store.add(notes, zone="device", progress=lambda *step: steps.append(step))}
    assert {name: item.status for name, item in results.items()} == {
        "boat.txt": "added", "sub/train.md": "added", "empty.md": "skipped", "blank.txt": "skipped",
        "latin.txt": "added", "picture.png": "skipped",
    }  # fmt: skip
    assert results["empty.md"].note == results["blank.txt"].note == "empty"
    assert [result.status for result in store.add(notes / "blank.txt", zone="device")] == ["failed"], "it was named"
    (notes / "boat.txt").write_text("")
    assert {each.name: each.status for each in store.add(notes, zone="device")}["boat.txt"] == "removed"
    (notes / "boat.txt").write_text(BOAT)
    assert {each.name: each.status for each in store.add(notes, zone="device")}["boat.txt"] == "added"
    assert steps[-1] == ("sub/train.md", 5, 5)
    assert sum(item.num_chunks for item in results.values()) > 1
    titles = {passage.title for passage in store.search("night train", 20)}
    assert titles <= {"", "Trains"}
    assert "Trains" in titles


def test_equal_new_and_replaced_texts_added_together_are_each_told_apart(store: DocumentStore, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for name, text in (("a.txt", BOAT), ("b.txt", BOAT), ("c.txt", TRAIN)):
        (files / name).write_text(text)
    assert [item.status for item in store.add(files, zone="device")] == ["added", "duplicate", "added"]
    (files / "a.txt").write_text("Something else entirely.")  # whose former text is now that of b.txt alone
    assert [item.status for item in store.add(files, zone="device")] == ["replaced", "added", "unchanged"]
    assert names(store, "red boat", 1) == ["b.txt"]


def test_a_text_whose_file_was_renamed_is_renamed_and_not_embedded_again(store: DocumentStore, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "old.txt").write_text(BOAT)
    (added,) = store.add(files, zone="device")
    (files / "old.txt").rename(files / "new.txt")
    (moved,) = store.add(files, zone="device")
    assert (moved.status, moved.name, moved.id) == ("moved", "new.txt", added.id)
    assert names(store, "red boat") == ["new.txt"]
    assert store.removals() == 0


def test_bad_names_and_texts_are_refused(store: DocumentStore) -> None:
    for name in ("../x", "a\0b", ""):
        with pytest.raises(ConfigError, match="cannot name"):
            store.add_text(name, BOAT, zone="device")
    with pytest.raises(ConfigError, match="not UTF-8"):
        store.add_text("x.txt", "lone \ud800 surrogate", zone="device")
    assert store.count() == 0


def test_equal_passages_of_different_documents_are_found_once(store: DocumentStore) -> None:
    for i in range(30):
        store.add_text(f"copy{i}.txt", f"{BOAT.strip()}{' ' * i}\n\n", zone="device")
    store.add_text("other.txt", "The boat of Tom Reed is not red but blue.", zone="device")
    assert len(store.documents()) == 31
    assert names(store, "red boat Ann Bell", 2)[1:] == ["other.txt"]


def test_only_relevant_passages_are_found_best_first(store: DocumentStore) -> None:
    store.add_text("boat.txt", BOAT, zone="device")
    store.add_text("train.txt", TRAIN, zone="device")
    both = store.search("the red boat", 5, min_score=-1.0)
    assert [passage.document for passage in both] == ["boat.txt", "train.txt"]
    assert both[0].score > MIN_SCORE > both[1].score
    assert names(store, "the red boat", 5) == ["boat.txt"]
    assert store.search("the red boat", 0) == []
    assert store.search("  ", 3) == []
    assert store.search("quarterly tax report", 3) == []


def test_a_search_without_hits_takes_one_round_and_no_hit_is_ever_missed(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    candidates = HybridIndex.candidates

    def counted(self: HybridIndex, query: str, vector: Vectors, limit: int, *rest: object) -> object:
        limits.append(limit)
        return candidates(self, query, vector, limit, *rest)  # type: ignore[arg-type]  # passed on unchanged

    text = " ".join(f"word{i} of{i % 7} line{i % 11}." for i in range(9000))
    store.add_text("words.txt", text, zone="device")
    passages = store.search("word1", 10_000, min_score=-1.0)
    assert len(passages) > 200
    monkeypatch.setattr(HybridIndex, "candidates", counted)
    assert store.search("quarterly tax report", 3) == []
    assert limits == [50]
    for query in ("of1 of2 of3 line1 line2 line3", "word5 of5 line5 of1 of2 of3 of4 of6 line7 line8 word17"):
        vector = HashEmbedder().embed([query])[0]
        for min_score in (0.05, 0.1, 0.2):
            scores = [float(vector @ HashEmbedder().embed([passage.titled])[0]) for passage in passages]
            right = {one.chunk_id for one, score in zip(passages, scores, strict=True) if score >= min_score}
            assert {one.chunk_id for one in store.search(query, 10_000, min_score=min_score)} == right


def test_a_rare_word_is_found_first_and_without_any_similarity(store: DocumentStore) -> None:
    """The one locker asked for comes before many that are as similar, and a bare number before a threshold."""
    for i in range(1400, 1600):
        store.add_text(f"note{i}.txt", f"The code of locker {i} is {20_000 + i * 7}. " + TRAIN * 3, zone="device")
    assert names(store, "what is the code of locker 1437", 1) == ["note1437.txt"]
    (found,) = store.search("1500", 2)
    assert found.document == "note1500.txt"
    vector = HashEmbedder().embed(["1500"])[0]
    assert float(vector @ HashEmbedder().embed([found.titled])[0]) < MIN_SCORE < found.score == EXACT_SCORE
    assert store.search("1500", 2, min_score=0.9) == []
    assert store.search("zx9999", 2) == []


def test_what_leads_by_a_rare_word_is_found_below_the_threshold_and_second_at_best(store: DocumentStore) -> None:
    for i in range(2):
        store.add_text(f"tea{i}.txt", f"{i} cups of tea are served in the small garden each day", zone="device")
    long = " ".join(f"thing{letter}" for letter in "abcdefghijklmnop")
    store.add_text("note.txt", f"Lanterns and tea. {long}", zone="device")
    query = "who lit lanterns in the garden"
    cosine = float(HashEmbedder().embed([query])[0] @ HashEmbedder().embed([f"Lanterns and tea. {long}"])[0])
    assert LEADING_COSINE < cosine < MIN_SCORE
    first, second = store.search(query, 2)
    assert (second.document, second.score) == ("note.txt", MIN_SCORE) and first.score > MIN_SCORE
    stricter = store.search(query, 10, min_score=MIN_SCORE + 0.01)
    assert "note.txt" not in [each.document for each in stricter]


def test_another_embedder_is_refused_until_everything_is_embedded_again(
    store: DocumentStore, folder: Path, home: Home | None
) -> None:
    store.add_text("boat.txt", BOAT, zone="device")
    with pytest.raises(
        ConfigError, match=r"indexed with the embedder 'hash' .*, not 'renamed'.*\(--embedder hash\).* docs reindex"
    ):
        DocumentStore.open(folder, Renamed(), home=home)
    with DocumentStore.open(folder, Renamed(), home=home, reindex=True) as renamed:
        assert names(renamed, "red boat") == ["boat.txt"]
    with pytest.raises(ConfigError, match=r"'renamed' .*, not 'hash'"):
        store.search("red boat", 1)
    with pytest.raises(ConfigError, match=r"'renamed' .*, not 'hash'"):
        store.add_text("train.txt", TRAIN, zone="device")
    with DocumentStore.open(folder, Renamed(), home=home) as renamed:
        assert renamed.count() == 1
    trained = Renamed()
    trained.fingerprint = "of other weights"
    with pytest.raises(ConfigError, match="not 'renamed' as it is now"):
        DocumentStore.open(folder, trained, home=home)


def test_a_store_without_documents_is_of_the_embedder_that_adds_the_first(folder: Path, home: Home | None) -> None:
    with (
        DocumentStore.open(folder, HashEmbedder(), side="cloud", home=home) as first,
        DocumentStore.open(folder, Renamed(), side="cloud", home=home) as other,
    ):
        assert first.search("red boat", 1) == other.search("red boat", 1) == []
        for writer, reader in ((other, first), (first, other)):
            writer.add_text("boat.txt", BOAT, zone="cloud")
            assert names(writer, "red boat") == ["boat.txt"]
            with pytest.raises(ConfigError, match=r"indexed with .* \(paceline docs reindex --side cloud\)"):
                reader.search("red boat", 1)
            with pytest.raises(ConfigError, match="indexed with"):
                reader.add_text("train.txt", TRAIN, zone="cloud")
            with pytest.raises(ConfigError, match="indexed with"):
                DocumentStore.open(folder, reader.embedder, home=home)
            writer.remove("boat.txt")


@ON_DISK
def test_removed_and_replaced_text_is_in_no_file_while_others_have_the_store_open(
    store: DocumentStore, folder: Path
) -> None:
    def in_files(needle: bytes) -> bool:
        return any(needle in file.read_bytes() for file in folder.iterdir())

    with DocumentStore.open(folder, HashEmbedder()) as reader:
        long = "".join(f"Paragraph {i} about zanzibar.\n\n" for i in range(600))  # more than one page of rows
        store.add_text("secret-a.txt", long, zone="device")
        store.add_text("secret-b.txt", "The quixotic plan.", zone="device")
        store.add_text("kept.txt", "The kept plan.", zone="device")
        vector = packed(store.embedder.embed(["The quixotic plan."])[0])
        assert reader.search("quixotic plan", 1)
        assert in_files(b"zanzibar")
        assert in_files(b"quixotic")
        assert in_files(vector)
        store.remove("secret-a.txt")
        store.add_text("secret-b.txt", "A tame plan.", zone="device")
        for gone in (b"zanzibar", b"quixotic", b"secret-a", vector):
            assert not in_files(gone), gone
        assert in_files(b"kept plan")


def test_the_entry_of_a_log_that_has_the_date_of_the_question_leads_those_that_differ_in_it_alone(
    store: DocumentStore, tmp_path: Path
) -> None:
    entries = [f"2025-06-{day} station Brook: the level on the gauge is {day + 30} cm\n" for day in range(10, 30)]
    (tmp_path / "survey.log").write_text("".join(entries))
    store.add(tmp_path / "survey.log", zone="device")
    first, second, *_ = store.search("What is the level on the gauge at station Brook on 28 June 2025?", 4)
    assert (first.text, first.place) == (entries[18], "line 19")
    assert first.score >= second.score + 0.1


def test_a_folder_that_is_not_a_store_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another"):
        DocumentStore.open(tmp_path / "file" / "below", HashEmbedder())
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "other" / "documents.sqlite").write_bytes(b"something else entirely" * 100)
    with pytest.raises(ConfigError, match="not a document store"):
        DocumentStore.open(tmp_path / "other", HashEmbedder())
    DocumentStore.open(tmp_path / "newer", HashEmbedder()).close()
    with sqlite3.connect(tmp_path / "newer" / "documents.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="another version"):
        DocumentStore.open(tmp_path / "newer", HashEmbedder())


def test_threads_may_search_while_others_add_and_remove(store: DocumentStore) -> None:
    store.add_text("boat.txt", BOAT, zone="device")
    done = threading.Event()
    failures: list[str] = []

    def search() -> None:
        while not done.is_set():
            if names(store, "red boat Ann Bell", 1) != ["boat.txt"]:
                failures.append("not found")

    searchers = [threading.Thread(target=search) for _ in range(3)]
    for thread in searchers:
        thread.start()
    for i in range(20):
        store.add_text("other.txt", f"Text number {i} of the night train.", zone="device")
        if i % 3 == 0:
            store.remove("other.txt")
    done.set()
    for thread in searchers:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("zones", "owner"), [(["device"], "device"), (["cloud"], "cloud"), (["cloud", "device"], "device"), ([], None)]
)
def test_a_store_without_a_recorded_side_belongs_to_the_side_of_its_documents(
    tmp_path: Path, zones: list[Zone], owner: Side | None
) -> None:
    """A store with documents of both sides belongs to the device: private ones must not become public."""
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        for zone in zones:
            store.add_text(f"{zone}.txt", f"A text of the {zone}.", zone=zone)
    owner = owner or "cloud"  # an empty one belongs to the first side that opens it
    if zones:
        with pytest.raises(ConfigError, match=f"of a {owner}: the {other(owner)} keeps its own in another folder"):
            DocumentStore.open(tmp_path, HashEmbedder(), side=other(owner))
    DocumentStore.open(tmp_path, HashEmbedder(), side=owner).close()
    with pytest.raises(ConfigError, match=f"of a {owner}"):
        DocumentStore.open(tmp_path, HashEmbedder(), side=other(owner))


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_of_one_name_in_two_folders_are_two_documents(store: DocumentStore, tmp_path: Path) -> None:
    for project, text in (("a", BOAT), ("b", TRAIN), ("deep/er/b", "The third.")):
        written(tmp_path / project, "notes.md", text)
    (added,) = store.add(tmp_path / "a", zone="device")
    assert (added.name, added.status, added.note) == ("notes.md", "added", "")
    (added,) = store.add(tmp_path / "b", zone="device")
    assert (added.name, added.status) == ("b/notes.md", "added")
    assert added.note == "notes.md is the name of another file's document"
    (added,) = store.add(tmp_path / "deep" / "er" / "b" / "notes.md", zone="device")
    assert added.name == "er/b/notes.md"
    assert {(each.name, Path(each.source)) for each in store.documents()} == {
        ("notes.md", tmp_path / "a" / "notes.md"),
        ("b/notes.md", tmp_path / "b" / "notes.md"),
        ("er/b/notes.md", tmp_path / "deep" / "er" / "b" / "notes.md"),
    }


def test_only_the_same_file_replaces_a_document_by_whatever_path_it_is_named(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "a" / "b", "notes.md", BOAT)
    store.add(tmp_path / "a", zone="device")
    (tmp_path / "link.md").symlink_to(file)
    monkeypatch.chdir(tmp_path / "a")
    for number, path in enumerate(
        [Path("b/notes.md"), Path("b"), tmp_path, Path("../a/./b/notes.md"), tmp_path / "link.md"]
    ):
        assert {each.status for each in store.add(path, zone="device")} - {"skipped"} == {"unchanged"}
        file.write_text(f"Version {number} of the boat.")
        (replaced,) = [each for each in store.add(path, zone="device") if each.status != "skipped"]
        assert (replaced.name, replaced.status) == ("b/notes.md", "replaced"), path
    assert [each.name for each in store.documents()] == ["b/notes.md"]


def test_a_text_does_not_replace_a_file_of_its_name(store: DocumentStore, tmp_path: Path) -> None:
    store.add(written(tmp_path, "notes.md", BOAT), zone="device")
    with pytest.raises(ConfigError, match="another file's document"):
        store.add_text("notes.md", TRAIN, zone="device")


# ---- collections: each is searched separately -----------------------------------------------------------------------
def put(store: DocumentStore, collection: str, file: str, *texts: str) -> None:
    """Insert a document of an uploaded file through a separate connection."""
    embedder = HashEmbedder()
    database = Database(store.directory, embedder=made_by(embedder), home=store.home)
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


# ---- what models have said of passages: it goes with the document and its owner, and is sealed as the document is ---
SAID = "The boat of XYZZYVELDA is red."


def test_it_goes_with_its_document_and_with_its_owner(tmp_path: Path, home: Home | None) -> None:
    with DocumentStore.open(tmp_path / "docs", HashEmbedder(), home=home) as store:
        for name in ("a.md", "b.md"):
            store.add_text(name, f"The boat of {name} is red.", zone="cloud")
        first, second = (each.chunk_id for each in store.whole(MANAGED))
        for number, (chunk, owner) in enumerate(((first, "anna"), (second, "anna"), (second, "ben"))):
            store.keep_reading(chunk, f"asked {number}", owner, f"{SAID} {number}")
        store.keep_reading(second, "asked 2", "ben", "another")  # the first one stays
        assert store.find_reading(second, "asked 2") == f"{SAID} 2"
        assert store.find_reading(first, "asked 2") is None
        store.forget_readings("anna")
        assert [store.find_reading(second, f"asked {number}") for number in (1, 2)] == [None, f"{SAID} 2"]
        store.remove("b.md")
        assert store.find_reading(second, "asked 2") is None
        store.keep_reading(second, "asked 3", "ben", SAID)  # of what has been removed meanwhile
        assert store.find_reading(second, "asked 3") is None


@pytest.mark.parametrize("encrypt", [False, True])
def test_on_the_disk_it_is_sealed_as_its_document_and_gone_with_it(tmp_path: Path, encrypt: bool) -> None:
    folder = tmp_path / "docs"

    def stored() -> bool:
        return any(b"XYZZYVELDA" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())

    with DocumentStore.open(folder, HashEmbedder(), side="device", encrypt=encrypt) as store:
        store.add_text("boat.md", "A red boat.", zone="device")
        (passage,) = store.whole(MANAGED)
        store.keep_reading(passage.chunk_id, "asked", "", SAID)
    assert stored() is not encrypt
    with DocumentStore.open(folder, HashEmbedder(), side="device") as store:
        assert store.find_reading(passage.chunk_id, "asked") == SAID
        if not encrypt:
            store.encrypt()
            assert not stored() and store.find_reading(passage.chunk_id, "asked") is None
        store.remove("boat.md")
    assert not stored()


def test_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_READINGS", 3)
    with DocumentStore.open(tmp_path / "docs", HashEmbedder()) as store:
        store.add_text("boat.md", "A red boat.", zone="cloud")
        (passage,) = store.whole(MANAGED)
        for number in range(5):
            store.keep_reading(passage.chunk_id, str(number), "", SAID)
        kept = [number for number in range(5) if store.find_reading(passage.chunk_id, str(number)) is not None]
    assert kept == [2, 3, 4]


def test_a_store_tells_its_documents_and_what_stands_around_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DocumentStore, "chunk_tokens", 16)
    monkeypatch.setattr(DocumentStore, "overlap", 0)
    with DocumentStore.open(tmp_path / "docs", HashEmbedder()) as store:
        text = " ".join(f"The boat number {number} of the harbour is red." for number in range(12))
        store.add_text("long.md", text, zone="cloud")
        store.add_text("short.md", "A mill.", zone="cloud")
        chunks = store.whole(MANAGED)
        sizes = dict(store.outline(MANAGED, 2))
        assert sizes == {"long.md": len(chunks) - 1, "short.md": 1} and store.outline(MANAGED, 1) == []
        middle = chunks[2]
        assert store.around(middle.chunk_id, 1) == chunks[1:4] and store.around(middle.chunk_id, 0) == [middle]
        assert store.around(10**6, 1) == []


def test_a_reader_that_stands_holds_up_nobody_and_what_is_removed_goes_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "BUSY_S", 3600.0)
    monkeypatch.setattr(database_module, "AGAIN_S", 0.0)
    log = tmp_path / f"{database_module.FILE}-wal"
    with DocumentStore.open(tmp_path, HashEmbedder(), side="device") as store:
        store.add_text("a.txt", "The quixotic lamp.", zone="device")
        with closing(sqlite3.connect(tmp_path / database_module.FILE, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM chunks").fetchall()
            assert store.remove("a.txt") == 1
            assert store.count() == 0 and store.add_text("b.txt", "Another.", zone="device").status == "added"
            assert b"quixotic" in (tmp_path / database_module.FILE).read_bytes() + log.read_bytes()
        while b"quixotic" in (tmp_path / database_module.FILE).read_bytes() + log.read_bytes():
            pass  # the test's time limit ends an endless wait
