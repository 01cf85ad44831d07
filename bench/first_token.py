"""Ways to the first token of an answer from two documents, run from the device: the program's, and DRAGON's baselines.

The program is asked over HTTP; the baselines use the device's engine and a second connection, see `bench.ttft`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from paceline.core.aggregation.weights import mix
from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.segment import Segment
from paceline.core.sampling.dist import Dist
from paceline.core.side import Side
from paceline.engine.base import TextModel
from paceline.errors import EngineError
from paceline.rag.prompt import passages_text, query_of, relevance
from paceline.rag.records import Passage
from paceline.runtime.engine_loop.document_prefill import kv_key
from paceline.runtime.engine_loop.requests import ForwardRequest, Rows, SequenceOp, StoredPrefix

from .aggregation.two_process_rig import (
    DeviceSide,
    Shape,
)

QUESTION = "When does the old harbour museum open, and where is the key of the red boat?"
MESSAGES = ({"role": "user", "content": QUESTION},)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Measurement of a first token."""

    seconds: float  # since the question
    rows: int  # computed on the device before it, drafts included
    fetched: int = 0  # bytes of the cloud's document, as text or as KV


@dataclass(frozen=True, slots=True)
class _Fetched:
    text: str
    relevance: float
    kv: bytes
    num_bytes: int  # of the whole message


class DeviceBench:
    """The device side, which runs all methods."""

    def __init__(self, side: DeviceSide, shape: Shape, client: httpx.AsyncClient, keys: Sequence[str]) -> None:
        """keys: one for each question, since the prompt must not be in the prefix cache of its key."""
        self.shape = shape
        self.client, self.keys = client, iter(keys)
        self.side, self.worker, self.model = side, side.node.worker, side.model
        self.textless = {str(token): -100.0 for token in _textless(self.model.tokenizer)}

    def search(self, side: Side = "device") -> Passage:
        (passage,) = self.side.stores[side].search(query_of(MESSAGES), 1)
        return passage

    def prompt(self, *texts: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(preamble and documents, full prompt)"""
        preamble, document, tail = self.model.tokenizer.document_prompt(MESSAGES, "\n".join(texts))
        return (*preamble, *document), (*preamble, *document, *tail)

    def stored(self, passage: Passage) -> StoredPrefix:
        """Stored KV of the device's document, as its node would find it."""
        tokens, _ = self.prompt(passages_text(passage))
        rows = self.side.files.get(kv_key(self.side.files, self.model.engine.info, passage, tokens))
        if rows is None:
            raise EngineError("the bench's document has no stored KV")
        return StoredPrefix(tokens, rows)

    async def forward(self, tokens: tuple[int, ...], prefix: StoredPrefix | None = None) -> Dist:
        """Distribution after a prompt, computed on the device."""
        seq = self.worker.allocate()
        answer: asyncio.Future[Rows | EngineError] = asyncio.get_running_loop().create_future()
        self.worker.submit(ForwardRequest(Segment(seq, 0, tokens), answer.set_result, prefix))
        result = await answer
        self.worker.submit(SequenceOp.release(seq))
        if isinstance(result, EngineError):
            raise result
        (dist,) = result
        assert isinstance(dist, Dist)
        return dist

    async def fetch(self, *, kv: bool) -> _Fetched:
        """The cloud's passage, over the second connection, on request with its KV."""
        await self.side.wire.send_bytes(json.dumps({"kv": kv, "query": query_of(MESSAGES)}).encode())
        data = await self.side.wire.recv_bytes()
        first_line, _, body = data.partition(b"\n")
        header = json.loads(first_line)
        return _Fetched(header["text"], header["relevance"], body, len(data))

    async def prepared(self) -> bytes:
        """KV of the cloud's document, computed by the device's model: K, then V, in bfloat16."""
        prefix, tokens = self.prompt(passages_text(self.search("cloud")))
        rows: asyncio.Future[KvPrefix] = (loop := asyncio.get_running_loop()).create_future()

        def keep(kept: KvPrefix) -> None:
            loop.call_soon_threadsafe(rows.set_result, kept)

        await self.forward(tokens, StoredPrefix(prefix, keep=keep))
        return (await rows).keys.tobytes() + (await rows).values.tobytes()

    async def written(self, strategy: str) -> FirstToken:
        """Answer by the program, over HTTP, up to the first text."""
        body = {
            "model": self.model.engine.info.name,
            "messages": MESSAGES,
            "max_tokens": 16,
            "temperature": 0,
            "logit_bias": self.textless,
            "stream": True,
            "paceline": {"strategy": strategy},
        }
        key = {"Authorization": f"Bearer {next(self.keys)}"}
        before, start = self.worker.load(), time.perf_counter()
        async with self.client.stream("POST", "/v1/chat/completions", json=body, headers=key) as answer:
            if answer.status_code != httpx.codes.OK:
                raise EngineError((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and _has_text(json.loads(line.removeprefix("data: "))):
                    seconds, after = time.perf_counter() - start, self.worker.load()
                    computed = after.rows - before.rows
                    if not after.cached_rows - before.cached_rows:
                        raise EngineError("stored KV was not used")
                    return FirstToken(seconds, computed)
        raise EngineError("an answer has no text")


def _has_text(event: Mapping[str, Any]) -> bool:
    return any(choice["delta"].get("content") for choice in event.get("choices", ()))


async def _device_only(bench: DeviceBench) -> FirstToken:
    return await bench.written("autoregressive")


async def _ours(bench: DeviceBench) -> FirstToken:
    return await bench.written("aggregate")


async def _recomputed(bench: DeviceBench) -> FirstToken:
    """DRCG/Text with stored KV: the device's passage comes first, so that its KV serves; the cloud's is prefilled."""
    start = time.perf_counter()
    own, other = await asyncio.gather(asyncio.to_thread(bench.search), bench.fetch(kv=False))
    prefix, alone = bench.prompt(passages_text(own))
    tokens = (*prefix, *bench.model.tokenizer.encode("\n" + other.text), *alone[len(prefix) :])
    _token(bench, await bench.forward(tokens, await asyncio.to_thread(bench.stored, own)))
    return FirstToken(time.perf_counter() - start, len(tokens) - len(prefix), other.num_bytes)


async def _recomputed_as_published(bench: DeviceBench) -> FirstToken:
    """DRCG/Text: the cloud sends its passage as text, and the device prefills both documents in one context."""
    start = time.perf_counter()
    own, other = await asyncio.gather(asyncio.to_thread(bench.search), bench.fetch(kv=False))
    _, tokens = bench.prompt(other.text, passages_text(own))
    _token(bench, await bench.forward(tokens))
    return FirstToken(time.perf_counter() - start, len(tokens), other.num_bytes)


async def _transferred(bench: DeviceBench) -> FirstToken:
    """DRCG/KV: the cloud sends its passage's KV for the device's model; the tail is prefilled after each document."""
    start = time.perf_counter()

    async def from_own_document() -> tuple[float, Dist]:
        passage = await asyncio.to_thread(bench.search)
        _, tokens = bench.prompt(passages_text(passage))
        return relevance(passage), await bench.forward(tokens, await asyncio.to_thread(bench.stored, passage))

    own, other = await asyncio.gather(from_own_document(), bench.fetch(kv=True))
    prefix, tokens = bench.prompt(other.text)
    shape, info = bench.shape, bench.model.engine.info
    keys, values = np.frombuffer(bytearray(other.kv), "<u2").reshape(
        2, shape.layers, len(prefix), shape.kv_heads, shape.hidden // shape.heads
    )
    dist = await bench.forward(
        tokens, StoredPrefix(prefix, KvPrefix(info.fingerprint, info.dtype, prefix, keys, values))
    )
    _token(bench, mix([own[1], dist], [own[0], other.relevance]))
    return FirstToken(time.perf_counter() - start, 2 * (len(tokens) - len(prefix)), other.num_bytes)


def _textless(tokenizer: TextModel) -> Iterator[int]:
    """Tokens that are not text by themselves. A random model must not begin with one: the first text would be late."""
    for token in range(tokenizer.vocab_size):
        try:
            if not tokenizer.token_bytes(token).decode():
                yield token
        except UnicodeDecodeError:
            yield token


def _token(bench: DeviceBench, dist: Dist) -> str:
    return bench.model.tokenizer.decode([int(dist.ids[np.argmax(dist.probs)])])


WAYS: Mapping[str, Callable[[DeviceBench], Awaitable[FirstToken]]] = {
    "device only": _device_only,
    "ours": _ours,
    "DRCG/Text": _recomputed,
    "DRCG/Text, as published": _recomputed_as_published,
    "DRCG/KV": _transferred,
}
