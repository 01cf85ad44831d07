"""A small SQLite file that the server and its commands share.

Opened again for each change, since changes are rare. Methods block for a disk access and may be called from any thread
or process; readers never wait for writers. Not handled: an attacker who can write the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from paceline import sqlite
from paceline.errors import ConfigError, StorageError


class StateFile:
    def __init__(self, path: Path, schema: str, what: str) -> None:
        """Create the file if needed. Raises ConfigError when it cannot be used; `what` names the file in its text."""
        self.path = path
        self._what = what
        try:
            with self.reading() as rows:
                rows.executescript(schema)
            path.chmod(0o600)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"The {what} {path} cannot be used: {error}. Check --state-dir.") from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for one thread at a time. Two statements may read different versions of the file.

        Raises StorageError, with advice, for a file that is damaged or cannot be used.
        """
        try:
            with sqlite.speaking(self.path, f"a {self._what}"), closing(sqlite.connect(self.path)) as rows:
                yield rows
        except StorageError as error:
            if isinstance(error.__cause__, sqlite3.IntegrityError):
                raise error.__cause__ from None  # of a statement, which its caller expects
            raise

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """Open a connection in one transaction; nothing else can write to the file meanwhile."""
        with self.reading() as rows, sqlite.transaction(rows):
            yield rows

    @contextmanager
    def watching(self) -> Iterator[Callable[[], int]]:
        """Yield a function whose number changes after every change of the file. A call takes microseconds."""
        with self.reading() as rows:
            yield lambda: int(rows.execute("PRAGMA data_version").fetchone()[0])
