"""An honest client beside hostile ones: its answers must be those of a quiet program, word for word."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx

SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"enum": ["Bari", "Oslo"]}, "rooms": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "rooms"],
    "additionalProperties": False,
}
STRICT: Final = {"type": "json_schema", "json_schema": {"name": "stay", "strict": True, "schema": SCHEMA}}
ALONE: Final[dict[str, object]] = {"strategy": "autoregressive", "privacy": "local-only"}


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=120, verify=False, trust_env=False)


class Honest:
    """Streams one answer again and again."""

    def __init__(self, url: str, *, max_tokens: int = 48, paceline: Mapping[str, object] = ALONE) -> None:
        self._url = url
        self._body = {
            "model": "fake",
            "messages": [{"role": "user", "content": "What is new in the harbour?"}],
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": 5,
            "stream": True,
            "paceline": dict(paceline),
        }
        self.text = ""  # of a quiet program
        self.answers = 0
        self.quiet_gaps: list[float] = []  # s, between two tokens, before the hostile ones come
        self.gaps: list[float] = []

    async def begin(self, answers: int = 8) -> None:
        """Learn the text, and the pace beside one other honest client."""
        async with client_of(self._url) as http:
            self.text = await self._answer(http, [])
            other = asyncio.create_task(self._ask_strictly())
            for _ in range(answers):
                assert await self._answer(http, self.quiet_gaps) == self.text
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)

    async def _ask_strictly(self) -> None:
        async with client_of(self._url) as http:
            while True:
                await ask_strictly(http, ALONE)

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Ask without a pause meanwhile. At the end every answer has been the same."""
        stop = asyncio.Event()

        async def ask() -> None:
            async with client_of(self._url) as http:
                while not stop.is_set():
                    text = await self._answer(http, self.gaps)
                    assert text == self.text, "the text of an honest client has changed"
                    self.answers += 1

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask())
            yield
            stop.set()
        assert self.answers

    @property
    def slowdown(self) -> float:
        """p95 of the gaps between tokens, as a multiple of that of a quiet program."""
        return _p95(self.gaps) / _p95(self.quiet_gaps)

    async def _answer(self, http: httpx.AsyncClient, gaps: list[float]) -> str:
        text, before = "", None
        async with http.stream("POST", "/v1/chat/completions", json=self._body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                now = time.monotonic()
                if before is not None:
                    gaps.append(now - before)
                before = now
        return text


async def ask_strictly(http: httpx.AsyncClient, paceline: Mapping[str, object], **fields: object) -> dict[str, Any]:
    """An answer under a strict schema, which has been checked. The body of the response."""
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Where do I stay?"}],
        "max_tokens": 64,
        "seed": 3,
        "response_format": STRICT,
        "paceline": {"strategy": "aggregate", "report": True, **paceline},
        **fields,
    }
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    stay = json.loads(choice["message"]["content"])
    assert set(stay) == {"city", "rooms"} and stay["city"] in ("Bari", "Oslo") and stay["rooms"] in range(10), stay
    return dict(answer.json())


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]
