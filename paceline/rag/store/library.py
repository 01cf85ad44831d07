"""Files and vector stores of one side: the facade for the HTTP API and for generation.

Works on the rows and the index of one `DocumentStore`, through a connection of its own. Methods block on the disk and
may be called from any thread.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field, replace
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from paceline.errors import ConfigError, DocumentError, ParserLost, RequestError, StorageError, is_exhausted
from paceline.rag.chunk import Chunk, split_document
from paceline.rag.database import Database, made_by
from paceline.rag.document_kv import FOLDER, DocumentKvStore
from paceline.rag.embedder import Embedder
from paceline.rag.index import rank_fusion
from paceline.rag.parsing.process import Around, Parsed, ParserBudget, ParserPool
from paceline.rag.prompt import passages_text
from paceline.rag.records import Document, Passage, Vectors, Zone
from paceline.rag.rows import (
    ShownPassage,
    find_chunks,
    find_passage,
    find_text,
    insert_document,
    managed_documents,
    read_passages,
    remove_documents,
)
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.files import Uploads, read_file_name
from paceline.rag.store.readable import Readable, unruled
from paceline.rag.store.vector_stores import (
    MAX_OWNED_USAGE,
    Attributes,
    Filter,
    VectorStores,
    seal_error,
    total_usage,
)


class FileWork(Protocol):
    """Contexts around the two parts of reading files in that compute, as work of the processing units of a node."""

    def indexing(self) -> AbstractContextManager[None]:
        """Entered for each turn, by the thread that embeds."""

    def parsing(self) -> AbstractContextManager[None]:
        """Entered by the thread that waits for a parser, and starts it if it has to."""


# Ingestion: read uploaded files into vector stores on a background thread, one file of each owner at a time, in turns.
#
# A turn ends with the start of parsing, which happens in other processes, or with a batch of chunks embedded: a long
# file of one owner delays another owner's by one batch, which is the rule of `core.fair` for turns that cost alike. The
# queue is the rows `in_progress`, so it survives the process. An interrupted reading is repeated, but at most
# MAX_STARTS times, since a file that crashes the program or its parser would do so at every start. Chunks and the
# status `completed` are written in one transaction, and only if the file is still wanted then. Not bounded: the number
# of owners, of whose files one each is in memory.
#
# Servers that share a database share the queue: a file that a server reads has a row in `file_readers`, which holds as
# long as that server is alive, so that another reads it then.


TURN_CHUNKS = 16  # embedded before the next owner's turn
MAX_STARTS = 3  # readings of a file that the program or the parser did not survive; then it fails
AWAY_S = 1.0  # delay while a database cannot be reached
RETRY_S = 30.0  # delay after an error that no file caused
LOOK_S = 1.0  # between looks at the queue that other servers fill and leave

_READ_ELSEWHERE = """SELECT attached FROM file_readers JOIN servers ON servers.id = server
    WHERE server != ? AND until > clock_timestamp()"""
_TAKE = f"""INSERT INTO file_readers SELECT seq, ? FROM attached
    WHERE seq = ? AND status = 'in_progress' AND seq NOT IN ({_READ_ELSEWHERE})
    ON CONFLICT (attached) DO UPDATE SET server = excluded.server"""

_logger = logging.getLogger("paceline.rag")


class _Job(NamedTuple):
    """One attached file to read."""

    owner: str
    seq: int  # of the row in `attached`; attaching a file again gives it a new one
    store: str
    file: str
    name: str
    chunk_tokens: int
    overlap: int


@dataclass(slots=True)
class _Reading:
    """A file between two turns."""

    job: _Job
    turns: Iterator[Future[Parsed] | None]  # each ends with what the next one waits for
    awaited: Future[Parsed] | None = None

    @property
    def is_ready(self) -> bool:
        return self.awaited is None or self.awaited.done()


class _UnwantedError(Exception):
    """The file was removed or cancelled meanwhile, or the program is stopping."""


@dataclass(eq=False, repr=False)
class Ingester:
    """Reads files between `start` and `stop`."""

    database: Database
    uploads: Uploads
    document_kv: DocumentKvStore  # stored KV, from which that of replaced chunks is deleted
    embedder: Embedder
    zone: Zone
    work: InitVar[FileWork | None]
    budget: InitVar[ParserBudget]  # of the files' owners
    _wake: threading.Event = field(default_factory=threading.Event)
    _stopping: bool = False
    _readings: dict[str, _Reading] = field(default_factory=dict)  # by owner; the one whose turn was last comes last
    _counted: set[int] = field(default_factory=set)  # rows whose start is recorded, though no program has ended since
    _thread: threading.Thread | None = None

    def __post_init__(self, work: FileWork | None, budget: ParserBudget) -> None:
        self._indexing: Around = work.indexing if work else nullcontext
        self._parsing: Around = work.parsing if work else nullcontext
        self._server = "" if self.database.fleet is None else self.database.fleet.id  # among those that share the queue
        self._parsers = ParserPool(budget=budget)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="paceline-ingest", daemon=True)
        self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """Stop, after the batch of chunks being embedded. Interrupted files are read after the next start."""
        self._stopping = True
        self._wake.set()
        self._parsers.close()
        if self._thread is not None:
            self._thread.join()

    def notify(self) -> None:
        """Wake the thread: files may have been attached."""
        self._wake.set()

    # ---- internal ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        rest = LOOK_S if self._server else None
        pause = rest  # s
        while not self._stopping:
            self._wake.wait(pause)
            self._wake.clear()
            pause = rest
            try:
                worked = False
                while not self._stopping and self._turn():
                    worked = True
                if not self._readings:
                    self._parsers.rest()
                if worked:  # chunks of earlier readings may have been replaced
                    self.database.checkpoint()
            except StorageError as error:
                _logger.warning("uploaded files wait to be read: %s", error)
                pause = AWAY_S if error.away else RETRY_S
            except Exception:
                _logger.exception("uploaded files could not be read into their stores; trying again in %g s", RETRY_S)
                pause = RETRY_S
        for reading in self._readings.values():  # left to the next start of the program, and no failure of a file's
            self._forget_starts(reading.job)
        self._readings.clear()

    def _turn(self) -> bool:
        """Begin files of owners of whom none is being read, then take one turn. False: there is none to take now."""
        while (job := self._next()) is not None:
            self._readings[job.owner] = _Reading(job, self._work(job))
        reading = next((reading for reading in self._readings.values() if reading.is_ready), None)
        if reading is None:
            return False
        del self._readings[reading.job.owner]
        try:
            with self._indexing():
                reading.awaited = next(reading.turns)
        except StopIteration:
            return True
        self._readings[reading.job.owner] = reading
        return True

    def _next(self) -> _Job | None:
        """The oldest file of an owner of whom no file is being read."""
        elsewhere, server = (
            (f"AND attached.seq NOT IN ({_READ_ELSEWHERE})", [self._server]) if self._server else ("", [])
        )
        with self.database.reading() as database:
            waiting = database.execute(
                "SELECT owner, min(attached.seq) FROM attached JOIN vector_stores ON id = store "
                f"WHERE status = 'in_progress' {elsewhere} GROUP BY owner",
                *server,
            ).fetchall()
            owner, seq = min((one for one in waiting if one[0] not in self._readings), default=("", None))
            if seq is None:
                return None
            row = database.execute(
                "SELECT attached.seq, store, file, chunk_tokens, overlap FROM attached WHERE attached.seq = ?",
                seq,
            ).fetchone()
            name = read_file_name(database, row[2])
        return _Job(owner, row[0], row[1], row[2], name, row[3], row[4])

    def _work(self, job: _Job) -> Iterator[Future[Parsed] | None]:
        """Read one file, turn by turn, and record the outcome."""
        if not self._begin(job):
            return
        try:
            yield from self._read(job)
        except _UnwantedError:
            pass
        except DocumentError as error:
            self._fail(job, error.code, str(error))
        except ParserLost:
            if not self._stopping:
                _logger.warning("the parser of %s was killed", job.file)
                self._counted.discard(job.seq)
                return  # and read it again, unless these were MAX_STARTS
        except FileNotFoundError:
            self._fail(job, "server_error", "The bytes of this file are gone: upload it again.")
        except (ConfigError, RequestError) as error:  # RequestError: the owner's budget is used up
            if isinstance(error, StorageError) and error.away:
                raise  # the file is read again when the database is back
            self._fail(job, "server_error", str(error))
        except Exception as error:
            if is_exhausted(error):
                if isinstance(error, MemoryError):  # which the file may have caused
                    self._counted.discard(job.seq)
                else:
                    self._forget_starts(job)
                raise  # the file is read again later
            _logger.exception("%s could not be read into %s", job.file, job.store)
            self._fail(job, "server_error", "The server made a mistake while reading this file.")
        self._forget_starts(job)

    def _begin(self, job: _Job) -> bool:
        """Record the start of a reading, so that crashes during it are counted. False: too many, give the file up; or
        another server reads it."""
        with self.database.writing() as database:
            if self._server and not database.execute(_TAKE, self._server, job.seq, self._server).rowcount:
                return False
            row = database.execute(
                "UPDATE attached SET starts = starts + ? WHERE seq = ? RETURNING starts",
                int(job.seq not in self._counted), job.seq,
            )  # fmt: skip
            (starts,) = row.fetchone() or (0,)
        self._counted.add(job.seq)
        if starts <= MAX_STARTS:
            return True
        message = f"The program or its parser ended {MAX_STARTS} times while it read this file: it is not read again."
        _logger.error("%s is given up: %s", job.file, message)
        self._fail(job, "server_error", f"{message} Convert or split it, then upload it anew.")
        return False

    def _read(self, job: _Job) -> Iterator[Future[Parsed] | None]:
        parsing = self._parsers.submit(job.name, lambda: self.uploads.open(job.file), self._parsing, owner=job.owner)
        parsing.add_done_callback(lambda _: self._wake.set())
        yield parsing
        parsed = parsing.result()
        filled = split_document(parsed, self.embedder.count, chunk_tokens=job.chunk_tokens, overlap=job.overlap)
        size, usage = len(parsed.text.encode()), 0  # the chunks hold at least the text
        chunks: list[Chunk] = []
        vectors: list[Vectors] = [np.empty((0, self.embedder.dimensions), np.float32)]
        while batch := list(islice(filled, TURN_CHUNKS)):
            chunks += batch
            usage += sum(4 * self.embedder.dimensions + len(chunk.titled.encode()) for chunk in batch)
            self._check(job, max(size, usage))  # before embedding
            vectors.append(self.embedder.embed([chunk.titled for chunk in batch]))
            yield None
        self._store(job, parsed, chunks, np.concatenate(vectors), usage)

    def _check(self, job: _Job, usage: int) -> None:
        """Raises _UnwantedError or DocumentError where embedding more of this file would be for nothing."""
        waits = "SELECT 1 FROM attached WHERE seq = ? AND status = 'in_progress'"
        with self.database.reading() as database:
            if self._stopping or not self._holds(database, job) or not database.execute(waits, job.seq).fetchone():
                raise _UnwantedError
            _check_room(database, job, usage)

    def _store(self, job: _Job, parsed: Parsed, chunks: list[Chunk], vectors: Vectors, usage: int) -> None:
        document_id = f"doc-{secrets.token_hex(12)}"
        document = Document(document_id, parsed.name, parsed.sha256, self.zone, time.time(), len(chunks))
        with self.database.writing() as database:
            database.check_embedder(database.meta(), writes=True)
            _check_room(database, job, usage)  # again: another process may read files of this owner too
            done = database.execute(
                "UPDATE attached SET status = 'completed', usage_bytes = ? WHERE seq = ? AND status = 'in_progress'",
                usage, job.seq,
            ).rowcount  # fmt: skip
            if not done:
                raise _UnwantedError
            removed = remove_documents(database, "collection = ? AND file = ?", job.store, job.file)
            insert_document(database, document, chunks, vectors, collection=job.store, file=job.file, text=parsed.text)
        self.document_kv.forget(
            removed.text_hashes - {self.document_kv.text_hash(chunk.titled, job.store) for chunk in chunks}
        )

    def _forget_starts(self, job: _Job) -> None:
        with self.database.writing() as database:
            if self._holds(database, job):
                if self._server:
                    database.execute("DELETE FROM file_readers WHERE attached = ?", job.seq)
                database.execute("UPDATE attached SET starts = 0 WHERE seq = ?", job.seq)
        self._counted.discard(job.seq)

    def _holds(self, database: Database, job: _Job) -> bool:
        """False where another server has taken the file over, since this one stood still."""
        if not self._server:
            return True
        select = "SELECT 1 FROM file_readers WHERE attached = ? AND server = ?"
        return database.execute(select, job.seq, self._server).fetchone() is not None

    def _fail(self, job: _Job, code: str, message: str) -> None:
        with self.database.writing() as database:
            if not self._holds(database, job):
                return
            database.execute(
                "UPDATE attached SET status = 'failed', error_code = ?, error_message = ? "
                "WHERE seq = ? AND status = 'in_progress'",
                code, seal_error(database, job.store, job.file, message), job.seq,
            )  # fmt: skip


def _check_room(database: Database, job: _Job, usage: int) -> None:
    """Raise DocumentError unless the file fits into its owner's stores. usage: bytes of its texts and vectors."""
    held = total_usage(database, job.owner, excluding=job.seq)
    if held + usage > MAX_OWNED_USAGE:
        raise DocumentError(
            f"This file's chunks take {_mib(usage)}, and your vector stores hold {_mib(held)} of "
            f"{_mib(MAX_OWNED_USAGE)}: take other files out of them, then attach this one again."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class Hit:
    passage: Passage  # its `score` is the cosine, 0 where that is negative
    attributes: Attributes  # of its file in that store


class Library:
    """Open until `close`. Attached files are read into their stores between `start` and `close`."""

    def __init__(
        self,
        documents: DocumentStore,
        zone: Zone,
        work: FileWork | None = None,
        readable: Callable[[str], Readable] | None = None,
    ) -> None:
        """`zone`: this side's, given to every document. work: where files are read in; None: anywhere. readable: what
        an owner may read of them; None: all. Raises ConfigError when the folder cannot be used."""
        embedder = documents.embedder
        self.zone: Zone = zone
        self.readable = readable or (lambda _: unruled(documents))
        self._documents = documents
        self._database = Database(documents.directory, embedder=made_by(embedder), home=documents.home)
        self._database.seal = documents.seal  # one, so that no key of what either removes stays with the other
        try:
            self.uploads = Uploads(documents.directory, self._database)
        except BaseException:
            self._database.close()
            raise
        document_kv = DocumentKvStore(documents.directory / FOLDER, 0, seal=self._database.seal)  # only to remove from
        self.budget = ParserBudget()  # of reading files, in stores and in messages
        self._ingester = Ingester(self._database, self.uploads, document_kv, embedder, zone, work, self.budget)
        self.stores = VectorStores(self._database, document_kv, attached=self._ingester.notify)

    def start(self) -> None:
        self._ingester.start()

    def close(self) -> None:
        """Stop reading files, after the batch of chunks being embedded, and close the connection."""
        self._ingester.stop()
        self._database.close()

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete an uploaded file and remove it from every vector store."""
        self.stores.forget_file(owner, file_id)
        self.uploads.remove(file_id)

    def text(self, owner: str, store_id: str, file_id: str) -> str:
        """The text read from a file. Raises RequestError unless the reading is completed, and (404) where it is
        removed meanwhile."""
        attached = self.stores.attached(owner, store_id, file_id)
        if attached.status != "completed":
            raise RequestError(f"This file's text cannot be given: it is {attached.status}.", param="file_id")
        with self._database.reading() as database:
            text = find_text(database, store_id, file_id)
        if text is None:
            raise RequestError("This file is not here any more.", status=404, code="not_found", param="file_id")
        self.readable(owner).admit(Passage("", -1, "", text, 0.0, file_id, store_id))
        return text

    # ---- searching --------------------------------------------------------------------------------------------------
    def search(
        self,
        owner: str,
        store_ids: Sequence[str],
        queries: Sequence[str],
        k: int,
        *,
        condition: Filter | None = None,
        min_score: float = 0.0,
    ) -> list[Hit]:
        """Search files: at most k passages of at least this score, best first; rankings of several queries are fused.

        Raises RequestError (404) for a store that the owner does not have.
        """
        selection, attributes = self.stores.selection(owner, store_ids, condition)
        found: dict[int, Passage] = {}  # by chunk id, with the best score of any query
        rankings = []
        for query in queries:
            passages = self.readable(owner).search(query, k, selection, min_score=min_score if min_score > 0 else -1.0)
            rankings.append([passage.chunk_id for passage in passages])
            for passage in passages:
                if passage.chunk_id not in found or passage.score > found[passage.chunk_id].score:
                    found[passage.chunk_id] = passage
        best = [found[chunk_id] for chunk_id in rank_fusion(*rankings)[:k]]
        known = [attributes(each.collection, each.file_id) for each in best]
        return [Hit(replace(each, score=max(each.score, 0.0)), own) for each, own in zip(best, known, strict=True)]

    def passages(self, chunk_ids: Collection[int]) -> dict[int, tuple[str, str]]:
        """(text as it stands in prompts, place) of those of these chunks that exist, of any owner. For answers whose
        owner has read them."""
        with self._database.reading() as database:
            return {each.chunk_id: (passages_text(each), each.place) for each in find_chunks(database, chunk_ids)}

    def beginnings(self, owner: str, limit: int) -> tuple[int, list[tuple[Document, str, str]]]:
        """The number of managed documents that an owner may read, and the first of them by name: each with its title,
        or "", and the text it begins with."""
        barred = self.readable(owner).selection().barred
        with self._database.reading() as database:
            managed = [each for each in managed_documents(database) if each.id not in barred]
            first = {
                passage.file_id: passage
                for document in managed[:limit]
                for passage in read_passages(database, "WHERE documents.id = ? AND position = 0", document.id)
            }
        shown = [(document, first[document.id]) for document in managed[:limit] if document.id in first]
        return len(managed), [(document, passage.title, passage.text) for document, passage in shown]

    def passage(self, owner: str, chunk_id: int) -> ShownPassage:
        """A passage of the managed documents or of a store of this owner, in its document.

        Raises RequestError (404) for any other.
        """
        readable = self.readable(owner)
        with self._database.reading() as database:
            shown = find_passage(database, owner, chunk_id)
        if shown is None or readable.hides(shown.passage):
            raise RequestError("This passage is not here, or not any more.", status=404, code="not_found", param="id")
        readable.admit(shown.passage, *shown.before, *shown.after)
        return shown
