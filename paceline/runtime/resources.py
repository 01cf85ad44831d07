"""Resources of one side: engine, tokenizer, documents, n-gram tables, grammars and statistics; and `NodeParts`, what a
node is made of besides its model and documents.

Knows no request and no link. All methods belong to the event loop of the node.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, cast

import msgspec

from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import MEMORY_TOKENS, LookupTable, TextMemory, remembered
from paceline.core.sampling.sampler import NO_DEFAULTS, Constraint, Mask, SamplingDefaults, SamplingParams
from paceline.core.side import WAYS_OF_READING, HandoffLevel, WayOfReading
from paceline.engine.base import AsyncEngine, Engine, ServedModel, TextModel
from paceline.engine.grammar.compiler import GrammarCompiler
from paceline.engine.remote.servers import RemoteModel
from paceline.errors import RequestError
from paceline.rag.prompt import RELEVANCE_TEMPERATURE
from paceline.rag.records import MANAGED, Passage, Selection
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.readable import Readable
from paceline.runtime.energy import SideEnergy
from paceline.runtime.engine_loop.document_prefill import DocumentPrefiller, Timed, forward_times
from paceline.runtime.engine_loop.executor import STEP_ROWS
from paceline.runtime.engine_loop.remote_worker import RemoteWorker
from paceline.runtime.engine_loop.worker import EngineWorker, Worker
from paceline.runtime.lookup_tables import DocumentTables, Lifetime, TableStore, over
from paceline.runtime.policy import PolicyGuard
from paceline.runtime.questions import Judge, is_judged
from paceline.runtime.sessions.base import MaskBesideLoop, MaskThreads
from paceline.runtime.sessions.handoff import Outcomes
from paceline.runtime.sessions.routing import ALONE, STAGED, Costs
from paceline.runtime.units import NodeUnits, Turnstile, UnitRegistry
from paceline.strategies.base import (
    Branch,
    DraftingMeans,
    Machine,
    MachineConfig,
    OutputRules,
    Privacy,
    Side,
    SideFacts,
    Strategy,
)
from paceline.strategies.decoding.branch_decoder import MAX_OPEN_ROWS
from paceline.system import Threads
from paceline.wire.messages import Options, RelevanceScale

if TYPE_CHECKING:
    from paceline.rag.document_kv import DocumentKvStore
    from paceline.runtime.asking import CloudAsks
    from paceline.runtime.endpoint import OutsideEndpoint
    from paceline.runtime.stimuli import StimulusLog
    from paceline.runtime.tracing import Tracer


# ---- arguments of `Node`, grouped by what they are for --------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Offer:
    """How the model is offered to clients."""

    name: str | None = None  # that it is served under; None: its own
    sampling: SamplingDefaults = NO_DEFAULTS  # before those that the model recommends
    system: str = ""  # as in `ModelInfo`
    max_tokens: int | None = None  # of an answer whose request sets none


@dataclass(frozen=True, slots=True)
class Computing:
    step_rows: int = STEP_ROWS  # of one step of the engine, at most
    timed: bool = False  # forwards are measured before the first answer
    draft_engine: Engine | None = None  # of the draft model, whose vocabulary must be the model's
    units: NodeUnits | None = None  # None: those found
    energy: SideEnergy = field(default_factory=SideEnergy)  # by default nothing is known of it
    stimuli: StimulusLog | None = None  # of the machines that write answers


@dataclass(frozen=True, slots=True)
class Kept:
    """What helps to read documents and to draft, and is kept between answers."""

    kv: DocumentKvStore | None = None
    tables: TableStore | None = None  # n-grams for drafts, saved at the end; None: kept in memory only
    relevance_temperature: float = RELEVANCE_TEMPERATURE  # by which cosines are divided
    judge: Judge | None = None  # None: all passages that are found are read
    outcomes: Outcomes | None = None  # of answers that a device has handed over; None: kept in memory only


@dataclass(frozen=True, slots=True)
class Company:
    """Terms on which this side and its peers take part in each other's answers."""

    # An answer without a peer is marked as degraded even if the request names no device; of an agent with a cloud, and
    # of a server with devices, for requests that a linked one would join.
    expects_peer: Callable[[], bool] = bool
    open_to_peer: bool = False  # a device sends distributions of its documents if the cloud's client requests it
    asks: CloudAsks | None = None  # the gate for sessions that a cloud opens at a device; None: none is admitted
    cloud_texts: bool = True  # of a device: its cloud's model may write texts of its workflows' agents
    tracer: Tracer | None = None  # of what this side does for peers' clients
    policy: PolicyGuard | None = None  # of the documents' owner; None: there is none
    handoff: HandoffLevel = "off"  # of a device: what it writes though its cloud's model is larger
    outside: OutsideEndpoint | None = None  # of a stranger, which writes where a request asks for it


@dataclass(frozen=True, slots=True)
class NodeParts:
    offer: Offer = Offer()
    computing: Computing = field(default_factory=Computing)
    kept: Kept = Kept()
    company: Company = Company()


# ---- the resources --------------------------------------------------------------------------------------------------
THREADS: Final = 4


class CompilingThreads:
    """The compiler of one vocabulary's constraints, on threads, in turns of their owners.

    Compiling takes up to `MAX_COMPILE_S` of a processor, and llguidance lets go of the GIL meanwhile. It has threads of
    its own, so that it holds up neither answers nor searches, and an owner has one of them at most, so that one who
    sends costly schemas waits for himself. All methods belong to one event loop.
    """

    def __init__(self, tokenizer: TextModel) -> None:
        self._grammars = GrammarCompiler(tokenizer)
        self._threads = Threads(THREADS, "compiling")
        self._turns = Turnstile(THREADS)

    async def start(self) -> None:
        """Load the vocabulary now, because that holds the GIL for about a second."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._grammars.warm)

    async def mask(self, constraint: Constraint, owner: str) -> Mask:
        """A new mask for one answer, at once if the owner has had it compiled.

        Raises RequestError for an unsupported constraint.
        """
        known = self._grammars.known(constraint, owner)
        if known is not None:
            return known
        async with self._turns.turn(owner):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._grammars.mask, constraint, owner)

    async def stop(self) -> None:
        """End the threads; constraints that wait are given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)


MAX_REMEMBERED: Final = 8 * MEMORY_TOKENS  # characters
LONG_ANSWER: Final = 256  # output tokens: from this limit on, drafts are worth more than further tokens


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """KV rows that an answer may need: prompts, output tokens, and open rows of drafts. Nothing is reserved.

    An answer whose claim fits into memory alone can always finish, since others are preempted for it
    (`core.batching.scheduler.MemoryAdmission`); so no other is accepted.
    """

    rows: int  # of all branches together, in whole blocks; 0 where memory has no bound
    tokens: int  # output tokens that fit in them
    drafts: bool  # whether open rows of drafts fit, too


def claim(capacity: int | None, block_size: int, prompts: Sequence[int], tokens: int) -> MemoryClaim | None:
    """Claim of branches for `tokens` output tokens, or for as many as fit; None if not even one fits.

    capacity: rows of the engine, None without a bound. prompts: rows of each branch's prompt. tokens: at least 1.
    """
    if capacity is None:
        return MemoryClaim(0, tokens, drafts=True)
    for open_rows in (MAX_OPEN_ROWS, 0):

        def rows(answer: int, more: int = open_rows) -> int:
            return sum(-(-(prompt + more + answer) // block_size) * block_size for prompt in prompts)

        fitting = bisect_right(range(1, tokens + 1), capacity, key=rows)
        least = min(tokens, LONG_ANSWER) if open_rows else 1
        if fitting >= least:
            return MemoryClaim(rows(fitting), fitting, drafts=open_rows > 0)
    return None


Background = Callable[[Coroutine[object, object, None]], asyncio.Task[None]]  # runs at most until the node stops


class Resources:
    def __init__(
        self,
        side: Side,
        model: ServedModel,
        store: DocumentStore | None,
        run: Background,
        parts: NodeParts,
        *,
        web: bool,
    ) -> None:
        """web: workflows may search the web."""
        computing = parts.computing
        self.parts = parts
        units = computing.units or NodeUnits()
        self.units = UnitRegistry(
            side,
            units,
            web=web,
            cloud=side == "device" and parts.company.cloud_texts,
            outside=side == "device" and parts.company.outside is not None,
        )
        self.energy = computing.energy
        info = model.engine.info
        self._far = model.engine if isinstance(model.engine, RemoteModel) else None
        self.side: Side = side
        self.info = replace(
            info,
            name=parts.offer.name or info.name,
            sampling=parts.offer.sampling.over(info.sampling),
            system=parts.offer.system,
            thinking=model.tokenizer.thinking,
            tools=model.tokenizer.tools,
        )
        self.tokenizer = model.tokenizer
        self.vocab_size = min(info.vocab_size, model.tokenizer.vocab_size)
        self.worker: Worker
        if self._far is not None:
            self.worker = RemoteWorker(self._far)
        else:
            self.worker = EngineWorker(
                cast("Engine | AsyncEngine", model.engine),  # else it is a `RemoteModel`
                computing.step_rows,
                meter=self.energy.meter,
                send_w=self.energy.send_w,
                cores=units.engine_cores,
            )
        draft_engine, kv = computing.draft_engine, parts.kept.kv
        self.drafts = None if draft_engine is None else EngineWorker(draft_engine, computing.step_rows)
        self._draft_positions = 0 if draft_engine is None else draft_engine.info.max_positions
        self.store = store
        self.num_documents = 0  # at the last `look`: whoever tells of them does not wait for the disk
        self.guard = parts.company.policy or PolicyGuard(side)
        scale = parts.kept.relevance_temperature
        self.relevance = None if store is None else RelevanceScale(store.embedder.fingerprint, scale)
        self.judge = parts.kept.judge if is_judged(info, self.tokenizer) else None
        self.prefiller = None if kv is None or store is None else DocumentPrefiller(kv, store, self.worker, model)
        self._compiling = CompilingThreads(model.tokenizer)
        self._mask_threads = MaskThreads(self.worker)
        self._tables = parts.kept.tables or TableStore(None, model.tokenizer.fingerprint, model.tokenizer.vocab_size)
        self._document_tables = DocumentTables()
        self._shrinking: asyncio.Task[None] | None = None  # writes tables to their files
        self._stats: dict[tuple[str, str, bool], OnlineStats] = {}  # of earlier answers, by their kind
        self._times: Sequence[Timed] = ()
        self._cache_secret = secrets.token_bytes(32)
        # Strategies by which this side may be the fastest alone, with ratios of their times. Of a model cut in stages,
        # one forward at a time leaves all stages but one idle: with a draft model to fill them `pipeline` is somewhat
        # faster than `lookup_tree`, without one both take about as long.
        staged: dict[str, float] = {} if self.worker.depth == 1 else {STAGED: 1.0 if self.drafts is None else 0.9}
        self.costs = Costs({ALONE: 1.0, **staged})
        self.outcomes = parts.kept.outcomes or Outcomes()
        self._run = run

    async def start(self) -> None:
        """Start the engine's thread."""
        await self._compiling.start()
        await self.worker.start()
        if self.drafts is not None:
            await self.drafts.start()
        if self.parts.computing.timed:
            if self._far is None:
                self._times = await forward_times(self.worker, self.vocab_size)
            elif (seconds := self._far.abilities.decode_s) is not None:  # timed when it was opened
                self._times = ((1, seconds),)

    async def stop(self) -> None:
        await asyncio.to_thread(self._mask_threads.stop)
        await self.worker.stop()
        await self._compiling.stop()
        self.units.close()
        if self.drafts is not None:
            await self.drafts.stop()
        if self.prefiller is not None:
            await asyncio.to_thread(self.prefiller.close)
        await asyncio.to_thread(self._tables.save)
        await asyncio.to_thread(self.save_learnt)

    def save_learnt(self) -> None:
        """Keep what must survive a restart. Writes the disk."""
        self.energy.save()
        self.outcomes.save()

    @property
    def max_positions(self) -> int:
        return self.info.max_positions

    def facts(self, documents: int = 0, answers: int = 1) -> SideFacts:
        """What this side has to write with, where so many answers are under way."""
        costs = self.costs.among(answers)
        return SideFacts(documents, self.info.num_weights, drafts=not self.worker.told, costs=costs)

    def peers_table(self) -> LookupTable:
        """N-grams of the base alone, for an answer whose drafts the other side may see: they know nothing of any owner,
        and what they learn ends with the answer."""
        return over(self._tables.base)

    def table(self, owner: str, lifetime: Lifetime = "owner", removals: int = 0) -> LookupTable:
        """N-grams for an answer of this owner. removals: of documents, as read before the answer's were searched."""
        table = self._tables.table(owner)
        if self._tables.full and (self._shrinking is None or self._shrinking.done()):
            self._shrinking = self._run(self._tables.shrink())
        if lifetime == "owner":
            return table
        return over(table) if lifetime == "answer" else self._document_tables.table(owner, table, removals)

    def reading(self, asked: str) -> WayOfReading:
        """How several passages are read. asked: as in `Options`."""
        by_model: WayOfReading = "apart" if self.tokenizer.one_document else "together"
        return next((each for each in WAYS_OF_READING if each == asked), by_model)

    def readable(self, owner: str, *, peer: bool = False, level: Privacy | None = None) -> Readable | None:
        """This side's documents for a reader, see `PolicyGuard.readable`; None where it keeps none."""
        if self.store is None:
            return None
        return self.guard.readable(self.store, owner, self.info.name, peer=peer, level=level)

    def documents(self, selection: Selection) -> tuple[int, int]:
        """The number of selected documents, and of removals so far. Reads the disk: on any thread."""
        return (0, 0) if self.store is None else (self.store.count(selection), self.store.removals())

    def chunks(self, chunk_ids: Collection[int]) -> Mapping[int, Passage]:
        """Those of these chunks of documents that are still there. Reads the disk: on any thread."""
        return {} if self.store is None or not chunk_ids else self.store.chunks(chunk_ids)

    def cache_key(self, salt: str) -> bytes:
        """16 bytes by which the cloud recognises answers that may share KV. They tell nothing of the salt, and the same
        salt has others after a restart."""
        return hashlib.blake2b(salt.encode(), key=self._cache_secret, digest_size=16).digest()

    async def forget_answers(self, owner: str) -> None:
        """Erase what this owner's answers have taught."""
        await self._tables.erase(owner)
        if self.store is not None:
            await asyncio.to_thread(self.store.forget_readings, owner)

    async def look(self) -> None:
        """Count the documents, and erase from memory what was learnt of those that this or another process has
        removed. Raises ConfigError."""
        self.num_documents, removals = await asyncio.to_thread(self.documents, MANAGED)
        self._document_tables.erase_older(removals)

    async def mask(self, constraint: Constraint, owner: str) -> Mask:
        """A mask for one answer of this owner, see `CompilingThreads.mask`."""
        mask = await self._compiling.mask(constraint, owner)
        return mask if constraint.kind == "text" else MaskBesideLoop(mask, self._mask_threads, owner)

    def machine(self, strategy: Strategy, config: MachineConfig) -> Machine:
        """A machine of this strategy, whose stimuli are logged where they are to be."""
        log = self.parts.computing.stimuli
        return strategy.machine(config) if log is None else log.machine(strategy, config)

    def claim(self, prompts: Sequence[int], tokens: int) -> MemoryClaim | None:
        """Of the model's KV, see `claim`. prompts: rows of each branch's."""
        return claim(self.worker.capacity, self.worker.block_size, prompts, tokens)

    def claim_or_refuse(self, branches: Sequence[Branch], tokens: int) -> MemoryClaim:
        """Claim of an answer of these branches. Raises RequestError (400) where its prompts alone do not fit."""
        prompts = [len(branch.prompt) for branch in branches]
        share = self.claim(prompts, tokens)
        if share is None:
            raise RequestError(
                f"This server has memory for {self.worker.capacity} tokens, and the prompt with its {len(prompts)} "
                f"documents takes {sum(prompts)}. Please shorten the messages, or ask for fewer documents.",
                code="context_length_exceeded",
                param="messages",
            )
        return share

    def draft_claim(self, strategy: Strategy, branches: Sequence[Branch], max_tokens: int) -> int | None:
        """Rows of the draft model's KV that an answer of these prompts claims, 0 where that has no bound; None: it
        drafts without that model."""
        if self.drafts is None or not strategy.uses_draft_model:
            return None
        prompts = [len(branch.prompt) for branch in branches]
        if (room := self._draft_positions - max(prompts)) <= 0:
            return None
        share = claim(self.drafts.capacity, self.drafts.block_size, prompts, min(max_tokens, room))
        return None if share is None or not share.drafts else share.rows

    def rules(
        self,
        sampling: SamplingParams,
        max_tokens: int,
        mask: Mask | None,
        *,
        needs_dists: bool = True,
        num_top: int = 0,
    ) -> OutputRules:
        return OutputRules(sampling, max_tokens, self.tokenizer.eos_ids, self.vocab_size, mask, needs_dists, num_top)

    async def remembered(self, text: str, owner: str) -> TextMemory | None:
        """A memory of the beginning of a text, to be drafted from; None of an empty one."""

        def read() -> TextMemory:
            return remembered(self.tokenizer.encode(text[:MAX_REMEMBERED])[:MEMORY_TOKENS])

        return await self.units.do("search", read, owner) if text else None

    def means(
        self,
        strategy: Strategy,
        options: Options,
        sampling: SamplingParams,
        table: LookupTable,
        *,
        drafts: bool = False,
        predicted: TextMemory | None = None,
    ) -> DraftingMeans:
        """drafts: by the draft model as well. Raises PacelineError for an energy budget that this side cannot keep."""
        kind = strategy.name, options.stats_kind, sampling.temperature == 0.0
        if kind not in self._stats:
            self._stats[kind] = OnlineStats()
            self._stats[kind].begin(self._times)
        return DraftingMeans(
            self._stats[kind],
            table,
            self.energy.queue(options) if self.side == "device" else None,
            self.worker.depth,
            predicted,
            self._draft_positions if drafts else 0,
        )


def without_drafts(options: Options) -> Options:
    """The same options without drafts, for an answer whose memory has no room for open rows."""
    return msgspec.structs.replace(
        options, drafting=msgspec.structs.replace(options.drafting, width=1, rows=1, ahead=0)
    )
