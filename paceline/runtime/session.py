"""One machine on a real engine, link and clock: `FrontSession` faces a client, `PeerSession` helps the peer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import msgspec

from paceline.core.dist import Dist
from paceline.core.segments import Segment, SeqId
from paceline.engine.contract import TextModel
from paceline.errors import EngineError, LinkClosed, PacelineError
from paceline.runtime.driver import Driver
from paceline.runtime.link import Link
from paceline.runtime.service import Citation, Done, GenerateEvent, GenerateRequest, Piece, TokenLogprob
from paceline.runtime.steps import Control
from paceline.runtime.text import AnswerText, logprobs_of
from paceline.runtime.worker import EngineWorker
from paceline.strategies.machine import (
    Branch,
    Cancelled,
    Emit,
    Event,
    Finish,
    LinkBack,
    LinkLost,
    Machine,
    Received,
    Retrieved,
    Scored,
    Side,
    Started,
    Woke,
    other,
)
from paceline.wire.messages import (
    CloseSession,
    DraftTokens,
    Found,
    Have,
    OpenSession,
    SessionMessage,
    Targets,
)

log = logging.getLogger("paceline.session")


class Session(ABC):
    """The ports that both kinds share. Lives on one event loop; every method is called there."""

    def __init__(self, machine: Machine, worker: EngineWorker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._driver = Driver(machine, self)
        self.link: Link | None = None
        self._number: int | None = None  # of this session on `link`

    def deliver(self, event: Event) -> None:
        """Tell the machine. A fault in it ends this session, not the program."""
        try:
            self._driver.deliver(event)
        except Exception as error:
            log.exception("a session failed")
            self.fail(PacelineError(f"the answer cannot go on: {error}"))

    def fail(self, error: PacelineError) -> None:
        """End without the machine."""
        log.warning("an answer ended early: %s", error)
        self._driver.abandon()
        self._end("error")

    # ---- ports ------------------------------------------------------------------------------------------------------
    def allocate(self) -> SeqId:
        return self._worker.allocate()

    def forward(self, ticket: int, segment: Segment) -> None:
        def answer(result: tuple[Dist, ...] | EngineError) -> None:
            if self._driver.finished:
                return
            if isinstance(result, EngineError):
                self.fail(result)
            else:
                self.deliver(Scored(ticket, result))

        self._worker.forward(segment, answer)

    def commit(self, seq: SeqId, keep: tuple[int, ...]) -> None:
        self._worker.control(Control.commit(seq, keep))

    def truncate(self, seq: SeqId, length: int) -> None:
        self._worker.control(Control.truncate(seq, length))

    def release(self, seq: SeqId) -> None:
        self._worker.control(Control.release(seq))

    def send(self, message: SessionMessage) -> None:
        if self._number is not None:  # else the link was lost in the same breath; the machine hears of it next
            self._post(msgspec.structs.replace(message, session=self._number))

    def wake_at(self, time: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(time, lambda: self.deliver(Woke(self._loop.time())))

    @abstractmethod
    def emit(self, token: Emit) -> None: ...

    @abstractmethod
    def retrieve(self) -> None: ...

    @abstractmethod
    def open(self, targets: tuple[int, ...], epoch: int) -> None: ...

    def finish(self, finish: Finish) -> None:
        self._end(finish.reason)

    # ---- shared -----------------------------------------------------------------------------------------------------
    def _post(self, message: SessionMessage | CloseSession | Found) -> None:
        if self.link is None:
            return
        with contextlib.suppress(LinkClosed):  # the node will say so with `link_lost`, once for all its sessions
            self.link.send(message)

    def _end(self, reason: str) -> None:
        """Close the session with the peer and let go of the clock."""
        if self._timer is not None:
            self._timer.cancel()
        if self.link is not None and self._number is not None:
            self._post(CloseSession(self._number, reason))
            self.link.detach(self._number)
        self.link, self._number = None, None


@dataclass(frozen=True, slots=True)
class Plan:
    """What `Node.prepare` has settled of a request before anything runs."""

    request: GenerateRequest
    side: Side
    strategy: str
    why: str
    branches: tuple[Branch, ...]
    citations: tuple[Citation, ...]  # one a branch that reads a document
    prompt_tokens: int
    opening: Callable[[int, tuple[int, ...], int], OpenSession]  # (session, targets, epoch)
    missing: str | None  # the peer was wanted and is not there
    peer_name: str | None  # whose return is worth waiting for


class FrontSession(Session):
    """Writes one answer for a client. `run` yields its text; closing that iterator cancels it.

    The queue between machine and reader is bounded by the answer itself: `max_tokens` pieces at most.
    """

    def __init__(
        self,
        machine: Machine,
        worker: EngineWorker,
        plan: Plan,
        tokenizer: TextModel,
        link: Link | None,
        closed: Callable[[FrontSession], None],
    ) -> None:
        super().__init__(machine, worker)
        self.plan = plan
        self.link = link
        self._tokenizer = tokenizer
        self._text = AnswerText(tokenizer, plan.request.stop)
        self._closed = closed
        self._events: asyncio.Queue[GenerateEvent | PacelineError] = asyncio.Queue()
        self._stopped = False  # by a stop string
        self._pending_tokens = 0
        self._pending_logprobs: list[tuple[TokenLogprob, tuple[TokenLogprob, ...]]] = []
        self._lane: Side | None = None
        self._lanes: Counter[Side] = Counter()
        self._completion_tokens = 0
        self._degraded = plan.missing
        self._peer_found: tuple[Citation, ...] = ()

    async def run(self) -> AsyncIterator[GenerateEvent]:
        self.deliver(Started(self._loop.time()))
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, PacelineError):
                    raise event
                yield event
                if isinstance(event, Done):
                    return
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        self.deliver(Cancelled("cancelled"))
        self._closed(self)

    def fail(self, error: PacelineError) -> None:
        super().fail(error)
        self._events.put_nowait(error)

    # ---- the link ---------------------------------------------------------------------------------------------------
    def open(self, targets: tuple[int, ...], epoch: int) -> None:
        try:
            if self.link is None:
                raise LinkClosed("the link was lost before the session was opened")
            number = self.link.open_session(self._heard)
            self.link.send(self.plan.opening(number, targets, epoch))
            self._number = number
        except LinkClosed:
            self.link_lost()

    def _heard(self, message: SessionMessage | Found | CloseSession) -> None:
        match message:
            case DraftTokens() | Targets() | Have():
                self.deliver(Received(message))
            case Found(_, passages):
                side = other(self.plan.side)
                self._peer_found = tuple(
                    Citation(side, passage.document or "a private document", passage.text, passage.score)
                    for passage in passages
                )
            case CloseSession(_, reason):
                log.warning("the %s left an answer: %s", other(self.plan.side), reason)
                self.link_lost()

    def link_lost(self) -> None:
        """The peer is gone: the answer goes on alone, if the client wants that."""
        if self.link is not None and self._number is not None:
            self.link.detach(self._number)
        self.link, self._number = None, None
        lost = f"{other(self.plan.side)}_lost"
        if self.plan.request.on_loss == "fail":
            self.fail(PacelineError(f"the {other(self.plan.side)} was lost, and the answer was not to go on alone"))
            return
        self._degraded = self._degraded or lost
        self.deliver(LinkLost())

    def link_back(self, link: Link) -> None:
        if self.link is None and not self._driver.finished:
            self.link = link
            self.deliver(LinkBack())

    # ---- ports ------------------------------------------------------------------------------------------------------
    def retrieve(self) -> None:
        self.deliver(Retrieved(self.plan.branches))

    def emit(self, token: Emit) -> None:
        if self._stopped:
            return
        self._completion_tokens += 1
        self._pending_tokens += 1
        if token.lane is not None:
            self._lane = token.lane
            self._lanes[token.lane] += 1
        if self.plan.request.top_logprobs is not None and token.dist is not None:
            self._pending_logprobs.append(
                logprobs_of(self._tokenizer, token.token, token.dist, self.plan.request.top_logprobs)
            )
        text, stopped = self._text.push(token.token)
        self._piece(text)
        if stopped:
            self._stopped = True
            self.deliver(Cancelled("stop"))

    def _piece(self, text: str) -> None:
        if not text and not self._pending_logprobs:
            return
        self._events.put_nowait(Piece(text, self._pending_tokens, self._lane, tuple(self._pending_logprobs)))
        self._pending_tokens, self._lane, self._pending_logprobs = 0, None, []

    def finish(self, finish: Finish) -> None:
        super().finish(finish)
        if not self._stopped:
            text, self._stopped = self._text.flush()
            self._piece(text)
        plan = self.plan
        if finish.stats.get("alone") and self._degraded is None:
            self._degraded = f"{other(plan.side)}_lost"
        self._events.put_nowait(
            Done(
                reason="stop" if self._stopped else finish.reason,
                prompt_tokens=plan.prompt_tokens,
                completion_tokens=self._completion_tokens,
                strategy=plan.strategy,
                why=plan.why,
                degraded=self._degraded,
                citations=self._cited(),
                stats=dict(finish.stats),
            )
        )

    def _cited(self) -> tuple[Citation, ...]:
        """The passages of the sides that decided at least one token."""
        found = (*self.plan.citations, *self._peer_found)
        return tuple(citation for citation in found if self._lanes[citation.side])


class PeerSession(Session):
    """Takes part in an answer whose client is at the peer."""

    def __init__(
        self,
        machine: Machine,
        worker: EngineWorker,
        link: Link,
        number: int,
        retrieve: Callable[[PeerSession], None],
        closed: Callable[[PeerSession], None],
    ) -> None:
        super().__init__(machine, worker)
        self.link, self._number = link, number
        self._retrieve = retrieve
        self._closed = closed
        link.attach(number, self._heard)

    def begin(self) -> None:
        self.deliver(Started(self._loop.time()))

    def retrieved(self, branches: Sequence[Branch], found: Found) -> None:
        if not self._driver.finished and self._number is not None:
            self._post(msgspec.structs.replace(found, session=self._number))
            self.deliver(Retrieved(tuple(branches)))

    def fail(self, error: PacelineError) -> None:
        super().fail(error)
        self._closed(self)

    def link_lost(self) -> None:
        self.link, self._number = None, None
        self.deliver(LinkLost())

    def _heard(self, message: SessionMessage | Found | CloseSession) -> None:
        match message:
            case DraftTokens() | Targets() | Have():
                self.deliver(Received(message))
            case CloseSession():
                self.deliver(Cancelled("cancelled"))

    def retrieve(self) -> None:
        self._retrieve(self)

    def emit(self, token: Emit) -> None:
        raise AssertionError(f"only the side that faces the client emits: {token.token}")

    def open(self, targets: tuple[int, ...], epoch: int) -> None:
        raise AssertionError(f"only the side that faces the client opens a session: {len(targets)}, {epoch}")

    def finish(self, finish: Finish) -> None:
        super().finish(finish)
        self._closed(self)
