"""One side's documents: add, remove, list and search them.

Manages the default collection; `vector_stores` manages the others, in the same tables through the same
`document_rows`. The SQLite rows are authoritative and the FAISS index is derived from them. Several processes may have
a store open: each search sees what the others have committed. Safe to use from several threads. A private store is a
store on the device: nothing here sends anything anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from paceline.core.side import Side
from paceline.errors import ConfigError, DocumentError
from paceline.rag.chunk import CHUNK_TOKENS, OVERLAP_TOKENS
from paceline.rag.database import Database, SharedConnection
from paceline.rag.document_kv import FOLDER, DocumentKvStore
from paceline.rag.embedder import Embedder, ProgressCallback, no_progress
from paceline.rag.parsing.folders import FoundFile, find_files, read_files
from paceline.rag.parsing.parsed import Parsed
from paceline.rag.parsing.pool import ParserPool
from paceline.rag.parsing.text import parsed_text
from paceline.rag.records import MANAGED, MIN_SCORE, ZONES, Document, IngestResult, Passage, Progress, Selection, Zone
from paceline.rag.store.conversion import encrypt_store, finish_encryption
from paceline.rag.store.document_rows import managed_documents, read_passages
from paceline.rag.store.document_writer import DocumentWriter
from paceline.rag.store.passage_search import PassageSearch
from paceline.sealing.seal import Seal

GROUP_FILES = 64  # in one transaction: an interrupted `add` has lost what was computed of at most so many
GROUP_CHARACTERS = 2**17  # likewise

_Group = list[tuple[FoundFile, Parsed | DocumentError]]


class DocumentStore:
    """Open until `close`, or as a context manager. Changes go to `DocumentWriter`, searches to `PassageSearch`."""

    def __init__(
        self, directory: Path, embedder: Embedder, database: Database, *, chunk_tokens: int, overlap: int
    ) -> None:
        self._directory = directory
        self._embedder = embedder
        self._database = database
        self._connection = SharedConnection(database)  # its lock is never held while embedding
        self._search = PassageSearch(directory, embedder, database, self._connection)
        document_kv = DocumentKvStore(
            directory / FOLDER, 0, seal=database.seal
        )  # only to remove from; engines add to it
        self._writer = DocumentWriter(
            self._connection, embedder, document_kv, chunk_tokens=chunk_tokens, overlap=overlap
        )

    @classmethod
    def open(
        cls,
        directory: Path,
        embedder: Embedder,
        *,
        side: Side | None = None,
        reindex: bool = False,
        encrypt: bool = False,
        chunk_tokens: int = CHUNK_TOKENS,
        overlap: int = OVERLAP_TOKENS,
    ) -> Self:
        """Open the store; create its folder (mode 0700) if there is none.

        side: the owner of the documents; programs always pass it, so that private ones never become public.
        encrypt: encrypt a store that is created now. One that exists stays as it is: see `encrypt`.
        reindex: change to this embedder and embed everything again.
        Raises ConfigError when the folder cannot be used, belongs to the other side, or has another embedder's vectors.
        """
        if chunk_tokens < 8 or not 0 <= overlap <= chunk_tokens / 2:
            raise ConfigError(
                f"Chunks of {chunk_tokens} tokens with {overlap} repeated cannot be: use at least 8, and at most half "
                "of them repeated."
            )
        directory = directory.absolute()
        database = Database(
            directory, embedder=embedder.name, dimensions=embedder.dimensions, side=side, encrypt=encrypt
        )
        store = cls(directory, embedder, database, chunk_tokens=chunk_tokens, overlap=overlap)
        try:
            finish_encryption(directory, database)
            if reindex:
                store.reindex()
            else:
                store.recover()  # a killed process may have left text in the log and an old index file
        except BaseException:
            database.close()
            raise
        return store

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def embedder(self) -> Embedder:
        return self._embedder

    @property
    def seal(self) -> Seal:
        """How the store is encrypted."""
        with self._connection.locked():
            return self._database.seal

    def encrypt(self) -> None:
        """Encrypt a plain store in place: rows, uploaded files and the index; stored KV is removed.

        Every value is encrypted in one transaction, so that a kill leaves all or nothing; what is left in plain text
        then goes at the next opening. Other programs that have the store open must be started again. Raises
        ConfigError where the key cannot be kept.
        """
        with self._connection.locked():
            encrypt_store(self._directory, self._database)
        self.recover()

    # ---- changes ----------------------------------------------------------------------------------------------------
    def add(
        self,
        paths: Path | Iterable[Path],
        *,
        zone: Zone,
        read_all: bool = False,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> list[IngestResult]:
        """Add files, and folders with all files below of a kind that can be read. Each document is added whole or not
        at all. A file is not read again that has the same size, inode and times as when it was read, unless `read_all`.

        The same text again changes nothing; the same file with another text replaces the document; a text whose file is
        gone and is found in another one is renamed. Files of one name in different folders are different documents: the
        later one's name is prefixed with as much of its path as needed. What cannot be read has a result that says so.
        """
        _check_zone(zone)
        files, skipped = find_files([paths] if isinstance(paths, Path) else paths)
        results = [
            IngestResult(item.name, "failed" if item.is_failure else "skipped", note=item.reason) for item in skipped
        ]
        if not read_all:
            known, files = self._writer.unchanged(files, zone)
            results += known
        with closing(ParserPool()) as parsers:
            try:
                first = 0
                for group in _groups(read_files(files, parsers)):
                    results += self._add_group(group, zone, progress, first, len(files))
                    first += len(group)
            finally:
                self.recover()
        return results

    def _add_group(
        self, group: _Group, zone: Zone, progress: Callable[[Progress], None], first: int, num_files: int
    ) -> list[IngestResult]:
        """Add some of the files, from the number `first` on."""
        results = [
            IngestResult(file.name, "skipped", note="empty")
            if error.empty and file.root is not None
            else IngestResult(file.name, "failed", note=str(error))
            for file, error in group
            if isinstance(error, DocumentError)
        ]
        batch: list[tuple[Parsed, FoundFile | None]] = [
            (parsed, file) for file, parsed in group if isinstance(parsed, Parsed)
        ]

        def report(chunk: int, num_chunks: int) -> None:
            place = len(group) * chunk // num_chunks if num_chunks else len(group)
            name = group[min(place, len(group) - 1)][0].name
            progress(Progress(name, first + place, num_files, chunk, num_chunks))

        return results + self._writer.add(batch, zone, report) if batch else results

    def add_text(self, name: str, text: str, *, zone: Zone) -> IngestResult:
        """Add one document without a file. It replaces an earlier one of the same name that has no file either.

        Raises ConfigError as for a file of that content.
        """
        _check_zone(zone)
        parsed = parsed_text(name, text)
        try:
            return self._writer.add([(parsed, None)], zone, no_progress)[0]
        finally:
            self.recover()

    def remove(self, *ids_or_names: str) -> int:
        """Remove documents; their texts and vectors are erased from the files. Returns the number removed."""
        num_removed = self._writer.remove(ids_or_names)
        if num_removed:
            self.recover()
        return num_removed

    def reindex(self, progress: ProgressCallback = no_progress) -> int:
        """Embed every chunk again and record this embedder as the store's. Returns the number of chunks.

        Texts are not split again: chunks keep the size that the previous embedder measured.
        """
        num_chunks = self._writer.reindex(progress)
        self.recover()
        return num_chunks

    def recover(self) -> None:
        """Complete a change: empty the log, so that removed text leaves the disk, and write the index file."""
        self._connection.checkpoint()
        self.save_index()

    def save_index(self) -> bool:
        """Write the index file unless it matches the rows. False, and not written, if the rows changed meanwhile.

        Searches wait while the vectors are copied, not while they are written.
        """
        return self._search.save_index()

    def drop_index_file(self) -> None:
        """Erase removed vectors from the disk at once, with the whole index file. `save_index` writes a new one."""
        self._search.drop_index_file()

    # ---- queries ----------------------------------------------------------------------------------------------------
    def documents(self) -> list[Document]:
        """The managed documents, ordered by name."""
        with self._connection.reading() as database:
            return managed_documents(database)

    def count(self, selection: Selection = MANAGED) -> int:
        """Number of documents in the selection."""
        marks = ", ".join("?" * len(selection.collections))
        with self._connection.reading() as database:
            if selection.document_ids is None:
                row = database.execute(
                    f"SELECT count(*) FROM documents WHERE collection IN ({marks})", *selection.collections
                )
                return int(row.fetchone()[0])
            ids = database.execute(
                f"SELECT id FROM documents WHERE collection IN ({marks})", *selection.collections
            ).fetchall()
        return sum(document_id in selection.document_ids for (document_id,) in ids)

    def search(
        self,
        query: str,
        k: int,
        selection: Selection = MANAGED,
        *,
        min_score: float = MIN_SCORE,
        vector: NDArray[np.float32] | None = None,
    ) -> list[Passage]:
        """At most k passages with distinct texts and at least this score, best first by the fusion of cosine and BM25
        ranks; scores are cosines, so they need not decrease. vector: the query's embedding, where it is known.

        Raises ConfigError when the store was meanwhile indexed again with another embedder.
        """
        return self._search.search(query, k, selection, min_score=min_score, vector=vector)

    def generation(self) -> str:
        """An identifier that changes with every change of documents, by any process."""
        with self._connection.reading() as database:
            meta = database.meta()
        return f"{meta['store']} {meta['generation']}"

    def removals(self) -> int:
        """The number of removals so far, replacements included, by any process. What memory holds of documents is valid
        as long as this number does not change."""
        with self._connection.reading() as database:
            return int(database.meta().get("removals", 0))

    def passages(self, after: int, count: int) -> list[Passage]:
        """The next `count` chunks of all collections with ids greater than `after`, ordered by id; scores are 0."""
        with self._connection.reading() as database:
            return read_passages(database, after, count)

    def holds(self, chunk_id: int) -> bool:
        """True while a chunk with this id exists."""
        with self._connection.reading() as database:
            return database.execute("SELECT 1 FROM chunks WHERE id = ?", chunk_id).fetchone() is not None


def _groups(files: Iterator[tuple[FoundFile, Parsed | DocumentError]]) -> Iterator[_Group]:
    """Files that are embedded together and written in one transaction: many small ones, or one long one."""
    group: _Group = []
    size = 0  # characters
    for file, parsed in files:
        group.append((file, parsed))
        size += len(parsed.text) if isinstance(parsed, Parsed) else 0
        if len(group) == GROUP_FILES or size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _check_zone(zone: str) -> None:
    if zone not in ZONES:
        raise ConfigError(f"{zone!r} is not a zone; use one of {', '.join(ZONES)}.")
