"""Execution of a machine's effects.

One driver per machine. Engine, clock and network are behind `Ports`: real ones in `runtime.sessions.base`, virtual ones
in `runtime.simulation`. The driver keeps only the order of events and the sequence names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from paceline.core.batching.segment import SeqId, StepSize
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import SampledRow
from paceline.runtime.engine_loop.requests import Answer, BranchJoin, ForwardRequest, Rows
from paceline.strategies.base import (
    ClosePeer,
    Effect,
    Emit,
    Event,
    Finish,
    Forward,
    Machine,
    OpenPeer,
    Prune,
    Retrieve,
    Sampled,
    Scored,
    Send,
    WakeAt,
)
from paceline.wire.messages import SessionMessage


class Ports(Protocol):
    """Engine, link, clock and client of a driver. Results return through `Driver.deliver`, at once or later."""

    def allocate(self) -> SeqId:
        """A sequence name that is unused on this engine."""

    def forward(self, forward: Forward) -> None:
        """Its sequences are named as on this engine."""

    def prune(self, seq: SeqId, keep: tuple[int, ...], live: tuple[int, ...]) -> None: ...

    def release(self, seq: SeqId) -> None: ...

    def retrieve(self) -> None: ...

    def send(self, message: SessionMessage) -> None: ...

    def open_peer(self, targets: tuple[int, ...], epoch: int) -> None: ...

    def close_peer(self, fault: str) -> None:
        """Close the session with the peer and deliver `LinkLost`. fault: of the peer, see `ClosePeer`."""

    def wake_at(self, time: float) -> None: ...

    def emit(self, token: Emit) -> None: ...

    def finish(self, finish: Finish) -> None:
        """Called once, after all sequences have been released."""


def answered(forward: Forward, rows: Rows, now: float, step: StepSize) -> Scored | Sampled:
    """The event that answers a `Forward`."""
    if forward.sampling is None:
        return Scored(forward.ticket, cast("tuple[Dist, ...]", rows), now, step)
    return Sampled(forward.ticket, cast("tuple[SampledRow, ...]", rows), now, step)


def requests(forward: Forward, answer: Answer) -> list[ForwardRequest]:
    """One request of the engine for each branch. answer: called once, with all rows or an error."""
    if forward.mixture is None or forward.sampling is None:
        return [ForwardRequest(forward.segment, answer, sampling=forward.sampling)]
    segments = (forward.segment, *forward.others)
    join = BranchJoin(forward.sampling, forward.mixture, answer, len(segments))
    return [ForwardRequest(segment, join.fail, join=join, branch=branch) for branch, segment in enumerate(segments)]


class Driver:
    """Delivers events one at a time: a result that a port returns at once waits until the earlier effects are done."""

    def __init__(self, machine: Machine, ports: Ports, *, observe: Callable[[Event], None] | None = None) -> None:
        self._machine = machine
        self._ports = ports
        self._observe = observe
        self._seqs: dict[SeqId, SeqId] = {}  # the machine's names -> the engine's
        self._events: deque[Event] = deque()
        self._running = False
        self._abandoned = False
        self.finished = False

    def deliver(self, event: Event) -> None:
        """Deliver an event. After `Finish`, results of forwards under way still arrive and are dropped."""
        self._events.append(event)
        if self._running:
            return
        self._running = True
        try:
            while self._events and not self.finished:
                current = self._events.popleft()
                if self._observe is not None:
                    self._observe(current)
                for effect in self._machine.on(current):
                    if self._abandoned:
                        break
                    assert not self.finished, "a machine gave an effect after Finish"
                    self._execute(effect)
        finally:
            self._running = False
            if self.finished:
                self._events.clear()

    def abandon(self) -> None:
        """Release the machine's sequences without it, after a fault or a refusal."""
        if not self.finished:
            self.finished = self._abandoned = True
            self._release()

    def _execute(self, effect: Effect) -> None:
        ports = self._ports
        match effect:
            case Forward(ticket, segment, sampling, others, mixture):
                segments = [each.with_seq(self._seq(each.seq)) for each in (segment, *others)]
                ports.forward(Forward(ticket, segments[0], sampling, tuple(segments[1:]), mixture))
            case Emit():
                ports.emit(effect)
            case Send(message):
                ports.send(message)
            case Prune(seq, keep, live):
                ports.prune(self._seq(seq), keep, live)
            case Retrieve():
                ports.retrieve()
            case OpenPeer(targets, epoch):
                ports.open_peer(targets, epoch)
            case ClosePeer(fault):
                ports.close_peer(fault)
            case WakeAt(time):
                ports.wake_at(time)
            case Finish():
                self.finished = True
                self._release()
                ports.finish(effect)

    def _seq(self, local: SeqId) -> SeqId:
        if local not in self._seqs:
            self._seqs[local] = self._ports.allocate()
        return self._seqs[local]

    def _release(self) -> None:
        for seq in self._seqs.values():
            self._ports.release(seq)
        self._seqs.clear()
