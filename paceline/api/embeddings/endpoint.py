"""`POST /v1/embeddings`: vectors of texts, by the embedder of this side's document store.

Token ids are OpenAI's (see `openai_ids`). `dimensions` must be the model's own: no embedder here was trained so that a
vector can be shortened. A text beyond the embedder's window, whose length is in /v1/models, is truncated to it. Source:
openai-openapi 2.3.0, CreateEmbeddingRequest.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.embeddings.openai_ids import OpenAIIds
from paceline.api.generation.inputs import Inputs, read_inputs
from paceline.api.http.body import read_body, while_connected
from paceline.api.http.strict_json import decode_object, encode_json
from paceline.api.http.validation import Schema, parse
from paceline.api.models import embedder
from paceline.api.routes import Route
from paceline.errors import RequestError
from paceline.runtime.service import Embeddings, Service

MAX_INPUTS = 2048
MAX_BODY = 8 << 20  # bytes: LangChain sends a thousand texts at once


class EmbeddingRequest(Schema):
    model: str
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


class EmbeddingsEndpoint:
    """The route and the service it uses. Holds no state of a request."""

    def __init__(self, service: Service, ids: OpenAIIds | None = None) -> None:
        self._service = service
        self._ids = ids or OpenAIIds()

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="POST",
                path="/v1/embeddings",
                endpoint=self.__call__,
                summary="Turn texts into vectors.",
                scope="embeddings",
                request=EmbeddingRequest,
                response="CreateEmbeddingResponse",
                refusals=(404,),
            ),
        )

    async def __call__(self, request: Request) -> Response:
        received = await read_body(request.receive, request.headers.get("content-length"), max_bytes=MAX_BODY)
        body = await asyncio.to_thread(decode_object, received)
        data = await while_connected(request.receive, self._answer(body))
        return Response(data, media_type="application/json")

    async def _answer(self, body: Mapping[str, object]) -> bytes:
        asked, texts = await asyncio.to_thread(self._read, body)
        found = embedder(self._service, asked.model)
        if asked.dimensions not in (None, found.dimensions):
            raise RequestError(
                f"The vectors of {found.name} have {found.dimensions} dimensions and mean nothing when they are cut.",
                param="dimensions",
            )
        embeddings = await self._service.embed(texts)
        return await asyncio.to_thread(_body, asked, embeddings)

    def _read(self, body: Mapping[str, object]) -> tuple[EmbeddingRequest, list[str]]:
        if body.get("input") is None:
            raise RequestError("The field input is required.", param="input")
        inputs = read_inputs(body["input"], "input", max_inputs=MAX_INPUTS)
        asked = parse(EmbeddingRequest, body)
        several = len(inputs) > 1
        texts: list[str] = []
        for index, one in enumerate(inputs):
            where = f"input[{index}]" if several else "input"
            text = one if isinstance(one, str) else self._ids.decode(one, where)
            if not text:
                raise RequestError(f"{where} is an empty string: there is nothing to embed.", param=where)
            texts.append(text)
        return asked, texts


def _body(asked: EmbeddingRequest, embeddings: Embeddings) -> bytes:
    """The JSON, encoded vector by vector, so that other threads can run in between."""
    in_base64 = asked.encoding_format == "base64"
    data = b",".join(
        encode_json(
            {"object": "embedding", "index": index, "embedding": _base64(vector) if in_base64 else vector.tolist()}
        )
        for index, vector in enumerate(embeddings.vectors)
    )
    usage = {"prompt_tokens": embeddings.tokens, "total_tokens": embeddings.tokens}
    rest = encode_json({"model": asked.model, "usage": usage})
    return b'{"object":"list","data":[' + data + b"]," + rest[1:]


def _base64(vector: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> str:
    """Base64 of little-endian float32, independent of this machine's byte order."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
