"""`/v1/rerank`: documents of a request in the order of their relevance to its query."""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.http.body import Schema, parse, read_body, while_connected
from paceline.api.http.errors import decode_object
from paceline.api.http.pagination import answer
from paceline.api.routes import Route
from paceline.errors import RequestError
from paceline.runtime.service import Service

# `POST /v1/rerank`: the shape of Jina and Cohere, which vLLM and front ends speak too.
#
# Scored by this side's reranker: a cross-encoder (the setting `reranker`), or late interaction over the embedder's
# token vectors. Not handled: documents of images, ranking fields of structured documents. A document beyond the window
# is cut to it.


MAX_DOCUMENTS = 1000  # as at Cohere
MAX_BODY = 8 << 20  # bytes


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


class RerankEndpoint:
    """The route and the service it uses. Holds no state of a request."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> tuple[Route, ...]:
        return tuple(
            Route(
                method="POST",
                path=path,
                endpoint=self.__call__,
                summary=summary,
                scope="embeddings",
                request=RerankRequest,
                response=RerankAnswer,
                refusals=(404,),
            )
            for path, summary in (
                ("/v1/rerank", "Order documents by their relevance to a query."),
                ("/v2/rerank", "Likewise, where Cohere's clients ask."),
            )
        )

    async def __call__(self, request: Request) -> Response:
        received = await read_body(request.receive, request.headers.get("content-length"), max_bytes=MAX_BODY)
        asked = await asyncio.to_thread(lambda: parse(RerankRequest, decode_object(received)))
        name = self._model(asked.model)
        texts = [each if isinstance(each, str) else each.text for each in asked.documents]
        reranked = await while_connected(request.receive, self._service.rerank(asked.query, texts))
        scores = reranked.relevance
        best = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: asked.top_n]
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": texts[index]}} if asked.return_documents else {})
            for index in best
        ]
        usage = {"total_tokens": reranked.tokens}
        return answer({"id": f"rerank-{secrets.token_hex(12)}", "model": name, "results": results, "usage": usage})

    def _model(self, name: str | None) -> str:
        """Raises RequestError 404 for an unknown name, and where there is no reranker."""
        known = self._service.rerankers()
        if not known:
            raise _missing(
                "This side has no reranker: set one in [tuning] of its file, or use an embedder of token vectors."
            )
        if name is not None and name not in known:
            raise _missing(f"The reranker {name!r} does not exist here. Known: {', '.join(known)}.")
        return name or known[0]


def _missing(sentence: str) -> RequestError:
    return RequestError(sentence, status=404, code="model_not_found", param="model")
