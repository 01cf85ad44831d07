"""Answers of a model that has to be loaded first: admitted when they are run, so that a stream is not silent meanwhile.

What would refuse such a request then ends its stream, if that takes more than a second: `streaming`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from paceline.runtime.service import GenerateEvent, Generation, Service


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
