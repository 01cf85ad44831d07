"""More connections than there are descriptors, against a real server.

Strangers that say half of something: R16. A key that takes all places of answers: R23.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.reliability.real_server import BODY, many_files, real_server, strangers
from tests.reliability.streams import until


def test_a_server_with_few_descriptors_logs_little_and_answers_again(tmp_path: Path) -> None:
    with many_files(), real_server(tmp_path, files=128) as server, server.client() as http:

        def answers() -> bool:
            try:
                return http.post("/v1/chat/completions", json=BODY, timeout=5.0).status_code == 200
            except httpx.TransportError:
                return False

        with ExitStack() as stack:
            strangers(server.url, stack, 400, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        until(answers)
        assert len(server.log().splitlines()) < 250, "some at the start, and one for each request"
