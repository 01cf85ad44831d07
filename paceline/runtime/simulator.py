"""The virtual world: the same machines, driver and steps on a virtual clock and a seeded network.

Deterministic given its seed. Messages go through the real codec; each may be delayed, lost, duplicated and so
overtake others, which a WebSocket never does: what a machine stands here, it stands there. Opening a session is
reliable; everything else about it is not. For tests and for the simulator behind the benchmark graphs.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from paceline.core.batching.segment import Segment, SeqId
from paceline.engine.base import Engine
from paceline.errors import EngineError
from paceline.runtime.engine_loop.executor import ForwardRequest, SequenceOp, StepExecutor
from paceline.runtime.sessions.driver import Driver
from paceline.strategies.base import (
    SIDES,
    Branch,
    Cancelled,
    Emit,
    Finish,
    LinkBack,
    LinkLost,
    MachineConfig,
    Received,
    Retrieved,
    Scored,
    Side,
    Started,
    TimerFired,
    other,
)
from paceline.strategies.strategy import Strategy
from paceline.wire.codec import decode, encode
from paceline.wire.messages import CloseSession, SessionFrame, SessionMessage


@dataclass(frozen=True, slots=True)
class Network:
    delay: tuple[float, float] = (0.0, 0.0)  # s, one way; uniform and independent, so messages overtake each other
    loss: float = 0.0
    duplicate: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request in the world. The task's `side`, `front`, `linked`, `targets` and `epoch` are the world's to set."""

    strategy: Strategy
    front: Side
    task: MachineConfig
    branches: Mapping[Side, tuple[Branch, ...]]
    room: Mapping[Side, int] = field(default_factory=dict)  # output tokens a side's context holds; absent: all


class Simulation:
    """Two sides, one request. `run` plays it to its end and checks that nothing is left behind."""

    def __init__(
        self,
        job: SimulatedRequest,
        engines: Mapping[Side, Engine],
        *,
        seed: int = 0,
        network: Network | None = None,
        decode: Mapping[Side, float] | None = None,
        search: Mapping[Side, float] | None = None,
        linked: bool = True,
    ) -> None:
        self.job = job
        self.random = random.Random(seed)
        self.network = network or Network()
        self.now = 0.0
        self.linked = linked
        self.events = 0
        self.sent: dict[str, int] = {}  # messages by tag
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.hosts = {
            side: SimulatedSide(
                self, side, engines[side], (decode or {}).get(side, 0.01), (search or {}).get(side, 0.0)
            )
            for side in SIDES
        }
        self.front = self.hosts[job.front]

    @property
    def rtt(self) -> float:
        """Mean, s"""
        return sum(self.network.delay)

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (time, self._order, action))

    def run(self, before: Callable[[Simulation], None] | None = None, *, limit: float = 100_000.0) -> SimulatedSide:
        """Play until both sides have finished; `before` is called ahead of each event and may cut, kill or cancel."""
        self.front.start((), 0)
        while self._heap and not all(host.done for host in self.hosts.values()):
            self.events += 1
            if before is not None:
                before(self)
            self.now, _, action = heapq.heappop(self._heap)
            assert self.now < limit, f"stuck: {len(self.front.tokens)} tokens after {self.now} s"
            action()
            for host in self.hosts.values():
                host.steps.engine.check()
        assert self.front.finished is not None, "the world stood still before the answer was done"
        for host in self.hosts.values():
            host.settle()
        return self.front

    # ---- what happens to the link -----------------------------------------------------------------------------------
    def cut(self, *, kill: Side | None = None) -> None:
        """The link is gone, and with `kill` so is that side's program: it finishes nothing."""
        if not self.linked:
            return
        self.linked = False
        if kill is not None:
            assert kill != self.job.front, "the client's side cannot die without the answer"
            self.hosts[kill].die()
        for host in self.hosts.values():
            host.deliver_later(LinkLost())

    def mend(self) -> None:
        if not self.linked:
            self.linked = True
            self.front.deliver_later(LinkBack())

    def send(self, sender: SimulatedSide, message: SessionFrame) -> None:
        self.sent[type(message).__name__] = self.sent.get(type(message).__name__, 0) + 1
        if not self.linked:
            return
        data = encode(message)
        copies = 1 + (self.random.random() < self.network.duplicate)
        for _ in range(copies):
            if self.random.random() >= self.network.loss:
                arrived = decode(data)
                assert isinstance(arrived, SessionFrame)
                self.carry(partial(self.hosts[other(sender.side)].arrived, arrived))

    def carry(self, deliver: Callable[[], None]) -> None:
        """Deliver after this network's delay, unless the link has been cut by then."""
        born = self.linked

        def arrive() -> None:
            if self.linked and born:
                deliver()

        self.at(self.now + self.random.uniform(*self.network.delay), arrive)


class SimulatedSide:
    """One side: an engine in virtual time and at most one machine. Implements `driver.Ports`."""

    def __init__(self, world: Simulation, side: Side, engine: Engine, decode: float, search: float) -> None:
        self.world, self.side, self.decode, self.search = world, side, decode, search
        self.steps = StepExecutor(engine)
        self.tokens: list[int] = []
        self.lanes: list[Side | None] = []
        self.finished: Finish | None = None
        self._driver: Driver | None = None
        self._generation = 0  # of machines on this host: answers meant for an earlier one are void
        self._inbox: list[SequenceOp | ForwardRequest] = []
        self._stepping = False
        self._wake = 0
        self._next_seq = 0
        self._live: set[SeqId] = set()

    @property
    def done(self) -> bool:
        return (self._driver is None or self._driver.finished) and not self._stepping and not self._inbox

    def start(self, targets: tuple[int, ...], epoch: int) -> None:
        job = self.world.job
        task = replace(
            job.task,
            side=self.side,
            faces_client=self.side == job.front,
            targets=targets,
            epoch=epoch,
            linked=self.world.linked and job.strategy.needs_peer,
            rtt=self.world.rtt,
        )
        if self._driver is not None and not self._driver.finished:
            self._driver.deliver(Cancelled())
        self._generation += 1
        self._driver = Driver(job.strategy.machine(task), self)
        self._driver.deliver(Started(self.world.now))

    def deliver_later(self, event: LinkLost | LinkBack | Cancelled) -> None:
        self.world.at(self.world.now, lambda: self._driver.deliver(event) if self._driver else None)

    def die(self) -> None:
        if self._driver is not None:
            self._driver.abandon()
            self._driver = None

    def arrived(self, message: SessionFrame) -> None:
        match message:
            case CloseSession():
                if self._driver is not None and self is not self.world.front:
                    self._driver.deliver(Cancelled())
            case SessionMessage():
                if self._driver is not None and not self._driver.finished:
                    self._driver.deliver(Received(message, self.world.now))
                elif self is self.world.front:
                    self.world.send(self, CloseSession(0, "finished"))
            case _:
                raise AssertionError(f"no machine sends a {type(message).__name__}")

    def settle(self) -> None:
        """After the end: nothing of this host's is left in its engine."""
        for item in self._inbox:
            self.steps.submit(item)
        self.steps.engine.check()
        left = [seq for seq in range(1, self._next_seq + 1) if self.steps.engine.length(SeqId(seq))]
        assert not left and not self._live, f"{self.side} leaks sequences {left or self._live}"

    # ---- ports ------------------------------------------------------------------------------------------------------
    def allocate(self) -> SeqId:
        self._next_seq += 1
        self._live.add(SeqId(self._next_seq))
        return SeqId(self._next_seq)

    def forward(self, ticket: int, segment: Segment) -> None:
        generation = self._generation

        def answer(result: object) -> None:
            assert not isinstance(result, EngineError), result
            if self._driver is not None and generation == self._generation:
                self._driver.deliver(Scored(ticket, result, self.world.now, self.steps.last))  # type: ignore[arg-type]  # the other case is asserted

        self._submit(ForwardRequest(segment, answer))

    def commit(self, seq: SeqId, keep: tuple[int, ...], rest: tuple[int, ...] = ()) -> None:
        self._submit(SequenceOp.commit(seq, keep, rest))

    def release(self, seq: SeqId) -> None:
        self._live.discard(seq)
        self._submit(SequenceOp.release(seq))

    def retrieve(self) -> None:
        generation = self._generation

        def found() -> None:
            if self._driver is not None and generation == self._generation:
                job = self.world.job
                self._driver.deliver(Retrieved(job.branches[self.side], job.room.get(self.side)))

        self.world.at(self.world.now + self.search, found)

    def send(self, message: SessionMessage) -> None:
        self.world.send(self, message)

    def open(self, targets: tuple[int, ...], epoch: int) -> None:
        peer = self.world.hosts[other(self.side)]
        self.world.carry(lambda: peer.start(targets, epoch))

    def drop(self) -> None:
        self.world.send(self, CloseSession(0, "cancelled"))
        self.deliver_later(LinkLost())

    def wake_at(self, time: float) -> None:
        self._wake += 1
        wake, generation = self._wake, self._generation

        def woke() -> None:
            if wake == self._wake and generation == self._generation and self._driver is not None:
                self._driver.deliver(TimerFired(self.world.now, self.world.rtt))

        self.world.at(time, woke)

    def emit(self, token: Emit) -> None:
        assert self.finished is None
        self.tokens.append(token.token)
        self.lanes.append(token.lane)

    def finish(self, finish: Finish) -> None:
        assert self.finished is None or self is not self.world.front
        self.finished = finish
        if self is self.world.front:
            self.world.send(self, CloseSession(0, finish.reason))

    # ---- the engine in virtual time ---------------------------------------------------------------------------------
    def _submit(self, item: SequenceOp | ForwardRequest) -> None:
        self._inbox.append(item)
        if not self._stepping:
            self._stepping = True
            self.world.at(self.world.now, self._step)

    def _step(self) -> None:
        """Between two steps: take what was submitted, then run for `decode` seconds."""
        items, self._inbox = self._inbox, []
        for item in items:
            self.steps.submit(item)
        scheduled = self.steps.next()
        if scheduled is None:
            self._stepping = False
            return

        def ran() -> None:
            answers = self.steps.run(scheduled)
            for answer, result in answers:
                answer(result)
            self._step()

        self.world.at(self.world.now + self.decode, ran)
