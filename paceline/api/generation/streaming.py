"""Sending of generated answers, in one piece or streamed, for every endpoint that generates text.

Requests are refused before headers are sent; headers of a stream go out with the first token, or after a second. A
later failure, or the refusal of a request whose model had to be loaded first (`late`), is reported in the stream, which
always ends as its protocol requires. What is sent in one piece is kept open as in `held_open`. Each endpoint has its
own pure encoders, an `AnswerBody` and an `AnswerChunks`, which receive the events of the generations and return bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.api.generation.fan_in import GenerationFanIn
from paceline.api.generation.held_open import put_whole
from paceline.api.generation.sending import put, send_part
from paceline.api.http.body import ClientGoneError, while_connected
from paceline.api.http.errors import Failure, failure_of
from paceline.api.observation.answers import AnswerWatch, Observer
from paceline.errors import PacelineError
from paceline.runtime.service import GenerateEvent, Generation, GenerationResult

HEADERS_WAIT_S = 1.0  # that headers wait for the first token, so that an early failure can be a plain answer

_log = logging.getLogger("paceline.api")


class AnswerBody(Protocol):
    """Encoder of an answer that is sent in one piece. `index`: of the generation that produced the event."""

    def take(self, index: int, event: GenerateEvent) -> None: ...

    def body(self) -> bytes:
        """The JSON. Called once, when every generation is done."""


class AnswerChunks(Protocol):
    """Encoder of a streamed answer: `begin`, any number of `take`, then `end`, or `fail` at any time.

    Each returns whole events or lines, or nothing.
    """

    @property
    def headers(self) -> Mapping[str, str]: ...

    def ping(self) -> bytes:
        """A piece that clients ignore; it keeps a silent connection open."""

    def begin(self) -> bytes: ...

    def take(self, index: int, event: GenerateEvent) -> bytes: ...

    def end(self) -> bytes:
        """The last events, when every generation is done; with [DONE] where the protocol has it."""

    def fail(self, failure: Failure) -> bytes:
        """The error event, and the end of the stream."""


def watches_of(scope: Scope, generations: Sequence[Generation]) -> list[AnswerWatch]:
    """Watches of the generations of one request, by the application's observer."""
    observer: Observer = scope["app"].state.observer
    return [observer.answer(scope["state"]) for _ in generations]


class JsonAnswer(Response):
    """Sends the JSON when every generation is done. Cancels the generations when the client leaves."""

    def __init__(self, generations: Sequence[Generation], body: AnswerBody, keep_alive: float) -> None:
        """keep_alive: s of silence, see `held_open`."""
        super().__init__()
        self._generations = generations
        self._body = body
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        async with GenerationFanIn(self._generations, watches_of(scope, self._generations)) as fan_in:
            await while_connected(receive, put_whole(scope, send, self._gather(fan_in), self._keep_alive))

    async def _gather(self, fan_in: GenerationFanIn) -> bytes:
        running = len(self._generations)
        while running:
            event = await fan_in.next()
            if event is not None:
                self._body.take(*event)
                running -= isinstance(event[1], GenerationResult)
        return self._body.body()


class StreamedAnswer(Response):
    """Sends events as they come, and `ping`s of the encoder after `keep_alive` seconds of silence.

    Cancels the generations when the client leaves.
    """

    def __init__(self, generations: Sequence[Generation], chunks: AnswerChunks, keep_alive: float, name: str) -> None:
        """`name`: the answer's id, for the log."""
        super().__init__()
        self._generations = generations
        self._chunks = chunks
        self._keep_alive = keep_alive
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        async with GenerationFanIn(self._generations, watches_of(scope, self._generations)) as fan_in:
            await while_connected(receive, self._write(fan_in, send))

    async def _write(self, fan_in: GenerationFanIn, send: Send) -> None:
        event = await fan_in.next(min(HEADERS_WAIT_S, self._keep_alive))
        headers = [(name.encode(), value.encode()) for name, value in self._chunks.headers.items()]
        await send_part(send, {"type": "http.response.start", "status": 200, "headers": headers})
        running = len(self._generations)
        try:
            await put(send, self._chunks.begin())
            while True:
                if event is None:
                    await put(send, self._chunks.ping())
                else:
                    running -= isinstance(event[1], GenerationResult)
                    await put(send, self._chunks.take(*event))
                if not running:
                    break
                event = await fan_in.next(self._keep_alive)
            await put(send, self._chunks.end(), last=True)
        except ClientGoneError:
            raise
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("an answer failed after it had begun (%s)", self._name)
            await put(send, self._chunks.fail(failure_of(error)), last=True)
