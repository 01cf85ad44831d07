"""Rows of the event log in SQLite: the schema and all statements. Synchronous; one thread at a time.

The primary key of an event is (response, sequence), so no number is written twice; no statement changes an event. (Only
encryption at start-up does.) `synchronous = NORMAL`: a commit survives the death of the process; a power cut may lose
the last commits.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline import sqlite
from paceline.api.responses import conversation_rows as event_sealing
from paceline.api.responses.conversation_rows import ConversationRows, RowSealing, Turn
from paceline.errors import ConfigError
from paceline.sealing import PLAIN, DamagedError, Seal

FILE = "responses.sqlite"
VERSION = 1  # PRAGMA user_version
ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})  # types of last events
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
    event_sealing.SCHEMA,
    # Covering indexes for sweeps: in the table `ended` and `bytes` come after the request, so that reading them there
    # reads the whole file. (SQLite needs `ended` among the columns even of an index that is limited by it.)
    "CREATE INDEX responses_ended ON responses (created, id, owner, bytes, ended) WHERE ended",
    "CREATE INDEX responses_unfinished ON responses (created, id, ended) WHERE NOT ended",
)


class EventRow(NamedTuple):
    """One event."""

    sequence: int  # from 0
    type: str
    data: bytes  # JSON, as it is sent


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response without its events."""

    id: str
    owner: str
    created: float  # s since 1970
    previous: str | None
    request: bytes  # JSON


class _Output(msgspec.Struct):
    output: msgspec.Raw = msgspec.Raw(b"")


class _Last(msgspec.Struct):
    """The part of an event that `EventStore.output` reads."""

    response: _Output = msgspec.field(default_factory=_Output)


StoredEvent = tuple[str, int, str, bytes]  # response, sequence, type, data

_decode_last = msgspec.json.Decoder(_Last).decode
_log = logging.getLogger("paceline.api")


def fair_share(held: Iterable[int], room: int) -> int:
    """Max-min fair share: the highest cap per owner with which all owners together fit into `room`."""
    sizes = sorted(held)
    for others, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        if size * others > room:
            return max(room, 0) // others
        room -= size
    return sizes[-1] if sizes else 0


class EventStore:
    """One SQLite connection, and the lock file that shows other processes that the log is in use."""

    def __init__(self, directory: Path | None, seal: Seal = PLAIN) -> None:
        """`directory` None: in memory. `seal`: of what is written from now on; what is there in plain text is encrypted
        now, unless another process has the log open. Raises ConfigError when the file cannot be used."""
        self._file = None if directory is None else directory / FILE
        self._lock: int | None = None
        self.alone = True  # no other process has the file open: an unfinished response was interrupted
        try:
            with self._readable_errors():
                self._connection = self._open()
                try:
                    self._rows = RowSealing(self._connection, seal)
                    self.conversations = ConversationRows(self._connection, self._rows, self._readable_errors)
                    if seal.is_on and self.alone:
                        self._encrypt()
                except BaseException:
                    self._connection.close()
                    raise
        except OSError as error:
            self._unlock()
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
            advice = "remove the file: it holds past responses only"
            sqlite.prepare(connection, self._file, VERSION, _SCHEMA, advice)
        except BaseException:
            connection.close()
            raise
        return connection

    def _encrypt(self) -> None:
        """Encrypt what is stored in plain text. SQLite overwrites what it replaces (`secure_delete`)."""
        with sqlite.transaction(self._connection):
            count = self._rows.encrypt_all()
        sqlite.checkpoint(self._connection)  # also after a kill between the two
        if count:
            _log.info("%d stored responses are encrypted now", count)

    def _hold(self, file: Path) -> None:
        """Find out whether another process has the log open, and hold the lock that shows it this one."""
        self._lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.alone = False
            _log.warning(
                "Another program serves from %s too: the two share responses, documents and keys. If that was not "
                "meant, stop one, or give this one a --state-dir of its own.",
                file.parent,
            )
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def allow_others(self) -> None:
        """Let other processes open the log. Called after `repair`."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        self._connection.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _readable_errors(self) -> AbstractContextManager[None]:
        """Turn SQLite's errors into ConfigErrors that name the file."""
        return nullcontext() if self._file is None else sqlite.speaking(self._file, "a token log")

    # ---- writing ----------------------------------------------------------------------------------------------------
    def write(
        self,
        begun: Sequence[ResponseRecord],
        events: Sequence[StoredEvent],
        ended: Sequence[tuple[str, int]],
        turns: Sequence[Turn] = (),
    ) -> None:
        """Write everything in one transaction. `ended`: responses with the bytes of their events."""
        with self._readable_errors(), sqlite.transaction(self._connection):
            for one in begun:
                self._begin(one)
            sealed = self._rows.seal_events(events)
            for start in range(0, len(sealed), ROWS_PER_STATEMENT):
                part = sealed[start : start + ROWS_PER_STATEMENT]
                values = ",".join(["(?,?,?,?)"] * len(part))
                parameters = [value for event in part for value in event]
                self._connection.execute(f"INSERT INTO events VALUES {values}", parameters)
            if ended:
                self._connection.executemany(
                    "UPDATE responses SET ended = 1, bytes = ? + length(request) WHERE id = ?",
                    [(size, response) for response, size in ended],
                )
            for turn in turns:
                self.conversations.add(turn.conversation, turn.items, time.time())

    def _begin(self, one: ResponseRecord) -> None:
        key, box = self._rows.make_key(one.id)
        self._connection.execute(
            "INSERT INTO responses (id, owner, created, previous, request) VALUES (?, ?, ?, ?, ?)",
            (one.id, one.owner, one.created, one.previous, self._rows.seal_request(box, one.request)),
        )
        self._rows.keep(one.id, key)

    def delete(self, response: str) -> None:
        """Delete a response with its events and its key, and overwrite their pages in the file."""
        with self._readable_errors():
            self._connection.execute("DELETE FROM responses WHERE id = ?", (response,))
            sqlite.checkpoint(self._connection)
        self._rows.forget()

    def sweep(self, *, before: float, abandoned: Sequence[str] = ()) -> None:
        """Delete the responses that ended and are older than `before`, and the `abandoned` ones."""
        with self._readable_errors():
            with sqlite.transaction(self._connection):
                count = self._connection.execute(
                    "DELETE FROM responses WHERE ended AND created < ?", (before,)
                ).rowcount
                count += self._delete(abandoned)
            if count:
                sqlite.checkpoint(self._connection)
                self._rows.forget()

    def shrink(self, max_bytes: int) -> None:
        """Delete the oldest responses of the owners above the fair share, until the rest fits into `max_bytes`.

        An owner below an equal share loses nothing to owners that hold more.
        """
        with self._readable_errors():
            with sqlite.transaction(self._connection):
                held = dict(
                    self._connection.execute("SELECT owner, sum(bytes) FROM responses WHERE ended GROUP BY owner")
                )
                self._delete(self._oldest(held, fair_share(held.values(), max_bytes)))
            sqlite.checkpoint(self._connection)
            self._rows.forget()

    def _oldest(self, held: dict[str, int], cap: int) -> list[str]:
        """The oldest responses of each owner whose deletion leaves it at most `cap` bytes."""
        excess = {owner: size - cap for owner, size in held.items() if size > cap}
        oldest: list[str] = []
        rows = self._connection.execute("SELECT id, owner, bytes FROM responses WHERE ended ORDER BY created, id")
        for response, owner, size in rows:
            if not excess:
                break
            if owner in excess:
                oldest.append(response)
                excess[owner] -= size
                if excess[owner] <= 0:
                    del excess[owner]
        return oldest

    def _delete(self, responses: Sequence[str]) -> int:
        self._connection.executemany("DELETE FROM responses WHERE id = ?", [(response,) for response in responses])
        return len(responses)

    # ---- reading ----------------------------------------------------------------------------------------------------
    def total(self) -> int:
        """Bytes of the responses that have ended."""
        with self._readable_errors():
            total: int = self._connection.execute(
                "SELECT coalesce(sum(bytes), 0) FROM responses WHERE ended"
            ).fetchone()[0]
        return total

    def find(self, response: str) -> ResponseRecord | None:
        with self._readable_errors():
            found = self._connection.execute(
                "SELECT id, owner, created, previous, request FROM responses WHERE id = ?", (response,)
            ).fetchone()
            if found is None:
                return None
            record = ResponseRecord(*found)
            return replace(record, request=self._rows.open_request(self._rows.box(response), record.request))

    def read(self, response: str, after: int, limit: int) -> list[EventRow]:
        """The first `limit` events whose sequence number is above `after`."""
        with self._readable_errors():
            rows = self._connection.execute(
                "SELECT sequence, type, data FROM events WHERE response = ? AND sequence > ? ORDER BY sequence LIMIT ?",
                (response, after, limit),
            )
            return self._opened(response, rows)

    def _opened(self, response: str, rows: Iterable[tuple[int, str, bytes]]) -> list[EventRow]:
        """Raises DamagedError."""
        box = self._rows.box(response)
        return [EventRow(sequence, kind, self._rows.open_event(box, sequence, data)) for sequence, kind, data in rows]

    def last(self, response: str) -> EventRow | None:
        with self._readable_errors():
            rows = self._connection.execute(
                "SELECT sequence, type, data FROM events WHERE response = ? ORDER BY sequence DESC LIMIT 1", (response,)
            )
            opened = self._opened(response, rows)
        return opened[0] if opened else None

    def output(self, response: str) -> tuple[str, str] | None:
        """The type of the last event, and the JSON of the output if that event holds the response, else "".

        Of the rest of the event, which may be many times as long, no objects are made.
        """
        row = self.last(response)
        return None if row is None else (row.type, bytes(_decode_last(row.data).response.output).decode())

    def is_unfinished(self, response: str) -> bool:
        with self._readable_errors():
            row = self._connection.execute("SELECT 1 FROM responses WHERE id = ? AND NOT ended", (response,)).fetchone()
        return row is not None

    def unfinished(self, before: float = math.inf) -> list[str]:
        """Responses without an end that were begun before that time, in s since 1970."""
        with self._readable_errors():
            rows = self._connection.execute("SELECT id FROM responses WHERE NOT ended AND created < ?", (before,))
            return [row[0] for row in rows]

    def repair(self, close: Callable[[list[EventRow]], list[EventRow]]) -> int:
        """End every unfinished response with the rows that `close` makes from its rows. Returns their number.

        Does nothing while another process has the log open: it may still be writing them.
        """
        if not self.alone:
            return 0
        interrupted = self.unfinished()
        for response in interrupted:
            try:
                rows = self.read(response, -1, -1)
            except DamagedError as error:
                _log.warning("a stored response is left as it is: %s", error)
                rows = []
            more = close(rows) if rows else []
            size = sum(len(row.data) for row in (*rows, *more))
            self.write([], [(response, *row) for row in more], [(response, size)])
        return len(interrupted)
