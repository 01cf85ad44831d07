"""A small SQLite file that the server and the commands beside it share.

Opened anew for each change, since changes are rare. Methods block for a disk access and may be called from any thread
or process; who reads is never kept waiting by who writes. Not handled: an attacker who can write the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from paceline import sqlite
from paceline.errors import ConfigError


class StateFile:
    def __init__(self, path: Path, schema: str, what: str) -> None:
        """Makes the file if there is none. Raises ConfigError, which calls it `what`, when that cannot be."""
        self.path = path
        try:
            with self.reading() as rows:
                rows.executescript(schema)
            path.chmod(0o600)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"The {what} {path} cannot be used: {error}. Check --state-dir.") from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for one thread at a time. What it reads in two statements may have changed between them."""
        with closing(sqlite.connect(self.path)) as rows:
            yield rows

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction that nobody else's can overlap."""
        with self.reading() as rows, sqlite.transaction(rows):
            yield rows

    @contextmanager
    def watching(self) -> Iterator[Callable[[], int]]:
        """A number that differs after somebody has changed the file: microseconds, so often is cheap enough."""
        with self.reading() as rows:
            yield lambda: int(rows.execute("PRAGMA data_version").fetchone()[0])
