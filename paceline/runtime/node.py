"""One side of the program: the `Service` behind the HTTP surface, on an engine, a document store and links to peers.

`Node` admits requests and owns the running tasks. It contains no algorithm: `preparation` prepares a request, `peers`
serves sessions that peers open, `sessions` run the machines of strategies.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from paceline.engine.base import ModelInfo, ServedModel
from paceline.errors import ConfigError, EngineLost, PacelineError, RequestError, StorageError
from paceline.rag.embedder import Embedder
from paceline.rag.records import Vectors
from paceline.rag.rerank import CrossEncoder
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.library import Library
from paceline.runtime.admission import AnswerPlaces
from paceline.runtime.asking import CloudAsks
from paceline.runtime.energy import SAVE_S
from paceline.runtime.engine_loop.document_prefill import WATCH_S, DocumentPrefiller
from paceline.runtime.outside import OutsideWriter
from paceline.runtime.peers import Peers
from paceline.runtime.preparation import Preparation
from paceline.runtime.proof import Prover
from paceline.runtime.reading import Reading
from paceline.runtime.resources import NodeParts, Resources
from paceline.runtime.service import (
    EmbedderInfo,
    Embeddings,
    GenerateRequest,
    Generation,
    LinkStatus,
    Load,
    ModelStatus,
    Readiness,
    Reranked,
)
from paceline.runtime.sessions.client import ClientSession
from paceline.runtime.sessions.output_text import PromptScorer, token_strings
from paceline.runtime.units import OUTSIDE, Turnstile, UnitRegistry
from paceline.runtime.workflows.run import Tools, Workflows
from paceline.strategies.base import Side
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import VERSION

log = logging.getLogger("paceline.node")
T = TypeVar("T")


async def watch_documents(look: Callable[[], Awaitable[None]]) -> None:
    """Look at the documents again and again: this or another process may have added or removed some."""
    while True:
        await asyncio.sleep(WATCH_S)
        try:
            await look()
        except ConfigError as error:  # the disk; the next request fails for it too
            log.warning("documents cannot be looked at: %s", error)


async def keep(save: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(SAVE_S)
        await asyncio.to_thread(save)


async def prefill_documents(prefiller: DocumentPrefiller, is_busy: Callable[[], bool]) -> None:
    """Prefill the KV of new documents while no answer is being written."""
    while True:
        try:
            await prefiller.prefill_missing(is_busy)
        except StorageError as error:
            log.warning("KV of documents is not computed ahead: %s", error)
        except Exception:
            log.exception("KV of documents could not be computed ahead")
        await asyncio.sleep(WATCH_S)


PART_TEXTS = 32
PART_PASSAGES = 8  # half a second of late interaction on one core, for passages of 160 tokens
MAX_TOKENS = 8192  # of one text, as in OpenAI's API; an embedder may truncate it further


class TextEmbedder:
    """Embeds off the event loop one part at a time, because embedders use the cores that the engine needs: owners take
    turns between two parts, and a cancelled request costs at most the part under way."""

    def __init__(self, embedder: Embedder, units: UnitRegistry) -> None:
        self._embedder = embedder
        self.count = embedder.count  # tokens of a text
        self._units = units
        self._turns = Turnstile(1)

    async def embed(self, texts: Sequence[str], owner: str) -> Embeddings:
        """Embed texts. Raises RequestError (400) for a text that is too long, before any is embedded."""
        tokens: list[int] = []
        for start in range(0, len(texts), PART_TEXTS):
            async with self._turns.turn(owner):
                tokens += await asyncio.to_thread(self._count_tokens, texts[start : start + PART_TEXTS], start)
        parts: list[Vectors] = [np.empty((0, self._embedder.dimensions), np.float32)]
        for start in range(0, len(texts), PART_TEXTS):
            async with self._turns.turn(owner):
                part = texts[start : start + PART_TEXTS]
                parts.append(await self._units.do("embed", partial(self._embedder.embed, part), owner))
        return Embeddings(np.concatenate(parts), sum(tokens))

    def _count_tokens(self, texts: Sequence[str], first: int) -> list[int]:
        counts = [self.count(text) for text in texts]
        for index, count in enumerate(counts, first):
            if count > MAX_TOKENS:
                raise RequestError(
                    f"This model's maximum context length is {MAX_TOKENS} tokens. However, input {index} resulted in "
                    f"{count} tokens. Please reduce its length.",
                    code="context_length_exceeded",
                    param="input",
                )
        return counts


def _probability(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > 0 else math.exp(logit) / (1 + math.exp(logit))


class Node:
    """The `Service` of one model.

    Use as an async context manager on the loop that serves it. Methods belong to that loop's thread.
    """

    debug_options = False  # accepted by `ServedModels` where its settings say so
    aliases: Mapping[str, str] = {}  # likewise

    def __init__(
        self,
        side: Side,
        model: ServedModel,
        store: DocumentStore | None,
        parts: NodeParts | None = None,
        tools: Tools | None = None,
        *,
        first: Node | None = None,
        alone: Callable[[], str] | None = None,
    ) -> None:
        """first: the first node on this store, whose library, places and peers this one uses and does not close; None:
        this is it. alone: see `Reading`, of a further model that has another tokenizer, and writes without the peers.
        The gate for a cloud's sessions and the policy's guard are closed with the node."""
        parts, tools = parts or NodeParts(), tools or Tools()
        self.side: Side = side
        self._resources = Resources(side, model, store, self._run, parts, web=tools.web is not None)
        self.worker = self._resources.worker
        self._clients: set[ClientSession] = set()
        self._asks = parts.company.asks or CloudAsks()
        self._is_joined = first is not None and alone is None
        peers = partial(Peers, self._resources, self._clients, self._run, self._asks, self._admit)
        self._peers: Peers = peers() if first is None or alone is not None else first._peers
        self._places: AnswerPlaces = AnswerPlaces() if first is None else first._places
        reading = Reading(self._resources, self._peers, self._clients, alone)
        self._preparation = Preparation(self._resources, self._peers, self._places, self._clients, reading)
        self.wait_for_room, self.check, self.explain = self._places.wait_for_room, reading.check, reading.explain
        self.prove = Prover(self._resources, self._peers, self._preparation, reading, self._places).prove
        self.on_link = self._peers.on_link
        admit = partial(self._preparation.prepare, in_workflow=True)
        endpoint = parts.company.outside
        self.outside: OutsideWriter | None = None  # answers of a stranger's endpoint, see `prepare`
        if endpoint is not None:
            self.outside = OutsideWriter(endpoint, self._resources, self._peers, self._places, admit)
            endpoint.on_sent = self._peers.on_sent if first is None else endpoint.on_sent
        self._workflows = Workflows(self._resources, self._peers, admit, tools, self.outside)
        self.workflows = self._workflows.names
        resources = self._resources
        self.find = partial(resources.units.do, "search")
        self.forget_answers = resources.forget_answers
        self.relevance = resources.relevance  # the scale of this side's; None: it keeps no documents
        self.score = PromptScorer(resources.worker, resources.tokenizer, resources.vocab_size).score
        self._embedder = None if store is None else TextEmbedder(store.embedder, resources.units)
        self._reranker = None if store is None else self._workflows.reranker
        self._reranking, self._tokenizing = Turnstile(1), Turnstile(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self.library: Library | None = None if first is None else first.library
        self._is_first = first is None

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
        except BaseException:  # what has begun holds threads and weights
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _begin(self) -> None:
        resources = self._resources
        await resources.start()
        if self._is_joined:
            self._peers.clients[self] = self._clients
        if resources.store is not None and self._is_first:
            readable = partial(resources.guard.readable, resources.store)
            self.library = await asyncio.to_thread(Library, resources.store, resources.side, resources.units, readable)
            self.library.start()
        if resources.store is not None:
            await resources.look()
            self._run(watch_documents(resources.look))
        if self.side == "device":
            self._run(keep(resources.save_learnt))
        if resources.prefiller is not None:
            self._run(prefill_documents(resources.prefiller, self._is_busy))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in list(self._clients):
            session.fail(PacelineError("the program is shutting down"))
        await self._workflows.close()
        if self._is_joined:
            self._peers.clients.pop(self, None)
        else:
            await self._peers.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._asks.close()
        if self.outside is not None and self._is_first:
            await self.outside.endpoint.close()
        if self.library is not None and self._is_first:
            await asyncio.to_thread(self.library.close)
        if self._is_first:
            await asyncio.to_thread(self._resources.guard.close)
        await self._resources.stop()

    def _is_busy(self) -> bool:
        return bool(self._clients or self._peers.busy or self._preparation.preparing)

    # ---- the service ------------------------------------------------------------------------------------------------
    def models(self) -> Sequence[ModelInfo]:
        return (self._resources.info,)

    def model_status(self, name: str) -> ModelStatus:  # noqa: ARG002
        links = self._peers.links.values()
        return ModelStatus("loaded", is_joint=not links or any(link.strategies for link in links))

    def strategies(self) -> Sequence[str]:
        return (*STRATEGIES, *([OUTSIDE] if self.outside is not None else []))

    @property
    def num_documents(self) -> int:
        return self._resources.num_documents

    def readiness(self) -> Readiness:
        detail: dict[str, str | int | bool] = {
            "side": self.side,
            "model": self._resources.info.name,
            "documents": self.num_documents,
            "linked": bool(self._peers.links),
            "peers": len(self._peers.links),
            "answers": len(self._clients),
        }
        if unlike := sum(bool(self._peers.scales.difference(name)) for name in self._peers.links):
            detail["equal_weights"] = unlike
        why = self.lost or ("its model cannot run now; its log says why" if self.worker.is_away else None)
        return Readiness(why is None, detail if why is None else {**detail, "engine": str(why)})

    async def confirm(self, owner: str, document: str) -> str:
        resources = self._resources
        return await asyncio.to_thread(resources.guard.confirm, resources.store, owner, document)

    def load(self) -> Load:
        return self._peers.load(replace(self.worker.load(), answers=len(self._clients)))

    def links(self) -> tuple[LinkStatus, ...]:
        return tuple(
            LinkStatus(name, up.rtt, up.bandwidth, dict(up.sent_bytes), up.total_received, up.asked, up.asks, VERSION)
            for name, up in sorted(self._peers.links.items())
        )

    @property
    def lost(self) -> EngineLost | None:
        """Why the engine cannot be used any more; None while it can."""
        return self.worker.fault

    # ---- texts that are not answered ---------------------------------------------------------------------------------
    @asynccontextmanager
    async def of(self, model: str) -> AsyncIterator[Self]:  # noqa: ARG002  # there is one
        yield self

    async def tokenize(self, text: str, owner: str) -> tuple[int, ...]:
        return tuple(await self._tokenized(partial(self._resources.tokenizer.raw, text), owner))

    async def tokenize_chat(self, messages: Sequence[Mapping[str, str]], owner: str) -> tuple[int, ...]:
        return tuple(await self._tokenized(partial(self._resources.tokenizer.chat, messages), owner))

    async def _tokenized(self, work: Callable[[], list[int]], owner: str) -> list[int]:
        # One at a time: prompts of answers wait for the same tokenizer, which knows no turns.
        async with self._tokenizing.turn(owner):
            return await self.find(work, owner)

    async def token_bytes(self, tokens: Sequence[int], owner: str) -> tuple[bytes, ...]:
        return await self.find(partial(token_strings, self._resources.tokenizer, tokens), owner)

    def embedders(self) -> Sequence[EmbedderInfo]:
        if self._resources.store is None:
            return ()
        embedder = self._resources.store.embedder
        return (EmbedderInfo(embedder.served_name, embedder.dimensions, embedder.max_tokens),)

    async def embed(self, texts: Sequence[str], owner: str) -> Embeddings:
        if self._embedder is None:
            raise RequestError("This side keeps no documents and has no embedder.", status=404, param="model")
        return await self._embedder.embed(texts, owner)

    def rerankers(self) -> Sequence[str]:
        return () if self._reranker is None else (self._reranker.name,)

    async def rerank(self, query: str, passages: Sequence[str], owner: str) -> Reranked:
        """Scores one part at a time, as `TextEmbedder` does."""
        if self._reranker is None or self._embedder is None:
            raise RequestError("This side has no reranker: set one in [tuning].", status=404, param="model")
        scores: list[float] = []
        for start in range(0, len(passages), PART_PASSAGES):
            part = passages[start : start + PART_PASSAGES]
            async with self._reranking.turn(owner):
                work = partial(self._reranker.score, query, part)
                scores += map(float, await self._resources.units.do("rerank", work, owner))
        if isinstance(self._reranker, CrossEncoder):  # logits; clients compare with thresholds from 0 to 1
            scores = [_probability(score) for score in scores]
        count = self._embedder.count
        tokens = await asyncio.to_thread(lambda: sum(map(count, [query, *passages])))
        return Reranked(tuple(scores), tokens)

    # ---- answers ----------------------------------------------------------------------------------------------------
    async def prepare(self, request: GenerateRequest) -> Generation:
        writer = self.outside if request.wish.strategy == OUTSIDE else None
        if request.sources.workflow is None:
            return await (writer or self._preparation).prepare(request)
        closed = partial(self._places.give_back, request.account.owner)
        return await self._workflows.prepare(request, (writer or self._preparation).begin, closed)

    async def _admit(self, request: GenerateRequest) -> Generation:
        """See `TextServer`. The peers are there before the preparation of answers."""
        return await self._preparation.prepare(request)

    def _run(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run in the background, at most until the node stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
