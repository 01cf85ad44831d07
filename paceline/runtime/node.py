"""One side of the program: the `Service` behind the HTTP surface, on an engine, a document store and links to peers.

`Node` admits requests and owns the running tasks. It contains no algorithm: `preparation` prepares a request, `peers`
serves sessions that peers open, `sessions` run the machines of strategies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from paceline.core.sampling.sampler import NO_DEFAULTS, SamplingDefaults
from paceline.core.shares import Shares, WaitingLine
from paceline.engine.base import Engine, ModelInfo, ServedModel
from paceline.errors import EngineLost, PacelineError, RequestError
from paceline.rag.document_kv import DocumentKvStore
from paceline.rag.rerank.reranker import Reranker
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.library import Library
from paceline.runtime.asking.gate import CloudAsks
from paceline.runtime.energy.side import SideEnergy
from paceline.runtime.engine_loop.executor import DEFAULT_LIMITS, StepLimits
from paceline.runtime.engine_loop.load import engine_load
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.link.connection import Link
from paceline.runtime.link.traffic import link_states
from paceline.runtime.lookup_tables.store import TableStore
from paceline.runtime.node_texts import NodeTexts
from paceline.runtime.peers import Peers
from paceline.runtime.preparation import Preparation
from paceline.runtime.resources import Resources
from paceline.runtime.service import (
    GenerateRequest,
    Generation,
    LinkState,
    Load,
    Readiness,
)
from paceline.runtime.sessions.client import ClientSession
from paceline.runtime.sessions.egress import Egress
from paceline.runtime.tracing import Tracer
from paceline.runtime.units.registry import NodeUnits
from paceline.runtime.upkeep import keep_debt, keep_profiles, prefill_documents, watch_removals
from paceline.runtime.workflows.kept_profiles import KeptProfiles
from paceline.runtime.workflows.service import Workflows
from paceline.runtime.workflows.web.access import WebAccess
from paceline.strategies.base import Side
from paceline.strategies.registry import STRATEGIES
from paceline.workflow.builder import WorkflowName

T = TypeVar("T")
log = logging.getLogger("paceline.node")

MAX_ANSWERS = 1152  # admitted at once, of which one owner may have 1,024 (`core.shares`); further requests get 429
ROOM_S = 0.05  # for which a request waits for a place, so that one that is given back is not left empty
MAX_WAITING = 1024  # requests at once
RETRY_AFTER_S = 1


class Node(NodeTexts):
    """Use as an async context manager on the loop that serves it. Methods belong to that loop's thread."""

    def __init__(
        self,
        side: Side,
        model: ServedModel,
        store: DocumentStore | None,
        *,
        served_name: str | None = None,
        sampling: SamplingDefaults = NO_DEFAULTS,
        system: str = "",
        max_tokens_default: int | None = None,
        expects_peer: bool = False,
        open_to_peer: bool = False,
        asks: CloudAsks | None = None,
        kv: DocumentKvStore | None = None,
        tables: TableStore | None = None,
        timed: bool = False,
        limits: StepLimits = DEFAULT_LIMITS,
        energy: SideEnergy | None = None,
        draft_engine: Engine | None = None,
        profiles: KeptProfiles | None = None,
        units: NodeUnits | None = None,
        reranker: Reranker | None = None,
        tracer: Tracer | None = None,
        web: WebAccess | None = None,
        cloud_texts: bool = True,
    ) -> None:
        """sampling: defaults of requests, before those the model recommends. system: as in `ModelInfo`.

        expects_peer: an answer without a peer is marked as degraded even if the request names no device; for an agent
        with a cloud. open_to_peer: a device sends distributions of its documents if the cloud's client requests it.
        asks: the gate for sessions that a cloud opens at a device, closed with the node; None: none is admitted.
        tables: n-grams for drafts, saved at the end; None: kept in memory only. timed: measure forwards before the
        first answer. limits: of the engine's steps. energy: None: nothing is known of it. draft_engine, tracer,
        cloud_texts: see `Resources`. profiles, units, reranker, web: of workflows, see `Workflows`.
        """
        self._resources = Resources(
            side,
            model,
            store,
            self._run,
            served_name=served_name,
            sampling=sampling,
            system=system,
            kv=kv,
            tables=tables,
            limits=limits,
            energy=energy,
            draft_engine=draft_engine,
            units=units,
            shared=profiles is not None and profiles.shared,
            tracer=tracer,
            web=web is not None,
            cloud_texts=cloud_texts,
        )
        self._clients: set[ClientSession] = set()
        self._asks = asks or CloudAsks()
        own = self._resources, self._clients, self._run
        self._peers = Peers(*own, open_to_peer=open_to_peer, asks=self._asks, admit=self.admit)
        self._preparation = Preparation(
            self._resources, self._peers, max_tokens_default=max_tokens_default, expects_peer=expects_peer
        )
        admit = partial(self.admit, has_place=True)
        self._workflows = Workflows(self._resources, self._peers, admit, reranker=reranker, profiles=profiles, web=web)
        self._profiles = profiles
        self._preparing = 0  # admitted requests without a client session yet
        self._shares = Shares(MAX_ANSWERS)  # of owners, in those admitted
        self._line = WaitingLine(self._shares, MAX_WAITING)
        self._timed = timed
        self._tasks: set[asyncio.Task[None]] = set()
        self._library: Library | None = None
        super().__init__(self._resources, reranker)

    async def __aenter__(self) -> Self:
        resources = self._resources
        await resources.start(timed=self._timed)
        if resources.store is not None:
            self._library = await asyncio.to_thread(Library, resources.store, resources.side, resources.work.indexing)
            self._library.start()
            self._run(watch_removals(resources.store, resources.forget_removed))
        if resources.energy.kept is not None:
            self._run(keep_debt(resources.energy))
        if self._profiles is not None:
            self._run(keep_profiles(self._profiles))
        if resources.prefiller is not None:
            self._run(prefill_documents(resources.prefiller, self._is_busy))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in list(self._clients):
            session.fail(PacelineError("the program is shutting down"))
        await self._workflows.close()
        await self._peers.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._asks.close()
        if self._library is not None:
            await asyncio.to_thread(self._library.close)
        await self._resources.stop()

    def _is_busy(self) -> bool:
        return bool(self._clients or self._peers.busy or self._preparing)

    # ---- the service ------------------------------------------------------------------------------------------------
    @property
    def side(self) -> Side:
        return self._resources.side

    @property
    def worker(self) -> EngineWorker:
        return self._resources.worker

    def models(self) -> Sequence[ModelInfo]:
        return (self._resources.info,)

    def strategies(self) -> Sequence[str]:
        return tuple(STRATEGIES)

    def workflows(self) -> Sequence[WorkflowName]:
        return self._workflows.names

    @property
    def library(self) -> Library | None:
        return self._library

    @property
    def num_documents(self) -> int:
        store = self._resources.store
        return 0 if store is None else store.count()

    @property
    def decode_s(self) -> float | None:
        """Seconds of a forward of one row, as measured at the start; None if unknown."""
        return self._resources.decode_s

    @property
    def num_answers(self) -> int:
        """Answers under way whose client is on this side."""
        return len(self._clients)

    def readiness(self) -> Readiness:
        detail: dict[str, str | int | bool] = {
            "side": self.side,
            "model": self._resources.info.name,
            "documents": self.num_documents,
            "linked": len(self._peers) > 0,
            "peers": len(self._peers),
            "answers": len(self._clients),
        }
        lost = {} if self.lost is None else {"engine": str(self.lost)}
        return Readiness(self.lost is None, {**detail, **lost})

    def load(self) -> Load:
        return replace(engine_load(self.worker), answers=len(self._clients), **self._peers.load())

    def links(self) -> tuple[LinkState, ...]:
        return link_states(self._peers.links)

    @property
    def lost(self) -> EngineLost | None:
        """Why the engine cannot be used any more; None while it can."""
        return self.worker.steps.lost

    async def until_lost(self) -> None:
        """Wait until the engine cannot be used any more."""
        await self.worker.lost.wait()

    def check(self, request: GenerateRequest, *, room: int) -> None:
        self._preparation.check(request, room=room)

    async def find(self, work: Callable[[], T]) -> T:
        return await self._resources.work.search(work)

    async def wait_for_room(self, owner: str) -> None:
        if self._shares.has_room(owner, alone=not owner):
            return
        called = asyncio.Event()
        try:
            async with asyncio.timeout(ROOM_S):
                while self._line.enter(owner, called.set, alone=not owner):
                    await called.wait()
                    if self._shares.has_room(owner, alone=not owner):
                        return
                    called.clear()
        except TimeoutError:
            pass
        finally:
            self._line.leave(called.set)
        self._check_room(owner)

    def _check_room(self, owner: str) -> None:
        if not self._shares.has_room(owner, alone=not owner):
            raise _full(self._shares.taken, self._shares.held(owner))

    async def prepare(self, request: GenerateRequest) -> Generation:
        if request.workflow is None:
            return await self.admit(request)
        run = self._workflows.prepare(request, lambda: self._line.give_back(request.owner))
        # What would be refused as an answer is refused before any agent writes, and before a query leaves this side.
        await (await self.admit(replace(request, workflow=None, passages=()))).aclose()
        self._shares.force(request.owner)
        return run

    async def admit(self, request: GenerateRequest, *, has_place: bool = False) -> ClientSession:
        """As `prepare`, of an answer without a workflow. has_place: it is part of a workflow, which takes one."""
        owner = request.owner
        if not has_place:
            self._check_room(owner)
        self._shares.force(owner)
        self._preparing += 1
        egress = Egress()
        try:
            session = await self._preparation.prepare(request, egress, self._closed)
        except BaseException:
            self._line.give_back(owner)
            if egress:
                log.info("sent to the other side for an answer that was not begun: %s", egress)
            raise
        finally:
            self._preparing -= 1
        self._clients.add(session)
        if not has_place:
            self._resources.work.begin_text(session, request.max_tokens or session.prepared.max_new_tokens)
        return session

    def _closed(self, session: ClientSession) -> None:
        if session in self._clients:
            self._clients.discard(session)
            self._resources.work.end_text(session)
            self._line.give_back(session.prepared.request.owner)

    def on_link(self, link: Link, peer: str) -> None:
        """A link to this peer is up. The caller must close the link it replaces, which counts as lost for sessions."""
        self._peers.on_link(link, peer)

    def _run(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run in the background, at most until the node stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _full(taken: int, held: int) -> RequestError:
    """taken: answers under way; held: of them, those of the key that wants another."""
    return RequestError(
        f"This server is writing {taken} answers of {MAX_ANSWERS} at most, and {held} of them for this key. "
        f"Please try again in {RETRY_AFTER_S} s.",
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
    )
