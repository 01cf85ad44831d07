"""Time limits of stages: one that takes longer counts as failed, and the workflow goes on without it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from paceline.errors import PacelineError

T = TypeVar("T")
STAGE_S: Final = 60.0  # longest time of an agent's text, and of a launch of any other stage before the answer


async def within(seconds: float, work: Awaitable[T]) -> T:
    """What the work gives. Raises PacelineError where it takes longer; it is cancelled then, though what a thread has
    begun goes on there to its end."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise PacelineError(f"no end within {seconds:g} s") from None
