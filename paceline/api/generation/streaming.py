"""The way of an answer to its client, streamed or whole, for every endpoint that generates text.

Everything that can be refused is refused before headers are sent; they go out with the first token, or a second later.
What fails after that is told in the stream, which always ends as its protocol has it. What the bytes say is for each
endpoint: a `Whole` or a `Stream`, pure objects that are told what the generations said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.api.generation.fan_in import GenerationFanIn
from paceline.api.http import sse
from paceline.api.http.body import ClientGoneError, while_connected
from paceline.api.http.errors import Failure, failure_of
from paceline.errors import PacelineError
from paceline.runtime.service import GenerateEvent, Generation, GenerationResult

FIRST_PATIENCE = 1.0  # s that headers wait for the first token, so that an early failure can be a plain answer
SEND_TIMEOUT = 60.0  # s that a reader may take for what is buffered before it counts as gone

_log = logging.getLogger("paceline.api")


class Whole(Protocol):
    """An answer that is sent in one piece. `index`: which of the generations said it."""

    def take(self, index: int, event: GenerateEvent) -> None: ...

    def body(self) -> bytes:
        """The JSON; asked for once, when every generation is done."""


class Stream(Protocol):
    """The bytes of a streamed answer, in the order of its protocol: `begin`, any number of `take`, then `end`.

    `fail` may come at any time instead of what is left. Each returns whole server-sent events, or nothing.
    """

    def begin(self) -> bytes: ...

    def take(self, index: int, event: GenerateEvent) -> bytes: ...

    def end(self) -> bytes:
        """When every generation is done; [DONE] included, where the protocol has one."""

    def fail(self, failure: Failure) -> bytes:
        """The error event and whatever ends the stream after it."""


class WholeAnswer(Response):
    """Sends the JSON when all is said. A client that leaves ends the generations at once."""

    def __init__(self, prepared: Sequence[Generation], whole: Whole) -> None:
        super().__init__()
        self._prepared = prepared
        self._whole = whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's signature
        async with GenerationFanIn(self._prepared) as choices:
            await while_connected(receive, self._write(choices, send))

    async def _write(self, choices: GenerationFanIn, send: Send) -> None:
        running = len(self._prepared)
        while running:
            event = await choices.next()
            if event is not None:
                self._whole.take(*event)
                running -= isinstance(event[1], GenerationResult)
        body = self._whole.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send_part(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await send_part(send, {"type": "http.response.body", "body": body})


class StreamedAnswer(Response):
    """Sends events as they come, and a comment after `keep_alive` seconds of silence. A client that leaves ends all."""

    def __init__(self, prepared: Sequence[Generation], stream: Stream, keep_alive: float, name: str) -> None:
        """`name`: of the answer, for the log."""
        super().__init__()
        self._prepared = prepared
        self._stream = stream
        self._keep_alive = keep_alive
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's signature
        async with GenerationFanIn(self._prepared) as choices:
            await while_connected(receive, self._write(choices, send))

    async def _write(self, choices: GenerationFanIn, send: Send) -> None:
        event = await choices.next(min(FIRST_PATIENCE, self._keep_alive))
        headers = [(name.encode(), value.encode()) for name, value in sse.HEADERS.items()]
        await send_part(send, {"type": "http.response.start", "status": 200, "headers": headers})
        running = len(self._prepared)
        try:
            await put(send, self._stream.begin())
            while True:
                if event is None:
                    await put(send, sse.PING)
                else:
                    running -= isinstance(event[1], GenerationResult)
                    await put(send, self._stream.take(*event))
                if not running:
                    break
                event = await choices.next(self._keep_alive)
            await put(send, self._stream.end(), last=True)
        except ClientGoneError:
            raise
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("an answer failed after it had begun (%s)", self._name)
            await put(send, self._stream.fail(failure_of(error)), last=True)


async def put(send: Send, data: bytes, *, last: bool = False) -> None:
    """A part of the body. Raises ClientGoneError."""
    if data or last:
        await send_part(send, {"type": "http.response.body", "body": data, "more_body": not last})


async def send_part(send: Send, message: Message) -> None:
    """Raises ClientGoneError when the client does not take it in time."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT):
            await send(message)
    except TimeoutError:
        raise ClientGoneError from None
