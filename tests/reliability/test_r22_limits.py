"""R22: requests one beyond each limit are refused by name, and the heaviest that are allowed hold nobody up long."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import httpx
import pytest

from tests.reliability.conftest import Figure, Size
from tests.reliability.real_server import BODY, WAIT, Honest, RealServer, calm_p95

MESSAGE = {"role": "user", "content": "Hi"}


def deep(levels: int) -> dict[str, Any]:
    return {"type": "array", "items": deep(levels - 1)} if levels else {"type": "string"}


def formatted(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}}


def wide(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"field {i}": {"type": "string"} for i in range(number)}}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BEYOND: dict[str, dict[str, Any]] = {
    "body": {"messages": [{"role": "user", "content": "x" * (1 << 20)}]},
    "messages": {"messages": [MESSAGE] * 1001},
    "choices": {"n": 129},
    "context": {"messages": [{"role": "user", "content": "x" * 200_000}]},
    "stop strings": {"stop": ["x"] * 65},
    "logit_bias": {"logit_bias": {str(token % 256): 1 for token in range(256)} | {f"{n}": 1 for n in range(300, 400)}},
    "schema's size": formatted({"enum": ["x" * 70_000]}),
    "schema's depth": formatted(deep(65)),
    "schema's properties": formatted(wide(401)),
    "tools": {"tools": [TOOL] * 129},
    "top_logprobs": {"logprobs": True, "top_logprobs": 21},
    "documents": {"paceline": {"documents": 65}},
}
HEAVY: tuple[dict[str, Any], ...] = (
    {"messages": [MESSAGE] * 200},
    {"n": 8, "temperature": 1.0},
    formatted(wide(60)),
    formatted({"type": "string", "pattern": "^([a-z]{1,30} ){1,30}x$"}),
    {"stop": ["x" * 60] * 4, "logprobs": True, "top_logprobs": 20},
)


@pytest.mark.parametrize("limit", BEYOND)
def test_one_beyond_a_limit_is_refused_by_name(hall: RealServer, limit: str) -> None:
    with hall.client("bert") as http:
        answer = http.post("/v1/chat/completions", content=json.dumps(BODY | BEYOND[limit]))
    assert answer.status_code in (400, 413), answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 1000


def flood(url: str, number: int) -> list[int]:
    """Statuses of so many heavy requests, 8 at a time."""

    async def all_of_them() -> list[int]:
        headers = {"authorization": "Bearer bert"}
        async with httpx.AsyncClient(base_url=url, timeout=WAIT, trust_env=False, headers=headers) as http:
            places = asyncio.Semaphore(8)

            async def one(place: int) -> int:
                async with places:
                    return (await http.post("/v1/chat/completions", json=BODY | HEAVY[place % len(HEAVY)])).status_code

            return await asyncio.gather(*map(one, range(number)))

    return asyncio.run(all_of_them())


def test_the_heaviest_requests_hold_nobody_up(hall: RealServer, size: Size, figure: Figure) -> None:
    # In a process of its own, so that what the flood costs its sender is not measured as the server's gaps.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        other.submit(flood, hall.url, 0).result()  # it has begun
        calm = calm_p95(hall)
        with Honest(hall.url) as honest:
            statuses = other.submit(flood, hall.url, size(20, 1000)).result()
    assert not honest.mistakes
    assert set(statuses) <= {200, 400, 429}, statuses
    hall.check()
    figure("heavy requests answered", statuses.count(200))
    figure("p95 gap beside 8 of them at once", honest.p95 / calm, at_most=1.5, unit="x calm")
