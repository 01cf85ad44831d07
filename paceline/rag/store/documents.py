"""One side's documents: add, remove, list and search them.

What is added and removed here is the default collection; `vector_stores` manages the others, in the same rows.
SQLite's rows are the truth, the FAISS index is derived from them. Any number of processes may have a store open:
whoever searches sees what the others have committed. Safe to use from several threads. A private store is just a store
that lies on the device: nothing here sends anything anywhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from paceline.core.side import Side
from paceline.errors import ConfigError
from paceline.rag.chunk import CHUNK_TOKENS, OVERLAP_TOKENS, Chunk, split
from paceline.rag.database import Database
from paceline.rag.document_kv import FOLDER, DocumentKvStore, text_hash
from paceline.rag.embedder import Embedder, embed_all, silently
from paceline.rag.index.hybrid import FILE, HybridIndex
from paceline.rag.parse import FoundFile, Parsed, find_files, parse, read_file
from paceline.rag.records import (
    DEFAULT_COLLECTION,
    MANAGED,
    MIN_SCORE,
    ZONES,
    Document,
    IngestResult,
    Passage,
    Progress,
    Selection,
    Vectors,
    Zone,
    titled,
)

_DOCUMENT = "id, name, sha256, zone, added_at, num_chunks, source"
_CANDIDATES = 50  # of each kind of search
_logger = logging.getLogger("paceline.rag")


class DocumentStore:
    """Open until `close`, or as a context manager."""

    def __init__(
        self, directory: Path, embedder: Embedder, database: Database, *, chunk_tokens: int, overlap: int
    ) -> None:
        self._directory = directory
        self._embedder = embedder
        self._database = database
        self._chunk_tokens = chunk_tokens
        self._overlap = overlap
        self._lock = threading.RLock()  # of connection and searcher; never held while embedding
        self._saving = threading.Lock()  # of what is written beside the index file; taken before the other
        self._searcher = HybridIndex(directory / FILE, database, embedder.dimensions)
        self._kv = DocumentKvStore(directory / FOLDER, 0)  # only to remove from: what an engine has made of the texts

    @classmethod
    def open(
        cls,
        directory: Path,
        embedder: Embedder,
        *,
        side: Side | None = None,
        reindex: bool = False,
        chunk_tokens: int = CHUNK_TOKENS,
        overlap: int = OVERLAP_TOKENS,
    ) -> Self:
        """Makes the folder (mode 0700) if there is none. `reindex`: take another embedder and embed everything again.

        side: whose documents these are; programs always say it, so that private ones never become public.
        Raises ConfigError when the folder cannot be used, is the other side's, or another embedder made its vectors.
        """
        if chunk_tokens < 8 or not 0 <= overlap <= chunk_tokens / 2:
            raise ConfigError(
                f"Chunks of {chunk_tokens} tokens with {overlap} repeated cannot be: use at least 8, and at most half "
                "of them repeated."
            )
        directory = directory.absolute()
        database = Database(directory, embedder=embedder.name, dimensions=embedder.dimensions, side=side)
        store = cls(directory, embedder, database, chunk_tokens=chunk_tokens, overlap=overlap)
        try:
            if reindex:
                store.reindex()
            else:
                store.recover()  # what a killed process left: text in the log, an old index file
        except BaseException:
            database.close()
            raise
        return store

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- changing ---------------------------------------------------------------------------------------------------
    def add(
        self,
        paths: Path | Iterable[Path],
        *,
        zone: Zone,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> list[IngestResult]:
        """Files, and folders with all text and Markdown below. Each document is wholly there or not at all.

        The same text again changes nothing; the same file with another text replaces the document. Files of one name
        in different folders are different documents: the later one's name gets as much of its folder as it needs. A
        file that was named and cannot be read raises ConfigError before anything is added; in a folder it is skipped
        and reported.
        """
        _check_zone(zone)
        files, skipped = find_files([paths] if isinstance(paths, Path) else paths)
        for file in files:
            if file.explicit:
                read_file(file)
        results = [IngestResult(item.name, "skipped", note=item.reason) for item in skipped]
        try:
            for i, file in enumerate(files):
                try:
                    parsed = read_file(file)
                except ConfigError as error:
                    if file.explicit:
                        raise
                    results.append(IngestResult(file.name, "skipped", note=str(error)))
                    continue

                def tell(chunk: int, num_chunks: int, i: int = i, name: str = file.name) -> None:
                    progress(Progress(name, i, len(files), chunk, num_chunks))

                results.append(self._add(parsed, zone, tell, file))
        finally:
            self.recover()
        return results

    def add_text(self, name: str, text: str | bytes, *, zone: Zone) -> IngestResult:
        """One document that is no file here; another text of its name that is none either replaces it. Raises
        ConfigError as for a file of that content."""
        _check_zone(zone)
        parsed = parse(name, text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
        try:
            return self._add(parsed, zone, silently)
        finally:
            self.recover()

    def remove(self, id_or_name: str) -> int:
        """How many documents went: 0 or 1. Their text and vectors leave the files."""
        with self._writing():
            texts = self._texts_of(id_or_name)
            gone = self._database.execute(
                "DELETE FROM documents WHERE collection = ? AND ? IN (id, name)", DEFAULT_COLLECTION, id_or_name
            ).rowcount
            if gone:
                self._database.bump()
        if gone:
            self._kv.forget(texts)
            self.recover()
        return gone

    def reindex(self, tell: Callable[[int, int], None] = silently) -> int:
        """Embed every chunk again and take this embedder for the store. Returns how many chunks that were.

        Texts are not cut anew: chunks keep the size the embedder of before counted.
        """
        while True:
            with self._reading():
                generation = self._database.meta()["generation"]
                rows = self._database.execute("SELECT id, title, text FROM chunks ORDER BY id").fetchall()
            vectors = self._embed([titled(title, text) for _, title, text in rows], tell)
            with self._writing():
                if self._database.meta()["generation"] != generation:
                    continue  # documents came or went meanwhile
                self._database.executemany(
                    "UPDATE chunks SET embedding = ? WHERE id = ?",
                    ((_blob(vector), row[0]) for vector, row in zip(vectors, rows, strict=True)),
                )
                self._database.renew()
            self.recover()
            return len(rows)

    # ---- asking -----------------------------------------------------------------------------------------------------
    def documents(self) -> list[Document]:
        """In order of name."""
        with self._reading():
            rows = self._database.execute(
                f"SELECT {_DOCUMENT} FROM documents WHERE collection = ? ORDER BY name", DEFAULT_COLLECTION
            ).fetchall()
        return [_document(row) for row in rows]

    @property
    def embedder(self) -> Embedder:
        return self._embedder

    def count(self, selection: Selection = MANAGED) -> int:
        marks = ", ".join("?" * len(selection.collections))
        with self._reading():
            if selection.document_ids is None:
                row = self._database.execute(
                    f"SELECT count(*) FROM documents WHERE collection IN ({marks})", *selection.collections
                )
                return int(row.fetchone()[0])
            ids = self._database.execute(
                f"SELECT id FROM documents WHERE collection IN ({marks})", *selection.collections
            ).fetchall()
        return sum(document in selection.document_ids for (document,) in ids)

    @property
    def directory(self) -> Path:
        return self._directory

    def search(
        self, query: str, k: int, selection: Selection = MANAGED, *, min_score: float = MIN_SCORE
    ) -> list[Passage]:
        """At most k passages of at least this score, each text once. The first is the best by cosine and BM25 together,
        so scores need not fall.

        Raises ConfigError when the store was meanwhile indexed again with another embedder.
        """
        if k < 1 or not query.strip():
            return []
        with self._reading():
            self._searcher.refresh()
            if not len(self._searcher.selected(selection)):
                return []  # without loading a model
        vector = self._embedder.embed([query])[0]
        with self._reading():
            self._searcher.refresh()
            among = self._searcher.selected(selection)
            wanted = max(_CANDIDATES, 4 * k)
            while True:
                candidates, others = self._searcher.candidates(query, vector, wanted, selection, among)
                passages = self._passages([hit for hit in candidates if hit[1] >= min_score], k)
                if len(passages) == k or others < min_score:
                    return passages
                wanted *= 4  # many copies of one text

    def generation(self) -> str:
        """Another one after every change of documents, by whatever process."""
        with self._reading():
            meta = self._database.meta()
        return f"{meta['store']} {meta['generation']}"

    def passages(self, after: int, count: int) -> list[Passage]:
        """The next `count` chunks behind the one with this id, in order of id; scores are 0."""
        with self._reading():
            rows = self._database.execute(
                "SELECT name, chunks.id, title, text FROM chunks JOIN documents ON documents.id = document "
                "WHERE chunks.id > ? ORDER BY chunks.id LIMIT ?", after, count,
            ).fetchall()  # fmt: skip
        return [Passage(name, chunk_id, title, text, 0.0) for name, chunk_id, title, text in rows]

    def holds(self, chunk_id: int) -> bool:
        with self._reading():
            return self._database.execute("SELECT 1 FROM chunks WHERE id = ?", chunk_id).fetchone() is not None

    # ---- inside -----------------------------------------------------------------------------------------------------
    def _texts_of(self, id_or_name: str) -> set[str]:
        """Hashes of the texts of a document's chunks."""
        rows = self._database.execute(
            "SELECT title, text FROM chunks JOIN documents ON documents.id = document "
            "WHERE collection = ? AND ? IN (documents.id, name)",
            DEFAULT_COLLECTION,
            id_or_name,
        )
        return {text_hash(titled(title, text)) for title, text in rows}

    def _passages(self, hits: list[tuple[int, float]], k: int) -> list[Passage]:
        passages: dict[str, Passage] = {}  # by text, so that copies collapse
        for chunk_id, score in hits:
            name, title, text, document, file, collection = self._database.execute(
                "SELECT name, title, text, documents.id, file, collection FROM chunks "
                "JOIN documents ON documents.id = document WHERE chunks.id = ?",
                chunk_id,
            ).fetchone()
            passage = Passage(name, chunk_id, title, text, min(score, 1.0), file or document, collection)
            passages.setdefault(" ".join(text.split()), passage)
            if len(passages) == k:
                break
        return list(passages.values())

    def _add(
        self, parsed: Parsed, zone: Zone, tell: Callable[[int, int], None], file: FoundFile | None = None
    ) -> IngestResult:
        while True:
            with self._reading():
                known = self._with_text(parsed.sha256)
            chunks: list[Chunk] = []
            if known is None:
                size = {"chunk_tokens": self._chunk_tokens, "overlap": self._overlap}
                chunks = split(parsed.text, self._embedder.count, title=parsed.title, **size)
                chunks = [chunk for chunk in chunks if chunk.text.strip()]
            vectors = self._embed([chunk.titled for chunk in chunks], tell)
            added = self._put(parsed, zone, chunks, vectors, file)
            if added:
                return added

    def _put(
        self, parsed: Parsed, zone: Zone, chunks: Sequence[Chunk], vectors: Vectors, file: FoundFile | None
    ) -> IngestResult | None:
        """None: nothing was done, for the document this was a copy of has gone meanwhile."""
        source = b"" if file is None else file.source
        with self._writing():
            self._database.check_embedder(self._database.meta())
            known, before = self._with_text(parsed.sha256), self._of_source(parsed.name, source)
            if known and not known.source and known.name == parsed.name and source:
                # Read by a release that did not write down from where: the same text under the same name is this file.
                self._database.execute("UPDATE documents SET source = ? WHERE id = ?", source, known.id)
                before = known
            if known and before and known.id == before.id:
                if known.zone != zone:
                    self._database.execute("UPDATE documents SET zone = ? WHERE id = ?", zone, known.id)
                return IngestResult(known.name, "unchanged", known.id, known.num_chunks)
            if not known and not chunks:
                return None
            name = before.name if before else self._free_name([parsed.name] if file is None else file.names())
            texts = self._texts_of(before.id) if before else set()
            if before:
                self._database.execute("DELETE FROM documents WHERE id = ?", before.id)
            if known:
                if before:
                    self._database.bump()
                    self._kv.forget(texts)
                return IngestResult(
                    parsed.name, "duplicate", known.id, known.num_chunks, f"the same text as {known.name}"
                )
            document = f"doc-{parsed.sha256[:24]}"
            insert(
                self._database,
                Document(document, name, parsed.sha256, zone, time.time(), len(chunks)),
                chunks,
                vectors,
                source=source,
            )
        self._kv.forget(texts)
        note = "" if before or name == parsed.name else f"{parsed.name} is the name of another file's document"
        return IngestResult(name, "replaced" if before else "added", document, len(chunks), note)

    def _of_source(self, name: str, source: bytes) -> Document | None:
        """What was read of this file before; of a text that is no file, what has its name."""
        row = self._database.execute(
            f"SELECT {_DOCUMENT} FROM documents WHERE collection = ? AND source = ? AND (source != x'' OR name = ?) "
            "AND file = ''",
            DEFAULT_COLLECTION, source, name,
        ).fetchone()  # fmt: skip
        return row and _document(row)

    def _free_name(self, names: Iterable[str]) -> str:
        """The first that no document has. Raises ConfigError when all are taken."""
        name = ""
        for name in names:
            taken = "SELECT 1 FROM documents WHERE collection = ? AND name = ? AND file = ''"
            if self._database.execute(taken, DEFAULT_COLLECTION, name).fetchone() is None:
                return name
        raise ConfigError(f"{name} is the name of another file's document: remove that first, or rename this one.")

    def _with_text(self, sha256: str) -> Document | None:
        row = self._database.execute(
            f"SELECT {_DOCUMENT} FROM documents WHERE collection = ? AND sha256 = ?", DEFAULT_COLLECTION, sha256
        ).fetchone()
        return row and _document(row)

    def _embed(self, texts: Sequence[str], tell: Callable[[int, int], None]) -> Vectors:
        return embed_all(self._embedder, texts, tell)

    def recover(self) -> None:
        """After a change: empty the log, so that removed text is gone, and write the index file."""
        with self._lock:
            warn_unless_emptied(self._database.checkpoint())
        self.save_index()

    def save_index(self) -> bool:
        """Write the index file, where it is not of these rows. False if they changed meanwhile, so that it was not.

        Searches wait while the vectors are copied, not while they are written.
        """
        with self._saving:
            with self._reading():
                self._searcher.refresh()
                image = self._searcher.image()
            if image is None or not image.write(self._directory / FILE):
                return True
            with self._reading():
                self._searcher.refresh()
                return self._searcher.publish(image)

    def drop_index_file(self) -> None:
        """After a removal: its vectors leave the disk at once. `save_index` writes a new file."""
        with self._lock:
            self._searcher.drop_file()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, self._database.reading():
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock, self._database.writing():
            yield


def warn_unless_emptied(emptied: bool) -> None:
    """`emptied`: what a checkpoint after a removal returned."""
    if not emptied:
        _logger.warning("a reader kept the log from being emptied; removed text goes with the next change")


def insert(
    database: Database,
    document: Document,
    chunks: Sequence[Chunk],
    vectors: Vectors,
    *,
    collection: str = DEFAULT_COLLECTION,
    file: str = "",
    source: bytes = b"",
) -> None:
    """A document with all its chunks, inside the caller's transaction. vectors: (len(chunks), dimensions)

    file: the uploaded one it was made from; source: the path it was read from.
    """
    database.execute(
        "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        document.id, document.name, document.sha256, document.zone, document.added_at, len(chunks), collection, file,
        source,
    )  # fmt: skip
    database.executemany(
        "INSERT INTO chunks (document, position, text, title, embedding) VALUES (?, ?, ?, ?, ?)",
        (
            (document.id, i, chunk.text, chunk.title, _blob(vector))
            for i, (chunk, vector) in enumerate(zip(chunks, vectors, strict=True))
        ),
    )
    database.bump()


def _document(row: tuple[str, str, str, Zone, float, int, bytes]) -> Document:
    """Of a row of `_DOCUMENT`."""
    return Document(*row[:-1], row[-1].decode("utf-8", "replace"))


def _check_zone(zone: str) -> None:
    if zone not in ZONES:
        raise ConfigError(f"{zone!r} is not a zone; use one of {', '.join(ZONES)}.")


def _blob(vector: NDArray[np.float32]) -> bytes:
    return vector.astype("<f4").tobytes()
