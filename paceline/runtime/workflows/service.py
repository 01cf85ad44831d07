"""Workflows of a node: one driver for all, begun with the first."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import RequestError
from paceline.rag.records import Selection
from paceline.rag.rerank.late_interaction import LateInteraction, TokenEncoder
from paceline.rag.rerank.reranker import Reranker
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.peers import Peers
from paceline.runtime.resources import Resources
from paceline.runtime.service import GenerateRequest
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.runtime.workflows.places import NodePlaces
from paceline.runtime.workflows.registry import HostUnit, UnitRegistry
from paceline.runtime.workflows.run import Admit, WorkflowRun


class Workflows:
    """Belongs to the event loop of its node. admit: prepares a generation of the node."""

    def __init__(
        self,
        resources: Resources,
        peers: Peers,
        admit: Admit,
        *,
        hosts: tuple[HostUnit, ...] = (HostUnit("cpu"),),
        reranker: Reranker | None = None,
    ) -> None:
        """reranker: None for late interaction over the store's own embedder; where that has no vectors of tokens,
        passages keep the order of their search."""
        self._resources = resources
        self._peers = peers
        self._admit = admit
        self._hosts = hosts
        self._reranker = reranker or _own_reranker(resources.store)
        self._driver: WorkflowDriver | None = None

    def prepare(self, request: GenerateRequest, closed: Callable[[], None]) -> WorkflowRun:
        """Nothing runs before the workflow is. Raises RequestError for one that cannot run here. closed: called once,
        when it has ended."""
        side = self._resources.side
        if request.workflow == "research":
            raise RequestError(
                "The workflow 'research' searches the web, for which no provider is configured here.",
                param="paceline.workflow",
                code="workflow_unavailable",
            )
        if request.prompt is not None:
            raise RequestError("A workflow needs a conversation.", param="paceline.workflow")
        if self._driver is None:
            self._driver = WorkflowDriver(UnitRegistry(side, hosts=self._hosts))
        _, link = self._peers.peer_for(request)
        searched = request.documents > 0  # otherwise the client wants none
        places = NodePlaces(
            side,
            self._resources.store if searched else None,
            Selection(request.collections, request.document_ids),
            request.min_score,
            self._reranker,
            link if searched and side == "device" and request.privacy != "local-only" else None,
        )
        return WorkflowRun(request, side, places, self._driver, self._admit, closed)

    async def close(self) -> None:
        if self._driver is not None:
            await self._driver.close()


def _own_reranker(store: DocumentStore | None) -> Reranker | None:
    encoder = None if store is None else store.embedder
    return LateInteraction(encoder) if isinstance(encoder, TokenEncoder) else None
