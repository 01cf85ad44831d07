"""This server among those that share a database: who is alive, which devices are linked where, and what has changed.

A server is alive as long as its row in `servers` is: it renews it every `BEAT_S`, and it holds for `LEASE_S`. Whatever
a server holds, another may take over once that is past; the epoch of a response, which grows when it is taken over, is
then the fence against the first one's writes. All times are the database's. One thread listens, renews and calls back;
while the database is not heard of, nobody is told that nothing has changed.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Final, NamedTuple, Protocol

import psycopg
from psycopg_pool import ConnectionPool

from paceline.errors import ConfigError, StorageError

CHANNEL: Final = "paceline"  # of notifications, each the name of a store that has changed
LEASE_S: Final = 5.0
BEAT_S: Final = 0.25
APART_S: Final = 60.0  # by which clocks may differ, as for a hop (`api.http.hop.FRESH_S`)
UNHEARD_S: Final = 2.0  # without the database, after which it may have changed unnoticed
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS servers (
        id text PRIMARY KEY, url text NOT NULL, until timestamptz NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS linked (
        device text PRIMARY KEY,
        server text NOT NULL REFERENCES servers (id) ON DELETE CASCADE,
        since timestamptz NOT NULL DEFAULT clock_timestamp())""",
)
_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"
_RENEW = f"""INSERT INTO servers VALUES (%s, %s, clock_timestamp() + interval '{LEASE_S} s')
    ON CONFLICT (id) DO UPDATE SET until = excluded.until"""
_LINKED = """INSERT INTO linked (device, server) VALUES (%s, %s)
    ON CONFLICT (device) DO UPDATE SET server = excluded.server, since = clock_timestamp()"""
_UNLINKED = "DELETE FROM linked WHERE device = %s AND server = %s"
_log = logging.getLogger("paceline.server")


class SharedDatabase(Protocol):
    """The part of a `Postgres` that is used here."""

    url: str
    name: str
    pool: ConnectionPool

    def explained(self) -> AbstractContextManager[None]: ...


class OtherServer(NamedTuple):
    id: str
    url: str  # by which the servers reach it


class Fleet:
    """Methods may be called from any thread; those that ask the database block."""

    def __init__(self, postgres: SharedDatabase, url: str) -> None:
        """url: by which the other servers reach this one. Raises StorageError, and ConfigError where the clock of this
        machine is not the database's."""
        self.id = secrets.token_hex(8)
        self._postgres = postgres
        self._url = url
        self._counts: Counter[str] = Counter()  # of changes, by store
        self._gaps = 0  # times that some may have been missed
        self._heard = time.monotonic()
        self._reached = True
        self._on_beat: list[Callable[[], None]] = []
        self._telling = threading.Lock()
        self._untold: dict[str, bool] = {}  # whether a device's link is here, as others are to know
        self._teller = ThreadPoolExecutor(1, "links")
        self._stop = threading.Event()
        with postgres.explained(), postgres.pool.connection() as held, held.transaction():
            held.execute("SELECT pg_advisory_xact_lock(hashtext('fleet'))")
            for statement in _SCHEMA:
                held.execute(statement)
            apart = time.time() - held.execute(_CLOCK).fetchall()[0][0]
            if abs(apart) > APART_S:
                raise ConfigError(
                    f"This machine's clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} that of "
                    f"{postgres.name}, and old responses, keys and codes end by it: set both by NTP."
                )
            held.execute(_RENEW, (self.id, url))
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave: what this server holds may be taken over at once."""
        self._stop.set()
        self._thread.join()
        self._teller.shutdown()
        with suppress(StorageError), self._postgres.explained(), self._postgres.pool.connection() as held:
            held.execute("DELETE FROM servers WHERE id = %s", (self.id,))

    def changes(self, store: str) -> tuple[int, int]:
        """A value that differs after every change of a store. Raises StorageError where that cannot be known."""
        if time.monotonic() - self._heard > UNHEARD_S:
            raise StorageError(f"{self._postgres.name} cannot be reached", away=True)
        return self._gaps, self._counts[store]

    def each_beat(self, call: Callable[[], None]) -> None:
        """Have this called every `BEAT_S`, on the thread, while the database can be reached."""
        self._on_beat.append(call)

    # ---- links of devices -------------------------------------------------------------------------------------------
    def linked(self, device: str, *, is_here: bool = True) -> None:
        """Record that a device's link is here now, wherever it was before, or here no longer. Returns at once."""
        with self._telling:
            self._untold[device] = is_here
        self._teller.submit(self._told)

    def _told(self) -> None:
        """Record what has not been recorded yet. What fails is tried again at the next beat."""
        with self._telling:
            untold, self._untold = self._untold, {}
        try:
            for device, is_here in [*untold.items()]:
                self._execute(_LINKED if is_here else _UNLINKED, device, self.id)
                del untold[device]
        except StorageError as error:
            _log.warning("where devices are linked is told later: %s", error)
            with self._telling:
                self._untold = untold | self._untold

    def where(self, device: str | None) -> OtherServer | None:
        """The other server that has a device's link; None if that is this one or none. Without a device: that of the
        only link there is."""
        one = "device = %s" if device is not None else "%s::text IS NULL"
        found = self._execute(
            f"SELECT servers.id, url FROM linked JOIN servers ON servers.id = server WHERE {one} AND until > "
            "clock_timestamp() LIMIT 2",
            device,
        )
        if len(found) != 1 or found[0][0] == self.id:
            return None
        return OtherServer(*found[0])

    def servers(self) -> list[OtherServer]:
        """Those that are alive, this one included."""
        rows = self._execute("SELECT id, url FROM servers WHERE until > clock_timestamp() ORDER BY id")
        return [OtherServer(*row) for row in rows]

    def _execute(self, statement: str, *parameters: object) -> list[tuple[str, str]]:
        with self._postgres.explained(), self._postgres.pool.connection() as held:
            cursor = held.execute(statement, parameters)
            return cursor.fetchall() if cursor.description is not None else []

    # ---- the thread -------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._postgres.url, autocommit=True, connect_timeout=3) as listening:
                    listening.execute("SET search_path = paceline, public")
                    listening.execute("SET statement_timeout = '3s'")
                    listening.execute(f"LISTEN {CHANNEL}")
                    self._gaps += 1  # whatever was told before it listened
                    if not self._reached:
                        _log.info("%s can be reached again", self._postgres.name)
                    self._reached = True
                    self._listen(listening)
            except psycopg.Error as error:
                if self._reached:
                    _log.error("%s cannot be reached: %s", self._postgres.name, error)
                self._reached = False
                self._stop.wait(BEAT_S)

    def _listen(self, listening: psycopg.Connection) -> None:
        while not self._stop.is_set():
            listening.execute(_RENEW, (self.id, self._url))
            listening.execute("DELETE FROM servers WHERE until < clock_timestamp() - interval '1 minute'")
            self._heard = time.monotonic()
            if self._untold:
                self._teller.submit(self._told)
            for call in self._on_beat:
                try:
                    call()
                except StorageError as error:
                    _log.warning("%s", error)
                except Exception:  # of any kind: the lease is to be renewed
                    _log.exception("a server's beat failed")
            for told in listening.notifies(timeout=BEAT_S):
                self._counts[told.payload] += 1
