"""Fan-in of several admitted generations into one bounded queue.

A slow reader blocks no generation: events it has not taken wait in the generation, `max_tokens` of them at most. A
timeout while waiting for the next event cancels nothing. Leaving the context cancels generations that run and closes
those that never began.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Self

from paceline.api.observation import AnswerWatch
from paceline.errors import PacelineError
from paceline.runtime.service import GenerateEvent, GenerateRequest, Generation, GenerationResult, Service

# Answers of a model that has to be loaded first: admitted when they are run, so that a stream is not silent meanwhile.
#
# What would refuse such a request then ends its stream, if that takes more than a second: `streaming`.


def must_load(service: Service, model: str) -> bool:
    """True if an answer of this model, by its served name, waits for the model to be loaded."""
    return service.model_status(model).state != "loaded"


class LateGeneration:
    """A `Generation` that begins with its admission."""

    prompt_tokens = 0  # not known yet

    def __init__(self, prepare: Callable[[], Awaitable[Generation]]) -> None:
        """prepare: as `Service.prepare`."""
        self._prepare = prepare

    async def run(self) -> AsyncIterator[GenerateEvent]:
        generation = await self._prepare()
        async with aclosing(generation.run()) as events:  # type: ignore[type-var]  # every one is a generator
            async for event in events:
                yield event

    async def aclose(self) -> None:
        """Nothing has begun."""


QUEUE_LIMIT = 64  # events of all choices together


async def prepare_all(service: Service, requests: Sequence[GenerateRequest]) -> list[Generation]:
    """Admit all requests of one model, or none. Raises what `prepare` raises.

    Where the model has to be loaded first, each is admitted when it is run, and may be refused then.
    """
    if must_load(service, requests[0].model):
        return [LateGeneration(partial(service.prepare, request)) for request in requests]
    generations: list[Generation] = []
    try:
        for request in requests:
            generations.append(await service.prepare(request))
    except BaseException:  # also a cancellation: the client may leave while others are admitted
        await close_all(generations)
        raise
    return generations


async def close_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        await generation.aclose()


class GenerationFanIn:
    """Reader of several generations, which it owns. A context manager, to be entered once."""

    def __init__(self, generations: Sequence[Generation], watches: Sequence[AnswerWatch]) -> None:
        """watches: of each generation."""
        self._waiting = dict(enumerate(generations))  # not yet running
        self._watches = watches
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
        for watch in self._watches:
            watch.left()

    async def next(self, timeout: float | None = None) -> tuple[int, GenerateEvent] | None:
        """The next event, after the index of its generation; None after `timeout` seconds without any.

        Raises the exception of a generation that failed. Waits for ever after the last GenerationResult.
        """
        try:
            async with asyncio.timeout(timeout):
                index, event = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(event, Exception):
            raise event
        return index, event

    async def _read(self, index: int) -> None:
        events, watch = self._waiting.pop(index).run(), self._watches[index]
        try:
            async for event in events:
                if isinstance(event, GenerationResult) and event.reason not in ("stop", "length"):
                    raise PacelineError(f"The answer could not be finished ({event.reason}).")
                watch.took(event)
                await self._queue.put((index, event))
                if isinstance(event, GenerationResult):
                    return
            raise PacelineError("The answer ended without saying why.")
        except Exception as error:
            watch.failed()
            await self._queue.put((index, error))
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()  # cancels the generation if it has not ended
