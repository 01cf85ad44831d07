"""Encryption of the log's rows: one data key for each response, in the table `keys`, which goes with the response.

A response without a row there is stored in plain text. Requests and events are sealed; ids, owners, times, sizes and
types of events are not. One thread at a time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from paceline.errors import ConfigError
from paceline.sealing.seal import PLAIN_BOX, Box, Seal

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
