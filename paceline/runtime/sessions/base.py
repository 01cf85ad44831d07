"""One machine on a real engine, link and clock. `PeerSession` helps the peer; for a client see `front`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from paceline.core.batching.scheduler import Group
from paceline.core.batching.segment import Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.errors import EngineError, LinkClosed, PacelineError
from paceline.runtime.engine_loop.executor import SequenceOp
from paceline.runtime.engine_loop.prefix_reuse import StoredPrefix
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.link.dialer import Link
from paceline.runtime.sessions.driver import Driver
from paceline.runtime.sessions.egress import Egress
from paceline.strategies.base import (
    Branch,
    Cancelled,
    Emit,
    Event,
    Finish,
    LinkLost,
    Machine,
    Received,
    Retrieved,
    Scored,
    Started,
    TimerFired,
)
from paceline.wire.messages import (
    CloseSession,
    RetrievedPassages,
    SessionFrame,
    SessionMessage,
)

log = logging.getLogger("paceline.session")

# How often it is looked, and how often in a row a peer's answer may be found to wait for memory: then the peer must do
# without this side.
MEMORY_LOOK_S, MEMORY_LOOKS = 1.0, 2


class Session(ABC):
    """The ports that both kinds share. Lives on one event loop; every method is called there."""

    def __init__(self, machine: Machine, worker: EngineWorker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._driver = Driver(machine, self)
        self._prefixes: Sequence[StoredPrefix] = ()  # what its prompts begin with
        self._group: Group | None = None  # of its sequences, once it is known what they claim
        self._cached = 0  # tokens that one prompt begins with and that need not be computed, at most
        self.link: Link | None = None
        self._number: int | None = None  # of this session on `link`
        self.egress = Egress()

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
                self.deliver(Scored(ticket, result, self._loop.time(), self._worker.answered))

        prefix = next((prefix for prefix in self._prefixes if prefix.begins(segment)), None)
        if prefix is not None and prefix.rows is not None:
            self._cached = max(self._cached, len(prefix.tokens))
        self._worker.forward(segment, answer, prefix, self._group)

    def commit(self, seq: SeqId, keep: tuple[int, ...], rest: tuple[int, ...] = ()) -> None:
        self._worker.control(SequenceOp.commit(seq, keep, rest))

    def release(self, seq: SeqId) -> None:
        self._worker.control(SequenceOp.release(seq))

    def send(self, message: SessionMessage) -> None:
        if self._number is not None:  # else the link was lost in the same breath; the machine hears of it next
            self._post(msgspec.structs.replace(message, session=self._number))

    def wake_at(self, time: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(time, self._woke)

    def _woke(self) -> None:
        known = (None, None) if self.link is None else (self.link.rtt, self.link.bandwidth)
        self.deliver(TimerFired(self._loop.time(), *known))

    @abstractmethod
    def emit(self, token: Emit) -> None: ...

    @abstractmethod
    def retrieve(self) -> None: ...

    @abstractmethod
    def open(self, targets: tuple[int, ...], epoch: int) -> None: ...

    @abstractmethod
    def drop(self) -> None: ...

    def finish(self, finish: Finish) -> None:
        self._end(finish.reason)

    # ---- shared -----------------------------------------------------------------------------------------------------
    def _post(self, message: SessionFrame) -> None:
        if self.link is None:
            return
        with contextlib.suppress(LinkClosed):  # the node will say so with `link_lost`, once for all its sessions
            self.egress.sent(message, self.link.send(message))

    def _end(self, reason: str) -> None:
        """Close the session with the peer and let go of the clock."""
        if self._timer is not None:
            self._timer.cancel()
        if self.link is not None and self._number is not None:
            self._post(CloseSession(self._number, reason))
            self.link.detach(self._number)
        self.link, self._number = None, None
        if self.egress:
            log.info("sent to the other side for an answer: %s", self.egress)


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
        self._admission: asyncio.TimerHandle | None = None  # while it may still be waiting for memory
        link.attach(number, self._heard)

    def begin(self) -> None:
        self.deliver(Started(self._loop.time()))

    def retrieved(
        self,
        branches: Sequence[Branch],
        room: int,
        found: RetrievedPassages,
        prefixes: Sequence[StoredPrefix] = (),
        *,
        claim: int = 0,
    ) -> None:
        """claim: rows that all branches take together at most."""
        if not self._driver.finished and self._number is not None:
            self._prefixes, self._group = prefixes, self._worker.group(claim)
            self._post(msgspec.structs.replace(found, session=self._number))
            self.deliver(Retrieved(tuple(branches), room))
            # Else answers of both sides could wait for each other, each with the memory that the other's waits for.
            self._look_at_memory(0)

    def _look_at_memory(self, found_short: int) -> None:
        if self._group is None or self._driver.finished or self._worker.has_begun(self._group):
            return
        found_short = found_short + 1 if self._worker.lacks_memory(self._group) else 0  # its turn may be long in coming
        if found_short > MEMORY_LOOKS:
            self.refuse("its memory is taken by other answers")
        else:
            self._admission = self._loop.call_later(MEMORY_LOOK_S, self._look_at_memory, found_short)

    def _end(self, reason: str) -> None:
        super()._end(reason)
        if self._admission is not None:
            self._admission.cancel()

    def fail(self, error: PacelineError) -> None:
        super().fail(error)
        self._closed(self)

    def refuse(self, why: str) -> None:
        """The peer must do without this side."""
        log.info("an answer of the peer's is not taken part in: %s", why)
        self._driver.abandon()
        self._end(f"refused: {why}"[:1024])
        self._closed(self)

    def link_lost(self) -> None:
        self.link, self._number = None, None
        self.deliver(LinkLost())

    def _heard(self, message: SessionFrame) -> None:
        match message:
            case CloseSession():
                self.deliver(Cancelled("cancelled"))
            case SessionMessage():
                self.deliver(Received(message, self._loop.time()))
            case _:
                pass  # passages for citations: the client is not here

    def retrieve(self) -> None:
        self._retrieve(self)

    def emit(self, token: Emit) -> None:
        raise AssertionError(f"only the side that faces the client emits: {token.token}")

    def open(self, targets: tuple[int, ...], epoch: int) -> None:
        raise AssertionError(f"only the side that faces the client opens a session: {len(targets)}, {epoch}")

    def drop(self) -> None:
        raise AssertionError("only the side that faces the client gives its peer up")

    def finish(self, finish: Finish) -> None:
        super().finish(finish)
        self._closed(self)
