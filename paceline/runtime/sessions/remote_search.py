"""The cloud's passages for an answer that the device writes alone: the privacy level `answer-private`.

The device sends the query: the last question verbatim, preceded by the previous one where it refers to that, 1,000
characters at most (`rag.prompt.query_of`). The cloud sends public passages. The rest of the conversation, the answer
and all results computed from private documents stay on the device. The session generates no text: it is opened with
`SEARCH` as the strategy and without messages, answered with `RetrievedPassages`, and closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal

from paceline.core.sampling.sampler import SamplingParams
from paceline.core.shares import Shares
from paceline.errors import LinkClosed, LinkError
from paceline.rag.chunk import MAX_PLACE
from paceline.rag.prompt import MAX_QUERY, passages_text, query_of
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.link.connection import Link
from paceline.runtime.service import GenerateRequest
from paceline.runtime.sessions.egress import Egress
from paceline.runtime.units.plain_work import PlainWork
from paceline.wire.codec import encode_options, sampling_to_wire
from paceline.wire.messages import SEARCH, CloseSession, OpenSession, RetrievedPassage, RetrievedPassages, SessionFrame
from paceline.wire.options import DEFAULT_OPTIONS

log = logging.getLogger("paceline.session")

TIMEOUT_S: Final = 5.0  # for the cloud's reply
LISTEN_S: Final = 0.25  # between two looks at the link meanwhile
MAX_SILENCE_S: Final = 1.5  # of the link: a cloud that searches for long is heard
CACHE_S: Final = 10.0  # for which an outcome is reused for the same query
MAX_CACHED: Final = 256  # outcomes
MAX_SEARCHES: Final = 32  # at once, of all devices: they share the thread pool
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


def search_opening(session: int, query: str, count: int) -> OpenSession:
    """The opening of a search: all that a device sends at this privacy level."""
    return OpenSession(
        session=session,
        strategy=SEARCH,
        messages=[],
        query=query,
        sampling=sampling_to_wire(SamplingParams()),
        max_tokens=0,
        top_k_documents=count,
        privacy="answer-private",
        options=encode_options(DEFAULT_OPTIONS),
        targets=[],
        epoch=0,
        constraint=None,
        asker="",
    )


class RemoteSearch:
    """Searches of a device. Recent outcomes are cached, because one answer may be prepared several times."""

    def __init__(self) -> None:
        # (link, owner, query, count) -> (expiry, passages or the reason why there are none)
        self._cache: dict[tuple[Link, str, str, int], tuple[float, tuple[Passage, ...] | str]] = {}

    async def for_answer(
        self, request: GenerateRequest, link: Link | None, egress: Egress, *, expected: bool
    ) -> Sequence[Passage] | None:
        """Passages of the cloud for an answer at `answer-private`, none at other levels; None where the cloud cannot be
        searched. expected: a cloud is configured for this device."""
        if request.privacy != "answer-private" or request.prompt is not None or request.documents == 0:
            return ()
        try:
            if link is not None:
                return await self.passages(link, query_of(request.messages), request.documents, egress, request.owner)
        except LinkError as error:
            log.info("the cloud's documents are not read: %s", error)
        return None if expected or link is not None else ()

    async def passages(
        self, link: Link, query: str, count: int, egress: Egress, owner: str = ""
    ) -> tuple[Passage, ...]:
        """Search the cloud for at most `count` passages; `egress` counts the bytes sent.

        Raises LinkError where the cloud refuses, is lost or mute, or takes longer than TIMEOUT_S.
        """
        loop = asyncio.get_running_loop()
        self._cache = {key: entry for key, entry in self._cache.items() if entry[0] > loop.time()}
        key = link, owner, query, count
        if key not in self._cache:
            outcome: tuple[Passage, ...] | str
            try:
                outcome = await _search(link, query, count, egress)
            except LinkError as error:
                outcome = str(error)
            if len(self._cache) < MAX_CACHED:
                self._cache[key] = loop.time() + CACHE_S, outcome
                loop.call_later(CACHE_S, self._cache.pop, key, None)  # the cloud may have removed it meanwhile
        else:
            outcome = self._cache[key][1]
        if isinstance(outcome, str):
            raise LinkClosed(outcome)
        return outcome


async def _search(link: Link, query: str, count: int, egress: Egress) -> tuple[Passage, ...]:
    answered: asyncio.Future[tuple[Passage, ...]] = asyncio.get_running_loop().create_future()

    def received(message: SessionFrame) -> None:
        if answered.done():
            return
        match message:
            case RetrievedPassages(_, passages):
                answered.set_result(tuple(map(_passage, passages[:count])))
            case CloseSession(_, reason):
                answered.set_exception(LinkClosed(reason))
            case _:
                pass

    def link_lost(_: asyncio.Future[Literal[True]]) -> None:
        if not answered.done():
            answered.set_exception(LinkClosed("the link was lost"))

    number = link.open_session(received)
    lost = asyncio.ensure_future(link.closed.wait())
    lost.add_done_callback(link_lost)
    try:
        opening = search_opening(number, query, count)
        egress.sent(opening, link.send(opening))
        async with asyncio.timeout(TIMEOUT_S):
            while not answered.done():
                await asyncio.wait({answered}, timeout=LISTEN_S)
                if not answered.done() and link.listen() > MAX_SILENCE_S + (link.rtt or 0.0):
                    raise TimeoutError
            return answered.result()
    except TimeoutError:
        raise LinkClosed("nothing was heard in time") from None
    finally:
        answered.cancel()  # no caller waits for it any more
        lost.cancel()
        egress.sent(CloseSession(number, ""), link.detach(number))


class SearchServer:
    """Searches that devices request from the cloud."""

    def __init__(self) -> None:
        self._shares = Shares(MAX_SEARCHES)  # of devices; an abandoned search runs to its end

    async def answer(
        self,
        link: Link,
        peer: str,
        opening: OpenSession,
        store: DocumentStore | None,
        work: PlainWork,
        *,
        max_passages: int,
    ) -> None:
        """Search and reply; without a store no passage is found."""
        egress, session = Egress(), opening.session
        found, reason = RetrievedPassages(session, []), "stop"
        if store is not None and not self._shares.take(peer):
            reason = "refused: it is busy"
        elif store is not None:
            query, count = opening.query[:MAX_QUERY], min(opening.top_k_documents, max_passages)
            try:
                found = RetrievedPassages(session, to_wire(await work.search(partial(store.search, query, count))))
            except Exception:  # the device must receive a reply in any case
                log.exception("a device's search failed")
                reason = "refused: its documents cannot be searched"
            finally:
                self._shares.give_back(peer)
        close = CloseSession(session, reason)
        with suppress(LinkClosed):
            for message in (found, close) if reason == "stop" else (close,):
                egress.sent(message, link.send(message))
        log.info("sent to the other side for a search: %s", egress or "nothing, it has gone")


def _passage(found: RetrievedPassage) -> Passage:
    """A passage of no store on this side, so that its KV is not stored."""
    score = min(max(found.score, -1.0), 1.0)
    return Passage(found.document, found.chunk or -1, "", found.text, score, collection="", place=found.place)
