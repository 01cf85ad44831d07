"""Work in turns of its owners on an event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paceline.core.fair import FairQueue


class Turnstile:
    """`core.fair.FairQueue` of work that is waited for. Belongs to one event loop."""

    def __init__(self, places: float = math.inf, *, most: int = 1) -> None:
        """places: at once. most: of one owner."""
        self._queue = FairQueue(places, most=most)

    async def enter(self, owner: str) -> None:
        """Wait for a place, to be given back by `leave`. Cancelled, there is none to give back."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()

        def call() -> None:
            if turn.cancelled():
                loop.call_soon(self.leave, owner)
            else:
                turn.set_result(None)

        self._queue.enter(owner, call)
        try:
            await turn
        except asyncio.CancelledError:
            self._queue.leave(call)
            if not turn.cancelled():
                self.leave(owner)
            raise

    def leave(self, owner: str) -> None:
        self._queue.give_back(owner)

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        await self.enter(owner)
        try:
            yield
        finally:
            self.leave(owner)
