"""One side of the program: an engine, a document store, links to peers, and the sessions that run on them.

`Node` is the `Service` behind the HTTP surface. It admits requests, finds their documents and takes part in what its
peers open. It contains no algorithm: strategies do the writing, `plan` chooses among them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from paceline.core.aggregation.registry import AggregatorName
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.drafting.online_stats import OnlineStats
from paceline.core.sampling.constraint import Constraint, Mask
from paceline.core.sampling.sampler import NO_DEFAULTS, SamplingDefaults, SamplingParams
from paceline.engine.base import LoadedModel, ModelInfo
from paceline.engine.grammar.compiler import DeferredMask, GrammarCompiler
from paceline.errors import PacelineError, RequestError
from paceline.rag.document_kv import DocumentKvStore
from paceline.rag.records import Passage, Selection
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.library import Library
from paceline.runtime.embeddings import TextEmbedder
from paceline.runtime.engine_loop.calibration import PREFIX, Timed, forward_times
from paceline.runtime.engine_loop.document_prefill import WATCH_S, DocumentPrefiller
from paceline.runtime.engine_loop.memory import claim, claim_or_refuse
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.link.dialer import Link
from paceline.runtime.lookup_tables.store import TableStore
from paceline.runtime.service import EmbedderInfo, Embeddings, GenerateRequest, Logprobs, Readiness
from paceline.runtime.sessions.base import PeerSession
from paceline.runtime.sessions.client import ClientSession, PreparedRequest
from paceline.runtime.sessions.egress import Egress
from paceline.runtime.sessions.output_text import token_strings
from paceline.runtime.sessions.prompt_logprobs import PromptScorer
from paceline.runtime.sessions.prompts import PromptSet, build_prompts, raw_prompt, too_long
from paceline.runtime.sessions.remote_search import SEARCH, RemoteSearch, SearchServer, to_wire
from paceline.runtime.sessions.routing import (
    DRAFTINGS,
    RULES,
    AggregateSetting,
    RoutingContext,
    choose_aggregator,
    choose_strategy,
    drafting_from_wire,
    opening_for,
    peer_missing,
)
from paceline.strategies.base import MachineConfig, Side, other
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import constraint_from_wire, sampling_from_wire
from paceline.wire.messages import CloseSession, OpenSession, RetrievedPassage, RetrievedPassages

log = logging.getLogger("paceline.node")

MAX_ANSWERS = 1024  # admitted at once; further requests get 429
RETRY_AFTER_S = 1
MAX_PASSAGES = 64  # a peer may ask this side to read
LEAST_ROOM = 256  # tokens that documents leave for an answer whose request sets no limit, in a context that has them
JOINT_PRIVACY = ("open", "document-private")  # levels at which two sides write together


class Node:
    """Use as an async context manager on the loop that serves it. Methods belong to that loop's thread."""

    def __init__(
        self,
        side: Side,
        model: LoadedModel,
        store: DocumentStore | None,
        *,
        served_name: str | None = None,
        sampling: SamplingDefaults = NO_DEFAULTS,
        max_tokens_default: int | None = None,
        expects_peer: bool = False,
        open_to_peer: bool = False,
        kv: DocumentKvStore | None = None,
        tables: TableStore | None = None,
        timed: bool = False,
    ) -> None:
        """`sampling`: what a request gets that does not say, before what the model recommends.

        `expects_peer`: an answer without a peer is marked even if none was named, as at an agent with a cloud.

        `open_to_peer`: a device ships distributions of its documents when a client of the cloud asks for that.
        `tables`: what answers are drafted from, saved at the end; None: they are forgotten with the node.
        `timed`: forwards are timed before the first answer.
        """
        self._side: Side = side
        self._model = model
        self._store = store
        info = model.engine.info
        self._info = replace(info, name=served_name or info.name, sampling=sampling.over(info.sampling))
        self._max_tokens_default = max_tokens_default
        self._expects_peer = expects_peer
        self._open_to_peer = open_to_peer
        self._tables = tables or TableStore(None, model.tokenizer.fingerprint, model.tokenizer.vocab_size)
        self._shrinking: asyncio.Task[None] | None = None  # tables go to their files
        self._experiences: dict[tuple[AggregatorName, bool], OnlineStats] = {}
        self._timed = timed
        self._times: Sequence[Timed] = ()
        self.worker = EngineWorker(model.engine)
        self._block_size = model.engine.block_size
        self._links: dict[str, Link] = {}  # by the peer's name
        self._fronts: set[ClientSession] = set()
        self._preparing = 0  # requests that will be fronts
        self._peers: dict[PeerSession, Link] = {}
        self._search, self._searches = RemoteSearch(), SearchServer()  # for passages alone: of this side, and of peers
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokenizer = model.tokenizer
        self._library: Library | None = None
        self._grammars = GrammarCompiler(model.tokenizer)
        self._vocab_size = min(self._info.vocab_size, self._tokenizer.vocab_size)
        self._scorer = PromptScorer(self.worker, self._tokenizer, self._vocab_size)
        self._embedder = None if store is None else TextEmbedder(store.embedder)
        self._kv = None if kv is None or store is None else DocumentPrefiller(kv, store, self.worker, model)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._grammars.warm)  # now, as it holds up everything
        await self.worker.start()
        if self._timed:
            self._times = await forward_times(self.worker)
        if self._store is not None:
            self._library = await asyncio.to_thread(Library, self._store, self._side)
            self._library.start()
        if self._kv is not None:
            self._run(self._fill(self._kv))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for front in list(self._fronts):
            front.fail(PacelineError("the program is shutting down"))
        for session in list(self._peers):
            session.link_lost()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._library is not None:
            await asyncio.to_thread(self._library.close)
        await self.worker.stop()
        if self._kv is not None:
            await asyncio.to_thread(self._kv.close)
        await asyncio.to_thread(self._tables.save)

    async def _fill(self, kv: DocumentPrefiller) -> None:
        """Compute the KV of documents that are new, while no answer is being written."""
        while True:
            try:
                await kv.prefill_missing(lambda: bool(self._fronts or self._peers or self._preparing))
            except Exception:
                log.exception("KV of documents could not be computed ahead")
            await asyncio.sleep(WATCH_S)

    # ---- the service ------------------------------------------------------------------------------------------------
    @property
    def side(self) -> Side:
        return self._side

    def models(self) -> Sequence[ModelInfo]:
        return (self._info,)

    def embedders(self) -> Sequence[EmbedderInfo]:
        if self._store is None:
            return ()
        embedder = self._store.embedder
        return (EmbedderInfo(embedder.served_name, embedder.dimensions, embedder.max_tokens),)

    def strategies(self) -> Sequence[str]:
        return tuple(STRATEGIES)

    @property
    def library(self) -> Library | None:
        return self._library

    @property
    def num_documents(self) -> int:
        return 0 if self._store is None else self._store.count()

    @property
    def num_answers(self) -> int:
        """Answers under way whose client is on this side."""
        return len(self._fronts)

    def readiness(self) -> Readiness:
        detail: dict[str, str | int | bool] = {
            "side": self._side,
            "model": self._info.name,
            "documents": self.num_documents,
            "linked": bool(self._links),
            "peers": len(self._links),
            "answers": len(self._fronts),
        }
        return Readiness(True, detail)

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(await asyncio.to_thread(self._tokenizer.raw, text))

    async def token_bytes(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        return await asyncio.to_thread(token_strings, self._tokenizer, tokens)

    def check(self, request: GenerateRequest, *, room: int) -> None:
        choose_strategy(request, self._situation(*self._peer_for(request), 0))
        choose_aggregator(request)
        raw_prompt(request.prompt or (), self._info.max_positions, self._vocab_size, room=room)

    async def score(self, prompt: Sequence[int], top: int) -> Sequence[Logprobs]:
        return await self._scorer.score(prompt, top)

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        if self._embedder is None:
            raise RequestError("This side keeps no documents and has no embedder.", status=404, param="model")
        return await self._embedder.embed(texts)

    async def prepare(self, request: GenerateRequest) -> ClientSession:
        if len(self._fronts) + self._preparing >= MAX_ANSWERS:
            raise RequestError(
                f"This server is writing {MAX_ANSWERS} answers already. Please try again in {RETRY_AFTER_S} s.",
                status=429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
            )
        self._preparing += 1  # a place, before anything is waited for
        egress = Egress()
        try:
            return await self._prepare(request, egress)
        except BaseException:
            if egress:
                log.info("sent to the other side for an answer that was not begun: %s", egress)
            raise
        finally:
            self._preparing -= 1

    async def _prepare(self, request: GenerateRequest, egress: Egress) -> ClientSession:
        name, link = self._peer_for(request)
        selection = Selection(request.collections, request.document_ids)
        own = 0 if self._store is None else await asyncio.to_thread(self._store.count, selection)
        choice = choose_strategy(request, self._situation(name, link, own))
        if choice.missing and request.on_loss != "continue":
            raise peer_missing(other(self._side))
        strategy = STRATEGIES[choice.strategy]
        joint = self._joint(request)
        mask = None if request.constraint is None else await self._mask(request.constraint)
        reading = await self._read(request, selection)
        # Now that nothing here speaks against the request.
        public = await self._search.for_answer(request, link, egress, expected=self._expects_peer)
        if public is None and request.on_loss != "continue":
            raise peer_missing(other(self._side))
        if public:
            reading = await self._read(request, selection, public)
        share = claim_or_refuse(self.worker.capacity, self._block_size, reading.branches, self._limit(request, reading))
        max_tokens = share.tokens
        if not share.drafts:
            joint = replace(joint, drafting=DRAFTINGS["none"])
        link = None if name is None else self._links.get(name)  # it may have gone or come back meanwhile
        plan = PreparedRequest(
            request=request,
            side=self._side,
            strategy=strategy.name,
            why=choice.why,
            branches=reading.branches,
            room=self._info.max_positions - reading.longest,
            citations=reading.citations(self._side),
            prompt_tokens=reading.longest,
            opening=opening_for(request, strategy.name, joint, max_tokens),
            missing=f"{other(self._side)}_missing" if choice.missing or public is None else None,
            peer_name=name if strategy.needs_peer else None,
            prefixes=reading.prefixes,
            mask=mask,
            claim=share.rows,
        )
        task = replace(
            self._task(request.sampling, max_tokens, front=True, linked=strategy.needs_peer),
            waits_for_peer=request.on_loss == "pause",
            aggregator=joint.rule,
            needs_dists=joint.wide,
            rescoring=request.rescoring,
            private=request.privacy != "open",
            drafting=joint.drafting,
            rtt=None if link is None else link.rtt,
            bandwidth=None if link is None else link.bandwidth,
            stats=self._experience(joint.rule, request.sampling),
            mask=mask,
            table=self._table(request.owner),
        )
        front = ClientSession(
            strategy.machine(task),
            self.worker,
            plan,
            self._tokenizer,
            link if strategy.needs_peer else None,
            self._fronts.discard,
        )
        front.egress = egress
        self._fronts.add(front)
        return front

    def _table(self, owner: str) -> LookupTable:
        table = self._tables.table(owner)
        if self._tables.full and (self._shrinking is None or self._shrinking.done()):
            self._shrinking = self._run(self._tables.shrink())
        return table

    async def _mask(self, constraint: Constraint) -> Mask:
        """Raises RequestError where it cannot be kept. In a thread: compiling may take half a second."""
        return await asyncio.to_thread(self._grammars.mask, constraint)

    @staticmethod
    def _joint(request: GenerateRequest) -> AggregateSetting:
        return AggregateSetting(choose_aggregator(request), request.top_logprobs is not None, DRAFTINGS[request.drafts])

    def _peer_for(self, request: GenerateRequest) -> tuple[str | None, Link | None]:
        """Whose documents join: the named device, else the only peer there is."""
        if request.device is not None and self._side == "cloud":
            return request.device, self._links.get(request.device)
        if len(self._links) == 1:
            return next(iter(self._links.items()))
        return None, None

    def _situation(self, name: str | None, link: Link | None, own_documents: int) -> RoutingContext:
        peer = None if link is None else link.peer
        return RoutingContext(
            side=self._side,
            expected=self._expects_peer or name is not None,
            linked=link is not None and link.accepting,
            common=() if link is None else link.strategies,
            own_documents=own_documents,
            peer_documents=0 if peer is None else peer.documents,
        )

    async def _read(self, request: GenerateRequest, selection: Selection, others: Sequence[Passage] = ()) -> PromptSet:
        if request.prompt is not None:
            return raw_prompt(request.prompt, self._info.max_positions, self._vocab_size)
        least = min(LEAST_ROOM, self._info.max_positions // 8)
        room = min(request.max_tokens or self._max_tokens_default or least, self._info.max_positions // 2)
        reading = await build_prompts(
            request.messages,
            self._store,
            self._tokenizer,
            k=request.documents,
            max_prompt=self._info.max_positions - room,
            kv=self._kv,
            selection=selection,
            min_score=request.min_score,
            others=others,
        )
        if reading.plain_tokens >= self._info.max_positions:
            raise too_long(self._info.max_positions, reading.plain_tokens, "messages")
        return reading

    def _limit(self, request: GenerateRequest, reading: PromptSet) -> int:
        """Tokens to write at most. What does not fit the context is clamped, as OpenAI does."""
        room = self._info.max_positions - reading.longest
        return min(request.max_tokens or self._max_tokens_default or room, room)

    def _experience(self, rule: AggregatorName, sampling: SamplingParams) -> OnlineStats:
        """What answers of this kind have taught this side."""
        kind = rule, sampling.temperature == 0.0
        if kind not in self._experiences:
            self._experiences[kind] = OnlineStats()
            self._experiences[kind].begin(self._times, PREFIX)
        return self._experiences[kind]

    def _task(self, sampling: SamplingParams, max_tokens: int, *, front: bool, linked: bool) -> MachineConfig:
        return MachineConfig(
            side=self._side,
            faces_client=front,
            sampling=sampling,
            max_tokens=max_tokens,
            eos_ids=self._tokenizer.eos_ids,
            vocab_size=self._vocab_size,
            linked=linked,
        )

    # ---- links ------------------------------------------------------------------------------------------------------
    def on_link(self, link: Link, peer: str) -> None:
        """A link to this peer is up. One that it replaces must be closed by the caller; for sessions it is down now."""
        if (older := self._links.get(peer)) is not None:
            self._down(older, peer)
        self._links[peer] = link
        link.on_open = lambda opening: self._opened(link, peer, opening)
        link.on_down = lambda: self._down(link, peer)
        log.info("linked with %s, which holds %s documents", peer, link.peer.documents)
        for front in list(self._fronts):
            if front.plan.peer_name == peer:
                front.link_back(link)

    def _down(self, link: Link, peer: str) -> None:
        if self._links.get(peer) is link:
            del self._links[peer]
        log.info("the link with %s is down: %s", peer, link.close_reason)
        for front in list(self._fronts):
            if front.link is link:
                front.link_lost()
        for session in [session for session, of in self._peers.items() if of is link]:
            session.link_lost()

    def _opened(self, link: Link, peer: str, opening: OpenSession) -> None:
        """The peer wants this side to take part in an answer."""
        if opening.strategy == SEARCH and self._side == "cloud":
            link.attach(opening.session, lambda _: None)
            self._run(self._searches.answer(link, opening, self._store, most=MAX_PASSAGES))
            return
        strategy = STRATEGIES.get(opening.strategy)
        if strategy is None or not strategy.needs_peer:
            why = f"it does not know '{opening.strategy}'"
        elif opening.privacy not in JOINT_PRIVACY:
            why = f"the privacy level '{opening.privacy}' takes no second side"
        elif opening.aggregator not in RULES:
            why = f"it does not know the aggregator '{opening.aggregator}'"
        else:
            why = "it is busy" if len(self._peers) >= MAX_ANSWERS else ""
        if strategy is None or why:
            link.send(CloseSession(opening.session, f"refused: {why}"))
            return
        sampling = sampling_from_wire(opening.sampling)
        mask = None if opening.constraint is None else DeferredMask()
        task = replace(
            self._task(sampling, opening.max_tokens, front=False, linked=True),
            targets=tuple(opening.targets),
            epoch=opening.epoch,
            aggregator=RULES[opening.aggregator],
            needs_dists=opening.needs_dists,
            rescoring=opening.rescoring,
            private=opening.privacy != "open" or (self._side == "device" and not self._open_to_peer),
            drafting=drafting_from_wire(opening.drafting),
            rtt=link.rtt,
            bandwidth=link.bandwidth,
            stats=self._experience(RULES[opening.aggregator], sampling),
            mask=mask,
            table=self._table(f"peer:{peer}"),  # whose clients they are is the peer's to know
        )

        def retrieve(session: PeerSession) -> None:
            self._run(self._retrieve(session, opening, mask))

        def closed(session: PeerSession) -> None:
            self._peers.pop(session, None)

        session = PeerSession(strategy.machine(task), self.worker, link, opening.session, retrieve, closed)
        self._peers[session] = link
        session.begin()

    async def _retrieve(self, session: PeerSession, opening: OpenSession, mask: DeferredMask | None) -> None:
        if mask is not None and opening.constraint is not None:
            try:
                mask.keep(await self._mask(constraint_from_wire(opening.constraint)))
            except RequestError as error:
                session.refuse(str(error))
                return
            except Exception:  # whatever it is, the peer must hear that nobody will take part
                log.exception("a peer's constraint could not be compiled")
                session.refuse("its constraint cannot be kept here")
                return
        messages = [{"role": message.role, "content": message.content} for message in opening.messages]
        room = min(opening.max_tokens, self._info.max_positions // 2)
        try:
            reading = await build_prompts(
                messages,
                self._store,
                self._tokenizer,
                k=min(opening.top_k_documents, MAX_PASSAGES),
                max_prompt=self._info.max_positions - room - len(opening.targets),
                query=opening.query,
                kv=self._kv,
            )
        except Exception as error:
            log.exception("a peer's request could not be prepared")
            session.fail(PacelineError(f"no documents could be read: {error}"))
            return
        if reading.longest + len(opening.targets) >= self._info.max_positions:
            session.fail(PacelineError(f"its context of {self._info.max_positions} tokens is too short"))
            return
        prompts = [len(branch.prompt) + len(opening.targets) for branch in reading.branches]
        share = claim(self.worker.capacity, self._block_size, prompts, opening.max_tokens)
        if share is None or not share.drafts:
            session.fail(PacelineError("the engine's memory is too short for it"))
            return
        found = RetrievedPassages(0, self._found(reading.passages))
        left = min(self._info.max_positions - reading.longest, len(opening.targets) + share.tokens)
        session.retrieved(reading.branches, left, found, reading.prefixes, claim=share.rows)

    def _found(self, passages: Sequence[Passage]) -> list[RetrievedPassage]:
        """What the peer may know of passages that are read here: of a device's, that there are some."""
        if self._side == "device":
            return [RetrievedPassage(document="", text="", score=0.0)] * len(passages)
        return to_wire(passages)

    def _run(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """In the background, and no longer than this node lives."""
        job = asyncio.get_running_loop().create_task(work)
        self._tasks.add(job)
        job.add_done_callback(self._tasks.discard)
        return job
