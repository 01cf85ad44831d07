"""One side's documents: add, remove, list and search them.

Manages the default collection; `vector_stores` manages the others, in the same tables through the same `rows`. The
rows are authoritative and the index in memory is derived from them. Several processes may have a store open, on several
machines if a database is its home: each search sees what the others have committed. Safe to use from several threads. A
private store is a store on the device: nothing here sends anything anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from paceline.core.policy import DocumentFacts
from paceline.core.side import Side
from paceline.errors import ConfigError, DocumentError
from paceline.rag import rows
from paceline.rag.chunk import CHUNK_TOKENS, OVERLAP_TOKENS, Chunk, split_document
from paceline.rag.database import Database, made_by
from paceline.rag.document_kv import FOLDER, DocumentKvStore
from paceline.rag.embedder import Embedder, ProgressCallback, embed_all, no_progress
from paceline.rag.index import HybridIndex, selected_rows, stamp_of
from paceline.rag.parsing.folders import FoundFile, find_files, is_gone, read_files
from paceline.rag.parsing.process import Parsed, ParserPool, parsed_text
from paceline.rag.records import (
    DEFAULT_COLLECTION,
    MANAGED,
    MIN_SCORE,
    Document,
    FilesProgress,
    IngestResult,
    Passage,
    Selection,
    Vectors,
    Zone,
)
from paceline.rag.store.conversion import encrypt_store, finish_encryption
from paceline.rag.store.vector_stores import described
from paceline.sealing import Seal
from paceline.sql import Home

GROUP_FILES = 64  # in one transaction: an interrupted `add` has lost what was computed of at most so many
GROUP_CHARACTERS = 2**17  # likewise
_CANDIDATES = 50  # of each kind of search

_Group = list[tuple[FoundFile, Parsed | DocumentError]]


class DocumentStore:
    """Open until `close`, or as a context manager.

    Embedding happens outside transactions, so each change checks in its transaction that what it was computed from
    still holds, and is otherwise computed again.
    """

    chunk_tokens, overlap = CHUNK_TOKENS, OVERLAP_TOKENS

    def __init__(self, directory: Path, embedder: Embedder, database: Database, *, home: Home | None) -> None:
        self.home = home  # where several servers keep it together
        self.directory = directory
        self.embedder = embedder
        self._database = database  # no transaction is open while embedding
        self._index = HybridIndex(database, embedder.dimensions)  # guarded by the database's lock
        self._document_kv = DocumentKvStore(directory / FOLDER, 0, seal=database.seal)  # only to remove from
        self._removals = 0  # as last counted; guarded likewise

    @classmethod
    def open(
        cls,
        directory: Path,
        embedder: Embedder,
        *,
        side: Side | None = None,
        reindex: bool = False,
        embeds: bool = True,
        encrypt: bool = False,
        home: Home | None = None,
    ) -> Self:
        """Open the store; create its folder (mode 0700) if there is none.

        side: the owner of the documents; programs always pass it, so that private ones never become public.
        encrypt: encrypt a store that is created now. One that exists stays as it is: see `encrypt`.
        home: where several servers keep it together, beside what each has in its folder; None: there too.
        reindex: change to this embedder and embed everything again. embeds: False where nothing is to be embedded, so
        that vectors of another embedder are no fault.
        Raises ConfigError when the folder cannot be used, belongs to the other side, or has another embedder's vectors.
        """
        directory = directory.absolute()
        database = Database(directory, embedder=made_by(embedder), side=side, encrypt=encrypt, home=home)
        store = cls(directory, embedder, database, home=home)
        try:
            finish_encryption(directory, database)
            if reindex:
                store.reindex()
            else:
                if embeds:
                    with database.reading():
                        database.check_embedder(database.meta())
                database.checkpoint()  # a killed process may have left text in the log
        except BaseException:
            database.close()
            raise
        return store

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seal(self) -> Seal:
        """How the store is encrypted."""
        return self._database.seal

    def encrypt(self) -> None:
        """Encrypt a plain store in place: rows and uploaded files; stored KV is removed.

        Every value is encrypted in one transaction, so that a kill leaves all or nothing; what is left in plain text
        then goes at the next opening. Other programs that have the store open must be started again. Raises
        ConfigError where the key cannot be kept.
        """
        encrypt_store(self.directory, self._database)
        self._database.checkpoint()

    # ---- changes ----------------------------------------------------------------------------------------------------
    def add(
        self,
        paths: Path | Iterable[Path],
        *,
        zone: Zone,
        read_all: bool = False,
        progress: FilesProgress = lambda *_: None,
    ) -> list[IngestResult]:
        """Add files, and folders with all files below of a kind that can be read. Each document is added whole or not
        at all. A file is not read again that has the same size, inode and times as when it was read, unless `read_all`.

        The same text again changes nothing; the same file with another text replaces the document; a text whose file is
        gone and is found in another one is renamed. Files of one name in different folders are different documents: the
        later one's name is prefixed with as much of its path as needed. What cannot be read has a result that says so.
        """
        found, results = find_files([paths] if isinstance(paths, Path) else paths)
        files = list(dict.fromkeys(found))
        if not read_all:
            known, files = self._unchanged(files, zone)
            results += known
        outcomes: dict[FoundFile, IngestResult] = {}
        with closing(ParserPool()) as parsers:
            try:
                for group in _groups(read_files(files, parsers)):
                    outcomes |= self._add_group(group, zone, progress, len(outcomes), len(files))
                copies = [file for file in files if outcomes[file].status == "duplicate"]
                stored = {document.id for document in self.documents()} if copies else set()
                # A text may have been a copy of a file's that was given another one behind it.
                again = [file for file in copies if outcomes[file].id not in stored]
                for group in _groups(read_files(again, parsers)):
                    outcomes |= self._add_group(group, zone, progress, len(files), len(files))
            finally:
                self._database.checkpoint()
        return [*results, *outcomes.values()]

    def _add_group(
        self, group: _Group, zone: Zone, progress: FilesProgress, first: int, num_files: int
    ) -> dict[FoundFile, IngestResult]:
        """Add some of the files, from the number `first` on."""
        outcomes: dict[FoundFile, IngestResult] = {}
        batch: list[tuple[Parsed, FoundFile]] = []
        for file, parsed in group:
            if isinstance(parsed, Parsed):
                batch.append((parsed, file))
            elif parsed.empty and (emptied := self._emptied(file)):
                outcomes[file] = emptied
            elif parsed.empty and file.root is not None:
                outcomes[file] = IngestResult(file.name, "skipped", note="empty")
            else:
                outcomes[file] = IngestResult(file.name, "failed", note=str(parsed))

        def report(chunk: int, num_chunks: int) -> None:
            place = len(group) * chunk // num_chunks if num_chunks else len(group)
            progress(group[min(place, len(group) - 1)][0].name, first + place, num_files)

        written = self._write(batch, zone, report) if batch else []
        return outcomes | {file: result for (_, file), result in zip(batch, written, strict=True)}

    def _emptied(self, file: FoundFile) -> IngestResult | None:
        """Remove the document of a file that has no text any more; None where there is none."""
        with self._database.reading() as database:
            known = rows.find_by_source(database, file.name, file.source)
        if known is None:
            return None
        self.remove(known.id)
        return IngestResult(known.name, "removed", known.id, note="its file is empty")

    def add_text(self, name: str, text: str, *, zone: Zone) -> IngestResult:
        """Add one document without a file. It replaces an earlier one of the same name that has no file either.

        Raises ConfigError as for a file of that content.
        """
        parsed = parsed_text(name, text)
        try:
            return self._write([(parsed, None)], zone, no_progress)[0]
        finally:
            self._database.checkpoint()

    def remove(self, *ids_or_names: str) -> int:
        """Remove documents with their stored KV; their texts and vectors are erased from the files. Returns the number
        removed."""
        removed, text_hashes = 0, set[str]()
        with self._database.writing() as database:
            for one in ids_or_names:
                where = "collection = ? AND (documents.id = ? OR name = ?)"
                found = rows.remove_documents(database, where, DEFAULT_COLLECTION, one, database.seal.lookup(one))
                removed += found.num_documents
                text_hashes |= found.text_hashes
        if removed:
            self._document_kv.forget(text_hashes)
            self._database.checkpoint()
        return removed

    def reindex(self) -> int:
        """Embed every chunk of every collection again and record this embedder as the store's. Returns the number of
        chunks.

        Texts are not split again: chunks keep the size that the previous embedder measured.
        """
        while True:
            with self._database.reading() as database:
                generation = database.meta()["generation"]
                chunks = rows.read_passages(database, "", strict=True)
            vectors = embed_all(self.embedder, [chunk.titled for chunk in chunks])
            with self._database.writing() as database:
                if database.meta()["generation"] != generation:
                    continue  # documents were added or removed meanwhile
                rows.replace_vectors(database, [chunk.chunk_id for chunk in chunks], vectors)
            self._database.checkpoint()
            return len(chunks)

    # ---- queries ----------------------------------------------------------------------------------------------------
    def documents(self) -> list[Document]:
        """The managed documents, ordered by name."""
        with self._database.reading() as database:
            return rows.managed_documents(database)

    def count(self, selection: Selection = MANAGED) -> int:
        where, parameters = selected_rows(selection)
        with self._database.reading() as database:
            return int(database.execute(f"SELECT count(*) FROM documents {where}", *parameters).fetchone()[0])

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
        if k < 1 or not query.strip():
            return []
        with self._database.reading():
            self._index.refresh()
            if not len(self._index.selected(selection)):
                return []  # without loading a model
        if vector is None:
            vector = self.embedder.embed([query])[0]
        with self._database.reading() as database:
            self._index.refresh()
            selected = self._index.selected(selection)
            limit = max(_CANDIDATES, 4 * k)
            while True:
                candidates, others = self._index.candidates(query, vector, limit, selection, selected)
                passages = _passages(database, [hit for hit in candidates if hit[1] >= min_score], k)
                if len(passages) == k or others < min_score:
                    return passages
                limit *= 4  # many copies of one text

    def described(self) -> tuple[str, list[tuple[str, str, str, DocumentFacts | None]]]:
        """The generation, and every document of all collections, see `vector_stores.described`."""
        with self._database.reading() as database:
            return stamp_of(database.meta()), list(described(database))

    def generation(self) -> str:
        """An identifier that changes with every change of documents, by any process."""
        with self._database.reading() as database:
            return stamp_of(database.meta())

    def removals(self) -> int:
        """The number of removals so far, replacements included, by any process. What memory holds of documents is valid
        as long as this number does not change; keys of theirs are forgotten here."""
        with self._database.reading() as database:
            removals = int(database.meta().get("removals", 0))
            if removals != self._removals:
                self._removals = removals
                database.seal.forget()
            return removals

    def passages(self, after: int, count: int) -> list[Passage]:
        """The next `count` chunks of all collections with ids greater than `after`, ordered by id, without damaged
        ones; scores are 0. Empty only at the end."""
        with self._database.reading() as database:
            select = "SELECT id FROM chunks WHERE id > ? ORDER BY id LIMIT ?"
            while ids := [row[0] for row in database.execute(select, after, count)]:
                if passages := rows.read_passages(database, "WHERE chunks.id > ? AND chunks.id <= ?", after, ids[-1]):
                    return passages
                after = ids[-1]
        return []

    def chunks(self, chunk_ids: Collection[int]) -> dict[int, Passage]:
        """Those of these chunks that exist, without damaged ones; scores are 0."""
        with self._database.reading() as database:
            return {passage.chunk_id: passage for passage in rows.find_chunks(database, chunk_ids)}

    def whole(self, selection: Selection) -> list[Passage]:
        """All chunks of the selection, document by document, each in its order; scores are 0."""
        with self._database.reading() as database:
            self._index.refresh()
            where, parameters = selected_rows(selection)
            return rows.read_passages(database, where, *parameters)

    def outline(self, selection: Selection, most: int) -> list[tuple[str, int]]:
        """Title and number of chunks of each document of the selection; empty where there are more than so many."""
        with self._database.reading() as database:
            where, parameters = selected_rows(selection)
            of_file = f"SELECT CASE file WHEN '' THEN document ELSE file END, count(*) FROM {rows.FROM} {where}"
            sizes = dict(database.execute(f"{of_file} GROUP BY 1 LIMIT ?", *parameters, most + 1))
            if len(sizes) > most:
                return []
            firsts = rows.read_passages(database, f"{where} AND position = 0", *parameters)
        return [(each.title or each.document, sizes.get(each.file_id, 1)) for each in firsts]

    def around(self, chunk_id: int, count: int) -> list[Passage]:
        """A chunk with so many of its document before and after it, in order; empty where it is gone."""
        with self._database.reading() as database:
            row = database.execute("SELECT document, position FROM chunks WHERE id = ?", chunk_id).fetchone()
            return [] if row is None else rows.read_around(database, row[0], row[1], count)

    def find_reading(self, chunk_id: int, asked: str) -> str | None:
        """What a model has said of a chunk, see `rows.find_reading`."""
        with self._database.reading() as database:
            return rows.find_reading(database, chunk_id, asked)

    def keep_reading(self, chunk_id: int, asked: str, owner: str, text: str) -> None:
        with self._database.writing() as database:
            rows.keep_reading(database, chunk_id, asked, owner, text)

    def forget_readings(self, owner: str) -> None:
        """Erase what models have said for this owner."""
        with self._database.writing() as database:
            removed = database.execute("DELETE FROM readings WHERE owner = ?", owner).rowcount
        if removed:
            self._database.checkpoint()

    # ---- internal ---------------------------------------------------------------------------------------------------
    def _write(
        self, batch: Sequence[tuple[Parsed, FoundFile | None]], zone: Zone, progress: ProgressCallback
    ) -> list[IngestResult]:
        """Add or replace documents in one transaction, in order. The file: where one was read from; None: a text
        without a file. progress: called with the chunks embedded so far, of all of them.
        """
        results: dict[int, IngestResult] = {}
        while len(results) < len(batch):
            waiting = [number for number in range(len(batch)) if number not in results]
            chunks = self._new_chunks([batch[number][0] for number in waiting])
            vectors = embed_all(self.embedder, [chunk.titled for part in chunks for chunk in part], progress)
            ends = np.cumsum([len(part) for part in chunks])
            of_each = np.split(vectors, ends[:-1])
            forgotten: set[str] = set()
            with self._database.writing() as database:
                database.check_embedder(database.meta(), writes=True)
                for number, part, own in zip(waiting, chunks, of_each, strict=True):
                    parsed, file = batch[number]
                    result, text_hashes = _put(database, parsed, zone, part, own, file)
                    forgotten |= text_hashes
                    if result is not None:
                        results[number] = result
            self._document_kv.forget(forgotten)
        return [results[number] for number in range(len(batch))]

    def _unchanged(self, files: Iterable[FoundFile], zone: Zone) -> tuple[list[IngestResult], list[FoundFile]]:
        """Outcomes of the files that have the stamp with which their documents were read, and the other files."""
        results, others = [], []
        with self._database.reading() as database:
            for file in files:
                known = rows.find_by_stamp(database, file.source, file.stamp) if file.stamp else None
                if known is None or known.zone != zone:
                    others.append(file)
                else:
                    results.append(IngestResult(known.name, "unchanged", known.id, known.num_chunks))
        return results, others

    def _new_chunks(self, documents: Sequence[Parsed]) -> list[list[Chunk]]:
        """Chunks of each of these documents whose text is not stored and not that of one before it."""
        with self._database.reading() as database:
            known = {parsed.sha256 for parsed in documents if rows.find_by_text(database, parsed.sha256)}
        found: list[list[Chunk]] = []
        for parsed in documents:
            if parsed.sha256 in known:
                found.append([])
                continue
            known.add(parsed.sha256)
            chunks = split_document(parsed, self.embedder.count, chunk_tokens=self.chunk_tokens, overlap=self.overlap)
            found.append(list(chunks))
        return found


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
    if known and not before and file is not None and known.source and is_gone(known.source):
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


def _free_name(database: Database, names: Iterable[str]) -> str:
    """The first name that no managed document has. Raises ConfigError when all are taken."""
    name = ""
    for name in names:
        if not rows.is_name_taken(database, name):
            return name
    raise ConfigError(f"{name} is the name of another file's document: remove that first, or rename this one.")


def _passages(database: Database, hits: list[tuple[int, float]], k: int) -> list[Passage]:
    """The first k passages with distinct texts. hits: (chunk id, score), best first."""
    found: dict[str, Passage] = {}  # by text without its spacing, so that copies collapse
    for first in range(0, len(hits), k):
        part = hits[first : first + k]
        by_id = {each.chunk_id: each for each in rows.find_chunks(database, [chunk_id for chunk_id, _ in part])}
        for chunk_id, score in part:
            if chunk_id in by_id:
                passage = replace(by_id[chunk_id], score=min(score, 1.0))
                found.setdefault(" ".join(passage.text.split()), passage)
        if len(found) >= k:
            break
    return list(found.values())[:k]


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
