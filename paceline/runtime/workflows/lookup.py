"""What a workflow does for one question: search both sides' documents, rerank, refine, and read what was found.

Where another side's model may write texts, what the two sides have found is reranked and refined apart. The public
text's passages are the best public ones, whatever the private documents hold, so that nothing of these shows in what is
sent; the answer reads the best of both, and what else the public text says is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol, TypeVar

import numpy as np

from paceline.core.side import Side
from paceline.errors import LinkError, PacelineError
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage, Selection, Vectors
from paceline.rag.rerank import Reranker, best_first
from paceline.rag.store.readable import Readable
from paceline.runtime.link.connection import Link
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.remote import search_cloud
from paceline.runtime.units import UnitRegistry
from paceline.runtime.workflows.agent_text import CHARACTERS, STAGE_S, Note, Reader
from paceline.strategies.base import other
from paceline.workflow import agents
from paceline.workflow.agents import Evidence, RefineAgent, SourcePassage
from paceline.workflow.flows import INSTRUCTIONS, RankStages, SearchStages, TextStages
from paceline.workflow.graph import Launch, Outcome, Stage
from paceline.workflow.jobs import named_in

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Found:
    """A passage, and whose it is."""

    passage: Passage
    side: Side
    private: bool
    web: bool = False  # it is what a search of the web has found, a page or a passage of the cloud's documents

    @property
    def source(self) -> SourcePassage:
        passage = self.passage
        side = "web" if self.web else self.side
        return SourcePassage(passage.text, side, self.private, passage.title, passage.file_id, passage.url)


CANDIDATES: Final = 8  # passages of a search that are reranked: 60 ms each on a core


@dataclass(slots=True)
class NodePlaces:
    """For one request. `embed`, `search` and `rerank` are called on a host unit's thread. link: to the side whose
    documents are searched too; None: to none. egress: counts the queries that are sent there, which are all that is
    sent."""

    side: Side
    store: Readable | None
    selection: Selection
    min_score: float
    reranker: Reranker | None  # None: passages keep the order of the search
    link: Link | None = None
    egress: Egress = field(default_factory=Egress)

    def embed(self, query: str) -> Vectors | None:
        """(1, dimensions). None: nothing here can be searched."""
        if self.store is None or not query.strip() or not self.store.count(self.selection):
            return None  # without loading a model
        return self.store.embedder.embed([query])

    def search(self, query: str, vector: Vectors, most: int = CANDIDATES) -> Sequence[Found]:
        """most: beyond the usual number also passages that are less similar, for jobs to read."""
        assert self.store is not None, "there is no vector without a store"
        least = self.min_score if most <= CANDIDATES else -1.0
        return self._found(self.store.search(query, most, self.selection, min_score=least, vector=vector[0]))

    def whole(self, query: str) -> Sequence[Found]:
        """All that is selected, in order; where the query names documents, these alone."""
        assert self.store is not None, "there is no vector without a store"
        found = self.store.whole(self.selection)
        named = named_in(query, {each.document for each in found})
        return self._found([each for each in found if each.document in named or not named])

    def titles(self) -> tuple[str, ...]:
        """Of the documents that are selected, with their sizes, where these are few."""
        outline = () if self.store is None else self.store.outline(self.selection, agents.MAX_TITLES)
        return tuple(f"{title} ({size} passages)" for title, size in outline)

    def around(self, found: Found, count: int) -> Sequence[Found]:
        """A passage with so many of its document before and after it; empty for one of the other side."""
        if self.store is None or found.side != self.side:
            return ()
        return self._found(self.store.around(found.passage.chunk_id, count))

    def reading(self, found: Found, asked: str) -> str | None:
        """What a model has said of a passage before; asked: a hash of what that was asked for."""
        if self.store is None or found.side != self.side:
            return None
        return self.store.store.find_reading(found.passage.chunk_id, asked)

    def keep_reading(self, found: Found, asked: str, owner: str, text: str) -> None:
        if self.store is not None and found.side == self.side:
            self.store.store.keep_reading(found.passage.chunk_id, asked, owner, text)

    def _found(self, passages: Sequence[Passage]) -> Sequence[Found]:
        return [Found(passage, self.side, private=self.side == "device") for passage in passages]

    async def search_far(self, query: str) -> Sequence[Found]:
        """What the other side finds. Raises PacelineError."""
        if self.link is None or not query.strip():
            return ()  # nothing is asked of the other side, as nothing is of this one
        try:
            found = await search_cloud(self.link, query, CANDIDATES, self.egress)
        except LinkError as error:
            raise PacelineError(str(error)) from error
        return [Found(passage, other(self.side), private=False) for passage in found]

    def rerank(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """A score for each text, larger ones better."""
        if self.reranker is None:
            return [-float(place) for place in range(len(texts))]
        return [float(score) for score in self.reranker.score(query, texts)]


MAX_READ: Final = 4  # passages of the answer, of each side's documents and of the web


class Claims:
    """Passages of a workflow's lookups, each once: those of one side that say the same are one, whatever found them."""

    def __init__(self) -> None:
        self._taken: set[tuple[Side, str]] = set()

    def take(self, found: Sequence[Found]) -> list[Found]:
        """Those that were not taken before."""
        said: dict[tuple[Side, str], Found] = {}
        for each in found:  # the best first
            said.setdefault((each.side, " ".join(passages_text(each.passage).split())), each)
        new = {key: each for key, each in said.items() if key not in self._taken}
        self._taken |= set(new)
        return list(new.values())


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
        self.begin(())

    def begin(self, found: Sequence[Found]) -> None:
        """What the text is to read, best first."""
        self._found = {each.source: each for each in found}
        self._asked = agents.refine(self._question, tuple(self._found))
        self.restart()

    @property
    def private(self) -> bool:
        return any(found.private for found in self._found.values())

    def has_any(self, passages: Sequence[Found]) -> bool:
        return any(found in passages for found in self._found.values())

    def evidence(self, wanted: Sequence[Found]) -> list[Found]:
        """What is read of its passages, of those that are wanted. Valid when the text has ended."""
        if not self._statements:
            return [found for found in self._found.values() if found in wanted]
        cited = ((self._found[source], " ".join(texts)) for source, texts in self._statements.items())
        return [replace(found, passage=replace(found.passage, text=said)) for found, said in cited if found in wanted]

    def asked(self) -> RefineAgent:
        return self._asked

    def restart(self) -> None:
        self._parser = self._asked.parser()

    def read(self, text: str) -> Outcome:
        self._parser.feed(text)
        return Outcome(finished=self._parser.done)

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        self._parser.end()
        cited, refined = self._statements, self._parser.found
        failed = self._parser.fallback or fault is not None
        self._heard([Evidence.of(source) for source in self._found] if failed else refined)
        for evidence in () if failed else refined:
            for source in evidence.sources:
                cited.setdefault(source, []).append(evidence.text)
        if not self.is_wanted:
            return Outcome(), fault or "not read: other passages of this search are better"
        told = f"{sum(map(len, cited.values()))} statements of {len(cited)} passages" if cited else "no statement"
        return Outcome(), fault or (told if cited else f"{told}: the passages are read whole")


@dataclass(slots=True, eq=False)
class Shortlist:
    """Passages that are reranked together, a part at a time, and refined in one text where the workflow refines."""

    stages: RankStages
    searches: int  # that find them and have not ended
    reader: Refining | None
    found: list[Found] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)  # by place in `found`

    @property
    def is_ranked(self) -> bool:
        """Nothing more will be found, and all that was has a score."""
        return self.searches <= 0 and len(self.scores) == len(self.found)


def best_of(lists: Sequence[Shortlist], count: int) -> list[Found]:
    """The best so many of ranked shortlists, best first."""
    found = [each for ranked in lists for each in ranked.found]
    scores = np.array([ranked.scores[place] for ranked in lists for place in range(len(ranked.found))])
    return [found[place] for place in best_first(scores)[:count]]


class Workflow(Protocol):
    """The one that a lookup is part of. kept: passages of a search that are read, at most."""

    places: NodePlaces
    registry: UnitRegistry
    claims: Claims
    kept: int

    @property
    def note(self) -> Note: ...

    def write(self, stages: TextStages, reader: Reader) -> None:
        """An agent's text is the work of these stages."""

    def read_later(self, found: Sequence[Found]) -> None:
        """Passages that the answer is to read."""

    async def read(self, launch: Launch, found: Sequence[Found]) -> int:
        """Prefill some of what the answer is to read, as it will have it, unless it begins now. Returns how many tokens
        that were, about. Raises PacelineError."""


async def attempted(run: Workflow, launch: Launch, work: Awaitable[T], otherwise: T, told: str = "") -> T:
    """Return the result of a launch's work, or `otherwise` where it fails or takes too long, which is noted. told: text
    before the reason in that note."""
    try:
        return await within(STAGE_S, work)
    except PacelineError as error:
        run.note(launch, f"{told}{error}", failed=True)
        return otherwise


class Lookup:
    """The work of a search's stages. heard: see `Refining`."""

    def __init__(
        self,
        question: str,
        run: Workflow,
        stages: SearchStages,
        heard: Callable[[Sequence[Evidence]], None] = lambda _: None,
    ) -> None:
        self.question = question
        self.run = run
        self.stages = stages
        self._vector: Vectors | None = None
        self._best: list[Found] | None = None  # of all lists: what is read; None: not known yet
        self._evidence: list[Found] | None = None  # what the answer reads of it; None: it has not been told
        searches = 1 if stages.public is not None else sum(each is not None for each in (stages.near, stages.far))
        self._any = self._shortlist(stages.any, searches, heard)
        self._public = self._shortlist(stages.public, 1, heard)
        self._lists = [each for each in (self._any, self._public) if each is not None]
        if stages.near is not None:
            stages.embed.run, stages.near.run = self._embed, self._search
        if stages.far is not None:
            stages.far.run = self._search_far
        if stages.read is not None:
            stages.read.run = self._read

    def _shortlist(
        self, stages: RankStages | None, searches: int, heard: Callable[[Sequence[Evidence]], None]
    ) -> Shortlist | None:
        if stages is None:
            return None
        reader = None
        if stages.refine is not None:
            reader = Refining(self.question, heard)
            self.run.write(stages.refine, reader)
        found = Shortlist(stages, searches, reader)
        stages.rerank.run = partial(self._rerank, found)
        return found

    async def _embed(self, launch: Launch) -> Outcome:
        embedding = self.run.registry.run(launch.unit, lambda: self.run.places.embed(self.question))
        self._vector = await attempted(self.run, launch, embedding, None)
        return Outcome()

    async def _search(self, launch: Launch) -> Outcome:
        vector = self._vector
        found: Sequence[Found] = ()
        if vector is not None:
            searching = self.run.registry.run(launch.unit, lambda: self._near(vector))
            found = await attempted(self.run, launch, searching, ())
        return self._searched(launch, found, self._any or self._public)

    def _near(self, vector: Vectors) -> Sequence[Found]:
        """What this side finds; called on a host unit's thread."""
        return self.run.places.search(self.question, vector)

    async def _search_far(self, launch: Launch) -> Outcome:
        searching = self.run.places.search_far(self.question)
        found = await attempted(self.run, launch, searching, (), "the other side's documents are not read: ")
        return self._searched(launch, found, self._public or self._any)

    def _searched(self, launch: Launch, found: Sequence[Found], ranked: Shortlist | None) -> Outcome:
        new = self.run.claims.take(found)
        self.run.note(launch, f"{len(new)} new of {len(found)} passages for {self.question!r}")
        assert ranked is not None, "what is searched for is ranked"
        return self._take(ranked, new)

    def take(self, found: Sequence[Found]) -> Outcome:
        """A page holds these passages, which no other lookup has."""
        assert self._public is not None, "what a page holds is public"
        return self._take(self._public, found)

    def _take(self, ranked: Shortlist, found: Sequence[Found]) -> Outcome:
        """A search has found passages that no other lookup has. After the last one it is known how much is to be
        reranked, or that nothing is."""
        ranked.found += found
        ranked.searches -= 1
        if ranked.searches > 0:
            return Outcome()
        if ranked.found:
            ranked.stages.rerank.resize(len(ranked.found))
            return Outcome()
        return Outcome(dropped=[ranked.stages.rerank, *self._known(ranked)])

    async def _rerank(self, ranked: Shortlist, launch: Launch) -> Outcome:
        part = ranked.found[launch.first : launch.first + launch.count]
        texts = [passages_text(found.passage) for found in part]
        scoring = self.run.registry.run(
            launch.unit, lambda: self.run.places.rerank(self.question, texts) if texts else ()
        )
        own = [found.passage.score for found in part]
        scores = await attempted(self.run, launch, scoring, own, "by the search's own scores: ")
        ranked.scores |= dict(enumerate(scores, launch.first))
        if not ranked.is_ranked:
            return Outcome()
        self.run.note(launch, f"the best {min(self.run.kept, len(ranked.found))} of {len(ranked.found)} passages")
        return Outcome(dropped=self._known(ranked))

    def _known(self, ranked: Shortlist) -> list[Stage]:
        """A shortlist is ranked. The public text's passages are known with theirs, all others with the last one.
        Returns stages that are not wanted then."""
        dropped: list[Stage] = []
        if ranked is self._public:
            dropped += self._refine(ranked, best_of([ranked], self.run.kept))
        if all(each.is_ranked for each in self._lists):
            best = self._best = best_of(self._lists, self.run.kept)
            if self._public is not None and self._public.reader is not None:
                self._public.reader.is_wanted = self._public.reader.has_any(best)
            if self._any is not None:
                dropped += self._refine(self._any, [each for each in best if each in self._any.found])
            if not best and self.stages.read is not None:
                dropped.append(self.stages.read)
        return dropped

    def _refine(self, ranked: Shortlist, found: Sequence[Found]) -> list[Stage]:
        """The passages of a text are known; where the workflow does not refine, they are read. Returns its stages where
        there is nothing to refine."""
        text = ranked.stages.refine
        if text is None or ranked.reader is None:
            self.run.read_later(found)
            return []
        if not found:
            return list(text)
        ranked.reader.begin(found)
        tokens = sum(len(passages_text(each.passage)) for each in found) // CHARACTERS
        text.read.resize(tokens + INSTRUCTIONS)
        return []

    async def _read(self, launch: Launch) -> Outcome:
        if self._evidence is None:  # else the launch is another try
            readers = [each.reader for each in self._lists if each.reader is not None]
            self._evidence = [found for reader in readers for found in reader.evidence(self._best or ())]
            self.run.read_later(self._evidence)
        tokens = await attempted(self.run, launch, self.run.read(launch, self._evidence), 0)
        return Outcome(tokens, finished=True)
