"""Many streams open at once on one server: each delivers while all are open, and all end."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from paceline.api.http.admission import MAX_ACTIVE
from paceline.api.http.server import MAX_CONNECTIONS, MAX_FILES
from paceline.errors import RequestError
from paceline.runtime.admission import MAX_ANSWERS
from paceline.runtime.service import TextDelta
from tests.api.conftest import BODY
from tests.api.scripted import WAIT, Script, ScriptedService, Signal, done, serving

STREAMS = 100


@pytest.mark.anyio
async def test_a_hundred_streams_are_open_at_once_and_all_end() -> None:
    service, go_on = ScriptedService(), Signal()
    service.script = Script([TextDelta("first", 1), go_on, TextDelta("last", 1), done()])
    body = json.dumps(BODY | {"stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with serving(service) as url:
        address = urlsplit(url)

        async def opened() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(head.encode() + body)
            await reader.readuntil(b'"content":"first"')
            return reader, writer

        async with asyncio.timeout(WAIT):
            streams = await asyncio.gather(*(opened() for _ in range(STREAMS)))
            go_on.set()
            rests = await asyncio.gather(*(reader.read() for reader, _ in streams))
        for (_, writer), rest in zip(streams, rests, strict=True):
            assert b'"content":"last"' in rest and b"data: [DONE]" in rest
            writer.close()
            await writer.wait_closed()


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_must_be_refused_is_refused_before_its_body_comes(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = ScriptedService()

    async def full(_: str) -> None:
        raise RequestError("Full.", status=429, type="rate_limit_error", code="rate_limit_exceeded")

    monkeypatch.setattr(service, "wait_for_room", full)
    with serving(service) as url:
        address = urlsplit(url)
        async with asyncio.timeout(WAIT):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n".encode())
            answer = await reader.readuntil(b"rate_limit_exceeded")
        assert answer.startswith(b"HTTP/1.1 429 ") and b"retry-after:" in answer.lower()
        assert not service.requests
        writer.close()
        await writer.wait_closed()


def test_a_thousand_streams_fit_below_every_limit() -> None:
    """Each limit is above the one inside it, so that the innermost refuses, with its own message."""
    assert 1000 <= MAX_ANSWERS < MAX_ACTIVE < MAX_CONNECTIONS < MAX_FILES
