"""JSON that is sent in one piece and may be long in coming: its connection is kept open with spaces.

Proxies and clients give up on a silent connection, after 30 to 100 s mostly, and JSON allows spaces before a value
(RFC 8259, 2). The first is sent after the time in which a stream would send a comment: whatever refuses a request until
then has a status of its own. With the first space the status is 200. A failure after that is written as its JSON, and
the body is then left without its end, so that no client takes it for an answer: OpenAI's and Anthropic's in Python ask
again, and are told by status, since what failed late fails soon then; those in JavaScript and Ollama's raise, curl
shows the JSON and ends with code 18.

Not for ever: spaces keep a client's own timeout from firing, so that an answer must come within the time for which the
client says that it waits, as OpenAI's and Anthropic's do, and within that of a setting. Else it fails as above.

Spaces rather than empty lines, since clients of Ollama's read lines. Not for HTTP/1.0, where the end of the connection
is the end of the body, so that a failure would look whole.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.api.generation.sending import put, send_part
from paceline.api.http.body import BrokenOffError, ClientGoneError, while_connected
from paceline.api.http.errors import failure_of
from paceline.errors import PacelineError, RequestError

LONGEST_S = 600.0  # of an answer in one piece, where the settings say nothing else; OpenAI's clients wait as long
_WAITS = (b"x-stainless-read-timeout", b"x-stainless-timeout")  # s, in which a client says how long it waits
_TYPE = (b"content-type", b"application/json")

_log = logging.getLogger("paceline.api")


class HeldOpen(Response):
    """Sends the JSON that `work` gives, which is cancelled when the client leaves."""

    def __init__(self, work: Callable[[], Coroutine[object, object, bytes]], keep_alive: float) -> None:
        """keep_alive: s of silence before a space."""
        super().__init__()
        self._work = work
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        await while_connected(receive, put_whole(scope, send, self._work(), self._keep_alive))


async def put_whole(scope: Scope, send: Send, work: Coroutine[object, object, bytes], keep_alive: float) -> None:
    """Send the JSON that `work` gives. Raises what it raises while nothing has been sent, and else BrokenOffError."""
    working = asyncio.create_task(_in_time(work, scope))
    begun = False
    try:
        while not (await asyncio.wait({working}, timeout=keep_alive))[0]:
            if scope["http_version"] == "1.0":
                continue
            if not begun:
                begun = True
                await send_part(send, {"type": "http.response.start", "status": 200, "headers": [_TYPE]})
            await put(send, b" ")
        if begun:
            await _put_rest(scope, send, working)
            return
        body = working.result()
        headers = [_TYPE, (b"content-length", b"%d" % len(body))]
        await send_part(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await put(send, body, last=True)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _in_time(work: Coroutine[object, object, bytes], scope: Scope) -> bytes:
    """The result of `work`. Raises RequestError where the client waits no longer."""
    limits = {"--longest-silent-answer": scope["app"].state.longest_silent}
    limits |= {name.decode(): _seconds(value) for name, value in scope["headers"] if name in _WAITS}
    named, seconds = min(limits.items(), key=lambda limit: limit[1])
    try:
        async with asyncio.timeout(None if math.isinf(seconds) else seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise RequestError(
            f"The answer is not complete after {seconds:g} s ({named}): ask for a stream, which has no such limit, for "
            "a shorter answer with max_tokens, or raise this limit.",
            status=408,
            code="answer_too_late",
        ) from None


def _seconds(value: bytes) -> float:
    """Of a header; infinite where it does not say."""
    try:
        seconds = float(value)
    except ValueError:
        return math.inf
    return seconds if seconds > 0 else math.inf


async def _put_rest(scope: Scope, send: Send, working: asyncio.Task[bytes]) -> None:
    try:
        await put(send, working.result(), last=True)
    except ClientGoneError:
        raise
    except Exception as error:
        if not isinstance(error, PacelineError):
            _log.exception("an answer failed after its connection was kept open")
        shape = scope["app"].state.admission.error_shape(scope["path"])
        await put(send, failure_of(error).json(shape))
        raise BrokenOffError(str(error)) from None
