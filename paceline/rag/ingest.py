"""Reading uploaded files into vector stores, one after the other, on a thread of its own.

The rows say what there is to do, so nothing is lost when the process ends: a file whose reading was cut short is read
again. Chunks and the status `completed` are written in one transaction, and only if the file is still wanted then.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.rag.chunk import split
from paceline.rag.database import Rows
from paceline.rag.embed import Embedder, embed_all
from paceline.rag.parse import MAX_BYTES, parse
from paceline.rag.records import Document, Zone
from paceline.rag.store import DocumentStore, insert
from paceline.rag.uploads import Uploads
from paceline.rag.vector_stores import remove_documents

RETRY_S = 30.0  # after what is no fault of a file

_logger = logging.getLogger("paceline.rag")


class _Job(NamedTuple):
    seq: int  # of the row; attaching a file again makes another
    store: str
    file: str
    name: str
    chunk_tokens: int
    overlap: int


class _UnwantedError(Exception):
    """The file was removed or cancelled meanwhile, or the program ends."""


class Ingester:
    """Works from `start` to `stop`."""

    def __init__(self, rows: Rows, uploads: Uploads, documents: DocumentStore, embedder: Embedder, zone: Zone) -> None:
        self._rows = rows
        self._uploads = uploads
        self._documents = documents
        self._embedder = embedder
        self._zone = zone
        self._wake = threading.Event()
        self._stopping = False
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

    # ---- inside -----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        pause: float | None = None  # s
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            pause = None
            try:
                worked = False
                while not self._stopping and (job := self._next()) is not None:
                    self._work(job)
                    worked = True
                if worked:
                    self._documents.settle()
            except Exception:  # a full disk, say
                _logger.exception("uploaded files could not be read into their stores; trying again in %g s", RETRY_S)
                pause = RETRY_S
            if self._stopping:
                return

    def _next(self) -> _Job | None:
        with self._rows.reading() as database:
            row = database.execute(
                "SELECT attached.seq, store, file, name, chunk_tokens, overlap FROM attached "
                "JOIN files ON files.id = file WHERE status = 'in_progress' ORDER BY attached.seq LIMIT 1"
            ).fetchone()
        return None if row is None else _Job(*row)

    def _work(self, job: _Job) -> None:
        try:
            self._read(job)
        except _UnwantedError:
            return
        except FileNotFoundError:
            self._fail(job, "server_error", "The bytes of this file are gone: upload it again.")
        except ConfigError as error:
            self._fail(job, "server_error", str(error))
        except Exception:
            _logger.exception("%s could not be read into %s", job.file, job.store)
            self._fail(job, "server_error", "The server made a mistake while reading this file.")

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

        def check(done: int, total: int) -> None:
            del done, total
            if self._stopping or not self._is_wanted(job):
                raise _UnwantedError

        vectors = embed_all(self._embedder, [chunk.titled for chunk in chunks], check)
        document_id = f"doc-{secrets.token_hex(12)}"
        document = Document(document_id, parsed.name, parsed.sha256, self._zone, time.time(), len(chunks))
        usage = vectors.nbytes + sum(len(chunk.titled.encode()) for chunk in chunks)
        with self._rows.writing() as database:
            database.check_embedder(database.meta())
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
