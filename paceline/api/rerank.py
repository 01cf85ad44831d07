"""`/v1/rerank`: documents of a request in the order of their relevance to its query.

Scored by this side's cross-encoder (`--reranker`), or by late interaction over the embedder's token vectors. Not
handled: documents of images, ranking fields of structured documents.
"""

from __future__ import annotations

import secrets
from typing import Annotated

from pydantic import BaseModel, Field
from starlette.requests import Request

from paceline.api.http.body import Schema, while_connected
from paceline.api.http.routing import LargeRoute, ServiceDep
from paceline.api.models import no_model
from paceline.api.openapi import keyed_router
from paceline.runtime.service import Service

MAX_DOCUMENTS = 1000  # as at Cohere


class Document(Schema):
    text: str


class RerankRequest(Schema):
    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False

    # Accepted without effect: what is longer than the window is cut.
    truncation: bool | None = None
    max_tokens_per_doc: int | None = None
    user: str | None = None


class RankedText(BaseModel):
    text: str


class Ranked(BaseModel):
    index: int  # in the request
    relevance_score: float
    document: RankedText | None = None  # where `return_documents` is true


class RerankUsage(BaseModel):
    total_tokens: int


class RerankAnswer(BaseModel):
    id: str
    model: str
    results: list[Ranked]
    usage: RerankUsage


router = keyed_router("embeddings", "embeddings", route=LargeRoute)


@router.post("/v1/rerank", response_model_exclude_none=True)
@router.post("/v2/rerank", response_model_exclude_none=True)
async def rerank(asked: RerankRequest, request: Request, service: ServiceDep) -> RerankAnswer:
    """Order documents by their relevance to a query, in the shape of Jina and Cohere (whose clients ask at `/v2`).

    A document beyond the reranker's window is cut to it.
    """
    name = _model(service, asked.model)
    texts = [each if isinstance(each, str) else each.text for each in asked.documents]
    reranked = await while_connected(request.receive, service.rerank(asked.query, texts, request.state.identity.key))
    scores = reranked.relevance
    best = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: asked.top_n]
    return RerankAnswer(
        id=f"rerank-{secrets.token_hex(12)}",
        model=name,
        results=[
            Ranked(
                index=index,
                relevance_score=scores[index],
                document=RankedText(text=texts[index]) if asked.return_documents else None,
            )
            for index in best
        ],
        usage=RerankUsage(total_tokens=reranked.tokens),
    )


def _model(service: Service, name: str | None) -> str:
    """Raises RequestError 404 for an unknown name, and where there is no reranker."""
    known = service.rerankers()
    if not known:
        raise no_model(
            "This side has no reranker: set one in [tuning] of its file, or use an embedder of token vectors."
        )
    if name is not None and name not in known:
        raise no_model(f"The reranker {name!r} does not exist here. Known: {', '.join(known)}.")
    return name or known[0]
