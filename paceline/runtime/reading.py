"""What is found out and read of a request: what the policy says of it, who may write it, and passages for its prompts.

Runs no forward. Sends nothing of the request to the other side except, at the privacy level `answer-private`, the query
of a search, once this side's own documents have been searched and the level that follows from them is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from paceline.core.policy import LEAVES, Decision, DocumentRule, causes_of
from paceline.core.sampling.sampler import Mask
from paceline.rag.records import Passage, Selection
from paceline.rag.store.readable import Readable
from paceline.runtime.link.connection import Link
from paceline.runtime.peers import Peers
from paceline.runtime.policy import NAMED, forbidden
from paceline.runtime.resources import Resources
from paceline.runtime.service import Explanation, GenerateRequest, SharedPrompt
from paceline.runtime.sessions.client import ClientSession
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.prompts import PromptSet, prompts_of, raw_prompt, too_long, with_reused
from paceline.runtime.sessions.remote import passages_for
from paceline.runtime.sessions.routing import (
    JOINT,
    UNLIKE,
    VERIFIED,
    Costs,
    StrategyChoice,
    candidates,
    choose,
    peer_apart,
    peer_barred,
    peer_missing,
)
from paceline.strategies.base import JOINT_LEVELS, RoutingContext, SideFacts, other
from paceline.strategies.registry import STRATEGIES

MIN_ANSWER_TOKENS = 256  # reserved beside documents for an answer without a limit, if the context is long enough


@dataclass(frozen=True, slots=True)
class Begun:
    """What is found out of a request before anything is read for it, and at which level that is."""

    request: GenerateRequest  # at that level
    held: Decision
    readable: Readable | None  # this side's documents
    peer: tuple[str | None, Link | None]  # its name and link, as `Peers.peer_for` says
    barred: str  # why that peer is not asked; empty: it may be
    removals: int  # of documents, before any search
    context: RoutingContext
    found: tuple[StrategyChoice, ...]  # strategies that may write it
    mask: Mask | None  # of its constraint


class Read(NamedTuple):
    """What is read for an answer."""

    prompts: PromptSet
    peer_passages: Sequence[Passage] | None  # None: the other side was to be asked and could not be
    rules: tuple[DocumentRule, ...]  # of this side's documents that were found
    asked: Mapping[str, str]  # see `Readable`


class Reading:
    """What answers of one model read. Belongs to the event loop of the node."""

    def __init__(
        self, resources: Resources, peers: Peers, clients: set[ClientSession], alone: Callable[[], str] | None = None
    ) -> None:
        """clients: the sessions under way. alone: why none of the peers takes part now, as the end of a sentence;
        empty, or None: one may."""
        self._resources = resources
        self._peers = peers
        self._clients = clients
        self.max_tokens_default = resources.parts.offer.max_tokens
        self.of_cloud = Costs({VERIFIED: 1.0, JOINT: 1.2})  # a device's ways to its cloud's text
        self._alone = alone or str  # without words

    async def check(self, request: GenerateRequest, *, room: int) -> None:
        """Raises RequestError for a raw-token request that `prepare` would refuse. room: positions the prompt must
        leave."""
        resources = self._resources
        await asyncio.to_thread(resources.guard.decide, request, resources.info.name)
        candidates(self._context(request, *self._peers.peer_for(request), 0, self._alone()))
        raw_prompt(request.prompt.tokens or (), resources.max_positions, resources.vocab_size, room=room)

    async def explain(self, request: GenerateRequest, key: str | None) -> Explanation:
        """See `Service`."""
        guard, owner = self._resources.guard, request.account.owner
        if key is not None:
            if owner and not guard.may_confirm(owner):
                raise forbidden("This key may not ask for another.", "key")
            request = replace(request, account=replace(request.account, owner=NAMED + key))
        guard.refuse_spent()
        begun = await self.begin(request)
        read = await self.found(begun, begun.request)
        begun = self.narrowed(begun, begun.request, read)
        request, number = begun.request, read.prompts.num_passages
        choice = choose(begun.found, replace(begun.context, wish=request.wish, passages=number))
        level, joint = request.wish.privacy, STRATEGIES[choice.strategy].needs_peer
        if level in JOINT_LEVELS and not joint:
            level = "answer-private" if begun.context.linked and not begun.context.common else "local-only"
        passages = read.prompts.passages
        rules = await asyncio.to_thread(lambda: [self._rules_of(begun.readable, each) for each in passages])
        return Explanation(
            guard.for_client(begun.held, owner, read.asked),
            choice.strategy,
            "; ".join(filter(None, (choice.reason, begun.held.why))),
            LEAVES[level] if begun.context.linked else f"{LEAVES['local-only']}, as the other side is not linked",
            [(each.document, its) for each, its in zip(passages, rules, strict=True)],
            guard.left(),
        )

    def _rules_of(self, readable: Readable | None, passage: Passage) -> tuple[str, ...]:
        document = None if readable is None else readable.of(passage)
        return () if document is None else tuple(map(str, document.rules))

    async def begin(self, request: GenerateRequest) -> Begun:
        resources, side = self._resources, self._resources.side
        guard, held = resources.guard, Decision(request.wish.privacy)
        readable = resources.readable(request.account.owner)
        if guard.policy:
            held = await asyncio.to_thread(guard.decide, request, resources.info.name)
            request = guard.held_to(request, held)
        peer = name, link = self._peers.peer_for(request)
        alone, must = self._alone(), request.joining.names_device or request.joining.on_loss != "continue"
        if alone and must:
            raise peer_apart(other(side), alone)
        barred = alone or self._peers.barred(request, link)
        if barred and must:
            raise peer_barred(name or "", barred)
        shared = request.prompt.shared or SharedPrompt()
        if shared.documents is None:
            shared.documents = await asyncio.to_thread(self._documents, request.sources.selection, readable)
        own, removals = shared.documents
        context = self._context(request, *((None, None) if barred else peer), own, barred)
        found = candidates(context)
        if found[0].missing and request.joining.on_loss != "continue":
            how = "is not there" if link is None or link.strategies else f"takes no part, as {UNLIKE}"
            raise peer_missing(other(side), self._peers.absence(request), how)
        mask = await self.mask(request)  # what cannot be kept is refused before documents are searched
        return Begun(request, held, readable, peer, barred, removals, context, found, mask)

    def _documents(self, selection: Selection, readable: Readable | None) -> tuple[int, int]:
        return self._resources.documents(selection if readable is None else readable.selection(selection))

    def narrowed(self, begun: Begun, request: GenerateRequest, read: Read) -> Begun:
        """With this request of it at the level that is right for what was found. Raises RequestError where that is
        not what the request wants."""
        held = begun.held.narrowed(causes_of(read.rules), self._resources.side, holds=True)
        narrower = self._resources.guard.held_to(request, held)
        if narrower is request:
            return replace(begun, request=request, held=held)
        context = replace(begun.context, wish=narrower.wish)
        return replace(begun, request=narrower, held=held, context=context, found=candidates(context))

    async def found(self, begun: Begun, request: GenerateRequest) -> Read:
        """What this side finds, before anything is asked of the other side."""
        prompts, readable = await self.prompts(request, begun.readable), begun.readable
        if readable is None or readable.ruled is None:
            return Read(prompts, (), (), {})
        return Read(prompts, (), await asyncio.to_thread(readable.rules, prompts.passages), readable.asked)

    async def read(self, begun: Begun, request: GenerateRequest, egress: Egress) -> Read:
        """What is read for this request, a query of the other side included where the level lets one leave."""
        began, timeline = asyncio.get_running_loop().time(), egress.timeline
        read = await self.found(begun, request)
        prompts, request = read.prompts, self.narrowed(begun, request, read).request
        if timeline is not None and request.wish.documents:
            timeline.note("search", prompts.num_passages, since=began)
        # The query is sent only for a request whose options, constraint and conversation have been accepted here.
        peer_passages: Sequence[Passage] | None = request.sources.other_passages
        link = None if begun.barred else begun.peer[1]
        level, side = request.wish.privacy, self._resources.side
        # A device whose model has another vocabulary than the cloud's writes by itself at every level that lets it ask.
        apart = side == "device" and link is not None and not link.strategies and level in JOINT_LEVELS
        if request.sources.passages is None and (apart or level == "answer-private"):
            peer_passages = await passages_for(request, link, egress, expected=self._peers.expects(request))
        if peer_passages is None and request.joining.on_loss != "continue":
            raise peer_missing(other(side))
        if peer_passages:
            prompts = await self.prompts(request, begun.readable, peer_passages)
        return read._replace(prompts=prompts, peer_passages=peer_passages)

    async def mask(self, request: GenerateRequest) -> Mask | None:
        constraint = request.output.constraint
        return None if constraint is None else await self._resources.mask(constraint, request.account.owner)

    def _context(
        self, request: GenerateRequest, name: str | None, link: Link | None, own_documents: int, barred: str = ""
    ) -> RoutingContext:
        peer = None if link is None else link.peer
        resources = self._resources
        answers = 1 + len(self._clients)
        own, costs = resources.facts(own_documents, answers), self.of_cloud.among(answers)
        return RoutingContext(
            resources.side,
            request.wish,
            own,
            SideFacts() if peer is None else SideFacts(peer.documents, peer.num_weights, costs=costs),
            expected=name is not None or request.joining.on_loss != "continue" or self._peers.expects(request),
            linked=link is not None and link.accepting,
            barred=barred,
            absent="" if link is not None else self._peers.absence(request),
            common=() if link is None else tuple(link.strategies),
            raw_prompt=request.prompt.tokens is not None,
        )

    async def prompts(
        self,
        request: GenerateRequest,
        readable: Readable | None,
        peer_passages: Sequence[Passage] = (),
        *,
        query: str | None = None,
        length: int = 0,
    ) -> PromptSet:
        """query: see `prompts_of`. length: output tokens that must fit the context behind any of them."""
        resources, positions = self._resources, self._resources.max_positions
        if request.prompt.tokens is not None:
            return raw_prompt(request.prompt.tokens, positions, resources.vocab_size)
        default = self.max_tokens_default or min(MIN_ANSWER_TOKENS, positions // 8)
        work = partial(
            prompts_of,
            request.prompt.messages,
            readable,
            resources.tokenizer,
            k=request.wish.documents,
            max_prompt=positions - max(length, min(request.output.max_tokens or default, positions // 2)),
            query=query,
            kv=resources.prefiller,
            selection=request.sources.selection,
            min_score=request.sources.min_score,
            found=request.sources.passages,
            others=peer_passages,
            temperature=self._peers.scales.temperature_at(request.wish.privacy),
            template=request.prompt.template,
            reading=resources.reading(str(request.wish.options.get("reading", ""))),
            judge=resources.judge if request.wish.options.get("judged") and query is None else None,
        )
        prompts = await with_reused(
            await resources.units.do("search", work, request.account.owner), resources.prefiller
        )
        if prompts.plain_tokens >= positions:
            raise too_long(positions, prompts.plain_tokens, "messages")
        return prompts
