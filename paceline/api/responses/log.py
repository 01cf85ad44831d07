"""The append-only log of each response's events: events are committed before they are sent, and sent from the log.

A live stream, a resumed one and a retrieval read the same rows, so that each event reaches a reader exactly once and in
order, however often its connection broke. Writing is done by one thread, with the events of many responses in one
transaction. A response that is not to be stored has the same log in memory, for its only reader. Passages of documents
are stored as references (`events.stored_form`) and filled in when rows are read.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paceline.api.http.errors import Failure
from paceline.api.responses.events import Passages, close_interrupted, filled, goes_on, records_of, replay
from paceline.api.responses.store import ENDS, EventRow, EventStore, LogBatch, ResponseRecord, Turn
from paceline.errors import PacelineError, RequestError, StorageError
from paceline.runtime.service import AnswerRecord
from paceline.sealing import PLAIN, Seal
from paceline.settings_tables import TUNING
from paceline.sql import Home
from paceline.system import Threads

TAIL_ROWS = 256  # committed rows of a running response kept in memory; a reader further behind reads the file


class LiveEvents:
    """Progress of one running response, and its last committed rows, as its readers see them. Used on the event loop,
    except `lost`."""

    def __init__(self, record: ResponseRecord, *, stored: bool, epoch: int = 1, rows: Sequence[EventRow] = ()) -> None:
        """epoch, rows: of a response that another server has begun."""
        self.record = record
        self.stored = stored
        self.epoch = epoch
        self.length = len(rows)  # rows appended so far: the next sequence number
        self.size = sum(len(row.data) for row in rows)  # bytes of these rows
        self.committed = len(rows)  # rows that may be read
        self.closed = False  # the last row has been appended
        self.ended = False  # the last row has been committed
        self.failure: PacelineError | None = None  # set when rows could not be written
        self.lost = False  # the same, set and read by the writer thread: it writes no later row
        self._tail: deque[EventRow] = deque()
        self._changed = asyncio.Event()

    def publish(self, rows: Sequence[EventRow], *, last: bool) -> None:
        self._tail.extend(rows)
        self.committed += len(rows)
        self.ended |= last
        if self.stored:
            while len(self._tail) > TAIL_ROWS:
                self._tail.popleft()
        self.wake()

    def fail(self, failure: PacelineError) -> None:
        self.failure = failure
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        await self._changed.wait()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Raises PacelineError when rows could not be written."""
        while not is_so():
            if self.failure is not None:
                raise self.failure
            await self.changed()

    def after(self, sequence: int) -> list[EventRow] | None:
        """Committed rows above `sequence`; None when some of them have left memory."""
        oldest = self.committed - len(self._tail)
        if sequence + 1 < oldest:
            return None
        rows = list(islice(self._tail, min(sequence + 1 - oldest, len(self._tail)), None))
        if not self.stored:
            self._tail.clear()  # its only reader has them
        return rows


SWEEP_INTERVAL_S = 3600.0  # between two deletions of responses that are too old
ABANDONED_S = 86_400.0  # beyond `max_age`, s: until then another process may still be writing an unfinished response
SHRINK_SLACK = 0.1  # of `max_bytes`: freed beyond the limit, so that not every response that ends has to shrink
# Between two commits to a shared database, each of which takes it as long as some twenty rows do, and a small model's
# processors a tenth of a token. Beginnings and ends do not wait, nor who has written nothing for as long.
GROUP_S = 0.05
SHRINK_STEP = 1 << 20  # bytes deleted between two looks at the queue: some 40 ms

T = TypeVar("T")

_log = logging.getLogger("paceline.api")


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits on responses that have ended; the oldest are deleted first."""

    max_bytes: int = TUNING.responses_mib << 20  # of events and requests
    max_age: float = TUNING.responses_days * 86_400  # s


DEFAULT_RETENTION = Retention()


class TakenOver(RequestError):
    """Another server writes this response now, or this one will once it is back: no more of it is stored."""

    def __init__(self) -> None:
        super().__init__("Another server goes on with this answer: read it there.", status=503, type="server_error")


def _deleted() -> RequestError:
    return RequestError("This response was deleted while it was read.", status=404)


@dataclass(frozen=True, slots=True)
class Append:
    """A job: rows of one response to be written."""

    live: LiveEvents
    rows: Sequence[EventRow]
    ends: bool  # the last row of all is among them
    stored: Sequence[EventRow] = ()  # the rows as they are stored
    turn: Turn | None = None  # of a conversation, committed with them


@dataclass(eq=False)
class EventWriter:
    """The only thread that uses `store` after start-up: group commit, queries, and removal of old responses.

    Appends that come during one transaction, or in a shared database within GROUP_S, are committed together in the
    next. What exceeds the retention is deleted in steps of some 40 ms, between other jobs. Both functions are called on
    the thread.
    """

    store: EventStore
    retention: Retention
    _: KW_ONLY
    live_ids: Callable[[], set[str]]  # the responses being written here
    deliver: Callable[[Sequence[Append], PacelineError | None], None]
    """Receives appends once they are committed, or with the failure that prevented it."""

    def __post_init__(self) -> None:
        self.closed = False
        self._thread = Threads(1, "event-writer")
        self._waiting: list[Append] = []
        self._lock = threading.Lock()  # of it
        self._sweeping: threading.Timer | None = None
        self._wrote_at = 0.0  # monotonic s
        # Used by the thread alone:
        self._total_bytes = 0  # of responses that have ended
        self._shrinks = False  # a step of that is among the jobs
        self._thread.submit(self._sweep)

    def close(self) -> None:
        """Finish all jobs that were submitted, write what was appended, and close the store. May be called twice."""
        with self._lock:
            was_closed, self.closed = self.closed, True
        if not was_closed:
            self._thread.shutdown()
            self._flush()  # here: no other thread has the store any more
            if self._sweeping is not None:
                self._sweeping.cancel()
            self.store.close()

    def append(self, job: Append) -> None:
        """Raises PacelineError once it is closed."""
        with self._lock:
            if self.closed:
                raise PacelineError("The server is shutting down.")
            self._waiting.append(job)
            is_first = len(self._waiting) == 1
        wait = 0.0 if self.store.fleet is None else self._wrote_at + GROUP_S - time.monotonic()
        if wait > 0 and not job.ends and job.rows[0].sequence:
            if is_first:  # the others are written with it
                asyncio.get_running_loop().call_later(wait, self._submit, self._flush)
        elif is_first or wait > 0:
            self._submit(self._flush)

    async def query(self, run: Callable[[], T]) -> T:
        """The result of `run`, called on the thread. What was appended before may still wait, but for beginnings and
        ends."""
        if self.closed:
            raise PacelineError("The server is shutting down.")
        return await asyncio.wrap_future(self._thread.submit(run))

    # ---- the thread -------------------------------------------------------------------------------------------------
    def grown(self, num_bytes: int) -> None:
        """Count the growth of what is stored; called within a query."""
        self._total_bytes += num_bytes
        if self._total_bytes > self.retention.max_bytes and not self._shrinks:
            self._shrinks = True
            self._submit(partial(self._shrink, int(self.retention.max_bytes * (1 - SHRINK_SLACK))))

    def _submit(self, job: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # it has just been closed: nothing more is written or removed
            self._thread.submit(job)

    def _flush(self) -> None:
        """Commit what waits in one transaction, and deliver it."""
        with self._lock:
            appends, self._waiting = self._waiting, []
        if not appends:
            return
        self._wrote_at = time.monotonic()
        batch = LogBatch()
        ended_bytes = 0
        for append in appends:
            live = append.live
            if live.lost:
                continue
            if not append.rows[0].sequence:
                batch.begun.append(live.record)
            batch.epochs[live.record.id] = live.epoch
            batch.events += [(live.record.id, *row) for row in append.stored]
            if append.ends:
                batch.ended.append((live.record.id, live.size))
                ended_bytes += live.size + len(live.record.request)
            if append.turn is not None:
                batch.turns[live.record.id] = append.turn
                ended_bytes += sum(map(len, append.turn.items))
        failure: PacelineError | None = None
        taken: set[str] = set()
        try:
            taken = self.store.write(batch)
        except Exception as error:  # of any kind: the thread goes on, and the readers get the failure
            _log.error("the log of responses cannot be written: %s", error)
            full = isinstance(error, StorageError) and error.full
            failure = StorageError("The answer could not be stored, so it was not sent.", full=full)
            for append in appends:
                append.live.lost = True
        if taken:
            _log.warning(
                "%d answers are no longer written here: another server has taken them over, or deleted them", len(taken)
            )
            for append in appends:
                append.live.lost |= append.live.record.id in taken
            gone = _deleted() if self.store.fleet is None else TakenOver()
            self.deliver([append for append in appends if append.live.record.id in taken], gone)
            appends = [append for append in appends if append.live.record.id not in taken]
        self.deliver(appends, failure)
        if failure is None:
            self.grown(ended_bytes)

    def _sweep(self) -> None:
        """Delete responses that are too old, and unfinished ones that no process writes any more; and again later."""
        before = time.time() - self.retention.max_age
        try:
            abandoned = set(self.store.unfinished(before - ABANDONED_S)) - self.live_ids()
            self.store.sweep(before=before, abandoned=sorted(abandoned))
            self._total_bytes = self.store.total()
        except Exception as error:
            _log.error("old responses could not be removed: %s", error)
        self.grown(0)
        if not self.closed:
            self._sweeping = threading.Timer(SWEEP_INTERVAL_S, self._submit, [self._sweep])
            self._sweeping.daemon = True
            self._sweeping.start()

    def _shrink(self, target: int) -> None:
        """Delete one step's worth of old responses: other jobs wait meanwhile."""
        self._shrinks = False
        try:
            self.store.shrink(max(target, self._total_bytes - SHRINK_STEP))
            self._total_bytes = self.store.total()
        except Exception as error:
            _log.error("old responses could not be removed: %s", error)
            return
        if self._total_bytes > target:
            self._shrinks = True
            self._submit(partial(self._shrink, target))


MAX_UNCOMMITTED = 1024  # rows of one response that may wait for the disk before `append` waits
POLL_S = 0.05  # between two looks at a response that another server writes: notifications would slow its commits
PAGE_ROWS = 256  # read from the file at a time


class EventLog:
    """The log of all responses. Every method is called on one event loop, except `__init__` and `close`."""

    def __init__(
        self,
        state: Path | Home | None,
        retention: Retention = DEFAULT_RETENTION,
        *,
        passages: Passages = lambda _: {},
        seal: Seal = PLAIN,
    ) -> None:
        """`state`, `seal`: see `EventStore`.
        `passages`: those that stored rows refer to; called on any thread.

        Raises ConfigError when the folder cannot be used.
        """
        self._store = EventStore(state, seal)
        self.fleet = self._store.fleet  # the servers that share it
        self._passages = passages
        self._retention = retention
        self.conversations = self._store.conversations  # to be used within `query` and `change` only
        interrupted = 0 if self.fleet is not None else self._store.repair(close_interrupted, goes_on)
        if interrupted:
            _log.warning("%d responses were cut when the server last ended; they are marked as failed", interrupted)
        self._store.allow_others()
        self._live: dict[str, LiveEvents] = {}
        self.leaving = False  # others take over, and not this server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer = EventWriter(
            self._store, retention, live_ids=lambda: set(self._live.copy()), deliver=self._deliver
        )

    def close(self) -> None:
        """Write what was appended, and end. May be called twice."""
        self._writer.close()

    def take_over(self, resume: Callable[[ResponseRecord, LiveEvents, list[EventRow]], None]) -> None:
        """From now on, go on with responses of servers that are gone; of a log of one's own, with those that were cut
        when this one last ended. resume: called on this event loop, and appends what is missing."""
        loop = self._loop = asyncio.get_running_loop()

        taken = set[str]()  # and not begun yet

        def mine() -> list[str]:
            return [*taken.copy(), *self._live.copy()]  # what begins is in the second before it leaves the first

        def look() -> None:
            if self.leaving:
                return
            for record, epoch, rows in self._store.take_over(mine):
                taken.add(record.id)
                _log.warning("%s is continued here, after %d events", record.id, len(rows))
                loop.call_soon_threadsafe(begin, record, epoch, rows)

        def begin(record: ResponseRecord, epoch: int, rows: list[EventRow]) -> None:
            if self.leaving:
                return
            live = self._live[record.id] = LiveEvents(record, stored=True, epoch=epoch, rows=rows)
            taken.discard(record.id)
            resume(record, live, rows)

        if self.fleet is not None:
            self.fleet.each_beat(look)
        for record, cut in self._store.left:
            begin(record, 1, cut)

    async def release(self) -> None:
        """Let other servers take over what this one was writing."""
        mine = list(self._live)
        await self.query(lambda: self._store.release(mine))

    async def hand_over(self, live: LiveEvents, device: str) -> None:
        """Have the server go on with a response that has this device's link; this one where it is nobody's."""
        assert self.fleet is not None, "of a shared database"
        other = await asyncio.to_thread(self.fleet.where, device)
        self.abandon(live)
        if other is not None:
            await self.query(partial(self._store.hand_over, live.record.id, other.id, live.epoch))

    def abandon(self, live: LiveEvents) -> None:
        """Write nothing more of a response, which others may then take over."""
        live.closed = live.lost = True
        self._live.pop(live.record.id, None)
        live.fail(TakenOver())

    async def fail(self, live: LiveEvents, failure: Failure) -> dict[str, Any] | None:
        """End a response as it stands in the log, and return it. None where that cannot be, or it has ended there: it
        is then left to whoever can."""
        try:
            await live.until(lambda: live.committed == live.length)
            rows = await self.query(lambda: self._store.read(live.record.id, -1, -1))
        except PacelineError as error:
            _log.warning("%s is not ended here: %s", live.record.id, error)
            rows = []
        last = close_interrupted(rows, failure) if rows else []
        if not last:
            self.abandon(live)
            return None
        self.append_nowait(live, [(last[0].type, last[0].data)], last=True)
        return replay(last)

    async def holder(self, response: str) -> str | None:
        """The server that writes a response of a log of several, or wrote it and is gone; None where none has to."""
        return None if self.fleet is None else await self.query(lambda: self._store.holder(response))

    async def elsewhere(self, response: str) -> bool:
        """True while another server writes a response, or is to take it over."""
        return await self.holder(response) is not None

    # ---- writing ----------------------------------------------------------------------------------------------------
    def begin(self, record: ResponseRecord, *, stored: bool) -> LiveEvents:
        """Register a response of which nothing is written yet."""
        self._loop = asyncio.get_running_loop()
        assert record.id not in self._live, "ids are never used twice"
        live = self._live[record.id] = LiveEvents(record, stored=stored)
        return live

    async def append(self, live: LiveEvents, events: Sequence[tuple[str, bytes]], *, last: bool = False) -> None:
        """Write events, each its type and JSON. Returns before they are committed, unless too many wait.

        Raises PacelineError when earlier ones could not be written.
        """
        await self.room(live)
        self.append_nowait(live, events, last=last)

    async def room(self, live: LiveEvents) -> None:
        """Wait until `append` would not wait. Raises PacelineError as that does."""
        await live.until(lambda: live.length - live.committed <= MAX_UNCOMMITTED)
        if live.failure is not None:
            raise live.failure

    def append_nowait(
        self,
        live: LiveEvents,
        events: Sequence[tuple[str, bytes]],
        *,
        last: bool = False,
        stored_last: bytes | None = None,
        turn: Turn | None = None,
    ) -> None:
        """`append` without waiting and without raising: for the events that end a response.

        `stored_last`: the JSON of the last event as it is stored, see `events.stored_form`; None: as it is.
        `turn`: committed with them, for a response that is stored.
        """
        assert not live.closed, "nothing follows the last event"
        rows = [EventRow(live.length + index, *event) for index, event in enumerate(events)]
        live.length += len(rows)
        stored = rows if stored_last is None else [*rows[:-1], rows[-1]._replace(data=stored_last)]
        live.size += sum(len(row.data) for row in stored)
        live.closed |= last
        if not live.stored:
            self._publish([Append(live, rows, ends=last)], None)
        elif live.failure is not None:
            self._live.pop(live.record.id, None)
        else:
            try:
                self._writer.append(Append(live, rows, ends=last, stored=stored, turn=turn))
            except PacelineError as error:
                live.fail(error)

    def _deliver(self, appends: Sequence[Append], failure: PacelineError | None) -> None:
        """Publish on the event loop. Called on the writer thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has been closed, and its readers with it
                self._loop.call_soon_threadsafe(self._publish, appends, failure)

    def _publish(self, appends: Sequence[Append], failure: PacelineError | None) -> None:
        for append in appends:
            live = append.live
            if failure is not None:
                live.fail(failure)
            elif live.failure is None:
                live.publish(append.rows, last=append.ends)
            if append.ends:
                self._live.pop(live.record.id, None)

    # ---- reading ----------------------------------------------------------------------------------------------------
    async def find(self, response: str, *, expired: bool = False) -> ResponseRecord | None:
        """The record of a stored response; with `expired` also of one beyond `max_age` whose rows still exist."""
        live = self._live.get(response)
        if live is not None:
            return live.record if live.stored else None
        record = await self.query(lambda: self._store.find(response))
        old = record is not None and record.created < self.oldest()
        return None if old and not expired else record

    def oldest(self) -> float:
        """When what is found now may have changed last, s since 1970."""
        return time.time() - self._retention.max_age

    def running(self, response: str) -> LiveEvents | None:
        return self._live.get(response)

    def follow(self, response: str, after: int = -1) -> AsyncIterator[list[EventRow]]:
        """The events above sequence number `after`, present and future, of a response that `find` found or that `begin`
        has just begun. Raises PacelineError when they could not be written.

        One that this process is not writing failed to be written midway, or another process is still writing it: where
        it has no end, it is read with the rows that end it.
        """
        return self._follow(response, self._live.get(response), after)  # looked up now: it may have ended by the first

    async def _follow(self, response: str, live: LiveEvents | None, after: int) -> AsyncIterator[list[EventRow]]:
        is_over = self.fleet is None  # no other server writes it: what is read from now on is all
        told = ""  # type of the last row
        while True:
            rows = None if live is None else live.after(after)
            if rows is None:
                read = self._stored if live is None else self._page
                rows = await self._filled(await self.query(partial(read, response, after)))
                if not rows and live is None and not is_over:
                    if is_over := not await self.elsewhere(response):
                        continue  # it may have ended since it was read
                    await asyncio.sleep(POLL_S)
                    live = self._live.get(response)  # it may have been taken over here
                    continue
                if not rows and self.fleet is not None and told and told not in ENDS:  # it went with its end
                    raise _deleted()
                if not rows:
                    return
            if rows:
                yield rows
                after, told = rows[-1].sequence, rows[-1].type
                continue
            assert live is not None, "its rows are in memory"
            if isinstance(live.failure, TakenOver):
                live = None
                continue
            if live.failure is not None:
                raise live.failure
            if live.ended:
                return
            await live.changed()

    def _page(self, response: str, after: int) -> list[EventRow]:
        return self._store.read(response, after, PAGE_ROWS)

    def _stored(self, response: str, after: int) -> list[EventRow]:
        rows = self._page(response, after)
        if rows or self.fleet is not None or self._store.holder(response) is None:
            return rows
        written = self._store.read(response, -1, -1)
        return [row for row in (close_interrupted(written) if written else []) if row.sequence > after]

    async def all(self, response: str) -> list[EventRow]:
        return await self._filled(await self.query(lambda: self._store.read(response, -1, -1)))

    async def wait_begun(self, live: LiveEvents) -> None:
        """Wait until a response is in the log, for other servers too. Raises PacelineError when it could not be."""
        await live.until(lambda: live.committed > 0)

    async def wait_committed(self, live: LiveEvents) -> None:
        """Wait until its last row is committed. Raises PacelineError when it could not be."""
        await live.until(lambda: live.ended)

    async def last(self, response: str) -> EventRow | None:
        row = await self.query(lambda: self._store.last(response))
        return None if row is None else (await self._filled([row]))[0]

    async def records(self, response: str) -> list[AnswerRecord]:
        """What a response was written from; empty where that is not known, or it has no end."""
        row = await self.query(lambda: self._store.last(response))
        try:
            return [] if row is None else records_of(row)
        except msgspec.ValidationError:
            return []

    async def output(self, response: str) -> tuple[str, str] | None:
        """The type of the last row, and the JSON of the output, without passages, if the response has ended."""
        return await self.query(lambda: self._store.output(response))

    async def delete(self, response: str) -> None:
        """Delete a response that is not running. When this returns, no row and no page of the file holds it."""
        assert response not in self._live, "it is stopped first"
        await self.query(lambda: self._store.delete(response))

    async def _filled(self, rows: list[EventRow]) -> list[EventRow]:
        """Stored rows with their passages."""
        if not rows or rows[-1].type not in ENDS:
            return rows
        data = await asyncio.to_thread(filled, rows[-1].data, self._passages)  # not on the writer thread: appends wait
        return [*rows[:-1], rows[-1]._replace(data=data)]

    async def query(self, run: Callable[[], T]) -> T:
        return await self._writer.query(run)

    async def change(self, run: Callable[[], int]) -> None:
        """`query` for a change of `conversations`, which returns by how many bytes they have grown."""
        await self.query(lambda: self._writer.grown(run()))
