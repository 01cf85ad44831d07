"""Parts of an answer to a client that may not read them."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

from paceline.api.http.body import ClientGoneError

SEND_TIMEOUT = 60.0  # s that a client may take to read what is buffered before it counts as gone


async def put(send: Send, data: bytes, *, last: bool = False) -> None:
    """Send a part of the body. Raises ClientGoneError."""
    if data or last:
        await send_part(send, {"type": "http.response.body", "body": data, "more_body": not last})


async def send_part(send: Send, message: Message) -> None:
    """Raises ClientGoneError when the client does not read it in time."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT):
            await send(message)
    except TimeoutError:
        raise ClientGoneError from None
