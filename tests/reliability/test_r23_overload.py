"""R23: five times what a server can answer. What is too much is refused at once and told when to come again; the rest
is answered about as fast, and another key gets in, with its background responses too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import httpx
import pytest

from paceline.commands.demo import configured
from tests.reliability.conftest import Figure, Size
from tests.reliability.real_server import BODY, NO_END, SMALL, WAIT, RealServer, many_files, quantile, real_server

PLACES = 24  # answers of one key at once, in the small server
ANSWER = BODY | NO_END | {"max_tokens": 16, "stream": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    directory = tmp_path_factory.mktemp("small")
    with (
        many_files(),
        real_server(directory, *configured(directory, "tuning.emulate = 'forward=20ms'"), program=SMALL) as server,
    ):
        yield server


@dataclass
class Load:
    """So many clients at once, each of which asks again and again; who is refused waits as long as it is told."""

    url: str
    key: str
    clients: int
    answers: int  # in all
    firsts: list[float] = field(default_factory=list)  # s to the first event of those admitted
    refusals: list[float] = field(default_factory=list)  # s to a refusal
    refused_in: list[float] = field(default_factory=list)  # the same, of the server's time
    others: list[int] = field(default_factory=list)  # statuses that are neither
    took: float = 0.0

    async def run(self) -> None:
        began, left = time.monotonic(), count(1)
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(
            base_url=self.url, timeout=WAIT, trust_env=False, limits=limits, headers=headers
        ) as http:
            await asyncio.gather(*(self._client(http, left) for _ in range(self.clients)))
        self.took = time.monotonic() - began

    async def _client(self, http: httpx.AsyncClient, left: count[int]) -> None:
        while len(self.firsts) < self.answers and next(left) < 100 * self.answers:
            began = time.monotonic()
            async with http.stream("POST", "/v1/chat/completions", json=ANSWER) as answer:
                if answer.status_code == 200:
                    first = None
                    async for _ in answer.aiter_bytes():
                        first = first or time.monotonic() - began
                    self.firsts.append(first or 0.0)
                    continue
            if answer.status_code not in (429, 503):
                self.others.append(answer.status_code)
            self.refusals.append(time.monotonic() - began)
            self.refused_in.append(float(answer.headers["openai-processing-ms"]) / 1000)
            await asyncio.sleep(float(answer.headers["retry-after"]))  # without one it is a KeyError


def test_five_times_too_much_is_refused_and_the_rest_is_answered(small: RealServer, size: Size, figure: Figure) -> None:
    answers = size(48, 2000)
    peak = Load(small.url, "ann", PLACES, answers)
    asyncio.run(peak.run())
    over = Load(small.url, "ann", 5 * PLACES, answers)
    other = Load(small.url, "bert", 1, 5)

    async def both() -> None:
        await asyncio.gather(over.run(), other.run())

    asyncio.run(both())
    assert not [*peak.others, *over.others, *other.others], "200, 429 and 503 alone"
    assert over.refusals and not other.refusals, "another key is let in"
    small.check()
    figure("refused within, of the server's time, p95", quantile(over.refused_in, 0.95), at_most=0.1, unit="s")
    figure("refused after, as these clients together see it, p95", quantile(over.refusals, 0.95), unit="s")
    goodput = (len(over.firsts) / over.took) / (len(peak.firsts) / peak.took)
    figure("answers a second, of the peak", goodput, at_least=0.9, unit="x")
    figure(
        "first token of those admitted, p95",
        quantile(over.firsts, 0.95) / quantile(peak.firsts, 0.95),
        at_most=2,
        unit="x",
    )


def test_another_key_gets_its_background_responses(small: RealServer) -> None:
    endless = {"model": "fake", "input": "Hi", "max_output_tokens": 100_000, "ignore_eos": True, "background": True}
    with small.client("ann") as ann, small.client("bert") as bert:
        made = [ann.post("/v1/responses", json=endless) for _ in range(18)]
        running = [answer.json()["id"] for answer in made if answer.status_code == 200]
        refused = [answer for answer in made if answer.status_code == 429]
        assert len(refused) >= 2 and refused[0].json()["error"]["code"] == "too_many_background_responses"
        first = bert.post("/v1/responses", json=endless)
        assert first.status_code == 200
        for http, each in ((bert, first.json()["id"]), *((ann, each) for each in running)):
            assert http.post(f"/v1/responses/{each}/cancel").status_code == 200
        assert ann.get("/readyz").json()["ready"]
