"""A document store with every kind of content that is written to disk, each with marks that a search of files finds."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np

from paceline.core.batching.block_manager import KvPrefix
from paceline.rag.document_kv import FOLDER as KV
from paceline.rag.document_kv import DocumentKvStore, KvKey
from paceline.rag.embedder import HashEmbedder
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.files import Paging
from paceline.rag.store.library import Library
from paceline.rag.store.vector_stores import FileSpec

OWNER = "ann"
NEWEST = Paging()
MIB = 1 << 20
NOTE = "The vault behind the quixotic mill opens with the word zanzibar."
CELLAR = "The cellar below the quixotic inn opens with the word yggdrasil."
# Of texts, names, titles, paths, names and metadata of vector stores, attributes, errors: none may lie in a file.
MARKS = (b"zanzibar", b"yggdrasil", b"vault-notes", b"cellar-notes", b"winebook", b"burgundy", b"merlot", b"broken-pdf")


def filled(folder: Path, source: Path, *, encrypt: bool) -> tuple[str, str]:
    """Fill a new store. source: where the file that is added lies. Returns ids of a file and a vector store."""
    (source / "vault-notes.md").write_text(f"# vault-notes of zanzibar\n\n{NOTE}\n")
    with DocumentStore.open(folder, HashEmbedder(), side="device", encrypt=encrypt) as store:
        store.add(source / "vault-notes.md", zone="device")
        library = Library(store, "device")
        library.start()
        try:
            file = library.uploads.add(OWNER, "cellar-notes.txt", "assistants", io.BytesIO(CELLAR.encode())).id
            broken = library.uploads.add(OWNER, "broken-pdf.pdf", "assistants", io.BytesIO(b"%PDF-1.7 no")).id
            specs = [FileSpec(file, {"grape": "merlot"}), FileSpec(broken)]
            made = library.stores.create(OWNER, "winebook", {"kind": "burgundy"}, specs).id
            while library.stores.get(OWNER, made).counts.in_progress:
                time.sleep(0.01)
        finally:
            library.close()
        for passage in store.passages(0, 100):
            put_kv(folder, store, passage)
    return file, made


def kv_prefix() -> KvPrefix:
    keys = np.arange(2 * 3 * 1 * 4, dtype="<f4").reshape(2, 3, 1, 4)
    return KvPrefix("fingerprint", "float32", (3, 1, 4), keys, keys + 1)


def kv_key(files: DocumentKvStore, passage: Passage) -> KvKey:
    return KvKey(files.text_hash(passage.titled, passage.collection), "model", kv_prefix().tokens)


def put_kv(folder: Path, store: DocumentStore, passage: Passage) -> None:
    files = DocumentKvStore(folder / KV, MIB, seal=store.seal)
    assert files.put(kv_key(files, passage), kv_prefix())


def content(folder: Path, file: str, made: str) -> list[object]:
    """All that a filled store says."""
    with DocumentStore.open(folder, HashEmbedder(), side="device") as store:
        library = Library(store, "device")
        try:
            files = DocumentKvStore(folder / KV, MIB, seal=store.seal)
            passages = store.passages(0, 100)
            kept = [files.get(kv_key(files, passage)) for passage in passages]
            with library.uploads.open(file) as document:
                uploaded = document.read()
            attached = library.stores.attached(OWNER, made, file)
            stored = library.stores.get(OWNER, made)
            return [
                [(each.name, each.sha256, each.zone, each.num_chunks, each.source) for each in store.documents()],
                sorted((each.document, each.title, each.text, each.collection) for each in passages),
                [None if each is None else (each.tokens, each.keys.tolist(), each.values.tolist()) for each in kept],
                [(each.document, round(each.score, 6)) for each in store.search("the word of the vault", 3)],
                [hit.passage.text for hit in library.search(OWNER, [made], ["which word opens the cellar"], 3)],
                library.text(OWNER, made, file),
                uploaded,
                library.uploads.get(OWNER, file).name,
                (stored.name, dict(stored.metadata), attached.attributes),
                sorted(each.error_message for each in library.stores.files(OWNER, made, NEWEST)[0]),
            ]
        finally:
            library.close()


def holding(folder: Path, marks: tuple[bytes, ...] = MARKS) -> set[tuple[str, bytes]]:
    """(file name, mark) of every file below the folder, and of every name of one, that holds a mark."""
    found = set()
    for path in folder.rglob("*"):
        data = str(path.relative_to(folder)).encode() + (path.read_bytes() if path.is_file() else b"")
        found |= {(path.name, mark) for mark in marks if mark in data}
    return found
