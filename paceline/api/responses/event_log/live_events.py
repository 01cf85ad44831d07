"""The events of a response that is still being written, as its readers on the event loop see them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice

from paceline.api.responses.event_log.store import EventRow, ResponseRecord
from paceline.errors import PacelineError

TAIL_ROWS = 256  # committed rows of a running response kept in memory; a reader further behind reads the file


class LiveEvents:
    """Progress of one running response, and its last committed rows. Used on the event loop, except `lost`."""

    def __init__(self, record: ResponseRecord, *, stored: bool) -> None:
        self.record = record
        self.stored = stored
        self.length = 0  # rows appended so far: the next sequence number
        self.size = 0  # bytes of these rows
        self.committed = 0  # rows that may be read
        self.closed = False  # the last row has been appended
        self.ended = False  # the last row has been committed
        self.failure: PacelineError | None = None  # set when rows could not be written
        self.lost = False  # the same, set and read by the writer thread: it writes no later row
        self._tail: deque[EventRow] = deque()
        self._changed = asyncio.Event()

    def publish(self, rows: Sequence[EventRow], *, last: bool) -> None:
        """Make committed rows readable."""
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

    def after(self, sequence: int) -> list[EventRow] | None:
        """Committed rows above `sequence`; None when some of them have left memory."""
        oldest = self.committed - len(self._tail)
        if sequence + 1 < oldest:
            return None
        rows = list(islice(self._tail, min(sequence + 1 - oldest, len(self._tail)), None))
        if not self.stored:
            self._tail.clear()  # its only reader has them
        return rows
