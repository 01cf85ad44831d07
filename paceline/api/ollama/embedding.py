"""`POST /api/embed`, and the older `POST /api/embeddings`. Texts beyond the embedder's window are cut to it."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from paceline.api.embeddings.endpoint import MAX_BODY, MAX_INPUTS
from paceline.api.http.body import read_body, while_connected
from paceline.api.http.pagination import answer
from paceline.api.http.strict_json import decode_object, encode_json
from paceline.api.http.validation import S, parse
from paceline.api.models import embedder
from paceline.api.ollama.errors import SHAPE
from paceline.api.ollama.request import model_name
from paceline.api.ollama.schema import EmbedBody, Embedded, EmbeddedOne, EmbeddingsBody
from paceline.api.routes import Route
from paceline.errors import RequestError
from paceline.runtime.service import Embeddings, Service


class OllamaEmbedding:
    """The routes and the service they use. Holds no state of a request."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="POST",
                path="/api/embed",
                endpoint=self.embed,
                summary="Turn texts into vectors, in Ollama's shape.",
                scope="embeddings",
                request=EmbedBody,
                response=Embedded,
                errors=SHAPE,
                refusals=(404,),
            ),
            Route(
                method="POST",
                path="/api/embeddings",
                endpoint=self.embed_one,
                summary="Turn one text into a vector, in Ollama's older shape.",
                scope="embeddings",
                request=EmbeddingsBody,
                response=EmbeddedOne,
                errors=SHAPE,
                refusals=(404,),
            ),
        )

    async def embed(self, request: Request) -> Response:
        began = time.monotonic()
        asked = await _parsed(EmbedBody, request)
        if not asked.truncate:
            raise RequestError(
                "A text beyond the embedder's window is always cut (in `truncate`); its length is in /v1/models.",
                code="unsupported_parameter",
                param="truncate",
            )
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        if len(texts) > MAX_INPUTS:
            raise RequestError(f"input holds {len(texts)} texts; at most {MAX_INPUTS} at once.", param="input")
        found = await self._vectors(request, asked.model, asked.dimensions, [text for text in texts if text])
        if len(found.vectors) < len(texts) and texts != [""]:
            raise RequestError("input holds an empty string: there is nothing to embed.", param="input")
        body = {
            "model": asked.model,
            "embeddings": found.vectors.tolist(),
            "total_duration": round((time.monotonic() - began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": found.tokens,
        }
        return Response(await asyncio.to_thread(encode_json, body), media_type="application/json")

    async def embed_one(self, request: Request) -> Response:
        asked = await _parsed(EmbeddingsBody, request)
        found = await self._vectors(request, asked.model, None, [asked.prompt] if asked.prompt else [])
        return answer({"embedding": found.vectors[0].tolist() if len(found.vectors) else []})

    async def _vectors(self, request: Request, model: str, dimensions: int | None, texts: list[str]) -> Embeddings:
        """Without texts, with which clients load a model, none."""
        found = embedder(self._service, model_name(model))
        if dimensions not in (None, found.dimensions):
            raise RequestError(
                f"The vectors of {found.name} have {found.dimensions} dimensions and mean nothing when they are cut.",
                param="dimensions",
            )
        return await while_connected(request.receive, self._service.embed(texts))


async def _parsed(schema: type[S], request: Request) -> S:
    received = await read_body(request.receive, request.headers.get("content-length"), max_bytes=MAX_BODY)
    return await asyncio.to_thread(lambda: parse(schema, decode_object(received)))
