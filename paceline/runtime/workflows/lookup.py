"""What a workflow does for one question: search both sides' documents, rerank, refine, and read what was found.

Where another side's model may write texts, what the two sides have found is reranked and refined apart. The public
text's passages are the best public ones, whatever the private documents hold, so that nothing of these shows in what is
sent; the answer reads the best of both, and what else the public text says is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from paceline.errors import PacelineError
from paceline.rag.prompt import passages_text
from paceline.rag.records import Vectors
from paceline.runtime.units.registry import UnitRegistry
from paceline.runtime.workflows.agent_text import CHARACTERS, AgentText, Noting, Reader
from paceline.runtime.workflows.driver import Outcome, Work
from paceline.runtime.workflows.limits import STAGE_S, within
from paceline.runtime.workflows.readers import ReadsLater, Refining
from paceline.runtime.workflows.shortlist import Found, Shortlist, best_of
from paceline.workflow.agents.records import Evidence, Prompt
from paceline.workflow.agents.refine import REFINE
from paceline.workflow.agents.registry import AnyAgent
from paceline.workflow.builder import INSTRUCTIONS, PUBLIC
from paceline.workflow.events import Launch
from paceline.workflow.graph import SubStage

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
