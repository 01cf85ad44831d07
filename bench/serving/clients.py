"""Clients that stream chat completions over HTTP, alike for every server under test.

A client sees bytes only: server-sent events with the fields that all servers share. It knows no server, but adds the
fields and headers that a `Question` names.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from paceline.errors import PacelineError

TIMEOUT_S = 1_200.0  # of a read: servers that answer one request at a time let the last one wait


class ServingError(PacelineError):
    """A server under test has answered in a way that cannot be measured."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request."""

    messages: Sequence[Mapping[str, str]]
    max_tokens: int
    extra: Mapping[str, object] = field(default_factory=dict)  # fields of the body
    key: str | None = None  # bearer key


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. Times are those of `time.perf_counter`."""

    text: str
    tokens: int  # as the server counts them
    prompt_tokens: int
    cached_tokens: int  # of the prompt; 0 where the server does not say
    asked: float
    first: float  # first content delta received
    last: float  # last content delta received
    deltas: Sequence[float] = ()  # all of them

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.first - self.asked)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def connect(url: str, connections: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(TIMEOUT_S), limits=limits, trust_env=False)


async def ask_together(client: httpx.AsyncClient, questions: Sequence[Question]) -> list[Answer]:
    """All questions at once, one client for each."""
    return list(await asyncio.gather(*(ask(client, question) for question in questions)))


async def ask(client: httpx.AsyncClient, question: Question) -> Answer:
    """Raises ServingError for an answer that is refused, fails, has no text or has not exactly `max_tokens` tokens."""
    body = {"messages": list(question.messages), "max_tokens": question.max_tokens, "stream": True, **question.extra}
    headers = {} if question.key is None else {"authorization": f"Bearer {question.key}"}
    asked = time.perf_counter()
    first = last = 0.0
    pieces: list[str] = []
    deltas: list[float] = []
    usage: dict[str, object] = {}
    ended = ""
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            raise ServingError(f"HTTP {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("error"):
                raise ServingError(f"the stream failed: {event['error']}")
            usage = event.get("usage") or usage
            choice = (event.get("choices") or [{}])[0]
            ended = choice.get("finish_reason") or ended
            if delta := choice.get("delta", {}).get("content"):
                last = time.perf_counter()
                first = first or last
                deltas.append(last)
                pieces.append(delta)
    # A server may stream no usage, but say that the limit has ended an answer.
    counted = question.max_tokens if ended == "length" else len(pieces)
    tokens = _number(usage, "completion_tokens") if usage else counted
    if not pieces or tokens != question.max_tokens:
        raise ServingError(f"an answer has {tokens} tokens, not {question.max_tokens}")
    details = usage.get("prompt_tokens_details")
    cached = _number(details, "cached_tokens") if isinstance(details, Mapping) else 0
    return Answer("".join(pieces), tokens, _number(usage, "prompt_tokens"), cached, asked, first, last, deltas)


def _number(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) else 0
