"""One workflow, from its question to the end of its answer: a generation like any other.

Agents that search read the question alone (the last message, and the one before that it refers to), so that nothing of
the documents is in what is sent to the other side or to the web. What they find is read by the answer as passages of an
ordinary request: a branch each, by the strategy of that request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.families import NO_THINKING
from paceline.engine.reader.question import separate_questions
from paceline.errors import PacelineError, RequestError
from paceline.rag.embedder import MiniLMEmbedder
from paceline.rag.prompt import passages_text, query_of
from paceline.rag.records import Passage
from paceline.rag.rerank import LateInteraction, Reranker
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.readable import Readable
from paceline.runtime import service
from paceline.runtime.admission import Parts
from paceline.runtime.link.connection import Link
from paceline.runtime.outside import OutsideWriter
from paceline.runtime.peers import Peers
from paceline.runtime.questions import separated
from paceline.runtime.resources import Resources
from paceline.runtime.service import GenerateEvent, GenerateRequest, GenerationResult
from paceline.runtime.sessions.remote import Admit
from paceline.runtime.sessions.routing import peer_missing
from paceline.runtime.units import CLOUD, OUTSIDE
from paceline.runtime.workflows.agent_text import (
    CHARACTERS,
    AgentText,
    CloudTexts,
    CloudUnits,
    Reader,
    Searching,
    TextStream,
)
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.runtime.workflows.long import LongTerms, PassageJobs, SummaryJobs, chosen_of
from paceline.runtime.workflows.lookup import Claims, Found, Lookup, NodePlaces, reading_list
from paceline.runtime.workflows.web import NodeWeb, Research, WebAccess
from paceline.settings_tables import TUNING
from paceline.strategies.base import Wish, other
from paceline.workflow import agents, flows
from paceline.workflow.agents import Prompt
from paceline.workflow.flows import SearchStages, TextStages, WorkflowSizes, WorkflowStages
from paceline.workflow.graph import Launch, Outcome, Request, Stage, waits_for
from paceline.workflow.jobs import asks_summary
from paceline.workflow.reading import folded

log = logging.getLogger("paceline.workflow")

LOCAL: Final = "autoregressive"  # strategy of the agents' texts: this side alone
LANE_S: Final = 5.0  # for which an answer that stands still (a peer that is waited for) keeps a lane from others


class WorkflowRun:
    """`run` yields steps, if the request wants them, then the answer. Closing that iterator stops every launch.

    A stage that fails or takes too long is left out, and the workflow goes on with what it has; the answer alone cannot
    be left out.
    """

    def __init__(
        self,
        request: GenerateRequest,
        places: NodePlaces,
        driver: WorkflowDriver,
        admit: Admit,
        closed: Callable[[], None] = lambda: None,
        web: NodeWeb | None = None,
        cloud: CloudTexts | None = None,
        answer: Admit | None = None,
        *,
        apart: bool = True,
        terms: LongTerms | None = None,
    ) -> None:
        """admit: prepares a generation of this side. closed: called once, when it has ended. web: that
        `research` searches; None: it is done without, and the answer says so. cloud: whose model may write agents'
        texts that read nothing private; None: this side's writes all. answer: prepares the answer; None: `admit`.
        apart: the answer reads each passage in a context of its own, and so can begin with those that are there.
        terms: of `long`."""
        assert request.sources.workflow is not None
        self.places = places
        self.registry = driver.registry
        self.claims = Claims()
        self.terms = terms or LongTerms()
        self._request = request
        self._web = web if request.sources.workflow == "research" else None
        self._cloud = cloud
        without_web = request.sources.workflow == "research" and web is None
        self._side = side = places.side
        self._driver = driver
        self._admit = admit
        self._admit_answer = answer or admit
        self._apart = apart
        self._closed = closed
        self._closing: asyncio.Task[None] | None = None
        self._question = query_of(request.prompt.messages)
        self._events: asyncio.Queue[GenerateEvent | Exception] = asyncio.Queue()
        self._running: Request | None = None  # at the driver
        away = request.wish.strategy == OUTSIDE  # it reads what is public: no text of that is of private ones as well
        alone = cloud is None and not away  # no other model may write agents' texts
        sizes = WorkflowSizes(
            question=max(1, len(self._question) // CHARACTERS),
            private=side == "device",
            far=places.link is not None,
            agents_here=side == "device" and alone,
            # Where one model writes all texts, one is shorter than two, and may say what follows from both sides.
            apart=not alone,
        )
        flow = flows.FLOWS["advanced" if without_web else request.sources.workflow]
        if flow.reads and asks_summary(self._question):
            flow = flows.SUMMARY
        barred = CLOUD if away else OUTSIDE  # another's units, which it has no part in
        self._stages = WorkflowStages(flow, sizes, Request(request.account.owner, frozenset([barred])))
        self.kept = flow.kept
        self._lookups = 0
        self._texts: list[AgentText] = []
        self._readings: list[PassageJobs] = []  # of `long`: of the question's parts, then of sub-questions
        self._parts = 1
        self._jobs: set[TextStream] = set()  # under way
        self._job_tokens = 0
        self._answer: TextStream | None = None
        self._read: list[Found] = []  # passages of the answer, as they were chosen
        self._steps: list[service.WorkflowStep] = []
        self._failed = ["the web, which this level of privacy does not search"] if without_web else list[str]()

    @property
    def prompt_tokens(self) -> int:
        return 0  # its agents have not written it yet

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        self._begin()
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, GenerationResult):
                    return
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)  # whoever is cancelled meanwhile, all of it ends

    async def _close(self) -> None:
        if self._running is not None:
            self._driver.cancel(self._running)
            if sent := self._sent():
                log.info("sent for a workflow, before its answer: %s", sent)
        streams: list[AgentText | TextStream] = [*self._texts, *self._jobs, *filter(None, [self._answer])]
        await asyncio.gather(*(each.aclose() for each in streams), return_exceptions=True)
        self._closed()

    # ---- the stages -------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        stages, question = self._stages, self._question
        self._running = stages.request
        first = stages.begin()
        stages.answer.read.run, stages.answer.write.run = self._prefill_answer, self._write_answer
        parts = (separate_questions(question) if stages.flow.reads else ()) or (question,)
        self._parts = len(parts)
        if stages.searched is not None:
            self._look_up(question, stages.searched)
        if stages.rewrite is not None:  # the question itself does not wait for its rewriting
            reader = Searching(
                partial(agents.rewrite, question, self.terms.titles),
                lambda asked: self._look_up(asked, stages.search(), share=2),  # most of it, the question finds too
                "no sub-question: the question itself is looked up",
                before=lambda: {folded(each) for each in (question, *parts)},
            )
            self.write(stages.rewrite, reader)
        if self._web is not None:
            Research(self, self._web, stages, question)
        if stages.rewrite is not None:
            for part in parts:
                first += self._look_up(part, stages.search(rewritten=False), share=len(parts))
        self._driver.begin(stages.request, first, self._ended)

    def _look_up(self, question: str, stages: SearchStages, *, share: int = 1) -> list[Stage]:
        """Stages that search for a question, and read what they find. share: of the passages that jobs read for a
        question, one in so many is read."""
        if stages.jobs is None:
            Lookup(question, self, stages)
        elif self._stages.flow is flows.SUMMARY:
            self._readings.append(SummaryJobs(question, self, stages))
        else:
            self._readings.append(PassageJobs(question, self, stages, share=share))
        self._lookups += 1
        return stages.stages

    def write(self, stages: TextStages, reader: Reader) -> None:
        self._texts.append(AgentText(stages, reader, self._write, self.note, self._cloud))

    def jobs_again(self, launch: Launch, count: int) -> Stage:
        return self._stages.jobs_again(launch.stage, count)

    async def reply(self, launch: Launch, asked: str, found: Found, max_tokens: int) -> str:
        owner = self._request.account.owner
        key = self.terms.key(owner, f"{max_tokens} {asked}", passages_text(found.passage))
        if (known := await asyncio.to_thread(self.places.reading, found, key)) is not None:
            return known
        stream = await self._write([{"role": "user", "content": asked}], max_tokens, launch.criticality, found)
        self._jobs.add(stream)
        try:
            part = await stream.take(max_tokens + 1)
        finally:
            self._jobs.discard(stream)
            await stream.aclose()
        self._job_tokens += part.tokens
        await asyncio.to_thread(self.places.keep_reading, found, key, owner, part.text)
        return part.text

    async def _write(
        self, messages: Prompt, max_tokens: int, criticality: float, found: Found | None = None
    ) -> TextStream:
        """Begin an agent's text: greedy, by this side's model alone, of no document but this passage."""
        passage = () if found is None else (found.passage,)
        own = found is None or found.side == self._side
        request = self._alone(
            service.AskedPrompt(tuple(messages), template=NO_THINKING),
            SamplingParams(temperature=0.0),
            service.OutputForm(max_tokens, thinking_tokens=0),
            service.Sources(passages=passage if own else (), other_passages=() if own else passage),
            criticality,
        )
        return TextStream(await self._admit(request))

    def _alone(
        self,
        prompt: service.AskedPrompt,
        sampling: SamplingParams,
        output: service.OutputForm,
        sources: service.Sources,
        criticality: float,
    ) -> GenerateRequest:
        """A request that this side's model answers by itself."""
        wish = Wish(LOCAL, sampling, self._request.wish.privacy, documents=0)
        account = service.Account(owner=self._request.account.owner, criticality=criticality)
        return GenerateRequest(prompt, wish, output, sources, service.Joining(any_device=False), account)

    # ---- what lookups tell, see `Workflow` --------------------------------------------------------------------------
    def read_later(self, found: Sequence[Found]) -> None:
        self._read += found

    def note(self, launch: Launch, text: str, *, failed: bool = False, seconds: float | None = None) -> None:
        stage, taken = launch.stage.name, self._driver.seconds(launch) if seconds is None else seconds
        step = service.WorkflowStep(stage, "failed" if failed else "done", launch.unit, taken, text)
        self._steps.append(step)
        if failed:
            self._failed.append(stage)
            if launch.stage.operation is flows.SEARCH_FAR and self._request.joining.on_loss != "continue":
                self._events.put_nowait(peer_missing(other(self._side)))
        if self._request.sources.steps:
            self._events.put_nowait(service.TextDelta("", 0, step=step))

    async def read(self, launch: Launch, found: Sequence[Found]) -> int:
        """Prefill passages as branches of the answer, so that the answer finds their rows. Where it waits for no more
        than such reading, it begins now and reads them itself. Returns tokens, about."""
        if not self._apart or all(stage in self._stages.reads for stage in waits_for(self._stages.answer.read)):
            return 0
        own, others = (
            [passage for passage in passages if any(passage is each.passage for each in found)]
            for passages in reading_list(self._read, self._side)
        )
        if not (own or others):
            return 0
        prompt = replace(self._request.prompt, shared=None)
        sources = service.Sources(passages=tuple(own), other_passages=tuple(others))
        one = service.OutputForm(max_tokens=1)
        request = self._alone(prompt, self._request.wish.sampling, one, sources, launch.criticality)
        generation = await self._admit(request)
        async for _ in generation.run():
            pass
        return _prompt_tokens(self._request, (*own, *others))

    # ---- the answer -------------------------------------------------------------------------------------------------
    async def _prefill_answer(self, launch: Launch) -> Outcome:
        account = replace(self._request.account, criticality=launch.criticality)
        lists = [(self._request, *self._passages())]
        if len(parts := self.terms.parts(self._request)) == self._parts > 1:
            lists = [(part, *self._passages(number)) for number, part in enumerate(parts)]
        first, *later = (
            replace(
                asked,
                sources=replace(asked.sources, workflow=None, passages=own, other_passages=others),
                account=account,
            )
            for asked, own, others in lists
        )
        own, others = lists[0][1:]
        try:
            generation = await self._admit_answer(first)
            if later:
                generation = Parts(generation, later, self._admit_answer)
            self._answer = TextStream(generation, self._heard, self._events.put_nowait)
            async with asyncio.timeout(LANE_S):
                await self._answer.begun()
        except TimeoutError:
            pass  # it goes on without a lane
        except PacelineError as error:
            if self._answer is None:  # else the client has been told
                self._events.put_nowait(error)
        self.note(launch, f"{sum(len(own) + len(others) for _, own, others in lists)} passages")
        return Outcome(_prompt_tokens(self._request, (*own, *others)), finished=True)

    def _passages(self, part: int | None = None) -> tuple[tuple[Passage, ...], tuple[Passage, ...]]:
        """What the answer reads, or one part of it: passages of this side, and of the other one."""
        if not self._readings:
            return reading_list(self._read, self._side)
        own = self._readings[: self._parts] if part is None else [self._readings[part]]
        return chosen_of([*own, *self._readings[self._parts :]], self._side)

    async def _write_answer(self, launch: Launch) -> Outcome:
        if self._answer is None:
            return Outcome(0, finished=True)  # the client has been told
        try:
            async with asyncio.timeout(LANE_S):
                part = await self._answer.take(launch.count)
        except (TimeoutError, PacelineError):  # it goes on without a lane, or the client has been told
            return Outcome(0, finished=True)
        return Outcome(part.tokens, part.ended)

    def _heard(self, event: GenerateEvent) -> None:
        """The answer's own events go to the client as they come."""
        if isinstance(event, GenerationResult):
            event = self._result(event)
        self._events.put_nowait(event)

    def _result(self, done: GenerationResult) -> GenerationResult:
        agents = sum(agent.tokens for agent in self._texts) + self._job_tokens
        sent = {name: size + done.stats.get(name, 0.0) for name, size in self._sent().items()}
        left_out = f"; left out: {', '.join(dict.fromkeys(self._failed))}" if self._failed else ""
        return replace(
            done,
            strategy_reason=f"workflow {self._request.sources.workflow}{left_out}; {done.strategy_reason}",
            degraded=done.degraded or ("workflow_incomplete" if self._failed else None),
            steps=tuple(self._steps),
            stats={**done.stats, **sent, "agent_tokens": agents, "lookups": self._lookups},
        )

    def _sent(self) -> dict[str, float]:
        """Bytes that the searches and the agents' texts have sent, by kind."""
        parts = [each.egress.stats() for each in (self.places, self._web, self._cloud) if each is not None]
        return {name: sum(part.get(name, 0.0) for part in parts) for name in sorted(set().union(*parts))}

    def _ended(self, fault: PacelineError | None) -> None:
        """The driver has ended the workflow. After an answer or a failure, which the client has heard of, no more."""
        if fault is not None:
            self._events.put_nowait(fault)


def _prompt_tokens(request: GenerateRequest, passages: Sequence[Passage]) -> int:
    """Of the answer's prompts with these passages, a branch each; about."""
    said = sum(len(message["content"]) for message in request.prompt.messages)
    texts = sum(len(passages_text(passage)) for passage in passages)
    return max(1, (said * max(1, len(passages)) + texts) // CHARACTERS)


@dataclass(frozen=True, slots=True)
class Tools:
    # None: late interaction over the store's own embedder; where that has no vectors of tokens, passages keep the order
    # of their search.
    reranker: Reranker | None = None
    web: WebAccess | None = None  # closed with the node; None: `research` is refused
    long_passages: int = TUNING.long_passages  # that jobs read for a question


class Workflows:
    """Those of a node, with one driver for all. Belongs to its event loop. admit: prepares a generation of the node."""

    def __init__(
        self,
        resources: Resources,
        peers: Peers,
        admit: Admit,
        tools: Tools,
        outside: OutsideWriter | None = None,
    ) -> None:
        self._outside = outside
        self._resources = resources
        self._peers = peers
        self._admit = admit
        self.reranker = tools.reranker or own_reranker(resources.store)
        self._web = tools.web
        self._long_passages = tools.long_passages
        self._driver = WorkflowDriver(resources.units)
        self._cloud, self._strangers = CloudUnits(self._driver), CloudUnits(self._driver, OUTSIDE)

    async def prepare(
        self,
        request: GenerateRequest,
        begin: Callable[[GenerateRequest], Awaitable[tuple[GenerateRequest, Admit]]],
        closed: Callable[[], None],
    ) -> WorkflowRun:
        """Nothing runs before the workflow is. Raises RequestError for one that cannot run here. begin: begins to
        prepare the answer, see `Preparation.begin`. closed: called once, when it has ended."""
        if request.sources.workflow not in self.names():
            raise RequestError(
                "The workflow 'research' searches the web, for which no provider is configured here: its operator can "
                "set web_search.",
                param="paceline.workflow",
                code="workflow_unavailable",
            )
        if request.prompt.tokens is not None:
            raise RequestError("A workflow needs a conversation.", param="paceline.workflow")
        request, answer = await begin(request)
        try:
            return await self._run(request, answer, closed)
        except BaseException:
            closed()
            raise

    async def _run(self, request: GenerateRequest, answer: Admit, closed: Callable[[], None]) -> WorkflowRun:
        """The run of a workflow whose answer is begun."""
        resources, side = self._resources, self._resources.side
        _, link = self._peers.peer_for(request)
        searched = request.wish.documents > 0  # otherwise the client wants none
        places = NodePlaces(
            side,
            self._readable(request) if searched else None,
            request.sources.selection,
            request.sources.min_score,
            self.reranker,
            link if searched and side == "device" and request.wish.privacy != "local-only" else None,
        )
        web, cloud = self._web_for(request, link), await self._cloud_for(request, link)
        away = request.wish.strategy == OUTSIDE  # nothing that the answer reads is computed here
        apart = not away and resources.reading(str(request.wish.options.get("reading", ""))) == "apart"
        terms = None
        if request.sources.workflow == "long":
            can_leave = places.link is not None or cloud is not None
            titles = () if can_leave else await asyncio.to_thread(places.titles)
            info, tokenizer = resources.info, resources.tokenizer
            parts = partial(separated, tokenizer=tokenizer, max_tokens=resources.parts.offer.max_tokens)
            points = tokenizer.one_document
            terms = LongTerms(self._long_passages, info.fingerprint, info.refusals, points, titles, parts)
        return WorkflowRun(
            request, places, self._driver, self._admit, closed, web, cloud, answer, apart=apart, terms=terms
        )

    def names(self) -> tuple[flows.WorkflowName, ...]:
        """Those that can run here."""
        can_search = self._web is not None and self._resources.store is not None
        return tuple(name for name in flows.WORKFLOWS if can_search or name != "research")

    def _readable(self, request: GenerateRequest) -> Readable | None:
        """This side's documents at the request's level: what has to be held more strictly comes too late. What a
        stranger is told of them is what a peer reads."""
        peer = request.wish.strategy == OUTSIDE and self._resources.side == "cloud"
        return self._resources.readable(request.account.owner, peer=peer, level=request.wish.privacy)

    def _web_for(self, request: GenerateRequest, link: Link | None) -> NodeWeb | None:
        """The web for a request; None where its level of privacy lets nothing leave."""
        resources, readable = self._resources, self._readable(request)
        if self._web is None or readable is None or request.wish.privacy == "local-only":
            return None
        return NodeWeb(resources.side, self._web, readable, request.sources.min_score, link, resources.units.parsing)

    async def _cloud_for(self, request: GenerateRequest, link: Link | None) -> CloudTexts | None:
        """The cloud's model, or a stranger's, for a request's agents; None where it may write none of their texts, or
        there is none."""
        if request.wish.strategy == OUTSIDE and self._outside is not None:
            if not self._strangers.offer(self._outside.endpoint):
                return None
            texts = await self._outside.texts(request)
            return CloudTexts(self._strangers, *texts)
        key = partial(self._resources.cache_key, f"workflows of {request.account.owner}")
        told = partial(self._resources.guard.spend, "cloud_tokens")
        return self._cloud.texts(link, request.wish.privacy, key, told)

    async def close(self) -> None:
        await self._driver.close()
        if self._web is not None:
            await self._web.close()


def own_reranker(store: DocumentStore | None) -> Reranker | None:
    """Late interaction over the store's own embedder; None where that has no vectors of tokens."""
    encoder = None if store is None else store.embedder
    return LateInteraction(encoder) if isinstance(encoder, MiniLMEmbedder) else None
