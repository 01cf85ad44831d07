"""What stores ask of their database: private files of SQLite's, or a PostgreSQL server that several servers share.

A store writes its statements once, in SQL that both know: `?` for a parameter, SQLite's names of types in a schema,
`ON CONFLICT` rather than `OR REPLACE`, `true` and `false` for what is one or the other.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.errors import ConfigError, StorageError, is_full, other_format
from paceline.secret_files import private_folder

if TYPE_CHECKING:
    from paceline.fleet import Fleet


# read: every query sees the same state. write: others may write other rows meanwhile, where the database can let them.
# alone: nothing else writes to this store meanwhile.
Mode = Literal["read", "write", "alone"]


OVERWRITE_S = 0.5  # for a reader, before what is removed is overwritten later


class DuplicateRow(StorageError):
    """A row would break a rule of its table: there is another with its key, or it has no owner."""


class Cursor(Protocol):
    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class SqlConnection(Protocol):
    """An autocommitting connection to one store. One thread at a time may use it; methods block."""

    def turn(self) -> AbstractContextManager[object]:
        """Wait until no other thread uses it, where several do."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Cursor: ...

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> object: ...

    def begin(self, mode: Mode) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def version(self) -> int | None:
        """The format of the store's tables; None where there are none."""

    def set_version(self, version: int) -> None: ...

    def overwrite(self, wait_s: float = OVERWRITE_S) -> bool:
        """Overwrite what has been removed, as far as the database can. False if a reader blocked that for so long."""

    def close(self) -> None: ...


class StorePlace(Protocol):
    """Where one store keeps its rows."""

    @property
    def name(self) -> str:
        """As error messages name it."""

    def connect(self) -> SqlConnection:
        """Raises what `explained` explains, and StorageError."""

    def explained(self) -> AbstractContextManager[None]:
        """Raise the database's errors as StorageError with advice."""

    def changes(self) -> AbstractContextManager[Changes]:
        """What tells that the store may have changed. One thread at a time may call it."""

    def announce(self, connection: SqlConnection) -> None:
        """Tell all who watch `changes`, once the caller's transaction is committed."""


class Home(Protocol):
    """Where all stores of a server lie."""

    @property
    def fleet(self) -> Fleet | None:
        """The servers that share it, as one of them sees them; None for a command, which is none."""

    def place(self, store: str, kind: str) -> StorePlace:
        """store: its name. kind: what it is, in messages, such as "a token log"."""


class Changes(Protocol):
    def __call__(self) -> object:
        """A value that differs after every change, by any process. Takes microseconds. Raises StorageError where that
        cannot be known."""


@contextmanager
def transaction(connection: SqlConnection, mode: Mode = "alone") -> Iterator[None]:
    """Commit the block as one transaction; roll it back if the block raises."""
    connection.begin(mode)
    try:
        yield
        connection.commit()
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise


def is_new(connection: SqlConnection, name: object, version: int, advice: str) -> bool:
    """True if there is no table yet. Raises ConfigError for tables of another version.

    name: of the place. advice: of `other_format`.
    """
    found = connection.version()
    if found is not None and found != version:
        raise other_format(name, found, version, advice)
    return found is None


def prepare(connection: SqlConnection, name: object, version: int, schema: Iterable[str], advice: str) -> None:
    """Make the tables where there is none. Raises ConfigError as `is_new`."""
    if connection.version() == version:
        return  # so that no reader waits for a writer
    with transaction(connection):
        if is_new(connection, name, version, advice):
            for statement in schema:
                connection.execute(statement)
            connection.set_version(version)


# ---- private files of SQLite's, and their errors as sentences with advice -------------------------------------------
# The write-ahead log lets one process read while another writes. `secure_delete` overwrites removed text in the pages;
# the log keeps it until the next `SqliteConnection.overwrite`. Not handled: blocks that the disk itself retains after
# an overwrite.
BUSY_S = 30.0  # longest wait for another process's transaction


class SqliteConnection(sqlite3.Connection):
    """A connection as `paceline.sql` describes it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turn = threading.Lock()

    def turn(self) -> AbstractContextManager[object]:
        return self._turn

    def begin(self, mode: Mode) -> None:
        """Waits up to `BUSY_S` for another process that writes."""
        self.execute("BEGIN" if mode == "read" else "BEGIN IMMEDIATE")

    def version(self) -> int | None:
        found, tables = self.execute(  # one statement, so that both are of one moment
            "SELECT user_version, (SELECT count(*) FROM sqlite_schema) FROM pragma_user_version"
        ).fetchone()
        return found if found or tables else None

    def set_version(self, version: int) -> None:
        self.execute(f"PRAGMA user_version = {version:d}")

    def overwrite(self, wait_s: float = OVERWRITE_S) -> bool:
        """Move the write-ahead log into the database and empty it. Whoever would write waits meanwhile."""
        self.execute(f"PRAGMA busy_timeout = {wait_s * 1000:.0f}")
        try:
            busy: int = self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        finally:
            self.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
        return not busy


def connect(file: Path | None) -> SqliteConnection:
    """Open an autocommitting connection to `file`, creating it if needed. One thread at a time may use it. None: to a
    database in memory.

    Raises sqlite3.Error, and StorageError where the file cannot be made, for a folder where others could exchange it
    (see `private_folder`), and when another program keeps the file busy.
    """
    if file is not None:
        try:
            private_folder(file.parent)
            _make_private(file)
        except OSError as error:
            advice = "Check the folder, or choose another."
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "Allow more open files (`ulimit -n`)."
            raise StorageError(f"{file} cannot be used: {error}. {advice}", full=is_full(error)) from error
        except ConfigError as error:  # which may hold for a moment, beside programs that go on
            raise StorageError(str(error)) from error
    connection = sqlite3.connect(
        ":memory:" if file is None else file,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
        factory=SqliteConnection,
    )
    try:
        if file is not None:
            _write_ahead(connection, file)
        for pragma in ("secure_delete = ON", "foreign_keys = ON", "temp_store = MEMORY"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


_MAKING = threading.Lock()


def _make_private(file: Path) -> None:
    """Create an empty file of mode 0600 if there is none. SQLite gives its log files the same mode.

    A file that exists is never opened here. POSIX locks belong to processes, not to descriptors: closing *any*
    descriptor of a file drops all locks this process holds on it. Another process would then take itself for the last
    user, and remove the write-ahead log of a connection in use ("How To Corrupt An SQLite Database File", 2.2).
    `_MAKING` keeps another thread from connecting to the new file before its descriptor is closed here.
    """
    with _MAKING, suppress(FileExistsError):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "fchmod"):
                os.fchmod(descriptor, 0o600)  # a umask may have taken more away
        finally:
            os.close(descriptor)


def _write_ahead(connection: sqlite3.Connection, file: Path) -> None:
    """Switch to the write-ahead log.

    The switch does not wait for another process that is switching as well; beginning a transaction does.
    """
    for _ in range(100):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    raise StorageError(f"{file} is in use by another program; try again.")


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """A store in a file of its own; without a path in memory."""

    path: Path | None
    kind: str  # what it should be, such as "a token log"

    @property
    def name(self) -> str:
        return "a database in memory" if self.path is None else str(self.path)

    def connect(self) -> SqliteConnection:
        return connect(self.path)

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise DuplicateRow(f"{self.name}: {error}.") from error
        except sqlite3.Error as error:
            code: int = getattr(error, "sqlite_errorcode", 0)  # absent where Python itself raised it
            advice = {
                sqlite3.SQLITE_FULL: "The disk is full: make room and try again.",
                sqlite3.SQLITE_BUSY: "Another program is using it: try again when that has ended.",
                sqlite3.SQLITE_READONLY: "Make the folder writable, or choose another.",
                sqlite3.SQLITE_NOTADB: f"It is not {self.kind}: choose another folder, or remove that file.",
                sqlite3.SQLITE_CORRUPT: "It is damaged: restore it from a copy, or remove it and begin again.",
            }.get(code & 0xFF, "Check the folder, or choose another.")
            full = code & 0xFF == sqlite3.SQLITE_FULL
            raise StorageError(f"{self.name}: {error}. {advice}", full=full) from error

    def announce(self, connection: SqlConnection) -> None:
        """SQLite tells by itself."""

    @contextmanager
    def changes(self) -> Iterator[Changes]:
        """Of the file, and of what else is put in its place."""
        with ExitStack() as opened:
            rows: SqliteConnection | None = None
            place: tuple[int, int] | None = None
            others = 0  # files that were there before

            def current() -> tuple[int, int]:
                nonlocal rows, place, others
                with self.explained():
                    if rows is None or self._inode() != place:
                        opened.close()
                        rows, place, others = None, self._inode(), others + 1
                        if place is None:
                            raise StorageError(
                                f"{self.path} is gone: put it back from a copy, or start the server again."
                            )
                        rows = opened.enter_context(closing(self.connect()))
                    return others, int(rows.execute("PRAGMA data_version").fetchone()[0])

            yield current

    def _inode(self) -> tuple[int, int] | None:
        """(device, inode) of the file that is there now."""
        assert self.path is not None, "a database in memory is not watched"
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{self.path} cannot be used: {error}. Check the folder.") from error
        return status.st_dev, status.st_ino


class OwnRows:
    """The rows of a small store, by a connection that stays. Safe to use from several threads; methods block for an
    access to the disk or the database."""

    def __init__(self, place: StorePlace, version: int, schema: Iterable[str], advice: str) -> None:
        """advice: as of `sql.prepare`. Raises ConfigError and StorageError where it cannot be used."""
        self._place = place
        with place.explained():
            self._rows = place.connect()
            try:
                prepare(self._rows, place.name, version, schema, advice)
            except BaseException:
                self._rows.close()
                raise

    def close(self) -> None:
        with self._rows.turn():
            self._rows.close()

    @contextmanager
    def reading(self) -> Iterator[SqlConnection]:
        """Raises StorageError."""
        with self._rows.turn(), self._place.explained():
            yield self._rows

    @contextmanager
    def changing(self) -> Iterator[SqlConnection]:
        """In one transaction. Raises StorageError."""
        with self.reading() as rows, transaction(rows):
            yield rows


def place_in(state: Path | Home, store: str, kind: str) -> StorePlace:
    """The place of a store: a file of its own in a folder, or where a database keeps it."""
    return SqliteFile(state / f"{store}.sqlite", kind) if isinstance(state, Path) else state.place(store, kind)
