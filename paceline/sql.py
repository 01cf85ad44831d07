"""What stores ask of their database: a file of SQLite's, or a PostgreSQL server that several servers share.

A store writes its statements once, in SQL that both know: `?` for a parameter, SQLite's names of types in a schema,
`ON CONFLICT` rather than `OR REPLACE`, `true` and `false` for what is one or the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.errors import StorageError, other_format

if TYPE_CHECKING:
    from paceline.fleet import Fleet

# read: every query sees the same state. write: others may write other rows meanwhile, where the database can let them.
# alone: nothing else writes to this store meanwhile.
Mode = Literal["read", "write", "alone"]


class DuplicateRow(StorageError):
    """A row would break a rule of its table: there is another with its key, or it has no owner."""


class Cursor(Protocol):
    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class SqlConnection(Protocol):
    """An autocommitting connection to one store. One thread at a time may use it; methods block."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Cursor: ...

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]], /) -> object: ...

    def begin(self, mode: Mode) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def version(self) -> int | None:
        """The format of the store's tables; None where there are none."""

    def set_version(self, version: int) -> None: ...

    def overwrite(self) -> bool:
        """Overwrite what has been removed, as far as the database can. False if a reader blocked that for too long."""

    def close(self) -> None: ...


class StorePlace(Protocol):
    """Where one store keeps its rows."""

    @property
    def name(self) -> str:
        """As error messages name it."""

    def connect(self) -> SqlConnection:
        """Raises what `explained` explains, OSError and ConfigError."""

    def explained(self) -> AbstractContextManager[None]:
        """Raise the database's errors as StorageError with advice."""

    def changes(self) -> AbstractContextManager[Changes]:
        """What tells that the store may have changed. One thread at a time may call it."""

    def announce(self, connection: SqlConnection) -> None:
        """Tell all who watch `changes`, once the caller's transaction is committed."""


class Home(Protocol):
    """Where all stores of a server lie."""

    @property
    def fleet(self) -> Fleet | None:
        """The servers that share it, as one of them sees them; None for a command, which is none."""

    def place(self, store: str, kind: str) -> StorePlace:
        """store: its name. kind: what it is, in messages, such as "a token log"."""


class Changes(Protocol):
    def __call__(self) -> object:
        """A value that differs after every change, by any process. Takes microseconds. Raises StorageError where that
        cannot be known."""


@contextmanager
def transaction(connection: SqlConnection, mode: Mode = "alone") -> Iterator[None]:
    """Commit the block as one transaction; roll it back if the block raises."""
    connection.begin(mode)
    try:
        yield
        connection.commit()
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise


def is_new(connection: SqlConnection, name: object, version: int, advice: str) -> bool:
    """True if there is no table yet. Raises ConfigError for tables of another version.

    name: of the place. advice: of `other_format`.
    """
    found = connection.version()
    if found is not None and found != version:
        raise other_format(name, found, version, advice)
    return found is None


def prepare(connection: SqlConnection, name: object, version: int, schema: Iterable[str], advice: str) -> None:
    """Make the tables where there is none. Raises ConfigError as `is_new`."""
    if connection.version() == version:
        return  # so that no reader waits for a writer
    with transaction(connection):
        if is_new(connection, name, version, advice):
            for statement in schema:
                connection.execute(statement)
            connection.set_version(version)
