"""What one side asks of the other beside an answer: passages for a search, and texts of a device's workflows that the
cloud writes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast

from paceline.core.fair import Shares
from paceline.core.printable import printable
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.families import NO_THINKING
from paceline.errors import LinkClosed, LinkError, PacelineError
from paceline.rag.chunk import MAX_PLACE
from paceline.rag.prompt import passages_text, query_of
from paceline.rag.records import Passage
from paceline.runtime.link.connection import Link
from paceline.runtime.service import (
    Account,
    AskedPrompt,
    GenerateEvent,
    GenerateRequest,
    Generation,
    GenerationResult,
    Joining,
    OutputForm,
    Sources,
    TextDelta,
)
from paceline.runtime.sessions.driver import Egress
from paceline.strategies.base import FinishReason, Privacy, Wish
from paceline.wire.codec import encode_options, sampling_from_wire, sampling_to_wire
from paceline.wire.messages import (
    DEFAULT_OPTIONS,
    REFUSED,
    SEARCH,
    WRITE,
    ChatMessage,
    CloseSession,
    OpenSession,
    RetrievedPassage,
    RetrievedPassages,
    SessionFrame,
    WrittenText,
)

log = logging.getLogger("paceline.session")

TIMEOUT_S: Final = 5.0  # for the cloud's reply
LISTEN_S: Final = 0.25  # between two looks at the link meanwhile
MAX_SILENCE_S: Final = 1.5  # of the link: a cloud that searches for long is heard
MAX_NAME, MAX_TEXT = 1024, 16_384  # characters of a passage's document name and text
MAX_BYTES: Final = 1 << 19  # of all passages in one message


def to_wire(passages: Sequence[Passage]) -> list[RetrievedPassage]:
    """Passages as sent to a device: the text that a prompt contains, and as many of the first as fit a frame."""
    found: list[RetrievedPassage] = []
    room = MAX_BYTES
    for passage in passages:
        name, text = passage.document[:MAX_NAME], passages_text(passage)[:MAX_TEXT]
        place = passage.place[:MAX_PLACE]
        room -= len(name.encode()) + len(text.encode()) + len(place.encode())
        if room < 0:
            break
        found.append(RetrievedPassage(name, text, passage.score, place, passage.chunk_id))
    return found


def _opening(session: int, kind: str, privacy: Privacy, sampling: SamplingParams, **more: Any) -> OpenSession:
    """The opening of a search or of a text: all that a device sends for it."""
    asked: dict[str, Any] = {"messages": [], "query": "", "max_tokens": 0, "top_k_documents": 0, **more}
    return OpenSession(
        session=session,
        strategy=kind,
        sampling=sampling_to_wire(sampling),
        privacy=privacy,
        options=encode_options(DEFAULT_OPTIONS),
        targets=[],
        epoch=0,
        constraint=None,
        asker="",
        **asked,
    )


async def passages_for(
    request: GenerateRequest, link: Link | None, egress: Egress, *, expected: bool
) -> Sequence[Passage] | None:
    """Passages of the cloud for an answer that the device writes alone, at `answer-private`; None where the cloud
    cannot be searched. expected: a cloud is configured for this device.

    The device sends the query: the last question verbatim, preceded by the previous one where it refers to that, 1,000
    characters at most (`rag.prompt.query_of`). The cloud sends public passages. The rest of the conversation, the
    answer and all results computed from private documents stay on the device.
    """
    if request.prompt.tokens is not None or request.wish.documents == 0:
        return ()
    try:
        if link is not None:
            return await search_cloud(link, query_of(request.prompt.messages), request.wish.documents, egress)
    except LinkError as error:
        log.info("the cloud's documents are not read: %s", error)
    return None if expected or link is not None else ()


async def search_cloud(link: Link, query: str, count: int, egress: Egress) -> tuple[Passage, ...]:
    """At most `count` passages of the cloud; `egress` counts the bytes sent.

    Raises LinkError where the cloud refuses, is lost or mute, or takes longer than TIMEOUT_S.
    """
    events: asyncio.Queue[SessionFrame] = asyncio.Queue()

    def received(message: SessionFrame) -> None:
        egress.received(message, link.frame_bytes)
        events.put_nowait(message)

    number = link.open_session(received)
    opening = _opening(number, SEARCH, "answer-private", SamplingParams(), query=query, top_k_documents=count)
    try:
        egress.sent(opening, link.send(opening))
        match await _next_of(link, events, TIMEOUT_S):
            case RetrievedPassages(_, passages):
                return tuple(map(_passage, passages[:count]))
            case CloseSession(_, reason):
                raise LinkClosed(reason)
            case _:
                raise LinkClosed("the cloud answers something else")
    finally:
        egress.sent(CloseSession(number, ""), link.detach(number))


async def _next_of(link: Link, events: asyncio.Queue[SessionFrame], seconds: float) -> SessionFrame:
    """The next message of a session. Raises LinkClosed where none comes in time, or the link is lost or mute."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LISTEN_S):
                        return await events.get()
                if link.closed.is_set():
                    raise LinkClosed("the link was lost")
                if link.listen() > MAX_SILENCE_S + (link.rtt or 0.0):
                    raise TimeoutError
    except TimeoutError:
        raise LinkClosed("nothing was heard of the cloud in time") from None


def _passage(found: RetrievedPassage) -> Passage:
    """A passage of no store on this side, so that its KV is not stored."""
    score = min(max(found.score, -1.0), 1.0)
    return Passage(found.document, found.chunk or -1, "", found.text, score, collection="", place=found.place)


ALONE: Final = "autoregressive"  # how the cloud writes them
LEVELS: Final[tuple[Privacy, ...]] = ("open", "document-private")  # of privacy at which a device may ask for them
MAX_TOKENS: Final = 512  # of a text; agents write 160 at most
MAX_CHARACTERS: Final = 64  # that a token may have, on average over a text
MAX_TEXTS, MAX_TEXTS_OF_ONE = 256, 32  # at once, of all devices and of one
PIECE: Final = 16_384  # characters of a message
PATIENCE_S: Final = 10.0  # for the next piece of a text, the first one included

Admit = Callable[[GenerateRequest], Awaitable[Generation]]


@dataclass(slots=True)
class RemoteText:
    """A text of a device's workflow that the cloud's model writes, at the device: one of an agent that reads nothing
    private.

    At the cloud it is an answer of an owner that is the device, so it has the device's places, turns and memory. `run`
    raises LinkError where the cloud refuses, is lost or mute, or sends nonsense. Not handled: a text that goes on after
    its link was lost; the device writes it itself then.
    """

    link: Link
    messages: Sequence[Mapping[str, str]]
    max_tokens: int
    privacy: Privacy
    cache_key: bytes
    egress: Egress
    told: Callable[[int], object] = lambda _: None  # tokens that the cloud has written
    _events: asyncio.Queue[SessionFrame] = field(default_factory=asyncio.Queue)
    _session: int | None = None

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        tokens = characters = 0
        try:
            self._open()
            while True:
                message = await _next_of(self.link, self._events, PATIENCE_S)
                if isinstance(message, CloseSession):
                    if message.reason not in ("stop", "length"):
                        raise LinkClosed(f"the cloud does not write it ({printable(message.reason)[:200]})")
                    reason = cast(FinishReason, message.reason)
                    yield GenerationResult(reason, 0, tokens, WRITE, "an agent's text that the cloud's model writes")
                    return
                if not isinstance(message, WrittenText):
                    continue
                tokens += message.tokens
                self.told(message.tokens)
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
        messages = [ChatMessage(message["role"], message["content"]) for message in self.messages]
        more = {"messages": messages, "max_tokens": self.max_tokens, "cache_key": self.cache_key}
        sampling = SamplingParams(temperature=0.0, seed=0)
        opening = _opening(self._session, WRITE, self.privacy, sampling, **more)
        self.egress.sent(opening, self.link.send(opening))

    def _received(self, message: SessionFrame) -> None:
        if self._events.qsize() > 4 * self.max_tokens:  # nobody reads it, or it is nonsense
            message = CloseSession(message.session, "too many messages")
        self._events.put_nowait(message)


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
            link.send(CloseSession(opening.session, f"{REFUSED}it is busy"))
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
                reason = f"{REFUSED}{refusal}"[:1024]
            except Exception:  # the device must receive a reply in any case
                log.exception("a text could not be written for a device")
                reason = f"{REFUSED}it cannot be written here"
            with suppress(LinkClosed):
                send(CloseSession(session, reason))
        finally:
            log.info("written for a workflow of %s: %s", peer, egress or "nothing, it has gone")

    async def _text(self, request: GenerateRequest, session: int, send: Callable[[SessionFrame], None]) -> str:
        """Send a text piece by piece. Returns why it ended."""
        generation, tokens = await self._admit(request), 0
        try:
            async with aclosing(generation.run()) as events:
                async for event in events:
                    if isinstance(event, GenerationResult):
                        send(WrittenText(session, "", max(0, event.completion_tokens - tokens)))
                        return event.reason
                    tokens += event.tokens
                    send(WrittenText(session, "" if event.thinking else event.text[:PIECE], event.tokens))
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
        AskedPrompt(
            tuple({"role": message.role, "content": message.content} for message in opening.messages),
            template=NO_THINKING,
        ),
        Wish(ALONE, sampling_from_wire(opening.sampling), opening.privacy, documents=0),
        OutputForm(opening.max_tokens, thinking_tokens=0),
        Sources(passages=()),
        Joining(any_device=False),
        Account(
            owner=f"peer:{peer}",  # a peer's clients share its turns in the engine's steps
            guest_key=opening.cache_key.hex() or secrets.token_hex(16),
            trace=opening.trace,
        ),
    )
