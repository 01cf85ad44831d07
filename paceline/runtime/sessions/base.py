"""One machine on a real engine, link and clock. `PeerSession` serves a peer's client; see `client` for own clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial, reduce
from typing import Final, TypeVar

import msgspec
import numpy as np
from greenlet import getcurrent, greenlet
from numpy.typing import NDArray

from paceline.core.batching.pending import Group
from paceline.core.batching.segment import SeqId
from paceline.core.energy import Energy, EnergyUse
from paceline.core.fair import FairQueue
from paceline.core.sampling.sampler import Mask
from paceline.errors import EngineError, LinkClosed, PacelineError
from paceline.runtime.engine_loop.requests import Rows, SequenceOp, StoredPrefix
from paceline.runtime.engine_loop.worker import BATCHING_WAIT_S, Worker
from paceline.runtime.link.connection import Link
from paceline.runtime.sessions.driver import ClientPorts, Driver, Egress, answered, requests
from paceline.runtime.sessions.prompts import PromptSet
from paceline.runtime.tracing import Fields, Tracer
from paceline.strategies.base import (
    Cancelled,
    DraftModelLost,
    Event,
    Finish,
    Forward,
    FromDraftModel,
    LinkLost,
    Machine,
    Received,
    Retrieved,
    Started,
    TimerFired,
)
from paceline.system import Threads
from paceline.wire import messages
from paceline.wire.messages import REFUSED, Approximate, CloseSession, RetrievedPassages, SessionFrame, SessionMessage


# ---- masks of constraints, computed beside the event loop in turns of their owners ----------------------------------
# A mask over a real vocabulary takes 0.03 ms in most places and, under a schema that is made for it, 30 ms; llguidance
# lets go of the GIL meanwhile. A session that needs one waits for it by itself (`run_apart`), and the loop serves the
# others. An owner has `MOST_OF_ONE` of the threads at most, so that costly schemas hold up their own owner. Not
# handled: taking a token into a path, during which llguidance 1.9 holds the GIL, 16 ms at the worst.
class _Apart(greenlet):
    """Marks the stacks that may be left."""


def run_apart(code: Callable[[], None]) -> None:
    """Run this on a stack of its own until it ends or first waits, as a machine does that asks for a mask in the middle
    of an event; the loop goes on, one thing at a time. It must not raise: what follows a wait has no caller."""
    apart = _Apart(code)
    apart.gr_context = copy_context()  # else none of the caller's variables are set
    apart.switch()


def can_wait() -> bool:
    """True within `run_apart`."""
    return isinstance(getcurrent(), _Apart)


def wait_for(begin: Callable[[Callable[[], None]], None]) -> None:
    """Leave the code here until the callback that `begin` is given is called, by the loop. `begin` must not call it."""
    apart = getcurrent()

    def go_on() -> None:
        apart.parent = getcurrent()  # where it comes back to: not where it was left, which may have ended
        apart.switch()

    begin(go_on)
    assert apart.parent is not None
    apart.parent.switch()


T = TypeVar("T")

THREADS: Final = 4
MOST_OF_ONE: Final = 2  # threads of an owner at once


class MaskThreads:
    """Belongs to one event loop."""

    def __init__(self, worker: Worker) -> None:
        """worker: its steps wait briefly for sessions that masks have held up."""
        self.worker = worker
        self._threads = Threads(THREADS, "masks")
        self._queue = FairQueue(THREADS, most=MOST_OF_ONE)

    def submit(self, owner: str, work: Callable[[], object], done: Callable[[], None]) -> None:
        """Do this on a thread, in its owner's turn, then call `done` on the loop. work: must not raise."""
        self._queue.enter(owner, partial(self._begin, owner, work, done))

    def stop(self) -> None:
        """End the threads once they are done. What waits for its turn is never called back."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _begin(self, owner: str, work: Callable[[], object], done: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def ended(future: Future[object]) -> None:
            if not future.cancelled():
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._ended, owner, done)

        self._threads.submit(work).add_done_callback(ended)

    def _ended(self, owner: str, done: Callable[[], None]) -> None:
        self._queue.give_back(owner)
        done()


class MaskBesideLoop:
    """`core.sampling.sampler.Mask` of one answer, computed on threads where its session can wait for that."""

    def __init__(self, mask: Mask, threads: MaskThreads, owner: str) -> None:
        self._mask = mask
        self._threads = threads
        self._owner = owner
        self._slow = False  # steps do not wait for one that took long the last time

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        return self.at_once(lambda: self._mask.allowed(path))

    def complete(self, path: Sequence[int]) -> bool:
        return self.at_once(lambda: self._mask.complete(path))

    def at_once(self, work: Callable[[], T]) -> T:
        """See `Mask`. The session waits once, however many masks the work asks for: on a thread they are computed."""
        if not can_wait():
            return work()
        found: list[T] = []
        faults: list[Exception] = []

        def attempt() -> None:
            try:
                found.append(work())
            except Exception as fault:  # the session's, which goes on with it
                faults.append(fault)
            self._slow = time.perf_counter() - begun > BATCHING_WAIT_S  # other masks of the owner's included

        begun = time.perf_counter()

        def begin(go_on: Callable[[], None]) -> None:
            worker, expected = self._threads.worker, not self._slow
            if expected:
                worker.expect()

            def done() -> None:
                try:
                    go_on()
                finally:
                    if expected:
                        worker.continued()

            self._threads.submit(self._owner, attempt, done)

        wait_for(begin)
        if faults:
            raise faults[0]
        return found[0]


# ---- sessions -------------------------------------------------------------------------------------------------------
log = logging.getLogger("paceline.session")


class EngineSequences:
    """Sequences on the engine of a worker, as of `driver.EnginePorts`, and a timer, for one machine."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def wake_at(self, time: float) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_at(time, self._woken)

    def _woken(self) -> None:
        """The timer has fired, of a machine that sets one."""

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def allocate(self) -> SeqId:
        return self._worker.allocate()

    def prune(self, seq: SeqId, keep: tuple[int, ...], live: tuple[int, ...]) -> None:
        self._worker.submit(SequenceOp.prune(seq, keep, live))

    def release(self, seq: SeqId) -> None:
        self._worker.submit(SequenceOp.release(seq))


class DraftModelPorts(EngineSequences):
    """A session's sequences on the engine of the draft model, which has a thread of its own.

    Implements `driver.EnginePorts`. The energy of drafts is not counted.
    """

    def __init__(self, worker: Worker, session: Session) -> None:
        super().__init__(worker)
        self.group: Group | None = None  # of its sequences, set by the session, which knows their claim of memory
        self._session = session

    def forward(self, forward: Forward) -> None:
        def answer(result: Rows | EngineError) -> None:
            scored = submitted[0].scored
            submitted.clear()
            if self._session.finished:
                return
            if isinstance(result, EngineError):
                log.warning("an answer goes on without the draft model: %s", result)
                self._session.deliver(DraftModelLost())
                return
            event = answered(forward, result, self._loop.time(), self._worker.answered, scored=scored)
            self._session.deliver(FromDraftModel(event))

        submitted = requests(forward, answer)
        for each in submitted:
            each.group, each.salt = self.group, self._session.salt
            self._worker.submit(each)


class Session(EngineSequences, ABC):
    """Implements `driver.Ports` for both kinds of session. Every method is called on one event loop."""

    def __init__(
        self,
        machine: Machine,
        worker: Worker,
        salt: str | None,
        drafts: Worker | None = None,
        *,
        client: ClientPorts | None = None,
        masked: bool = False,
    ) -> None:
        """client: this session, where it faces a client. drafts: of the draft model, for machines that are told of one.
        salt: KV of its prompts is shared with answers of the same salt alone, which are those of one owner until a
        document is removed. None: with none. masked: the machine waits for masks."""
        super().__init__(worker)
        self._drafts = None if drafts is None else DraftModelPorts(drafts, self)
        self._first = self._driver = Driver(machine, self, client, drafts=self._drafts)
        self._prefixes: Sequence[StoredPrefix] = ()  # stored prefixes of its prompts
        self._group: Group | None = None  # of its sequences, once their claim of memory is known
        self.salt = salt
        self._masked = masked
        self._energy = worker.account()
        self._certainty = worker.certainty()
        self._cached = 0  # tokens of a prompt that were not computed, the most of all branches
        self.link: Link | None = None
        self._number: int | None = None  # session number on `link`
        self.egress = Egress()
        self.trace = ""  # id of the client's request, as the side that faces it says

    def deliver(self, event: Event) -> None:
        """Deliver an event to the machine, which may be done with it later where it waits for masks. An exception there
        ends this session, not the program."""
        if self._masked:
            run_apart(lambda: self._deliver(event))
        else:
            self._deliver(event)

    def _deliver(self, event: Event) -> None:
        self.guarded(self._driver, event)

    def guarded(self, driver: Driver, event: Event) -> None:
        """Deliver an event to a driver of this session's."""
        try:
            driver.deliver(event)
        except Exception as error:
            log.exception("a session failed")
            self.fail(PacelineError(f"the answer cannot go on: {error}"))

    @property
    def finished(self) -> bool:
        return self._driver.finished

    def fail(self, error: PacelineError) -> None:
        """End the session without the machine."""
        log.warning("an answer ended early: %s", error, extra={"id": self.trace})
        self._driver.abandon()
        self._end("error")

    @property
    def energy(self) -> EnergyUse | None:
        """Used so far; None without a meter."""
        return self._energy.use

    # ---- ports ------------------------------------------------------------------------------------------------------
    def forward(self, forward: Forward) -> None:
        self.compute(forward, self._driver, self.deliver, self._group)

    def compute(self, forward: Forward, driver: Driver, deliver: Callable[[Event], None], group: Group | None) -> None:
        """Have a forward of this driver's machine computed."""

        def answer(result: Rows | EngineError) -> None:
            first, *others = submitted
            spent = self._energy.compute(reduce(Energy.plus, (each.energy for each in others), first.energy))
            if driver is self._first:  # a later one's prompt is cached because the first one's was computed
                self._cached = max(self._cached, first.cached_rows, *(each.cached_rows for each in others))
            submitted.clear()  # they refer to this function: without the cycle their stored KV is let go of at once
            if driver.finished:
                return
            if isinstance(result, EngineError):
                self.fail(result)
            else:
                deliver(answered(forward, result, self._loop.time(), self._worker.answered, spent, first.scored))

        submitted = requests(forward, answer)
        for each in submitted:
            each.prefix = next((prefix for prefix in self._prefixes if prefix.begins(each.segment)), None)
            each.group, each.salt, each.certainty = group, self.salt, self._certainty
            self._worker.submit(each)

    def send(self, message: SessionMessage) -> None:
        if self._number is not None:  # else the link has been lost; the machine receives LinkLost next
            self._post(msgspec.structs.replace(message, session=self._number))

    def _woken(self) -> None:
        now, link = self._loop.time(), self.link
        measured = TimerFired(now) if link is None else TimerFired(now, link.rtt, link.bandwidth, self._listen(link))
        self.deliver(measured)

    def _listen(self, link: Link) -> float:  # noqa: ARG002  # of the side that faces the client
        """Time without a sign of life on the link, s."""
        return 0.0

    @abstractmethod
    def retrieve(self) -> None: ...

    def finish(self, finish: Finish) -> None:
        self._end(finish.reason)

    # ---- shared -----------------------------------------------------------------------------------------------------
    def _post(self, message: SessionFrame) -> None:
        if self.link is None:
            return
        with contextlib.suppress(LinkClosed):  # the node calls `link_lost` on each of its sessions
            self._sent(message, self.link.send(message))

    def _sent(self, message: SessionFrame, num_bytes: int) -> None:
        """Count a message for the report, and the energy of sending it."""
        self.egress.sent(message, num_bytes)
        self._energy.send(num_bytes, None if self.link is None else self.link.bandwidth)

    def _end(self, reason: str) -> None:
        """Close the session with the peer and cancel the timer."""
        self._cancel_timer()
        if self.link is not None and self._number is not None:
            self._post(CloseSession(self._number, reason))
            self.link.detach(self._number)
        self.link, self._number = None, None
        self._prefixes = ()  # each is an open file, and the session is garbage in a cycle
        if self.egress:
            log.info(
                "sent to the other side for an answer: %s",
                self.egress.told(self.trace),
                extra={"id": self.trace, "fields": self.egress.kinds()},
            )


class PeerSession(Session):
    """This side's part in an answer whose client is on the peer's side."""

    def __init__(
        self,
        machine: Machine,
        worker: Worker,
        link: Link,
        opening: messages.OpenSession,
        retrieve: Callable[[PeerSession], object],
        closed: Callable[[PeerSession], None],
        owner: str,
    ) -> None:
        """owner: whose turns in the engine's steps it takes."""
        super().__init__(machine, worker, None, masked=opening.constraint is not None)
        self.trace = opening.trace
        self._began = self._loop.time()
        self.link, self._number = link, opening.session
        self._retrieve = retrieve
        self._closed = closed
        self._turns_of = owner
        self.outcome = "cancelled"  # how it has ended, once it has
        self._said_approximate = False
        # Called with each message and whether this side sends it.
        self.observe: Callable[[SessionMessage, bool], object] = lambda message, sent: None  # noqa: ARG005  # a hook
        link.attach(opening.session, self._received)

    def begin(self) -> None:
        self.deliver(Started(self._loop.time()))

    def retrieved(
        self,
        prompts: PromptSet,
        room: int,
        found: RetrievedPassages,
        *,
        claim: int,
        salt: str | None,
    ) -> None:
        """Give the machine its branches and send the passages. claim: KV rows of all branches together. salt: see
        `Session`."""
        if not self._driver.finished and self._number is not None:
            self._prefixes, self.salt = prompts.prefixes, salt
            self._certainty.approximate |= prompts.reuses
            self._group = self._worker.group(claim, line=(id(self.link), self._number), owner=self._turns_of)
            self._post(msgspec.structs.replace(found, session=self._number))
            self.deliver(Retrieved(prompts.branches, room))

    def send(self, message: SessionMessage) -> None:
        if self._certainty.approximate and self._number is not None and not self._said_approximate:
            self._said_approximate = True
            self._post(Approximate(self._number))
        self.observe(message, True)
        super().send(message)

    def fail(self, error: PacelineError) -> None:
        self.outcome = f"failed: {error}"
        super().fail(error)
        self._closed(self)

    def refuse(self, reason: str) -> None:
        """Leave the session; the peer continues without this side."""
        log.info("an answer of the peer's is not taken part in: %s", reason, extra={"id": self.trace})
        self.outcome = f"{REFUSED}{reason}"
        self._driver.abandon()
        self._end(f"{REFUSED}{reason}"[:1024])
        self._closed(self)

    def link_lost(self) -> None:
        self.outcome = "the link was lost"
        self.link, self._number = None, None
        self.deliver(LinkLost())

    def _received(self, message: SessionFrame) -> None:
        match message:
            case CloseSession(_, reason):
                self.outcome = reason
                self.deliver(Cancelled("cancelled"))
            case SessionMessage():
                self.observe(message, False)
                self.deliver(Received(message, self._loop.time()))
            case _:
                pass  # passages for citations are for the side that faces the client

    def retrieve(self) -> None:
        self._retrieve(self)

    def finish(self, finish: Finish) -> None:
        super().finish(finish)
        self._closed(self)

    def tell(self, peer: str, strategy: str, tracer: Tracer | None) -> None:
        """Log this part in an answer of a peer's client, and trace it under the id of that client's request."""
        seconds = self._loop.time() - self._began
        fields: Fields = {"strategy": strategy, "seconds": round(seconds, 4), "outcome": self.outcome}
        log.info(
            "took part in an answer of %s for %.2f s, by %s: %s (%s)",
            peer,
            seconds,
            strategy,
            self.outcome,
            self.trace,
            extra={"id": self.trace, "fields": {"peer": peer, **fields}},
        )
        if tracer is not None:
            tracer.record("part", self.trace, seconds, fields)
