"""Places of answers under way, and an answer that is written in stretches, a session for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from paceline.core.energy import EnergyUse
from paceline.core.fair import FairQueue
from paceline.core.policy import PRIVACY_LEVELS
from paceline.core.side import SIDES
from paceline.errors import RequestError
from paceline.runtime.questions import BETWEEN
from paceline.runtime.service import Citation, GenerateEvent, GenerateRequest, Generation, GenerationResult, TextDelta
from paceline.runtime.sessions.client import ClientSession
from paceline.runtime.sessions.output_text import is_refusal

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


# An answer to a question in parts: each is answered in turn, by a search of its own and by whom it finds.
#
# One context or one mixture for all of it goes on with the part that it has begun with, and leaves the other out or
# fills it from the wrong document. Each part's text is that of the part asked alone, with a seed of its own.


class Parts:
    """Generation of such an answer, as if it were one."""

    def __init__(
        self,
        first: Generation,
        later: Sequence[GenerateRequest],
        prepare: Callable[[GenerateRequest], Awaitable[Generation]],
    ) -> None:
        """first: of the first part. later: requests of the others, which `prepare` begins."""
        self._part, self._later, self._prepare = first, later, prepare

    @property
    def prompt_tokens(self) -> int:
        return self._part.prompt_tokens

    async def run(self) -> AsyncIterator[GenerateEvent]:
        ended: list[GenerationResult] = []
        for following in (*self._later, None):
            begins = bool(ended)
            async with aclosing(self._part.run()) as events:  # type: ignore[type-var]  # every one is a generator
                async for event in events:
                    if begins:  # not before: a client that reads slowly has a place meanwhile
                        begins = False
                        yield TextDelta(BETWEEN, 0)
                    if isinstance(event, GenerationResult):
                        ended.append(event)
                    else:
                        yield event
            if following is None or ended[-1].reason != "stop" or ended[-1].stop:
                break
            if (limit := following.output.max_tokens) is not None:
                left = limit - sum(part.completion_tokens for part in ended)
                if left <= 0:
                    ended[-1] = replace(ended[-1], reason="length")
                    break
                following = replace(following, output=replace(following.output, max_tokens=left))
            self._part = await self._prepare(following)
        reasons = "; ".join(dict.fromkeys(part.strategy_reason for part in ended))
        yield replace(joined(ended), strategy_reason=f"each part of the question is answered in turn: {reasons}")

    async def aclose(self) -> None:
        await self._part.aclose()


def joined(parts: Sequence[GenerationResult]) -> GenerationResult:
    """The result of an answer from those of its stretches."""
    first, last = parts[0], parts[-1]
    searches = sum(part.stats.get("searches", 1.0) for part in parts)
    if first is last:
        return replace(last, stats={**last.stats, "searches": searches})
    names = dict.fromkeys(name for part in parts for name in part.stats)
    stats = {name: sum(part.stats.get(name, 0.0) for part in parts) for name in names}
    return replace(
        last,
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(part.completion_tokens for part in parts),
        degraded=next((part.degraded for part in parts if part.degraded), None),
        citations=_once(citation for part in parts for citation in part.citations),
        found=_once(citation for part in parts for citation in part.found),
        policy=next((part.policy for part in sorted(parts, key=_strictness) if part.policy is not None), None),
        stats=stats | {"cached_tokens": first.stats["cached_tokens"], "searches": searches},
        energy={side: _sum(uses) for side in SIDES if (uses := [p.energy[side] for p in parts if side in p.energy])},
        records=tuple(record for part in parts for record in part.records),
    )


def _strictness(part: GenerationResult) -> int:
    """The strictest first."""
    return 0 if part.policy is None else -PRIVACY_LEVELS.index(part.policy.level)


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
# Shared by the nodes of all models of a program.


MAX_ANSWERS: Final = 1152  # at once, of which one owner may have 1,024; further requests get 429
MAX_WAITING: Final = 1024  # requests at once
ROOM_S: Final = 0.05  # a request waits for a place: one that is given back is not empty until somebody asks again
RETRY_AFTER_S: Final = 1


class AnswerPlaces:
    """Belongs to one event loop. An owner of "" is everybody without a key, and has no place kept for it."""

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
