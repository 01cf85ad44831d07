"""Texts as vectors (`/v1/embeddings`), in ranks (`/v1/rerank`) and as tokens (`/tokenize`): nothing is answered.

Vectors are those of the embedder of this side's documents; also of token ids of OpenAI's vocabulary. Source:
openai-openapi 2.3.0, CreateEmbeddingRequest.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import gzip
import hashlib
import importlib.util
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field, PlainValidator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.chat.request import MAX_MESSAGES, ChatRequest, Message, Tool, begun, conversation, tool_use
from paceline.api.generation.attachments import ConversationRoute
from paceline.api.generation.request import Input, Inputs, inputs
from paceline.api.generation.schema import MAX_TOOLS
from paceline.api.http.body import Schema, Whole, answer, encode_json, while_connected
from paceline.api.http.routing import Caller, LargeRoute, Route, ServiceDep
from paceline.api.models import chat_model, check_embedder, no_model
from paceline.api.openapi import answered, keyed_router
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.runtime.service import Embeddings, Service

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

    return Whole(await while_connected(request.receive, work()), media_type="application/json")


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


# ---- ranks: `/v1/rerank` ---------------------------------------------------------------------------------------------
# By this side's cross-encoder (`--reranker`), or by late interaction over the embedder's token vectors. Not handled:
# documents of images, ranking fields of structured documents.
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


@router.post("/v1/rerank", response_model_exclude_none=True)
@router.post("/v2/rerank", response_model_exclude_none=True)
async def rerank(asked: RerankRequest, request: Request, service: ServiceDep) -> RerankAnswer:
    """Order documents by their relevance to a query, in the shape of Jina and Cohere (whose clients ask at `/v2`).

    A document beyond the reranker's window is cut to it.
    """
    name = _reranker(service, asked.model)
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


def _reranker(service: Service, name: str | None) -> str:
    """Raises RequestError 404 for an unknown name, and where there is no reranker."""
    known = service.rerankers()
    if not known:
        raise no_model(
            "This side has no reranker: set one in [tuning] of its file, or use an embedder of token vectors."
        )
    if name is not None and name not in known:
        raise no_model(f"The reranker {name!r} does not exist here. Known: {', '.join(known)}.")
    return name or known[0]


# ---- tokens: `/tokenize` and `/detokenize`, in vLLM's shape ----------------------------------------------------------
# A prompt is tokenized as `/v1/completions` does, a conversation as `/v1/chat/completions` does without documents. Not
# handled: prompts without the model's own beginning, templates of the client.
MAX_TOKENS = 1 << 16


class TokenizeRequest(Schema):
    """Either a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, body: object) -> object:
        """Raises RequestError for a prompt that is never sent to the model like this."""
        for name, usual in (
            ("add_special_tokens", isinstance(body, dict) and body.get("messages") is None),
            ("chat_template", None),
            ("chat_template_kwargs", {}),
        ):
            if isinstance(body, dict) and body.get(name) not in (None, usual):
                raise RequestError(
                    f"Only what the model is sent is tokenized: {name} may be {usual} only.",
                    code="unsupported_parameter",
                    param=name,
                )
        return body


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Schema):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_TOKENS)]


class Detokenized(BaseModel):
    prompt: str


tokenizing = keyed_router("service", route=ConversationRoute)


@tokenizing.post("/tokenize", response_model=Tokenized)
async def tokenize(asked: TokenizeRequest, caller: Caller, service: ServiceDep) -> Response:
    """Turn a text or a conversation into tokens."""
    model = _tokenizer_model(service, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("Give either prompt or messages.", param="prompt")
    async with service.of(model.name) as served:
        if asked.messages is None:
            tokens = await served.tokenize(asked.prompt or "", caller.key)
        else:
            chat = ChatRequest(
                model=model.name,
                messages=asked.messages,
                tools=asked.tools,
                continue_final_message=asked.continue_final_message,
                add_generation_prompt=asked.add_generation_prompt,
            )
            tools = tool_use(chat, model)
            messages = begun(chat, conversation(chat.messages, model, [] if tools is None else [tools.instructions()]))
            tokens = await served.tokenize_chat(messages, caller.key)
        if len(tokens) > MAX_TOKENS:
            raise RequestError(
                f"These are {len(tokens)} tokens, and {MAX_TOKENS} at most are told: ask for parts of the text.",
                param="prompt" if asked.messages is None else "messages",
            )
        texts = await served.token_bytes(tokens, caller.key) if asked.return_token_strs else None

    def body() -> Response:
        told = None if texts is None else [text.decode("utf-8", "replace") for text in texts]
        return answer(
            {"count": len(tokens), "max_model_len": model.max_positions, "tokens": tokens, "token_strs": told}
        )

    return await service.find(body, caller.key)


async def detokenize(asked: DetokenizeRequest, caller: Caller, service: ServiceDep) -> Detokenized:
    """Turn tokens into text."""
    model = _tokenizer_model(service, asked.model)
    highest = max(asked.tokens, default=0)
    if highest >= model.vocab_size:
        where = f"tokens[{asked.tokens.index(highest)}]"
        raise RequestError(f"{where} is {highest}; ids are 0 to {model.vocab_size - 1}.", param=where)
    async with service.of(model.name) as served:
        parts = await served.token_bytes(asked.tokens, caller.key)
    return Detokenized(prompt=b"".join(parts).decode("utf-8", "replace"))


tokenizing.add_api_route("/detokenize", detokenize, methods=["POST"], route_class_override=Route)  # no conversation


def _tokenizer_model(service: Service, name: str | None) -> ModelInfo:
    """The first where none is named, as at vLLM. Raises RequestError 404."""
    return service.models()[0] if name is None else chat_model(service, name)
