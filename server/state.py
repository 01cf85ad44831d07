"""Small stores that the server and its commands share: a file of SQLite's each, or tables of a database.

Opened again for each change, since changes are rare. Methods block for a disk access and may be called from any thread
or process; readers never wait for writers. Not handled: an attacker who can write the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

from paceline import sql
from paceline.errors import ConfigError, StorageError
from paceline.sql import SqlConnection, SqliteFile, StorePlace

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
    def watching(self, read: Callable[[SqlConnection], Read]) -> Iterator[Callable[[], Read]]:
        """Yield a function that returns what `read` finds, read again only after the tables have changed, or another
        file has taken their place. A call takes microseconds; one thread at a time may call it.

        The function raises StorageError as long as they are missing or cannot be read.
        """
        with self.place.changes() as changes:
            seen: object = None
            found: Read

            def current() -> Read:
                nonlocal seen, found
                now = changes()
                if now != seen:
                    with self.reading() as rows:
                        found = read(rows)
                    seen = now
                return found

            yield current
