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

from paceline.api.log_rows import Event, Header, LogRows, Row
from paceline.errors import PacelineError

SWEEP_S = 3600.0  # between looks for what is too old, on a server that does nothing else
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


class Track:
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
        rows = list(islice(self._tail, sequence + 1 - oldest, None))
        if not self.stored:
            self._tail.clear()  # its one reader has them
        return rows


class Reader:
    """One reader's place in one response."""

    def __init__(self, log: TokenLog, response: str, track: Track | None, after: int) -> None:
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
            rows = None if self._track is None else self._track.after(self.after)
            if rows is None:
                return await self._log.page(self._response, self.after)
            if rows:
                return rows
            assert self._track is not None
            if self._track.failure is not None:
                raise self._track.failure
            if self._track.ended:
                return []
            await self._track.changed()


class _Write:
    """Rows of one response on their way to the file."""

    __slots__ = ("begins", "ends", "rows", "track")

    def __init__(self, track: Track, rows: Sequence[Row], *, begins: bool, ends: bool) -> None:
        self.track = track
        self.rows = rows
        self.begins = begins
        self.ends = ends


class _Question:
    """Work for the thread that somebody waits for."""

    def __init__(self, ask: Callable[[], object], answer: Future[Any]) -> None:
        self.ask = ask
        self.answer = answer


class TokenLog:
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
        self._rows = LogRows(directory)
        self._retention = retention
        cut = self._rows.repair(repair)
        if cut:
            _log.warning("%d responses were cut when the server last ended; they are marked as failed", cut)
        self._rows.share()
        self._live: dict[str, Track] = {}
        self._jobs: queue.SimpleQueue[_Write | _Question | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._total = 0  # bytes of what ended; the thread's
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
    def begin(self, header: Header, *, stored: bool) -> Track:
        """A response of which nothing is written yet."""
        self._loop = asyncio.get_running_loop()
        assert header.id not in self._live, "ids are never used twice"
        track = self._live[header.id] = Track(header, stored=stored)
        return track

    async def append(self, track: Track, events: Sequence[tuple[str, bytes]], *, last: bool = False) -> None:
        """Write events, each its type and JSON. Returns before they are committed, unless too many wait.

        Raises PacelineError when earlier ones could not be written.
        """
        while track.length - track.committed > AHEAD and track.failure is None:
            await track.changed()
        if track.failure is not None:
            raise track.failure
        self.put(track, events, last=last)

    def put(self, track: Track, events: Sequence[tuple[str, bytes]], *, last: bool = False) -> None:
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
    async def find(self, response: str) -> Header | None:
        """A response that is stored. One that is not can be read with `follow_track` only."""
        track = self._live.get(response)
        if track is not None:
            return track.header if track.stored else None
        header = await self.ask(lambda: self._rows.find(response))
        return None if header is None or header.created < time.time() - self._retention.max_age else header

    def running(self, response: str) -> Track | None:
        return self._live.get(response)

    def follow(self, response: str, after: int = -1) -> Reader:
        """Reads the events above sequence number `after`, and waits for those to come. Of a response that was found."""
        return Reader(self, response, self._live.get(response), after)

    def follow_track(self, track: Track) -> Reader:
        return Reader(self, track.header.id, track, -1)

    async def page(self, response: str, after: int) -> list[Row]:
        """Stored rows above `after`, the first PAGE of them."""
        return await self.ask(lambda: self._rows.read(response, after, PAGE))

    async def all(self, response: str) -> list[Row]:
        return await self.ask(lambda: self._rows.read(response, -1, -1))

    async def settled(self, track: Track) -> None:
        """Wait until its last row is committed. Raises PacelineError when it could not be."""
        while not track.ended:
            if track.failure is not None:
                raise track.failure
            await track.changed()

    async def last(self, response: str) -> Row | None:
        return await self.ask(lambda: self._rows.last(response))

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

    def _take(self) -> list[_Write | _Question | None]:
        """What there is to do, at least one thing; nothing after SWEEP_S of silence."""
        try:
            jobs = [self._jobs.get(timeout=SWEEP_S)]
        except queue.Empty:
            self._sweep()
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
        for write in writes:
            if write.track.lost:
                continue
            response = write.track.header.id
            if write.begins:
                begun.append(write.track.header)
            events += [(response, *row) for row in write.rows]
            if write.ends:
                ended.append((response, write.track.size))
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
        if ended:
            self._total += sum(size for _, size in ended)
            if self._total > self._retention.max_bytes:
                self._sweep()

    def _sweep(self) -> None:
        try:
            self._rows.sweep(before=time.time() - self._retention.max_age, max_bytes=self._retention.max_bytes)
            self._total = self._rows.total()
        except Exception as error:
            _log.error("old responses could not be removed: %s", error)

    def _answer(self, question: _Question) -> None:
        if not question.answer.set_running_or_notify_cancel():
            return
        try:
            question.answer.set_result(question.ask())
        except BaseException as error:  # whatever it is, whoever asked hears of it
            question.answer.set_exception(error)
