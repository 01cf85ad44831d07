"""Sending of generated answers, in one piece or streamed, for every endpoint that generates text.

Requests are refused before headers are sent; headers of a stream go out with the first token, or after a second. A
later failure, or the refusal of a request whose model had to be loaded first (`fan_in.LateGeneration`), is reported in
the stream, which always ends as its protocol requires. What is sent in one piece is kept open as in `HeldOpen`. Each
endpoint has its own pure encoders, an `AnswerBody` and an `AnswerChunks`, which receive the events of the generations
and return bytes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from sse_starlette.sse import EventSourceResponse
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.api.generation.fan_in import GenerationFanIn
from paceline.api.http import sse
from paceline.api.http.body import BrokenOffError, ClientGoneError, while_connected
from paceline.api.http.errors import Failure, failure_of
from paceline.api.observation import AnswerWatch, Observer
from paceline.errors import PacelineError, RequestError
from paceline.runtime.service import GenerateEvent, Generation, GenerationResult

READ_S = 60.0  # s that a client may take to read what is buffered before it counts as gone


# JSON that is sent in one piece and may be long in coming: its connection is kept open with spaces.
#
# Proxies and clients give up on a silent connection, after 30 to 100 s mostly, and JSON allows spaces before a value
# (RFC 8259, 2). The first is sent after the time in which a stream would send a comment: whatever refuses a request
# until then has a status of its own. With the first space the status is 200. A failure after that is written as its
# JSON, and the body is then left without its end, so that no client takes it for an answer: OpenAI's and Anthropic's
# in Python ask again, and are told by status, since what failed late fails soon then; those in JavaScript and Ollama's
# raise, curl shows the JSON and ends with code 18.
#
# Not for ever: spaces keep a client's own timeout from firing, so that an answer must come within the time for which
# the client says that it waits, as OpenAI's and Anthropic's do, and within that of a setting. Else it fails as above.
#
# Spaces rather than empty lines, since clients of Ollama's read lines. Not for HTTP/1.0, where the end of the
# connection is the end of the body, so that a failure would look whole.


_WAITS = (b"x-stainless-read-timeout", b"x-stainless-timeout")  # s, in which a client says how long it waits
_TYPE = (b"content-type", b"application/json")

_log = logging.getLogger("paceline.api")


class HeldOpen(Response):
    """Sends the JSON that `work` gives, which is cancelled when the client leaves. Raises what it raises while nothing
    has been sent, and else BrokenOffError."""

    def __init__(self, work: Callable[[], Coroutine[object, object, bytes]], keep_alive: float) -> None:
        """keep_alive: s of silence before a space."""
        super().__init__()
        self._work = work
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        await while_connected(receive, self._put(scope, send))

    async def _put(self, scope: Scope, send: Send) -> None:
        working = asyncio.create_task(_in_time(self._work(), scope))
        begun = False
        try:
            while not (await asyncio.wait({working}, timeout=self._keep_alive))[0]:
                if scope["http_version"] == "1.0":
                    continue
                if not begun:
                    begun = True
                    await _send(send, {"type": "http.response.start", "status": 200, "headers": [_TYPE]})
                await _send(send, {"type": "http.response.body", "body": b" ", "more_body": True})
            if begun:
                await _put_rest(scope, send, working)
                return
            body = working.result()
            headers = [_TYPE, (b"content-length", b"%d" % len(body))]
            await _send(send, {"type": "http.response.start", "status": 200, "headers": headers})
            await _send(send, {"type": "http.response.body", "body": body})
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def _send(send: Send, message: Message) -> None:
    """Raises ClientGoneError when the client does not read it in time."""
    try:
        async with asyncio.timeout(READ_S):
            await send(message)
    except TimeoutError:
        raise ClientGoneError from None


async def _in_time(work: Coroutine[object, object, bytes], scope: Scope) -> bytes:
    """The result of `work`. Raises RequestError where the client waits no longer."""
    limits = {"longest_silent_answer in [tuning]": scope["app"].state.settings.longest_silent or math.inf}
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
    """Seconds that a header names; infinite where it names none."""
    try:
        seconds = float(value)
    except ValueError:
        return math.inf
    return seconds if seconds > 0 else math.inf


async def _put_rest(scope: Scope, send: Send, working: asyncio.Task[bytes]) -> None:
    try:
        await _send(send, {"type": "http.response.body", "body": working.result()})
    except ClientGoneError:
        raise
    except Exception as error:
        if not isinstance(error, PacelineError):
            _log.exception("an answer failed after its connection was kept open")
        shape = scope["app"].state.admission.error_shape(scope["path"])
        await _send(send, {"type": "http.response.body", "body": failure_of(error).json(shape), "more_body": True})
        raise BrokenOffError(str(error)) from None


HEADERS_WAIT_S = 1.0  # that headers wait for the first token, so that an early failure can be a plain answer


class AnswerBody(Protocol):
    """Encoder of an answer that is sent in one piece. `index`: of the generation that produced the event."""

    def take(self, index: int, event: GenerateEvent) -> None: ...

    def body(self) -> bytes:
        """The JSON. Called once, when every generation is done."""


class AnswerChunks(Protocol):
    """Encoder of a streamed answer: `begin`, any number of `take`, then `end`, or `fail` at any time.

    Each returns whole events or lines, or nothing. What is not overridden is as OpenAI has it.
    """

    @property
    def headers(self) -> Mapping[str, str]:
        return sse.HEADERS

    def ping(self) -> bytes:
        """A piece that clients ignore; it keeps a silent connection open."""
        return sse.PING

    def begin(self) -> bytes: ...

    def take(self, index: int, event: GenerateEvent) -> bytes: ...

    def end(self) -> bytes:
        """The last events, when every generation is done; with [DONE] where the protocol has it."""

    def fail(self, failure: Failure) -> bytes:
        """The error event, and the end of the stream."""
        return sse.event(failure.envelope()) + sse.DONE


def watches_of(scope: Scope, generations: Sequence[Generation]) -> list[AnswerWatch]:
    """Watches of the generations of one request, by the application's observer."""
    observer: Observer = scope["app"].state.observer
    return [observer.answer(scope["state"]) for _ in generations]


class JsonAnswer(HeldOpen):
    """Sends the JSON when every generation is done. Cancels the generations when the client leaves."""

    def __init__(self, generations: Sequence[Generation], body: AnswerBody, keep_alive: float) -> None:
        super().__init__(self._gather, keep_alive)
        self._generations = generations
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        async with GenerationFanIn(self._generations, watches_of(scope, self._generations)) as self._fan_in:
            await super().__call__(scope, receive, send)

    async def _gather(self) -> bytes:
        running = len(self._generations)
        while running:
            event = await self._fan_in.next()
            if event is not None:
                self._body.take(*event)
                running -= isinstance(event[1], GenerationResult)
        return self._body.body()


class EventStream(EventSourceResponse):
    """sse-starlette's stream, with its pings and its notice of clients that leave or do not read, of pieces that are
    framed already. Raises ClientGoneError when it ends before `ended` is set."""

    def __init__(
        self,
        pieces: AsyncIterable[bytes] | Iterator[bytes],
        keep_alive: float,
        headers: Mapping[str, str] = sse.HEADERS,
        ping: Callable[[], bytes] = lambda: sse.PING,
    ) -> None:
        """keep_alive: s from one ping to the next."""
        super().__init__(
            pieces,
            headers=headers,
            ping=keep_alive,
            ping_message_factory=ping,  # type: ignore[arg-type]  # bytes are sent as they are
        )
        del self.headers["connection"]  # says nothing in HTTP/1.1, and belongs to the server
        self.ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        await super().__call__(scope, receive, partial(_send, send))  # whose own limit spares the first and last piece
        if not self.ended:
            raise ClientGoneError


class StreamedAnswer(EventStream):
    """A stream whose headers wait for the first event, so that an earlier failure is a status. Cancels the generations
    when the client leaves."""

    def __init__(self, generations: Sequence[Generation], chunks: AnswerChunks, keep_alive: float, name: str) -> None:
        """`name`: the answer's id, for the log."""
        super().__init__(iter(()), keep_alive, chunks.headers, chunks.ping)  # the pieces come with the call
        self._generations = generations
        self._chunks = chunks
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        async with GenerationFanIn(self._generations, watches_of(scope, self._generations)) as fan_in:
            event = await while_connected(receive, fan_in.next(min(HEADERS_WAIT_S, self.ping_interval)))
            self.body_iterator = self._pieces(fan_in, event)
            await super().__call__(scope, receive, send)

    async def _pieces(self, fan_in: GenerationFanIn, event: tuple[int, GenerateEvent] | None) -> AsyncIterator[bytes]:
        running = len(self._generations)
        try:
            yield self._chunks.begin()
            while running:
                event = event or await fan_in.next()
                assert event is not None, "waited for"
                running -= isinstance(event[1], GenerationResult)
                if piece := self._chunks.take(*event):
                    yield piece
                event = None
            yield self._chunks.end()
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("an answer failed after it had begun (%s)", self._name)
            yield self._chunks.fail(failure_of(error))
        self.ended = True
