"""The cloud's passages for an answer that the device writes alone: the privacy level `answer-private`.

What to search for goes up: the last question word for word, with the one before where it points back, 1,000 characters
at most (`rag.prompt.query_of`). Public passages come down. The rest of the conversation, the answer and all that is
computed of private documents stay on the device. The session has a kind of its own, in which nobody generates: opened
with `SEARCH` for a strategy and without messages, answered with `Found`, and closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Literal

from paceline.core.sampling.sampler import SamplingParams
from paceline.errors import LinkClosed, LinkError
from paceline.rag.prompt import MAX_QUERY, passages_text, query_of
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.link.connection import Link
from paceline.runtime.service import GenerateRequest
from paceline.runtime.sessions.egress import Egress
from paceline.wire.codec import encode_options, sampling_to_wire
from paceline.wire.messages import (
    DEFAULT_OPTIONS,
    CloseSession,
    OpenSession,
    RetrievedPassage,
    RetrievedPassages,
    SessionFrame,
)

log = logging.getLogger("paceline.session")

SEARCH: Final = "search"  # in place of a strategy
PATIENCE_S: Final = 5.0  # for what the cloud finds
KEPT_S: Final = 10.0  # that a search's outcome counts for the same query again
MOST_KEPT: Final = 256  # outcomes
MOST_SEARCHES: Final = 32  # at once, of all devices: they share threads with all else
MOST_NAME, MOST_TEXT = 1024, 16_384  # characters, of what is told of a passage
MOST_BYTES: Final = 1 << 19  # of all passages in one message


def to_wire(passages: Sequence[Passage]) -> list[RetrievedPassage]:
    """What a device may know of a cloud's passages: all a model reads of them. The first, as many as fit a frame."""
    found: list[RetrievedPassage] = []
    room = MOST_BYTES
    for passage in passages:
        name, text = passage.document[:MOST_NAME], passages_text(passage)[:MOST_TEXT]
        room -= len(name.encode()) + len(text.encode())
        if room < 0:
            break
        found.append(RetrievedPassage(name, text, passage.score))
    return found


def search_opening(session: int, query: str, count: int) -> OpenSession:
    """All that ever goes up at this level."""
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
    )


class RemoteSearch:
    """The device's part. Of late searches the outcome is remembered: one answer may be prepared several times."""

    def __init__(self) -> None:
        self._known: dict[tuple[Link, str, int], tuple[float, tuple[Passage, ...] | str]] = {}  # or why there are none

    async def for_answer(
        self, request: GenerateRequest, link: Link | None, egress: Egress, *, expected: bool
    ) -> Sequence[Passage] | None:
        """What the cloud finds for an answer that it must not see, nothing where it may not be asked; None where it
        cannot be. expected: a cloud belongs to this device."""
        if request.privacy != "answer-private" or request.prompt is not None or request.documents == 0:
            return ()
        try:
            if link is not None:
                return await self.passages(link, query_of(request.messages), request.documents, egress)
        except LinkError as error:
            log.info("the cloud's documents are not read: %s", error)
        return None if expected or link is not None else ()

    async def passages(self, link: Link, query: str, count: int, egress: Egress) -> tuple[Passage, ...]:
        """What the cloud finds, `count` at most. `egress` is told what goes up.

        Raises LinkError where the cloud refuses, is lost, or takes longer than PATIENCE_S.
        """
        loop = asyncio.get_running_loop()
        self._known = {key: kept for key, kept in self._known.items() if kept[0] > loop.time()}
        key = link, query, count
        if key not in self._known:
            outcome: tuple[Passage, ...] | str
            try:
                outcome = await _asked(link, query, count, egress)
            except LinkError as error:
                outcome = str(error)
            if len(self._known) < MOST_KEPT:
                self._known[key] = loop.time() + KEPT_S, outcome
        else:
            outcome = self._known[key][1]
        if isinstance(outcome, str):
            raise LinkClosed(outcome)
        return outcome


async def _asked(link: Link, query: str, count: int, egress: Egress) -> tuple[Passage, ...]:
    answered: asyncio.Future[tuple[Passage, ...]] = asyncio.get_running_loop().create_future()

    def heard(message: SessionFrame) -> None:
        if answered.done():
            return
        match message:
            case RetrievedPassages(_, passages):
                answered.set_result(tuple(map(_passage, passages[:count])))
            case CloseSession(_, reason):
                answered.set_exception(LinkClosed(reason))
            case _:
                pass

    def gone(_: asyncio.Future[Literal[True]]) -> None:
        if not answered.done():
            answered.set_exception(LinkClosed("the link was lost"))

    number = link.open_session(heard)
    lost = asyncio.ensure_future(link.closed.wait())
    lost.add_done_callback(gone)
    try:
        opening = search_opening(number, query, count)
        egress.sent(opening, link.send(opening))
        async with asyncio.timeout(PATIENCE_S):
            return await answered
    except TimeoutError:
        raise LinkClosed(f"nothing was heard for {PATIENCE_S:g} s") from None
    finally:
        answered.cancel()  # where nobody waits for it any more
        lost.cancel()
        egress.sent(CloseSession(number, ""), link.detach(number))


class SearchServer:
    """The cloud's part."""

    def __init__(self) -> None:
        self._running = 0  # of all devices; one that was given up runs to its end

    async def answer(self, link: Link, opening: OpenSession, store: DocumentStore | None, *, most: int) -> None:
        """Without documents nothing is found. most: passages at once."""
        egress, session = Egress(), opening.session
        found, reason = RetrievedPassages(session, []), "stop"
        if self._running >= MOST_SEARCHES:
            reason = "refused: it is busy"
        elif store is not None:
            self._running += 1
            query, count = opening.query[:MAX_QUERY], min(opening.top_k_documents, most)
            try:
                found = RetrievedPassages(session, to_wire(await asyncio.to_thread(store.search, query, count)))
            except Exception:  # whatever it is, the device must hear of it
                log.exception("a device's search failed")
                reason = "refused: its documents cannot be searched"
            finally:
                self._running -= 1
        close = CloseSession(session, reason)
        with suppress(LinkClosed):
            for message in (found, close) if reason == "stop" else (close,):
                egress.sent(message, link.send(message))
        log.info("sent to the other side for a search: %s", egress or "nothing, it has gone")


def _passage(found: RetrievedPassage) -> Passage:
    """Of no store on this side, so nothing of it is kept."""
    return Passage(found.document, -1, "", found.text, min(max(found.score, -1.0), 1.0), collection="")
