"""Execution of a machine's effects.

One driver per machine. Engine, clock and network are behind `Ports`: real ones in `runtime.sessions.base`, virtual ones
in `lab.simulation`. The driver keeps only the order of events and the sequence names.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Protocol, cast

import msgspec

from paceline.core.batching.segment import SeqId, StepSize
from paceline.core.energy import NOT_KNOWN, Spent
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SampledRow
from paceline.runtime.engine_loop.requests import Answer, BranchJoin, ForwardRequest, Rows
from paceline.runtime.sessions.timeline import Timeline
from paceline.strategies.base import (
    ClosePeer,
    Effect,
    Emit,
    Event,
    Finish,
    Forward,
    Machine,
    OnDraftModel,
    OpenPeer,
    PassOver,
    Prune,
    Retrieve,
    Sampled,
    Scored,
    Send,
    WakeAt,
)
from paceline.wire.messages import SessionFrame, SessionMessage


class EnginePorts(Protocol):
    """One engine of a driver. Results return through `Driver.deliver`, at once or later."""

    def allocate(self) -> SeqId:
        """A sequence name that is unused on this engine."""

    def forward(self, forward: Forward) -> None:
        """Its sequences are named as on this engine."""

    def prune(self, seq: SeqId, keep: tuple[int, ...], live: tuple[int, ...]) -> None: ...

    def release(self, seq: SeqId) -> None: ...


class Ports(EnginePorts, Protocol):
    """Engine, link and clock of a driver. Results return as of `EnginePorts`."""

    def retrieve(self) -> None: ...

    def send(self, message: SessionMessage) -> None: ...

    def wake_at(self, time: float) -> None: ...

    def finish(self, finish: Finish) -> None:
        """Called once, after all sequences have been released."""


class ClientPorts(Protocol):
    """Of the side that faces the client: the client, and the session at the peer."""

    def emit(self, token: Emit) -> None: ...

    def open_peer(self, targets: tuple[int, ...], epoch: int) -> None:
        """Open a session with the peer, in place of an earlier one of this answer."""

    def pass_over(self, reason: str) -> None:
        """The answer goes on without the peer, see `PassOver`."""

    def close_peer(self, fault: str) -> None:
        """Close the session with the peer and deliver `LinkLost`. fault: of the peer, see `ClosePeer`."""


def answered(
    forward: Forward,
    rows: Rows,
    now: float,
    step: StepSize,
    spent: Spent = NOT_KNOWN,
    scored: tuple[int, ...] | None = None,
) -> Scored | Sampled:
    """The event that answers a `Forward`. scored: as in `ForwardRequest`."""
    if forward.sampling is None:
        return Scored(forward.ticket, cast("tuple[Dist, ...]", rows), now, step, spent, scored)
    return Sampled(forward.ticket, cast("tuple[SampledRow, ...]", rows), now, step, spent, scored)


def requests(forward: Forward, answer: Answer) -> list[ForwardRequest]:
    """One request of the engine for each branch. answer: called once, with all rows or an error."""
    if forward.mixture is None or forward.sampling is None:
        request = ForwardRequest(forward.segment, answer, sampling=forward.sampling, path_only=forward.path_only)
        request.goes_on = forward.goes_on
        return [request]
    segments = (forward.segment, *forward.others)
    join = BranchJoin(forward.sampling, forward.mixture, answer, len(segments))
    return [ForwardRequest(segment, join.fail, join=join, branch=branch) for branch, segment in enumerate(segments)]


class Driver:
    """Delivers events one at a time: a result that a port returns at once waits until the earlier effects are done."""

    def __init__(
        self, machine: Machine, ports: Ports, client: ClientPorts | None, *, drafts: EnginePorts | None = None
    ) -> None:
        """client: None for a peer's part in an answer. drafts: the draft model's engine, for machines that are told of
        one."""
        self.timeline: Timeline | None = None  # of this machine's part, where it is to be told
        self._machine = machine
        self._ports, self._client = ports, client
        self._sequences = _Sequences(ports)
        self._drafts = None if drafts is None else _Sequences(drafts)
        self._events: deque[Event] = deque()
        self.running = False  # an event is being delivered
        self._abandoned = False
        self.finished = False

    def deliver(self, event: Event) -> None:
        """Deliver an event. After `Finish`, results of forwards under way still arrive and are dropped."""
        self._events.append(event)
        if self.running:
            return
        self.running = True
        try:
            while self._events and not self.finished:
                current = self._events.popleft()
                effects = self._machine.on(current)
                if self.timeline is not None:
                    self.timeline.stepped(current, self._machine.stats())
                for effect in effects:
                    if self._abandoned:
                        break
                    assert not self.finished, "a machine gave an effect after Finish"
                    self._execute(effect)
        finally:
            self.running = False
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
            case Forward() | Prune():
                self._sequences.execute(effect)
            case OnDraftModel(inner):
                assert self._drafts is not None, "a machine asks a draft model that there is not"
                self._drafts.execute(inner)
            case Emit():
                self._front.emit(effect)
            case Send(message):
                ports.send(message)
            case Retrieve():
                ports.retrieve()
            case OpenPeer(targets, epoch):
                self._front.open_peer(targets, epoch)
            case PassOver(reason):
                self._front.pass_over(reason)
            case ClosePeer(fault):
                self._front.close_peer(fault)
            case WakeAt(time):
                ports.wake_at(time)
            case Finish():
                self.finished = True
                self._release()
                ports.finish(effect)

    @property
    def _front(self) -> ClientPorts:
        assert self._client is not None, "only the side that faces the client emits, and opens or closes a session"
        return self._client

    def _release(self) -> None:
        self._sequences.release()
        if self._drafts is not None:
            self._drafts.release()


class _Sequences:
    """A machine's sequences on one engine."""

    def __init__(self, ports: EnginePorts) -> None:
        self._ports = ports
        self._names: dict[SeqId, SeqId] = {}  # the machine's -> the engine's

    def execute(self, effect: Forward | Prune) -> None:
        match effect:
            case Forward(segment=segment, others=others):
                own, *rest = (each.with_seq(self._name(each.seq)) for each in (segment, *others))
                self._ports.forward(msgspec.structs.replace(effect, segment=own, others=tuple(rest)))
            case Prune(seq, keep, live):
                self._ports.prune(self._name(seq), keep, live)

    def release(self) -> None:
        for seq in self._names.values():
            self._ports.release(seq)
        self._names.clear()

    def _name(self, local: SeqId) -> SeqId:
        if local not in self._names:
            self._names[local] = self._ports.allocate()
        return self._names[local]


class Egress:
    """Bytes of the messages of one answer on one side, by kind: those sent for stats and log, those received for stats
    alone. Overhead of the connection is not counted."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        """timeline: of the answer, where it is to be told."""
        self.timeline = timeline
        self._bytes: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._sessions: set[int] = set()

    def sent(self, message: SessionFrame, num_bytes: int) -> None:
        """Count a message. num_bytes: 0 if it was not sent."""
        if num_bytes:
            self._bytes[message.kind] += num_bytes
            self._sessions.add(message.session)
            if self.timeline is not None:
                self.timeline.sent(message, num_bytes)

    def received(self, message: SessionFrame, num_bytes: int) -> None:
        """Count a message of the other side."""
        self._received[message.kind] += num_bytes
        if self.timeline is not None:
            self.timeline.received(message, num_bytes)

    def beside(self, kind: str, *, sent: int = 0, received: int = 0) -> None:
        """Count what passes beside the link, as to a stranger's endpoint."""
        for counts, name, num_bytes in ((self._bytes, "sent", sent), (self._received, "received", received)):
            counts.update({kind: num_bytes} if num_bytes else {})
            if num_bytes and self.timeline is not None:
                self.timeline.note(name, num_bytes, kind)

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def told(self, trace: str) -> str:
        """For the log, with the id of the client's request."""
        return f"{self}{f' ({trace})' if trace else ''}"

    def __str__(self) -> str:
        sessions = ", ".join(map(str, sorted(self._sessions)))
        told = ", ".join(f"{kind} {size} bytes" for kind, size in sorted(self._bytes.items()))
        return f"session {sessions}: {told}" if sessions else told

    def kinds(self) -> dict[str, int]:
        """Bytes by kind of message."""
        return dict(sorted(self._bytes.items()))

    def stats(self) -> dict[str, float]:
        """Entries of an answer's stats."""
        return {
            f"{way}_{kind}_bytes": float(size)
            for way, counts in (("sent", self._bytes), ("received", self._received))
            for kind, size in sorted(counts.items())
        }
