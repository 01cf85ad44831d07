"""One machine of one request on its host: the simulator's `Ports`, and what is measured of an answer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Protocol

import msgspec

from lab.configs import changed
from lab.simulation.clock import VirtualClock
from lab.simulation.host import SimulatedHost
from lab.simulation.network import SimulatedLink
from paceline.core.batching.pending import Group
from paceline.core.batching.segment import SeqId
from paceline.core.energy import Energy
from paceline.core.side import SIDES
from paceline.errors import EngineError
from paceline.runtime.engine_loop.requests import Rows, SequenceOp
from paceline.runtime.sessions.driver import Driver, Egress, answered, requests
from paceline.strategies.base import (
    Branch,
    Cancelled,
    DraftModelLost,
    Effect,
    Emit,
    Event,
    Finish,
    Forward,
    FromDraftModel,
    LinkBack,
    LinkLost,
    Machine,
    MachineConfig,
    Received,
    Retrieved,
    Side,
    Started,
    Strategy,
    TimerFired,
    other,
)
from paceline.wire.codec import decode_part, encode_options, sampling_from_wire, sampling_to_wire
from paceline.wire.messages import CloseSession, OpenSession, SessionFrame, SessionMessage


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request. Hosts named "cloud" and "device" need neither `sides` nor `peers`.

    The simulator sets `side`, `faces_client`, `linked`, `targets`, `epoch`, `rtt` and `bandwidth` of `config`; the rest
    of it holds for every machine of the request, its look-up table and statistics included.
    """

    strategy: Strategy
    front: str  # host that faces the client
    config: MachineConfig
    branches: Mapping[str, tuple[Branch, ...]]  # by host: the prompts that it retrieves
    room: Mapping[str, int] = field(default_factory=dict)  # by host: output tokens its context holds; absent: all
    sides: Mapping[str, Side] = field(default_factory=dict)  # by host; absent: its name
    peers: Mapping[str, str] = field(default_factory=dict)  # by host: the host that its machine sends to; see `routes`
    start: float = 0.0  # s
    claims: Mapping[str, int] = field(default_factory=dict)  # by host: most KV rows of its branches; absent: not known

    @property
    def routes(self) -> Mapping[str, str]:
        """Receiver of each host's messages: the other of two hosts unless `peers` says more, such as a ring of them."""
        if self.peers:
            return self.peers
        side = self.side_of(self.front)
        return {side: other(side), other(side): side}

    def side_of(self, host: str) -> Side:
        side = self.sides.get(host) or next((side for side in SIDES if side == host), None)
        assert side is not None, f"`sides` lacks the host {host!r}"
        return side


class Exchange(Protocol):
    """Transport of a session's messages to the machines of its request on other hosts."""

    def post(self, sender: SimulatedSession, receiver: str, message: SessionFrame) -> None: ...

    def new_session(self, opener: SimulatedSession) -> int:
        """Number of a session of the opener's request that has not been used yet."""


class SimulatedSession:
    """One machine of a request at a time; each opening by the peer starts another. Implements `driver.Ports`.

    Messages reach the machine whichever opening they belong to: it must tell them apart by their epoch.
    """

    def __init__(
        self,
        request: SimulatedRequest,
        host: SimulatedHost,
        clock: VirtualClock,
        exchange: Exchange,
        peer: str | None,
        link: SimulatedLink | None,
        drafts: SimulatedHost | None = None,
    ) -> None:
        """link: to the peer's host. drafts: runs the draft model of this one."""
        self.request, self.host, self.peer, self.link = request, host, peer, link
        self.side = request.side_of(host.name)
        self.faces_client = host.name == request.front
        self.tokens: list[int] = []
        self.lanes: list[Side | None] = []
        self.finished: Finish | None = None
        self.openings = 0  # machines started here
        self.refusal: str | None = None  # of the last opening
        self.passed_over: list[str] = []  # why this front went on without its peer, each time
        self.egress = Egress()
        self.energy = host.account()
        self._clock = clock
        self._exchange = exchange
        self._machine: Machine | None = None
        self._driver: Driver | None = None
        self._group: Group | None = None
        self._number: int | None = None  # of the session with the peer
        self._timer = 0
        self._live: set[SeqId] = set()
        self._drafts = None if drafts is None else SimulatedDrafts(drafts, self)

    @property
    def ended(self) -> bool:
        """No machine is running."""
        return self._driver is None or self._driver.finished

    def preview(self, event: Event) -> Sequence[Effect]:
        """Effects that the machine would have for this event now, tried on a copy of it."""
        return () if self.ended else copy.deepcopy(self._machine).on(event)  # type: ignore[union-attr]  # it runs

    # ---- events -----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin as the host that faces the client."""
        self._begin(self.request.config)

    def _begin(self, config: MachineConfig) -> None:
        linked, network = self.link is not None and self.link.up, None if self.link is None else self.link.network
        config = changed(
            config,
            depth=self.host.steps.depth,
            side=self.side,
            faces_client=self.faces_client,
            joined=linked and self.request.strategy.needs_peer,
            rtt=None if network is None else network.rtt,
            bandwidth=None if self.link is None else self.link.bandwidth(self.host.name),
            draft_positions=0 if self._drafts is None else self._drafts.positions,
        )
        self.openings += 1
        self._machine = self.request.strategy.machine(config)
        self._driver = Driver(self._machine, self, self, drafts=self._drafts)
        self._group = None
        self._driver.deliver(Started(self._clock.now))

    def deliver(self, event: Event) -> None:
        if self._driver is not None:
            self._driver.deliver(event)

    def deliver_later(self, event: Event) -> None:
        """After what is due at this time already."""
        self._clock.after(0.0, lambda: self.deliver(event))

    def link_lost(self) -> None:
        self._number = None
        self.deliver_later(LinkLost())

    def link_back(self) -> None:
        self.deliver_later(LinkBack())

    def die(self) -> None:
        """End as a program that is killed: without a last word."""
        self._number = None
        if self._driver is not None:
            self._driver.abandon()
        self._machine = self._driver = None

    def receive(self, message: SessionFrame) -> None:
        match message:
            case OpenSession(session=number) if number < (self._number or 0):
                pass  # overtaken by a later one, where messages of a lost connection still arrive
            case OpenSession():
                self._join(message)
            case CloseSession(session=number) if number != self._number:
                pass  # of an earlier opening
            case CloseSession():
                self._number = None
                self.deliver(LinkLost() if self.faces_client else Cancelled())
            case SessionMessage() if not self.ended:
                self.deliver(Received(message, self._clock.now))
            case SessionMessage() if self.faces_client and self.peer is not None:
                self._exchange.post(
                    self, self.peer, CloseSession(message.session, "finished")
                )  # the first one was lost
            case SessionMessage():
                pass
            case _:
                raise AssertionError(f"no machine sends a {type(message).__name__}")

    def _join(self, opening: OpenSession) -> None:
        """Take part from the opening's targets on, or refuse. A machine of an earlier opening ends."""
        strategy = self.request.strategy
        options = decode_part(opening.options, strategy.options)
        self.deliver(Cancelled())
        self._number = opening.session
        self.refusal = strategy.accepts(opening, options)
        if self.refusal is not None:
            self._close(f"refused: {self.refusal}")
            return
        config = changed(
            self.request.config,
            sampling=sampling_from_wire(opening.sampling),
            max_tokens=opening.max_tokens,
            options=options,
            targets=tuple(opening.targets),
            epoch=opening.epoch,
        )
        self._begin(config)

    # ---- ports ------------------------------------------------------------------------------------------------------
    def allocate(self) -> SeqId:
        seq = self.host.allocate()
        self._live.add(seq)
        return seq

    def forward(self, forward: Forward) -> None:
        driver = self._driver

        def answer(result: Rows | EngineError) -> None:
            assert not isinstance(result, EngineError), result
            spent = self.energy.compute(reduce(Energy.plus, (each.energy for each in submitted)))
            if driver is not None and driver is self._driver:
                scored = submitted[0].scored
                driver.deliver(answered(forward, result, self._clock.now, self.host.steps.last, spent, scored))

        claim = self.request.claims.get(self.host.name)
        if self._group is None and claim is not None:
            self._group = self.host.group(claim, None if self._number is None else (self.link, self._number))
        submitted = requests(forward, answer)
        for request in submitted:
            request.group = self._group
            self.host.submit(request)

    def prune(self, seq: SeqId, keep: tuple[int, ...], live: tuple[int, ...]) -> None:
        self.host.submit(SequenceOp.prune(seq, keep, live))

    def release(self, seq: SeqId) -> None:
        self._live.discard(seq)
        self.host.submit(SequenceOp.release(seq))

    def retrieve(self) -> None:
        driver, name = self._driver, self.host.name
        retrieved = Retrieved(self.request.branches[name], self.request.room.get(name))

        def found() -> None:
            if driver is not None and driver is self._driver:
                driver.deliver(retrieved)

        self._clock.after(self.host.search, found)

    def send(self, message: SessionMessage) -> None:
        if self._number is not None and self.peer is not None:  # else the link was lost at this very time
            self._exchange.post(self, self.peer, msgspec.structs.replace(message, session=self._number))

    def open_peer(self, targets: tuple[int, ...], epoch: int) -> None:
        assert self.peer is not None, "there is no peer to open a session with"
        config = self.request.config
        self._number = self._exchange.new_session(self)
        opening = OpenSession(
            session=self._number,
            strategy=self.request.strategy.name,
            messages=[],
            query="",
            sampling=sampling_to_wire(config.output.sampling),
            max_tokens=config.output.max_tokens,
            top_k_documents=0,
            privacy="document-private" if config.seat.private else "open",
            options=encode_options(config.options),
            targets=list(targets),
            epoch=epoch,
            constraint=None,  # both sides are given the compiled mask
            asker="",
        )
        self._exchange.post(self, self.peer, opening)

    def pass_over(self, reason: str) -> None:
        self.passed_over.append(reason)

    def close_peer(self, fault: str) -> None:  # noqa: ARG002  # a link of the simulator stays up
        self._close("cancelled")
        self.deliver_later(LinkLost())

    def wake_at(self, time: float) -> None:
        self._timer += 1
        timer, driver = self._timer, self._driver

        def fire() -> None:
            if timer == self._timer and driver is not None and driver is self._driver:
                now, link = self._clock.now, self.link
                if link is None:
                    driver.deliver(TimerFired(now))
                else:
                    bandwidth = link.bandwidth(self.host.name)
                    driver.deliver(TimerFired(now, link.network.rtt, bandwidth, link.silence))

        self._clock.at(time, fire)

    def emit(self, token: Emit) -> None:
        assert self.faces_client, "only the side that faces the client emits"
        assert self.finished is None
        self.tokens.append(token.token)
        self.lanes.append(token.lane)

    def finish(self, finish: Finish) -> None:
        assert not self._live, f"{self.host.name} has not released sequences {self._live}"
        assert self.finished is None or not self.faces_client
        self.finished = finish
        self._close(finish.reason)

    @property
    def driver(self) -> Driver | None:
        """Of the machine that runs now."""
        return self._driver

    @property
    def now(self) -> float:
        return self._clock.now

    def _close(self, reason: str) -> None:
        if self._number is not None and self.peer is not None:
            self._exchange.post(self, self.peer, CloseSession(self._number, reason))
        self._number = None


class SimulatedDrafts:
    """A session's sequences on the host of its draft model. Implements `driver.EnginePorts`."""

    def __init__(self, host: SimulatedHost, session: SimulatedSession) -> None:
        self._host, self._session = host, session

    @property
    def positions(self) -> int:
        return self._host.steps.engine.info.max_positions

    def allocate(self) -> SeqId:
        return self._host.allocate()

    def forward(self, forward: Forward) -> None:
        session, driver, host = self._session, self._session.driver, self._host

        def answer(result: Rows | EngineError) -> None:
            if driver is None or driver is not session.driver:
                return
            if isinstance(result, EngineError):
                driver.deliver(DraftModelLost())
                return
            scored = submitted[0].scored
            driver.deliver(FromDraftModel(answered(forward, result, session.now, host.steps.last, scored=scored)))

        submitted = requests(forward, answer)
        for request in submitted:
            host.submit(request)

    def prune(self, seq: SeqId, keep: tuple[int, ...], live: tuple[int, ...]) -> None:
        self._host.submit(SequenceOp.prune(seq, keep, live))

    def release(self, seq: SeqId) -> None:
        self._host.submit(SequenceOp.release(seq))
