"""`/v1/embeddings`: vectors of texts, or of token ids of OpenAI's vocabulary, by the embedder of this side's documents.

Source: openai-openapi 2.3.0, CreateEmbeddingRequest.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import gzip
import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PlainValidator
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.generation.request import Input, Inputs, inputs
from paceline.api.http.body import Schema, encode_json, while_connected
from paceline.api.http.routing import LargeRoute, ServiceDep
from paceline.api.models import check_embedder
from paceline.api.openapi import answered, keyed_router
from paceline.errors import RequestError
from paceline.runtime.service import Embeddings

# ---- OpenAI's token ids to text: the vocabulary `cl100k_base` of its embedding models --------------------------------
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


@functools.cache
def vocabulary(file: Path | None, sha256: str = SHA256) -> Mapping[int, bytes]:
    """Parse tiktoken's format: one token per line, its bytes in base64 and its id. Empty without a file, and for an
    unknown one."""
    try:
        with gzip.open(file or "") as stream:
            data = stream.read(_MAX_BYTES)
    except (OSError, EOFError):
        return {}
    if hashlib.sha256(data).hexdigest() != sha256:
        return {}
    pairs = (line.split() for line in data.splitlines())
    return {int(token): base64.b64decode(spelling) for spelling, token in pairs}


def _installed() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / FILE


def text_of(ids: Sequence[int], tokens: Mapping[int, bytes], param: str) -> str:
    """Raises RequestError (400) when the vocabulary is not installed or has no such id."""
    unknown = next((token for token in ids if token not in tokens), None)
    if unknown is None:
        return b"".join(tokens[token] for token in ids).decode("utf-8", "replace")
    fault = f"holds {unknown}, which is no token of cl100k_base"
    if not tokens:
        fault = "holds token ids, and no vocabulary to read them with is installed"
    raise RequestError(f"{param} {fault}. {REMEDY}", param=param)


MAX_INPUTS = 2048
MAX_BODY = LargeRoute.max_body

router = keyed_router("embeddings", "embeddings", route=LargeRoute)  # LangChain sends a thousand texts at once


class EmbeddingRequest(Schema):
    model: str
    input: Annotated[tuple[Input, ...], PlainValidator(inputs("input", MAX_INPUTS), json_schema_input_type=Inputs)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


@router.post("/v1/embeddings", responses=answered("CreateEmbeddingResponse"))
async def embed(asked: EmbeddingRequest, request: Request, service: ServiceDep) -> Response:
    """Turn texts into vectors.

    Token ids are those of OpenAI's cl100k_base. A text beyond the embedder's window, whose length `/v1/models` has, is
    cut to it. `dimensions` must be the model's own: no embedder here was trained so that a vector can be shortened.
    """
    check_embedder(service, asked.model, asked.dimensions)

    async def work() -> bytes:
        texts = await asyncio.to_thread(texts_of, asked.input)
        return await asyncio.to_thread(_body, asked, await service.embed(texts, request.state.identity.key))

    return Response(await while_connected(request.receive, work()), media_type="application/json")


def texts_of(inputs: Sequence[Input]) -> list[str]:
    """Texts to embed. Raises RequestError (400) for an empty one, and for ids that cannot be read."""
    texts: list[str] = []
    for index, one in enumerate(inputs):
        where = f"input[{index}]" if len(inputs) > 1 else "input"
        text = one if isinstance(one, str) else text_of(one, vocabulary(_installed()), where)
        if not text:
            raise RequestError(f"{where} is an empty string: there is nothing to embed.", param=where)
        texts.append(text)
    return texts


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
