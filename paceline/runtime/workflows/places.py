"""Where a node's workflows search: its own documents, and the other side's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import LinkError, PacelineError
from paceline.rag.records import Passage, Selection, Vectors
from paceline.rag.rerank import Reranker
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.link.connection import Link
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.remote import RemoteSearch
from paceline.runtime.workflows.lookup import Found
from paceline.strategies.base import Side, other

CANDIDATES = 8  # passages of a search that are reranked: 60 ms each on a core


@dataclass(slots=True)
class NodePlaces:
    """For one request. link: to the side whose documents are searched too; None: to none. egress: counts the queries
    that are sent there, which are all that is sent."""

    side: Side
    store: DocumentStore | None
    selection: Selection
    min_score: float
    reranker: Reranker | None  # None: passages keep the order of the search
    link: Link | None = None
    egress: Egress = field(default_factory=Egress)
    _remote: RemoteSearch = field(default_factory=RemoteSearch)

    @property
    def has_far(self) -> bool:
        return self.link is not None

    def sent(self) -> Mapping[str, float]:
        return self.egress.stats()

    def embed(self, query: str) -> Vectors | None:
        if self.store is None or not query.strip() or not self.store.count(self.selection):
            return None  # without loading a model
        return self.store.embedder.embed([query])

    def search(self, query: str, vector: Vectors) -> Sequence[Found]:
        assert self.store is not None, "there is no vector without a store"
        found = self.store.search(query, CANDIDATES, self.selection, min_score=self.min_score, vector=vector[0])
        return [self._own(passage) for passage in found]

    async def search_far(self, query: str) -> Sequence[Found]:
        if self.link is None or not query.strip():
            return ()  # nothing is asked of the other side, as nothing is of this one
        try:
            found = await self._remote.passages(self.link, query, CANDIDATES, self.egress)
        except LinkError as error:
            raise PacelineError(str(error)) from error
        return [Found(passage, other(self.side), private=False) for passage in found]

    def rerank(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        if self.reranker is None:
            return [-float(place) for place in range(len(texts))]
        return [float(score) for score in self.reranker.score(query, texts)]

    def _own(self, passage: Passage) -> Found:
        return Found(passage, self.side, private=self.side == "device")
