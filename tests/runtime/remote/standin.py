"""Servers as vLLM 0.32 answers, on the fake model: shapes as recorded from a real one.

No sockets: `installed` has the clients of `engine.remote` ask it. What a server lacks, and how it fails, is set
by its fields.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams, apply_mask, filter_top, process_logits
from paceline.engine.base import TextModel
from paceline.engine.fake import ByteTokenizer, FakeEngine
from paceline.engine.remote import opening, servers

LEAST = -9999.0  # of a log-probability in JSON


@dataclass(eq=False)
class Server:
    """One server. Changed by tests while it is asked."""

    down: bool = False  # refuses connections
    status: int | None = None  # that it answers every call with
    said: str = "broken"  # with that status
    retry_after: str | None = None  # likewise
    cut_after: int | None = None  # tokens of each stream from now on
    dies: bool = False  # with a stream that it cuts
    gate: asyncio.Event | None = None  # that streams wait for before each token
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    streams_closed: int = 0


@dataclass(eq=False)
class StandIn:
    """Servers by their hosts. ignores: fields that are passed over without a word."""

    engine: FakeEngine = field(default_factory=lambda: FakeEngine(seed=1, spread=0.3))
    text: TextModel = field(default_factory=ByteTokenizer)
    head: int = 20
    key: str | None = None
    ignores: frozenset[str] = frozenset()
    mixes: bool = False  # named ids of one call spoil what those beside it are told, as in vLLM 0.32's first runner
    models: tuple[str, ...] = ("fake",)
    servers: dict[str, Server] = field(default_factory=dict)
    _rows: dict[tuple[int, ...], Dist] = field(default_factory=dict)
    _naming: int = 0  # calls under way that name ids
    _spoilt: bool = False  # the present answer's likeliest ids, but for the token's own

    def dist(self, tokens: Sequence[int]) -> Dist:
        """The row behind these tokens."""
        known = tuple(tokens)
        if known not in self._rows:
            output = self.engine.forward(Batch((Segment(SeqId(1), 0, known),)))
            self.engine.release(SeqId(1))
            self._rows[known] = output.dists[0][0]
        return self._rows[known]

    # ---- HTTP -------------------------------------------------------------------------------------------------------
    def handle(self, request: httpx.Request) -> httpx.Response:
        answer = self._answer(request)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, content=list(answer))

    async def handle_async(self, request: httpx.Request) -> httpx.Response:
        answer = await self._beside(request) if self.mixes else self._answer(request)
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, content=self._streamed(self.servers[request.url.host], answer))

    async def _beside(self, request: httpx.Request) -> httpx.Response | Iterator[bytes]:
        """The answer after a step, whose calls are those under way."""
        body = json.loads(request.content)
        names = bool(body.get("logprob_token_ids"))
        self._naming += names
        await asyncio.sleep(0.001)
        self._spoilt = bool(self._naming) and not names
        try:
            return self._answer(request)
        finally:
            self._naming -= names
            self._spoilt = False

    async def _streamed(self, server: Server, events: Iterator[bytes]) -> AsyncIterator[bytes]:
        try:
            for number, event in enumerate(events):
                if server.gate is not None:
                    await server.gate.wait()
                if server.cut_after is not None and number >= server.cut_after:
                    server.down |= server.dies
                    raise httpx.ReadError("cut")
                await asyncio.sleep(0)
                yield event
        finally:
            server.streams_closed += 1

    def _answer(self, request: httpx.Request) -> httpx.Response | Iterator[bytes]:
        server = self.servers[request.url.host]
        if server.down:
            raise httpx.ConnectError("refused")
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        if server.status is not None:
            headers = {} if server.retry_after is None else {"Retry-After": server.retry_after}
            return httpx.Response(server.status, text=server.said, headers=headers)
        path = request.url.path
        if path == "/v1/models":
            models = [
                {"id": name, "object": "model", "owned_by": "vllm", "max_model_len": 4096} for name in self.models
            ]
            return httpx.Response(200, json={"object": "list", "data": models})
        body = json.loads(request.content)
        server.calls.append((path, dict(body)))
        if path == "/tokenize":
            tokens = self.text.encode(body["prompt"])
            return httpx.Response(200, json={"count": len(tokens), "max_model_len": 4096, "tokens": tokens})
        body = {name: value for name, value in body.items() if name not in self.ignores}
        assert path == "/v1/completions", path
        return self._complete(body)

    # ---- calls ------------------------------------------------------------------------------------------------------
    def _complete(self, body: Mapping[str, Any]) -> httpx.Response | Iterator[bytes]:
        prompt, count = body["prompt"], body.get("logprobs")
        asked = body.get("logprob_token_ids")
        most = self.engine.info.vocab_size if count is not None and count < 0 else count
        if most is not None and most > self.head and not asked:
            return httpx.Response(
                400, json={"error": {"message": f"Requested sample logprobs of {count}", "code": 400}}
            )
        if asked and len(asked) != count:
            return httpx.Response(400, json={"error": {"message": "logprobs must equal len", "code": 400}})

        def choice(token: int, dist: Dist, finish: str | None, index: int = 0) -> dict[str, Any]:
            told = None
            if count is not None:
                named = [(each, _log(dist.prob(each))) for each in asked] if asked else _best(dist, count)
                named = [(0, LEAST)] if self._spoilt else named
                tops = dict([(token, _log(dist.prob(token))), *named])
                told = {
                    "tokens": [f"token_id:{token}"],
                    "top_logprobs": [{f"token_id:{i}": v for i, v in tops.items()}],
                }
            ids = {"token_ids": [token]} if body.get("return_token_ids") else {}
            text = "" if token in self.text.eos_ids else self.text.decode([token])
            return {"index": index, "text": text, "logprobs": told, "finish_reason": finish, **ids}

        if body.get("stream"):
            return _events(self._drawn(prompt, body), body, choice)
        prompts = prompt if prompt and isinstance(prompt[0], list) else [prompt]
        assert body["max_tokens"] == 1, "more are streamed"
        choices = [choice(*next(iter(self._drawn(each, body))), "length", index) for index, each in enumerate(prompts)]
        return httpx.Response(200, json={"object": "text_completion", "choices": choices[::-1]})  # in any order

    def _drawn(self, prompt: Sequence[int], fields: Mapping[str, Any]) -> Iterator[tuple[int, Dist]]:
        """Tokens by vLLM's own sampler, whose chances are not ours, with their rows."""
        chance = np.random.default_rng(fields.get("seed"))
        params = SamplingParams(
            temperature=fields.get("temperature", 1.0),
            top_p=fields.get("top_p", 1.0),
            top_k=fields.get("top_k", 0),
            min_p=fields.get("min_p", 0.0),
            presence_penalty=fields.get("presence_penalty", 0.0),
            frequency_penalty=fields.get("frequency_penalty", 0.0),
            repetition_penalty=fields.get("repetition_penalty", 1.0),
            logit_bias={int(token): bias for token, bias in (fields.get("logit_bias") or {}).items()},
        )
        tokens, counts = list(prompt), dict[int, int]()
        allowed = fields.get("allowed_token_ids")
        for _ in range(fields["max_tokens"]):
            dist = plain = self.dist(tokens)
            if allowed is not None:
                dist = apply_mask(dist, np.isin(np.arange(len(dist.ids)), allowed))
            final = filter_top(process_logits(dist, params, counts, np.unique(np.array(prompt, np.int32))), params)
            token = final.argmax()
            if params.temperature:
                token = int(chance.choice(final.ids, p=final.probs / final.probs.sum()))
            yield token, plain
            if token in (fields.get("stop_token_ids") or ()):
                return
            tokens.append(token)
            counts[token] = counts.get(token, 0) + 1


def _log(prob: float) -> float:
    return max(LEAST, float(np.log(prob))) if prob > 0.0 else LEAST


def _best(dist: Dist, count: int) -> list[tuple[int, float]]:
    order = np.argsort(-dist.probs, kind="stable")[: None if count < 0 else count]
    return [(int(token), _log(dist.probs[token])) for token in order]


def _events(
    drawn: Iterator[tuple[int, Dist]],
    fields: Mapping[str, Any],
    choice: Callable[[int, Dist, str | None], dict[str, Any]],
) -> Iterator[bytes]:
    for number, (token, dist) in enumerate(drawn, 1):
        stops = token in (fields.get("stop_token_ids") or ())
        finish = "stop" if stops else "length" if number == fields["max_tokens"] else None
        yield f"data: {json.dumps({'choices': [choice(token, dist, finish)]})}\n\n".encode()
    yield b"data: [DONE]\n\n"


@contextmanager
def installed(stand_in: StandIn, *hosts: str) -> Iterator[list[str]]:
    """Its servers, under these hosts; the URLs."""
    stand_in.servers = {host: Server() for host in hosts}
    near = partial(httpx.Client, transport=httpx.MockTransport(stand_in.handle))
    far = partial(httpx.AsyncClient, transport=httpx.MockTransport(cast(Any, stand_in.handle_async)))
    with pytest.MonkeyPatch.context() as patch:
        for module in (opening, servers):
            patch.setattr(module, "httpx", SimpleNamespace(**vars(httpx) | {"Client": near, "AsyncClient": far}))
        yield [f"http://{host}:8000" for host in hosts]
