"""Private SQLite files with a write-ahead log, and their errors as sentences with advice.

The write-ahead log lets one process read while another writes. `secure_delete` overwrites removed text in the pages;
the log keeps it until the next `checkpoint`. Not handled: blocks that the disk itself retains after an overwrite.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import ConfigError, StorageError, other_format
from paceline.secret_files import private_folder

BUSY_S = 30.0  # longest wait for another process's transaction


def connect(file: Path) -> sqlite3.Connection:
    """Open an autocommitting connection to `file`, creating it if needed. One thread at a time may use it.

    Raises sqlite3.Error, OSError, and ConfigError for a folder where others could exchange it (see `private_folder`),
    and when another program keeps the file busy.
    """
    private_folder(file.parent)
    _make_private(file)
    connection = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
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
    raise ConfigError(f"{file} is in use by another program; try again.")


def is_new(connection: sqlite3.Connection, file: Path | None, version: int, advice: str) -> bool:
    """True if there is no table yet. Raises ConfigError for tables of another version (`PRAGMA user_version`).

    advice: of `other_format`.
    """
    found, tables = connection.execute(  # one statement, so that both are of one moment
        "SELECT user_version, (SELECT count(*) FROM sqlite_schema) FROM pragma_user_version"
    ).fetchone()
    if not found and not tables:
        return True
    if found != version:
        raise other_format(file, found, version, advice)
    return False


def prepare(
    connection: sqlite3.Connection, file: Path | None, version: int, schema: Iterable[str], advice: str
) -> None:
    """Make the tables where there is none. Raises ConfigError as `is_new`."""
    if is_new(connection, file, version, advice):  # else no reader waits for a writer
        with transaction(connection):
            if is_new(connection, file, version, advice):
                for statement in (*schema, f"PRAGMA user_version = {version}"):
                    connection.execute(statement)


@contextmanager
def transaction(connection: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Commit the block as one transaction; roll it back if the block raises."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def checkpoint(connection: sqlite3.Connection) -> bool:
    """Move the write-ahead log into the database and empty it. False if a reader blocked it for too long."""
    busy: int = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    return not busy


@contextmanager
def speaking(file: Path, kind: str) -> Iterator[None]:
    """Raise SQLite's errors as StorageError with advice. `kind`: what the file should be, such as "a token log"."""
    try:
        yield
    except sqlite3.Error as error:
        code: int = getattr(error, "sqlite_errorcode", 0)  # absent where Python itself raised it
        advice = {
            sqlite3.SQLITE_FULL: "The disk is full: make room and try again.",
            sqlite3.SQLITE_BUSY: "Another program is using it: try again when that has ended.",
            sqlite3.SQLITE_READONLY: "Make the folder writable, or choose another.",
            sqlite3.SQLITE_NOTADB: f"It is not {kind}: choose another folder, or remove that file.",
            sqlite3.SQLITE_CORRUPT: "It is damaged: restore it from a copy, or remove it and begin again.",
        }.get(code & 0xFF, "Check the folder, or choose another.")
        raise StorageError(f"{file}: {error}. {advice}", full=code & 0xFF == sqlite3.SQLITE_FULL) from error
