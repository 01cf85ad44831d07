"""The text of one generation, taken part by part by the launches of the sub-stage that writes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol, Self

from paceline.errors import PacelineError
from paceline.runtime.service import GenerateEvent, GenerationResult, TextDelta


class TextSource(Protocol):
    """What is read: a generation of this side, or a text that the other side's model writes."""

    def run(self) -> AsyncIterator[GenerateEvent]: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """What a launch has taken."""

    text: str
    tokens: int
    ended: bool  # nothing follows


class TextStream:
    """Reads a generation as fast as it comes; `take` waits for as much as a launch is to write. `aclose` cancels it.

    heard: called with each event as it comes, whether a launch takes it or not; failed: likewise, with what the
    generation raises.
    """

    def __init__(
        self,
        generation: TextSource,
        heard: Callable[[GenerateEvent], None] | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._generation = generation
        self._heard = heard or (lambda _: None)
        self._failed = failed or (lambda _: None)
        self._parts: asyncio.Queue[TextDelta | GenerationResult | Exception] = asyncio.Queue()
        self._looked: TextDelta | GenerationResult | Exception | None = None  # taken by `begun`
        self._taken = 0  # tokens
        self._reader = asyncio.create_task(self._read())
        self.result: GenerationResult | None = None

    async def begun(self) -> Self:
        """Wait for the first token: the prompt has been read then. Raises what the generation raises."""
        if self._looked is None:
            self._looked = await self._parts.get()
        if isinstance(self._looked, Exception):
            raise self._looked
        return self

    async def take(self, tokens: int) -> Part:
        """Text of at least so many tokens, or up to the end. Raises what the generation raises."""
        text, taken = "", 0
        while taken < tokens:
            part = await self._parts.get() if self._looked is None else self._looked
            self._looked = None
            if isinstance(part, Exception):
                raise part
            if isinstance(part, GenerationResult):
                if part.reason not in ("stop", "length"):
                    raise PacelineError(f"a text of the workflow could not be finished ({part.reason})")
                self.result = part
                rest = max(0, part.completion_tokens - self._taken)
                self._taken += rest
                return Part(text, taken + rest, ended=True)
            text += part.text
            taken += part.tokens
            self._taken += part.tokens
        return Part(text, taken, ended=False)

    async def aclose(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._generation.aclose()  # where the reader had not begun

    async def _read(self) -> None:
        events = self._generation.run()
        try:
            async for event in events:
                self._heard(event)
                self._parts.put_nowait(event)
        except Exception as error:
            self._failed(error)
            self._parts.put_nowait(error)
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()
