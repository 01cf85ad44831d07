"""One streamed answer of a server under test, timed at the client."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import httpx

QUESTION: Final = "What is there to know of the harbour library of Tarnwick?"


@dataclass(slots=True)
class Answer:
    text: str = ""
    tokens: int = 0
    seconds: float = 0.0  # between the first and the last delta
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def per_token(self) -> float:
        return self.seconds / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Asked:
    """Request that every way is sent."""

    model: str
    tokens: int
    banned: tuple[int, ...] = ()  # the end token, so that every answer has the same length

    def answer(self, url: str, how: Mapping[str, object], seed: int) -> Answer:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": self.tokens,
            "temperature": 1.0,
            "seed": seed,
            "logit_bias": {str(token): -100 for token in self.banned},
            "stream": True,
            "stream_options": {"include_usage": True},
            "paceline": {"report": True, "privacy": "open", **how},
        }
        answer = Answer()
        first = last = 0.0
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300.0, trust_env=False) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                delta = event["choices"][0]["delta"].get("content") if event.get("choices") else None
                if delta:
                    last = time.perf_counter()
                    first = first or last
                    answer.text += delta
                if event.get("usage"):
                    answer.tokens = int(event["usage"]["completion_tokens"])
                report = event.get("paceline") or {}
                answer.stats.update(report.get("stats", {}))
        answer.seconds = last - first
        return answer

    def answers(self, url: str, how: Mapping[str, object], seeds: Sequence[int]) -> list[Answer]:
        """All at once, each on a connection of its own."""
        with ThreadPoolExecutor(len(seeds)) as clients:
            return list(clients.map(partial(self.answer, url, how), seeds))
