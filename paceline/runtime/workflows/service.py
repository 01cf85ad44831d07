"""Workflows of a node: one driver for all, begun with the first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from paceline.errors import RequestError
from paceline.rag.records import Selection
from paceline.rag.rerank import LateInteraction, Reranker, TokenEncoder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.link.connection import Link
from paceline.runtime.peers import Peers
from paceline.runtime.resources import Resources
from paceline.runtime.service import GenerateRequest
from paceline.runtime.workflows.cloud_texts import CloudTexts, CloudUnits, cloud_texts
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.runtime.workflows.kept_profiles import KeptProfiles
from paceline.runtime.workflows.places import NodePlaces
from paceline.runtime.workflows.run import Admit, WorkflowRun
from paceline.runtime.workflows.web.access import WebAccess
from paceline.runtime.workflows.web.places import NodeWeb
from paceline.workflow.builder import WORKFLOWS, WorkflowName


class Workflows:
    """Belongs to the event loop of its node. admit: prepares a generation of the node."""

    def __init__(
        self,
        resources: Resources,
        peers: Peers,
        admit: Admit,
        *,
        reranker: Reranker | None = None,
        profiles: KeptProfiles | None = None,
        web: WebAccess | None = None,
    ) -> None:
        """reranker: None for late interaction over the store's own embedder; where that has no vectors of tokens,
        passages keep the order of their search. profiles: read at the first workflow; None: learnt from nothing, and
        forgotten. web: closed with this; None: `research` is refused."""
        self._resources = resources
        self._peers = peers
        self._admit = admit
        self._reranker = reranker or own_reranker(resources.store)
        self._profiles = profiles
        self._web = web
        self._driver: WorkflowDriver | None = None
        self._cloud: CloudUnits | None = None

    def prepare(self, request: GenerateRequest, closed: Callable[[], None]) -> WorkflowRun:
        """Nothing runs before the workflow is. Raises RequestError for one that cannot run here. closed: called once,
        when it has ended."""
        resources, side = self._resources, self._resources.side
        if request.workflow not in self.names:
            raise RequestError(
                "The workflow 'research' searches the web, for which no provider is configured here: its operator can "
                "set web_search.",
                param="paceline.workflow",
                code="workflow_unavailable",
            )
        if request.prompt is not None:
            raise RequestError("A workflow needs a conversation.", param="paceline.workflow")
        if self._driver is None:
            self._driver = WorkflowDriver(resources.registry, None if self._profiles is None else self._profiles.open())
            resources.work.watch(self._driver)
            self._cloud = CloudUnits(self._driver)
        _, link = self._peers.peer_for(request)
        searched = request.documents > 0  # otherwise the client wants none
        places = NodePlaces(
            side,
            resources.store if searched else None,
            Selection(request.collections, request.document_ids),
            request.min_score,
            self._reranker,
            link if searched and side == "device" and request.privacy != "local-only" else None,
        )
        web, cloud = self._web_for(request, link), self._cloud_for(request, link)
        return WorkflowRun(request, side, places, self._driver, self._admit, closed, web, cloud)

    @property
    def names(self) -> tuple[WorkflowName, ...]:
        """Those that can run here."""
        can_search = self._web is not None and self._resources.store is not None
        return tuple(name for name in WORKFLOWS if can_search or name != "research")

    def _web_for(self, request: GenerateRequest, link: Link | None) -> NodeWeb | None:
        """The web for a request; None where its level of privacy lets nothing leave."""
        resources = self._resources
        if self._web is None or resources.store is None or request.privacy == "local-only":
            return None
        return NodeWeb(resources.side, self._web, resources.store, request.min_score, link, resources.work.parsing)

    def _cloud_for(self, request: GenerateRequest, link: Link | None) -> CloudTexts | None:
        """The cloud's model for a request's agents; None where it may write none of their texts, or there is none."""
        if self._cloud is None:
            return None
        key = partial(self._resources.cache_key, f"workflows of {request.owner}")
        return cloud_texts(self._cloud, link, request.privacy, key)

    async def close(self) -> None:
        if self._driver is not None:
            await self._driver.close()
        if self._web is not None:
            await self._web.close()
        if self._profiles is not None:
            await self._profiles.save()


def own_reranker(store: DocumentStore | None) -> Reranker | None:
    """Late interaction over the store's own embedder; None where that has no vectors of tokens."""
    encoder = None if store is None else store.embedder
    return LateInteraction(encoder) if isinstance(encoder, TokenEncoder) else None
