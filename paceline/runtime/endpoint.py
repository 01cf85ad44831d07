"""An endpoint of a stranger over HTTP: any that speaks OpenAI's chat completions.

It is believed to be text and an end, nothing more: its bytes and its time have limits, and no cookie, redirect or proxy
is followed. Knows nothing of what may be sent there. Not handled: thinking of its model, which is dropped.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager

import httpx
import msgspec

from paceline import __version__
from paceline.core.printable import one_line
from paceline.core.redaction import Finder, find_entities
from paceline.core.sampling.sampler import SamplingParams
from paceline.errors import EndpointError
from paceline.strategies.base import FinishReason

Told = Sequence[dict[str, str]]  # messages
Count = Callable[[int, int], None]


# What one answer of it may take.
CONNECT_S = 10.0
SILENT_S = 60.0  # without a character of text, before the first one too
TOTAL_S = 600.0
BODY_BYTES = 8 << 20
LINE_BYTES = 1 << 20
ERROR_BYTES = 4096  # of a refusal's words that are read


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: object = None


class OutsideEndpoint:
    """For one event loop. As a `workflows.agent_text.Way` it is always there, and as far as its first byte was."""

    accepting = True
    bandwidth: float | None = None

    def __init__(self, url: str, model: str, key: str | None = None, *, find: Finder = find_entities) -> None:
        """url: what `/chat/completions` is appended to; `/v1` is added to one without a path. find: what is hidden from
        it."""
        base = httpx.URL(url)
        self._base = str(base.copy_with(path=base.path.rstrip("/") or "/v1"))
        self.name = f"{model} at {base.host}"
        self.find = find
        self.rtt: float | None = None
        self.on_sent: Callable[[str, int], None] = lambda _kind, _bytes: None  # of the side that asks it
        self._model, self._key = model, key
        limits = httpx.Limits(max_connections=None)  # answers have places of their own; nobody waits for slow readers
        self._transport = httpx.AsyncHTTPTransport(verify=httpx.create_ssl_context(), trust_env=False, limits=limits)

    async def close(self) -> None:
        await self._transport.aclose()

    async def look(self) -> str:
        """What the endpoint says of its model, for `paceline doctor`. Raises EndpointError."""
        async with self._answer("GET", "/models") as response:
            listed = await self._words(response, LINE_BYTES)
        known = json.dumps(self._model) in listed
        return f"{self.name} answers" if known else f"{self.name} answers, and does not list that model"

    async def stream(
        self, messages: Told, sampling: SamplingParams, max_tokens: int | None, count: Count
    ) -> AsyncGenerator[tuple[str, FinishReason | None]]:
        """The text of an answer as it comes, then its end. count: told the bytes sent and received. Raises
        EndpointError."""
        fields = _fields(sampling, max_tokens)
        for attempt in range(2):
            body = {"model": self._model, "messages": messages, "stream": True, **fields}
            content = json.dumps(body, ensure_ascii=False).encode(errors="replace")
            count(len(content), 0)
            try:
                async with aclosing(self._pieces(content, count)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except EndpointError as error:  # of parameters that it has not, or calls otherwise
                fewer = _accepted(fields, str(error)) if error.status == 400 and not attempt else fields
                if fewer == fields:
                    raise
                fields = fewer

    async def _pieces(self, content: bytes, count: Count) -> AsyncGenerator[tuple[str, FinishReason | None]]:
        now = asyncio.get_running_loop().time
        began = now()
        async with (
            self._answer("POST", "/chat/completions", content) as response,
            aclosing(self._data(response, count)) as lines,
        ):
            self.rtt = now() - began
            while True:
                text, end = "", None
                try:  # the reader's time is not the endpoint's
                    async with asyncio.timeout_at(min(now() + SILENT_S, began + TOTAL_S)):
                        while not (text or end):
                            if (line := await anext(lines, None)) is None:
                                raise EndpointError(f"{self.name} ends in the middle")
                            text, end = self._read(line)
                except TimeoutError:
                    raise EndpointError(f"{self.name} takes too long") from None
                yield text, end
                if end:
                    return

    def _read(self, line: bytes) -> tuple[str, FinishReason | None]:
        """Text and end of one event. Raises EndpointError."""
        if line == b"[DONE]":
            return "", "stop"
        try:  # Python's JSON lets pass halves of surrogate pairs, which strangers send, and msgspec's does not
            event = msgspec.convert(json.loads(line.decode("utf-8", "replace")), _Event)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise EndpointError(f"{self.name} sends what is no event of a chat completion") from None
        if event.error is not None:
            raise EndpointError(f"{self.name} says: {self._quoted(str(event.error))}")
        if not event.choices:
            return "", None
        text, reason = event.choices[0].delta.content or "", event.choices[0].finish_reason
        end: FinishReason | None = None if reason is None else "length" if reason == "length" else "stop"
        return text.encode(errors="replace").decode(), end

    async def _data(self, response: httpx.Response, count: Count) -> AsyncGenerator[bytes]:
        """The data of each server-sent event. Raises EndpointError beyond the limits."""
        held, received = bytearray(), 0
        try:
            async for part in response.aiter_raw():
                received += len(part)
                count(0, len(part))
                held += part
                if received > BODY_BYTES:
                    raise EndpointError(f"{self.name} sends more than {BODY_BYTES >> 10} KiB")
                *lines, rest = held.split(b"\n")
                held = rest
                if len(held) > LINE_BYTES:
                    raise EndpointError(f"{self.name} sends a line of more than {LINE_BYTES >> 10} KiB")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield bytes(line[5:].strip())
        except httpx.HTTPError as error:
            raise EndpointError(f"{self.name} is lost ({type(error).__name__})") from error

    @asynccontextmanager
    async def _answer(self, method: str, path: str, content: bytes | None = None) -> AsyncIterator[httpx.Response]:
        """An answer with status 200. Raises EndpointError."""
        headers = {"User-Agent": f"paceline/{__version__}", "Accept-Encoding": "identity"}
        headers |= {"Content-Type": "application/json"} if content is not None else {}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        seconds = {"connect": CONNECT_S, **dict.fromkeys(("read", "write", "pool"), SILENT_S)}
        request = httpx.Request(
            method, self._base + path, headers=headers, content=content, extensions={"timeout": seconds}
        )
        try:  # a transport instead of a client: it knows neither cookies nor redirects, proxies or .netrc
            async with asyncio.timeout(SILENT_S):
                response = await self._transport.handle_async_request(request)
        except (httpx.HTTPError, TimeoutError) as error:
            raise EndpointError(f"{self.name} cannot be reached ({type(error).__name__})") from error
        try:
            if (status := response.status_code) != 200:
                told = {401: "does not accept the key", 403: "does not allow it", 429: "has had too many requests"}
                said = self._quoted(await self._words(response, ERROR_BYTES))
                raise EndpointError(
                    f"{self.name} {told.get(status, f'answers with status {status}')}: {said}", status=status
                )
            yield response
        finally:  # by a task of its own: where its reader is cancelled meanwhile, the connection ends as well
            await asyncio.shield(asyncio.ensure_future(response.aclose()))

    async def _words(self, response: httpx.Response, most: int) -> str:
        """The beginning of a body. Raises EndpointError."""
        said = b""
        try:
            async with asyncio.timeout(SILENT_S):
                async for part in response.aiter_raw():
                    said += part
                    if len(said) > most:
                        break
        except (httpx.HTTPError, TimeoutError) as error:
            raise EndpointError(f"{self.name} is lost ({type(error).__name__})") from error
        return said[:most].decode("utf-8", "replace")

    def _quoted(self, said: str) -> str:
        """Its words without the key: some repeat the one that they refuse."""
        return one_line(said.replace(self._key, "(key)") if self._key else said, 300)


def _fields(sampling: SamplingParams, max_tokens: int | None) -> dict[str, object]:
    """Parameters that are not the usual ones."""
    usual = SamplingParams()
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    told: dict[str, object] = {
        name: value for name in names if (value := getattr(sampling, name)) != getattr(usual, name)
    }
    return told if max_tokens is None else {**told, "max_tokens": max_tokens}


def _accepted(fields: Mapping[str, object], refusal: str) -> dict[str, object]:
    """The fields without those that a refusal names, and by the name that it asks for."""
    fewer = {name: value for name, value in fields.items() if name not in refusal}
    return {**fewer, "max_completion_tokens": fields["max_tokens"]} if "max_completion_tokens" in refusal else fewer
