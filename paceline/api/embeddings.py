"""`/v1/embeddings`: vectors of texts, or of token ids of OpenAI's vocabulary."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import importlib.util
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.generation.request import Inputs, read_inputs
from paceline.api.http.body import Schema, parse, read_body, while_connected
from paceline.api.http.errors import decode_object, encode_json
from paceline.api.models import embedder
from paceline.api.routes import Route
from paceline.errors import RequestError
from paceline.runtime.service import Embeddings, Service

# Decoding of OpenAI's token ids to text: the vocabulary `cl100k_base` of its embedding models.
#
# LangChain's OpenAIEmbeddings sends such ids to every server by default. Decoded with another vocabulary they would
# give another text, noticed only by bad search results; so they are decoded with this one, or refused. The vocabulary
# is a file of PyPI's bpe-openai, which is located but not imported, and used only if its sha256 is the one in OpenAI's
# tiktoken.


PACKAGE = "bpe_openai"
FILE = "data/cl100k_base.tiktoken.gz"
SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"  # of the unpacked file
_MAX_BYTES = 4 << 20  # the unpacked file has 1.6 MiB

REMEDY = (
    "Send texts (with LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)), or install bpe-openai at the "
    "server, and ids of OpenAI's cl100k_base are read."
)


class OpenAIIds:
    """The vocabulary, loaded at first use. Safe to use from several threads."""

    def __init__(self, file: Path | None = None, *, sha256: str = SHA256) -> None:
        """`file` None: that of the installed package."""
        self._file = file
        self._sha256 = sha256
        self._lock = threading.Lock()
        self._tokens: dict[int, bytes] | None = None

    def decode(self, ids: Sequence[int], param: str) -> str:
        """Raises RequestError (400) when the vocabulary is not installed or has no such id."""
        tokens = self._load()
        if not tokens:
            raise RequestError(
                f"{param} holds token ids, and no vocabulary to read them with is installed. {REMEDY}", param=param
            )
        unknown = next((token for token in ids if token not in tokens), None)
        if unknown is not None:
            raise RequestError(f"{param} holds {unknown}, which is no token of cl100k_base. {REMEDY}", param=param)
        return b"".join(tokens[token] for token in ids).decode("utf-8", "replace")

    def _load(self) -> dict[int, bytes]:
        """The vocabulary; empty when there is none."""
        with self._lock:
            if self._tokens is None:
                file = self._file or _installed()
                self._tokens = {} if file is None else _read(file, self._sha256)
            return self._tokens


def _installed() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / FILE


def _read(file: Path, sha256: str) -> dict[int, bytes]:
    """Parse tiktoken's format: one token per line, its bytes in base64 and its id. Empty for an unknown file."""
    try:
        with gzip.open(file) as stream:
            data = stream.read(_MAX_BYTES)
    except (OSError, EOFError):
        return {}
    if hashlib.sha256(data).hexdigest() != sha256:
        return {}
    pairs = (line.split() for line in data.splitlines())
    return {int(token): base64.b64decode(spelling) for spelling, token in pairs}


# `POST /v1/embeddings`: vectors of texts, by the embedder of this side's document store.
#
# Token ids are OpenAI's (see `openai_ids`). `dimensions` must be the model's own: no embedder here was trained so that
# a vector can be shortened. A text beyond the embedder's window, whose length is in /v1/models, is truncated to it.
# Source: openai-openapi 2.3.0, CreateEmbeddingRequest.


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
