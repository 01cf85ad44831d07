"""Changes of the default collection: chunk and embed parsed documents, then insert, replace, rename or leave each.

The text is compared by hash: a known text is not embedded again. Embedding happens outside transactions, so each change
checks in its transaction that what it was computed from still holds, and is otherwise computed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.errors import ConfigError
from paceline.rag.chunk import Chunk, split_document
from paceline.rag.chunk_rows import read_texts
from paceline.rag.database import Database, SharedConnection
from paceline.rag.document_kv import DocumentKvStore
from paceline.rag.embedder import Embedder, ProgressCallback, embed_all
from paceline.rag.parsing.folders import FoundFile
from paceline.rag.parsing.parsed import Parsed
from paceline.rag.records import DEFAULT_COLLECTION, Document, IngestResult, Vectors, Zone, titled
from paceline.rag.store import document_rows as rows


class DocumentWriter:
    """Adds, removes and re-embeds managed documents, several in a transaction. Safe to use from several threads.

    Leaves the write-ahead log and the index file to the caller.
    """

    def __init__(
        self,
        connection: SharedConnection,
        embedder: Embedder,
        document_kv: DocumentKvStore,
        *,
        chunk_tokens: int,
        overlap: int,
    ) -> None:
        """`document_kv`: stored KV, from which that of removed texts is deleted."""
        self._connection = connection
        self._embedder = embedder
        self._document_kv = document_kv
        self._chunk_tokens = chunk_tokens
        self._overlap = overlap

    def add(
        self, batch: Sequence[tuple[Parsed, FoundFile | None]], zone: Zone, progress: ProgressCallback
    ) -> list[IngestResult]:
        """Add or replace documents in one transaction, in order. The file: where one was read from; None: a text
        without a file. progress: called with the chunks embedded so far, of all of them.
        """
        results: dict[int, IngestResult] = {}
        while len(results) < len(batch):
            waiting = [number for number in range(len(batch)) if number not in results]
            chunks = self._new_chunks([batch[number][0] for number in waiting])
            texts = [chunk.titled for part in chunks for chunk in part]
            vectors = embed_all(self._embedder, texts, progress)
            ends = np.cumsum([len(part) for part in chunks])
            of_each = np.split(vectors, ends[:-1])
            forgotten: set[str] = set()
            with self._connection.writing() as database:
                database.check_embedder(database.meta())
                for number, part, own in zip(waiting, chunks, of_each, strict=True):
                    parsed, file = batch[number]
                    result, text_hashes = _put(database, parsed, zone, part, own, file)
                    forgotten |= text_hashes
                    if result is not None:
                        results[number] = result
            self._document_kv.forget(forgotten)
        return [results[number] for number in range(len(batch))]

    def unchanged(self, files: Iterable[FoundFile], zone: Zone) -> tuple[list[IngestResult], list[FoundFile]]:
        """Outcomes of the files that have the stamp with which their documents were read, and the other files."""
        results, others = [], []
        with self._connection.reading() as database:
            for file in files:
                known = rows.find_by_stamp(database, file.source, file.stamp) if file.stamp else None
                if known is None or known.zone != zone:
                    others.append(file)
                else:
                    results.append(IngestResult(known.name, "unchanged", known.id, known.num_chunks))
        return results, others

    def _new_chunks(self, documents: Sequence[Parsed]) -> list[list[Chunk]]:
        """Chunks of each of these documents whose text is not stored and not that of one before it."""
        with self._connection.reading() as database:
            known = {parsed.sha256 for parsed in documents if rows.find_by_text(database, parsed.sha256)}
        found: list[list[Chunk]] = []
        for parsed in documents:
            size = {"chunk_tokens": self._chunk_tokens, "overlap": self._overlap}
            is_new = parsed.sha256 not in known
            found.append(list(split_document(parsed, self._embedder.count, **size)) if is_new else [])
            known.add(parsed.sha256)
        return found

    def remove(self, ids_or_names: Iterable[str]) -> int:
        """Remove documents and their stored KV. Returns the number removed."""
        removed, text_hashes = 0, set[str]()
        with self._connection.writing() as database:
            for one in ids_or_names:
                found = rows.remove_documents(
                    database,
                    "collection = ? AND (documents.id = ? OR name = ?)",
                    DEFAULT_COLLECTION,
                    one,
                    database.seal.lookup(one),
                )
                removed += found.num_documents
                text_hashes |= found.text_hashes
        if removed:
            self._document_kv.forget(text_hashes)
        return removed

    def reindex(self, progress: ProgressCallback) -> int:
        """Embed every chunk of every collection again. Returns the number of chunks."""
        while True:
            with self._connection.reading() as database:
                generation = database.meta()["generation"]
                chunks = list(read_texts(database, "", strict=True))
            vectors = embed_all(self._embedder, [titled(chunk.title, chunk.text) for chunk in chunks], progress)
            with self._connection.writing() as database:
                if database.meta()["generation"] != generation:
                    continue  # documents were added or removed meanwhile
                rows.replace_vectors(database, [chunk.chunk_id for chunk in chunks], vectors)
            return len(chunks)


def _put(
    database: Database,
    parsed: Parsed,
    zone: Zone,
    chunks: Sequence[Chunk],
    vectors: Vectors,
    file: FoundFile | None,
) -> tuple[IngestResult | None, set[str]]:
    """Write one document inside the caller's transaction; its outcome, and hashes of texts that are gone.

    None, and nothing done, when the document it was a copy of has been removed meanwhile.
    """
    source, stamp = (b"", "") if file is None else (file.source, file.stamp)
    known = rows.find_by_text(database, parsed.sha256)
    before = rows.find_by_source(database, parsed.name, source)
    if known and before and known.id == before.id:
        if known.zone != zone:
            rows.set_zone(database, known.id, zone)
        rows.set_stamp(database, known.id, stamp)
        return IngestResult(known.name, "unchanged", known.id, known.num_chunks), set()
    if not known and not chunks:
        return None, set()
    try:
        name = before.name if before else _free_name(database, [parsed.name] if file is None else file.names())
    except ConfigError as error:
        if file is None:
            raise
        return IngestResult(parsed.name, "failed", note=str(error)), set()
    if known and not before and file is not None and _is_gone(known.source):
        rows.set_source(database, known, name, source)
        rows.set_stamp(database, known.id, stamp)
        return IngestResult(name, "moved", known.id, known.num_chunks, f"it was {known.source}"), set()
    text_hashes: set[str] = set()
    if before:
        text_hashes = rows.remove_documents(database, "documents.id = ?", before.id).text_hashes
    if known:
        where = f" from {known.source}" if known.source and known.name == parsed.name else ""
        note = f"the same text as {known.name}{where}"
        return IngestResult(name, "duplicate", known.id, known.num_chunks, note), text_hashes
    document_id = rows.document_id(database, parsed.sha256)
    document = Document(document_id, name, parsed.sha256, zone, time.time(), len(chunks))
    rows.insert_document(database, document, chunks, vectors, source=source, stamp=stamp)
    note = "" if before or name == parsed.name else f"{parsed.name} is the name of another file's document"
    return IngestResult(name, "replaced" if before else "added", document_id, len(chunks), note), text_hashes


def _is_gone(source: str) -> bool:
    """True if the file that a document was read from is there no more. False for a path that is not shown whole."""
    return bool(source) and "\ufffd" not in source and not os.path.lexists(source)


def _free_name(database: Database, names: Iterable[str]) -> str:
    """The first name that no managed document has. Raises ConfigError when all are taken."""
    name = ""
    for name in names:
        if not rows.is_name_taken(database, name):
            return name
    raise ConfigError(f"{name} is the name of another file's document: remove that first, or rename this one.")
