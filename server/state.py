"""Small stores that the server and its commands share: a file of SQLite's each, or tables of a database.

Opened again for each change, since changes are rare. Methods block for a disk access and may be called from any thread
or process; readers never wait for writers. Not handled: an attacker who can write the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Generic, TypeVar

from paceline import sql
from paceline.errors import ConfigError, StorageError
from paceline.sql import Changes, SqlConnection, SqliteFile, StorePlace

VERSION = 1  # of the tables
Read = TypeVar("Read")


class StateTables:
    def __init__(self, place: StorePlace, schema: Sequence[str], what: str) -> None:
        """Create the tables if needed. Raises ConfigError when they cannot be used; `what` names them in its text."""
        self.place = place
        try:
            with self.reading() as rows:
                sql.prepare(rows, place.name, VERSION, schema, "remove the file and begin again")
            if isinstance(place, SqliteFile) and place.path is not None:
                place.path.chmod(0o600)
        except (OSError, StorageError) as error:
            raise ConfigError(f"The {what} cannot be used: {error}") from error

    @contextmanager
    def reading(self) -> Iterator[SqlConnection]:
        """Open a connection for one thread at a time. Two statements may read different versions of the tables.

        Raises StorageError, with advice, for a file that is damaged or cannot be used.
        """
        with self.place.explained(), closing(self.place.connect()) as rows:
            yield rows

    @contextmanager
    def changing(self) -> Iterator[SqlConnection]:
        """Open a connection in one transaction; nothing else can write to the tables meanwhile.

        Afterwards a file is whole without its log, so that a copy of it, or another in its place, is what it seems.
        """
        with self.reading() as rows:
            with sql.transaction(rows):
                yield rows
                self.place.announce(rows)
            rows.overwrite()

    @contextmanager
    def watching(self, read: Callable[[SqlConnection], Read]) -> Iterator[WatchedRows[Read]]:
        """Yield what `read` finds, read again only after the tables have changed, or another file is in their place."""

        def find() -> Read:
            with self.reading() as rows:
                return read(rows)

        with self.place.changes() as changes:
            yield WatchedRows(changes, find)


class WatchedRows(Generic[Read]):
    """Rows as they were read of tables that may change at any time. One thread at a time may ask for it, which takes
    microseconds while they have not changed. Asking raises StorageError as long as they are missing or cannot be read.
    """

    def __init__(self, changes: Changes, read: Callable[[], Read]) -> None:
        self._changes = changes
        self._read = read
        self._seen: object = None
        self._found: Read
        self._renewal: asyncio.Future[None] | None = None

    def __call__(self) -> Read:
        """Blocks for an access to the disk or the database after a change."""
        if (now := self._changes()) != self._seen:
            self._found, self._seen = self._read(), now
        return self._found

    async def fresh(self) -> Read:
        """The same for an event loop, which goes on meanwhile. All who wait for it share one access."""
        while (now := self._changes()) != self._seen:
            if self._renewal is None or self._renewal.done():
                self._renewal = asyncio.ensure_future(self._renew(now))
            await asyncio.shield(self._renewal)
        return self._found

    async def _renew(self, now: object) -> None:
        self._found, self._seen = await asyncio.to_thread(self._read), now
