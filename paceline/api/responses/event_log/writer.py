"""The writer thread of the event log: group commit, queries, and removal of old responses.

Jobs run in the order in which they were submitted. Appends that queue up during one transaction are committed together
in the next. Between jobs the thread deletes what exceeds the retention, in steps of some 40 ms, since appends wait
meanwhile. Knows nothing of readers: committed rows go to `deliver`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.api.responses.event_log.conversation_rows import Turn
from paceline.api.responses.event_log.live_events import LiveEvents
from paceline.api.responses.event_log.store import EventRow, EventStore, ResponseRecord, StoredEvent
from paceline.errors import PacelineError, StorageError

SWEEP_INTERVAL_S = 3600.0  # between two deletions of responses that are too old
ABANDONED_S = 86_400.0  # beyond `max_age`, s: until then another process may still be writing an unfinished response
SHRINK_SLACK = 0.1  # of `max_bytes`: freed beyond the limit, so that not every response that ends has to shrink
SHRINK_STEP = 1 << 20  # bytes deleted between two looks at the queue: some 40 ms

T = TypeVar("T")

_log = logging.getLogger("paceline.api")


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits on responses that have ended; the oldest are deleted first."""

    max_bytes: int = 256 << 20  # of events and requests
    max_age: float = 30 * 86_400.0  # s; OpenAI keeps responses as long


DEFAULT_RETENTION = Retention()


class Append:
    """A job: rows of one response to be written. `begins`, `ends`: whether its first or last row is among them.

    `stored`: the rows as they are stored; by default as they are read meanwhile. `turn`: of a conversation, with them.
    """

    __slots__ = ("begins", "ends", "live", "rows", "stored", "turn")

    def __init__(
        self,
        live: LiveEvents,
        rows: Sequence[EventRow],
        *,
        begins: bool,
        ends: bool,
        stored: Sequence[EventRow] | None = None,
        turn: Turn | None = None,
    ) -> None:
        self.live = live
        self.rows = rows
        self.stored = rows if stored is None else stored
        self.turn = turn
        self.begins = begins
        self.ends = ends


class _Query:
    """A job whose result a caller awaits."""

    def __init__(self, run: Callable[[], object], result: Future[Any]) -> None:
        self.run = run
        self.result = result


class EventWriter:
    """Owns the only thread that uses `store` after start-up.

    `live_ids`: the responses being written here. `deliver`: receives appends once they are committed, or with the
    failure that prevented it. Both are called on the thread.
    """

    def __init__(
        self,
        store: EventStore,
        retention: Retention,
        *,
        live_ids: Callable[[], set[str]],
        deliver: Callable[[Sequence[Append], PacelineError | None], None],
    ) -> None:
        self._store = store
        self._retention = retention
        self._live_ids = live_ids
        self._deliver = deliver
        self.closed = False
        self._jobs: queue.SimpleQueue[Append | _Query | None] = queue.SimpleQueue()
        # Used by the thread alone:
        self._total_bytes = 0  # of responses that have ended
        self._shrink_target: int | None = None  # bytes to shrink to, while that is going on
        self._swept_at = 0.0  # monotonic s
        self._thread = threading.Thread(target=self._run, name="event-writer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish all jobs that were submitted, end the thread and close the store. May be called twice."""
        if not self.closed:
            self.closed = True
            self._jobs.put(None)
            self._thread.join()
            self._store.close()

    def append(self, job: Append) -> None:
        self._jobs.put(job)

    async def query(self, run: Callable[[], T]) -> T:
        """The result of `run`, called on the thread after everything that was appended before."""
        if self.closed:
            raise PacelineError("The server is shutting down.")
        result: Future[T] = Future()
        self._jobs.put(_Query(run, result))
        return await asyncio.wrap_future(result)

    async def change(self, run: Callable[[], int]) -> None:
        """As `query`, of a change that returns by how many bytes the stored ones have grown."""

        def changed() -> None:
            self._total_bytes += run()
            self._check_size()

        await self.query(changed)

    # ---- the thread -------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        self._sweep()
        running = True
        while running:
            appends: list[Append] = []
            for job in self._take():
                if isinstance(job, Append):
                    appends.append(job)
                    continue
                self._write(appends)
                appends = []
                if job is None:
                    running = False
                else:
                    self._answer(job)
            self._write(appends)
            if time.monotonic() - self._swept_at >= SWEEP_INTERVAL_S:
                self._sweep()
            if self._shrink_target is not None:
                self._shrink(self._shrink_target)

    def _take(self) -> list[Append | _Query | None]:
        """All queued jobs; none when the next sweep is due or shrinking goes on."""
        timeout = 0.0 if self._shrink_target is not None else self._swept_at + SWEEP_INTERVAL_S - time.monotonic()
        try:
            jobs = [self._jobs.get(timeout=max(0.0, timeout))]
        except queue.Empty:
            return []
        with suppress(queue.Empty):
            while True:
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _write(self, appends: Sequence[Append]) -> None:
        """Commit appends in one transaction, and deliver them."""
        if not appends:
            return
        begun: list[ResponseRecord] = []
        events: list[StoredEvent] = []
        ended: list[tuple[str, int]] = []
        turns: list[Turn] = []
        ended_bytes = 0
        for append in appends:
            live = append.live
            if live.lost:
                continue
            if append.begins:
                begun.append(live.record)
            events += [(live.record.id, *row) for row in append.stored]
            if append.ends:
                ended.append((live.record.id, live.size))
                ended_bytes += live.size + len(live.record.request)
            if append.turn is not None:
                turns.append(append.turn)
                ended_bytes += sum(map(len, append.turn.items))
        failure: PacelineError | None = None
        try:
            self._store.write(begun, events, ended, turns)
        except Exception as error:  # of any kind: the thread goes on, and the readers get the failure
            _log.error("the log of responses cannot be written: %s", error)
            full = isinstance(error, StorageError) and error.full
            failure = StorageError("The answer could not be stored, so it was not sent.", full=full)
            for append in appends:
                append.live.lost = True
        self._deliver(appends, failure)
        if failure is None:
            self._total_bytes += ended_bytes
            self._check_size()

    def _sweep(self) -> None:
        """Delete responses that are too old, and unfinished ones that no process writes any more."""
        self._swept_at = time.monotonic()
        before = time.time() - self._retention.max_age
        try:
            abandoned = set(self._store.unfinished(before - ABANDONED_S)) - self._live_ids()
            self._store.sweep(before=before, abandoned=sorted(abandoned))
            self._total_bytes = self._store.total()
        except Exception as error:
            _log.error("old responses could not be removed: %s", error)
        self._check_size()

    def _check_size(self) -> None:
        if self._total_bytes > self._retention.max_bytes:
            self._shrink_target = int(self._retention.max_bytes * (1 - SHRINK_SLACK))

    def _shrink(self, target: int) -> None:
        """Delete one step's worth of old responses: appends wait for this thread."""
        try:
            self._store.shrink(max(target, self._total_bytes - SHRINK_STEP))
            self._total_bytes = self._store.total()
        except Exception as error:
            _log.error("old responses could not be removed: %s", error)
            self._shrink_target = None
        else:
            self._shrink_target = target if self._total_bytes > target else None

    def _answer(self, query: _Query) -> None:
        if not query.result.set_running_or_notify_cancel():
            return
        try:
            query.result.set_result(query.run())
        except BaseException as error:  # of any kind: it belongs to the caller
            query.result.set_exception(error)
