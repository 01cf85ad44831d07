"""Sending of generated answers, in one piece or streamed, for every endpoint that generates text.

Requests are refused before headers are sent; headers of a stream go out with the first token, or after a second. A
later failure, or the refusal of a request whose model had to be loaded first (`request.LateGeneration`), is reported in
the stream, which always ends as its protocol requires. What is sent in one piece is kept open as in `HeldOpen`. Each
endpoint has an `AnswerWriter` of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from typing import Self

from sse_starlette.sse import EventSourceResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.api.generation.request import close_all
from paceline.api.http.body import (
    BrokenOffError,
    ClientGoneError,
    Json,
    encode_json,
    while_connected,
)
from paceline.api.http.errors import ErrorShape, failure_of
from paceline.api.http.routing import Settings
from paceline.api.observation import AnswerWatch, Observer
from paceline.errors import PacelineError, RequestError
from paceline.runtime.service import GenerateEvent, Generation, GenerationResult

# ---- server-sent events ---------------------------------------------------------------------------------------------
# As OpenAI's clients read them (WHATWG HTML, 9.2): no ids, event names in `/v1/responses` only. Clients ignore
# comments, which keep proxies from closing a silent connection.
SSE_DONE = b"data: [DONE]\n\n"
SSE_PING = b": ping\n\n"
SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # else nginx buffers the stream
}


def sse_event(data: object) -> bytes:
    return b"data: " + encode_json(data) + b"\n\n"


def sse_named(name: str, data: bytes) -> bytes:
    """`data`: JSON, on one line."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


# ---- several generations at once ------------------------------------------------------------------------------------
# A slow reader blocks no generation: events it has not taken wait in the generation, `max_tokens` of them at most. A
# timeout while waiting for the next event cancels nothing. Leaving the context cancels generations that run and closes
# those that never began.
QUEUE_LIMIT = 64  # events of all choices together


class GenerationFanIn:
    """Reader of several generations, which it owns. A context manager, to be entered once."""

    def __init__(
        self, generations: Sequence[Generation], watches: Sequence[AnswerWatch], cuts: set[Callable[[], None]]
    ) -> None:
        """watches: of each generation. cuts: `AdmissionControl.cuts`, of which it is one while it is read."""
        self._waiting = dict(enumerate(generations))  # not yet running
        self._running = len(generations)
        self._watches = watches
        self._cuts = cuts
        self._queue: asyncio.Queue[tuple[int, GenerateEvent | Exception]] = asyncio.Queue(QUEUE_LIMIT)
        self._readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._readers = [asyncio.create_task(self._read(index)) for index in self._waiting]
        self._cuts.add(self._cut)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cuts.discard(self._cut)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await close_all(tuple(self._waiting.values()))
        self._waiting.clear()
        for watch in self._watches:
            watch.ended("left")

    async def next(self, timeout: float) -> tuple[int, GenerateEvent] | None:
        """The next event, after the index of its generation; None after `timeout` seconds without any.

        Raises the exception of a generation that failed.
        """
        try:
            async with asyncio.timeout(timeout):
                taken = await self._queue.get()
        except TimeoutError:
            return None
        return self._passed(*taken)  # where a TimeoutError is one of the generation's

    async def all(self, first: tuple[int, GenerateEvent] | None = None) -> AsyncIterator[tuple[int, GenerateEvent]]:
        """`first`, which has been taken already, and the events that are left."""
        if first is not None:
            yield first
        while self._running:
            yield self._passed(*await self._queue.get())

    def _cut(self) -> None:
        """Fail: the server stops. Events that were not taken are lost."""
        for reader in self._readers:
            reader.cancel()
        for watch in self._watches:
            watch.ended("failed")
        while not self._queue.empty():
            self._queue.get_nowait()
        message = "The server was stopped before this answer was finished."
        self._queue.put_nowait((0, RequestError(message, status=503, type="server_error", code="shutting_down")))

    def _passed(self, index: int, event: GenerateEvent | Exception) -> tuple[int, GenerateEvent]:
        if isinstance(event, Exception):
            raise event
        self._running -= isinstance(event, GenerationResult)
        return index, event

    async def _read(self, index: int) -> None:
        """The last event comes when its generation has given back what it held, so that nothing cuts that short."""
        watch, last = self._watches[index], None
        try:
            async with aclosing(self._waiting.pop(index).run()) as events:  # cancels the generation if it has not ended
                async for event in events:
                    if isinstance(event, GenerationResult) and event.reason not in ("stop", "length"):
                        raise PacelineError(f"The answer could not be finished ({event.reason}).")
                    watch.took(event)
                    if isinstance(event, GenerationResult):
                        last = event
                        break
                    await self._queue.put((index, event))
            await self._queue.put((index, last or PacelineError("The answer ended without saying why.")))
        except Exception as error:
            watch.ended("failed")
            await self._queue.put((index, error))


# ---- in one piece ---------------------------------------------------------------------------------------------------
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

    def __init__(self, work: Callable[[], Coroutine[object, object, bytes]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        await while_connected(receive, self._put(scope, send))

    async def _put(self, scope: Scope, send: Send) -> None:
        working = asyncio.create_task(_in_time(self._work(), scope))
        begun = False
        try:
            while not (await asyncio.wait({working}, timeout=_silence(scope)))[0]:
                if scope["http_version"] == "1.0":
                    continue
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": [_TYPE]})
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
            if begun:
                await _put_rest(scope, send, working)
                return
            body = working.result()
            headers = [_TYPE, (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


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


def _silence(scope: Scope) -> float:
    """Seconds of silence before a space or a ping."""
    settings: Settings = scope["app"].state.settings
    return settings.keep_alive


def _seconds(value: bytes) -> float:
    """Seconds that a header names; infinite where it names none."""
    try:
        seconds = float(value)
    except ValueError:
        return math.inf
    return seconds if seconds > 0 else math.inf


async def _put_rest(scope: Scope, send: Send, working: asyncio.Task[bytes]) -> None:
    try:
        await send({"type": "http.response.body", "body": working.result()})
    except ClientGoneError:
        raise
    except Exception as error:
        if not isinstance(error, PacelineError):
            _log.exception("an answer failed after its connection was kept open")
        shape = scope["app"].state.admission.error_shape(scope["path"])
        await send({"type": "http.response.body", "body": failure_of(error).json(shape), "more_body": True})
        raise BrokenOffError(str(error)) from None


HEADERS_WAIT_S = 1.0  # that headers wait for the first token, so that an early failure can be a plain answer


# ---- writers of answers ---------------------------------------------------------------------------------------------
class AnswerWriter(ABC):
    """An answer in the form of its endpoint, from the events of its generations: streamed by `begin`, any number of
    `take`, then `end`, or an error at any time; or `whole` after all events were taken. Pure.

    What is not overridden is as OpenAI has it.
    """

    id: str  # of the answer
    headers: Mapping[str, str] = SSE_HEADERS
    last: bytes = SSE_DONE  # behind every stream, also one that has failed

    def framed(self, piece: Json) -> bytes:
        return sse_event(piece)

    def ping(self) -> bytes:
        """A piece that clients ignore; it keeps a silent connection open."""
        return SSE_PING

    def begin(self) -> Sequence[Json]:
        return ()

    @abstractmethod
    def take(self, index: int, event: GenerateEvent) -> Sequence[Json]:
        """index: of the generation that produced the event."""

    def end(self) -> Sequence[Json]:
        return ()

    @abstractmethod
    def whole(self) -> Json: ...


def sent(generations: Sequence[Generation], writer: AnswerWriter, *, stream: bool) -> JsonAnswer | StreamedAnswer:
    """The response that runs the generations when it is sent."""
    return (StreamedAnswer if stream else JsonAnswer)(generations, writer)


def _fan_in(scope: Scope, generations: Sequence[Generation]) -> GenerationFanIn:
    observer: Observer = scope["app"].state.observer
    cuts = scope["app"].state.admission.cuts
    return GenerationFanIn(generations, [observer.answer(scope["state"]) for _ in generations], cuts)


class JsonAnswer(HeldOpen):
    """Sends the JSON when every generation is done. Cancels the generations when the client leaves."""

    def __init__(self, generations: Sequence[Generation], writer: AnswerWriter) -> None:
        super().__init__(self._gather)
        self._generations = generations
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        async with _fan_in(scope, self._generations) as self._events:
            await super().__call__(scope, receive, send)

    async def _gather(self) -> bytes:
        async for index, event in self._events.all():
            self._writer.take(index, event)
        return encode_json(self._writer.whole())


class EventStream(EventSourceResponse):
    """sse-starlette's stream, with its pings and its notice of clients that leave, of pieces that are framed already.
    Raises ClientGoneError when it ends before `ended` is set."""

    def __init__(
        self,
        pieces: AsyncIterable[bytes] | Iterator[bytes],
        headers: Mapping[str, str] = SSE_HEADERS,
        ping: Callable[[], bytes] = lambda: SSE_PING,
    ) -> None:
        super().__init__(
            pieces,
            headers=headers,
            ping_message_factory=ping,  # type: ignore[arg-type]  # bytes are sent as they are
        )
        del self.headers["connection"]  # says nothing in HTTP/1.1, and belongs to the server
        self.ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        self.ping_interval = _silence(scope)
        await super().__call__(scope, receive, send)
        if not self.ended:
            raise ClientGoneError


class StreamedAnswer(EventStream):
    """A stream whose headers wait for the first event, so that an earlier failure is a status. Cancels the generations
    when the client leaves."""

    def __init__(self, generations: Sequence[Generation], writer: AnswerWriter) -> None:
        super().__init__(iter(()), writer.headers, writer.ping)  # the pieces come with the call
        self._generations = generations
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # ASGI's signature
        async with _fan_in(scope, self._generations) as events:
            first = await while_connected(receive, events.next(min(HEADERS_WAIT_S, _silence(scope))))
            shape = scope["app"].state.admission.error_shape(scope["path"])
            self.body_iterator = self._pieces(events, first, shape)
            await super().__call__(scope, receive, send)

    async def _pieces(
        self, events: GenerationFanIn, first: tuple[int, GenerateEvent] | None, shape: ErrorShape | None
    ) -> AsyncIterator[bytes]:
        writer = self._writer

        def framed(pieces: Sequence[Json]) -> bytes:
            return b"".join(map(writer.framed, pieces))

        try:
            yield framed(writer.begin())
            async for index, event in events.all(first):
                if pieces := writer.take(index, event):
                    yield framed(pieces)
            yield framed(writer.end()) + writer.last
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("an answer failed after it had begun (%s)", writer.id)
            yield writer.framed(failure_of(error).envelope(shape)) + writer.last
        self.ended = True
