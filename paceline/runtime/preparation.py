"""Preparation of a request: a place, what is read for it, its strategy and the claim of memory, up to a session ready
to run. Runs no forward. The length of the prompts and the claim are checked again after a query of `answer-private`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from paceline.core.difficulty import HEAD
from paceline.core.policy import causes_of
from paceline.core.sampling.sampler import Constraint, Mask, Thinking
from paceline.engine.families import thinking_after
from paceline.errors import PacelineError, RequestError
from paceline.runtime.admission import AnswerPlaces, Parts, Stretches
from paceline.runtime.energy import SideEnergy
from paceline.runtime.link.connection import Link
from paceline.runtime.lookup_tables import Lifetime
from paceline.runtime.peers import Peers
from paceline.runtime.policy import HeldAnswer
from paceline.runtime.questions import parts_asked, unanswered_form
from paceline.runtime.reading import Begun, Read, Reading
from paceline.runtime.resources import Resources, without_drafts
from paceline.runtime.service import AUTO, GenerateRequest, Generation, SharedPrompt
from paceline.runtime.sessions.client import BegunSession, ClientSession
from paceline.runtime.sessions.driver import Egress, Timeline
from paceline.runtime.sessions.handoff import Watch
from paceline.runtime.sessions.output_text import Written, token_strings
from paceline.runtime.sessions.prepared import AloneWay, PreparedRequest, model_id
from paceline.runtime.sessions.prompts import PeerScales, PromptSet, query_with_text
from paceline.runtime.sessions.routing import ALONE, PLAIN, StrategyChoice, alone_by, choose, may_find
from paceline.strategies.base import (
    Machine,
    MachineConfig,
    RoutingContext,
    Seat,
    Side,
    SideFacts,
    Strategy,
    other,
)
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Options, stretch_of

log = logging.getLogger("paceline.node")

_TAIL = 64  # tokens at the end of a prompt: more than a template writes between a message and the answer
UNANSWERED_REASON: Final = "documents were found, and none answers the question"
_ASKING = frozenset({"system", "user"})  # roles of messages that no model has written


class Preparation:
    """Belongs to the event loop of the node."""

    def __init__(
        self, resources: Resources, peers: Peers, places: AnswerPlaces, clients: set[ClientSession], reading: Reading
    ) -> None:
        """clients: the sessions under way."""
        self._resources, self._peers, self._places = resources, peers, places
        self._clients, self._reading = clients, reading
        self.preparing = 0  # admitted requests without a session yet

    async def prepare(
        self, request: GenerateRequest, *, in_workflow: bool = False, timeline: Timeline | None = None
    ) -> Generation:
        """An answer without a workflow, or a text of one, whose place is taken. timeline: of the parts before this
        one. Raises RequestError for a request that cannot be fulfilled; by then nothing has been sent but the query of
        `answer-private`."""
        timeline = timeline or self._timeline(request)
        with self._place(request.account.owner, timeline, anyhow=in_workflow) as egress:
            if not in_workflow:
                self._resources.guard.refuse_spent()
            begun = await self._reading.begin(request)
            first, *later = (
                [begun.request]
                if in_workflow
                else parts_asked(
                    begun.request, begun.context, self._resources.tokenizer, self._reading.max_tokens_default
                )
            )
            written = await self._write(begun, first, egress)
        return Parts(written, later, partial(self.prepare, in_workflow=True, timeline=timeline)) if later else written

    async def begin(
        self, request: GenerateRequest
    ) -> tuple[GenerateRequest, Callable[[GenerateRequest], Awaitable[Generation]]]:
        """Take the place of a workflow, whose `closed` gives it back. What would be refused as an answer is refused
        before any agent writes, and before a query leaves this side. Returns the request at the level that holds for
        all of it, and what prepares the answer, given that with what the agents have found."""
        guard = self._resources.guard
        plain = replace(request, sources=replace(request.sources, workflow=None, passages=()))
        with self._place(request.account.owner) as egress:
            guard.refuse_spent()
            begun = await self._reading.begin(plain)
            if guard.policy:  # what the question finds decides before anything leaves
                searched = replace(begun.request, sources=replace(begun.request.sources, passages=None))
                found = await self._reading.found(begun, searched)
                begun = self._reading.narrowed(begun, begun.request, found)
                begun = replace(begun, held=guard.for_client(begun.held, request.account.owner, found.asked))
            read = await self._reading.read(begun, begun.request, egress)
            await self._decided(begun, egress, read)
        held = begun

        async def answer(asked: GenerateRequest) -> Generation:
            with self._place(asked.account.owner, self._timeline(asked), anyhow=True) as egress:
                same = held.peer == self._peers.peer_for(asked)  # else one has come or gone meanwhile
                begun = held if same else replace(await self._reading.begin(asked), held=held.held)
                return await self._write(begun, asked, egress)

        return replace(request, wish=held.request.wish), answer

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
            guard = self._resources.guard
            if (use := session.energy) is not None:
                guard.spend("joules", use.joules)
            if STRATEGIES[session.prepared.strategy].needs_peer and self._resources.side == "device":
                guard.spend("cloud_tokens", len(session.written.tokens) - session.before)
            self._clients.discard(session)
            self._places.give_back(session.prepared.request.account.owner)

    async def _write(self, begun: Begun, request: GenerateRequest, egress: Egress) -> Generation:
        """An answer that has begun, in its first session."""
        shared = request.prompt.shared or SharedPrompt()
        if shared.prompts is None:
            shared.prompts = await self._reading.read(begun, request, egress)
        begun = self._reading.narrowed(begun, request, shared.prompts)
        guard, prepared = self._resources.guard, await self._decided(begun, egress, shared.prompts)
        tried = begun_alone(prepared, begun.context, self._resources, begun.peer[1])
        session = self._session(tried or prepared, egress)
        decision = guard.for_client(begun.held, request.account.owner, shared.prompts.asked)
        held = HeldAnswer(session, guard, decision, request.prompt.messages)
        if tried is not None:
            held.written = Stretches(session, partial(self._hand_over, prepared))
        elif prepared.end < prepared.limit:
            held.written = Stretches(session, partial(self._go_on, held))
        return held if guard.policy else held.written

    async def _hand_over(self, prepared: PreparedRequest, earlier: ClientSession) -> ClientSession:
        """What this device has begun, as the cloud's model writes it on."""
        with self._place(prepared.request.account.owner, earlier.egress.timeline, anyhow=True) as egress:
            written = earlier.written
            prepared = handed_over(prepared, earlier.prepared, len(written.tokens))
            return self._session(prepared, egress, written if written.tokens else None)

    async def _decided(self, begun: Begun, egress: Egress, read: Read) -> PreparedRequest:
        """The strategy that writes, after what was read, and the claim of memory. Raises RequestError."""
        request, prompts, peer_passages = begun.request, read.prompts, read.peer_passages
        resources, side, name = self._resources, self._resources.side, None if begun.barred else begun.peer[0]
        mask, thinking = begun.mask, self._thinking(request, prompts)
        if thinking is not None and (mask is not None or thinking.budget is not None):
            form = replace(request.output.constraint or Constraint("text"), thinking=thinking)
            request = replace(request, output=replace(request.output, constraint=form))
            mask = await self._reading.mask(request)
        choice = choose(begun.found, replace(begun.context, wish=request.wish, passages=prompts.num_passages))
        strategy, options = STRATEGIES[choice.strategy], choice.options
        if egress.timeline is not None:
            egress.timeline.note("strategy", of=strategy.name)
            for way, seconds in choice.compared.items():  # 0 of one that is to be measured
                egress.timeline.note("cost_ms", 1e3 * seconds, way)
        check_budget(request, choice, resources.energy if side == "device" else None)
        if request.sources.passages is not None or not request.wish.documents:
            options = options.in_one_stretch()
        prompts, unlike = weighed(strategy, prompts, side, self._peers.scales, name)
        may_say = prompts.unanswered or (strategy.needs_peer and not prompts.passages)
        saying: Constraint | None = None
        if may_say and request.wish.options.get("judged"):
            saying = replace(unanswered_form(request.prompt.messages[-1]["content"]), thinking=thinking)
        unanswered = None if saying is None else await self._unanswered_mask(saying, request.account.owner)
        told = "" if unanswered is None or strategy.needs_peer else UNANSWERED_REASON
        # Drafts of an answer by both sides cross the link.
        expected = "" if strategy.needs_peer else request.prompt.predicted
        predicted = await resources.remembered(expected, request.account.owner)
        share = resources.claim_or_refuse(prompts.branches, self._limit(request, prompts))
        if not share.drafts:
            options = without_drafts(options)
        complete = not choice.missing and peer_passages is not None
        removals = f"{'reused ' * prompts.reuses}{begun.removals}"  # rows that were reused are no other answer's
        salt = " ".join(filter(None, (removals, request.account.owner, request.account.guest_key)))
        return PreparedRequest(
            request=request,
            side=side,
            strategy=strategy.name,
            reason="; ".join(
                filter(None, (choice.reason, begun.held.why, unlike, told, searched_once(request, options)))
            ),
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
            unanswered_form=saying,
            models=(model_id(resources.info), "" if begun.peer[1] is None else begun.peer[1].peer.model),
            thinking=thinking,
            claim=share.rows,
            removals=begun.removals,
            salt=salt,
            predicted=predicted,
            draft_claim=resources.draft_claim(strategy, prompts.branches, share.tokens),
            refusals=resources.info.refusals,
            nothing_found=nothing_found(begun.context, strategy),
            writer=begun.context.larger,
            costs=resources.costs if not strategy.needs_peer else None if prompts.passages else self._reading.of_cloud,
            held=begun.held.holds != "open",
        )

    async def _unanswered_mask(self, form: Constraint, owner: str) -> Mask | None:
        """Of the form of an answer that says that no document answers; None where the engine keeps none."""
        try:
            return await self._resources.mask(form, owner)
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

    async def _go_on(self, held: HeldAnswer, earlier: ClientSession) -> ClientSession:
        """The next stretch of an answer, in the place of the one that has ended: with the documents that this side
        finds by the question and the text so far. Raises PacelineError."""
        with self._place(earlier.prepared.request.account.owner, earlier.egress.timeline, anyhow=True) as egress:
            resources, before, written = self._resources, earlier.prepared, earlier.written
            request, strategy = before.request, STRATEGIES[before.strategy]
            _, removals = await asyncio.to_thread(resources.documents, request.sources.selection)  # before the search
            length = len(written.tokens)
            begin, end = stretch_of(length, before.options.stretch, before.limit)
            query = query_with_text(request.prompt.messages, written.tokens[:begin], resources.tokenizer)
            began = asyncio.get_running_loop().time()
            # What would hold the answer more strictly comes too late: what was written of it has been sent.
            readable = resources.readable(request.account.owner, level=request.wish.privacy)
            for documents in (request.wish.documents, 0):  # without any it fits memory, as it did before
                reading = replace(request, wish=replace(request.wish, documents=documents))
                found = await self._reading.prompts(reading, readable, query=query, length=end)
                prompts, _ = weighed(strategy, found, resources.side, self._peers.scales, before.peer_name)
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
                removals=removals,
            )
            if readable is not None and readable.ruled is not None:
                causes = causes_of(await asyncio.to_thread(readable.rules))
                held.decision = held.decision.narrowed(causes, resources.side, holds=True)
                prepared = replace(prepared, held=held.decision.holds != "open")
            return self._session(prepared, egress, written, joined=joined)

    async def again(self, prepared: PreparedRequest, written: Written) -> ClientSession:
        """A session that writes an answer once more, from these tokens of it on."""
        request = prepared.request
        _, removals = await asyncio.to_thread(self._resources.documents, request.sources.selection)
        with self._place(request.account.owner, anyhow=True) as egress:
            return self._session(replace(prepared, removals=removals), egress, written)

    def _session(
        self, prepared: PreparedRequest, egress: Egress, written: Written | None = None, *, joined: bool = True
    ) -> ClientSession:
        """A session of a stretch. joined: with a peer if any."""
        resources = self._resources
        link = self._peers.link(prepared.peer_name) if joined else None  # it may have changed meanwhile
        machine = partial(self._machine, written=written, link=link)
        ways: list[AloneWay | None] = []
        for each in (prepared, replace(prepared, prompts=replace(prepared.prompts, unanswered=True))):
            alone = answered_alone(each, resources.facts(answers=1 + len(self._clients))) if written is None else None
            ways.append(None if alone is None else (alone, partial(machine, alone, joined=False)))
        session = (BegunSession if prepared.watch else ClientSession)(
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
        self, prepared: PreparedRequest, *, written: Written | None, link: Link | None, joined: bool
    ) -> Machine:
        """The machine of a stretch, see `_session`."""
        resources, request, name = self._resources, prepared.request, prepared.peer_name
        strategy = STRATEGIES[prepared.strategy]
        if strategy.text_of == "cloud" and resources.side == "device":
            table = resources.peers_table()  # what it suggests goes up, and the owner's may hold what must not
        else:
            lifetime = "answer" if prepared.held else lifetime_of(request, prepared.prompts, strategy, resources.side)
            table = resources.table(request.account.owner, lifetime, prepared.removals)
        top, drafts = request.wish.top_logprobs, prepared.draft_claim is not None
        told = resources.worker.told and strategy.name == PLAIN and top is not None  # ids come with their token
        config = MachineConfig(
            Seat(
                resources.side,
                faces_client=True,
                targets=() if written is None else tuple(written.tokens),
                joined=strategy.needs_peer and joined,
                awaited=request.joining.on_loss != "continue",
                private=request.wish.privacy != "open",
                rtt=None if link is None else link.rtt,
                bandwidth=None if link is None else link.bandwidth,
                record=None if link is None or name is None else self._peers.records[name],
            ),
            resources.rules(
                request.wish.sampling,
                prepared.end,
                prepared.mask,
                needs_dists=top is not None and not told,
                num_top=max(1, top or 0) if told else 0 if prepared.watch is None else HEAD,
            ),
            prepared.options,
            resources.means(
                strategy, prepared.options, request.wish.sampling, table, drafts=drafts, predicted=prepared.predicted
            ),
        )
        return resources.machine(strategy, config)

    def _limit(self, request: GenerateRequest, prompts: PromptSet) -> int:
        """Maximum of output tokens, clamped to the context, as in OpenAI's API."""
        room = self._resources.max_positions - prompts.longest
        return min(
            request.output.max_tokens or self._reading.max_tokens_default or request.output.default_tokens or room, room
        )


# ---- what holds for an answer once its strategy is chosen -----------------------------------------------------------
def check_budget(request: GenerateRequest, choice: StrategyChoice, energy: SideEnergy | None) -> None:
    """Raises RequestError for an energy budget that the chosen strategy, or this device, does not keep. energy: of this
    device; None at the cloud, whose device refuses for itself."""
    if all(request.wish.options.get(name) is None for name in ("joules_per_token", "joules_per_step")):
        return
    budget = choice.options.energy_budget
    if budget is None:
        fault = (
            f"An energy budget is kept by the strategy 'draft_verify' alone, and '{choice.strategy}' is to write "
            f"({choice.reason})."
        )
    elif energy is None:
        return
    elif energy.meter is None:
        fault = "This device neither measures nor models its energy: its setting energy.meter is off."
    elif energy.budget is not None and energy.budget[1] != budget[1]:
        unit = energy.budget[1]
        fault = f"This device's own energy budget is in joules a {unit}: name joules_per_{unit}."
    else:
        return
    raise RequestError(fault, param="paceline.energy", code="energy_budget_not_kept")


def answered_alone(prepared: PreparedRequest, own: SideFacts) -> PreparedRequest | None:
    """The same answer as this side writes it where the peer has found nothing; None where the text is not this side's
    then, or the peer may still find something later."""
    side, options, passages = prepared.side, prepared.options, prepared.prompts.passages
    if prepared.request.wish.strategy != AUTO or not STRATEGIES[prepared.strategy].needs_peer:
        return None
    says_so = prepared.prompts.unanswered and prepared.unanswered_mask is not None
    writes = prepared.writer == side or passages
    if options.stretch or options.energy_budget is not None or not (says_so or writes):
        return None
    strategy, compared = alone_by(own)
    reason = f"the {side} alone has found something" if passages else prepared.nothing_found
    if says_so:
        reason = UNANSWERED_REASON
    plain = Options(rescoring=options.rescoring, drafting=options.drafting)
    reason = "; ".join(filter(None, (reason, compared)))
    return replace(
        prepared,
        strategy=strategy,
        reason=reason,
        options=plain,
        peer_name=None,
        nothing_found="",
        mask=prepared.unanswered_mask if says_so else prepared.mask,
    )


def nothing_found(context: RoutingContext, strategy: Strategy) -> str:
    """Who writes where neither side has found anything, and why; empty where the strategy's own reason says so."""
    side, writer = context.side, context.larger
    if strategy.text_of != "both" and (context.wish.strategy != AUTO or writer != side or not strategy.needs_peer):
        return ""
    if context.wish.strategy != AUTO:
        return "neither side has found anything, and both write, as the request asks"
    why = "no other model is known to be larger" if writer == side else "its model is larger"
    return f"neither side has found anything, and the {writer} writes: {why}"


def weighed(
    strategy: Strategy, prompts: PromptSet, side: Side, scales: PeerScales, peer: str | None
) -> tuple[PromptSet, str]:
    """Prompts with the weights of their documents, and why those of both sides weigh the same, if they do."""
    difference = scales.difference(peer)
    if strategy.needs_peer and side == "device":  # as where the cloud's client asks, for the same text
        prompts = prompts.without_relevance(scales.temperature)
    weighed = strategy.text_of == "both" or (prompts.passages and prompts.peer_passages)
    return (prompts.with_equal_sides(), difference) if weighed and difference else (prompts, "")


def searched_once(request: GenerateRequest, options: Options) -> str:
    """Why documents are not searched for again although the request wants it, else empty."""
    if not request.wish.options.get("search_every") or options.stretch:
        return ""
    if not request.wish.documents:
        return "no documents are searched for"
    by = "a workflow searches" if request.sources.passages is not None else "only 'aggregate' searches again"
    return f"documents are searched for once ({by})"


def lifetime_of(request: GenerateRequest, prompts: PromptSet, strategy: Strategy, side: Side) -> Lifetime:
    """What the rows that the answer teaches may outlive. A conversation with earlier answers may hold the text of
    documents even where none is found.

    A device keeps those of joint answers: its user has read them, and the next one shows the cloud none of its drafts
    that the models would not have drafted by themselves.
    """
    if strategy.text_of == "both" and side == "device" and not request.account.guest_key:
        return "documents"
    if strategy.needs_peer or prompts.peer_passages or request.account.guest_key:
        return "answer"
    is_first = all(message["role"] in _ASKING for message in request.prompt.messages)
    return "owner" if is_first and not prompts.passages else "documents"


def begun_alone(
    prepared: PreparedRequest, context: RoutingContext, resources: Resources, link: Link | None
) -> PreparedRequest | None:
    """What the other side's larger model is to write, as this device begins it by itself; None where it may not: where
    a document was read or may be found there, the text has a form, or it is to wait for the other side."""
    prompts, options, joining = prepared.prompts, prepared.options, prepared.request.joining
    level = joining.handoff or resources.parts.company.handoff
    theirs = context.larger != context.side and STRATEGIES[prepared.strategy].needs_peer
    looked = prepared.request.sources.passages is not None or may_find(context.wish, context.peer)
    read = prompts.num_passages or prompts.unanswered or looked
    waits = prepared.missing is not None or joining.on_loss != "continue"
    formed = prepared.mask is not None or options.stretch or options.energy_budget is not None
    tries = context.side == "device" and context.wish.strategy == AUTO
    if level == "off" or link is None or not (tries and theirs) or read or waits or formed:
        return None
    pair = f"{resources.info.fingerprint[:16]} {link.peer.model[:16]}"
    return replace(
        prepared,
        strategy=ALONE if context.own.drafts else PLAIN,  # of each token the head of its row is known
        reason=f"{prepared.reason}; the {prepared.side} begins by itself, and is sure enough of what it writes",
        options=Options(rescoring=options.rescoring, drafting=options.drafting),
        peer_name=None,
        nothing_found="",
        unanswered_mask=None,
        costs=None,  # its rows have heads, which take time
        watch=Watch(resources.outcomes, pair, level, prompts.longest),
    )


def handed_over(prepared: PreparedRequest, begun: PreparedRequest, at: int) -> PreparedRequest:
    """An answer that was begun alone, as the other side's model writes it on. at: tokens of it that have been told."""
    watch = begun.watch
    assert watch is not None, "it has been watched"
    told = watch.told("cloud", at)
    where = f"hands over behind token {at}" if at else "leaves it to the cloud"
    reason = f"the {prepared.side} is unsure and {where}: {told.score:.2f} sure, {1.0 - told.threshold:.2f} wanted"
    return replace(prepared, reason=f"{prepared.reason}; {reason}", handoff=told, outcome=watch.learn)
