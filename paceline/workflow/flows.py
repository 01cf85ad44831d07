"""The workflows as stages: `fast`, `advanced` and `research` (HeRo, 6.1), and `long`, which reads many passages.

Documents are private; the question, its sub-questions and the web are not. The second look reads what came from the web
only, so that nothing of the documents is in a request to the web. What is named public needs nothing private, so it
may run on another side: public passages are reranked and chosen without regard to private ones, which would otherwise
show in what is sent. Texts are not handled here: only numbers of items. What a stage does is given to it (`Stage.run`)
by whoever asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from paceline.workflow.graph import Need, Operation, Request, Stage

WorkflowName = Literal["fast", "advanced", "research", "long"]


@dataclass(frozen=True, slots=True)
class Flow:
    """What comes before the answer. In all: documents are searched for the question, and what is found is reranked."""

    name: WorkflowName
    kept: int  # passages of a search that are read, at most
    # A small model rewrites the question as sub-questions, each of which is searched for as soon as it is written;
    # passages are refined, and read while others are searched for.
    rewrites: bool
    # A plan asks for pages of the web, and a second look at what they hold may ask for more.
    researches: bool
    # Each passage that a search finds is read by a job of its own, of which there are as many at once as lanes.
    reads: bool = False


FLOWS: Final[Mapping[WorkflowName, Flow]] = {
    "fast": Flow("fast", 4, rewrites=False, researches=False),
    "advanced": Flow("advanced", 2, rewrites=True, researches=False),
    "research": Flow("research", 2, rewrites=True, researches=True),
    "long": Flow("long", 2, rewrites=True, researches=False, reads=True),
}
SUMMARY: Final = Flow("long", 2, rewrites=False, researches=False, reads=True)  # of all there is: nothing to rewrite
WORKFLOWS: Final = tuple(FLOWS)

CHUNK_BYTES: Final = 600.0
EMBED: Final = Operation("embed", "encode", item_bytes=CHUNK_BYTES)
SCORE: Final = Operation("rerank", "score", item_bytes=CHUNK_BYTES)
SEARCH: Final = Operation("host", "search")
SEARCH_FAR: Final = Operation("far", "search")  # of the other side's documents
SEARCH_WEB: Final = Operation("web", "search")
FETCH: Final = Operation("web", "fetch")
READ_PROMPT: Final = Operation("agent", "prefill", ordered=True)
WRITE: Final = Operation("agent", "decode", ordered=True, open_ended=True, group=16)
DECIDE: Final = Operation("agent", "decode", ordered=True, open_ended=True, group=4)  # others wait for each line
JOB: Final = Operation("agent", "job", group=1, item_bytes=CHUNK_BYTES)  # a text about one passage, read and written
READ: Final = Operation("chat", "prefill", ordered=True)
ANSWER: Final = Operation("chat", "decode", ordered=True, open_ended=True, group=16)

INSTRUCTIONS: Final = 40  # tokens around what a model reads
REFINED: Final = 32  # tokens of a refined text, as expected
WRITTEN: Final = 24  # tokens of sub-questions, as expected
LOOKED: Final = 8  # tokens of a second look, as expected
ANSWERED: Final = 24  # tokens of an answer, as expected
RERANKED: Final = 16  # most passages of a search that are reranked, as expected
KEPT: Final = 3  # of them, those that are read, as expected
JOBS: Final = 32  # passages that are read by jobs, as expected


@dataclass(frozen=True, slots=True)
class WorkflowSizes:
    """What is known of a request when it comes."""

    question: int  # tokens
    chunks: int = 16  # that a search finds
    chunk_tokens: int = 128
    private: bool = True  # the documents are
    far: bool = False  # the other side's documents are searched too
    agents_here: bool = False  # no agent's text is written on another side, whatever it reads
    apart: bool = False  # what a search of the other side has found is refined in a text of its own


class TextStages(NamedTuple):
    """A text of a model: its prompt is read, then it is written."""

    read: Stage
    write: Stage


@dataclass(frozen=True, slots=True)
class RankStages:
    """Passages that are reranked together, and refined in one text where the workflow refines."""

    rerank: Stage
    refine: TextStages | None = None


@dataclass(frozen=True, slots=True)
class SearchStages:
    """A search of documents, or a page of the web, up to reading what was found. None: there is no such stage."""

    embed: Stage  # the question, or the page
    near: Stage | None = None  # documents of this side
    far: Stage | None = None
    fetch: Stage | None = None  # the page, before it is embedded
    any: RankStages | None = None  # of passages that may be private
    public: RankStages | None = None  # of those that are not
    read: Stage | None = None
    jobs: Stage | None = None

    @property
    def stages(self) -> list[Stage]:
        ranks = [each for each in (self.any, self.public) if each is not None]
        found = [self.fetch, self.embed, self.near, self.far, *(each.rerank for each in ranks)]
        found += [stage for each in ranks if each.refine is not None for stage in each.refine]
        return [stage for stage in (*found, self.read, self.jobs) if stage is not None]


@dataclass(slots=True)
class WorkflowStages:
    """The stages of one request, made as they become known. Those of a method are new: they are to be added."""

    flow: Flow
    sizes: WorkflowSizes
    request: Request = field(default_factory=Request)
    searched: SearchStages | None = field(init=False, default=None)  # of the question, in a flow that does not rewrite
    rewrite: TextStages | None = field(init=False, default=None)
    plan: TextStages | None = field(init=False, default=None)
    look: TextStages | None = field(init=False, default=None)
    answer: TextStages = field(init=False)
    reads: list[Stage] = field(init=False, default_factory=list)  # of passages: they follow each other in one text
    _answering: object = field(init=False, default_factory=object)  # the answer's text

    def begin(self) -> list[Stage]:
        """What is known from the beginning."""
        flow, asked = self.flow, self.sizes.question + INSTRUCTIONS
        found: list[Stage] = []
        waits: list[Stage] = []  # what the answer needs
        tokens = asked
        if flow.rewrites:
            self.rewrite = self._agent("rewrite", asked, WRITTEN, decides=True)
            found += self.rewrite
            waits.append(self.rewrite.write)
        else:
            self.searched = self.search(rewritten=False)
            found += self.searched.stages
            waits.append(found[-1])
            tokens += self._kept_tokens(self.sizes.chunks)
        if flow.researches:
            self.plan = self._agent("plan", asked, WRITTEN, decides=True)
            self.look = self._agent("look", INSTRUCTIONS + REFINED, LOOKED, [self.plan.write], decides=True)
            found += [*self.plan, *self.look]
            waits += [self.plan.write, self.look.write]
        read = self._stage("answer.prefill", READ, tokens, waits, text=self._answering)
        self.answer = TextStages(read, self._stage("answer.decode", ANSWER, ANSWERED, [read], text=self._answering))
        return [*found, *self.answer]

    def search(self, *, rewritten: bool = True) -> SearchStages:
        """Documents are searched for a sub-question that the rewriter has written, or (not `rewritten`) for the
        question itself."""
        sizes, refines = self.sizes, self.flow.rewrites
        decider = self.rewrite.write if rewritten and self.rewrite is not None else None
        embed = self._stage("embed question", EMBED, 1, after=decider)
        near = self._stage("search", SEARCH, 1, [embed])
        near.private = sizes.private
        asks_far = sizes.far and self.flow is not SUMMARY
        far = self._stage("search far", SEARCH_FAR, 1, after=decider) if asks_far else None
        if self.flow.reads:
            feeds = (self.answer.read,) if refines else ()  # else the answer needs it from the beginning
            jobs = self._stage("jobs", JOB, JOBS, [near] if far is None else [near, far], feeds=feeds)
            return SearchStages(embed, near, far, jobs=jobs)
        if far is None or not (sizes.apart and refines):
            rerank = self._rerank([near] if far is None else [near, far], sizes.chunks)
            ranked = RankStages(rerank, self._refine([rerank], sizes.chunks) if refines else None)
            return SearchStages(embed, near, far, any=ranked, read=self._read(ranked.refine))
        first, second = self._rerank([near], sizes.chunks), self._rerank([far], sizes.chunks, " public")
        ranked = RankStages(first, self._refine([first, second], sizes.chunks))  # the best of both
        public = RankStages(second, self._refine([second], sizes.chunks, " public"))
        return SearchStages(embed, near, far, any=ranked, public=public, read=self._read(ranked.refine, public.refine))

    def jobs_again(self, jobs: Stage, count: int) -> Stage:
        """What jobs have said asks for so many more."""
        return self._stage("jobs again", JOB, count, after=jobs, feeds=(self.answer.read,))

    def search_web(self, agent: TextStages) -> Stage:
        """The plan, or the second look, has written a query: the web is searched for it. What reads the pages waits for
        it: the second look, or the answer."""
        reader = self.look if agent is self.plan and self.look is not None else self.answer
        return self._stage("search web", SEARCH_WEB, 1, after=agent.write, feeds=(reader.read,))

    def page(self, decider: Stage, chunks: int, *, planned: bool, fetched: bool = True) -> SearchStages:
        """A search of the web has found a page, or an agent has asked for one. chunks: as expected. planned: by the
        plan, so that the second look reads it. not fetched: it is there already."""
        fetch = self._stage("fetch", FETCH, 1, after=decider) if fetched else None
        needs = [] if fetch is None else [fetch]
        embed = self._stage("embed page", EMBED, chunks, needs, after=None if fetched else decider)
        rerank = self._rerank([embed], chunks, " public")
        feeds = (self.look.read,) if planned and self.look is not None else ()
        public = RankStages(rerank, self._refine([rerank], chunks, " public", feeds))
        return SearchStages(embed, fetch=fetch, public=public, read=self._read(public.refine))

    def _rerank(self, searches: Sequence[Stage], chunks: int, zone: str = "") -> Stage:
        return self._stage(f"rerank{zone}", SCORE, max(1, min(chunks, RERANKED)), searches)

    def _refine(self, ranked: Sequence[Stage], chunks: int, zone: str = "", feeds: Sequence[Stage] = ()) -> TextStages:
        return self._agent(f"refine{zone}", self._kept_tokens(chunks) + INSTRUCTIONS, REFINED, ranked, feeds=feeds)

    def _read(self, *refined: TextStages | None) -> Stage | None:
        """Reading what was refined, before the answer."""
        texts = [text.write for text in refined if text is not None]
        if not texts:
            return None
        needs = [*texts, *self.reads[-1:]]
        read = self._stage("read", READ, REFINED, needs, feeds=(self.answer.read,), text=self._answering)
        self.reads.append(read)
        return read

    def _kept_tokens(self, chunks: int) -> int:
        return min(chunks, KEPT) * self.sizes.chunk_tokens

    def _agent(
        self,
        name: str,
        reads: int,
        writes: int,
        needs: Sequence[Stage] = (),
        *,
        decides: bool = False,
        feeds: Sequence[Stage] = (),
    ) -> TextStages:
        text = object()
        read = self._stage(name, READ_PROMPT, reads, needs, text=text)
        write = self._stage(name, DECIDE if decides else WRITE, writes, [read], feeds=feeds, text=text)
        read.here = write.here = self.sizes.agents_here
        return TextStages(read, write)

    def _stage(
        self,
        name: str,
        operation: Operation,
        items: int,
        needs: Sequence[Stage] = (),
        *,
        after: Stage | None = None,
        feeds: Sequence[Stage] = (),
        text: object = None,
    ) -> Stage:
        """after: what has decided that there is this one, while it was being written."""
        found = [Need(each) for each in needs] + ([] if after is None else [Need(after, "emitted")])
        return Stage(name, operation, items, found, feeds, self.request, text)
