"""`POST /v1/chat/completions`: from the request to the last byte of its answer, streamed or whole.

Everything that can be refused is refused before headers are sent; they go out with the first token, or a second later.
What fails after that is told in the stream, which always ends with [DONE].
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.api import answers, sse
from paceline.api.answers import Choice, Envelope
from paceline.api.body import ClientGoneError, read_body, while_connected
from paceline.api.choices import Choices, prepare_all
from paceline.api.encoding import decode_object, encode_json
from paceline.api.errors import failure_of
from paceline.api.requests import chat_call, find_model
from paceline.errors import PacelineError
from paceline.runtime.service import Done, GenerateEvent, Prepared, Service

FIRST_PATIENCE = 1.0  # s that headers wait for the first token, so that an early failure can be a plain answer
SEND_TIMEOUT = 60.0  # s that a reader may take for what is buffered before it counts as gone

_log = logging.getLogger("paceline.api")


class ChatEndpoint:
    """The route, with what it needs. Holds nothing of a request."""

    def __init__(self, service: Service, *, documents: int, keep_alive: float) -> None:
        self._service = service
        self._documents = documents
        self._keep_alive = keep_alive

    async def __call__(self, request: Request) -> Response:
        body = decode_object(await read_body(request.receive, request.headers.get("content-length")))
        call = chat_call(body, self._service, request.state.identity, documents=self._documents)
        prepared = await while_connected(request.receive, prepare_all(self._service, call.generations))
        model = find_model(self._service.models(), call.model)
        envelope = Envelope(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), f"fp_{model.fingerprint[:12]}", call)
        return Answer(envelope, prepared, self._keep_alive)


class Answer(Response):
    """Writes the answer. A client that leaves ends the generations at once."""

    def __init__(self, envelope: Envelope, prepared: Sequence[Prepared], keep_alive: float) -> None:
        super().__init__()
        self._envelope = envelope
        self._prepared = prepared
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI's signature
        write = self._stream if self._envelope.call.stream else self._whole
        async with Choices(self._prepared) as choices:
            await while_connected(receive, write(choices, send))

    async def _whole(self, choices: Choices, send: Send) -> None:
        gathered = [Choice() for _ in self._envelope.call.generations]
        while any(choice.done is None for choice in gathered):
            event = await choices.next()
            if event is not None:
                gathered[event[0]].take(event[1])
        body = encode_json(answers.completion(self._envelope, gathered))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await _send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, {"type": "http.response.body", "body": body})

    async def _stream(self, choices: Choices, send: Send) -> None:
        event = await choices.next(min(FIRST_PATIENCE, self._keep_alive))
        headers = [(name.encode(), value.encode()) for name, value in sse.HEADERS.items()]
        await _send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        stream = _Stream(self._envelope, send)
        try:
            await stream.begin()
            while not await stream.write(event):
                event = await choices.next(self._keep_alive)
            await stream.end()
        except ClientGoneError:
            raise
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("an answer failed after it had begun (%s)", self._envelope.id)
            await stream.fail(error)


class _Stream:
    """The chunks of one answer, in the order of the protocol."""

    def __init__(self, envelope: Envelope, send: Send) -> None:
        self._envelope = envelope
        self._send = send
        self._lengths = [0] * len(envelope.call.generations)  # characters so far
        self._dones: dict[int, Done] = {}

    async def begin(self) -> None:
        await self._put(*(sse.event(answers.role_chunk(self._envelope, i)) for i in range(len(self._lengths))))

    async def write(self, event: tuple[int, GenerateEvent] | None) -> bool:
        """Writes one event, or a sign of life. True when every choice has ended."""
        if event is None:
            await self._put(sse.PING)
            return False
        index, said = event
        if isinstance(said, Done):
            self._dones[index] = said
            await self._put(sse.event(answers.final_chunk(self._envelope, index, said, self._lengths[index])))
        elif said.text or said.logprobs:
            self._lengths[index] += len(said.text)
            await self._put(sse.event(answers.content_chunk(self._envelope, index, said)))
        return len(self._dones) == len(self._lengths)

    async def end(self) -> None:
        if self._envelope.call.include_usage:
            dones = [self._dones[index] for index in sorted(self._dones)]
            await self._put(sse.event(answers.usage_chunk(self._envelope, dones)))
        await self._put(sse.DONE, last=True)

    async def fail(self, error: Exception) -> None:
        await self._put(sse.event(failure_of(error).envelope()), sse.DONE, last=True)

    async def _put(self, *parts: bytes, last: bool = False) -> None:
        await _send(self._send, {"type": "http.response.body", "body": b"".join(parts), "more_body": not last})


async def _send(send: Send, message: Message) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT):
            await send(message)
    except TimeoutError:
        raise ClientGoneError from None
