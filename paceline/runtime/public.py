"""The cloud's passages for an answer that the device writes alone: the privacy level `answer-private`.

What to search for goes up, public passages come down; the conversation, the answer and all that is computed of private
documents stay on the device. The session has a kind of its own, in which nobody generates: opened with `SEARCH` for a
strategy and without messages, answered with `Found`, and closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from typing import Final, Literal

from paceline.core.sampling import SamplingParams
from paceline.errors import LinkClosed
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage
from paceline.rag.store import DocumentStore
from paceline.runtime.connection import Link
from paceline.runtime.egress import Egress
from paceline.wire.codec import sampling_to_wire
from paceline.wire.messages import CloseSession, Drafting, Found, FoundPassage, OpenSession, SessionMessage

log = logging.getLogger("paceline.session")

SEARCH: Final = "search"  # in place of a strategy
PATIENCE_S: Final = 5.0  # for what the cloud finds
MOST_NAME, MOST_TEXT = 1024, 16_384  # characters, of what is told of a passage


def told(passage: Passage) -> FoundPassage:
    """What a device may know of a cloud's passage: all a model reads of it."""
    return FoundPassage(passage.document[:MOST_NAME], passages_text(passage)[:MOST_TEXT], passage.score)


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
        rule="",
        wide=False,
        rescoring=False,
        drafting=Drafting(1, 1, 0, False),
        targets=[],
        epoch=0,
        constraint=None,
    )


async def public_passages(link: Link, query: str, count: int, egress: Egress) -> tuple[Passage, ...]:
    """What the cloud finds. `egress` is told what goes up.

    Raises LinkError where the cloud refuses, is lost, or takes longer than PATIENCE_S.
    """
    answered: asyncio.Future[tuple[Passage, ...]] = asyncio.get_running_loop().create_future()

    def heard(message: SessionMessage | Found | CloseSession) -> None:
        if answered.done():
            return
        match message:
            case Found(_, passages):
                answered.set_result(tuple(_passage(passage) for passage in passages if math.isfinite(passage.score)))
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
        link.detach(number)


async def answer_search(link: Link, opening: OpenSession, store: DocumentStore | None, *, most: int) -> None:
    """The cloud's part. Without documents nothing is found. most: passages at once."""
    count = min(opening.top_k_documents, most)
    try:
        passages = [] if store is None else await asyncio.to_thread(store.search, opening.query, count)
    except Exception:  # whatever it is, the device must hear of it
        log.exception("a device's search failed")
        with suppress(LinkClosed):
            link.send(CloseSession(opening.session, "refused: its documents cannot be searched"))
        return
    with suppress(LinkClosed):
        link.send(Found(opening.session, [told(passage) for passage in passages]))
        link.send(CloseSession(opening.session, "stop"))


def _passage(found: FoundPassage) -> Passage:
    """Of no store on this side, so nothing of it is kept."""
    return Passage(found.document, -1, "", found.text, min(max(found.score, -1.0), 1.0), collection="")
