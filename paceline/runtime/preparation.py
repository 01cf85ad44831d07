"""Preparation of a request: a place, routing, retrieval and the claim of memory, up to a session ready to run.

Runs no forward. Sends nothing of the request to the other side except, at the privacy level `answer-private`, the query
of a search; the length of the prompts and the claim of memory are checked again after that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from paceline.core.sampling.sampler import Constraint, Mask, Thinking
from paceline.engine.thinking import thinking_after
from paceline.errors import PacelineError, RequestError
from paceline.rag.records import Passage
from paceline.runtime.admission import AnswerPlaces, Parts, Stretches
from paceline.runtime.link.connection import Link
from paceline.runtime.peers import Peers
from paceline.runtime.questions import parts_asked, unanswered_form
from paceline.runtime.resources import Resources, without_drafts
from paceline.runtime.service import GenerateRequest, Generation, SharedPrompt
from paceline.runtime.sessions.client import AloneWay, ClientSession, PreparedRequest
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.output_text import Written, token_strings
from paceline.runtime.sessions.prompts import (
    PromptSet,
    prompts_of,
    query_with_text,
    raw_prompt,
    too_long,
)
from paceline.runtime.sessions.remote import passages_for
from paceline.runtime.sessions.routing import (
    JOINT,
    PLAIN,
    UNLIKE,
    VERIFIED,
    Costs,
    StrategyChoice,
    candidates,
    choose,
    peer_apart,
    peer_barred,
    peer_missing,
    wish_of,
)
from paceline.runtime.sessions.timeline import Timeline
from paceline.runtime.terms import (
    UNANSWERED_REASON,
    answered_alone,
    check_budget,
    lifetime_of,
    nothing_found,
    searched_once,
    weighed,
)
from paceline.strategies.base import (
    JOINT_LEVELS,
    Machine,
    MachineConfig,
    PeerTerms,
    RoutingContext,
    Seat,
    SideFacts,
    other,
)
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import stretch_of

log = logging.getLogger("paceline.node")

_TAIL = 64  # tokens at the end of a prompt: more than a template writes between a message and the answer
MIN_ANSWER_TOKENS = 256  # reserved beside documents for an answer without a limit, if the context is long enough


@dataclass(frozen=True, slots=True)
class Begun:
    """What is found out of a request before anything is read for it."""

    peer: tuple[str | None, Link | None]  # its name and link, as `Peers.peer_for` says
    barred: str  # why that peer is not asked; empty: it may be
    removals: int  # of documents, before any search
    context: RoutingContext
    found: tuple[StrategyChoice, ...]  # strategies that may write it
    mask: Mask | None  # of its constraint


class Preparation:
    """Belongs to the event loop of the node."""

    def __init__(
        self,
        resources: Resources,
        peers: Peers,
        places: AnswerPlaces,
        clients: set[ClientSession],
        *,
        alone: Callable[[], str] | None = None,
    ) -> None:
        """clients: the sessions under way. alone: why none of the peers takes part now, as the end of a sentence;
        empty, or None: one may."""
        self._resources = resources
        self._peers = peers
        self._places = places
        self._clients = clients
        self.preparing = 0  # admitted requests without a session yet
        self._max_tokens_default = resources.parts.offer.max_tokens
        self._alone = alone or str  # without words
        self._of_cloud = Costs({VERIFIED: 1.0, JOINT: 1.2})  # a device's ways to its cloud's text

    async def check(self, request: GenerateRequest, *, room: int) -> None:
        """Raises RequestError for a raw-token request that `prepare` would refuse. room: positions the prompt must
        leave."""
        candidates(self._context(request, *self._peers.peer_for(request), 0, self._alone()))
        resources = self._resources
        raw_prompt(request.prompt.tokens or (), resources.max_positions, resources.vocab_size, room=room)

    async def prepare(
        self, request: GenerateRequest, *, in_workflow: bool = False, timeline: Timeline | None = None
    ) -> Generation:
        """An answer without a workflow, or a text of one, whose place is taken. timeline: of the parts before this
        one. Raises RequestError for a request that cannot be fulfilled; by then nothing has been sent but the query of
        `answer-private`."""
        timeline = timeline or self._timeline(request)
        with self._place(request.account.owner, timeline, anyhow=in_workflow) as egress:
            begun = await self._begin(request)
            first, *later = (
                [request]
                if in_workflow
                else parts_asked(request, begun.context, self._resources.tokenizer, self._max_tokens_default)
            )
            session = await self._write(begun, first, egress)
        whole = session.prepared.end >= session.prepared.limit
        written = session if whole else Stretches(session, self._go_on)
        return Parts(written, later, partial(self.prepare, in_workflow=True, timeline=timeline)) if later else written

    async def begin(self, request: GenerateRequest) -> Callable[[GenerateRequest], Awaitable[ClientSession]]:
        """Take the place of a workflow, whose `closed` gives it back. What would be refused as an answer is refused
        before any agent writes, and before a query leaves this side. Returns what prepares the answer, given the
        request with what the agents have found."""
        plain = replace(request, sources=replace(request.sources, workflow=None, passages=()))
        with self._place(request.account.owner) as egress:
            begun = await self._begin(plain)
            await self._decided(begun, plain, egress, *await self._read(begun, plain, egress))

        async def answer(asked: GenerateRequest) -> ClientSession:
            with self._place(asked.account.owner, self._timeline(asked), anyhow=True) as egress:
                same = begun.peer == self._peers.peer_for(asked)  # else one has come or gone meanwhile
                return await self._write(begun if same else await self._begin(asked), asked, egress)

        return answer

    def _timeline(self, request: GenerateRequest) -> Timeline | None:
        wanted = request.output.timeline
        return Timeline(self._resources.side, asyncio.get_running_loop().time) if wanted else None

    @contextmanager
    def _place(self, owner: str, timeline: Timeline | None = None, *, anyhow: bool = False) -> Iterator[Egress]:
        """A place while something is prepared, given back if that fails, and what is sent meanwhile. timeline: of the
        answer."""
        self._places.take(owner, anyhow=anyhow)
        self.preparing += 1
        egress = Egress(timeline)
        try:
            yield egress
        except BaseException:
            self._places.give_back(owner)
            if egress:
                log.info("sent to the other side for an answer that was not begun: %s", egress)
            raise
        finally:
            self.preparing -= 1

    def _closed(self, session: ClientSession) -> None:
        if session in self._clients:
            if session.token_s is not None and (costs := session.prepared.costs) is not None:
                costs.add(session.prepared.strategy, len(self._clients), session.token_s)
            self._clients.discard(session)
            self._places.give_back(session.prepared.request.account.owner)

    async def _begin(self, request: GenerateRequest) -> Begun:
        resources, side = self._resources, self._resources.side
        peer = name, link = self._peers.peer_for(request)
        alone, must = self._alone(), request.joining.names_device or request.joining.on_loss != "continue"
        if alone and must:
            raise peer_apart(other(side), alone)
        barred = alone or self._peers.barred(request, link)
        if barred and must:
            raise peer_barred(name or "", barred)
        shared = request.prompt.shared or SharedPrompt()
        if shared.documents is None:
            shared.documents = await asyncio.to_thread(resources.documents, request.sources.selection)
        own, removals = shared.documents
        context = self._context(request, *((None, None) if barred else peer), own, barred)
        found = candidates(context)
        if found[0].missing and request.joining.on_loss != "continue":
            how = "is not there" if link is None or link.strategies else f"takes no part, as {UNLIKE}"
            raise peer_missing(other(side), self._peers.absence(request), how)
        mask = await self._mask(request)  # what cannot be kept is refused before documents are searched
        return Begun(peer, barred, removals, context, found, mask)

    async def _write(self, begun: Begun, request: GenerateRequest, egress: Egress) -> ClientSession:
        """The first session of an answer that has begun."""
        shared = request.prompt.shared or SharedPrompt()
        if shared.prompts is None:
            shared.prompts = await self._read(begun, request, egress)
        return self._session(await self._decided(begun, request, egress, *shared.prompts), begun.removals, egress)

    async def _read(
        self, begun: Begun, request: GenerateRequest, egress: Egress
    ) -> tuple[PromptSet, Sequence[Passage] | None]:
        """Prompts, and passages of the other side, None if it was to be asked and could not be."""
        began, timeline = asyncio.get_running_loop().time(), egress.timeline
        prompts = await self._prompts(request)
        if timeline is not None and request.sources.documents:
            timeline.note("search", prompts.num_passages, since=began)
        # The query is sent only for a request whose options, constraint and conversation have been accepted here.
        peer_passages: Sequence[Passage] | None = request.sources.other_passages
        link = None if begun.barred else begun.peer[1]
        level, side = request.joining.privacy, self._resources.side
        # A device whose model has another vocabulary than the cloud's writes by itself at every level that lets it ask.
        apart = side == "device" and link is not None and not link.strategies and level in JOINT_LEVELS
        if request.sources.passages is None and (apart or level == "answer-private"):
            peer_passages = await passages_for(request, link, egress, expected=self._peers.expects(request))
        if peer_passages is None and request.joining.on_loss != "continue":
            raise peer_missing(other(side))
        if peer_passages:
            prompts = await self._prompts(request, peer_passages)
        return prompts, peer_passages

    async def _decided(
        self,
        begun: Begun,
        request: GenerateRequest,
        egress: Egress,
        prompts: PromptSet,
        peer_passages: Sequence[Passage] | None,
    ) -> PreparedRequest:
        """The strategy that writes, after what was read, and the claim of memory. Raises RequestError."""
        resources, side, name = self._resources, self._resources.side, None if begun.barred else begun.peer[0]
        mask, thinking = begun.mask, self._thinking(request, prompts)
        if thinking is not None and (mask is not None or thinking.budget is not None):
            form = replace(request.output.constraint or Constraint("text"), thinking=thinking)
            request = replace(request, output=replace(request.output, constraint=form))
            mask = await self._mask(request)
        choice = choose(begun.found, replace(begun.context, wish=wish_of(request), passages=prompts.num_passages))
        strategy, options = STRATEGIES[choice.strategy], choice.options
        if egress.timeline is not None:
            egress.timeline.chose(strategy.name, choice.compared)
        check_budget(request, choice, resources.energy if side == "device" else None)
        if request.sources.passages is not None or not request.sources.documents:
            options = options.in_one_stretch()
        prompts, unlike = weighed(strategy, prompts, side, self._peers.scales, self._peers.scales.difference(name))
        may_say = prompts.unanswered or (strategy.needs_peer and not prompts.passages)
        unanswered = (
            await self._unanswered_mask(request, thinking)
            if may_say and request.strategy.options.get("judged")
            else None
        )
        told = "" if unanswered is None or strategy.needs_peer else UNANSWERED_REASON
        # Drafts of an answer by both sides cross the link.
        expected = "" if strategy.needs_peer else request.prompt.predicted
        predicted = await resources.remembered(expected, request.account.owner)
        share = resources.claim_or_refuse(prompts.branches, self._limit(request, prompts))
        if not share.drafts:
            options = without_drafts(options)
        complete = not choice.missing and peer_passages is not None
        salt = " ".join(filter(None, (str(begun.removals), request.account.owner, request.account.guest_key)))
        return PreparedRequest(
            request=request,
            side=side,
            strategy=strategy.name,
            reason="; ".join(filter(None, (choice.reason, unlike, told, searched_once(request, options)))),
            options=options,
            prompts=prompts,
            max_new_tokens=resources.max_positions - prompts.longest,
            limit=share.tokens,
            end=stretch_of(0, options.stretch, share.tokens)[1],
            missing=None if complete else f"{other(side)}_{'refused' if begun.barred else 'missing'}",
            peer_name=name if strategy.needs_peer else None,
            cache_key=resources.cache_key(salt) if strategy.needs_peer else b"",
            mask=unanswered if told else mask,
            unanswered_mask=unanswered,
            thinking=thinking,
            claim=share.rows,
            salt=salt,
            predicted=predicted,
            draft_claim=resources.draft_claim(strategy, prompts.branches, share.tokens),
            refusals=resources.info.refusals,
            nothing_found=nothing_found(begun.context, strategy),
            writer=begun.context.larger,
            costs=resources.costs if not strategy.needs_peer else None if prompts.passages else self._of_cloud,
        )

    async def _mask(self, request: GenerateRequest) -> Mask | None:
        constraint = request.output.constraint
        return None if constraint is None else await self._resources.mask(constraint, request.account.owner)

    async def _unanswered_mask(self, request: GenerateRequest, thinking: Thinking | None) -> Mask | None:
        """The form of an answer that says that no document answers; None where the engine keeps none."""
        form = replace(unanswered_form(str(request.prompt.messages[-1]["content"])), thinking=thinking)
        try:
            return await self._resources.mask(form, request.account.owner)
        except RequestError as error:
            log.info("an answer does not say that no document answers: %s", error)
            return None

    def _thinking(self, request: GenerateRequest, prompts: PromptSet) -> Thinking | None:
        """What the answer may begin with before it. A raw text is continued as it is."""
        tokenizer = self._resources.tokenizer
        if tokenizer.thinking is None or request.prompt.tokens is not None:
            return None
        last = request.prompt.messages[-1]
        begun = last["content"] if last["role"] == "assistant" else ""
        tail = prompts.branches[0].prompt[-(_TAIL + len(begun.encode())) :]
        text = b"".join(token_strings(tokenizer, tail)).decode(errors="replace")
        return thinking_after(text, tokenizer.thinking, begun, request.output.thinking_tokens)

    async def _go_on(self, earlier: ClientSession) -> ClientSession:
        """The next stretch of an answer, in the place of the one that has ended: with the documents that this side
        finds by the question and the text so far. Raises PacelineError."""
        with self._place(earlier.prepared.request.account.owner, earlier.egress.timeline, anyhow=True) as egress:
            return await self._next_stretch(earlier, egress)

    async def _next_stretch(self, earlier: ClientSession, egress: Egress) -> ClientSession:
        resources, before, written = self._resources, earlier.prepared, earlier.written
        request, strategy = before.request, STRATEGIES[before.strategy]
        _, removals = await asyncio.to_thread(resources.documents, request.sources.selection)  # before the search
        length = len(written.tokens)
        begin, end = stretch_of(length, before.options.stretch, before.limit)
        query = query_with_text(request.prompt.messages, written.tokens[:begin], resources.tokenizer)
        difference = self._peers.scales.difference(before.peer_name)
        began = asyncio.get_running_loop().time()
        for documents in (request.sources.documents, 0):  # without any it fits memory, as it did before
            reading = replace(request, sources=replace(request.sources, documents=documents))
            found = await self._prompts(reading, query=query, length=end)
            prompts, _ = weighed(strategy, found, resources.side, self._peers.scales, difference)
            rows = [len(branch.prompt) + length for branch in prompts.branches]
            share = resources.claim(rows, end - length)
            if share is not None and share.tokens >= end - length:
                break
        else:
            raise PacelineError("there is no memory for the next part of it")
        if egress.timeline is not None:
            egress.timeline.note("search", prompts.num_passages, since=began)
        joined = written.is_asked() or request.joining.on_loss != "continue"
        prepared = replace(
            before,
            options=before.options if share.drafts else without_drafts(before.options),
            prompts=prompts,
            max_new_tokens=resources.max_positions - prompts.longest,
            end=end,
            claim=share.rows,
            missing=None,
        )
        return self._session(prepared, removals, egress, written, joined=joined)

    def _session(
        self,
        prepared: PreparedRequest,
        removals: int,
        egress: Egress,
        written: Written | None = None,
        *,
        joined: bool = True,
    ) -> ClientSession:
        """The session of a stretch. removals: of documents, when its own were looked for. joined: the peer is to take
        part, if there is one."""
        resources = self._resources
        link = self._peers.link(prepared.peer_name) if joined else None  # it may have changed meanwhile
        machine = partial(self._machine, removals=removals, written=written, link=link)
        ways: list[AloneWay | None] = []
        for each in (prepared, replace(prepared, prompts=replace(prepared.prompts, unanswered=True))):
            alone = answered_alone(each, resources.facts(answers=1 + len(self._clients))) if written is None else None
            ways.append(None if alone is None else (alone, partial(machine, alone, joined=False)))
        session = ClientSession(
            machine(prepared, joined=joined),
            resources.worker,
            prepared,
            resources.tokenizer,
            link if STRATEGIES[prepared.strategy].needs_peer else None,
            self._closed,
            resources.drafts if prepared.draft_claim is not None else None,
            written,
            tuple(ways),
        )
        session.egress = egress
        self._clients.add(session)
        return session

    def _machine(
        self, prepared: PreparedRequest, *, removals: int, written: Written | None, link: Link | None, joined: bool
    ) -> Machine:
        """The machine of a stretch, see `_session`."""
        resources, request, name = self._resources, prepared.request, prepared.peer_name
        strategy = STRATEGIES[prepared.strategy]
        if strategy.text_of == "cloud" and resources.side == "device":
            table = resources.peers_table()  # what it suggests goes up, and the owner's may hold what must not
        else:
            lifetime = lifetime_of(request, prepared.prompts, strategy, resources.side)
            table = resources.table(request.account.owner, lifetime, removals)
        top, drafts = request.output.top_logprobs, prepared.draft_claim is not None
        told = (
            resources.worker.told and strategy.name == PLAIN and top is not None
        )  # the likeliest ids come with a token
        config = MachineConfig(
            Seat(resources.side, faces_client=True, targets=() if written is None else tuple(written.tokens)),
            resources.rules(
                request.sampling,
                prepared.end,
                prepared.mask,
                needs_dists=top is not None and not told,
                num_top=max(1, top or 0) if told else 0,
            ),
            prepared.options,
            PeerTerms(
                joined=strategy.needs_peer and joined,
                awaited=request.joining.on_loss != "continue",
                private=request.joining.privacy != "open",
                rtt=None if link is None else link.rtt,
                bandwidth=None if link is None else link.bandwidth,
                record=None if link is None or name is None else self._peers.record(name),
            ),
            resources.means(
                strategy, prepared.options, request.sampling, table, drafts=drafts, predicted=prepared.predicted
            ),
        )
        return resources.machine(strategy, config)

    def _context(
        self, request: GenerateRequest, name: str | None, link: Link | None, own_documents: int, barred: str = ""
    ) -> RoutingContext:
        peer = None if link is None else link.peer
        resources = self._resources
        answers = 1 + len(self._clients)
        own, costs = resources.facts(own_documents, answers), self._of_cloud.among(answers)
        return RoutingContext(
            resources.side,
            wish_of(request),
            own,
            SideFacts() if peer is None else SideFacts(peer.documents, peer.num_weights, costs=costs),
            expected=name is not None or request.joining.on_loss != "continue" or self._peers.expects(request),
            linked=link is not None and link.accepting,
            barred=barred,
            common=() if link is None else tuple(link.strategies),
        )

    async def _prompts(
        self,
        request: GenerateRequest,
        peer_passages: Sequence[Passage] = (),
        *,
        query: str | None = None,
        length: int = 0,
    ) -> PromptSet:
        """query: see `prompts_of`. length: output tokens that must fit the context behind any of them."""
        resources, positions = self._resources, self._resources.max_positions
        if request.prompt.tokens is not None:
            return raw_prompt(request.prompt.tokens, positions, resources.vocab_size)
        default = self._max_tokens_default or min(MIN_ANSWER_TOKENS, positions // 8)
        work = partial(
            prompts_of,
            request.prompt.messages,
            resources.store,
            resources.tokenizer,
            k=request.sources.documents,
            max_prompt=positions - max(length, min(request.output.max_tokens or default, positions // 2)),
            query=query,
            kv=resources.prefiller,
            selection=request.sources.selection,
            min_score=request.sources.min_score,
            found=request.sources.passages,
            others=peer_passages,
            temperature=self._peers.scales.temperature,
            template=request.prompt.template,
            together=resources.reads_together(str(request.strategy.options.get("reading", ""))),
            judge=resources.judge if request.strategy.options.get("judged") and query is None else None,
        )
        prompts = await resources.work.search(work, request.account.owner)
        if prompts.plain_tokens >= positions:
            raise too_long(positions, prompts.plain_tokens, "messages")
        return prompts

    def _limit(self, request: GenerateRequest, prompts: PromptSet) -> int:
        """Maximum of output tokens, clamped to the context, as in OpenAI's API."""
        room = self._resources.max_positions - prompts.longest
        return min(request.output.max_tokens or self._max_tokens_default or request.output.default_tokens or room, room)
