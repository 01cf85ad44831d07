"""The database of a document store: schema, opening, and transactions.

An SQLite file with a write-ahead log, so that one process may search while another adds. `secure_delete` and a
truncating checkpoint after each change erase removed text from the files; copies of overwritten blocks that the disk
itself keeps are not handled. A store may be sealed (`sealing`): then the columns that hold or tell text are encrypted,
and `seal` opens them.

A database that several servers share has the same tables, whose vectors pgvector searches, and two more: the bytes of
uploaded files, and which server reads which. It is never sealed. Errors of either become ConfigError with advice.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import sql
from paceline.core.side import Side
from paceline.errors import ConfigError, StorageError
from paceline.sealing import PLAIN, Seal, StoreKey
from paceline.sql import Cursor, Home, place_in

if TYPE_CHECKING:
    from paceline.fleet import Fleet
    from paceline.rag.embedder import Embedder

_STORE = "documents"
FILE = f"{_STORE}.sqlite"
AGAIN_S = 1.0  # between two tries to empty the log
VERSION = 2  # PRAGMA user_version
_SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE documents (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        sha256 TEXT NOT NULL,
        zone TEXT NOT NULL,
        added_at REAL NOT NULL,  -- s since 1970
        num_chunks INTEGER NOT NULL,
        collection TEXT NOT NULL DEFAULT 'default',
        file TEXT NOT NULL DEFAULT '',  -- id of the uploaded file it was made from
        source BLOB NOT NULL DEFAULT x'',  -- whole path of the file it was read from, as bytes
        stamp TEXT NOT NULL DEFAULT '',  -- of that file when it was read; in a sealed store a keyed hash
        key BLOB NOT NULL DEFAULT x'',  -- the document's data key, wrapped; of a sealed store, as all below
        sealed BLOB NOT NULL DEFAULT x'')  -- name, sha256 and source, for which keyed hashes stand above""",
    # Uploaded files may share names and texts; documents managed by `paceline docs` may not.
    "CREATE UNIQUE INDEX document_names ON documents (collection, name) WHERE file = ''",
    "CREATE UNIQUE INDEX document_texts ON documents (collection, sha256) WHERE file = ''",
    "CREATE UNIQUE INDEX document_files ON documents (collection, file) WHERE file != ''",
    "CREATE UNIQUE INDEX document_sources ON documents (collection, source) WHERE source != x''",
    # AUTOINCREMENT: an id is never used twice, so equal ids mean equal chunks and an index can be updated by ids.
    """CREATE TABLE chunks (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        document TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        text TEXT NOT NULL,
        title TEXT NOT NULL,
        embedding VECTOR BLOB NOT NULL,  -- int8 with the norm 1; or pgvector's
        place TEXT NOT NULL DEFAULT '',  -- in the document, for people
        UNIQUE (document, position))""",
    # seq: order of creation, since creation times may be equal.
    """CREATE TABLE files (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        purpose TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        created_at REAL NOT NULL,
        key BLOB NOT NULL DEFAULT x'')""",  # the file's data key, wrapped; of a sealed store
    """CREATE TABLE vector_stores (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,  -- also the name of its collection
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        metadata TEXT NOT NULL,  -- JSON
        created_at REAL NOT NULL,
        active_at REAL NOT NULL)""",
    """CREATE TABLE file_batches (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        store TEXT NOT NULL REFERENCES vector_stores (id) ON DELETE CASCADE,
        created_at REAL NOT NULL,
        cancelled INTEGER NOT NULL)""",
    """CREATE TABLE attached (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        store TEXT NOT NULL REFERENCES vector_stores (id) ON DELETE CASCADE,
        file TEXT NOT NULL REFERENCES files (id) ON DELETE CASCADE,
        batch TEXT NOT NULL,
        created_at REAL NOT NULL,
        status TEXT NOT NULL,
        error_code TEXT NOT NULL,
        error_message TEXT NOT NULL,
        attributes TEXT NOT NULL,  -- JSON
        chunk_tokens INTEGER NOT NULL,
        overlap INTEGER NOT NULL,
        usage_bytes INTEGER NOT NULL,
        starts INTEGER NOT NULL DEFAULT 0,  -- readings that were begun and not ended, by whatever outcome
        UNIQUE (store, file))""",
    # Whole texts of uploaded files: parsing them again for a client that asks could take a minute.
    """CREATE TABLE texts (
        document TEXT PRIMARY KEY REFERENCES documents (id) ON DELETE CASCADE,
        text TEXT NOT NULL)""",
    "CREATE INDEX batches_of_store ON file_batches (store, seq)",
    "CREATE INDEX attached_files ON attached (file)",
    "CREATE INDEX attached_batches ON attached (batch)",
    "CREATE INDEX attached_usage ON attached (store, usage_bytes)",
    "CREATE INDEX attached_waiting ON attached (store, seq) WHERE status = 'in_progress'",
    # What models have said of passages, which a question that is asked again need not have read again.
    """CREATE TABLE readings (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        chunk INTEGER NOT NULL REFERENCES chunks (id) ON DELETE CASCADE,
        asked TEXT NOT NULL UNIQUE,  -- a hash of who asked which model what; in a sealed store a keyed one
        owner TEXT NOT NULL,
        text TEXT NOT NULL)""",
    "CREATE INDEX readings_chunk ON readings (chunk)",
)
_SHARED_SCHEMA = (
    "ALTER TABLE chunks ALTER COLUMN embedding SET STORAGE MAIN",  # in its row, not in a table beside
    """CREATE TABLE file_parts (
        file TEXT NOT NULL REFERENCES files (id) ON DELETE CASCADE,
        part INTEGER NOT NULL,
        bytes BLOB NOT NULL,
        PRIMARY KEY (file, part))""",
    """CREATE TABLE file_readers (
        attached INTEGER PRIMARY KEY REFERENCES attached (seq) ON DELETE CASCADE,
        server TEXT NOT NULL)""",
)
_ONE_MORE = "CAST(CAST(meta.value AS BIGINT) + 1 AS TEXT)"
_logger = logging.getLogger("paceline.rag")


def made_by(embedder: Embedder) -> Mapping[str, str]:
    """Name, dimensions and weights of an embedder, as a store records them with its vectors."""
    return {"embedder": embedder.name, "dimensions": str(embedder.dimensions), "weights": embedder.fingerprint}


class Database:
    """One connection for several threads, in turns of a transaction. `execute` is for the thread whose turn it is."""

    def __init__(
        self,
        directory: Path,
        *,
        embedder: Mapping[str, str],
        side: Side | None = None,
        encrypt: bool = False,
        home: Home | None = None,
    ) -> None:
        """Open the store, or create it if there is none. Raises ConfigError when neither is possible.

        embedder: `made_by` of the one whose vectors are kept.
        side: the owner of the documents, recorded by the first opening that names one; None: do not check.
        encrypt: seal a store that is created now; one that exists stays as it is.
        home: where several servers keep it together; None: a file in the folder.
        """
        self._directory = directory
        self.is_shared = home is not None
        self.fleet: Fleet | None = None if home is None else home.fleet
        self._place = place_in(home or directory, _STORE, "a document store")
        self._name = self._place.name if self.is_shared else str(directory)
        self._encrypt = encrypt
        self.seal: Seal = PLAIN
        self._is_prepared = False
        self._again: threading.Timer | None = None  # the next try to empty the log
        self._made_by = embedder
        try:
            with self._place.explained():
                self._connection = self._place.connect()
        except ValueError as error:
            raise ConfigError(f"The document folder {directory} cannot be used: {error}. Choose another.") from error
        try:
            with self._place.explained():
                self._prepare()
                self._is_prepared = True
                if side is not None:
                    self._claim(side)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        advice = "choose another folder and add the documents again"
        with self.writing():
            if sql.is_new(self._connection, self._place.name, VERSION, advice):
                self._make_tables()
                meta = {"generation": "0", "store": uuid.uuid4().hex, **self._made_by}
                if self._encrypt:
                    meta["seal"] = StoreKey(self._directory).new_seal().name
                self._connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            self.seal = self._open_seal()
        self.checkpoint()

    def _make_tables(self) -> None:
        """Raises ConfigError for a database without pgvector."""
        if self.is_shared:
            try:
                with self._place.explained():
                    self._connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            except StorageError as error:
                if error.away:
                    raise
                raise ConfigError(
                    f"{error} Documents need its extension pgvector: install it there and have its owner say CREATE "
                    "EXTENSION vector."
                ) from error
        for statement in (*_SCHEMA, *(_SHARED_SCHEMA if self.is_shared else ())):
            self._connection.execute(statement)
        self._connection.set_version(VERSION)

    def _open_seal(self) -> Seal:
        """The seal that the store records. Raises ConfigError without its key, and where documents have keys of their
        own although no seal is recorded."""
        if (name := self.meta().get("seal")) is not None:
            return StoreKey(self._directory).open_seal(name, self._directory)
        for table in ("documents", "files"):
            if self._connection.execute(f"SELECT 1 FROM {table} WHERE key != x'' LIMIT 1").fetchone() is not None:
                raise ConfigError(
                    f"The documents in {self._directory} are encrypted, but the record of their key in {FILE} is gone: "
                    "put back a copy of that folder, or choose another and add them again. Nothing was changed."
                )
        return PLAIN

    def vacuum(self) -> None:
        """Write the file anew without free pages, and empty the log. Raises ConfigError."""
        with self._connection.turn(), self._place.explained():
            self._connection.execute("PRAGMA temp_store = FILE")  # a copy of the store, which may exceed the memory
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA temp_store = MEMORY")
            self._connection.overwrite()

    def _claim(self, side: Side) -> None:
        """Record this side as the store's owner. Raises ConfigError when it belongs to the other side.

        One that was made without a side belongs to the device if it contains a document of a device.
        """
        with self.writing():
            owner = self.meta().get("side")
            if owner is None:
                zones = {zone for (zone,) in self._connection.execute("SELECT DISTINCT zone FROM documents")}
                owner = next((known for known in ("device", "cloud") if known in zones), side)
                if owner == side:
                    self._connection.execute("INSERT INTO meta VALUES ('side', ?)", (side,))
        if owner != side:
            kinds = {"device": "private documents of a device", "cloud": "public documents of a cloud"}
            raise ConfigError(
                f"{self._name} holds {kinds[owner]}: the {side} keeps its own in another folder. Give that one "
                f"(--store, or the setting docs_dir of the {side}), or say --side {owner} if these were meant."
            )

    def close(self) -> None:
        with self._connection.turn():
            if self._again is not None:
                self._again.cancel()
                self._again = None
                with suppress(StorageError), self._place.explained():
                    self._connection.overwrite(sql.BUSY_S)
            self._connection.close()

    def meta(self) -> dict[str, str]:
        return dict(self._connection.execute("SELECT key, value FROM meta"))

    def check_embedder(self, meta: dict[str, str], *, writes: bool = False) -> None:
        """Raises ConfigError when the vectors were made by another embedder. writes: some are to be written, by which a
        store that has none becomes this embedder's."""
        if all(meta.get(key) == self._made_by[key] for key in ("dimensions", "weights")):  # whatever it is called
            return
        if self._connection.execute("SELECT 1 FROM chunks LIMIT 1").fetchone() is not None:
            side = f" --side {meta['side']}" if "side" in meta else ""
            raise ConfigError(
                f"The documents in {self._name} were indexed with the embedder {meta['embedder']!r} "
                f"({meta['dimensions']} dimensions), not {self._made_by['embedder']!r} as it is now "
                f"({self._made_by['dimensions']}). Use that one (--embedder {meta['embedder']}), or index them again "
                f"(paceline docs reindex{side})."
            )
        if writes:
            self.renew()

    def renew(self) -> None:
        """Record that this embedder made all vectors. Invalidates every earlier index, though the ids stay the same."""
        values = {"store": uuid.uuid4().hex, **self._made_by}
        kept = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        self._connection.executemany(kept, values.items())
        self.bump()

    def bump(self) -> None:
        """Advance the generation: required in every transaction that changes documents or chunks."""
        self._connection.execute(f"UPDATE meta SET value = {_ONE_MORE} WHERE key = 'generation'")

    def bump_removals(self) -> None:
        """Count a removal of documents, in its transaction."""
        self._connection.execute(
            f"INSERT INTO meta VALUES ('removals', '1') ON CONFLICT (key) DO UPDATE SET value = {_ONE_MORE}"
        )

    def execute(self, statement: str, *parameters: object) -> Cursor:
        return self._connection.execute(statement, self._bound(parameters))

    def executemany(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._connection.executemany(statement, map(self._bound, rows) if self.is_shared else rows)

    def _bound(self, parameters: tuple[object, ...]) -> Sequence[Any]:
        """PostgreSQL's texts hold no NUL."""
        if not self.is_shared:
            return parameters
        return [
            each.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(each, str) else each for each in parameters
        ]

    def writing(self) -> AbstractContextManager[Database]:
        """A transaction, committed whole or rolled back. Waits for those of other processes."""
        return self._transaction("alone")

    def reading(self) -> AbstractContextManager[Database]:
        """A read transaction: every query inside sees the same snapshot."""
        return self._transaction("read")

    @contextmanager
    def _transaction(self, mode: sql.Mode) -> Iterator[Database]:
        with self._connection.turn(), self._place.explained(), sql.transaction(self._connection, mode):
            if self._is_prepared and not self.is_shared:
                self._check_seal()
            yield self

    def _check_seal(self) -> None:
        """Raises ConfigError where another program has sealed the store since it was opened."""
        row = self._connection.execute("SELECT value FROM meta WHERE key = 'seal'").fetchone()
        if (row[0] if row else "") != self.seal.name:
            raise ConfigError(
                f"The documents in {self._directory} were encrypted by another program meanwhile: start this one again."
            )

    def checkpoint(self) -> None:
        """Empty the log into the database, so that removed text leaves the disk. As long as a reader prevents it, it is
        tried again beside all else."""
        if self.is_shared:
            return
        with self._connection.turn(), self._place.explained():
            if not self._connection.overwrite() and self._again is None:
                _logger.warning("a reader keeps the log from being emptied; removed text goes when that has ended")
                self._try_again()

    def _try_again(self) -> None:
        self._again = threading.Timer(AGAIN_S, self._overwrite)
        self._again.daemon = True
        self._again.start()

    def _overwrite(self) -> None:
        with suppress(StorageError), self._connection.turn(), self._place.explained():
            if self._again is None:  # closed meanwhile
                return
            self._again = None
            if not self._connection.overwrite(0.0):
                self._try_again()
