"""A small SQLite file (mode 0600) that the server and the commands beside it share.

Opened anew for each change, since changes are rare. Methods block for a disk access and may be called from any thread
or process. Not handled: an attacker who can write the file.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from paceline.errors import ConfigError

_BUSY_S = 10.0


class StateFile:
    def __init__(self, path: Path, schema: str, what: str) -> None:
        """Makes the file if there is none. Raises ConfigError, which calls it `what`, when that cannot be."""
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            path.chmod(0o600)
            with self.reading() as rows:
                rows.executescript(schema)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"The {what} {path} cannot be used: {error}. Check --state-dir.") from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for one thread at a time. What it reads in two statements may have changed between them."""
        connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        with closing(connection) as rows:
            yield rows

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction that nobody else's can overlap."""
        with self.reading() as rows:
            rows.execute("BEGIN IMMEDIATE")
            try:
                yield rows
            except BaseException:
                rows.execute("ROLLBACK")
                raise
            rows.execute("COMMIT")

    @contextmanager
    def watching(self) -> Iterator[Callable[[], int]]:
        """A number that differs after somebody has changed the file: microseconds, so often is cheap enough."""
        with self.reading() as rows:
            yield lambda: int(rows.execute("PRAGMA data_version").fetchone()[0])
