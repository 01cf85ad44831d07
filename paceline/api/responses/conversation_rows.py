"""Conversations in the log's tables: a row among the responses, a head and items among its events.

So they have what responses have: an owner, encryption, retention, a share of the room. A conversation counts as ended,
and as made when it last changed. Event 0 is the head, the others are items. These rows, unlike those of responses,
change, since a client may delete items. Synchronous; one thread at a time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from paceline import sqlite
from paceline.errors import ConfigError
from paceline.sealing import PLAIN_BOX, Box, Seal

# Encryption of the log's rows: one data key for each response, in the table `keys`, which goes with the response.
#
# A response without a row there is stored in plain text. Requests and events are sealed; ids, owners, times, sizes and
# types of events are not. One thread at a time.


# A table of its own: in `responses` the key would come after the request, which may have many pages.
SCHEMA = """CREATE TABLE keys (
    response TEXT PRIMARY KEY REFERENCES responses (id) ON DELETE CASCADE,
    key BLOB NOT NULL) WITHOUT ROWID"""
_REQUEST = "request"


def _place(sequence: int) -> str:
    return f"event {sequence}"


class RowSealing:
    """Boxes of responses over one connection."""

    def __init__(self, connection: sqlite3.Connection, seal: Seal) -> None:
        self._connection = connection
        self._seal = seal

    def make_key(self, response: str) -> tuple[bytes, Box]:
        """(what `keep` stores, the box) of a response that begins."""
        return self._seal.make_key(response)

    def keep(self, response: str, key: bytes) -> None:
        """Store the key of a response whose row has been inserted, in the caller's transaction."""
        if key:
            self._connection.execute("INSERT INTO keys VALUES (?, ?)", (response, key))

    def box(self, response: str) -> Box:
        """Raises DamagedError for a key that does not fit, ConfigError where another program has begun to encrypt."""
        row = self._connection.execute("SELECT key FROM keys WHERE response = ?", (response,)).fetchone()
        if row is None:
            return PLAIN_BOX
        if not self._seal.is_on:
            raise ConfigError("This response was encrypted by another program meanwhile: start this one again.")
        return self._seal.box(row[0], response)

    def seal_events(self, events: Sequence[tuple[str, int, str, bytes]]) -> list[tuple[str, int, str, bytes]]:
        """Rows (response, sequence, type, data) as they are stored."""
        boxes = {response: self.box(response) for response in {event[0] for event in events}}
        return [
            (response, sequence, kind, boxes[response].seal(data, _place(sequence)))
            for response, sequence, kind, data in events
        ]

    @staticmethod
    def open_event(box: Box, sequence: int, data: bytes) -> bytes:
        """Raises DamagedError."""
        return box.open(data, _place(sequence))

    @staticmethod
    def seal_request(box: Box, request: bytes) -> bytes:
        return box.seal(request, _REQUEST)

    @staticmethod
    def open_request(box: Box, request: bytes) -> bytes:
        """Raises DamagedError."""
        return box.open(request, _REQUEST)

    def forget(self) -> None:
        """Forget the keys in memory, as responses have been deleted."""
        self._seal.forget()

    def encrypt_all(self) -> int:
        """Encrypt every response in plain text, in the caller's transaction. Returns their number."""
        return sum(map(self._encrypt, list(self._plain())))

    def _plain(self) -> Iterable[str]:
        for which in ("ended", "NOT ended"):  # each has an index with the ids, so that no request is read
            rows = self._connection.execute(
                f"SELECT id FROM responses WHERE {which} AND id NOT IN (SELECT response FROM keys)"
            )
            yield from (row[0] for row in rows)

    def _encrypt(self, response: str) -> int:
        key, box = self.make_key(response)
        self.keep(response, key)
        (request,) = self._connection.execute("SELECT request FROM responses WHERE id = ?", (response,)).fetchone()
        sealed = self.seal_request(box, request)
        self._connection.execute("UPDATE responses SET request = ? WHERE id = ?", (sealed, response))
        rows = self._connection.execute("SELECT sequence, data FROM events WHERE response = ?", (response,)).fetchall()
        self._connection.executemany(
            "UPDATE events SET data = ? WHERE response = ? AND sequence = ?",
            [(box.seal(data, _place(sequence)), response, sequence) for sequence, data in rows],
        )
        return 1


PREFIX = "conv_"  # of ids: responses have another
MAX_BYTES = 4 << 20  # of the items of one, the latest: as many as a request may continue
_HEAD, _ITEM = "conversation", "conversation.item"  # types of the rows


@dataclass(frozen=True, slots=True)
class Turn:
    """Items that a response adds to its conversation, in the transaction that ends it."""

    conversation: str
    items: tuple[bytes, ...]  # JSON


class ConversationRows:
    """All statements about conversations, over the connection of an `EventStore`."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        rows: RowSealing,
        readable_errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._connection = connection
        self._rows = rows
        self._readable_errors = readable_errors

    def create(self, conversation: str, owner: str, now: float, head: bytes, items: Sequence[bytes]) -> int:
        """Returns the bytes that it takes, as all methods that change one do. now: s since 1970."""
        with self._readable_errors(), sqlite.transaction(self._connection):
            key, box = self._rows.make_key(conversation)
            self._connection.execute(
                "INSERT INTO responses (id, owner, created, request, ended) VALUES (?, ?, ?, ?, 1)",
                (conversation, owner, now, self._rows.seal_request(box, b"{}")),
            )
            self._rows.keep(conversation, key)
            self._insert(conversation, 0, _HEAD, [head])
            return self.add(conversation, items, now)

    def find(self, conversation: str, owner: str, since: float) -> bytes | None:
        """The head of an owner's conversation that has changed since then, in s since 1970."""
        with self._readable_errors():
            row = self._connection.execute(
                "SELECT data FROM events JOIN responses ON id = response "
                "WHERE response = ? AND sequence = 0 AND type = ? AND owner = ? AND created >= ?",
                (conversation, _HEAD, owner, since),
            ).fetchone()
            return None if row is None else self._rows.open_event(self._rows.box(conversation), 0, row[0])

    def replace_head(self, conversation: str, head: bytes, now: float) -> int:
        with self._readable_errors(), sqlite.transaction(self._connection):
            (there,) = self._connection.execute(
                "DELETE FROM events WHERE response = ? AND sequence = 0 RETURNING 1", (conversation,)
            ).fetchone() or (0,)
            if there:
                self._insert(conversation, 0, _HEAD, [head])
            return self._changed(conversation, now)

    def items(self, conversation: str) -> list[tuple[int, bytes]]:
        """(number, JSON), oldest first."""
        with self._readable_errors():
            rows = self._connection.execute(
                "SELECT sequence, data FROM events WHERE response = ? AND sequence > 0 ORDER BY sequence",
                (conversation,),
            )
            box = self._rows.box(conversation)
            return [(number, self._rows.open_event(box, number, data)) for number, data in rows]

    def append(self, conversation: str, items: Sequence[bytes], now: float) -> int:
        """`add` in a transaction of its own."""
        with self._readable_errors(), sqlite.transaction(self._connection):
            return self.add(conversation, items, now)

    def add(self, conversation: str, items: Sequence[bytes], now: float) -> int:
        """Add items within the caller's transaction, and drop the oldest beyond MAX_BYTES. Nothing if it is gone."""
        last = self._connection.execute(
            "SELECT max(sequence) FROM events WHERE response = ?", (conversation,)
        ).fetchone()[0]
        if last is None:
            return 0
        self._insert(conversation, last + 1, _ITEM, items)
        sizes = self._connection.execute(
            "SELECT sequence, length(data) FROM events WHERE response = ? AND sequence > 0 ORDER BY sequence DESC",
            (conversation,),
        ).fetchall()
        total = 0
        for number, size in sizes:
            total += size
            if total > MAX_BYTES:
                self._connection.execute(
                    "DELETE FROM events WHERE response = ? AND sequence BETWEEN 1 AND ?", (conversation, number)
                )
                break
        return self._changed(conversation, now)

    def remove(self, conversation: str, number: int, now: float) -> int:
        """Remove an item, and overwrite its page in the file."""
        with self._readable_errors():
            with sqlite.transaction(self._connection):
                self._connection.execute(
                    "DELETE FROM events WHERE response = ? AND sequence = ? AND type = ?", (conversation, number, _ITEM)
                )
                grown = self._changed(conversation, now)
            sqlite.checkpoint(self._connection)
        return grown

    def _insert(self, conversation: str, first: int, kind: str, bodies: Sequence[bytes]) -> None:
        sealed = self._rows.seal_events([(conversation, first + i, kind, body) for i, body in enumerate(bodies)])
        self._connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", sealed)

    def _changed(self, conversation: str, now: float) -> int:
        """Bring its time and size up to date. Returns the bytes by which it has grown; 0 if it is gone meanwhile."""
        sizes = self._connection.execute(
            "SELECT bytes, length(request) + (SELECT sum(length(data)) FROM events WHERE response = id) "
            "FROM responses WHERE id = ?",
            (conversation,),
        ).fetchone()
        if sizes is None:
            return 0
        before, after = sizes
        self._connection.execute("UPDATE responses SET created = ?, bytes = ? WHERE id = ?", (now, after, conversation))
        return int(after - before)
