"""The database of several servers, from outside: filled from a state directory, and looked at by `paceline doctor`."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import psycopg
from psycopg import sql

from paceline.api.responses import store as responses
from paceline.errors import ConfigError, StorageError
from paceline.postgres import MAX_CONNECTIONS, SCHEMA, Postgres
from paceline.rag import database as documents
from paceline.rag.rows import unpacked, written
from paceline.rag.store.files import FOLDER, STEP, stored_name
from paceline.runtime import policy
from paceline.sealing import open_answers_seal
from paceline.sql import SqliteConnection, SqliteFile
from paceline.system import lock

from . import devices, keys, state
from .program import FILE as KEY_FILE
from .program import common_key, server_key

if TYPE_CHECKING:
    from paceline.commands.options import Found

STORES: Final[Mapping[str, int]] = {  # formats that are copied, by file
    keys.STORE: state.VERSION,
    devices.STORE: state.VERSION,
    responses.STORE: responses.VERSION,
    policy.STORE: policy.VERSION,
}
SKEW_S: Final = 2.0  # between two clocks, from which keys and codes would end at other times on each server
ROWS: Final = 1000  # read from a file at once


def copy(folder: Path, postgres: Postgres, docs: Path | None = None) -> dict[str, int]:
    """Fill the tables of a database from a server's state directory, in one transaction: rows by table.

    docs: the folder of its documents; None: in the state directory. Ids and times stay as they are. Nothing in the
    folders is changed; responses that are encrypted there are not in the database. Raises ConfigError where the
    database has rows already, a server uses the folder, it is of another format, or its documents are encrypted.
    """
    docs = docs or folder / "docs"
    if not (folder / KEY_FILE).is_file():
        raise ConfigError(
            f"{folder} is no state directory of a server: it has no {KEY_FILE}. Check --state-dir, or run "
            "`paceline serve` on it once."
        )
    copied: dict[str, int] = {}
    with _unused(folder), postgres.explained():
        if common_key(folder, postgres).seed != server_key(folder).seed:
            raise ConfigError(f"{postgres.name.capitalize()} has another server's key already: copy into an empty one.")
        keys.Keys(postgres)
        devices.Registry(postgres)
        responses.EventStore(postgres).close()
        policy.tables(postgres).close()
        with psycopg.connect(postgres.url) as target:
            target.execute(f"SET search_path = {SCHEMA}")
            for store, version in STORES.items():
                file = folder / f"{store}.sqlite"
                if file.exists():
                    with closing(_opened(file, version)) as rows:
                        for table in _tables(rows):
                            columns = _columns(rows, table)
                            copied[table] = _copied(table, columns, _rows(rows, folder, table, columns), target)
            if (docs / documents.FILE).exists():
                with closing(_opened(docs / documents.FILE, documents.VERSION)) as rows:
                    copied |= _documents(rows, docs, postgres, target)
    return copied


def _documents(rows: SqliteConnection, docs: Path, postgres: Postgres, target: psycopg.Connection) -> dict[str, int]:
    """Copy documents and uploaded files likewise: vectors become pgvector's, bytes of files rows."""
    meta = dict(rows.execute("SELECT key, value FROM meta"))
    if "seal" in meta:
        raise ConfigError(
            f"The documents in {docs} are encrypted, and a database's are not: move that folder away, copy the rest, "
            "and add them again."
        )
    documents.Database(docs, embedder=meta, home=postgres).close()
    copied: dict[str, int] = {}
    for table in _tables(rows):
        columns = _columns(rows, table)
        found = _rows(rows, docs, table, columns)
        if table == "meta":  # which the tables were made with
            target.execute("DELETE FROM meta")
        elif table == "chunks":
            place, dimensions = columns.index("embedding"), int(meta["dimensions"])
            found = ((*row[:place], written(unpacked([row[place]], dimensions)[0]), *row[place + 1 :]) for row in found)
        copied[table] = _copied(table, columns, found, target)
    ids = [file for (file,) in rows.execute("SELECT id FROM files ORDER BY seq")]
    copied["file_parts"] = _copied("file_parts", ["file", "part", "bytes"], _parts(docs / FOLDER, ids), target)
    return copied


def _parts(folder: Path, ids: list[str]) -> Iterator[tuple[str, int, bytes]]:
    for file in ids:
        with (folder / stored_name(file, sealed=False)).open("rb") as content:
            yield from ((file, part, piece) for part, piece in enumerate(iter(lambda: content.read(STEP), b"")))


def _columns(rows: SqliteConnection, table: str) -> list[str]:
    return [column for _, column, *_ in rows.execute(f"PRAGMA table_info({table})")]


def _copied(table: str, columns: list[str], found: Iterator[tuple[Any, ...]], target: psycopg.Connection) -> int:
    """Copy one table in the caller's transaction."""
    name = sql.Identifier(table)
    target.execute(sql.SQL("LOCK TABLE {} IN EXCLUSIVE MODE").format(name))
    if target.execute(sql.SQL("SELECT 1 FROM {} LIMIT 1").format(name)).fetchone():
        raise ConfigError(f"The database has rows in {table} already: copy into an empty one.")
    count = 0
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(name, sql.SQL(", ").join(map(sql.Identifier, columns)))
    with target.cursor().copy(statement) as out:
        for row in found:
            out.write_row(row)
            count += 1
    (kept,) = target.execute(sql.SQL("SELECT count(*) FROM {}").format(name)).fetchone() or (None,)
    if kept != count:
        raise StorageError(f"Of {count} rows of {table} {kept} are in the database: nothing is copied.")
    for (column,) in target.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s AND "
        "is_identity = 'YES'",
        (SCHEMA, table),
    ).fetchall():
        target.execute(
            sql.SQL("SELECT setval(pg_get_serial_sequence(%s, %s), max({})) FROM {} HAVING count(*) > 0").format(
                sql.Identifier(column), name
            ),
            (table, column),
        )
    return count


def _rows(rows: SqliteConnection, folder: Path, table: str, columns: list[str]) -> Iterator[tuple[Any, ...]]:
    """Rows as the database is to hold them: what is encrypted in the file is opened."""
    is_sealed = "response_keys" in _tables(rows) and rows.execute("SELECT 1 FROM response_keys LIMIT 1").fetchone()
    if is_sealed and table == "response_keys":
        return
    if not is_sealed or table not in ("responses", "events"):
        found = rows.execute(f"SELECT {', '.join(columns)} FROM {table}")
        while part := found.fetchmany(ROWS):
            yield from part
        return
    place = SqliteFile(folder / responses.FILE, "a token log")
    opened = responses.SealedRows(rows, open_answers_seal(folder, encrypt=False), place)
    for row in rows.execute(f"SELECT id, {', '.join(columns)} FROM responses" if table == "responses" else _IDS):
        if table == "events":
            yield from ((row[0], *event) for event in opened.read(row[0], -1, -1))
        elif (record := opened.find(row[0])) is not None:
            yield tuple({**dict(zip(columns, row[1:], strict=True)), "request": record.request}.values())


_IDS: Final = "SELECT id FROM responses"


def _tables(rows: SqliteConnection) -> list[str]:
    """In the order in which they were made: owners of rows come first."""
    found = rows.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
    )
    return [name for (name,) in found]


def _opened(file: Path, version: int) -> SqliteConnection:
    """A connection that changes nothing, nor makes a file beside it."""
    how = "mode=ro" if Path(f"{file}-wal").exists() else "immutable=1"
    rows = sqlite3.connect(
        f"file:{quote(str(file.resolve()))}?{how}", uri=True, isolation_level=None, factory=SqliteConnection
    )
    if rows.version() != version:
        rows.close()
        raise ConfigError(
            f"{file} is of another release: start this one on it once with `paceline serve`, and stop it."
        )
    return rows


@contextmanager
def _unused(folder: Path) -> Iterator[None]:
    """Keep servers from using the folder meanwhile. Raises ConfigError where one does."""
    file = (folder / responses.FILE).with_suffix(".lock")
    if not file.exists():
        yield
        return
    descriptor = os.open(file, os.O_RDWR)
    try:
        if not lock(descriptor, alone=True):
            raise ConfigError(f"A server uses {folder}: stop it first.")
        yield
    finally:
        os.close(descriptor)


def look(url: str) -> Found:
    """Say whether a database answers, its version, clock and pgvector, and how many servers are alive."""
    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=3) as asked:
            before = time.time()
            ((clock, version, connections, vector, is_made),) = asked.execute(_LOOK).fetchall()
            apart = clock - (before + time.time()) / 2
            ((alive,),) = asked.execute(_ALIVE).fetchall() if is_made else [(0,)]
    except psycopg.Error as error:
        return "fail", f"the database cannot be used: {error}"
    text = (
        f"PostgreSQL {version}, {f'pgvector {vector}' if vector else 'no pgvector'}, clock {1e3 * apart:+.0f} ms, "
        f"{alive} server{'' if alive == 1 else 's'} alive, connections for {connections // (MAX_CONNECTIONS + 1)}"
    )
    if vector is None:
        return "warn", f"{text}: install pgvector there, which documents need"
    if abs(apart) > SKEW_S:
        return "warn", f"{text}: set the clocks of both machines by NTP, since keys and codes end by them"
    return "ok", text


_LOOK: Final = """SELECT extract(epoch FROM clock_timestamp())::float8, current_setting('server_version'),
    current_setting('max_connections')::int,
    (SELECT default_version FROM pg_available_extensions WHERE name = 'vector'),
    to_regclass('paceline.servers') IS NOT NULL"""
_ALIVE: Final = "SELECT count(*) FROM paceline.servers WHERE until > clock_timestamp()"
