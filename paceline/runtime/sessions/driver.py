"""Execution of a machine's effects, and what is told of it: bytes sent, and what happened when.

One driver per machine. Engine, clock and network are behind `Ports`: real ones in `runtime.sessions.base`, virtual ones
in `lab.simulation`. The driver keeps only the order of events and the sequence names.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol, cast

import msgspec

from paceline.core.batching.segment import SeqId, StepSize
from paceline.core.energy import NOT_KNOWN, Spent
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SampledRow
from paceline.runtime.engine_loop.requests import Answer, BranchJoin, ForwardRequest, Rows
from paceline.runtime.service import Moment
from paceline.strategies.base import (
    SIDES,
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
    Retrieved,
    Sampled,
    Scored,
    Send,
    Side,
    WakeAt,
    other,
)
from paceline.wire.messages import RetrievedPassages, SessionFrame, SessionMessage

# ---- what happened in one answer, by side and time, for a client that asks for it -----------------------------------
# Noted where everything of an answer passes: what its machine counts, by the driver; its messages, where their bytes
# are counted; its tokens, and a peer that is lost or back, by the session; searches and the choice of the strategy, by
# the preparation. Kinds, sides, numbers and times alone: no text, no name of a document, and nothing that a peer has
# not sent anyway. The numbers of each kind add up to those of the answer's report.
MAX_MOMENTS: Final = 320


class Timeline:
    """Moments of one answer. Those of one kind and side that are nearer to each other than `MAX_MOMENTS` of all allow
    are one, with the sum of their numbers; moments begin as short as a millisecond."""

    def __init__(
        self, side: Side, now: Callable[[], float], began: float | None = None, drafter: Side | None = None
    ) -> None:
        """side: that faces the client. now: s. began: when the answer was asked for; None: now. drafter: see
        `beside`."""
        self.side = side
        self.drafter = drafter or side
        self.now = now
        self._began = now() if began is None else began
        self._width = 1  # ms
        # When it began, its number, and how long it took, ms.
        self._found: dict[tuple[int, Side, str, str], tuple[float, float, float]] = {}
        self._counts: dict[str, float] = {}  # of the machine, so far
        self._prompts: tuple[int, float] | None = None  # their tokens, and when they were given to the machine
        self._asked: float | None = None  # s, of the first message since the peer's last one

    def note(
        self, kind: str, number: float = 1.0, of: str = "", *, side: Side | None = None, since: float | None = None
    ) -> None:
        """Something has happened. side: None: this one. since: s, when it began, where it took some time."""
        now = self.now()
        begun = now if since is None else since
        self._add(1e3 * (begun - self._began), side or self.side, kind, of, number, 1e3 * (now - begun))

    def _add(self, at: float, side: Side, kind: str, of: str, number: float, took: float) -> None:
        key = int(at) // self._width, side, kind, of
        known = self._found.get(key, (at, 0.0, 0.0))
        self._found[key] = min(at, known[0]), known[1] + number, known[2] + took
        while len(self._found) > MAX_MOMENTS:
            self._widen()

    def _widen(self) -> None:
        found, self._found, self._width = self._found, {}, 2 * self._width
        for (_, side, kind, of), (at, number, took) in found.items():
            self._add(at, side, kind, of, number, took)

    def sent(self, message: SessionFrame, num_bytes: int) -> None:
        """A message to the peer."""
        self.note("sent", num_bytes, message.kind)
        self._asked = self.now() if self._asked is None else self._asked

    def received(self, message: SessionFrame, num_bytes: int) -> None:
        """A message of the peer. The first after one to it ends a round trip, whether it answers that one or not."""
        self.note("received", num_bytes, message.kind, side=other(self.side))
        if isinstance(message, RetrievedPassages):
            self.note("search", len(message.passages), side=other(self.side), since=self._asked)
        if self._asked is not None:
            self.note("round_trips", since=self._asked)
            self._asked = None

    def stepped(self, event: Event, figures: Mapping[str, float]) -> None:
        """A machine has taken an event. figures: its counts so far, which say whose drafts they are where several
        sides draft."""
        if isinstance(event, Retrieved):
            self._prompts = sum(len(branch.prompt) for branch in event.branches), self.now()
        elif self._prompts is not None and isinstance(event, Scored | Sampled):
            self.note("prefill", self._prompts[0], since=self._prompts[1])
            self._prompts = None
        before, self._counts = self._counts, dict(figures)
        for name, kind, side in self._kinds(figures):
            if more := figures.get(name, 0.0) - before.get(name, 0.0):
                self.note(kind, more, side=side)

    def _kinds(self, figures: Mapping[str, float]) -> Iterator[tuple[str, str, Side]]:
        """Which figures are told as which kind and side."""
        yield from ((name, name, self.side) for name in ("forwards", "handovers"))
        for kind in ("drafted", "accepted"):
            named = [(f"{kind}_{side}", kind, side) for side in SIDES if f"{kind}_{side}" in figures]
            yield from named or [(kind, kind, self.drafter)]

    def beside(self, drafter: Side) -> Timeline:
        """A timeline of a machine of this answer, which is told if that machine ends it. drafter: whose drafts the
        machine counts, where its figures do not say."""
        return Timeline(self.side, self.now, self._began, drafter)

    def moments(self, beside: Timeline | None = None) -> tuple[Moment, ...]:
        """In the order in which they began, with those of the machine that has ended the answer."""
        if beside is not None:
            self._take_over(beside)
        found = sorted(self._found.items(), key=lambda each: each[1][0])
        return tuple(
            Moment(round(at, 1), side, kind, of, number, round(took, 1))
            for (_, side, kind, of), (at, number, took) in found
        )

    def _take_over(self, beside: Timeline) -> None:
        while self._width < beside._width:
            self._widen()
        for (_, side, kind, of), (at, number, took) in beside._found.items():
            self._add(at, side, kind, of, number, took)
        beside._found.clear()  # once: an answer in stretches goes on with this timeline


# ---- the driver -----------------------------------------------------------------------------------------------------
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
