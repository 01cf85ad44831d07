"""What a workflow does for one question: search both sides' documents, rerank, refine, and read what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from paceline.core.side import Side
from paceline.errors import PacelineError
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage, Vectors
from paceline.rag.rerank.reranker import best_first
from paceline.runtime.units.registry import UnitRegistry
from paceline.runtime.workflows.agent_text import AgentText, Noting
from paceline.runtime.workflows.driver import Outcome, Work
from paceline.runtime.workflows.limits import STAGE_S, within
from paceline.workflow.events import Launch
from paceline.workflow.graph import SubStage


@dataclass(frozen=True, slots=True)
class Found:
    """A passage, and whose it is."""

    passage: Passage
    side: Side
    private: bool
    web: bool = False  # it is what a search of the web has found, a page or a passage of the cloud's documents


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


class Reading(Noting, Protocol):
    """The workflow that a lookup is part of."""

    places: Places
    registry: UnitRegistry

    def claim(self, found: Sequence[Found]) -> list[Found]:
        """Those that no other lookup has."""

    async def read(self, launch: Launch) -> None:
        """Prefill what has been found so far, as the answer will have it. Raises PacelineError."""


@dataclass(slots=True)
class Lookup:
    """nodes: by stage, as the builder made them. kept: passages that are read, at most. chosen: called with them, best
    first, when they are known; refine: reads them, where the workflow has that."""

    question: str
    run: Reading
    nodes: dict[str, SubStage]
    kept: int
    chosen: Callable[[Sequence[Found]], None]
    refine: AgentText | None = None
    _vector: Vectors | None = None
    _searches: int = 0  # not ended yet
    _found: list[Found] = field(default_factory=list)
    _scores: dict[int, float] = field(default_factory=dict)  # by place in `_found`

    def works(self) -> list[tuple[SubStage, Work]]:
        works: dict[str, Work] = {
            "embed question": self._embed,
            "search": self._search,
            "search far": self._search_far,
            "rerank": self._rerank,
            "read": self._read,
        }
        if self.refine is not None:
            works |= {"refine.prefill": self.refine.prefill, "refine.decode": self.refine.decode}
        self._searches = sum(stage.startswith("search") for stage in self.nodes)
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
        """A search has ended. After the last one it is known how much is to be reranked, or that nothing is."""
        new = self.run.claim(found)
        self._searches -= 1
        self.run.note(stage, launch, f"{len(new)} new of {len(found)} passages for {self.question!r}")
        return self.take(new)

    def take(self, found: Sequence[Found]) -> Outcome:
        """Passages that no other lookup has. After the last ones, what follows."""
        self._found += found
        if self._searches:
            return Outcome()
        if not self._found:
            self.chosen(())
            return Outcome(dropped=[self.nodes[at].id for at in _AFTER if at in self.nodes])
        return Outcome(resized=[(self.nodes["rerank"].id, len(self._found))])

    async def _rerank(self, launch: Launch) -> Outcome:
        part = self._found[launch.first : launch.first + launch.count]
        texts = [passages_text(found.passage) for found in part]
        try:
            scoring = self.run.registry.run(
                launch.unit, lambda: self.run.places.rerank(self.question, texts) if texts else ()
            )
            scores = await within(STAGE_S, scoring)
        except PacelineError as error:
            self.run.note("rerank", launch, f"by the search's own scores: {error}", failed=True)
            scores = [found.passage.score for found in part]
        self._scores |= dict(enumerate(map(float, scores), launch.first))
        if len(self._scores) == len(self._found):
            order = best_first(np.array([self._scores[place] for place in range(len(self._found))]))
            best = [self._found[place] for place in order[: self.kept]]
            self.run.note("rerank", launch, f"{len(best)} of {len(self._found)} passages are read")
            self.chosen(best)
        return Outcome()

    async def _read(self, launch: Launch) -> Outcome:
        try:
            await within(STAGE_S, self.run.read(launch))
        except PacelineError as error:
            self.run.note("read", launch, str(error), failed=True)
        return Outcome(finished=True)


_AFTER: Final = ("rerank", "refine.prefill", "refine.decode", "read")  # a lookup's stages after its searches
