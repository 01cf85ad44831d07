"""The session that faces a client: tokens of one machine become text events, its end the last event."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Final, cast

from paceline.core.batching.pending import Group
from paceline.core.printable import printable
from paceline.engine.base import TextModel
from paceline.engine.families import Piece
from paceline.errors import LinkClosed, LinkError, PacelineError, RequestError
from paceline.rag.prompt import query_of
from paceline.runtime.engine_loop.worker import Worker
from paceline.runtime.link.connection import Link
from paceline.runtime.service import Citation, GenerateEvent, GenerationResult, Logprobs, TextDelta, each_once
from paceline.runtime.sessions.base import EngineSequences, Session
from paceline.runtime.sessions.driver import ClientPorts, Driver, Ports, Timeline
from paceline.runtime.sessions.handoff import Watch
from paceline.runtime.sessions.output_text import AnswerText, Written, is_refusal, logprobs_of
from paceline.runtime.sessions.prepared import AloneWay, PreparedRequest
from paceline.runtime.sessions.prompts import REUSED, peer_citations, sharing_words
from paceline.strategies.base import (
    Cancelled,
    Emit,
    Event,
    Finish,
    FinishReason,
    Forward,
    LinkBack,
    LinkLost,
    Machine,
    Received,
    Retrieved,
    Sampled,
    Scored,
    Side,
    Started,
    TimerFired,
    other,
)
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import REFUSED, Approximate, CloseSession, RetrievedPassages, SessionFrame, SessionMessage

log = logging.getLogger("paceline.session")

MAX_REFUSAL: Final = 300  # characters of it that are told
MIN_TIMED: Final = 16  # tokens of an answer that tells how long one takes
PAUSE_S: Final = 60.0  # longest wait for a lost peer, for a request with on_loss "pause"


class Ahead(EngineSequences):
    """The text that is this side's alone if the peer finds nothing, written while that searches, and told to nobody
    before it has said so. Has those of `driver.Ports` and `driver.ClientPorts` that a machine without a peer uses."""

    def __init__(self, session: ClientSession, worker: Worker, machine: Machine, group: Group) -> None:
        super().__init__(worker)
        self._session, self._group = session, group
        self._emitted: list[Emit] = []
        self._finished: Finish | None = None
        self._told = False
        self.driver = Driver(machine, cast("Ports", self), cast("ClientPorts", self))

    def deliver(self, event: Event) -> None:
        self._session.guarded(self.driver, event)

    def tell(self) -> None:
        """Give the session what has been written so far, and from now on at once."""
        self._told, finished = True, self._finished
        for token in self._emitted:
            self._session.emit(token)
        if finished is not None:
            self._session.finish(finished)

    def drop(self) -> None:
        self.driver.abandon()
        self._cancel_timer()

    # ---- ports ------------------------------------------------------------------------------------------------------
    def _woken(self) -> None:
        self.deliver(TimerFired(self._loop.time()))

    def forward(self, forward: Forward) -> None:
        self._session.compute(forward, self.driver, self.deliver, self._group)

    def retrieve(self) -> None:
        prepared = self._session.prepared
        self.deliver(Retrieved(prepared.prompts.branches, prepared.max_new_tokens))

    def emit(self, token: Emit) -> None:
        if self._told:
            self._session.emit(token)
        else:
            self._emitted.append(token)

    def finish(self, finish: Finish) -> None:
        self._cancel_timer()
        self._finished = finish
        if self._told:
            self._session.finish(finish)


class ClientSession(Session):
    """Writes one answer for a client. `run` yields its text; closing that iterator cancels it.

    The queue between machine and reader holds at most `max_tokens` deltas.
    """

    def __init__(
        self,
        machine: Machine,
        worker: Worker,
        prepared: PreparedRequest,
        tokenizer: TextModel,
        link: Link | None,
        closed: Callable[[ClientSession], None],
        drafts: Worker | None = None,
        written: Written | None = None,
        alone: Sequence[AloneWay | None] = (None, None),
    ) -> None:
        """drafts: of the draft model, where the machine is told of one. written: in earlier stretches of the answer.
        alone: how this side writes where the peer has found nothing, and where that has found what does not answer;
        None: as it does with the peer."""
        super().__init__(machine, worker, prepared.salt, drafts, client=self, masked=prepared.mask is not None)
        if drafts is not None and self._drafts is not None:
            self._drafts.group = drafts.group(prepared.draft_claim or 0)
        self._prefixes = prepared.prompts.prefixes  # here alone: let go of at the end
        self.prepared = replace(prepared, prompts=replace(prepared.prompts, prefixes=()))
        self.trace = prepared.request.account.trace
        self._citations = prepared.prompts.citations(prepared.side)
        asked = prepared.request
        self._group: Group = self._grouped()
        self.link = link
        self._tokenizer = tokenizer
        min_tokens = 0 if asked.output.constraint is None else asked.output.constraint.min_tokens
        text = AnswerText(tokenizer, asked.output.stop, min_tokens, prepared.thinking)
        self.written = written or Written(text)
        self.before, self._thought = len(self.written.tokens), self.written.text.thought
        self.goes_on = False  # it has ended, and a further stretch follows
        self._closed = closed
        self._doubt = REUSED if prepared.prompts.reuses else worker.doubt
        self._certainty.approximate |= prepared.prompts.reuses
        self._events: asyncio.Queue[GenerateEvent | PacelineError] = asyncio.Queue()
        self._stopped = False  # by a stop string or token
        self._stop_token: Emit | None = None
        self._lane: Side | None = None
        self._lanes: Counter[Side] = Counter()
        self._deciding: set[int] = set()  # branches that decided a token against others of this side
        self._degraded = prepared.missing
        self._too_slow = False  # the peer was passed over or given up for it
        self._pause: asyncio.TimerHandle | None = None  # set while waiting for a lost peer
        self._peer_citations: tuple[Citation, ...] = ()
        self._alone, self._alone_unanswered = alone
        self._ahead: Ahead | None = None  # of `_alone`
        self._peer_found_nothing = False  # as it says
        self._began: float | None = None  # s, when the first token came
        self.token_s: float | None = None  # of an answer long enough to tell
        self._peer_approximate = False
        self._hands_over = False  # the other side writes on what this one has begun by itself

    @property
    def prompt_tokens(self) -> int:
        return self.prepared.prompts.longest

    def _grouped(self) -> Group:
        asked = self.prepared.request.account
        return self._worker.group(self.prepared.claim, owner=asked.owner, criticality=asked.criticality)

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        self._driver.timeline = self._watched(self.prepared)
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
    def open_peer(self, targets: tuple[int, ...], epoch: int) -> None:
        try:
            if self.link is None:
                raise LinkClosed("the link was lost before the session was opened")
            self._leave_session()
            self._number = self.link.open_session(self._received)
            self._group = replace(self._group, line=(id(self.link), self._number))
            opening = self.prepared.opening(self._number, targets, epoch)
            self._sent(opening, self.link.send(opening))
        except LinkError as error:  # closed, too many sessions, or a conversation too long for a frame
            log.info("the %s cannot take part: %s", other(self.prepared.side), error, extra={"id": self.trace})
            self.link_lost(returns=isinstance(error, LinkClosed))

    def _watched(self, prepared: PreparedRequest) -> Timeline | None:
        """What a machine's driver notes in, where the client wants a timeline."""
        told, text_of = self.egress.timeline, STRATEGIES[prepared.strategy].text_of
        return None if told is None else told.beside("device" if text_of == "cloud" else prepared.side)

    @property
    def _writer(self) -> Side:
        """Whose tokens these are, where no document decided them."""
        theirs = self.link is not None and STRATEGIES[self.prepared.strategy].text_of == "cloud"
        return "cloud" if theirs else self.prepared.side

    def _note(self, kind: str, of: str = "", *, side: Side | None = None) -> None:
        if self.egress.timeline is not None:
            self.egress.timeline.note(kind, of=of, side=side)

    def pass_over(self, reason: str) -> None:
        peer = other(self.prepared.side)
        self._note("passed_over", side=peer)
        log.warning("the %s is passed over: %s", peer, reason, extra={"id": self.trace})
        self._degraded = self._degraded or f"{peer}_lost"
        self._mark_slow()
        self._say_unanswered()

    def _mark_slow(self) -> None:
        if not self._too_slow:
            self.written.pass_over()
        self._too_slow = True

    def close_peer(self, fault: str) -> None:
        why = fault or "it takes too long"
        log.warning("the %s is given up: %s", other(self.prepared.side), why, extra={"id": self.trace})
        self.written.faulty = self.written.faulty or bool(fault)
        if not fault:
            self._mark_slow()
        self.link_lost(returns=not fault)  # the link may be dead, which its heartbeat notices about as late

    def _received(self, message: SessionFrame) -> None:
        if self.link is not None:
            self.egress.received(message, self.link.frame_bytes)
        match message:
            case RetrievedPassages(_, passages, unanswered):
                if unanswered and self._alone_unanswered is not None and not self.prepared.prompts.passages:
                    self._drop_ahead()
                    self._alone = self._alone_unanswered
                self._peer_citations = peer_citations(other(self.prepared.side), passages)
                self._peer_found_nothing = not passages
                if passages:
                    self._drop_ahead()
                self._go_on_alone()
            case Approximate():
                self._peer_approximate = True
            case CloseSession(_, reason):
                reason = printable(reason[:MAX_REFUSAL])
                log.warning("the %s left an answer: %s", other(self.prepared.side), reason, extra={"id": self.trace})
                refusal = reason.removeprefix(REFUSED) if reason.startswith(REFUSED) else ""
                self.link_lost(returns=False, refusal="its context is full" if reason == "length" else refusal)
            case SessionMessage():
                if not self._leaves:
                    self.deliver(Received(message, self._loop.time()))
            case _:
                pass

    @property
    def _leaves(self) -> bool:
        """The peer has found nothing and the text is this side's: the peer is left before the first token."""
        return self._alone is not None and self._peer_found_nothing and not self.written.tokens

    def _deliver(self, event: Event) -> None:
        super()._deliver(event)
        self._go_on_alone()
        if isinstance(event, Scored | Sampled):
            self._write_ahead()

    def _say_unanswered(self) -> bool:
        """Where this side has found what does not answer, take a peer that is lost before the first token for one that
        has found nothing, and miss it. True where the answer goes on so."""
        says_so = self.prepared.prompts.unanswered and self.prepared.unanswered_mask is not None
        if self._alone is None or not says_so or self.written.tokens:
            return False
        prepared, machine = self._alone
        self._alone, self._peer_found_nothing = (replace(prepared, missing=self._degraded), machine), True
        self._go_on_alone(within=not self._masked)  # the loss may be an effect, and others follow it
        return True

    def _go_on_alone(self, *, within: bool = False) -> None:
        """Leave the peer that is to be left, between two events of the machine, which may wait for a mask in one.
        within: it does not."""
        driver = self._driver
        if self._alone is None or not self._leaves or (driver.running and not within) or driver.finished:
            return
        (self.prepared, machine), self._alone = self._alone, None
        self._masked = self.prepared.mask is not None
        driver.abandon()
        self._note("strategy", self.prepared.strategy)
        self._leave_session("the answer is written without it")
        self.link = None
        self._cancel_pause()
        self._degraded = self.prepared.missing  # nothing was lost by a peer that came late
        if (ahead := self._ahead) is not None:
            self._ahead, self._driver = None, ahead.driver
            ahead.tell()
        else:
            self._driver = Driver(machine(), self, self)
            self._driver.timeline = self._watched(self.prepared)
            self.deliver(Started(self._loop.time()))

    def _write_ahead(self) -> None:
        """Begin to write what is this side's if the peer finds nothing, once the prompts are computed, from whose KV it
        begins. Not with a mask, which follows one machine, nor where memory is too short for both texts."""
        if self._alone is None or self._ahead is not None or self._masked or self._driver.finished:
            return
        if self._alone[0].mask is not None:
            return
        capacity = self._worker.capacity
        if capacity is not None and 2 * self.prepared.claim > capacity:
            return
        self._ahead = Ahead(self, self._worker, self._alone[1](), self._grouped())
        self._ahead.driver.timeline = self._watched(self._alone[0])
        self._ahead.deliver(Started(self._loop.time()))

    def _drop_ahead(self) -> None:
        self._alone = None
        if self._ahead is not None:
            self._ahead.drop()
            self._ahead = None

    def link_lost(self, *, returns: bool = True, refusal: str = "") -> None:
        """The peer is lost: continue alone, pause, or fail, as the request's `on_loss` says.

        returns: `link_back` may follow; without it a pause fails at once. refusal: why the peer does not take part.
        """
        self._leave_session()
        self.link = None
        if self._leaves:
            return
        self._note("refused" if refusal else "lost", side=other(self.prepared.side))
        on_loss, peer = self.prepared.request.joining.on_loss, other(self.prepared.side)
        if on_loss == "fail" or (on_loss == "pause" and not returns):
            how = f"refuses to take part ({refusal})" if refusal else "was lost"
            self.fail(peer_lost(peer, f"{how}, and the answer was not to go on alone", refused=bool(refusal)))
            return
        self.written.refusal = self.written.refusal or refusal
        if on_loss == "pause":
            if self._pause is None:
                late = peer_lost(peer, f"was lost and has not come back within {PAUSE_S:g} s")
                self._pause = self._loop.call_later(PAUSE_S, self.fail, late)
        else:
            self._degraded = self._degraded or f"{peer}_{'refused' if refusal else 'lost'}"
            if self._say_unanswered():
                return
            self._drop_ahead()
        self.deliver(LinkLost())

    def _leave_session(self, reason: str = "cancelled") -> None:
        if self.link is not None and self._number is not None:
            self._sent(CloseSession(self._number, reason), self.link.detach(self._number, reason))
        self._number = None

    def link_back(self, link: Link) -> None:
        if self.link is None and not (self._driver.finished or self.written.faulty):
            self.link = link
            self._note("back", side=other(self.prepared.side))
            self.deliver(LinkBack())

    def _cancel_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._cancel_pause()
        self._drop_ahead()

    def _listen(self, link: Link) -> float:
        return link.listen()

    # ---- ports ------------------------------------------------------------------------------------------------------
    def retrieve(self) -> None:
        self.deliver(Retrieved(self.prepared.prompts.branches, self.prepared.max_new_tokens))

    def emit(self, token: Emit) -> None:
        if self._stopped:
            return
        self._cancel_pause()  # not earlier: a link that comes and goes must not prolong the pause
        if token.token in self.prepared.request.output.stop_token_ids:  # not in the answer, like the model's own end
            self._stopped, self._stop_token = True, token
            self._put_text(self.written.text.flush()[0], last=True)
            self.deliver(Cancelled("stop"))
            return
        self._began = self._began or self._loop.time()
        self.written.tokens.append(token.token)
        self._note("tokens", side=token.lane or self._writer)
        if token.lane is not None:
            self._lane = token.lane
            self._lanes[token.lane] += 1
        self._deciding |= token.branches or frozenset()
        self.written.pending.append((self.written.text.length, self._logprobs(token)))
        pieces, stopped = self.written.text.push(token.token)
        self._put_text(pieces)
        if stopped:
            self._stopped = True
            self.written.drop_stop_string()
            self.deliver(Cancelled("stop"))

    def _logprobs(self, token: Emit) -> Logprobs | None:
        top = self.prepared.request.wish.top_logprobs
        if top is None or token.dist is None:
            return None
        return logprobs_of(self._tokenizer, token.token, token.dist, top, rest=token.rest)

    def _put_text(self, pieces: Sequence[Piece], *, last: bool = False) -> None:
        written = self.written
        tokens = written.due(text=bool(pieces), last=last)
        if tokens is None:
            return
        *ended, (text, thought) = pieces or [Piece("", written.text.is_thinking)]
        for piece in ended:  # the token that ends the thinking may begin the answer
            self._events.put_nowait(TextDelta(piece.text, 0, self._lane, thinking=piece.thought))
        if not thought and len(written.said) < max(map(len, self.prepared.refusals), default=0) + 2:
            written.said += text
        logprobs = tuple(each for each in tokens if each is not None)
        self._events.put_nowait(TextDelta(text, len(tokens), self._lane, logprobs, thinking=thought))
        self._lane = None

    def finish(self, finish: Finish) -> None:
        super().finish(finish)
        prepared, written = self.prepared, self.written
        by_string = self._stopped and self._stop_token is None
        more = not self._stopped and finish.reason == "length" and len(written.tokens) >= prepared.end < prepared.limit
        self.goes_on = more or self._hands_over
        if prepared.outcome is not None:
            prepared.outcome(int(finish.stats.get("accepted", 0)), int(finish.stats.get("examined", 0)))
        if not (self._stopped or self.goes_on):
            pieces, self._stopped = written.text.flush()
            self._put_text(pieces, last=True)
        end = self._stop_token if self._stopped else finish.end
        if finish.stats.get("alone") and self._degraded is None:
            self._degraded = f"{other(prepared.side)}_lost"
        if self._began is not None and not self._peer_found_nothing and len(written.tokens) - self.before >= MIN_TIMED:
            self.token_s = (self._loop.time() - self._began) / (len(written.tokens) - self.before - 1)
        nothing = prepared.nothing_found if self._peer_found_nothing and not prepared.prompts.passages else ""
        refused = f"it refuses: {written.refusal}" if written.refusal else ""
        approximate = f"approximate: {self._doubt}" if self._certainty.approximate else ""
        theirs = f"approximate at the {other(prepared.side)}" if self._peer_approximate else ""
        stats = {"further_calls": float(calls)} if (calls := self._certainty.further_calls) else {}
        if prepared.thinking is not None:
            stats["reasoning_tokens"] = float(written.text.thought - self._thought)
        if self._hands_over:
            stats["searches"] = 0.0  # the documents of both parts are those of one search
        ends = finish.reason == "stop" and not by_string and self._reason("stop") == "stop"
        fault = prepared.fault(self._degraded, approximate or theirs)
        self._events.put_nowait(
            GenerationResult(
                reason=self._reason(finish.reason),
                prompt_tokens=prepared.prompts.longest,
                completion_tokens=len(written.tokens) - self.before,
                stop=written.text.stop,
                strategy=prepared.strategy,
                strategy_reason="; ".join(filter(None, (prepared.reason, nothing, refused, approximate, theirs))),
                degraded=self._degraded,
                citations=self._cited(),
                found=self._citations,
                stats={**finish.stats, "cached_tokens": self._cached, **stats, **self.egress.stats()},
                energy={} if (use := self._energy.use) is None else {prepared.side: use},
                end=None if end is None else self._logprobs(end),
                timeline=() if (told := self.egress.timeline) is None else told.moments(self._driver.timeline),
                handoff=prepared.handoff,
                records=(prepared.record(written, self.before, self._peer_citations, ends=ends, fault=fault),),
            )
        )

    def _reason(self, reason: FinishReason) -> FinishReason:
        """Finish reason; "length" for a stop before the constraint is satisfied: the distribution had no token left
        (the constraint grew too complex), or a peer sent a token that violates it."""
        if self._stopped:
            return "stop"
        mask = self.prepared.mask
        return "length" if reason == "stop" and mask is not None and not mask.complete(self.written.tokens) else reason

    def _cited(self) -> tuple[Citation, ...]:
        """Passages of the sides that decided at least one token; of this side's those that decided one against others,
        where any did. Which of the peer's did is known to the peer alone. A refusal cites none."""
        if is_refusal(self.written.said, self.prepared.refusals):
            return ()
        if not self._lanes:  # both sides have found the same, and neither decided more than the other
            return each_once((*self._citations, *self._peer_citations))
        own = self._citations if self._lanes[self.prepared.side] else ()
        if self.prepared.prompts.together:
            said = self._tokenizer.decode(self.written.tokens)
            own = sharing_words(own, said, query_of(self.prepared.request.prompt.messages))
        elif self._deciding:
            own = tuple(citation for index, citation in enumerate(own) if index in self._deciding)
        # A workflow may have read the peer's passages as well.
        return each_once((*own, *(self._peer_citations if self._lanes[other(self.prepared.side)] else ())))


class BegunSession(ClientSession):
    """What a device begins by itself, and hands over where it is too unsure."""

    def emit(self, token: Emit) -> None:
        if self._stopped:
            return
        self._tell(self.watch.take(token))
        if self._hands_over:
            self._driver.abandon()
            self.finish(Finish("length"))

    def finish(self, finish: Finish) -> None:
        if finish.reason in ("stop", "length") and not self._hands_over:
            self._tell(self.watch.end(finish.end))
        if not self._hands_over:
            self.prepared = replace(self.prepared, handoff=self.watch.told("device", len(self.written.tokens)))
        super().finish(finish)

    @property
    def watch(self) -> Watch:
        assert self.prepared.watch is not None, "it is prepared so"
        return self.prepared.watch

    def _tell(self, tokens: Sequence[Emit]) -> None:
        """What may be told now, after a look."""
        self._hands_over = self.watch.over
        for token in tokens:
            super().emit(token)


def peer_lost(peer: Side, how: str, *, refused: bool = False) -> RequestError:
    """Error of an answer that requires a peer which is lost, or refuses. how: the end of its sentence."""
    code = f"{peer}_{'refused' if refused else 'lost'}"
    return RequestError(f"the {peer} {how}", status=503, type="server_error", code=code)
