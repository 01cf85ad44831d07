"""What a workflow does for one question: search both sides' documents, rerank, refine, and read what was found.

Where another side's model may write texts, what the two sides have found is reranked and refined apart. The public
text's passages are the best public ones, whatever the private documents hold, so that nothing of these shows in what is
sent; the answer reads the best of both, and what else the public text says is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol, TypeVar

import numpy as np

from paceline.core.side import Side
from paceline.errors import PacelineError
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage, Vectors
from paceline.rag.rerank import best_first
from paceline.runtime.units import UnitRegistry
from paceline.runtime.workflows.agent_text import CHARACTERS, AgentText, Noting, Reader
from paceline.runtime.workflows.driver import Outcome, Work
from paceline.workflow.agents.records import AgentParser, Evidence, Origin, Prompt, SourcePassage
from paceline.workflow.agents.roles import (
    MAX_STATEMENTS,
    REFINE,
    REWRITE,
    AnyAgent,
    Queries,
    Refined,
    RefineInputs,
    RewriteInputs,
    most_statements,
)
from paceline.workflow.builder import INSTRUCTIONS, PUBLIC
from paceline.workflow.graph import Launch, SubStage

# Time limits of stages: one that takes longer counts as failed, and the workflow goes on without it.


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


# Which of what a workflow has found is read: the best of a search, and the answer's list.


MAX_READ: Final = 4  # passages of the answer, of each side's documents and of the web


@dataclass(frozen=True, slots=True)
class Found:
    """A passage, and whose it is."""

    passage: Passage
    side: Side
    private: bool
    web: bool = False  # it is what a search of the web has found, a page or a passage of the cloud's documents


class Claims:
    """Passages of a workflow's lookups, each once: those of one side that say the same are one, whatever found them."""

    def __init__(self) -> None:
        self._taken: set[tuple[Side, str]] = set()

    def take(self, found: Sequence[Found]) -> list[Found]:
        """Those that were not taken before."""
        said = {(each.side, " ".join(passages_text(each.passage).split())): each for each in found}
        new = {key: each for key, each in said.items() if key not in self._taken}
        self._taken |= set(new)
        return list(new.values())


@dataclass(slots=True)
class Shortlist:
    """Passages that are reranked together, a part at a time. searches: that find them and have not ended."""

    searches: int = 1
    found: list[Found] = field(default_factory=list)
    _scores: dict[int, float] = field(default_factory=dict)  # by place in `found`

    def take(self, found: Sequence[Found]) -> bool:
        """A search has found these. Whether it was the last one."""
        self.found += found
        self.searches -= 1
        return self.searches <= 0

    def score(self, first: int, scores: Sequence[float]) -> None:
        self._scores |= dict(enumerate(map(float, scores), first))

    @property
    def is_ranked(self) -> bool:
        """Nothing more will be found, and all that was has a score."""
        return self.searches <= 0 and len(self._scores) == len(self.found)

    @property
    def scores(self) -> list[float]:
        """Of all that was found. Valid when it is ranked."""
        return [self._scores[place] for place in range(len(self.found))]


def best_of(lists: Sequence[Shortlist], count: int) -> list[Found]:
    """The best so many of ranked shortlists, best first."""
    found = [each for ranked in lists for each in ranked.found]
    scores = np.array([score for ranked in lists for score in ranked.scores])
    return [found[place] for place in best_first(scores)[:count]]


def reading_list(found: Sequence[Found], side: Side) -> tuple[tuple[Passage, ...], tuple[Passage, ...]]:
    """Passages of this side and of the other one, the best of each origin by their scores, in the order they were
    found."""
    origins: dict[tuple[bool, bool], list[int]] = {}
    for place, each in enumerate(found):
        origins.setdefault((each.side != side, each.web), []).append(place)
    kept = sorted(
        place
        for places in origins.values()
        for place in sorted(places, key=lambda at: (-found[at].passage.score, at))[:MAX_READ]
    )
    own = tuple(found[place].passage for place in kept if found[place].side == side)
    return own, tuple(found[place].passage for place in kept if found[place].side != side)


# What becomes of the agents' texts: sub-questions are looked up, statements take their passages' place.


class ReadsLater(Protocol):
    def read_later(self, found: Sequence[Found]) -> None:
        """Passages that the answer is to read."""


class LooksUp(Protocol):
    def look_up(self, question: str) -> list[tuple[SubStage, Work]]:
        """Sub-stages that search for a sub-question."""


class SubQuestions:
    """Looks each sub-question up as soon as it is written. The question itself is looked up in any case."""

    def __init__(self, workflow: LooksUp, question: str) -> None:
        self._workflow = workflow
        self._question = question
        self._inputs = RewriteInputs(question)  # not the conversation: what is written leaves this side
        self._parser: AgentParser[str, Queries] = REWRITE.parser(self._inputs)
        self._found: list[str] = []

    private = False  # the user's own words alone
    is_wanted = True
    share = 1.0

    def messages(self) -> Prompt:
        return REWRITE.messages(self._inputs)

    def restart(self) -> None:
        self._parser = REWRITE.parser(self._inputs)

    def read(self, text: str) -> Outcome:
        return replace(self._look_up(self._parser.feed(text)), finished=self._parser.done)

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        last = self._look_up(self._parser.end())
        return last, fault or "; ".join(self._found) or "no sub-question: the question itself is looked up"

    def _look_up(self, questions: Sequence[str]) -> Outcome:
        new = [question for question in questions if question not in (self._question, *self._found)]
        self._found += new
        return Outcome(added=[work for question in new for work in self._workflow.look_up(question)])


class Refining:
    """Statements are read instead of the passages that they cite; without any, the passages are.

    is_wanted: whether any of its passages is read.
    """

    def __init__(self, question: str, heard: Callable[[Sequence[Evidence]], None] = lambda _: None) -> None:
        """heard: called with what was refined, or with the passages where nothing was."""
        self.is_wanted = True
        self._question = question
        self._heard = heard
        self._statements: dict[SourcePassage, list[str]] = {}  # by passage that they cite; empty: they are read whole
        self._found: dict[SourcePassage, Found] = {}
        self._inputs = RefineInputs(question, ())
        self._parser: AgentParser[Evidence, Refined] = REFINE.parser(self._inputs)

    def begin(self, found: Sequence[Found]) -> None:
        """What the text is to read, best first."""
        self._found = {_source(each): each for each in found}
        self._inputs = RefineInputs(self._question, tuple(self._found))
        self._parser = REFINE.parser(self._inputs)

    @property
    def private(self) -> bool:
        return any(found.private for found in self._found.values())

    @property
    def share(self) -> float:
        return most_statements(len(self._found)) / MAX_STATEMENTS

    def has_any(self, passages: Sequence[Found]) -> bool:
        return any(found in passages for found in self._found.values())

    def evidence(self, wanted: Sequence[Found]) -> list[Found]:
        """What is read of its passages, of those that are wanted. Valid when the text has ended."""
        if not self._statements:
            return [found for found in self._found.values() if found in wanted]
        cited = ((self._found[source], texts) for source, texts in self._statements.items())
        return [_refined(found, texts) for found, texts in cited if found in wanted]

    def messages(self) -> Prompt:
        return REFINE.messages(self._inputs)

    def restart(self) -> None:
        self._parser = REFINE.parser(self._inputs)

    def read(self, text: str) -> Outcome:
        self._parser.feed(text)
        return Outcome(finished=self._parser.done)

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        self._parser.end()
        refined = self._parser.result()
        cited = self._statements
        failed = refined.fallback or fault is not None
        self._heard([Evidence.of(source) for source in self._found] if failed else refined.evidence)
        for evidence in () if failed else refined.evidence:
            for source in evidence.sources:
                cited.setdefault(source, []).append(evidence.text)
        if not self.is_wanted:
            return Outcome(), fault or "not read: other passages of this search are better"
        told = f"{sum(map(len, cited.values()))} statements of {len(cited)} passages" if cited else "no statement"
        return Outcome(), fault or (told if cited else f"{told}: the passages are read whole")


def _source(found: Found) -> SourcePassage:
    passage = found.passage
    side: Origin = "web" if found.web else found.side
    return SourcePassage(passage.text, side, found.private, passage.title, passage.file_id, passage.url)


def _refined(found: Found, statements: Sequence[str]) -> Found:
    return replace(found, passage=replace(found.passage, text=" ".join(statements)))


ALL: Final = ""  # zone of a text that may read private passages


class Places(Protocol):
    """Where lookups search. `embed`, `search` and `rerank` are called on a host unit's thread."""

    @property
    def has_far(self) -> bool:
        """Whether the other side's documents are searched."""

    def sent(self) -> Mapping[str, float]:
        """Bytes sent to the other side, by kind of message."""

    def embed(self, query: str) -> Vectors | None:
        """(1, dimensions). None: nothing here can be searched."""

    def search(self, query: str, vector: Vectors) -> Sequence[Found]: ...

    async def search_far(self, query: str) -> Sequence[Found]:
        """Of the other side. Raises PacelineError."""

    def rerank(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """A score for each text, larger ones better."""


class Reading(Noting, ReadsLater, Protocol):
    """The workflow that a lookup is part of."""

    places: Places
    registry: UnitRegistry

    def claim(self, found: Sequence[Found]) -> list[Found]:
        """Those that no other lookup has."""

    async def read(self, launch: Launch, found: Sequence[Found]) -> int:
        """Prefill some of what the answer is to read, as it will have it, unless it begins now. Returns how many tokens
        that were, about. Raises PacelineError."""


@dataclass(frozen=True, slots=True)
class Refinement:
    """A text in which passages are refined, and what becomes of it."""

    reader: Refining
    text: AgentText


class Agents(Protocol):
    def agent(self, kind: AnyAgent, messages: Callable[[], Prompt], reader: Reader, zone: str = ALL) -> AgentText:
        """A text of an agent, of that zone."""


def refinements(
    agents: Agents,
    question: str,
    stages: Container[str],
    heard: Callable[[Sequence[Evidence]], None] = lambda _: None,
) -> dict[str, Refinement]:
    """Texts in which a lookup's passages are refined, by zone: those that it has a stage for. heard: see `Refining`."""
    found: dict[str, Refinement] = {}
    for zone in (ALL, PUBLIC):
        if f"refine{zone}.prefill" in stages:
            reader = Refining(question, heard)
            found[zone] = Refinement(reader, agents.agent(REFINE, reader.messages, reader, zone))
    return found


@dataclass(slots=True)
class Lookup:
    """nodes: by stage, as the builder made them. kept: passages that are read, at most. refined: by zone, where the
    workflow refines."""

    question: str
    run: Reading
    nodes: dict[str, SubStage]
    kept: int
    refined: Mapping[str, Refinement] = field(default_factory=dict)
    _vector: Vectors | None = None
    _lists: dict[str, Shortlist] = field(default_factory=dict)  # by zone
    _best: list[Found] | None = None  # of all lists: what is read; None: not known yet
    _evidence: list[Found] | None = None  # what the answer reads of it; None: it has not been told

    def __post_init__(self) -> None:
        zones = [zone for zone in (ALL, PUBLIC) if f"rerank{zone}" in self.nodes]
        searches = max(1, sum(stage.startswith("search") for stage in self.nodes))  # a page's passages count as one
        self._lists = {zone: Shortlist(searches // len(zones)) for zone in zones}

    def works(self) -> list[tuple[SubStage, Work]]:
        works: dict[str, Work] = {
            "embed question": self._embed,
            "search": self._search,
            "search far": self._search_far,
            "read": self._read,
        }
        works |= {f"rerank{zone}": partial(self._rerank, zone) for zone in self._lists}
        for zone, each in self.refined.items():
            works |= {f"refine{zone}.prefill": each.text.prefill, f"refine{zone}.decode": each.text.decode}
        return [(node, works[stage]) for stage, node in self.nodes.items()]

    async def _embed(self, launch: Launch) -> Outcome:
        try:
            self._vector = await within(
                STAGE_S, self.run.registry.run(launch.unit, lambda: self.run.places.embed(self.question))
            )
        except PacelineError as error:
            self.run.note("embed question", launch, str(error), failed=True)
        return Outcome()

    async def _search(self, launch: Launch) -> Outcome:
        vector, found = self._vector, list[Found]()
        if vector is not None:
            try:
                searching = self.run.registry.run(launch.unit, lambda: self.run.places.search(self.question, vector))
                found = list(await within(STAGE_S, searching))
            except PacelineError as error:
                self.run.note("search", launch, str(error), failed=True)
        return self._searched("search", launch, found)

    async def _search_far(self, launch: Launch) -> Outcome:
        found: Sequence[Found] = ()
        try:
            found = await within(STAGE_S, self.run.places.search_far(self.question))
        except PacelineError as error:
            self.run.note("search far", launch, f"the other side's documents are not read: {error}", failed=True)
        return self._searched("search far", launch, found)

    def _searched(self, stage: str, launch: Launch, found: Sequence[Found]) -> Outcome:
        new = self.run.claim(found)
        self.run.note(stage, launch, f"{len(new)} new of {len(found)} passages for {self.question!r}")
        return self.take(new, PUBLIC if stage == "search far" and PUBLIC in self._lists else ALL)

    def take(self, found: Sequence[Found], zone: str) -> Outcome:
        """A search has found passages that no other lookup has. After the last one it is known how much is to be
        reranked, or that nothing is."""
        ranked = self._lists[zone]
        if not ranked.take(found):
            return Outcome()
        rerank = self.nodes[f"rerank{zone}"].id
        if ranked.found:
            return Outcome(resized=[(rerank, len(ranked.found))])
        known = self._known(zone)
        return Outcome(resized=known.resized, dropped=[rerank, *known.dropped])

    async def _rerank(self, zone: str, launch: Launch) -> Outcome:
        ranked = self._lists[zone]
        part = ranked.found[launch.first : launch.first + launch.count]
        texts = [passages_text(found.passage) for found in part]
        try:
            scoring = self.run.registry.run(
                launch.unit, lambda: self.run.places.rerank(self.question, texts) if texts else ()
            )
            scores = await within(STAGE_S, scoring)
        except PacelineError as error:
            self.run.note(f"rerank{zone}", launch, f"by the search's own scores: {error}", failed=True)
            scores = [found.passage.score for found in part]
        ranked.score(launch.first, scores)
        if not ranked.is_ranked:
            return Outcome()
        best = min(self.kept, len(ranked.found))
        self.run.note(f"rerank{zone}", launch, f"the best {best} of {len(ranked.found)} passages")
        return self._known(zone)

    def _known(self, zone: str) -> Outcome:
        """A shortlist is ranked. The public text's passages are known with theirs, all others with the last one."""
        lists = list(self._lists.values())
        parts: list[Outcome] = []
        if zone == PUBLIC:
            parts.append(self._refine(PUBLIC, best_of([self._lists[PUBLIC]], self.kept)))
        if all(each.is_ranked for each in lists):
            self._best = best_of(lists, self.kept)
            if PUBLIC in self.refined:
                reader = self.refined[PUBLIC].reader
                reader.is_wanted = reader.has_any(self._best)
            if ALL in self._lists:
                parts.append(self._refine(ALL, [each for each in self._best if each in self._lists[ALL].found]))
            if not self._best and "read" in self.nodes:
                parts.append(Outcome(dropped=[self.nodes["read"].id]))
        resized = [each for part in parts for each in part.resized]
        return Outcome(resized=resized, dropped=[each for part in parts for each in part.dropped])

    def _refine(self, zone: str, found: Sequence[Found]) -> Outcome:
        """The passages of a text are known, or that it has none; where the workflow has no such text, they are read."""
        if zone not in self.refined:
            self.run.read_later(found)
            return Outcome()
        prefill, decode = (self.nodes[f"refine{zone}.{phase}"].id for phase in ("prefill", "decode"))
        if not found:
            return Outcome(dropped=[prefill, decode])
        self.refined[zone].reader.begin(found)
        tokens = sum(len(passages_text(each.passage)) for each in found) // CHARACTERS
        return Outcome(resized=[(prefill, tokens + INSTRUCTIONS)])

    async def _read(self, launch: Launch) -> Outcome:
        if self._evidence is None:  # else the launch is another try
            best = self._best or ()
            self._evidence = [found for each in self.refined.values() for found in each.reader.evidence(best)]
            self.run.read_later(self._evidence)
        tokens = 0
        try:
            tokens = await within(STAGE_S, self.run.read(launch, self._evidence))
        except PacelineError as error:
            self.run.note("read", launch, str(error), failed=True)
        return Outcome(tokens, finished=True)
