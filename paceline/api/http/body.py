"""Reading of request bodies, and detection of clients that leave.

A sibling task watches `receive` for the disconnect. The next `send` would notice it too late: a generation may wait
long for its next token (ASGI, "Disconnect - receive event").
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.types import Message, Receive

from paceline.errors import RequestError

MAX_BODY = 1_048_576  # bytes
BODY_TIMEOUT = 60.0  # s for a whole body

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection, so that no answer can be sent."""


class BrokenOffError(Exception):
    """An answer has failed after it had begun, and the client has been told: its body must not end as if it were
    whole."""


def within(receive: Receive, seconds: float) -> Receive:
    """`receive`, for a body that must be there `seconds` from now: else it raises RequestError 408."""
    deadline = asyncio.get_running_loop().time() + seconds
    whole = False

    async def timely() -> Message:
        nonlocal whole
        if whole:
            return await receive()  # waits until the client leaves
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise _too_slow(seconds) from None
        whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return timely


async def read_body(receive: Receive, content_length: str | None, *, max_bytes: int = MAX_BODY) -> bytes:
    """The whole body. Raises RequestError 413 beyond `max_bytes`, 408 after BODY_TIMEOUT, and ClientGoneError."""
    if content_length is not None and content_length.isascii() and content_length.isdigit():
        declared = int(content_length[:20])  # h11 accepts up to 20 digits
    else:
        declared = 0
    if declared > max_bytes:
        raise too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise too_large(max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise _too_slow(BODY_TIMEOUT) from None


def _too_slow(seconds: float) -> RequestError:
    return RequestError(f"The request body did not arrive within {seconds:g} s.", status=408)


def too_large(max_bytes: int) -> RequestError:
    return RequestError(f"The request body is larger than {max_bytes} bytes.", status=413, code="request_too_large")


async def while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """The result of `work`. As soon as the client leaves, cancels `work` and raises ClientGoneError.

    The body must have been read. Both tasks have ended when this returns or raises.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
