"""The session that faces a client: one machine's tokens become text, its end the last event."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from paceline.core.sampling.constraint import Mask
from paceline.engine.base import TextModel
from paceline.errors import LinkClosed, LinkError, PacelineError
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.link.dialer import Link
from paceline.runtime.service import Citation, GenerateEvent, GenerateRequest, GenerationResult, Logprobs, TextDelta
from paceline.runtime.sessions.base import Session
from paceline.runtime.sessions.output_text import AnswerText, logprobs_of
from paceline.runtime.sessions.prompts import PromptSet
from paceline.strategies.base import (
    Cancelled,
    Emit,
    Finish,
    FinishReason,
    LinkBack,
    LinkLost,
    Machine,
    Received,
    Retrieved,
    Side,
    Started,
    other,
)
from paceline.wire.messages import CloseSession, OpenSession, RetrievedPassages, SessionFrame, SessionMessage

log = logging.getLogger("paceline.session")

PAUSE_S: Final = 60.0  # that an answer waits for a peer which was lost, where the client wants that


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """What `Node.prepare` has settled of a request before anything runs."""

    request: GenerateRequest
    side: Side
    strategy: str
    reason: str  # of the choice of the strategy
    prompts: PromptSet
    room: int  # output tokens that fit the context
    opening: Callable[[int, tuple[int, ...], int], OpenSession]  # (session, targets, epoch)
    missing: str | None  # the peer was wanted and is not there
    peer_name: str | None  # whose return is worth waiting for
    mask: Mask | None = None  # what the answer is held to
    claim: int = 0  # rows that all branches take together at most


class ClientSession(Session):
    """Writes one answer for a client. `run` yields its text; closing that iterator cancels it.

    The queue between machine and reader is bounded by the answer itself: `max_tokens` pieces at most.
    """

    def __init__(
        self,
        machine: Machine,
        worker: EngineWorker,
        prepared: PreparedRequest,
        tokenizer: TextModel,
        link: Link | None,
        closed: Callable[[ClientSession], None],
    ) -> None:
        super().__init__(machine, worker)
        self.prepared = prepared
        self._prefixes = prepared.prompts.prefixes
        self._citations = prepared.prompts.citations(prepared.side)
        self._group = worker.group(prepared.claim)
        self.link = link
        self._tokenizer = tokenizer
        self._text = AnswerText(tokenizer, prepared.request.stop)
        self._closed = closed
        self._events: asyncio.Queue[GenerateEvent | PacelineError] = asyncio.Queue()
        self._stopped = False  # by a stop string
        self._pending_tokens = 0
        self._pending_logprobs: list[Logprobs] = []
        self._lane: Side | None = None
        self._lanes: Counter[Side] = Counter()
        self._tokens: list[int] = []
        self._degraded = prepared.missing
        self._given_up: asyncio.TimerHandle | None = None  # while a lost peer is waited for
        self._peer_found: tuple[Citation, ...] = ()

    async def run(self) -> AsyncIterator[GenerateEvent]:
        self.deliver(Started(self._loop.time()))
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, PacelineError):
                    raise event
                yield event
                if isinstance(event, GenerationResult):
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
            self._number = self.link.open_session(self._heard)
            opening = self.prepared.opening(self._number, targets, epoch)
            self.egress.sent(opening, self.link.send(opening))
        except LinkError as error:  # gone, too many sessions on it, or a conversation too long for a frame
            log.info("the %s cannot take part: %s", other(self.prepared.side), error)
            self.link_lost(returns=isinstance(error, LinkClosed))

    def drop(self) -> None:
        log.warning("the %s takes too long", other(self.prepared.side))
        self.link_lost()  # it may be gone without a word, which the link notices about as late

    def _heard(self, message: SessionFrame) -> None:
        match message:
            case RetrievedPassages(_, passages):
                side = other(self.prepared.side)
                self._peer_found = tuple(
                    Citation(side, passage.document or "a private document", passage.text, passage.score)
                    for passage in passages
                )
            case CloseSession(_, reason):
                log.warning("the %s left an answer: %s", other(self.prepared.side), reason)
                self.link_lost(returns=False)
            case SessionMessage():
                self.deliver(Received(message, self._loop.time()))
            case _:
                pass

    def link_lost(self, *, returns: bool = True) -> None:
        """The peer is gone: the answer goes on alone, or waits, or ends, as the client wants.

        returns: `link_back` may follow; else nothing is worth waiting for.
        """
        if self.link is not None and self._number is not None:
            self.egress.sent(CloseSession(self._number, ""), self.link.detach(self._number))
        self.link, self._number = None, None
        wanted, peer = self.prepared.request.on_loss, other(self.prepared.side)
        if wanted == "fail" or (wanted == "pause" and not returns):
            self.fail(PacelineError(f"the {peer} was lost, and the answer was not to go on alone"))
            return
        if wanted == "pause":
            if self._given_up is None:
                self._given_up = self._loop.call_later(PAUSE_S, self._give_up)
        else:
            self._degraded = self._degraded or f"{peer}_lost"
        self.deliver(LinkLost())

    def link_back(self, link: Link) -> None:
        if self.link is None and not self._driver.finished:
            self.link = link
            self.deliver(LinkBack())

    def _give_up(self) -> None:
        self.fail(PacelineError(f"the {other(self.prepared.side)} was lost and has not come back within {PAUSE_S:g} s"))

    def _stop_waiting(self) -> None:
        if self._given_up is not None:
            self._given_up.cancel()
            self._given_up = None

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._stop_waiting()

    # ---- ports ------------------------------------------------------------------------------------------------------
    def retrieve(self) -> None:
        self.deliver(Retrieved(self.prepared.prompts.branches, self.prepared.room))

    def emit(self, token: Emit) -> None:
        if self._stopped:
            return
        self._stop_waiting()  # not sooner: a link that comes and goes must not keep the client for ever
        self._tokens.append(token.token)
        self._pending_tokens += 1
        if token.lane is not None:
            self._lane = token.lane
            self._lanes[token.lane] += 1
        logprobs = self._logprobs(token)
        if logprobs is not None:
            self._pending_logprobs.append(logprobs)
        text, stopped = self._text.push(token.token)
        self._piece(text)
        if stopped:
            self._stopped = True
            self.deliver(Cancelled("stop"))

    def _logprobs(self, token: Emit) -> Logprobs | None:
        top = self.prepared.request.top_logprobs
        return None if top is None or token.dist is None else logprobs_of(self._tokenizer, token.token, token.dist, top)

    def _piece(self, text: str) -> None:
        if not text and not self._pending_logprobs:
            return
        self._events.put_nowait(TextDelta(text, self._pending_tokens, self._lane, tuple(self._pending_logprobs)))
        self._pending_tokens, self._lane, self._pending_logprobs = 0, None, []

    def finish(self, finish: Finish) -> None:
        super().finish(finish)
        if not self._stopped:
            text, self._stopped = self._text.flush()
            self._piece(text)
        prepared = self.prepared
        if finish.stats.get("alone") and self._degraded is None:
            self._degraded = f"{other(prepared.side)}_lost"
        self._events.put_nowait(
            GenerationResult(
                reason=self._reason(finish.reason),
                prompt_tokens=prepared.prompts.longest,
                completion_tokens=len(self._tokens),
                strategy=prepared.strategy,
                why=prepared.reason,
                degraded=self._degraded,
                citations=self._cited(),
                found=self._citations,
                stats={**finish.stats, "cached_tokens": self._cached, **self.egress.stats()},
                end=None if self._stopped or finish.end is None else self._logprobs(finish.end),
            )
        )

    def _reason(self, reason: FinishReason) -> FinishReason:
        """An answer that ended before it kept its constraint was cut off, whatever the machine says: its law had no
        token left (the constraint grew too intricate), or a peer sent one that breaks it."""
        if self._stopped:
            return "stop"
        mask = self.prepared.mask
        return "length" if reason == "stop" and mask is not None and not mask.complete(self._tokens) else reason

    def _cited(self) -> tuple[Citation, ...]:
        """The passages that were read by the sides that decided at least one token."""
        own = self._citations if self._lanes[self.prepared.side] else ()
        return (*own, *(self._peer_found if self._lanes[other(self.prepared.side)] else ()))
