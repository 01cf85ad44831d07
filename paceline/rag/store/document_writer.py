"""Changes of the default collection: chunk and embed a parsed document, then insert, replace or leave it.

The text is compared by hash: a known text is not embedded again. Embedding happens outside transactions, so each change
checks in its transaction that what it was computed from still holds, and is otherwise computed again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from paceline.errors import ConfigError
from paceline.rag.chunk import Chunk, split
from paceline.rag.chunk_rows import read_texts
from paceline.rag.database import Database, SharedConnection
from paceline.rag.document_kv import DocumentKvStore
from paceline.rag.embedder import Embedder, ProgressCallback, embed_all
from paceline.rag.parsing.folders import FoundFile
from paceline.rag.parsing.parsed import Parsed
from paceline.rag.records import DEFAULT_COLLECTION, Document, IngestResult, Vectors, Zone, titled
from paceline.rag.store import document_rows as rows


class DocumentWriter:
    """Adds, removes and re-embeds managed documents, one transaction each. Safe to use from several threads.

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
        self, parsed: Parsed, zone: Zone, progress: ProgressCallback, file: FoundFile | None = None
    ) -> IngestResult:
        """Add or replace one document. `file`: where it was read from; None: a text without a file."""
        while True:
            with self._connection.reading() as database:
                known = rows.find_by_text(database, parsed.sha256)
            chunks: list[Chunk] = []
            if known is None:
                size = {"chunk_tokens": self._chunk_tokens, "overlap": self._overlap}
                found = split(
                    parsed.text, self._embedder.count, title=parsed.title, pages=parsed.pages,
                    is_code=parsed.kind == "code", **size,
                )  # fmt: skip
                chunks = [chunk for chunk in found if chunk.text.strip()]
            vectors = embed_all(self._embedder, [chunk.titled for chunk in chunks], progress)
            result = self._put(parsed, zone, chunks, vectors, file)
            if result:
                return result

    def remove(self, id_or_name: str) -> int:
        """Remove a document and its stored KV. Returns the number removed: 0 or 1."""
        with self._connection.writing() as database:
            removed = rows.remove_documents(
                database,
                "collection = ? AND (documents.id = ? OR name = ?)",
                DEFAULT_COLLECTION,
                id_or_name,
                database.seal.lookup(id_or_name),
            )
        if removed.num_documents:
            self._document_kv.forget(removed.text_hashes)
        return removed.num_documents

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
        self, parsed: Parsed, zone: Zone, chunks: Sequence[Chunk], vectors: Vectors, file: FoundFile | None
    ) -> IngestResult | None:
        """Write one document. None, and nothing done, when the document it was a copy of has been removed meanwhile."""
        source = b"" if file is None else file.source
        with self._connection.writing() as database:
            database.check_embedder(database.meta())
            known = rows.find_by_text(database, parsed.sha256)
            before = rows.find_by_source(database, parsed.name, source)
            if known and not known.source and known.name == parsed.name and source:
                # Read by a release that did not record sources: the same text under the same name is this file.
                rows.set_source(database, known.id, source)
                before = known
            if known and before and known.id == before.id:
                if known.zone != zone:
                    rows.set_zone(database, known.id, zone)
                return IngestResult(known.name, "unchanged", known.id, known.num_chunks)
            if not known and not chunks:
                return None
            name = before.name if before else _free_name(database, [parsed.name] if file is None else file.names())
            text_hashes: set[str] = set()
            if before:
                text_hashes = rows.remove_documents(database, "documents.id = ?", before.id).text_hashes
            document_id = rows.document_id(database, parsed.sha256)
            if not known:
                document = Document(document_id, name, parsed.sha256, zone, time.time(), len(chunks))
                rows.insert_document(database, document, chunks, vectors, source=source)
        self._document_kv.forget(text_hashes)
        if known:
            return IngestResult(parsed.name, "duplicate", known.id, known.num_chunks, f"the same text as {known.name}")
        note = "" if before or name == parsed.name else f"{parsed.name} is the name of another file's document"
        return IngestResult(name, "replaced" if before else "added", document_id, len(chunks), note)


def _free_name(database: Database, names: Iterable[str]) -> str:
    """The first name that no managed document has. Raises ConfigError when all are taken."""
    name = ""
    for name in names:
        if not rows.is_name_taken(database, name):
            return name
    raise ConfigError(f"{name} is the name of another file's document: remove that first, or rename this one.")
