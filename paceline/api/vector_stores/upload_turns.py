"""Uploads in turns of their owners: many files of one that arrive at once hold up no other's.

In a turn of the event loop one part of one body is handled for each owner whose parts have come, so that an owner's
share of the loop is that of others however many bodies it sends; its connections wait meanwhile, by flow control. And
of each owner one upload at a time is brought to the disk, which may take as long as the disk likes, so that threads are
left for others. Not handled: what several owners take of one disk together.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class UploadTurns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._parts: dict[str, deque[asyncio.Future[None]]] = {}  # that wait, of owners with any
        self._keeping: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of the owners in `_kept`
        self._kept: defaultdict[str, int] = defaultdict(int)  # uploads that are brought to the disk or wait for it

    async def part(self, owner: str) -> None:
        """Wait until one more part of the owner's bodies may be handled."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._parts:
            loop.call_soon(self._next_of_each, loop)
        self._parts.setdefault(owner, deque()).append(turn)
        await turn

    async def keep(self, owner: str, work: Callable[[], T]) -> T:
        """The result of `work`, which blocks on the disk, from a thread."""
        self._kept[owner] += 1
        try:
            async with self._keeping[owner]:
                return await asyncio.to_thread(work)
        finally:
            self._kept[owner] -= 1
            if not self._kept[owner]:
                del self._kept[owner], self._keeping[owner]

    def _next_of_each(self, loop: asyncio.AbstractEventLoop) -> None:
        for owner, waiting in [*self._parts.items()]:
            while waiting and (turn := waiting.popleft()).done():  # cancelled: nobody waits for it any more
                pass
            if not turn.done():
                turn.set_result(None)
            if not waiting:
                del self._parts[owner]
        if self._parts:
            loop.call_soon(self._next_of_each, loop)  # after the parts above, which then have been handled
