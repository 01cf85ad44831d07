"""Several admitted generations, read at the same time into one bounded queue.

A slow reader holds no generation back: what it has not taken waits in the generation, `max_tokens` pieces at most.

Whoever waits here for the next event can be told of a silence without anything being cancelled. Leaving the context
cancels what still runs and closes what never began, so that nothing is left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

from paceline.errors import PacelineError
from paceline.runtime.service import GenerateEvent, GenerateRequest, Generation, GenerationResult, Service

QUEUE_LIMIT = 64  # events of all choices together


async def prepare_all(service: Service, generations: Sequence[GenerateRequest]) -> list[Generation]:
    """Admit all of them or none. Raises what `prepare` raises."""
    prepared: list[Generation] = []
    try:
        for generation in generations:
            prepared.append(await service.prepare(generation))
    except BaseException:  # cancellation too: the client may leave while others are admitted
        await close_all(prepared)
        raise
    return prepared


async def close_all(prepared: Sequence[Generation]) -> None:
    for one in prepared:
        await one.aclose()


class GenerationFanIn:
    """Reads `prepared`, which it owns from then on. Use as a context manager, once."""

    def __init__(self, prepared: Sequence[Generation]) -> None:
        self._waiting = dict(enumerate(prepared))  # not yet running
        self._queue: asyncio.Queue[tuple[int, GenerateEvent | Exception]] = asyncio.Queue(QUEUE_LIMIT)
        self._readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._readers = [asyncio.create_task(self._read(index)) for index in self._waiting]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await close_all(tuple(self._waiting.values()))
        self._waiting.clear()

    async def next(self, patience: float | None = None) -> tuple[int, GenerateEvent] | None:
        """The next event and the choice it belongs to; None after `patience` seconds of silence.

        Raises what a generation raised. After every choice's Done there is nothing more to wait for.
        """
        try:
            async with asyncio.timeout(patience):
                index, event = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(event, Exception):
            raise event
        return index, event

    async def _read(self, index: int) -> None:
        events = self._waiting.pop(index).run()
        try:
            async for event in events:
                if isinstance(event, GenerationResult) and event.reason not in ("stop", "length"):
                    raise PacelineError(f"The answer could not be finished ({event.reason}).")
                await self._queue.put((index, event))
                if isinstance(event, GenerationResult):
                    return
            raise PacelineError("The answer ended without saying why.")
        except Exception as error:
            await self._queue.put((index, error))
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()  # cancels the generation, if it has not ended
