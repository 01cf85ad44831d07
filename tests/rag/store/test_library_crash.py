"""A library in a process that is killed anywhere: what is left is consistent, and pending files are read later."""

from __future__ import annotations

import io
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from paceline.rag.embedder import HashEmbedder
from paceline.rag.records import Selection, Vectors
from paceline.rag.store import files as uploads_module
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.files import Paging
from paceline.rag.store.library import MAX_STARTS, Library
from paceline.rag.store.vector_stores import FileSpec
from tests.rag.store.killed import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forks")]

OWNER = "ann"
PAGING = Paging(100)
SENTENCES = 40

# Changes the library in a loop and sends itself SIGKILL just before its n-th step. A step is an SQL statement of any
# thread or a call that creates or removes a file.
CHANGER = (
    STEPS
    + """
from paceline.rag.store.library import Library
from paceline.rag.store.vector_stores import FileSpec

def stepping(function):
    def call(*arguments, **options):
        step()
        return function(*arguments, **options)
    return call

documents = DocumentStore.open(Path(sys.argv[1]), HashEmbedder(), encrypt=sys.argv[3:] == ["encrypt"])
sqlite3.connect = traced
os.open, os.fsync, Path.unlink = stepping(os.open), stepping(os.fsync), stepping(Path.unlink)
library = Library(documents, "cloud")
library.start()
owner, files, i = "ann", [], 0
store = library.stores.create(owner, "store", {}, [])
while True:
    body = " ".join(f"Sentence {n} of version v{i}." for n in range(40))
    files.append(library.uploads.add(owner, f"{i}.txt", "batch", io.BytesIO(body.encode())).id)
    library.stores.create_batch(owner, store.id, [FileSpec(file, chunk_tokens=20, overlap=0) for file in files[-2:]])
    while library.stores.get(owner, store.id).counts.in_progress > 1:
        pass
    if i % 3 == 2:
        library.delete_file(owner, files.pop(0))
    i += 1
"""
)


def check(folder: Path) -> tuple[int, int]:
    """Assert consistency, then read all pending files. Returns the numbers of files and of pending ones before."""
    with (
        DocumentStore.open(folder, HashEmbedder()) as documents,
        closing(sqlite3.connect(folder / "documents.sqlite")) as rows,
    ):
        library = Library(documents, "cloud")
        assert rows.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert rows.execute("PRAGMA foreign_key_check").fetchall() == []
        files = dict(rows.execute("SELECT id, bytes FROM files"))
        for file, num_bytes in files.items():
            text = library.uploads.path(file).read_text("utf-8")
            assert len(text) == num_bytes
            assert text.count("Sentence") == SENTENCES
        left = whole(rows)
        library.start()
        while any(store.counts.in_progress for store in library.stores.page(OWNER, PAGING)[0]):
            pass
        assert whole(rows) == 0
        stores = [store.id for store in library.stores.page(OWNER, PAGING)[0]]
        counts = [library.stores.get(OWNER, store).counts for store in stores]
        assert all(count.completed == count.total for count in counts)
        assert documents.count(Selection(tuple(stores))) == sum(count.total for count in counts)
        library.close()
        on_disk = {path.name for path in library.uploads.path("x").parent.iterdir()}
        assert on_disk == set(files), "bytes of a killed upload are removed"
    return len(files), left


def whole(rows: sqlite3.Connection) -> int:
    """Assert that read files have all their chunks and pending ones none or those of an earlier reading. Returns the
    number of pending files.
    """
    read = """SELECT status, documents.id, num_chunks FROM attached
        LEFT JOIN documents ON collection = store AND documents.file = attached.file"""
    left = 0
    for status, document, num_chunks in rows.execute(read).fetchall():
        left += status == "in_progress"
        assert status in ("in_progress", "completed")
        if document is None:
            assert status == "in_progress"
            continue
        texts = [text for (text,) in rows.execute("SELECT text FROM chunks WHERE document = ?", (document,))]
        assert len(texts) == num_chunks
        assert " ".join(texts).count("Sentence") == SENTENCES
    orphans = """SELECT count(*) FROM documents WHERE file != '' AND NOT EXISTS
        (SELECT 1 FROM attached WHERE store = collection AND attached.file = documents.file)"""
    assert rows.execute(orphans).fetchone() == (0,)
    return left


def test_a_killed_process_leaves_files_whole_and_pending_readings_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "_STALE_S", -1.0)
    folder, rng, seen = tmp_path / "docs", random.Random(7), set()
    for steps in [5, *(rng.randrange(40, 1500) for _ in range(9))]:
        done = subprocess.run(
            [sys.executable, "-c", CHANGER, str(folder), str(steps)], capture_output=True, timeout=60, text=True
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        seen.add(check(folder))
    assert len(seen) > 3, "the kills hit nothing"
    assert any(left for _, left in seen), "nothing was being read"


# Reads pending files, and sends itself SIGKILL when the poisonous text is embedded.
READER = """
import os, signal, sys
from pathlib import Path
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.library import Library
from paceline.rag.store.documents import DocumentStore

embed = HashEmbedder.embed
def deadly(self, texts):
    if any("poison" in text for text in texts):
        os.kill(os.getpid(), signal.SIGKILL)
    return embed(self, texts)
HashEmbedder.embed = deadly

documents = DocumentStore.open(Path(sys.argv[1]), HashEmbedder())
library = Library(documents, "cloud")
library.start()
while library.stores.get("ann", sys.argv[2]).counts.in_progress:
    pass
library.close()
documents.close()
"""


def test_a_file_that_crashes_the_program_fails_and_the_others_are_read(tmp_path: Path) -> None:
    with DocumentStore.open(tmp_path, HashEmbedder()) as documents:
        library = Library(documents, "cloud")
        names = {"poison.txt": "This is poison.", "wholesome.txt": "This is wholesome."}
        files = {
            name: library.uploads.add(OWNER, name, "assistants", io.BytesIO(text.encode())).id
            for name, text in names.items()
        }
        store = library.stores.create(OWNER, "store", {}, [FileSpec(file) for file in files.values()]).id
        library.close()

    def start() -> int:
        return subprocess.run([sys.executable, "-c", READER, str(tmp_path), store], timeout=60).returncode

    assert [start() for _ in range(MAX_STARTS + 1)] == [-signal.SIGKILL] * MAX_STARTS + [0]
    with DocumentStore.open(tmp_path, HashEmbedder()) as documents:
        library = Library(documents, "cloud")
        given_up = library.stores.attached(OWNER, store, files["poison.txt"])
        assert (given_up.status, given_up.error_code) == ("failed", "server_error")
        assert given_up.error_message.startswith("The program or its parser ended 3 times while it read this file")
        assert library.stores.attached(OWNER, store, files["wholesome.txt"]).status == "completed"
        library.close()


class Waiting(HashEmbedder):
    """Embeds only while `go_on` is set."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.begun.set()
        assert self.go_on.wait(60)
        return super().embed(texts)


def test_stopping_during_a_reading_does_not_count_as_a_crash(tmp_path: Path) -> None:
    """A file is read in the end, however often the program is stopped properly while reading it."""
    embedder = Waiting()
    with DocumentStore.open(tmp_path, embedder) as documents:
        library = Library(documents, "cloud")
        file = library.uploads.add(OWNER, "long.txt", "assistants", io.BytesIO(b"Word after word. " * 2000)).id
        store = library.stores.create(OWNER, "store", {}, [FileSpec(file)]).id
        library.close()
        for _ in range(MAX_STARTS + 2):
            library = Library(documents, "cloud")
            embedder.begun.clear()
            library.start()
            assert embedder.begun.wait(60)
            stopping = threading.Thread(target=library.close)
            stopping.start()
            while not library._ingester._stopping:
                pass
            embedder.go_on.set()
            stopping.join()
            embedder.go_on.clear()
        embedder.go_on.set()
        library = Library(documents, "cloud")
        library.start()
        while (status := library.stores.attached(OWNER, store, file).status) == "in_progress":
            pass
        assert status == "completed"
        library.close()
