"""Many streams open at once on one server: each delivers while all are open, and all end."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from paceline.api.http.admission import MAX_ACTIVE
from paceline.api.http.server import MAX_CONNECTIONS, MAX_FILES
from paceline.errors import RequestError
from paceline.runtime.admission import MAX_ANSWERS
from tests.api.scripted import WAIT, ScriptedService, serving


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
