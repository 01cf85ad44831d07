"""The append-only log of each response's events: events are committed before they are sent, and sent from the log.

A live stream, a resumed one and a retrieval read the same rows, so that each event reaches a reader exactly once and in
order, however often its connection broke. Writing is done by one thread (`writer`), with the events of many
responses in one transaction. A response that is not to be stored has the same log in memory, for its only reader.
Passages of documents are stored as references (`passages`) and filled in when rows are read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from paceline.api.responses.event_log.conversation_rows import PREFIX as CONVERSATION
from paceline.api.responses.event_log.conversation_rows import ConversationRows, Turn
from paceline.api.responses.event_log.live_events import LiveEvents
from paceline.api.responses.event_log.store import ENDS, EventRow, EventStore, ResponseRecord
from paceline.api.responses.event_log.writer import DEFAULT_RETENTION, Append, EventWriter, Retention
from paceline.api.responses.passages import Passages, filled
from paceline.errors import PacelineError
from paceline.sealing.seal import PLAIN, Seal

MAX_UNCOMMITTED = 1024  # rows of one response that may wait for the disk before `append` waits
PAGE_ROWS = 256  # read from the file at a time

T = TypeVar("T")

_log = logging.getLogger("paceline.api")


def _no_passages(_: Collection[int]) -> Mapping[int, tuple[str, str]]:
    return {}


class EventReader:
    """The position of one reader in one response."""

    def __init__(self, log: EventLog, response: str, live: LiveEvents | None, after: int) -> None:
        self._log = log
        self._response = response
        self._live = live  # None: this process is not writing it
        self.after = after  # the sequence number read last

    async def next(self, timeout: float | None = None) -> list[EventRow] | None:
        """The rows that follow; [] at the end; None after `timeout` seconds without any.

        Raises PacelineError when the log could not be written.
        """
        try:
            async with asyncio.timeout(timeout):
                rows = await self._next()
        except TimeoutError:
            return None
        if rows:
            self.after = rows[-1].sequence
        return rows

    async def _next(self) -> list[EventRow]:
        while True:
            if self._live is None:
                return await self._log.stored(self._response, self.after)
            rows = self._live.after(self.after)
            if rows is None:
                return await self._log.page(self._response, self.after)
            if rows:
                return rows
            if self._live.failure is not None:
                raise self._live.failure
            if self._live.ended:
                return []
            await self._live.changed()


class EventLog:
    """The log of all responses. Every method is called on one event loop, except `__init__` and `close`."""

    def __init__(
        self,
        directory: Path | None,
        repair: Callable[[list[EventRow]], list[EventRow]],
        retention: Retention = DEFAULT_RETENTION,
        *,
        passages: Passages = _no_passages,
        seal: Seal = PLAIN,
    ) -> None:
        """`directory` None: in memory. `seal`: see `EventStore`.
        `repair`: from the rows of an interrupted response, the rows that end it.
        `passages`: those that stored rows refer to; called on any thread.

        Raises ConfigError when the folder cannot be used.
        """
        self._store = EventStore(directory, seal)
        self._repair = repair
        self._passages = passages
        self._retention = retention
        interrupted = self._store.repair(repair)
        if interrupted:
            _log.warning("%d responses were cut when the server last ended; they are marked as failed", interrupted)
        self._store.allow_others()
        self._live: dict[str, LiveEvents] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer = EventWriter(
            self._store, retention, live_ids=lambda: set(self._live.copy()), deliver=self._deliver
        )

    @property
    def conversation_rows(self) -> ConversationRows:
        """To be used within `query` and `change` only."""
        return self._store.conversations

    @property
    def max_age(self) -> float:
        """s."""
        return self._retention.max_age

    def close(self) -> None:
        """Write what was appended, and end. May be called twice."""
        self._writer.close()

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
        while live.length - live.committed > MAX_UNCOMMITTED and live.failure is None:
            await live.changed()
        if live.failure is not None:
            raise live.failure
        self.append_nowait(live, events, last=last)

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

        `stored_last`: the JSON of the last event as it is stored, see `passages`; None: as it is.
        `turn`: committed with them, for a response that is stored.
        """
        assert not live.closed, "nothing follows the last event"
        begins = not live.length
        rows = [EventRow(live.length + index, *event) for index, event in enumerate(events)]
        live.length += len(rows)
        stored = rows if stored_last is None else [*rows[:-1], rows[-1]._replace(data=stored_last)]
        live.size += sum(len(row.data) for row in stored)
        live.closed |= last
        if not live.stored:
            self._publish([Append(live, rows, begins=begins, ends=last)], None)
        elif live.failure is not None:
            self._live.pop(live.record.id, None)
        elif self._writer.closed:
            live.fail(PacelineError("The server is shutting down."))
        else:
            self._writer.append(Append(live, rows, begins=begins, ends=last, stored=stored, turn=turn))

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
        """The record of a stored response; with `expired` also of one beyond `max_age` whose rows still exist.

        A response that is not stored can be read with `follow_live` only.
        """
        if response.startswith(CONVERSATION):
            return None
        live = self._live.get(response)
        if live is not None:
            return live.record if live.stored else None
        record = await self.query(lambda: self._store.find(response))
        old = record is not None and record.created < time.time() - self._retention.max_age
        return None if old and not expired else record

    def running(self, response: str) -> LiveEvents | None:
        return self._live.get(response)

    def follow(self, response: str, after: int = -1) -> EventReader:
        """A reader of the events above sequence number `after`, present and future, of a response that `find` found."""
        return EventReader(self, response, self._live.get(response), after)

    def follow_live(self, live: LiveEvents) -> EventReader:
        return EventReader(self, live.record.id, live, -1)

    async def page(self, response: str, after: int) -> list[EventRow]:
        """The first PAGE_ROWS stored rows above `after`."""
        return await self._filled(await self.query(lambda: self._store.read(response, after, PAGE_ROWS)))

    async def stored(self, response: str, after: int) -> list[EventRow]:
        """`page` of a response that this process is not writing; after its last row, the rows that end it if none does.

        Such a response failed to be written midway, or another process is still writing it: a reader sees it ended.
        """

        def read() -> list[EventRow]:
            rows = self._store.read(response, after, PAGE_ROWS)
            if rows or not self._store.is_unfinished(response):
                return rows
            written = self._store.read(response, -1, -1)
            return [row for row in (self._repair(written) if written else []) if row.sequence > after]

        return await self._filled(await self.query(read))

    async def all(self, response: str) -> list[EventRow]:
        return await self._filled(await self.query(lambda: self._store.read(response, -1, -1)))

    async def wait_committed(self, live: LiveEvents) -> None:
        """Wait until its last row is committed. Raises PacelineError when it could not be."""
        while not live.ended:
            if live.failure is not None:
                raise live.failure
            await live.changed()

    async def last(self, response: str) -> EventRow | None:
        row = await self.query(lambda: self._store.last(response))
        return None if row is None else (await self._filled([row]))[0]

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
        """The result of `run`, called on the writer thread after everything that was appended before."""
        return await self._writer.query(run)

    async def change(self, run: Callable[[], int]) -> None:
        """As `query`, of a change of `conversation_rows`."""
        await self._writer.change(run)
