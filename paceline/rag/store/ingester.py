"""Ingestion: read uploaded files into vector stores on a background thread, one file at a time, round-robin by owner.

The queue is the rows `in_progress`, so it survives the process. An interrupted reading is repeated, but at most
MAX_STARTS times, since a file that crashes the program would do so at every start. Chunks and the status `completed`
are written in one transaction, and only if the file is still wanted then.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.rag.chunk import split
from paceline.rag.database import Database, SharedConnection
from paceline.rag.embedder import Embedder, embed_all
from paceline.rag.parse import MAX_BYTES, parse
from paceline.rag.records import Document, Zone
from paceline.rag.store.document_rows import insert_document, remove_documents
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.files import Uploads
from paceline.rag.store.vector_store_rows import total_usage
from paceline.rag.store.vector_stores import MAX_OWNED_USAGE

MAX_STARTS = 3  # readings of a file that the program did not survive; then it fails
RETRY_S = 30.0  # delay after an error that no file caused
SAVE_S = 5.0  # from a change to the next index file, so that several changes share one

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


class _UnwantedError(Exception):
    """The file was removed or cancelled meanwhile, or the program is stopping."""


class _FullError(Exception):
    """The file does not fit into the owner's stores; the message is for the user."""


class Ingester:
    """Reads files between `start` and `stop`, and writes the index file some time after changes."""

    def __init__(
        self, connection: SharedConnection, uploads: Uploads, documents: DocumentStore, embedder: Embedder, zone: Zone
    ) -> None:
        self._connection = connection
        self._uploads = uploads
        self._documents = documents
        self._embedder = embedder
        self._zone = zone
        self._wake = threading.Event()
        self._stopping = False
        self._save_at: float | None = None  # when to write the index file, monotonic s; None: it is up to date
        self._served: dict[str, int] = {}  # owner → turn in which a file of theirs was last read
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="paceline-ingest", daemon=True)
        self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """Stop, after the batch of chunks being embedded. The interrupted file is read after the next start."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def notify(self) -> None:
        """Wake the thread: files may have been attached."""
        self._wake.set()

    def schedule_save(self) -> None:
        """Write the index file within SAVE_S, since rows have changed."""
        if self._save_at is None:
            self._save_at = time.monotonic() + SAVE_S
            self._wake.set()

    # ---- internal ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        pause: float | None = None  # s
        while True:
            due = self._save_at
            if due is not None and pause is None:
                pause = max(0.0, due - time.monotonic())
            self._wake.wait(pause)
            self._wake.clear()
            pause = None
            try:
                worked = False
                while not self._stopping and (job := self._next()) is not None:
                    self._work(job)
                    worked = True
                if worked:  # chunks of earlier readings may have been replaced
                    self._connection.checkpoint()
                    self.schedule_save()
                self._save()
            except Exception:  # such as a full disk
                _logger.exception("uploaded files could not be read into their stores; trying again in %g s", RETRY_S)
                pause = RETRY_S
            if self._stopping:
                return

    def _save(self) -> None:
        """Write the index file when it is due or the thread is stopping."""
        if self._save_at is None or (not self._stopping and time.monotonic() < self._save_at):
            return
        self._save_at = None  # first, so that changes from here on schedule another save
        self._connection.checkpoint()  # again, in case a reader prevented the last one
        if not self._documents.save_index():
            self.schedule_save()

    def _next(self) -> _Job | None:
        """The oldest file of the least recently served owner, so that an owner with many files delays nobody else."""
        with self._connection.reading() as database:
            waiting = database.execute(
                "SELECT owner, min(attached.seq) FROM attached JOIN vector_stores ON id = store "
                "WHERE status = 'in_progress' GROUP BY owner"
            ).fetchall()
            if not waiting:
                return None
            owner, seq = min(waiting, key=lambda one: (self._served.get(one[0], 0), one[1]))
            row = database.execute(
                "SELECT attached.seq, store, file, name, chunk_tokens, overlap FROM attached "
                "JOIN files ON files.id = file WHERE attached.seq = ?",
                seq,
            ).fetchone()
        self._served[owner] = max(self._served.values(), default=0) + 1
        return _Job(owner, *row)

    def _work(self, job: _Job) -> None:
        if not self._begin(job):
            return
        try:
            self._read(job)
        except _UnwantedError:
            pass
        except _FullError as error:
            self._fail(job, "invalid_file", str(error))
        except FileNotFoundError:
            self._fail(job, "server_error", "The bytes of this file are gone: upload it again.")
        except ConfigError as error:
            self._fail(job, "server_error", str(error))
        except Exception:
            _logger.exception("%s could not be read into %s", job.file, job.store)
            self._fail(job, "server_error", "The server made a mistake while reading this file.")
        with self._connection.writing() as database:
            database.execute("UPDATE attached SET starts = 0 WHERE seq = ?", job.seq)

    def _begin(self, job: _Job) -> bool:
        """Record the start of a reading, so that crashes during it are counted. False: too many, give the file up."""
        with self._connection.writing() as database:
            row = database.execute("UPDATE attached SET starts = starts + 1 WHERE seq = ? RETURNING starts", job.seq)
            (starts,) = row.fetchone() or (0,)
        if starts <= MAX_STARTS:
            return True
        message = f"The program ended {MAX_STARTS} times while it read this file, so it is not read again."
        _logger.error("%s is given up: %s", job.file, message)
        self._fail(job, "server_error", f"{message} Convert or split it, then upload it anew.")
        return False

    def _read(self, job: _Job) -> None:
        data = self._uploads.read(job.file, MAX_BYTES + 1)
        try:
            parsed = parse(job.name, data)
        except ConfigError as error:
            self._fail(job, "unsupported_file" if 0 < len(data) <= MAX_BYTES else "invalid_file", str(error))
            return
        chunks = split(
            parsed.text, self._embedder.count, title=parsed.title, chunk_tokens=job.chunk_tokens, overlap=job.overlap
        )
        chunks = [chunk for chunk in chunks if chunk.text.strip()]
        usage = sum(4 * self._embedder.dimensions + len(chunk.titled.encode()) for chunk in chunks)
        with self._connection.reading() as database:
            _check_room(database, job, usage)  # before embedding

        def check(done: int, total: int) -> None:
            del done, total
            if self._stopping or not self._is_wanted(job):
                raise _UnwantedError

        vectors = embed_all(self._embedder, [chunk.titled for chunk in chunks], check)
        document_id = f"doc-{secrets.token_hex(12)}"
        document = Document(document_id, parsed.name, parsed.sha256, self._zone, time.time(), len(chunks))
        with self._connection.writing() as database:
            database.check_embedder(database.meta())
            _check_room(database, job, usage)  # again: another process may read files of this owner too
            done = database.execute(
                "UPDATE attached SET status = 'completed', usage_bytes = ? WHERE seq = ? AND status = 'in_progress'",
                usage, job.seq,
            ).rowcount  # fmt: skip
            if not done:
                raise _UnwantedError
            remove_documents(database, "collection = ? AND file = ?", job.store, job.file)
            insert_document(database, document, chunks, vectors, collection=job.store, file=job.file)

    def _is_wanted(self, job: _Job) -> bool:
        with self._connection.reading() as database:
            row = database.execute("SELECT 1 FROM attached WHERE seq = ? AND status = 'in_progress'", job.seq)
            return row.fetchone() is not None

    def _fail(self, job: _Job, code: str, message: str) -> None:
        with self._connection.writing() as database:
            database.execute(
                "UPDATE attached SET status = 'failed', error_code = ?, error_message = ? "
                "WHERE seq = ? AND status = 'in_progress'",
                code, message, job.seq,
            )  # fmt: skip


def _check_room(database: Database, job: _Job, usage: int) -> None:
    """Raise _FullError unless the file fits into its owner's stores. usage: bytes of its texts and vectors."""
    held = total_usage(database, job.owner, excluding=job.seq)
    if held + usage > MAX_OWNED_USAGE:
        raise _FullError(
            f"This file's chunks take {_mib(usage)}, and your vector stores hold {_mib(held)} of "
            f"{_mib(MAX_OWNED_USAGE)}: take other files out of them, then attach this one again."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
