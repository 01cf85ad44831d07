"""A small SQLite file that the server and its commands share.

Opened again for each change, since changes are rare. Methods block for a disk access and may be called from any thread
or process; readers never wait for writers. Not handled: an attacker who can write the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TypeVar

from paceline import sqlite
from paceline.errors import ConfigError, StorageError

VERSION = 1  # PRAGMA user_version
Read = TypeVar("Read")


class StateFile:
    def __init__(self, path: Path, schema: Sequence[str], what: str) -> None:
        """Create the file if needed. Raises ConfigError when it cannot be used; `what` names the file in its text."""
        self.path = path
        self._what = what
        try:
            with self.reading() as rows:
                sqlite.prepare(rows, path, VERSION, schema, "remove the file and begin again")
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
        """Open a connection in one transaction; nothing else can write to the file meanwhile.

        Afterwards the file is whole without its log, so that a copy of it, or another in its place, is what it seems.
        """
        with self.reading() as rows:
            with sqlite.transaction(rows):
                yield rows
            sqlite.checkpoint(rows)

    @contextmanager
    def watching(self, read: Callable[[sqlite3.Connection], Read]) -> Iterator[Callable[[], Read]]:
        """Yield a function that returns what `read` finds, read again only after the file has changed, or another has
        taken its place. A call takes microseconds; one thread at a time may call it.

        The function raises StorageError as long as the file is missing or cannot be read.
        """
        with ExitStack() as opened:
            rows: sqlite3.Connection | None = None
            seen: int | None = None
            place: tuple[int, int] | None = None
            found: Read

            def current() -> Read:
                nonlocal rows, seen, place, found
                with sqlite.speaking(self.path, f"a {self._what}"):
                    if rows is None or self._inode() != place:
                        opened.close()
                        rows, seen, place = None, None, self._inode()
                        if place is None:
                            raise StorageError(
                                f"{self.path} is gone: put it back from a copy, or start the server again."
                            )
                        rows = opened.enter_context(closing(sqlite.connect(self.path)))
                    version = int(rows.execute("PRAGMA data_version").fetchone()[0])
                    if version != seen:
                        found, seen = read(rows), version
                    return found

            yield current

    def _inode(self) -> tuple[int, int] | None:
        """(device, inode) of the file that is there now."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino
