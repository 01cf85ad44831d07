"""The rows of the token log: SQLite's schema and its statements. Synchronous; one thread at a time.

An event is keyed (response, sequence): the primary key refuses the same number twice, and nothing here changes an event
once it is written. `synchronous = NORMAL`: what was committed outlives the process, whatever kills it; a power cut may
take the last commits.
"""

from __future__ import annotations

import fcntl
import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline import sqlite
from paceline.errors import ConfigError

FILE = "responses.sqlite"
VERSION = 1  # PRAGMA user_version
ROWS_PER_STATEMENT = 500  # one statement is one turn at the interpreter's lock; SQLite takes 32,766 parameters
_SCHEMA = (
    """CREATE TABLE responses (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,  -- the key that made it
        created REAL NOT NULL,  -- s since 1970
        previous TEXT,  -- the response it continues
        request BLOB NOT NULL,  -- JSON
        ended INTEGER NOT NULL DEFAULT 0,
        bytes INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID""",
    """CREATE TABLE events (
        response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
        sequence INTEGER NOT NULL,
        type TEXT NOT NULL,
        data BLOB NOT NULL,  -- JSON
        PRIMARY KEY (response, sequence)) WITHOUT ROWID""",
)
# What a sweep asks is answered from these alone: in the table `ended` and `bytes` lie behind the request, and reading
# them is reading the whole file. (SQLite takes `ended` from an index that holds it, whatever the index is limited to.)
# Files of before have another index, which a version of before does not miss.
_INDEXES = (
    "DROP INDEX IF EXISTS responses_by_age",
    "CREATE INDEX IF NOT EXISTS responses_ended ON responses (created, id, owner, bytes, ended) WHERE ended",
    "CREATE INDEX IF NOT EXISTS responses_unfinished ON responses (created, id, ended) WHERE NOT ended",
)


class Row(NamedTuple):
    """One event."""

    sequence: int  # from 0
    type: str
    data: bytes  # JSON, as it is sent


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a response besides its events."""

    id: str
    owner: str
    created: float  # s since 1970
    previous: str | None
    request: bytes  # JSON


Event = tuple[str, int, str, bytes]  # response, sequence, type, data


def share(held: Iterable[int], room: int) -> int:
    """The most that everybody may hold so that all of it has room: who holds less leaves the rest to the others."""
    sizes = sorted(held)
    for others, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        if size * others > room:
            return max(room, 0) // others
        room -= size
    return sizes[-1] if sizes else 0


class EventStore:
    """One connection."""

    def __init__(self, directory: Path | None) -> None:
        """None: in memory, gone with the process. Raises ConfigError when the file cannot be used."""
        self._file = None if directory is None else directory / FILE
        self._lock: int | None = None
        self.alone = True  # no other process has it open, so that what is unfinished was cut
        try:
            with self.speaking():
                self._connection = self._open()
        except OSError as error:
            raise ConfigError(f"The state folder {directory} cannot be used: {error}. Choose another.") from error
        except BaseException:
            self._unlock()
            raise

    def _open(self) -> sqlite3.Connection:
        if self._file is None:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA foreign_keys = ON")
        else:
            connection = sqlite.connect(self._file)
            self._hold(self._file.with_suffix(".lock"))
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            with sqlite.transaction(connection):
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                if version == 0:
                    for statement in _SCHEMA:
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {VERSION}")
                elif version != VERSION:
                    raise ConfigError(
                        f"{self._file} was written by another version of Paceline (format {version}, this one reads "
                        f"{VERSION}). Use that version, or remove the file: it holds past responses only."
                    )
                for statement in _INDEXES:
                    connection.execute(statement)
        except BaseException:
            connection.close()
            raise
        return connection

    def _hold(self, file: Path) -> None:
        """Learn whether we are alone, and let the next one learn that we are here."""
        self._lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.alone = False
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def share(self) -> None:
        """What was cut has been repaired: others may open the log too."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        self._connection.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def speaking(self) -> AbstractContextManager[None]:
        return nullcontext() if self._file is None else sqlite.speaking(self._file, "a token log")

    # ---- writing ----------------------------------------------------------------------------------------------------
    def write(self, begun: Sequence[Header], events: Sequence[Event], ended: Sequence[tuple[str, int]]) -> None:
        """All of it in one transaction. `ended`: responses with the bytes of their events."""
        with self.speaking(), sqlite.transaction(self._connection):
            if begun:
                self._connection.executemany(
                    "INSERT INTO responses (id, owner, created, previous, request) VALUES (?, ?, ?, ?, ?)",
                    [(one.id, one.owner, one.created, one.previous, one.request) for one in begun],
                )
            for start in range(0, len(events), ROWS_PER_STATEMENT):
                part = events[start : start + ROWS_PER_STATEMENT]
                values = ",".join(["(?,?,?,?)"] * len(part))
                parameters = [value for event in part for value in event]
                self._connection.execute(f"INSERT INTO events VALUES {values}", parameters)
            if ended:
                self._connection.executemany(
                    "UPDATE responses SET ended = 1, bytes = ? + length(request) WHERE id = ?",
                    [(size, response) for response, size in ended],
                )

    def delete(self, response: str) -> None:
        """With its events, from the file too."""
        with self.speaking():
            self._connection.execute("DELETE FROM responses WHERE id = ?", (response,))
            sqlite.checkpoint(self._connection)

    def sweep(self, *, before: float, abandoned: Sequence[str] = ()) -> None:
        """Delete what ended and is older than `before`, and those that are `abandoned`."""
        with self.speaking():
            with sqlite.transaction(self._connection):
                count = self._connection.execute(
                    "DELETE FROM responses WHERE ended AND created < ?", (before,)
                ).rowcount
                count += self._delete(abandoned)
            if count:
                sqlite.checkpoint(self._connection)

    def shrink(self, max_bytes: int) -> None:
        """Delete the oldest of the owners who hold most, until `max_bytes` hold the rest: who holds less than an equal
        share loses nothing to those who hold more."""
        with self.speaking():
            with sqlite.transaction(self._connection):
                held = dict(
                    self._connection.execute("SELECT owner, sum(bytes) FROM responses WHERE ended GROUP BY owner")
                )
                self._delete(self._oldest(held, share(held.values(), max_bytes)))
            sqlite.checkpoint(self._connection)

    def _oldest(self, held: dict[str, int], most: int) -> list[str]:
        """What each owner gives up so as to hold `most` bytes at most."""
        excess = {owner: size - most for owner, size in held.items() if size > most}
        gone: list[str] = []
        rows = self._connection.execute("SELECT id, owner, bytes FROM responses WHERE ended ORDER BY created, id")
        for response, owner, size in rows:
            if not excess:
                break
            if owner in excess:
                gone.append(response)
                excess[owner] -= size
                if excess[owner] <= 0:
                    del excess[owner]
        return gone

    def _delete(self, responses: Sequence[str]) -> int:
        self._connection.executemany("DELETE FROM responses WHERE id = ?", [(response,) for response in responses])
        return len(responses)

    # ---- reading ----------------------------------------------------------------------------------------------------
    def total(self) -> int:
        """Bytes of the responses that ended."""
        with self.speaking():
            total: int = self._connection.execute(
                "SELECT coalesce(sum(bytes), 0) FROM responses WHERE ended"
            ).fetchone()[0]
        return total

    def find(self, response: str) -> Header | None:
        with self.speaking():
            found = self._connection.execute(
                "SELECT id, owner, created, previous, request FROM responses WHERE id = ?", (response,)
            ).fetchone()
        return None if found is None else Header(*found)

    def read(self, response: str, after: int, limit: int) -> list[Row]:
        """The first `limit` events whose sequence number is above `after`."""
        with self.speaking():
            rows = self._connection.execute(
                "SELECT sequence, type, data FROM events WHERE response = ? AND sequence > ? ORDER BY sequence LIMIT ?",
                (response, after, limit),
            )
            return [Row(*row) for row in rows]

    def last(self, response: str) -> Row | None:
        with self.speaking():
            row = self._connection.execute(
                "SELECT sequence, type, data FROM events WHERE response = ? ORDER BY sequence DESC LIMIT 1", (response,)
            ).fetchone()
        return None if row is None else Row(*row)

    def output(self, response: str) -> tuple[str, str] | None:
        """The type of its last event, and the JSON of the output in it, if that holds the response.

        The rest of it, which may be many times as long, is not read into Python.
        """
        with self.speaking():
            row = self._connection.execute(
                """SELECT type, coalesce(json_extract(CAST(data AS TEXT), '$.response.output'), '') FROM events
                WHERE response = ? ORDER BY sequence DESC LIMIT 1""",
                (response,),
            ).fetchone()
        return None if row is None else (row[0], row[1])

    def is_unfinished(self, response: str) -> bool:
        with self.speaking():
            row = self._connection.execute("SELECT 1 FROM responses WHERE id = ? AND NOT ended", (response,)).fetchone()
        return row is not None

    def unfinished(self, before: float = math.inf) -> list[str]:
        """Those that were begun before that time."""
        with self.speaking():
            rows = self._connection.execute("SELECT id FROM responses WHERE NOT ended AND created < ?", (before,))
            return [row[0] for row in rows]

    def repair(self, close: Callable[[list[Row]], list[Row]]) -> int:
        """End what a process left unfinished with the rows that `close` makes of those there are. How many there were.

        Does nothing where another process has the log open: it may still be writing them.
        """
        if not self.alone:
            return 0
        cut = self.unfinished()
        for response in cut:
            rows = self.read(response, -1, -1)
            more = close(rows) if rows else []
            size = sum(len(row.data) for row in (*rows, *more))
            self.write([], [(response, *row) for row in more], [(response, size)])
        return len(cut)
