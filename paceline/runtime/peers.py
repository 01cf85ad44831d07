"""Links of a node by the peer's name, and the sessions that peers open for their clients."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import msgspec

from paceline.core.clock import PeerRecord
from paceline.core.fair import Shares
from paceline.core.printable import one_line
from paceline.core.side import EVERYBODY, MAX_NAME, MayAsk, Side
from paceline.engine.grammar.compiler import DeferredMask
from paceline.errors import LinkClosed, PacelineError, RemoteProtocolError, RequestError
from paceline.rag.prompt import MAX_QUERY
from paceline.rag.records import Passage, Selection
from paceline.runtime.asking import Ask, CloudAsks
from paceline.runtime.link.connection import Link, SentToday
from paceline.runtime.resources import LONG_ANSWER, Background, Resources
from paceline.runtime.service import GenerateRequest, Load
from paceline.runtime.sessions.base import PeerSession
from paceline.runtime.sessions.client import ClientSession
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.prompts import PeerScales, PromptSet, prompts_of, query_with_text, with_reused
from paceline.runtime.sessions.remote import Admit, TextServer, to_wire
from paceline.runtime.sessions.routing import UNLIKE
from paceline.strategies.base import MachineConfig, Seat, Strategy
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import constraint_from_wire, decode_part, sampling_from_wire
from paceline.wire.messages import (
    REFUSED,
    SEARCH,
    WRITE,
    CloseSession,
    DraftLimits,
    OpenSession,
    Options,
    RetrievedPassage,
    RetrievedPassages,
    stretch_of,
)

log = logging.getLogger("paceline.node")

MAX_PEER_SESSIONS = 1024
MAX_SESSIONS_PER_PEER = 64  # a device has few users; a cloud joins as many of its answers with one device
MAX_PEER_TOKENS = 1 << 18  # of one peer's sessions together; where memory is shorter, they wait for their turns
MAX_PASSAGES = 64  # limit of a peer's `top_k_documents`
MAX_SEARCHES = 32  # at once, of all devices: they share the thread pool
_LIMITS = DraftLimits()  # upper bounds of the limits a peer sends, because rows cost this side memory and time


class Peers:
    """Belongs to the event loop. clients: sessions of this side's own clients, told of links."""

    def __init__(
        self, resources: Resources, clients: Collection[ClientSession], run: Background, asks: CloudAsks, admit: Admit
    ) -> None:
        """asks: the gate for openings of a cloud. admit: see `TextServer`."""
        self._resources = resources
        # By model: those of others with the same tokenizer are told of links as well. What peers open is the first's.
        self.clients: dict[object, Collection[ClientSession]] = {self: clients}
        self._run = run
        self._company = resources.parts.company
        self._may_ask = EVERYBODY  # the device that was linked last
        self._asks = asks
        self.links: dict[str, Link] = {}
        self._ended_sent = self._ended_received = 0  # bytes on links that are down
        self._today = SentToday()
        self._sessions: dict[PeerSession, Link] = {}
        self._shares = Shares(MAX_PEER_SESSIONS, most=MAX_SESSIONS_PER_PEER)  # of peers, in `_sessions`
        # What is remembered of answers with each peer, by its name: one that links anew stays who it is.
        self.records = defaultdict[str, PeerRecord](PeerRecord)
        self.scales = PeerScales(resources.relevance, follows=resources.side == "device")
        self._tokens = Shares(math.inf, most=MAX_PEER_TOKENS)  # of peers, by session
        self._counted: dict[PeerSession, int] = {}  # tokens of each session that are part of that
        self._searches = Shares(MAX_SEARCHES)  # of devices; an abandoned search runs to its end
        self._texts = TextServer(admit)

    def load(self, load: Load) -> Load:
        """What this side does, with its links."""
        links = self.links.values()
        return replace(
            load,
            links=len(links),
            rtt_s=max((link.rtt for link in links if link.rtt is not None), default=None),
            sent_bytes=self._ended_sent + sum(link.total_sent for link in links),
            received_bytes=self._ended_received + sum(link.total_received for link in links),
            sent_today=self._today.by_hour(),
        )

    @property
    def busy(self) -> bool:
        return bool(self._sessions)

    def link(self, name: str | None) -> Link | None:
        return None if name is None else self.links.get(name)

    def peer_for(self, request: GenerateRequest) -> tuple[str | None, Link | None]:
        """Peer of an answer: the request's device, else the only linked peer if any may take part."""
        if self._resources.side == "cloud" and (request.joining.device is not None or not request.joining.any_device):
            return request.joining.device, self.link(request.joining.device)
        if len(self.links) == 1:
            return next(iter(self.links.items()))
        return None, None

    def expects(self, request: GenerateRequest) -> bool:
        """True if a second side belongs to this request, whether it is linked now or not. One that several linked
        devices could be belongs to none."""
        if self._resources.side == "device" or request.joining.device is not None:
            return request.joining.device is not None or self._company.expects_peer()
        if self.links or not (request.joining.any_device and self._may_ask.allows(request.account.asker)):
            return False
        return self._company.expects_peer()

    def absence(self, request: GenerateRequest) -> str:
        """Why no device takes part in a request, as the end of a sentence, where there is more to say."""
        if self._resources.side == "device":
            return ""
        if (name := request.joining.device) is not None:
            return "" if self.link(name) else f": no device '{one_line(name, MAX_NAME)}' is linked"
        if not request.joining.any_device:
            return ": its key is bound to no device, and it names none in paceline.device"
        return ": several are linked, and it names none in paceline.device" if len(self.links) > 1 else ""

    def barred(self, request: GenerateRequest, link: Link | None) -> str:
        """Why this device may not be asked by this client, as the end of a sentence; empty where it may."""
        if link is None or self._resources.side == "device":
            return ""
        may_ask = MayAsk.of(link.peer.asked_by)
        return "" if may_ask.allows(request.account.asker) else may_ask.refusal()

    def on_link(self, link: Link, peer: str) -> None:
        """A link to this peer is up. The caller must close the link it replaces, which counts as lost for sessions."""
        if (older := self.links.get(peer)) is not None:
            self._on_down(older, peer)
        self.links[peer] = link
        link.tell_documents(lambda: self._resources.num_documents)
        self._may_ask = MayAsk.of(link.peer.asked_by)
        link.on_sent = self.on_sent
        link.on_open = lambda opening: self._on_open(link, peer, opening)
        link.on_down = lambda: self._on_down(link, peer)
        log.info("linked with %s, which holds %s documents", peer, link.peer.documents)
        if not link.strategies:
            log.warning("no answer is written together with %s: %s", peer, UNLIKE)
        self.scales.told(peer, link.peer.relevance)
        for client in list(chain(*self.clients.values())):
            if client.prepared.peer_name == peer:
                client.link_back(link)

    def on_sent(self, kind: str, num_bytes: int) -> None:
        """Count what leaves."""
        self._today.add(kind, num_bytes)
        self._resources.guard.spend("bytes", num_bytes)

    async def close(self) -> None:
        """End all sessions of peers' clients, at shutdown."""
        for session in list(self._sessions):
            session.link_lost()
        await self._texts.close()

    def _on_down(self, link: Link, peer: str) -> None:
        if self.links.get(peer) is link:
            del self.links[peer]
            self._ended_sent += link.total_sent
            self._ended_received += link.total_received
        log.info("the link with %s is down: %s", peer, link.close_reason or "another takes its place")
        for client in list(chain(*self.clients.values())):
            if client.link is link:
                client.link_lost()
        for session in [session for session, its_link in self._sessions.items() if its_link is link]:
            session.link_lost()
        self._texts.link_lost(link)

    # ---- openings ---------------------------------------------------------------------------------------------------
    def _on_open(self, link: Link, peer: str, opening: OpenSession) -> None:
        """The peer opens a session: its part in an answer, a search (`SEARCH`), or a text of a workflow (`WRITE`)."""
        if opening.strategy == SEARCH and self._resources.side == "cloud":
            link.attach(opening.session, lambda _: None)
            self._run(self._search(link, peer, opening))
            return
        if opening.strategy == WRITE and self._resources.side == "cloud":
            self._texts.open(link, peer, opening)
            return
        ask: Ask | None = None
        try:
            strategy, options = self._accept(link, opening)
            if not self._shares.has_room(peer):
                raise PacelineError("it is busy")
            if self._resources.side == "device":
                ask = self._asks.admit(opening, _query(self._resources, opening, options))
        except PacelineError as refusal:
            if self._resources.side == "device":
                self._asks.refuse(opening, str(refusal))
            link.send(CloseSession(opening.session, f"{REFUSED}{refusal}"[:1024]))
            return
        mask = None if opening.constraint is None else DeferredMask()
        session = self._session(_Part(link, peer, opening, strategy, options, mask, ask))
        self._shares.force(peer)
        self._sessions[session] = link
        session.begin()

    async def _search(self, link: Link, peer: str, opening: OpenSession) -> None:
        """Search for a device, and reply; without documents no passage is found."""
        egress, session, owner = Egress(), opening.session, f"peer:{peer}"
        found, reason, searches = RetrievedPassages(session, []), "stop", False
        try:
            if (store := self._resources.readable(owner, peer=True)) is not None:
                if searches := self._searches.take(peer):
                    work = partial(store.search, opening.query[:MAX_QUERY], min(opening.top_k_documents, MAX_PASSAGES))
                    passages = await self._resources.units.do("search", work, owner)
                    found = RetrievedPassages(session, to_wire(passages))
                else:
                    reason = f"{REFUSED}it is busy"
        except Exception:  # the device must receive a reply in any case
            log.exception("a device's search failed")
            reason = f"{REFUSED}its documents cannot be searched"
        finally:
            if searches:
                self._searches.give_back(peer)
        close = CloseSession(session, reason)
        with suppress(LinkClosed):
            for message in (found, close) if reason == "stop" else (close,):
                egress.sent(message, link.send(message))
        log.info("sent to the other side for a search: %s", egress or "nothing, it has gone")

    def _accept(self, link: Link, opening: OpenSession) -> tuple[Strategy, Options]:
        """Strategy and options of an opening. Raises PacelineError with the reason for a refusal."""
        strategy = STRATEGIES.get(opening.strategy)
        if strategy is None or not strategy.needs_peer or strategy.name not in link.strategies:
            raise PacelineError(f"it does not know '{opening.strategy}'")
        if opening.privacy not in strategy.privacy_levels:
            raise PacelineError(f"the privacy level '{opening.privacy}' takes no second side")
        try:
            options = decode_part(opening.options, strategy.options)
        except RemoteProtocolError as error:
            raise PacelineError(f"the options of '{strategy.name}' cannot be read: {error}") from error
        if (refusal := strategy.accepts(opening, options)) is not None:
            raise PacelineError(refusal)
        if spent := self._resources.guard.used_up():
            raise PacelineError(f"its budget of today is used up ({', '.join(spent)})")
        if self._resources.side == "device":  # whose energy it is
            self._resources.energy.queue(options)  # refuses a budget that it cannot keep
        return strategy, msgspec.structs.replace(options, drafting=_clamp(options.drafting))

    def _session(self, part: _Part) -> PeerSession:
        resources, link, opening, options, ask = self._resources, part.link, part.opening, part.options, part.ask
        sampling = sampling_from_wire(opening.sampling)
        private = opening.privacy != "open" or (resources.side == "device" and not self._company.open_to_peer)
        config = MachineConfig(
            Seat(
                resources.side,
                faces_client=False,
                targets=tuple(opening.targets),
                epoch=opening.epoch,
                joined=True,
                private=private,
                rtt=link.rtt,
                bandwidth=link.bandwidth,
            ),
            resources.rules(sampling, part.end, part.mask, needs_dists=not resources.worker.told),
            options,
            resources.means(part.strategy, options, sampling, resources.peers_table()),
        )

        def closed(session: PeerSession) -> None:
            if self._sessions.pop(session, None) is not None:
                resources.guard.spend("joules", 0.0 if session.energy is None else session.energy.joules)
                session.tell(part.peer, opening.strategy, self._company.tracer)
                self._shares.give_back(part.peer)
                if session in self._counted:
                    self._tokens.give_back(part.peer, self._counted.pop(session))
            if ask is not None:
                ask.end(session.outcome, session.egress)

        session = PeerSession(
            resources.machine(part.strategy, config),
            resources.worker,
            link,
            opening,
            lambda session: self._run(self._retrieve(session, part)),
            closed,
            part.owner,
        )
        if ask is not None:
            session.observe = lambda message, sent: ask.observe(message) if sent or not private else None
        return session

    async def _retrieve(self, session: PeerSession, part: _Part) -> None:
        try:
            await self._read(session, part)
        except RequestError as refusal:  # of what the peer has sent
            session.refuse(str(refusal))
        except Exception:  # the peer must receive a reply in any case, and no private text with it
            log.exception("a peer's request could not be prepared")
            session.refuse("it cannot be prepared there now")

    async def _read(self, session: PeerSession, part: _Part) -> None:
        """Raises RequestError for what cannot be kept here, and whatever a store raises."""
        resources, positions = self._resources, self._resources.max_positions
        peer, length, ask = part.peer, len(part.opening.targets), part.ask
        if ask is not None:
            try:
                await ask.begin()
            except PacelineError as error:
                log.error("no question of the cloud's is answered without a log: %s", error)
                session.refuse("its activity log cannot be written")
                return
        if part.mask is not None and part.opening.constraint is not None:
            part.mask.keep(await resources.mask(constraint_from_wire(part.opening.constraint), part.owner))
        salt = await self._salt(part)  # before the search
        prompts = await self._prompts(part)
        if ask is not None:
            ask.reads(passage.file_id for passage in prompts.passages)
            prompts = prompts.without_relevance(self.scales.temperature)
        if self.scales.difference(peer):
            prompts = prompts.with_equal_sides()
        if prompts.longest + length >= positions:
            session.refuse(f"its context of {positions} tokens is too short")
            return
        rows = [len(branch.prompt) + length for branch in prompts.branches]
        more = max(1, part.end - length)
        share = resources.claim(rows, more)
        if share is None or not share.drafts:
            session.refuse("its engine's memory is too short")
            return
        if session not in self._sessions:
            return  # it has ended meanwhile
        # What a session needs at once: its prompts, and a short answer. Longer ones take turns and preempt each other.
        tokens = sum(rows) + len(rows) * min(more, LONG_ANSWER)
        if not self._tokens.take(peer, tokens):
            session.refuse("it is busy with others of this side")
            return
        self._counted[session] = tokens
        unanswered = resources.side == "cloud" and prompts.unanswered
        found = RetrievedPassages(0, _found(resources.side, prompts.passages), unanswered)
        max_new_tokens = min(positions - prompts.longest, length + share.tokens)
        if prompts.reuses and salt is not None:
            salt = f"reused {salt}"
        session.retrieved(prompts, max_new_tokens, found, claim=share.rows, salt=salt)

    async def _prompts(self, part: _Part) -> PromptSet:
        resources, opening, options, length = self._resources, part.opening, part.options, len(part.opening.targets)
        end = part.end if options.stretch else length + 1
        reads = resources.side in part.strategy.joins_with_documents
        query = _query(resources, opening, options)
        work = partial(
            prompts_of,
            _conversation(opening),
            resources.readable(part.owner, peer=True),
            resources.tokenizer,
            k=min(opening.top_k_documents, MAX_PASSAGES) if reads else 0,
            max_prompt=resources.max_positions - max(end, min(opening.max_tokens, resources.max_positions // 2)),
            query=query,
            kv=resources.prefiller,
            temperature=self.scales.temperature,
            template=msgspec.json.decode(opening.template or "{}", type=dict[str, object]),
            reading=resources.reading(options.reading),
            judge=resources.judge if options.judged and query is None else None,
        )
        return await with_reused(await resources.units.do("search", work, part.owner), resources.prefiller)

    async def _salt(self, part: _Part) -> str | None:
        """Within which KV of a peer's session is shared: by a device's answers that it says may, and by an answer with
        itself where its link was lost. A device shares none: the time of an answer would tell its cloud what it has
        read before."""
        if self._resources.side == "device" or not part.opening.cache_key:
            return None
        _, removals = await asyncio.to_thread(self._resources.documents, Selection())
        return f"peer {removals} {part.peer} {part.opening.cache_key.hex()}"


@dataclass(frozen=True, slots=True, repr=False)
class _Part:
    """This side's part in an answer of a peer's client."""

    link: Link
    peer: str
    opening: OpenSession
    strategy: Strategy
    options: Options
    mask: DeferredMask | None  # of its constraint
    ask: Ask | None  # where a device has admitted it

    @property
    def owner(self) -> str:
        """A peer's clients share its turns in the engine's steps."""
        return f"peer:{self.peer}"

    @property
    def end(self) -> int:
        """Output tokens of the answer up to the end of this stretch."""
        return stretch_of(len(self.opening.targets), self.options.stretch, self.opening.max_tokens)[1]


def _query(resources: Resources, opening: OpenSession, options: Options) -> str | None:
    """The query of a later stretch of an answer: the question and the text so far. None: the question alone."""
    begin, _ = stretch_of(len(opening.targets), options.stretch, opening.max_tokens)
    return query_with_text(_conversation(opening), opening.targets[:begin], resources.tokenizer) if begin else None


def _conversation(opening: OpenSession) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in opening.messages]


def _clamp(limits: DraftLimits) -> DraftLimits:
    return DraftLimits(
        min(limits.width, _LIMITS.width),
        min(limits.rows, _LIMITS.rows),
        min(limits.ahead, _LIMITS.ahead),
        limits.whole_sequences,
    )


def _found(side: Side, passages: Sequence[Passage]) -> list[RetrievedPassage]:
    """Passages as sent to the peer: of a device's, only that there are any."""
    if side == "device":
        return [RetrievedPassage(document="", text="", score=0.0)] if passages else []
    return to_wire(passages)
