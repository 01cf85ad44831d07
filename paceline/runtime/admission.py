"""Places of answers under way, and an answer that is written in stretches, a session for each."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from paceline.core.energy import EnergyUse
from paceline.core.fair import FairQueue
from paceline.core.policy import PRIVACY_LEVELS
from paceline.core.side import SIDES
from paceline.errors import RequestError
from paceline.runtime.questions import BETWEEN
from paceline.runtime.service import (
    GenerateEvent,
    GenerateRequest,
    Generation,
    GenerationResult,
    TextDelta,
    each_once,
)
from paceline.runtime.sessions.client import ClientSession
from paceline.runtime.sessions.output_text import is_refusal


class InTurn(ABC):
    """Generation of one answer whose parts are written one after the other."""

    between = ""  # parts

    def __init__(self, first: Generation) -> None:
        self._part = first

    @abstractmethod
    async def following(self, ended: list[GenerationResult]) -> Generation | None:
        """The part behind those that have ended, whose last result it may change. Raises PacelineError."""

    @abstractmethod
    def result(self, ended: Sequence[GenerationResult]) -> GenerationResult:
        """Of the whole answer."""

    @property
    def prompt_tokens(self) -> int:
        return self._part.prompt_tokens

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        ended: list[GenerationResult] = []
        part: Generation | None = self._part
        while part is not None:
            self._part, before = part, self.between if ended else ""
            async with aclosing(part.run()) as events:
                async for event in events:
                    if before:  # not earlier: a client that reads slowly has a place meanwhile
                        yield TextDelta(before, 0)
                        before = ""
                    if isinstance(event, GenerationResult):
                        ended.append(event)
                    else:
                        yield event
            part = await self.following(ended)
        yield self.result(ended)

    async def aclose(self) -> None:
        await self._part.aclose()


class Stretches(InTurn):
    """An answer of one stretch or more: one for which documents are searched for again as it grows, or that is handed
    over, has a session for each.

    What both sides found for one stretch decides its tokens alone, so a text depends on where searches are, which is
    every so many tokens, and not on drafts, times or losses. Not handled: drafts across a search. At its end a stretch
    is decided before the next search begins, so that every search costs a round trip, the search, and the forward of
    what it finds.
    """

    def __init__(self, session: ClientSession, go_on: Callable[[ClientSession], Awaitable[ClientSession]]) -> None:
        """go_on: prepares the stretch after one that has ended. Raises PacelineError."""
        super().__init__(session)
        self._session = session
        self._go_on = go_on

    async def following(self, ended: list[GenerationResult]) -> Generation | None:  # noqa: ARG002
        if not self._session.goes_on:
            return None
        self._session = await self._go_on(self._session)
        return self._session

    def result(self, ended: Sequence[GenerationResult]) -> GenerationResult:
        refuses = is_refusal(self._session.written.said, self._session.prepared.refusals)  # a stretch may be a part
        return replace(joined(ended), citations=()) if refuses else joined(ended)


class Parts(InTurn):
    """An answer to a question in parts: each is answered in turn, by a search of its own and by whom it finds.

    One context or one mixture for all of it goes on with the part that it has begun with, and leaves the other out or
    fills it from the wrong document. Each part's text is that of the part asked alone, with a seed of its own.
    """

    between = BETWEEN

    def __init__(
        self,
        first: Generation,
        later: Sequence[GenerateRequest],
        prepare: Callable[[GenerateRequest], Awaitable[Generation]],
    ) -> None:
        """first: of the first part. later: requests of the others, which `prepare` begins."""
        super().__init__(first)
        self._later, self._prepare = [*later], prepare

    async def following(self, ended: list[GenerationResult]) -> Generation | None:
        if not self._later or ended[-1].reason != "stop" or ended[-1].stop:
            return None
        request = self._later.pop(0)
        if (limit := request.output.max_tokens) is not None:
            left = limit - sum(part.completion_tokens for part in ended)
            if left <= 0:
                ended[-1] = replace(ended[-1], reason="length")
                return None
            request = replace(request, output=replace(request.output, max_tokens=left))
        return await self._prepare(request)

    def result(self, ended: Sequence[GenerationResult]) -> GenerationResult:
        reasons = "; ".join(dict.fromkeys(part.strategy_reason for part in ended))
        return replace(joined(ended), strategy_reason=f"each part of the question is answered in turn: {reasons}")


def joined(parts: Sequence[GenerationResult]) -> GenerationResult:
    """The result of an answer from those of its stretches."""
    first, last = parts[0], parts[-1]
    searches = sum(part.stats.get("searches", 1.0) for part in parts)
    if first is last:
        return replace(last, stats={**last.stats, "searches": searches})
    names = dict.fromkeys(name for part in parts for name in part.stats)
    policies = [part.policy for part in parts if part.policy is not None]
    stats = {name: sum(part.stats.get(name, 0.0) for part in parts) for name in names}
    return replace(
        last,
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(part.completion_tokens for part in parts),
        degraded=next((part.degraded for part in parts if part.degraded), None),
        citations=each_once(citation for part in parts for citation in part.citations),
        found=each_once(citation for part in parts for citation in part.found),
        policy=max(policies, key=lambda each: PRIVACY_LEVELS.index(each.level), default=None),  # the strictest
        stats=stats | {"cached_tokens": first.stats["cached_tokens"], "searches": searches},
        energy={side: _sum(uses) for side in SIDES if (uses := [p.energy[side] for p in parts if side in p.energy])},
        records=tuple(record for part in parts for record in part.records),
    )


def _sum(uses: Sequence[EnergyUse]) -> EnergyUse:
    total = uses[0]
    for use in uses[1:]:
        total = EnergyUse(total.meter, total.computed.plus(use.computed), total.sent.plus(use.sent))
    return total


MAX_ANSWERS: Final = 1152  # at once, of which one owner may have 1,024; further requests get 429
MAX_WAITING: Final = 1024  # requests at once
ROOM_S: Final = 0.05  # a request waits for a place: one that is given back is not empty until somebody asks again
RETRY_AFTER_S: Final = 1


class AnswerPlaces:
    """Places of answers under way, of all models of a program: how many there are, who waits for one, and the refusal.

    Belongs to one event loop. An owner of "" is everybody without a key, and has no place kept for it.
    """

    def __init__(self) -> None:
        self._queue = FairQueue(MAX_ANSWERS, waiting=MAX_WAITING)
        self._shares = self._queue.shares  # of owners

    async def wait_for_room(self, owner: str) -> None:
        """Wait briefly until this owner may have a place, which is not kept for it. Raises RequestError (429)."""
        called = asyncio.Event()

        def call() -> None:
            self._shares.give_back(owner)  # somebody else may take it before this request does: then it waits again
            called.set()

        try:
            async with asyncio.timeout(ROOM_S):
                while not self._shares.has_room(owner) and self._queue.enter(owner, call):
                    await called.wait()
                    called.clear()
        except TimeoutError:
            pass
        finally:
            self._queue.leave(call)
        if not self._shares.has_room(owner):
            raise self._full(owner)

    def take(self, owner: str, *, anyhow: bool = False) -> None:
        """Take a place. anyhow: whether there is room or not. Raises RequestError (429) where there is none."""
        if anyhow:
            self._shares.force(owner)
        elif not self._shares.take(owner):
            raise self._full(owner)

    def give_back(self, owner: str) -> None:
        self._queue.give_back(owner)

    def _full(self, owner: str) -> RequestError:
        return RequestError(
            f"This server is writing {self._shares.taken} answers of {MAX_ANSWERS} at most, and "
            f"{self._shares.held(owner)} of them for this key. Please try again in {RETRY_AFTER_S} s.",
            status=429,
            type="rate_limit_error",
            code="rate_limit_exceeded",
        )
