"""The head of a pipeline on its own thread: what is sent to the stages, what comes, and what happens when one is lost.

The engine's thread calls the first half, with `changed` held where it says so; the pipeline's loop runs the second.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from paceline.core.batching.segment import Batch
from paceline.core.sampling.sampler import RowSampling
from paceline.engine.base import Ticket
from paceline.errors import ConfigError, EngineError, EngineRefusal, LinkClosed, LocalProtocolError
from paceline.runtime.link.connection import back_off
from paceline.runtime.stages.history import History, Imported, SentRows
from paceline.runtime.stages.members import Member, Members
from paceline.wire.effects import Bulk
from paceline.wire.messages import Frame
from paceline.wire.stages import messages
from paceline.wire.stages.messages import BatchDone

log = logging.getLogger("paceline.stages")

PATIENCE_S = 4.0  # since a lost stage was heard, before answers fail
NOTICE_S = 1.0  # at least, of those since the loss was noticed
START_PATIENCE_S = 90.0  # for a process of this machine to be started again, or a spare to load its layers
PAUSE_S = 0.5  # between attempts, at most


@dataclass(slots=True, eq=False)
class StageRequest:
    """A question to one stage, asked again after a loss."""

    place: int  # of the stage; -1: the last
    message: messages.Numbered
    payload: tuple[messages.KvRows, bytes] | None = None
    answer: Frame | Bulk | None = None
    error: EngineError | None = None

    @property
    def is_open(self) -> bool:
        return self.answer is None and self.error is None

    @property
    def is_again(self) -> bool:
        """To be asked again after a loss: not answered yet, or of rows that an emptied stage holds no more, while
        other stages have not answered."""
        return self.is_open or (self.error is None and isinstance(self.message, messages.ImportRows))


@dataclass(slots=True, eq=False)
class BatchUnderWay:
    ticket: Ticket
    asked: Batch
    ahead: dict[int, tuple[RowSampling, ...]] = field(default_factory=dict)  # how its rows are sampled, by segment
    questions: list[StageRequest] = field(default_factory=list)  # for these, in their order
    done: BatchDone | None = None
    error: EngineError | None = None

    @property
    def is_open(self) -> bool:
        has_run = self.done is not None and not any(question.is_open for question in self.questions)
        return self.error is None and not has_run


def away() -> EngineRefusal:
    """The error of answers while no batch can run. The log says why, with the addresses of stages."""
    return EngineRefusal(
        "the stages of the model cannot run it now", status=503, type="server_error", code="model_unavailable"
    )


class StageHead:
    """`changed` guards `up`, `gone`, `batches`, `requests`, `history` and `sent`."""

    def __init__(self, make: Callable[..., Members]) -> None:
        """make: of the callbacks `heard` and `lost`. Waits until the stages are ready. Raises ConfigError."""
        self.changed = threading.Condition()
        self.up = False  # the pipeline is whole
        self.gone: str | None = None  # why no batch can run now
        self.losses = 0
        self.batches: deque[BatchUnderWay] = deque()  # under way, oldest first
        self.requests: dict[int, StageRequest] = {}  # that somebody waits for
        self.forgotten: deque[int] = deque()  # tickets of batches whose handles are gone
        self.notified: Callable[[], None] = lambda: None  # called when a batch is ready
        self._no_history = partial(History, 0, 0)  # until the stages have told what they are
        self.history = self._no_history()
        self.sent = SentRows(0, 0, 0, 1)
        self.numbers = count(2, 2)  # of requests: even, so that they are none of the members' own
        self.members: Members  # as of the start of `_live`
        self._closing = False
        self._is_torn = False  # a link between two stages was lost while they were being linked
        self._why = ""  # the pipeline is not whole, in words
        self._lost_at = 0.0  # time of the loop; when the lost stage was heard last
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(make, started)), name="paceline-stages", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except ConfigError:
            self._thread.join()
            raise

    def close(self) -> None:
        with self.changed:
            if self._closing:
                return
            self._closing = True
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join()

    def batch(self, ticket: int) -> BatchUnderWay | None:
        return next((each for each in self.batches if each.ticket == ticket), None)

    # ---- to the stages ----------------------------------------------------------------------------------------------
    def record(self, entry: messages.RunBatch | messages.Change) -> None:
        """With the condition held."""
        self.history.sent(entry)
        if self.up:
            self._send_all(entry)

    def _send_all(self, message: messages.RunBatch | messages.Change) -> None:
        for place in range(len(self.members.order)):
            self.send(place, message)

    def send(self, place: int, message: Frame, payload: tuple[messages.KvRows, bytes] | None = None) -> None:
        link = self.members.order[place].link
        if link is not None:
            link.send(message)
            if payload is not None:
                link.send_bulk(*payload)

    def put(self, requests: Sequence[StageRequest]) -> None:
        """Ask, now or once the pipeline is whole. With the condition held."""
        self.requests.update((request.message.request, request) for request in requests)
        for request in requests if self.up else ():
            self._send_request(request)

    def _send_request(self, request: StageRequest) -> None:
        try:
            self.send(request.place, request.message, request.payload)
        except LocalProtocolError as error:  # too large; whoever waits hears of it
            request.error = EngineError(str(error))

    def flush(self) -> None:
        """Tell the last stage what it need not keep. With the condition held."""
        tickets: list[int] = []
        while self.forgotten:
            tickets.append(self.forgotten.popleft())
            self.history.settle(tickets[-1])
        if tickets and self.up:
            self.send(-1, messages.Forget(tuple(tickets)))

    def ask_all(self, requests: Sequence[StageRequest], done: Imported | None = None) -> list[Frame | Bulk]:
        """Answers of stages, asked again after a loss. Raises EngineError for a stage that failed to answer.

        done: what is to be remembered as done once all have answered, and no loss can come between.
        """
        with self.changed:
            if self.gone is not None:
                raise away()
            self.put(requests)
            while any(request.is_open for request in requests):
                self.changed.wait()
            self.settle(requests)
            if done is not None and all(request.error is None for request in requests):
                self.history.sent(done)
        if errors := [request.error for request in requests if request.error is not None]:
            raise errors[0]
        return [request.answer for request in requests if request.answer is not None]

    def settle(self, requests: Sequence[StageRequest]) -> None:
        """Nobody waits for these any more. With the condition held."""
        for request in requests:
            self.requests.pop(request.message.request, None)

    # ---- on the pipeline's loop -------------------------------------------------------------------------------------
    async def _live(self, make: Callable[..., Members], started: Future[None]) -> None:
        self._loop, self._ends, self._broken = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self.members = make(heard=self._heard, lost=self._lost)
        jobs: list[asyncio.Task[object]] = []
        try:
            await self.members.begin()
            with self.changed:
                about = self.members.abouts[0]
                self._no_history = partial(History, about.vocab_size, about.max_positions)
                self.history = self._no_history()
                self.sent = SentRows(about.vocab_size, about.max_positions, self._capacity(), about.block_size)
                self.up = True
                if not self._is_whole:
                    self._fall("a stage was lost at the start")
            jobs += [asyncio.create_task(job) for job in (self._recover(), self.members.watch())]
            started.set_result(None)
            await self._ends.wait()  # a stage that is being started may take minutes, and the program may end meanwhile
        except Exception as fault:
            known = isinstance(fault, ConfigError)
            started.set_exception(fault if known else ConfigError(f"The stages cannot be used: {fault}."))
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await self.members.close()

    def _heard(self, member: Member, message: Frame | Bulk) -> None:
        if isinstance(message, Bulk):
            assert member.link is not None
            member.link.taken()  # whoever asked for it waits
        with self.changed:
            waiting = [under for under in self.batches if under.is_open]
            match message:
                case BatchDone(epoch=epoch):
                    if epoch == self.members.epoch:
                        self._done(message)
                case messages.NeighbourLost(epoch=epoch, reason=reason):
                    if epoch == self.members.epoch:
                        self._is_torn = True
                        self._fall(f"{member.place} has lost {reason}")
                    return
                case messages.RequestFailed(request=number, reason=reason):
                    self._answer(number, EngineError(reason))
                case messages.Numbered(request=number) | Bulk(header=messages.Numbered(request=number)):
                    self._answer(number, message)
                case _:
                    return
            self.changed.notify_all()
        if not all(under.is_open for under in waiting):
            self.notified()

    def _done(self, message: BatchDone) -> None:
        """A batch has run. One that has run before was computed again."""
        under = self.batch(message.ticket)
        if under is None or not under.is_open:
            return
        count = len(under.asked.segments)
        if message.error is not None:
            under.error = EngineError(message.error)
        elif not len(message.kept) == len(message.sizes) == count:
            under.error = EngineError("the last stage answered with other rows")
        else:
            under.done = message

    def _answer(self, number: int, found: Frame | Bulk | EngineError) -> None:
        request = self.requests.get(number)
        if request is None:
            return
        if isinstance(found, EngineError):
            request.error = found
        else:
            request.answer = found

    def _lost(self, member: Member, reason: str, silence_s: float) -> None:
        with self.changed:
            if member in self.members.order and not self._closing:
                self._fall(f"the stage at {member.place} is gone: {reason}", silence_s)

    def _fall(self, reason: str, silence_s: float = 0.0) -> None:
        """With the condition held: nothing more is sent until the pipeline is whole again. silence_s: for which nothing
        had been heard of the stage that is lost."""
        if self.up:
            log.warning("%s", reason)
            self.losses += 1
            self._why = reason
            self._lost_at = self._loop.time() - min(silence_s, max(0.0, PATIENCE_S - NOTICE_S))
        self.up = False
        self._broken.set()

    @property
    def _is_whole(self) -> bool:
        return not self._is_torn and all(member.is_up for member in self.members.order)

    async def _recover(self) -> None:
        """For ever: wait for a loss, and make the pipeline whole again. Answers fail meanwhile, if that takes long."""
        while True:
            await self._broken.wait()
            watch = asyncio.create_task(self._watch())
            try:
                await asyncio.sleep(PAUSE_S / 10)  # its neighbours may have noticed before this end has
                for failures in count(1):
                    if await self._attempt():
                        break
                    await asyncio.sleep(back_off(failures, random.random(), PAUSE_S))
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    async def _attempt(self) -> bool:
        """Put the stages in a row. True if the pipeline is whole."""
        try:
            await self.members.replace_lost()
            self._is_torn = False
            await self.members.link()
            with self.changed:
                if not self._is_whole:
                    return False  # lost meanwhile
                self._broken.clear()
                self._rebuild()
        except Exception as error:
            if not isinstance(error, LinkClosed):  # whoever waits must hear of it: the loop goes on
                log.exception("the stages could not be put in a row")
            if str(error) != self._why:
                log.info("not whole yet: %s", error)
            self._why = str(error) or type(error).__name__
            return False
        log.info("the pipeline is whole again after %.1f s", self._loop.time() - self._lost_at)
        return True

    async def _watch(self) -> None:
        """Give up once nobody can be expected to make the pipeline whole soon. Whoever waits fails then, not when the
        attempt that is under way ends; who asks later is told what the latest attempt has met with."""
        told: str | None = None
        while True:
            waited = self._loop.time() - self._lost_at
            patience = START_PATIENCE_S if self.members.is_hopeful else PATIENCE_S
            if waited >= patience and told != self._why:
                told = self._why
                self._give_up(told)
            await asyncio.sleep(PAUSE_S / 4)

    def _rebuild(self) -> None:
        """Send what the stages must hold, what was under way, and what was asked. With the condition held."""
        self.sent.capacity = self._capacity()
        self.flush()
        rows = 0
        for message in self.history.replay():
            rows += sum(len(each.tokens) for each in message.segments) if isinstance(message, messages.RunBatch) else 0
            self._send_all(message)
        for under in self.batches:
            if under.is_open:  # what it is to sample may have been dropped otherwise
                under.done = None
                for question in under.questions:
                    question.answer = None
        for request in self.requests.values():
            if request.is_again:
                request.answer = None
                self._send_request(request)
        self.up, self.gone = True, None
        log.info("%d rows are computed again", rows)
        self.changed.notify_all()

    def _capacity(self) -> int:
        """Rows; a stage that was replaced may have another memory than before."""
        return min(about.capacity for about in self.members.abouts)

    def _give_up(self, reason: str) -> None:
        """Fail what is under way, and what comes, until the stages are back."""
        with self.changed:
            if self.gone is None:
                log.error("answers fail until the pipeline is whole: %s", reason)
            self.gone = reason
            under_way: list[BatchUnderWay | StageRequest] = [*self.batches, *self.requests.values()]
            for waiting in under_way:
                if waiting.is_open:
                    waiting.error = away()
            self.history = self._no_history()  # no stage holds anything that is needed
            self.sent.failed.update(self.sent.table.lengths())
            self.changed.notify_all()
        self.notified()
