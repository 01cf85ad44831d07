"""Places of answers under way: how many there are, who waits for one, and the refusal.

Shared by the nodes of all models of a program. Fair shares of owners: `core.shares`.
"""

from __future__ import annotations

import asyncio
from typing import Final

from paceline.core.shares import Shares, WaitingLine
from paceline.errors import RequestError

MAX_ANSWERS: Final = 1152  # at once, of which one owner may have 1,024; further requests get 429
MAX_WAITING: Final = 1024  # requests at once
ROOM_S: Final = 0.05  # a request waits for a place: one that is given back is not empty until somebody asks again
RETRY_AFTER_S: Final = 1


class AnswerPlaces:
    """Belongs to one event loop. An owner of "" is everybody without a key, and has no place kept for it."""

    def __init__(self) -> None:
        self._shares = Shares(MAX_ANSWERS)  # of owners
        self._line = WaitingLine(self._shares, MAX_WAITING)

    async def wait_for_room(self, owner: str) -> None:
        """Wait briefly until this owner may have a place, which is not kept for it. Raises RequestError (429)."""
        if self._has_room(owner):
            return
        called = asyncio.Event()
        try:
            async with asyncio.timeout(ROOM_S):
                while self._line.enter(owner, called.set, alone=not owner):
                    await called.wait()
                    if self._has_room(owner):
                        return
                    called.clear()
        except TimeoutError:
            pass
        finally:
            self._line.leave(called.set)
        self.check_room(owner)

    def check_room(self, owner: str) -> None:
        """Raises RequestError (429) where this owner has no room now."""
        if not self._has_room(owner):
            raise _full(self._shares.taken, self._shares.held(owner))

    def take(self, owner: str) -> None:
        """Take a place, whether there is room or not."""
        self._shares.force(owner)

    def give_back(self, owner: str) -> None:
        self._line.give_back(owner)

    def _has_room(self, owner: str) -> bool:
        return self._shares.has_room(owner, alone=not owner)


def _full(taken: int, held: int) -> RequestError:
    """taken: answers under way; held: of them, those of the key that wants another."""
    return RequestError(
        f"This server is writing {taken} answers of {MAX_ANSWERS} at most, and {held} of them for this key. "
        f"Please try again in {RETRY_AFTER_S} s.",
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
    )
