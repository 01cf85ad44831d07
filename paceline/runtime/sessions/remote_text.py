"""Texts of a device's workflows that the cloud's model writes: those of agents that read nothing private.

The device opens a session with `WRITE` as the strategy and an agent's prompt as its messages; the cloud sends the text
as it is written, and closes. At the cloud the text is an answer of an owner that is the device, so it has the device's
places, turns and memory. Not handled: a text that goes on after its link was lost; the device writes it itself then.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Final, cast

from paceline.core.printable import printable
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.shares import Shares
from paceline.errors import LinkClosed, PacelineError
from paceline.runtime.link.connection import Link
from paceline.runtime.service import GenerateEvent, GenerateRequest, Generation, GenerationResult, TextDelta
from paceline.runtime.sessions.egress import Egress
from paceline.strategies.base import FinishReason
from paceline.strategies.strategy import Privacy
from paceline.wire.codec import encode_options, sampling_from_wire, sampling_to_wire
from paceline.wire.messages import WRITE, ChatMessage, CloseSession, OpenSession, SessionFrame, WrittenText
from paceline.wire.options import DEFAULT_OPTIONS

log = logging.getLogger("paceline.session")

ALONE: Final = "autoregressive"  # how the cloud writes them
LEVELS: Final[tuple[Privacy, ...]] = ("open", "document-private")  # of privacy at which a device may ask for them
MAX_TOKENS: Final = 512  # of a text; agents write 160 at most
MAX_CHARACTERS: Final = 64  # that a token may have, on average over a text
MAX_TEXTS, MAX_TEXTS_OF_ONE = 256, 32  # at once, of all devices and of one
PIECE: Final = 16_384  # characters of a message
PATIENCE_S: Final = 10.0  # for the next piece of a text, the first one included
LISTEN_S: Final = 0.25  # between two looks at the link meanwhile
MAX_SILENCE_S: Final = 1.5  # of the link: a cloud that is busy is heard

Admit = Callable[[GenerateRequest], Awaitable[Generation]]


@dataclass(slots=True)
class RemoteText:
    """One text, at the device. `run` raises LinkError where the cloud refuses, is lost or mute, or sends nonsense."""

    link: Link
    messages: Sequence[Mapping[str, str]]
    max_tokens: int
    privacy: Privacy
    cache_key: bytes
    egress: Egress
    _events: asyncio.Queue[SessionFrame] = field(default_factory=asyncio.Queue)
    _session: int | None = None

    async def run(self) -> AsyncIterator[GenerateEvent]:
        tokens = characters = 0
        try:
            self._open()
            while True:
                message = await self._next()
                if isinstance(message, CloseSession):
                    if message.reason not in ("stop", "length"):
                        raise LinkClosed(f"the cloud does not write it ({printable(message.reason)[:200]})")
                    reason = cast(FinishReason, message.reason)
                    yield GenerationResult(reason, 0, tokens, WRITE, "an agent's text that the cloud's model writes")
                    return
                if not isinstance(message, WrittenText):
                    continue
                tokens += message.tokens
                characters += len(message.text)
                if tokens > self.max_tokens or characters > MAX_CHARACTERS * self.max_tokens:
                    raise LinkClosed("the cloud writes more than it was asked for")
                yield TextDelta(message.text, message.tokens)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        if self._session is not None:
            number, self._session = self._session, None
            self.egress.sent(CloseSession(number, ""), self.link.detach(number))

    def _open(self) -> None:
        self._session = self.link.open_session(self._received)
        opening = OpenSession(
            session=self._session,
            strategy=WRITE,
            messages=[ChatMessage(message["role"], message["content"]) for message in self.messages],
            query="",
            sampling=sampling_to_wire(SamplingParams(temperature=0.0, seed=0)),
            max_tokens=self.max_tokens,
            top_k_documents=0,
            privacy=self.privacy,
            options=encode_options(DEFAULT_OPTIONS),
            targets=[],
            epoch=0,
            constraint=None,
            asker="",
            cache_key=self.cache_key,
        )
        self.egress.sent(opening, self.link.send(opening))

    def _received(self, message: SessionFrame) -> None:
        if self._events.qsize() > 4 * self.max_tokens:  # nobody reads it, or it is nonsense
            message = CloseSession(message.session, "too many messages")
        self._events.put_nowait(message)

    async def _next(self) -> SessionFrame:
        """The next message of the session. Raises LinkClosed where none comes."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LISTEN_S):
                    return await self._events.get()
            if self.link.closed.is_set():
                raise LinkClosed("the link was lost")
            silent = self.link.listen() > MAX_SILENCE_S + (self.link.rtt or 0.0)
            if silent or loop.time() > until:
                raise LinkClosed("nothing was heard of the cloud in time")


class TextServer:
    """Writes texts for devices, at the cloud. Belongs to the event loop."""

    def __init__(self, admit: Admit) -> None:
        """admit: prepares an answer of this side, where there is room for one."""
        self._admit = admit
        self._shares = Shares(MAX_TEXTS, most=MAX_TEXTS_OF_ONE)
        self._writing: dict[asyncio.Task[None], Link] = {}

    def open(self, link: Link, peer: str, opening: OpenSession) -> None:
        """A device asks for a text. It ends with the session, and with the link."""
        if not self._shares.take(peer):
            link.send(CloseSession(opening.session, "refused: it is busy"))
            return
        writing = asyncio.create_task(self._write(link, peer, opening))
        self._writing[writing] = link
        link.attach(opening.session, lambda message: writing.cancel() if isinstance(message, CloseSession) else None)

        def ended(_: object) -> None:
            self._writing.pop(writing)
            self._shares.give_back(peer)

        writing.add_done_callback(ended)

    def link_lost(self, link: Link) -> None:
        for writing in [writing for writing, its_link in self._writing.items() if its_link is link]:
            writing.cancel()

    async def close(self) -> None:
        """End all, at shutdown."""
        writing = list(self._writing)
        for each in writing:
            each.cancel()
        await asyncio.gather(*writing, return_exceptions=True)

    async def _write(self, link: Link, peer: str, opening: OpenSession) -> None:
        egress, session = Egress(), opening.session

        def send(message: SessionFrame) -> None:
            egress.sent(message, link.send(message))

        try:
            try:
                reason = await self._text(_request(opening, peer), session, send)
            except PacelineError as refusal:
                reason = f"refused: {refusal}"[:1024]
            except Exception:  # the device must receive a reply in any case
                log.exception("a text could not be written for a device")
                reason = "refused: it cannot be written here"
            with suppress(LinkClosed):
                send(CloseSession(session, reason))
        finally:
            log.info("written for a workflow of %s: %s", peer, egress or "nothing, it has gone")

    async def _text(self, request: GenerateRequest, session: int, send: Callable[[SessionFrame], None]) -> str:
        """Send a text piece by piece. Returns why it ended."""
        generation, tokens = await self._admit(request), 0
        try:
            async with aclosing(cast(AsyncGenerator[GenerateEvent], generation.run())) as events:
                async for event in events:
                    if isinstance(event, GenerationResult):
                        send(WrittenText(session, "", max(0, event.completion_tokens - tokens)))
                        return event.reason
                    tokens += event.tokens
                    send(WrittenText(session, event.text[:PIECE], event.tokens))
        finally:
            await generation.aclose()
        raise PacelineError("its text has no end")


def _request(opening: OpenSession, peer: str) -> GenerateRequest:
    """The answer of this side that the text is. Raises PacelineError for what no device's workflow asks for."""
    if opening.privacy not in LEVELS:
        raise PacelineError(f"the privacy level '{printable(opening.privacy)[:40]}' lets no text be written elsewhere")
    if not 0 < opening.max_tokens <= MAX_TOKENS:
        raise PacelineError(f"a text has 1 to {MAX_TOKENS} tokens")
    if opening.targets or opening.constraint is not None or opening.top_k_documents:
        raise PacelineError("an agent's text has no beginning, no constraint and no documents")
    return GenerateRequest(
        messages=tuple({"role": message.role, "content": message.content} for message in opening.messages),
        sampling=sampling_from_wire(opening.sampling),
        max_tokens=opening.max_tokens,
        strategy=ALONE,
        any_device=False,
        documents=0,
        privacy=opening.privacy,
        owner=f"peer:{peer}",  # a peer's clients share its turns in the engine's steps
        guest_key=opening.cache_key.hex() or secrets.token_hex(16),
        passages=(),
        trace=opening.trace,
    )
