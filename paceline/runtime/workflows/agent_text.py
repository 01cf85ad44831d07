"""A text that an agent writes, as the work of its two sub-stages: reading the prompt, and writing."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from paceline.errors import PacelineError
from paceline.runtime.workflows.driver import Outcome
from paceline.runtime.workflows.text_stream import Part, TextStream
from paceline.workflow.agents.records import Prompt
from paceline.workflow.events import Launch

log = logging.getLogger("paceline.workflow")

Write = Callable[[Prompt, int, float], Awaitable[TextStream]]
NOTHING: Final = Part("", 0, ended=True)
CHARACTERS: Final = 4  # of a token, about


class Reader(Protocol):
    """What becomes of a text."""

    def read(self, text: str) -> Outcome:
        """The next part of it. `finished`: no more of it is wanted."""

    @property
    def private(self) -> bool:
        """Whether anything of its prompt is private."""

    @property
    def is_wanted(self) -> bool:
        """True if anything of it is read. A text that nobody reads is not written on this side. On another one it is
        written to its end: to stop it there would show why."""

    @property
    def share(self) -> float:
        """Of the tokens that its agent may write at most, as many as this text may need."""

    def restart(self) -> None:
        """The text begins anew, written by another model: what was decided stays, what was read is forgotten."""

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        """There is no more of it: what follows, and what is told of it. fault: why it could not be written; None: it
        was."""


class Elsewhere(Protocol):
    """Units of another side that may write a text."""

    def has(self, unit: str) -> bool: ...

    def write(self, messages: Prompt, max_tokens: int) -> TextStream: ...

    def rest(self, reason: str) -> None:
        """They have not written one. Launches there are given up, and begin anew on this side."""


class Noting(Protocol):
    def note(
        self, stage: str, launch: Launch, text: str, *, failed: bool = False, seconds: float | None = None
    ) -> None:
        """A stage has ended. text: what came of it, never of a document. seconds: s, since its first launch; None: it
        had one."""


@dataclass(slots=True)
class AgentText:
    """write: begins the generation of an answer to messages, of so many tokens at most, of that criticality. Faults of
    the generation are told to the reader and do not fail the workflow. elsewhere: where it may be written besides; of
    what fails there, nothing is told: it is written here from its beginning."""

    stage: str
    messages: Callable[[], Prompt]  # asked for when the prompt is read
    max_tokens: int
    reader: Reader
    write: Write
    run: Noting
    limit_s: float
    elsewhere: Elsewhere | None = None
    tokens: int = 0  # written
    _prompt: int = 0  # tokens, about
    _stream: TextStream | None = None
    _fault: str | None = None
    _began: float | None = None  # on the loop's clock
    _away: bool = False  # another side writes it

    async def prefill(self, launch: Launch) -> Outcome:
        """All of it is read at once, however much the launch is for: what is learnt of it is of the whole prompt."""
        if self._began is None:
            self._began = asyncio.get_running_loop().time()
        if self._is_idle(launch):
            return Outcome(0, finished=True)
        return Outcome(self._prompt, finished=True) if await self._begin(launch) else Outcome(0)

    async def decode(self, launch: Launch) -> Outcome:
        if self._is_idle(launch):
            return await self._end(launch, NOTHING, Outcome())
        if self._away and not self._is_away(launch):
            self.reader.restart()
            await self._begin(launch)
        part = await self._part(launch.count)
        if part is None:
            return Outcome(0)  # of a launch that was given up meanwhile
        self.tokens += part.tokens
        found = self.reader.read(part.text)
        if not part.ended and not found.finished:
            return replace(found, items=part.tokens)
        return await self._end(launch, part, found)

    async def _end(self, launch: Launch, part: Part, found: Outcome) -> Outcome:
        """There is no more of it, or no more is wanted."""
        await self.aclose()
        last, told = self.reader.end(self._fault)
        seconds = asyncio.get_running_loop().time() - (self._began or 0.0)
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

    def _is_idle(self, launch: Launch) -> bool:
        """Nobody reads it, and this side would write it."""
        return not self.reader.is_wanted and not self._is_away(launch)

    def _is_away(self, launch: Launch) -> bool:
        return self.elsewhere is not None and self.elsewhere.has(launch.unit)

    async def _begin(self, launch: Launch) -> bool:
        """Begin the text where the launch is, and wait until its prompt is read. False: not, since another side has
        not."""
        await self.aclose()
        self._away = self._is_away(launch)
        try:
            async with asyncio.timeout_at((self._began or 0.0) + self.limit_s):
                messages, tokens = self.messages(), math.ceil(self.max_tokens * self.reader.share)
                self._prompt = max(1, sum(len(str(message["content"])) for message in messages) // CHARACTERS)
                if self.elsewhere is not None and self._away:
                    if self.reader.private:
                        raise PacelineError("a prompt with private text is read by no other side")
                    self._stream = self.elsewhere.write(messages, tokens)
                else:
                    self._stream = await self.write(messages, tokens, launch.criticality)
                await self._stream.begun()
        except (PacelineError, TimeoutError, ValueError) as error:
            return self._failed(error)
        return True

    async def _part(self, tokens: int) -> Part | None:
        """The next part; an empty last one where the text cannot be written, None where another side has not."""
        if self._stream is not None and self._fault is None:
            try:
                async with asyncio.timeout_at((self._began or 0.0) + self.limit_s):
                    return await self._stream.take(tokens)
            except (PacelineError, TimeoutError) as error:
                if not self._failed(error):
                    return None
        return NOTHING

    def _failed(self, error: Exception) -> bool:
        """Whether that is the end of the text; else it begins anew on this side."""
        fault = f"no end within {self.limit_s:g} s" if isinstance(error, TimeoutError) else str(error)
        log.warning("%s of a workflow could not be written: %s", self.stage, fault)
        if self.elsewhere is not None and self._away:
            self.elsewhere.rest(fault)
            return False
        self._fault = fault
        return True
