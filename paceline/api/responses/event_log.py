"""The append-only log of each response's events: written before they are sent; what is sent is read from it.

A live stream, its resumption, and a retrieval read the same rows, so that each event reaches a reader exactly once and
in order, whoever was cut off in between. Writes happen on one thread of their own, many responses' events in one
transaction (group commit): what queues up while one transaction runs is the next. A reader sees a row once it is
committed. A response that is not to be stored has the same log in memory, for the one reader it has.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from paceline.api.responses.event_store import Event, EventStore, Header, Row
from paceline.errors import PacelineError

SWEEP_S = 3600.0  # between looks for what is too old
ABANDONED_S = 86_400.0  # how long beyond its age a response without an end may be one that another process writes
SLACK = 0.1  # of the bytes that are kept: what is freed when there are too many, so that it is not done at every end
STEP = 1 << 20  # bytes of that between two looks at what there is to write: some 40 ms
TAIL = 256  # committed rows of a running response that stay in memory; who is further behind reads the file
AHEAD = 1024  # rows of a response that may wait for the disk before its writer does
PAGE = 256  # rows read from the file at a time

T = TypeVar("T")

_log = logging.getLogger("paceline.api")


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept of responses that have ended, and for how long: the oldest go first."""

    max_bytes: int = 256 << 20  # of events and requests
    max_age: float = 30 * 86_400.0  # s; OpenAI keeps responses as long


DEFAULT_RETENTION = Retention()


class EventStream:
    """A response that is being written. Lives on the event loop."""

    def __init__(self, header: Header, *, stored: bool) -> None:
        self.header = header
        self.stored = stored
        self.length = 0  # rows written so far: the next sequence number
        self.size = 0  # bytes of them
        self.committed = 0  # rows that may be read
        self.closed = False  # no row will follow
        self.ended = False  # and all are committed
        self.failure: PacelineError | None = None  # the disk refused rows
        self.lost = False  # the same, as the thread knows it: no later row may be written
        self._tail: deque[Row] = deque()
        self._changed = asyncio.Event()

    def publish(self, rows: Sequence[Row], *, last: bool) -> None:
        self._tail.extend(rows)
        self.committed += len(rows)
        self.ended |= last
        if self.stored:
            while len(self._tail) > TAIL:
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

    def after(self, sequence: int) -> list[Row] | None:
        """Committed rows above `sequence`; None when some of them have left memory."""
        oldest = self.committed - len(self._tail)
        if sequence + 1 < oldest:
            return None
        rows = list(islice(self._tail, min(sequence + 1 - oldest, len(self._tail)), None))
        if not self.stored:
            self._tail.clear()  # its one reader has them
        return rows


class Reader:
    """One reader's place in one response."""

    def __init__(self, log: EventLog, response: str, track: EventStream | None, after: int) -> None:
        self._log = log
        self._response = response
        self._track = track  # None: nobody here writes it any more
        self.after = after

    async def next(self, patience: float | None = None) -> list[Row] | None:
        """The rows that follow; [] at the end; None after `patience` seconds without any.

        Raises PacelineError when the log could not be written.
        """
        try:
            async with asyncio.timeout(patience):
                rows = await self._next()
        except TimeoutError:
            return None
        if rows:
            self.after = rows[-1].sequence
        return rows

    async def _next(self) -> list[Row]:
        while True:
            if self._track is None:
                return await self._log.stored(self._response, self.after)
            rows = self._track.after(self.after)
            if rows is None:
                return await self._log.page(self._response, self.after)
            if rows:
                return rows
            if self._track.failure is not None:
                raise self._track.failure
            if self._track.ended:
                return []
            await self._track.changed()


class _Write:
    """Rows of one response on their way to the file."""

    __slots__ = ("begins", "ends", "rows", "track")

    def __init__(self, track: EventStream, rows: Sequence[Row], *, begins: bool, ends: bool) -> None:
        self.track = track
        self.rows = rows
        self.begins = begins
        self.ends = ends


class _Question:
    """Work for the thread that somebody waits for."""

    def __init__(self, ask: Callable[[], object], answer: Future[Any]) -> None:
        self.ask = ask
        self.answer = answer


class EventLog:
    """Every method is called on one event loop, except `__init__` and `close`."""

    def __init__(
        self,
        directory: Path | None,
        repair: Callable[[list[Row]], list[Row]],
        retention: Retention = DEFAULT_RETENTION,
    ) -> None:
        """`directory` None: in memory. `repair`: the rows that end a response whose process died (see `LogRows`).

        Raises ConfigError when the folder cannot be used.
        """
        self._rows = EventStore(directory)
        self._repair = repair
        self._retention = retention
        cut = self._rows.repair(repair)
        if cut:
            _log.warning("%d responses were cut when the server last ended; they are marked as failed", cut)
        self._rows.share()
        self._live: dict[str, EventStream] = {}
        self._jobs: queue.SimpleQueue[_Write | _Question | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._total = 0  # bytes of what ended; the thread's
        self._goal: int | None = None  # to how many bytes responses are being removed; the thread's
        self._swept = 0.0  # when it was last looked for what is too old, monotonic s; the thread's
        self._thread = threading.Thread(target=self._work, name="token-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What was appended is written first. May be called twice."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()
            self._rows.close()

    # ---- writing ----------------------------------------------------------------------------------------------------
    def begin(self, header: Header, *, stored: bool) -> EventStream:
        """A response of which nothing is written yet."""
        self._loop = asyncio.get_running_loop()
        assert header.id not in self._live, "ids are never used twice"
        track = self._live[header.id] = EventStream(header, stored=stored)
        return track

    async def append(self, track: EventStream, events: Sequence[tuple[str, bytes]], *, last: bool = False) -> None:
        """Write events, each its type and JSON. Returns before they are committed, unless too many wait.

        Raises PacelineError when earlier ones could not be written.
        """
        while track.length - track.committed > AHEAD and track.failure is None:
            await track.changed()
        if track.failure is not None:
            raise track.failure
        self.put(track, events, last=last)

    def put(self, track: EventStream, events: Sequence[tuple[str, bytes]], *, last: bool = False) -> None:
        """`append` that waits for nothing and raises nothing: for the last words."""
        assert not track.closed, "nothing follows the last event"
        begins = not track.length
        rows = [Row(track.length + index, *event) for index, event in enumerate(events)]
        track.length += len(rows)
        track.size += sum(len(row.data) for row in rows)
        track.closed |= last
        if not track.stored:
            self._publish([_Write(track, rows, begins=begins, ends=last)], None)
        elif track.failure is not None:
            self._live.pop(track.header.id, None)
        elif self._closed:
            track.fail(PacelineError("The server is shutting down."))
        else:
            self._jobs.put(_Write(track, rows, begins=begins, ends=last))

    def _publish(self, writes: Sequence[_Write], failure: PacelineError | None) -> None:
        for write in writes:
            track = write.track
            if failure is not None:
                track.fail(failure)
            elif track.failure is None:
                track.publish(write.rows, last=write.ends)
            if write.ends:
                self._live.pop(track.header.id, None)

    # ---- reading ----------------------------------------------------------------------------------------------------
    async def find(self, response: str, *, expired: bool = False) -> Header | None:
        """A response that is stored; `expired`: also one that is too old to be shown, while its rows are there.

        One that is not stored can be read with `follow_track` only.
        """
        track = self._live.get(response)
        if track is not None:
            return track.header if track.stored else None
        header = await self.ask(lambda: self._rows.find(response))
        old = header is not None and header.created < time.time() - self._retention.max_age
        return None if old and not expired else header

    def running(self, response: str) -> EventStream | None:
        return self._live.get(response)

    def follow(self, response: str, after: int = -1) -> Reader:
        """Reads the events above sequence number `after`, and waits for those to come. Of a response that was found."""
        return Reader(self, response, self._live.get(response), after)

    def follow_track(self, track: EventStream) -> Reader:
        return Reader(self, track.header.id, track, -1)

    async def page(self, response: str, after: int) -> list[Row]:
        """Stored rows above `after`, the first PAGE of them."""
        return await self.ask(lambda: self._rows.read(response, after, PAGE))

    async def stored(self, response: str, after: int) -> list[Row]:
        """`page` of a response that nobody here writes; after the last of its rows, those that end it if none does.

        Its writing failed midway, or another process may still be at it: whoever follows it is told that it is over.
        """

        def read() -> list[Row]:
            rows = self._rows.read(response, after, PAGE)
            if rows or not self._rows.is_unfinished(response):
                return rows
            written = self._rows.read(response, -1, -1)
            return [row for row in (self._repair(written) if written else []) if row.sequence > after]

        return await self.ask(read)

    async def all(self, response: str) -> list[Row]:
        return await self.ask(lambda: self._rows.read(response, -1, -1))

    async def settled(self, track: EventStream) -> None:
        """Wait until its last row is committed. Raises PacelineError when it could not be."""
        while not track.ended:
            if track.failure is not None:
                raise track.failure
            await track.changed()

    async def last(self, response: str) -> Row | None:
        return await self.ask(lambda: self._rows.last(response))

    async def output(self, response: str) -> tuple[str, str] | None:
        """The type of its last row, and the JSON of what a response says that has ended."""
        return await self.ask(lambda: self._rows.output(response))

    async def delete(self, response: str) -> None:
        """When this returns, no row and no page of the file holds it. It must not be running."""
        assert response not in self._live, "it is stopped first"
        await self.ask(lambda: self._rows.delete(response))

    async def ask(self, question: Callable[[], T]) -> T:
        """Run on the thread, after what was appended before."""
        if self._closed:
            raise PacelineError("The server is shutting down.")
        answer: Future[T] = Future()
        self._jobs.put(_Question(question, answer))
        return await asyncio.wrap_future(answer)

    # ---- the thread -------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        self._sweep()
        going = True
        while going:
            writes: list[_Write] = []
            for job in self._take():
                if isinstance(job, _Write):
                    writes.append(job)
                    continue
                self._write(writes)
                writes = []
                if job is None:
                    going = False
                else:
                    self._answer(job)
            self._write(writes)
            if time.monotonic() - self._swept >= SWEEP_S:
                self._sweep()
            if self._goal is not None:
                self._shrink(self._goal)

    def _take(self) -> list[_Write | _Question | None]:
        """What there is to do; nothing when it is time to sweep, or to go on removing."""
        patience = 0.0 if self._goal is not None else self._swept + SWEEP_S - time.monotonic()
        try:
            jobs = [self._jobs.get(timeout=max(0.0, patience))]
        except queue.Empty:
            return []
        with suppress(queue.Empty):
            while True:
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _write(self, writes: Sequence[_Write]) -> None:
        if not writes:
            return
        begun: list[Header] = []
        events: list[Event] = []
        ended: list[tuple[str, int]] = []
        more = 0  # bytes of those that end
        for write in writes:
            if write.track.lost:
                continue
            response = write.track.header.id
            if write.begins:
                begun.append(write.track.header)
            events += [(response, *row) for row in write.rows]
            if write.ends:
                ended.append((response, write.track.size))
                more += write.track.size + len(write.track.header.request)
        failure: PacelineError | None = None
        try:
            self._rows.write(begun, events, ended)
        except Exception as error:  # whatever it is, the thread goes on, and who waits hears of it
            _log.error("the log of responses cannot be written: %s", error)
            failure = PacelineError("The answer could not be stored, so it was not sent.")
            for write in writes:
                write.track.lost = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has been closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._publish, writes, failure)
        if failure is None:
            self._total += more
            self._measure()

    def _sweep(self) -> None:
        self._swept = time.monotonic()
        before = time.time() - self._retention.max_age
        try:
            abandoned = set(self._rows.unfinished(before - ABANDONED_S)) - set(self._live.copy())
            self._rows.sweep(before=before, abandoned=sorted(abandoned))
            self._total = self._rows.total()
        except Exception as error:
            _log.error("old responses could not be removed: %s", error)
        self._measure()

    def _measure(self) -> None:
        if self._total > self._retention.max_bytes:
            self._goal = int(self._retention.max_bytes * (1 - SLACK))

    def _shrink(self, goal: int) -> None:
        """One step: streams wait for this thread."""
        try:
            self._rows.shrink(max(goal, self._total - STEP))
            self._total = self._rows.total()
        except Exception as error:
            _log.error("old responses could not be removed: %s", error)
            self._goal = None
        else:
            self._goal = goal if self._total > goal else None

    def _answer(self, question: _Question) -> None:
        if not question.answer.set_running_or_notify_cancel():
            return
        try:
            question.answer.set_result(question.ask())
        except BaseException as error:  # whatever it is, whoever asked hears of it
            question.answer.set_exception(error)
