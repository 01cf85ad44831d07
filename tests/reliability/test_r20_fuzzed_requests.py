"""R20: requests with a key whose bodies, ids, queries, headers and forms are mutated. None makes the server fail. All
that `openapi.json` describes, valid and not: tests/api/test_schemathesis.py."""

from __future__ import annotations

import random
from collections import Counter

import httpx

from tests.reliability.conftest import Figure, Size
from tests.reliability.mutated_requests import RequestMutator
from tests.reliability.real_server import Honest, RealServer


def test_no_request_makes_the_server_fail(hall: RealServer, size: Size, rng: random.Random, figure: Figure) -> None:
    mutator, statuses, before = RequestMutator(rng), Counter[int](), hall.rss()
    with Honest(hall.url) as honest, hall.client("bert") as http:
        for _ in range(size(200, 40_000)):
            request = mutator.request()
            try:
                answer = http.request(
                    request.method, request.path, content=request.content or None, headers=request.headers
                )
            except (httpx.InvalidURL, httpx.LocalProtocolError):
                continue  # no request of HTTP, so it was not sent
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (request, answer.text)
            if answer.status_code >= 400 and request.method != "HEAD":
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, (request, answer.text)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                assert '"server_error"' not in answer.text, (request, answer.text)
    assert not honest.mistakes
    hall.check()
    figure("requests", statuses.total())
    figure("answered 200", statuses[200])
    figure("growth of memory", (hall.rss() - before) / 2**20, unit="MiB")
