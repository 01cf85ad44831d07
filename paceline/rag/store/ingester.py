"""Reading uploaded files into vector stores, one after the other and the owners in turn, on a thread of its own.

The rows say what there is to do, so nothing is lost when the process ends: a file whose reading was cut short is read
again, but not for ever, since a file that stops or ends the program would do so at every start. Chunks and the status
`completed` are written in one transaction, and only if the file is still wanted then.
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
from paceline.rag.store.documents import DocumentStore, insert, warn_unless_emptied
from paceline.rag.store.files import Uploads
from paceline.rag.store.vector_stores import MAX_OWNED_USAGE, remove_documents, usage_of

MAX_STARTS = 3  # readings of a file that the program did not survive; then it is given up
RETRY_S = 30.0  # after what is no fault of a file
SAVE_S = 5.0  # from a change to the new index file, so that many changes make one

_logger = logging.getLogger("paceline.rag")


class _Job(NamedTuple):
    owner: str
    seq: int  # of the row; attaching a file again makes another
    store: str
    file: str
    name: str
    chunk_tokens: int
    overlap: int


class _UnwantedError(Exception):
    """The file was removed or cancelled meanwhile, or the program ends."""


class _FullError(Exception):
    """The owner's stores have no room for it; a sentence."""


class Ingester:
    """Works from `start` to `stop`."""

    def __init__(
        self, rows: SharedConnection, uploads: Uploads, documents: DocumentStore, embedder: Embedder, zone: Zone
    ) -> None:
        self._rows = rows
        self._uploads = uploads
        self._documents = documents
        self._embedder = embedder
        self._zone = zone
        self._wake = threading.Event()
        self._stopping = False
        self._save_at: float | None = None  # when the index file is to be written, monotonic s
        self._served: dict[str, int] = {}  # owner → the turn in which a file of his was read last
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="paceline-ingest", daemon=True)
        self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """Waits for the few chunks that are being embedded."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def notify(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def schedule_save(self) -> None:
        """Rows have changed: the index file is to be written, soon."""
        if self._save_at is None:
            self._save_at = time.monotonic() + SAVE_S
            self._wake.set()

    # ---- inside -----------------------------------------------------------------------------------------------------
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
                if worked:  # what files held before may have gone
                    warn_unless_emptied(self._rows.checkpoint())
                    self.schedule_save()
                self._save()
            except Exception:  # a full disk, say
                _logger.exception("uploaded files could not be read into their stores; trying again in %g s", RETRY_S)
                pause = RETRY_S
            if self._stopping:
                return

    def _save(self) -> None:
        """When it is time, or the last time there is."""
        if self._save_at is None or (not self._stopping and time.monotonic() < self._save_at):
            return
        self._save_at = None  # first: what changes from here on is for the next time
        warn_unless_emptied(self._rows.checkpoint())  # once more, where a reader was in the way
        if not self._documents.save_index():
            self.schedule_save()

    def _next(self) -> _Job | None:
        """The oldest file of the owner whose last turn is longest ago: who has many waits for himself only."""
        with self._rows.reading() as database:
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
        with self._rows.writing() as database:
            database.execute("UPDATE attached SET starts = 0 WHERE seq = ?", job.seq)

    def _begin(self, job: _Job) -> bool:
        """Write down that this file is being read, so that whoever starts after a crash knows. False: given up."""
        with self._rows.writing() as database:
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
        with self._rows.reading() as database:
            _check_room(database, job, usage)  # before anything is embedded

        def check(done: int, total: int) -> None:
            del done, total
            if self._stopping or not self._is_wanted(job):
                raise _UnwantedError

        vectors = embed_all(self._embedder, [chunk.titled for chunk in chunks], check)
        document_id = f"doc-{secrets.token_hex(12)}"
        document = Document(document_id, parsed.name, parsed.sha256, self._zone, time.time(), len(chunks))
        with self._rows.writing() as database:
            database.check_embedder(database.meta())
            _check_room(database, job, usage)  # another process may read files of this owner too
            done = database.execute(
                "UPDATE attached SET status = 'completed', usage_bytes = ? WHERE seq = ? AND status = 'in_progress'",
                usage, job.seq,
            ).rowcount  # fmt: skip
            if not done:
                raise _UnwantedError
            remove_documents(database, "collection = ? AND file = ?", job.store, job.file)
            insert(database, document, chunks, vectors, collection=job.store, file=job.file)

    def _is_wanted(self, job: _Job) -> bool:
        with self._rows.reading() as database:
            row = database.execute("SELECT 1 FROM attached WHERE seq = ? AND status = 'in_progress'", job.seq)
            return row.fetchone() is not None

    def _fail(self, job: _Job, code: str, message: str) -> None:
        with self._rows.writing() as database:
            database.execute(
                "UPDATE attached SET status = 'failed', error_code = ?, error_message = ? "
                "WHERE seq = ? AND status = 'in_progress'",
                code, message, job.seq,
            )  # fmt: skip


def _check_room(database: Database, job: _Job, usage: int) -> None:
    """usage: bytes of what was read of the file. Raises _FullError."""
    held = usage_of(database, job.owner, besides=job.seq)
    if held + usage > MAX_OWNED_USAGE:
        raise _FullError(
            f"This file's chunks take {_mib(usage)}, and your vector stores hold {_mib(held)} of "
            f"{_mib(MAX_OWNED_USAGE)}: take other files out of them, then attach this one again."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
