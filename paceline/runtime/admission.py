"""From a request to its answer's sessions: a place for each answer, its first session, and the next one where it is
written in stretches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from paceline.core.energy import EnergyUse
from paceline.core.shares import Shares, WaitingLine
from paceline.core.side import SIDES
from paceline.errors import RequestError
from paceline.runtime.preparation import Preparation
from paceline.runtime.service import Citation, GenerateEvent, GenerateRequest, GenerationResult
from paceline.runtime.sessions.client import ClientSession, is_refusal
from paceline.runtime.sessions.driver import Egress

# An answer for which documents are searched for again as it grows: a session for each stretch of it.
#
# What both sides found for one stretch decides its tokens alone, so a text depends on where searches are, which is
# every so many tokens, and not on drafts, times or losses. The client sees one answer. Not handled: drafts across a
# search. At its end a stretch is decided before the next search begins, so that every search costs a round trip, the
# search, and the forward of what it finds.


GoOn = Callable[[ClientSession], Awaitable[ClientSession]]


class Stretches:
    """Generation of one answer, of one stretch or more."""

    def __init__(self, session: ClientSession, go_on: GoOn) -> None:
        """go_on: prepares the stretch after one that has ended. Raises PacelineError."""
        self.session = session
        self._go_on = go_on

    @property
    def prompt_tokens(self) -> int:
        return self.session.prompt_tokens

    async def run(self) -> AsyncIterator[GenerateEvent]:
        ended: list[GenerationResult] = []
        while True:
            async with aclosing(self.session.run()) as events:  # type: ignore[type-var]  # every one is a generator
                async for event in events:
                    if isinstance(event, GenerationResult):
                        ended.append(event)
                    else:
                        yield event
            if not self.session.goes_on:
                break
            self.session = await self._go_on(self.session)
        done = joined(ended)
        if is_refusal(self.session.written.said, self.session.prepared.refusals):  # of which a stretch may be a part
            done = replace(done, citations=())
        yield done

    async def aclose(self) -> None:
        await self.session.aclose()


def joined(parts: Sequence[GenerationResult]) -> GenerationResult:
    """The result of an answer from those of its stretches."""
    first, last = parts[0], parts[-1]
    if first is last:
        return replace(last, stats={**last.stats, "searches": 1.0})
    names = dict.fromkeys(name for part in parts for name in part.stats)
    stats = {name: sum(part.stats.get(name, 0.0) for part in parts) for name in names}
    return replace(
        last,
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(part.completion_tokens for part in parts),
        degraded=next((part.degraded for part in parts if part.degraded), None),
        citations=_once(citation for part in parts for citation in part.citations),
        found=_once(citation for part in parts for citation in part.found),
        stats=stats | {"cached_tokens": first.stats["cached_tokens"], "searches": float(len(parts))},
        energy={side: _sum(uses) for side in SIDES if (uses := [p.energy[side] for p in parts if side in p.energy])},
    )


def _once(citations: Iterable[Citation]) -> tuple[Citation, ...]:
    """Each passage as it was found first."""
    known: dict[Hashable, Citation] = {}
    for each in citations:
        known.setdefault((each.side, each.document, each.chunk_id, each.peer_chunk, each.passage, each.url), each)
    return tuple(known.values())


def _sum(uses: Sequence[EnergyUse]) -> EnergyUse:
    total = uses[0]
    for use in uses[1:]:
        total = EnergyUse(total.meter, total.computed.plus(use.computed), total.sent.plus(use.sent))
    return total


# Places of answers under way: how many there are, who waits for one, and the refusal.
#
# Shared by the nodes of all models of a program. Fair shares of owners: `core.shares`.


MAX_ANSWERS: Final = 1152  # at once, of which one owner may have 1,024; further requests get 429
MAX_WAITING: Final = 1024  # requests at once
ROOM_S: Final = 0.05  # a request waits for a place: one that is given back is not empty until somebody asks again
RETRY_AFTER_S: Final = 1


class AnswerPlaces:
    """Belongs to one event loop. An owner of "" is everybody without a key, and has no place kept for it."""

    def __init__(self) -> None:
        self._shares = Shares(MAX_ANSWERS)  # of owners
        self._line = WaitingLine(self._shares, MAX_WAITING)

    async def wait_for_room(self, owner: str) -> None:
        """Wait briefly until this owner may have a place, which is not kept for it. Raises RequestError (429)."""
        if self._has_room(owner):
            return
        called = asyncio.Event()
        try:
            async with asyncio.timeout(ROOM_S):
                while self._line.enter(owner, called.set, alone=not owner):
                    await called.wait()
                    if self._has_room(owner):
                        return
                    called.clear()
        except TimeoutError:
            pass
        finally:
            self._line.leave(called.set)
        self.check_room(owner)

    def check_room(self, owner: str) -> None:
        """Raises RequestError (429) where this owner has no room now."""
        if not self._has_room(owner):
            raise _full(self._shares.taken, self._shares.held(owner))

    def take(self, owner: str) -> None:
        """Take a place, whether there is room or not."""
        self._shares.force(owner)

    def give_back(self, owner: str) -> None:
        self._line.give_back(owner)

    def _has_room(self, owner: str) -> bool:
        return self._shares.has_room(owner, alone=not owner)


def _full(taken: int, held: int) -> RequestError:
    """taken: answers under way; held: of them, those of the key that wants another."""
    return RequestError(
        f"This server is writing {taken} answers of {MAX_ANSWERS} at most, and {held} of them for this key. "
        f"Please try again in {RETRY_AFTER_S} s.",
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
    )


# Admission of answers: a place for each, its session, and the next session where an answer is written in stretches.


log = logging.getLogger("paceline.node")


class Admission:
    """Belongs to the event loop of a node."""

    def __init__(self, preparation: Preparation, places: AnswerPlaces, clients: set[ClientSession]) -> None:
        """clients: the sessions under way."""
        self._preparation = preparation
        self._places = places
        self._clients = clients
        self.preparing = 0  # admitted requests without a session yet

    async def prepare(self, request: GenerateRequest) -> ClientSession | Stretches:
        """An answer without a workflow. Raises as `Service.prepare`."""
        session = await self.admit(request)
        whole = session.prepared.end >= session.prepared.limit
        return session if whole else Stretches(session, self._go_on)

    async def check(self, request: GenerateRequest) -> None:
        """Raises as `prepare` would now. Takes no place."""
        self._places.check_room(request.account.owner)
        await self._preparation.prepared(request, Egress())

    async def admit(self, request: GenerateRequest, *, has_place: bool = False) -> ClientSession:
        """The first session of an answer. has_place: it is part of a workflow, which takes one."""
        if not has_place:
            self._places.check_room(request.account.owner)
        return await self._begin(
            request.account.owner, lambda egress: self._preparation.prepare(request, egress, self._closed)
        )

    async def _go_on(self, earlier: ClientSession) -> ClientSession:
        """The next stretch of an answer, in the place of the one that has ended."""
        prepared = earlier.prepared
        return await self._begin(
            prepared.request.account.owner, lambda egress: self._preparation.go_on(earlier, egress, self._closed)
        )

    async def _begin(self, owner: str, prepare: Callable[[Egress], Awaitable[ClientSession]]) -> ClientSession:
        self._places.take(owner)
        self.preparing += 1
        egress = Egress()
        try:
            session = await prepare(egress)
        except BaseException:
            self._places.give_back(owner)
            if egress:
                log.info("sent to the other side for an answer that was not begun: %s", egress)
            raise
        finally:
            self.preparing -= 1
        self._clients.add(session)
        return session

    def _closed(self, session: ClientSession) -> None:
        if session in self._clients:
            self._clients.discard(session)
            self._places.give_back(session.prepared.request.account.owner)
