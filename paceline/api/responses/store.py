"""Responses and conversations in a database: the schema and all statements. Synchronous; one thread at a time.

The primary key of an event is (response, sequence), so no number is written twice; no statement changes an event of a
response. (Only encryption at start-up does.) `synchronous = NORMAL`: a commit survives the death of the process; a
power cut may lose the last commits.

A conversation is a row among the responses, whose request is its description, and its items lie among the events. So
it has what responses have: an owner, encryption, retention, a share of the room. It counts as ended, and as made when
it last changed.

Each response has a data key of its own in the table `response_keys`, which goes with it; one without is in plain text.
Requests and events are sealed; ids, owners, times, sizes and types of events are not.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from paceline import sql
from paceline.core.fair import fair_share
from paceline.errors import ConfigError, RequestError, StorageError
from paceline.rag.store.files import Paging
from paceline.sealing import PLAIN, PLAIN_BOX, Box, DamagedError, Seal
from paceline.sql import Home, SqlConnection, SqliteFile, StorePlace, place_in
from paceline.system import lock

if TYPE_CHECKING:
    from paceline.fleet import Fleet

STORE = "responses"
_KIND = "a token log"
FILE = f"{STORE}.sqlite"
VERSION = 2
ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})  # types of last events
MAX_CONVERSATION = 4 << 20  # bytes of the items of one, the latest: as many as a request may continue
ROWS_PER_STATEMENT = 500  # one statement is one turn at the interpreter's lock; SQLite takes 32,766 parameters
RETRY_S = 0.2
PATIENCE_S = 30.0  # for a database that cannot be reached, while answers wait
TAKEN_AT_ONCE = 16  # responses of servers that are gone, so that the others get their share
_ITEM = "conversation.item"  # type of an event
ALL = 2**62  # rows
_REQUEST = "request"  # place of a sealed value
CONVERSATION_PREFIX = "conv_"  # of ids: responses have another
# Spelled out: with parameters neither database takes the index for it.
_LISTED = "ended AND id >= 'conv_' AND id < 'conv`'"
_SCHEMA = (
    """CREATE TABLE responses (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,  -- the key that made it
        created REAL NOT NULL,  -- s since 1970
        previous TEXT,  -- the response it continues
        request BLOB NOT NULL,  -- JSON
        ended BOOLEAN NOT NULL DEFAULT false,
        bytes INTEGER NOT NULL DEFAULT 0,
        holder TEXT NOT NULL DEFAULT '',  -- the server that writes it; empty where one is alone with its file
        epoch INTEGER NOT NULL DEFAULT 1) WITHOUT ROWID""",
    """CREATE TABLE events (
        response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
        sequence INTEGER NOT NULL,
        type TEXT NOT NULL,
        data BLOB NOT NULL,  -- JSON
        PRIMARY KEY (response, sequence)) WITHOUT ROWID""",
    # A table of its own: in `responses` the key would come after the request, which may have many pages.
    """CREATE TABLE response_keys (
        response TEXT PRIMARY KEY REFERENCES responses (id) ON DELETE CASCADE,
        key BLOB NOT NULL) WITHOUT ROWID""",
    # Covering indexes for sweeps: in the table `ended` and `bytes` come after the request, so that reading them there
    # reads the whole file. (SQLite needs `ended` among the columns even of an index that is limited by it.)
    "CREATE INDEX responses_ended ON responses (created, id, owner, bytes, ended) WHERE ended",
    "CREATE INDEX responses_unfinished ON responses (created, id, ended) WHERE NOT ended",
    f"CREATE INDEX responses_listed ON responses (owner, created, id, ended) WHERE {_LISTED}",
)


class EventRow(NamedTuple):
    sequence: int  # from 0
    type: str
    data: bytes  # JSON, as it is sent


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response without its events, or a conversation without its items."""

    id: str
    owner: str
    created: float  # s since 1970
    previous: str | None
    request: bytes  # JSON


@dataclass(frozen=True, slots=True)
class Turn:
    """Items that a response adds to its conversation, in the transaction that ends it."""

    conversation: str
    items: tuple[bytes, ...]  # JSON


class _Output(msgspec.Struct):
    output: msgspec.Raw = msgspec.Raw(b"")


class _Last(msgspec.Struct):
    """The part of an event that `EventStore.output` reads."""

    response: _Output = msgspec.field(default_factory=_Output)


StoredEvent = tuple[str, int, str, bytes]  # response, sequence, type, data


@dataclass(slots=True)
class LogBatch:
    """Changes that are written in one transaction."""

    begun: list[ResponseRecord] = field(default_factory=list)
    events: list[StoredEvent] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)  # responses with the bytes of their events
    turns: dict[str, Turn] = field(default_factory=dict)  # of conversations, by the response that ends one
    epochs: dict[str, int] = field(default_factory=dict)  # of every response, where several servers write


_decode_last = msgspec.json.Decoder(_Last).decode
# By one round trip, of which few rows cost most; under a lock, so that meanwhile nobody takes a response over.
_APPEND = """WITH held AS (SELECT id, epoch FROM responses WHERE id = ANY(?) FOR SHARE), added AS (
    INSERT INTO events SELECT response, sequence, type, data
    FROM unnest(?::text[], ?::bigint[], ?::text[], ?::bytea[], ?::bigint[]) AS told (response, sequence, type, data, at)
    JOIN held ON id = response AND epoch = at ON CONFLICT DO NOTHING)
    SELECT id, epoch FROM held"""
_GONE = "SELECT value FROM json_each(?) WHERE value NOT IN (SELECT id FROM responses)"
_LEFT = """SELECT id FROM responses WHERE NOT ended
    AND (holder NOT IN (SELECT id FROM servers WHERE until > clock_timestamp()) OR holder = ? AND id <> ALL(?))
    ORDER BY created LIMIT ? FOR UPDATE SKIP LOCKED"""
_TAKE_OVER = "UPDATE responses SET holder = ?, epoch = epoch + 1 WHERE id = ANY(?) RETURNING id, epoch"
_BEGIN_AGAIN = "UPDATE responses SET epoch = epoch + 1 WHERE id = ? AND epoch <= ?"
MAX_AGAIN = 3  # times that a response is begun again: more often it may be what ends the program
_HAND_OVER = "UPDATE responses SET holder = ?, epoch = epoch + 1 WHERE id = ? AND epoch = ? AND NOT ended"
_DROP = """DELETE FROM events WHERE response = ? AND sequence <= (SELECT max(sequence) FROM (SELECT sequence,
    sum(length(data)) OVER (ORDER BY sequence DESC) AS size FROM events WHERE response = ?) AS sizes WHERE size > ?)"""
_SIZES = """SELECT bytes, length(request) + (SELECT coalesce(sum(length(data)), 0) FROM events WHERE response = id)
    FROM responses WHERE id = ?"""
_RELEASE = "UPDATE responses SET holder = '' WHERE holder = ? AND NOT ended AND id <> ALL(?)"
_log = logging.getLogger("paceline.api")


def _place(sequence: int) -> str:
    return f"event {sequence}"


class SealedRows:
    """Rows of responses and their events over one connection: sealed when they are written, opened when read."""

    def __init__(self, connection: SqlConnection, seal: Seal, place: StorePlace) -> None:
        self.connection = connection
        self.seal = seal
        self.readable_errors = place.explained

    @contextmanager
    def changing(self) -> Iterator[None]:
        with self.readable_errors(), sql.transaction(self.connection, "write"):
            yield

    def all(self, statement: str, *parameters: object) -> list[Any]:
        with self.readable_errors():
            return self.connection.execute(statement, parameters).fetchall()

    def begin(self, record: ResponseRecord, *, ended: bool = False, holder: str = "") -> None:
        """Insert a response under a key of its own, in the caller's transaction, as the next two do. Of a holder's that
        is there already, when a commit was not known to have succeeded, nothing is changed."""
        key, box = self.seal.make_key(record.id)
        request = box.seal(record.request, _REQUEST)
        self.connection.execute(
            "INSERT INTO responses (id, owner, created, previous, request, ended, holder) VALUES (?, ?, ?, ?, ?, ?, ?)"
            f"{' ON CONFLICT DO NOTHING' if holder else ''}",
            (record.id, record.owner, record.created, record.previous, request, ended, holder),
        )
        self._keep(record.id, key)

    def replace_request(self, response: str, request: bytes) -> None:
        sealed = self.box(response).seal(request, _REQUEST)
        self.connection.execute("UPDATE responses SET request = ? WHERE id = ?", (sealed, response))

    def add(self, events: Sequence[StoredEvent]) -> None:
        boxes = self._boxes({event[0] for event in events}) if events else {}
        for start in range(0, len(events), ROWS_PER_STATEMENT):
            part = events[start : start + ROWS_PER_STATEMENT]
            values = ",".join(["(?,?,?,?)"] * len(part))
            sealed = ((one, number, kind, boxes[one].seal(data, _place(number))) for one, number, kind, data in part)
            self.connection.execute(f"INSERT INTO events VALUES {values}", [value for row in sealed for value in row])

    def find(self, response: str) -> ResponseRecord | None:
        """Raises DamagedError, as the next two."""
        with self.readable_errors():
            found = self.connection.execute(
                "SELECT id, owner, created, previous, request FROM responses WHERE id = ?", (response,)
            ).fetchone()
            if found is None:
                return None
            record = ResponseRecord(*found)
            return replace(record, request=self.box(response).open(record.request, _REQUEST))

    def read(self, response: str, after: int, limit: int, order: str = "ASC") -> list[EventRow]:
        """The first `limit` events whose sequence number is above `after`."""
        with self.readable_errors():
            rows = self.connection.execute(
                "SELECT sequence, type, data FROM events WHERE response = ? AND sequence > ? "
                f"ORDER BY sequence {order} LIMIT ?",
                (response, after, limit if limit >= 0 else ALL),
            )
            box = self.box(response)
            return [EventRow(sequence, kind, box.open(data, _place(sequence))) for sequence, kind, data in rows]

    def box(self, response: str) -> Box:
        """Raises DamagedError for a key that does not fit, ConfigError where another program has begun to encrypt."""
        return self._boxes([response])[response]

    def _boxes(self, responses: Collection[str]) -> dict[str, Box]:
        """By one statement: in a shared database each takes as long as many rows do."""
        boxes = dict.fromkeys(responses, PLAIN_BOX)
        among = f"response IN ({', '.join('?' * len(responses))})"
        for response, key in self.connection.execute(f"SELECT * FROM response_keys WHERE {among}", [*responses]):
            if not self.seal.is_on:
                raise ConfigError("This response was encrypted by another program meanwhile: start this one again.")
            boxes[response] = self.seal.box(key, response)
        return boxes

    def encrypt_all(self) -> int:
        """Encrypt every response in plain text, in the caller's transaction. Returns their number."""
        plain = [
            response
            for which in ("ended", "NOT ended")  # each has an index with the ids, so that no request is read
            for (response,) in self.connection.execute(
                f"SELECT id FROM responses WHERE {which} AND id NOT IN (SELECT response FROM response_keys)"
            )
        ]
        for response in plain:
            key, box = self.seal.make_key(response)
            self._keep(response, key)
            (request,) = self.connection.execute("SELECT request FROM responses WHERE id = ?", (response,)).fetchone()
            self.replace_request(response, request)
            rows = self.connection.execute("SELECT sequence, data FROM events WHERE response = ?", (response,))
            self.connection.executemany(
                "UPDATE events SET data = ? WHERE response = ? AND sequence = ?",
                [(box.seal(data, _place(sequence)), response, sequence) for sequence, data in rows.fetchall()],
            )
        return len(plain)

    def _keep(self, response: str, key: bytes) -> None:
        if key:
            self.connection.execute("INSERT INTO response_keys VALUES (?, ?)", (response, key))


class ConversationRows:
    """Changes of conversations: each of these methods returns by how many bytes they have grown. And their list."""

    def __init__(self, rows: SealedRows) -> None:
        self._rows = rows

    def page(self, owner: str, since: float, asked: Paging) -> tuple[list[ResponseRecord], bool]:
        """An owner's that changed since then (s since 1970) by their last change, without their items, and whether
        there are more. One that is damaged is left out. Raises RequestError for a cursor that is not in the list."""
        found = f"SELECT created, id FROM responses WHERE {_LISTED} AND owner = ?"
        found += " AND (created, id) > (?, ?) AND (created, id) < (?, ?)"
        low, high = (since, ""), (math.inf, "")
        for name, cursor, later in (("after", asked.after, True), ("before", asked.before, False)):
            if cursor is None:
                continue
            at = self._rows.all(f"{found} AND id = ?", owner, *low, *high, cursor)
            if not at:
                raise RequestError(f"There is no item {cursor!r} in this list.", param=name)
            low, high = (at[0], high) if later == (asked.order == "asc") else (low, at[0])
        order = f"ORDER BY created {asked.order}, id {asked.order} LIMIT ?"
        rows = self._rows.all(f"{found} {order}", owner, *low, *high, asked.limit + 1)
        records = []
        for _, conversation in rows[: asked.limit]:
            try:
                record = self._rows.find(conversation)
            except DamagedError as error:
                _log.warning("a conversation is left out: %s", error)
                continue
            records += [record] if record is not None else []
        return records, len(rows) > asked.limit

    def create(self, record: ResponseRecord, items: Sequence[bytes]) -> int:
        with self._rows.changing():
            self._rows.begin(record, ended=True)
            return self.add(record.id, items, record.created)

    def describe(self, conversation: str, description: bytes, now: float) -> int:
        """now: s since 1970."""
        with self._rows.changing():
            self._rows.replace_request(conversation, description)
            return self._changed(conversation, now)

    def append(self, conversation: str, items: Sequence[bytes], now: float) -> int:
        with self._rows.changing():
            return self.add(conversation, items, now)

    def add(self, conversation: str, items: Sequence[bytes], now: float) -> int:
        """Add items in the caller's transaction, and drop the oldest beyond MAX_CONVERSATION. Nothing if it is gone."""
        execute = self._rows.connection.execute
        execute("UPDATE responses SET created = ? WHERE id = ?", (now, conversation))  # locks it
        last = "SELECT (SELECT max(sequence) FROM events WHERE response = id) FROM responses WHERE id = ?"
        found = execute(last, (conversation,)).fetchone()
        if found is None:
            return 0
        first = 0 if found[0] is None else found[0] + 1
        self._rows.add([(conversation, first + index, _ITEM, item) for index, item in enumerate(items)])
        execute(_DROP, (conversation, conversation, MAX_CONVERSATION))
        return self._changed(conversation, now)

    def remove(self, conversation: str, number: int, item: bytes, now: float) -> int:
        """Remove an item, and overwrite its page in the file. Nothing if it is gone: another may have its number."""
        with self._rows.readable_errors():
            with self._rows.changing():
                rows = self._rows.read(conversation, number - 1, 1)
                if [row.data for row in rows if row.sequence == number] != [item]:
                    return 0
                one = "DELETE FROM events WHERE response = ? AND sequence = ?"
                self._rows.connection.execute(one, (conversation, number))
                grown = self._changed(conversation, now)
            self._rows.connection.overwrite()
        return grown

    def _changed(self, conversation: str, now: float) -> int:
        """Bring its time and size up to date; 0 if it is gone meanwhile."""
        execute = self._rows.connection.execute
        sizes = execute(_SIZES, (conversation,)).fetchone()
        if sizes is None:
            return 0
        before, after = sizes
        execute("UPDATE responses SET created = ?, bytes = ? WHERE id = ?", (now, after, conversation))
        return int(after - before)


class EventStore:
    """One SQLite connection, and the lock file that shows other processes that the log is in use."""

    def __init__(self, state: Path | Home | None, seal: Seal = PLAIN) -> None:
        """`state`: a folder, or the database of several servers; None: in memory. `seal`: of what is written from now
        on; what is there in plain text is encrypted now, unless another process has the log open. Raises ConfigError
        when it cannot be used."""
        place = SqliteFile(None, _KIND) if state is None else place_in(state, STORE, _KIND)
        self.fleet: Fleet | None = None
        self._lock: int | None = None
        self.alone = True  # no other process has the file open: an unfinished response was interrupted
        self._is_left = False  # what is deleted could not be overwritten yet: a reader prevented it
        self.left: list[tuple[ResponseRecord, list[EventRow]]] = []  # that were interrupted, to be begun again
        try:
            with place.explained(), ExitStack() as undo:
                undo.callback(self._unlock)
                self._connection = place.connect()
                undo.callback(self._connection.close)
                if isinstance(place, SqliteFile):
                    if place.path is not None:
                        self._hold(place.path.with_suffix(".lock"))
                    self._connection.execute("PRAGMA synchronous = NORMAL")
                elif not isinstance(state, Path) and state is not None:
                    self.fleet = state.fleet
                self._place = place
                advice = "remove the file: it holds past responses only"
                sql.prepare(self._connection, place.name, VERSION, _SCHEMA, advice)
                self._rows = SealedRows(self._connection, seal, place)
                self.conversations = ConversationRows(self._rows)
                self.find, self.read = self._rows.find, self._rows.read
                if seal.is_on and self.alone:
                    self._encrypt()
                undo.pop_all()
        except OSError as error:
            raise ConfigError(f"The state folder {state} cannot be used: {error}. Choose another.") from error

    def _encrypt(self) -> None:
        """Encrypt what is stored in plain text. SQLite overwrites what it replaces (`secure_delete`)."""
        with sql.transaction(self._connection):
            count = self._rows.encrypt_all()
        self._connection.overwrite()  # also after a kill between the two
        if count:
            _log.info("%d stored responses are encrypted now", count)

    def _hold(self, file: Path) -> None:
        """Find out whether another process has the log open, and hold the lock that shows it this one."""
        self._lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        if not lock(self._lock, alone=True):
            self.alone = False
            _log.warning(
                "Another program serves from %s too: the two share responses, documents and keys. If that was not "
                "meant, stop one, or give this one a --state-dir of its own.",
                file.parent,
            )
            lock(self._lock, alone=False)

    def allow_others(self) -> None:
        """Let other processes open the log. Called after `repair`."""
        if self._lock is not None:
            lock(self._lock, alone=False)

    def close(self) -> None:
        self._connection.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- writing ----------------------------------------------------------------------------------------------------
    def write(self, batch: LogBatch) -> set[str]:
        """Write everything, but nothing of the responses that are returned: another server has taken them over, or they
        are gone. Waits for a database that cannot be reached."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                one = self.fleet is not None and not (batch.begun or batch.ended)  # statement, and so a transaction
                with self._place.explained() if one else self._rows.changing():
                    return self._write(batch)
            except StorageError as error:
                if not error.away or time.monotonic() > until:
                    raise
                _log.warning("answers wait to be stored: %s", error)
                time.sleep(RETRY_S)

    def _write(self, batch: LogBatch) -> set[str]:
        holder = "" if self.fleet is None else self.fleet.id
        for one in batch.begun:
            self._rows.begin(one, holder=holder)
        if self.fleet is None:
            names = msgspec.json.encode({response for response, *_ in batch.events}).decode()
            lost = {response for (response,) in self._connection.execute(_GONE, (names,))}
            self._rows.add([event for event in batch.events if event[0] not in lost])
        else:
            columns = [list(column) for column in zip(*batch.events, strict=True)] or [[], [], [], []]
            told = [batch.epochs[response] for response, *_ in batch.events]
            now = dict(self._connection.execute(_APPEND, ([*batch.epochs], *columns, told)))
            lost = {response for response, epoch in batch.epochs.items() if now.get(response) != epoch}
        for response, size in (one for one in batch.ended if one[0] not in lost):
            changed = self._connection.execute(
                "UPDATE responses SET ended = true, bytes = ? + length(request) WHERE id = ? AND NOT ended",
                (size, response),
            ).rowcount
            if changed and response in batch.turns:  # not once more, when a commit was not known to have succeeded
                turn = batch.turns[response]
                self.conversations.add(turn.conversation, turn.items, time.time())
        return lost

    # ---- several servers --------------------------------------------------------------------------------------------
    def take_over(self, mine: Callable[[], Collection[str]]) -> list[tuple[ResponseRecord, int, list[EventRow]]]:
        """Become the holder of unfinished responses whose servers are gone, and of those of this one that it could not
        go on writing: each with its epoch and its rows.

        `mine`: tells those that are being written here. Called on another thread than all else: it has its own
        connection.
        """
        assert self.fleet is not None, "of a shared database"
        connection = self._place.connect()
        rows = SealedRows(connection, self._rows.seal, self._place)
        with rows.changing():
            left = {one for (one,) in connection.execute(_LEFT, (self.fleet.id, [*mine()], TAKEN_AT_ONCE))}
            left.difference_update(mine())  # begun here meanwhile
            taken = connection.execute(_TAKE_OVER, (self.fleet.id, [*left])).fetchall() if left else []
        found = [(rows.find(response), epoch, rows.read(response, -1, -1)) for response, epoch in taken]
        return [(record, epoch, rows_) for record, epoch, rows_ in found if record is not None]

    def hand_over(self, response: str, server: str, epoch: int) -> None:
        """Have a certain server go on with a response of this one, if this one has it still, with that epoch."""
        with self._rows.changing():
            self._connection.execute(_HAND_OVER, (server, response, epoch))

    def release(self, mine: Collection[str]) -> None:
        """Let others take over at once what this server held, but for these, which it goes on with."""
        assert self.fleet is not None, "of a shared database"
        with self._rows.changing():
            self._connection.execute(_RELEASE, (self.fleet.id, list(mine)))

    def holder(self, response: str) -> str | None:
        """The server that writes an unfinished response, empty where there is but one; None for one that has ended."""
        rows = self._rows.all("SELECT holder FROM responses WHERE id = ? AND NOT ended", response)
        return rows[0][0] if rows else None

    def delete(self, response: str) -> None:
        """Delete a response with its events and its key, and overwrite their pages in the file."""
        with self._rows.readable_errors():
            self._connection.execute("DELETE FROM responses WHERE id = ?", (response,))
            self._overwrite()

    def sweep(self, *, before: float, abandoned: Sequence[str] = ()) -> None:
        """Delete the responses that ended and are older than `before`, and the `abandoned` ones."""
        with self._rows.readable_errors():
            with sql.transaction(self._connection):
                old = self._connection.execute("DELETE FROM responses WHERE ended AND created < ?", (before,)).rowcount
                self._delete(abandoned)
            if old or abandoned or self._is_left:
                self._overwrite()

    def shrink(self, max_bytes: int) -> None:
        """Delete the oldest responses of the owners above the fair share, until the rest fits into `max_bytes`.

        An owner below an equal share loses nothing to owners that hold more.
        """
        with self._rows.readable_errors():
            with sql.transaction(self._connection):
                held = dict(
                    self._connection.execute("SELECT owner, sum(bytes) FROM responses WHERE ended GROUP BY owner")
                )
                self._delete(self._oldest(held, fair_share(held.values(), max_bytes)))
            self._overwrite()

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

    def _delete(self, responses: Sequence[str]) -> None:
        self._connection.executemany("DELETE FROM responses WHERE id = ?", [(response,) for response in responses])

    def _overwrite(self) -> None:
        """Overwrite what has been deleted in the file, and forget its keys."""
        self._is_left = not self._connection.overwrite()
        self._rows.seal.forget()

    # ---- reading ----------------------------------------------------------------------------------------------------
    def total(self) -> int:
        return int(self._rows.all("SELECT coalesce(sum(bytes), 0) FROM responses WHERE ended")[0][0])

    def last(self, response: str) -> EventRow | None:
        rows = self.read(response, -1, 1, "DESC")
        return rows[0] if rows else None

    def output(self, response: str) -> tuple[str, str] | None:
        """The type of the last event, and the JSON of the output if that event holds the response, else "".

        Of the rest of the event, which may be many times as long, no objects are made.
        """
        row = self.last(response)
        return None if row is None else (row.type, bytes(_decode_last(row.data).response.output).decode())

    def unfinished(self, before: float = math.inf) -> list[str]:
        """Responses without an end that were begun before that time, in s since 1970."""
        return [row[0] for row in self._rows.all("SELECT id FROM responses WHERE NOT ended AND created < ?", before)]

    def repair(
        self, close: Callable[[list[EventRow]], list[EventRow]], goes_on: Callable[[ResponseRecord], bool]
    ) -> int:
        """End every unfinished response with the rows that `close` makes from its rows, but for those that go on, which
        are in `left` then. Returns their number.

        Does nothing while another process has the log open: it may still be writing them.
        """
        if not self.alone:
            return 0
        interrupted = self.unfinished()
        for response in interrupted:
            try:
                rows, record = self.read(response, -1, -1), self.find(response)
            except DamagedError as error:
                _log.warning("a stored response is left as it is: %s", error)
                rows, record = [], None
            again = rows and record is not None and goes_on(record)
            if record and again and self._connection.execute(_BEGIN_AGAIN, (response, MAX_AGAIN)).rowcount:
                self.left.append((record, rows))
                continue
            more = close(rows) if rows else []
            size = sum(len(row.data) for row in (*rows, *more))
            self.write(LogBatch(events=[(response, *row) for row in more], ended=[(response, size)]))
        return len(interrupted) - len(self.left)
