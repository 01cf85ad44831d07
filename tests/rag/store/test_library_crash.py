"""Files whose reading ends the program, or is stopped with it; and a program for tests/reliability to kill."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.library import MAX_STARTS, Library
from paceline.rag.store.vector_stores import FileSpec
from tests.rag.store.killed import STEPS
from tests.rag.store.test_library import Gated

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forks")]

OWNER = "ann"

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


def test_stopping_during_a_reading_does_not_count_as_a_crash(tmp_path: Path) -> None:
    """A file is read in the end, however often the program is stopped properly while reading it."""
    embedder = Gated()
    embedder.go.clear()
    with DocumentStore.open(tmp_path, embedder) as documents:
        library = Library(documents, "cloud")
        file = library.uploads.add(OWNER, "long.txt", "assistants", io.BytesIO(b"Word after word. " * 2000)).id
        store = library.stores.create(OWNER, "store", {}, [FileSpec(file)]).id
        library.close()
        for _ in range(MAX_STARTS + 2):
            library = Library(documents, "cloud")
            embedder.asked.clear()
            library.start()
            assert embedder.asked.wait(60)
            stopping = threading.Thread(target=library.close)
            stopping.start()
            while not library._ingester._stopping:
                pass
            embedder.go.set()
            stopping.join()
            embedder.go.clear()
        embedder.go.set()
        library = Library(documents, "cloud")
        library.start()
        while (status := library.stores.attached(OWNER, store, file).status) == "in_progress":
            pass
        assert status == "completed"
        library.close()
