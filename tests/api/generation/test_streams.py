"""Streams as a server sends them: headers, and clients that do not read."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.types import Message

from paceline.api.generation.streaming import EventStream
from paceline.api.http import body
from paceline.api.http.body import ClientGoneError
from tests.api.conftest import BODY
from tests.api.scripted import WAIT


def test_a_stream_says_nothing_of_its_connection(http: httpx.Client) -> None:
    """It is the server's business, which may be about to close it."""
    for path in ("/v1/chat/completions", "/api/chat"):
        answer = http.post(path, json=BODY | {"stream": True})
        assert answer.status_code == 200 and "connection" not in answer.headers


@pytest.mark.anyio
@pytest.mark.parametrize("unread", range(3), ids=["the headers", "a piece", "the end"])
async def test_a_client_that_reads_no_more_counts_as_gone(unread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "READ_S", 0.02)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        if len(sent) == unread:
            await asyncio.Event().wait()  # until what is buffered has been read
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    stream = EventStream(iter([b"data: 1\n\n"]), keep_alive=15.0)
    with pytest.raises(ClientGoneError):
        async with asyncio.timeout(WAIT):
            await stream({"type": "http", "method": "GET"}, receive, send)
    assert len(sent) == unread
