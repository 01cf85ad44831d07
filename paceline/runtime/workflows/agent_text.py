"""Texts that agents write: each is the work of two stages, reading the prompt, and writing."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, Self

from paceline.errors import PacelineError
from paceline.runtime.endpoint import OutsideEndpoint, Told
from paceline.runtime.link.connection import Link
from paceline.runtime.outside import OutsideText
from paceline.runtime.service import GenerateEvent, Generation, GenerationResult, TextDelta
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.remote import LEVELS, RemoteText
from paceline.runtime.units import CLOUD, ENGINE
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.strategies.base import Privacy
from paceline.workflow.agents import AgentTask, Prompt, QueryAgent
from paceline.workflow.flows import READ_PROMPT, WRITE, TextStages
from paceline.workflow.graph import Launch, Outcome, Stage
from paceline.workflow.reading import folded

log = logging.getLogger("paceline.workflow")

TextSource = Generation | RemoteText | OutsideText


@dataclass(frozen=True, slots=True)
class WrittenPart:
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

    async def begun(self) -> Self:
        """Wait for the first token: the prompt has been read then. Raises what the generation raises."""
        if self._looked is None:
            self._looked = await self._parts.get()
        if isinstance(self._looked, Exception):
            raise self._looked
        return self

    async def take(self, tokens: int) -> WrittenPart:
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
                rest = max(0, part.completion_tokens - self._taken)
                self._taken += rest
                return WrittenPart(text, taken + rest, ended=True)
            text += "" if part.thinking else part.text
            taken += part.tokens
            self._taken += part.tokens
        return WrittenPart(text, taken, ended=False)

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
            await events.aclose()


class Reader(Protocol):
    """What an agent is asked, and what becomes of its text."""

    # Anything of it is read. A text that nobody reads is not written on this side. On another one it is written to its
    # end: to stop it there would show why.
    is_wanted: bool

    def asked(self) -> AgentTask[Any]:
        """Called when the prompt is to be read. Raises ValueError where it may not be."""

    @property
    def private(self) -> bool:
        """Whether anything of its prompt is private."""

    def read(self, text: str) -> Outcome:
        """The next part of it. `finished`: no more of it is wanted."""

    def restart(self) -> None:
        """The text begins anew, written by another model: what was decided stays, what was read is forgotten."""

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        """There is no more of it: what follows, and what is told of it. fault: why it could not be written; None: it
        was."""


@dataclass(slots=True)
class Searching:
    """Searches for each query of a text as soon as its line ends, and for none twice."""

    ask: Callable[[], QueryAgent]
    search: Callable[[str], Sequence[Stage]]  # stages that search for a query
    told: str  # where there was no query
    before: Callable[[], set[str]] = set  # what else was searched for, folded
    ended: Callable[[], Sequence[Stage]] = tuple  # called at the end: stages that are not wanted then
    private: bool = False
    is_wanted: bool = True
    _asked: QueryAgent | None = None
    _parser: Any = None
    _found: dict[str, str] = field(default_factory=dict)  # queries, by their folded form

    @property
    def found(self) -> set[str]:
        """What it has searched for, folded."""
        return set(self._found)

    def asked(self) -> QueryAgent:
        if self._asked is None:
            self._asked = self.ask()
            self._parser = self._asked.parser()
        return self._asked

    def restart(self) -> None:
        self._parser = self.asked().parser()

    def read(self, text: str) -> Outcome:
        if self._parser is None:
            return Outcome(finished=True)
        return replace(self._begin(self._parser.feed(text)), finished=self._parser.done)

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        outcome = Outcome() if self._parser is None else self._begin(self._parser.end())
        told = "; ".join(self._found.values()) or self.told
        return replace(outcome, dropped=self.ended()), fault or told

    def _begin(self, queries: Sequence[str]) -> Outcome:
        before = self.before() | self.found
        new = {key: query for query in queries if (key := folded(query)) not in before}
        self._found |= new
        return Outcome(added=[stage for query in new.values() for stage in self.search(query)])


Write = Callable[[Prompt, int, float], Awaitable[TextStream]]
STAGE_S: Final = 60.0  # longest time of an agent's text, and of a launch of any other stage before the answer
NOTHING: Final = WrittenPart("", 0, ended=True)
CHARACTERS: Final = 4  # of a token, about


class Note(Protocol):
    def __call__(self, launch: Launch, text: str, *, failed: bool = False, seconds: float | None = None) -> None:
        """A stage has ended. text: what came of it, never of a document, since clients keep it. seconds: s, since its
        first launch; None: it had one."""


@dataclass(slots=True)
class AgentText:
    """The work of two stages. write: begins the generation of an answer to messages, of so many tokens at most, of that
    criticality. Faults of the generation are told to the reader and do not fail the workflow. cloud: where it may be
    written besides; of what fails there, nothing is told: it is written here from its beginning."""

    stages: TextStages
    reader: Reader
    write: Write
    note: Note
    cloud: CloudTexts | None = None
    tokens: int = 0  # written
    _prompt: int = 0  # tokens, about
    _stream: TextStream | None = None
    _fault: str | None = None
    _began: float | None = None  # on the loop's clock
    _away: bool = False  # the cloud writes it

    def __post_init__(self) -> None:
        self.stages.read.run, self.stages.write.run = self._read, self._write

    async def _read(self, launch: Launch) -> Outcome:
        """All of it is read at once, however much the launch is for: what is learnt of it is of the whole prompt."""
        if self._began is None:
            self._began = asyncio.get_running_loop().time()
        if self._is_idle(launch):
            return Outcome(0, finished=True)
        return Outcome(self._prompt, finished=True) if await self._begin(launch) else Outcome(0)

    async def _write(self, launch: Launch) -> Outcome:
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

    async def _end(self, launch: Launch, part: WrittenPart, found: Outcome) -> Outcome:
        """There is no more of it, or no more is wanted."""
        await self.aclose()
        last, told = self.reader.end(self._fault)
        seconds = asyncio.get_running_loop().time() - (self._began or 0.0)
        self.note(launch, told, failed=self._fault is not None, seconds=seconds)
        return Outcome(part.tokens, True, (*found.added, *last.added), (*found.dropped, *last.dropped))

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    def _is_idle(self, launch: Launch) -> bool:
        """Nobody reads it, and this side would write it."""
        return not self.reader.is_wanted and not self._is_away(launch)

    def _is_away(self, launch: Launch) -> bool:
        return self.cloud is not None and launch.unit in self.cloud.units.names

    async def _begin(self, launch: Launch) -> bool:
        """Begin the text where the launch is, and wait until its prompt is read. False: not, since the cloud has
        not."""
        await self.aclose()
        self._away = self._is_away(launch)
        try:
            async with asyncio.timeout_at((self._began or 0.0) + STAGE_S):
                asked = self.reader.asked()
                self._prompt = max(1, sum(len(each["content"]) for each in asked.messages) // CHARACTERS)
                if self.cloud is not None and self._away:
                    if self.reader.private:
                        raise PacelineError("a prompt with private text is read by no other side")
                    self._stream = TextStream(self.cloud.begin(asked.messages, asked.max_tokens))
                else:
                    self._stream = await self.write(asked.messages, asked.max_tokens, launch.criticality)
                await self._stream.begun()
        except (PacelineError, TimeoutError, ValueError) as error:
            return self._failed(error)
        return True

    async def _part(self, tokens: int) -> WrittenPart | None:
        """The next part; an empty last one where the text cannot be written, None where the cloud has not."""
        if self._stream is not None and self._fault is None:
            try:
                async with asyncio.timeout_at((self._began or 0.0) + STAGE_S):
                    return await self._stream.take(tokens)
            except (PacelineError, TimeoutError) as error:
                if not self._failed(error):
                    return None
        return NOTHING

    def _failed(self, error: Exception) -> bool:
        """Whether that is the end of the text; else it begins anew on this side."""
        fault = f"no end within {STAGE_S:g} s" if isinstance(error, TimeoutError) else str(error)
        log.warning("%s of a workflow could not be written: %s", self.stages.write.name, fault)
        if self.cloud is not None and self._away:
            self.cloud.units.rest(fault)
            return False
        self._fault = fault
        return True


# The cloud's model as units of a device's workflows: texts of agents that read nothing private.
#
# The scheduler decides which texts it is worth it for, by what they took there and by the link's round trip. Where the
# cloud refuses, is lost or mute, all its units are taken away for a while, and what was being written there is written
# here from its beginning. Not handled: several clouds, and a cloud's workflows on its devices' models.


REST_S: Final = 10.0  # for which a cloud that did not write a text is asked for none
KNOWN_S: Final = 60.0  # for which it is believed to be slower than this side: one that was busy is tried again
TEXT: Final = 32  # tokens of a prompt and of a text, of which it is asked which side is faster


Way = Link | OutsideEndpoint  # what leads to another writer


class CloudUnits:
    """Those of a node's scheduler; none at a cloud. Belongs to the event loop."""

    def __init__(self, driver: WorkflowDriver, kind: str = CLOUD) -> None:
        self._driver, self._kind = driver, kind
        self.names = tuple(unit.name for unit in driver.registry.units if unit.kind == kind)
        self._link: Way | None = None
        self._until = -math.inf  # on the loop's clock
        self._forgets = -math.inf  # likewise: when it may be tried again

    def offer(self, link: Way | None) -> bool:
        """Whether they may be used now. Tells the scheduler, and what the link takes."""
        if not self.names:
            return False
        now = asyncio.get_running_loop().time()
        if link is None or not link.accepting or now < self._until:
            self._driver.lose(self.names)
            return False
        another = link is not self._link  # perhaps of another cloud, or over another network
        if another or now >= self._forgets:
            self._link, self._forgets = link, now + KNOWN_S
            here, there = self._seconds(ENGINE), self._seconds(self._kind)
            # Known to write a text sooner than this side: then texts go there, and each tells what it takes now.
            is_faster = here is not None and there is not None and (link.rtt or 0.0) + there < here
            if another or not is_faster:
                for operation in (READ_PROMPT, WRITE):
                    self._driver.profiles.forget(operation.name, self._kind)
        self._driver.reach(self.names, link.rtt or 0.0, link.bandwidth)
        return True

    def _seconds(self, kind: str) -> float | None:
        """Of a text on a unit of a kind; None where it is not known."""
        known = [self._driver.profiles.get(operation.name, kind) for operation in (READ_PROMPT, WRITE)]
        seconds = [profile.seconds(TEXT) for profile in known if profile is not None]
        return sum(seconds) if len(seconds) == len(known) else None

    def texts(
        self,
        link: Link | None,
        privacy: Privacy,
        cache_key: Callable[[], bytes],
        told: Callable[[int], object] = lambda _: None,
    ) -> CloudTexts | None:
        """For a request; None where there is no cloud now, or its level of privacy keeps all texts here. told: tokens
        of its texts."""
        if not self.offer(link) or link is None or privacy not in LEVELS:
            return None
        key, egress = cache_key(), Egress()

        def write(messages: Told, max_tokens: int) -> TextSource:
            return RemoteText(link, messages, max_tokens, privacy, key, egress, told)

        return CloudTexts(self, write, egress)

    def rest(self, reason: str) -> None:
        """The cloud has not written a text: it is asked for none for a while."""
        log.warning("texts of workflows: nothing is asked of the %s for %g s: %s", self._kind, REST_S, reason)
        self._until = asyncio.get_running_loop().time() + REST_S
        self._driver.lose(self.names)


@dataclass(slots=True)
class CloudTexts:
    """For one request, whose level of privacy lets texts be written there. begin: a text, greedy as here. egress:
    counts what its texts have sent."""

    units: CloudUnits
    begin: Callable[[Told, int], TextSource]
    egress: Egress
