"""A text that an agent writes, as the work of its two sub-stages: reading the prompt, and writing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.errors import PacelineError
from paceline.runtime.workflows.driver import Outcome
from paceline.runtime.workflows.text_stream import Part, TextStream
from paceline.workflow.agents.records import Prompt
from paceline.workflow.events import Launch

log = logging.getLogger("paceline.workflow")

Write = Callable[[Prompt, int, float], Awaitable[TextStream]]


class Reader(Protocol):
    """What becomes of a text."""

    def read(self, text: str) -> Outcome:
        """The next part of it. `finished`: no more of it is wanted."""

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        """There is no more of it: what follows, and what is told of it. fault: why it could not be written; None: it
        was."""


class Noting(Protocol):
    def note(
        self, stage: str, launch: Launch, text: str, *, failed: bool = False, seconds: float | None = None
    ) -> None:
        """A stage has ended. text: what came of it, never of a document. seconds: s, since its first launch; None: it
        had one."""


@dataclass(slots=True)
class AgentText:
    """write: begins the generation of an answer to messages, of so many tokens at most, of that criticality. Faults of
    the generation are told to the reader and do not fail the workflow."""

    stage: str
    messages: Callable[[], Prompt]  # asked for when the prompt is read
    max_tokens: int
    reader: Reader
    write: Write
    run: Noting
    limit_s: float
    tokens: int = 0  # written
    _stream: TextStream | None = None
    _fault: str | None = None
    _began: float = 0.0  # on the loop's clock

    async def prefill(self, launch: Launch) -> Outcome:
        """All of it is read at once."""
        self._began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self.limit_s):
                self._stream = await self.write(self.messages(), self.max_tokens, launch.criticality)
                await self._stream.begun()
        except (PacelineError, TimeoutError, ValueError) as error:
            self._failed(error)
        return Outcome(finished=True)

    async def decode(self, launch: Launch) -> Outcome:
        part = await self._part(launch.count)
        self.tokens += part.tokens
        found = self.reader.read(part.text)
        if not part.ended and not found.finished:
            return replace(found, items=part.tokens)
        await self.aclose()
        last, told = self.reader.end(self._fault)
        seconds = asyncio.get_running_loop().time() - self._began
        self.run.note(self.stage, launch, told, failed=self._fault is not None, seconds=seconds)
        return Outcome(
            part.tokens,
            finished=True,
            added=(*found.added, *last.added),
            resized=(*found.resized, *last.resized),
            dropped=(*found.dropped, *last.dropped),
        )

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    async def _part(self, tokens: int) -> Part:
        """The next part; an empty last one where the text cannot be written."""
        if self._stream is not None and self._fault is None:
            try:
                async with asyncio.timeout_at(self._began + self.limit_s):
                    return await self._stream.take(tokens)
            except (PacelineError, TimeoutError) as error:
                self._failed(error)
        return Part("", 0, ended=True)

    def _failed(self, error: Exception) -> None:
        self._fault = f"no end within {self.limit_s:g} s" if isinstance(error, TimeoutError) else str(error)
        log.warning("%s of a workflow could not be written: %s", self.stage, self._fault)
