"""`Joint`: both sides write an answer; what its machine does at each event, on either side.

A strategy is built on it by three things: a *rule* by which a side that decides makes the next target, a *planner* that
says which rows are computed next, and what it tells its peer. The rest is here, once: the session is opened and opened
again, a silent or stuck peer is passed over (`PeerWatch`) and taken in again from the last target on, a front
without its peer writes on alone, and every target is kept, emitted and moves the tree's head (`JointAnswer`). The side
that does not face the client ends with its link.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from paceline.core.clock import AGAIN_S, LONGEST_FIRST_S, SILENCE_S, STALL_S, DeliveryPace, PeerRecord, StepClock
from paceline.core.sampling.dist import Dist
from paceline.strategies.base import (
    Branch,
    Cancelled,
    ClosePeer,
    DraftModelLost,
    Effect,
    Emit,
    Event,
    Finish,
    FinishReason,
    FromDraftModel,
    LinkBack,
    LinkLost,
    MachineConfig,
    OpenPeer,
    PassOver,
    Received,
    Retrieve,
    Retrieved,
    Sampled,
    Scored,
    Side,
    Started,
    TimerFired,
    WakeAt,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import NgramDrafts, PrefixNode, PrefixTree
from paceline.wire.messages import SessionMessage, Targets

# ---- when the side that faces the client goes on without its peer, and when it takes the peer in again --------------
# Two measures, from the last target on. *Silence* is the link's: a live peer answers the link within a round trip,
# however slow its engine is. A *stall* is the session's: this side is ready, and no target comes. Silence beyond
# max(1 s, 8 x the answer's own pace) or a stall beyond max(15 s, 8 x that pace) passes the peer over. Its session stays
# open, and a word in it opens a new one, from the last target on.
SYNC_INTERVAL_S = 1.0  # between two looks at what the peer may have missed
LISTEN_S = 0.25  # between two looks at the link
FIRST_DELIVERIES = 4  # they may come in a burst, and then slowly: the pace is not known before
MAX_DUE = 1024  # targets


class PeerWatch:
    """Lives as long as the answer. Times are seconds of the events' clock."""

    def __init__(self, config: MachineConfig, decoder: BranchDecoder) -> None:
        self.passed_over = False
        self.too_long = False  # a peer that the answer must wait for has held it up for as long as may be
        self._waits_for_peer = config.seat.awaited
        self._record = config.seat.record or PeerRecord()
        self._decoder = decoder
        self._pace = DeliveryPace()
        self._num_targets = len(config.seat.targets)
        self._deliveries = 0  # since the peer's session was opened
        self._longest = 0.0  # s, stall before one of the first of them
        self._gap = 0.0  # s, since the last target
        self._stall = 0.0  # s of it, while this side was ready
        self._read_s = 0.0  # for which this side has read its own prompt
        self._woken = 0.0
        self._silent = False  # passed over for silence: any word shows that it is back
        self._spoke = False  # since it was passed over
        self._own_targets = 0  # since then
        # Own targets after which the peer may return: each time twice as many, so that none holds an answer up for
        # ever.
        self._due = 0

    def opened(self) -> None:
        """A session with the peer is opened, or opened again."""
        self.passed_over = self._spoke = False
        self._deliveries = 0
        self._gap = self._stall = self._longest = 0.0
        self._pace.interrupt()

    def lost(self) -> None:
        """The link is gone, and with it the peer's session."""
        self.passed_over = False
        self._pace.interrupt()

    def observe(self, num_targets: int, now: float, *, linked: bool) -> None:
        """After each event: the answer has so many targets."""
        new, self._num_targets = num_targets - self._num_targets, num_targets
        if new > 0 and linked:
            self._deliveries += 1
            self._longest, self._stall, self._gap = max(self._longest, self._stall), 0.0, 0.0
            if self._deliveries == FIRST_DELIVERIES:
                self._record.took_part(self._longest)
            self._pace.delivered(now)
        elif new > 0 and self.passed_over:
            self._own_targets += new

    def wake(self, now: float, silence: float, rtt: float | None, *, linked: bool) -> bool:
        """Note that time has passed. True if the peer is to be passed over now.

        silence: of the link, s. A wake-up that comes late, as after a suspend, counts as two at most.
        """
        elapsed, self._woken = min(now - self._woken, 2.0 * LISTEN_S), now
        if not linked:
            return False
        self._gap += elapsed
        if self._decoder.idle:
            self._stall += elapsed
        elif not self._num_targets:
            self._read_s += elapsed
        if self._waits_for_peer:  # nothing is gained without it; a link that has died is closed by its heartbeat
            self.too_long = self._stall >= LONGEST_FIRST_S
            return False
        self._silent = min(silence, self._gap) > self._pace.allows(SILENCE_S, rtt)  # else nobody waits for the peer
        first = self._record.first_s
        if first > AGAIN_S:
            first = max(first, self._read_s)
        limit = self._pace.allows(STALL_S if self._steady else first, rtt)
        return self._silent or self._stall > limit

    @property
    def _steady(self) -> bool:
        """The pace is known: its prompt read, a peer has brought the answer on several times."""
        return self._deliveries >= FIRST_DELIVERIES

    def pass_over(self) -> str:
        """Go on without the peer. Returns why, as the end of a sentence."""
        if not (self._silent or self._steady):
            self._record.did_not()
        self.passed_over, self._spoke, self._own_targets = True, False, 0
        self._due = min(max(1, 2 * self._due), MAX_DUE)
        self._pace.interrupt()
        return "nothing is heard of it" if self._silent else "it brings the answer no further"

    def heard(self, *, works: bool) -> None:
        """A message has come in the session in which the peer was passed over. works: it brings the answer on."""
        if works and not (self._steady or self._silent):
            self._record.took_part(self._stall)
        self._spoke = self._spoke or self._silent or works

    @property
    def returns(self) -> bool:
        """The passed-over peer is to be taken in again."""
        return self.passed_over and self._spoke and self._own_targets >= self._due


# ---- the answer -----------------------------------------------------------------------------------------------------
LANES: Final[tuple[Side | None, ...]] = (None, "cloud", "device")  # by their number on the wire
MAX_EARLY: Final = 64  # messages of targets that wait for earlier ones
MAX_EARLY_BYTES: Final = 1 << 18  # of all of them, with their distributions
BROKEN_FORM: Final = "it breaks the form that the request asks for"  # the end of a sentence about the peer


class JointAnswer:
    """The targets so far, as one side knows them, from whichever side they come."""

    def __init__(self, config: MachineConfig, tree: PrefixTree, ngrams: NgramDrafts | None = None) -> None:
        """ngrams: observe every target."""
        self.targets = list(config.seat.targets)
        self.lanes: list[Side | None] = [None] * len(self.targets)  # side whose documents each came from
        self.ended = False  # all targets are known
        self.progressed = False  # since this was last set to False
        self._config, self._tree, self._ngrams = config, tree, ngrams

    @property
    def stopped(self) -> bool:
        """The last target is the end of the text."""
        return bool(self.targets) and self.targets[-1] in self._config.output.eos_ids

    def permits(self, token: int) -> bool:
        """The request's constraint lets this token follow. Where it lets none follow, the answer ends.

        Of a token that depends on what the peer sent. For the front alone: the peer answers for nothing.
        """
        mask = self._config.output.mask if self._config.seat.faces_client else None
        allowed = None if mask is None else mask.allowed(self.targets)
        if allowed is None:
            return True
        if not allowed.any():
            return token in self._config.output.eos_ids
        return token < len(allowed) and bool(allowed[token])

    def append(
        self, token: int, lane: Side | None, dist: Dist | None, branches: frozenset[int] | None = None
    ) -> list[Effect]:
        """Add the next target, and emit it if this side faces the client. lane, dist, branches: as of `Emit`."""
        if self._ngrams is not None:
            self._ngrams.observe_target(self._tree.head, token)
        self._tree.advance(token)
        self.targets.append(token)
        self.lanes.append(lane)
        self.progressed = True
        stops = token in self._config.output.eos_ids
        self.ended = stops or len(self.targets) >= self._config.output.max_tokens
        if stops or not self._config.seat.faces_client:
            return []
        return [Emit(token, dist, lane, branches, 0.0 if dist is None else dist.tail)]


class EarlyTargets:
    """Messages of targets that came before those they follow. Bounded, since a peer may send any it likes; of an honest
    one few wait, as links keep the order. What is dropped is asked for again."""

    def __init__(self) -> None:
        self._waiting: dict[int, Targets] = {}  # by their start
        self._bytes = 0

    def add(self, message: Targets, num_targets: int) -> None:
        """Keep a message; of two with one start the one that says more. num_targets: known so far."""
        kept = self._waiting.get(message.start)
        if kept is not None and _says(kept) > _says(message):
            return
        freed = 0 if kept is None else kept.num_bytes
        if message.start > num_targets:
            full = kept is None and len(self._waiting) >= MAX_EARLY
            if full or self._bytes - freed + message.num_bytes > MAX_EARLY_BYTES:
                return
        self._waiting[message.start] = message
        self._bytes += message.num_bytes - freed

    def pop(self, num_targets: int) -> Targets | None:
        """A message that begins at or before the next target; None without one."""
        first = min(self._waiting, default=None)
        if first is None or first > num_targets:
            return None
        message = self._waiting.pop(first)
        self._bytes -= message.num_bytes
        return message


def _says(message: Targets) -> tuple[int, bool]:
    return len(message.tokens), type(message) is not Targets  # one that says more of the target after them


class Joint(ABC):
    """One side of an answer of two."""

    watches: ClassVar[bool] = True  # the front waits for its peer, and passes it over; else it only listens to it

    def __init__(
        self,
        config: MachineConfig,
        tree: PrefixTree,
        decoder: BranchDecoder,
        answer: JointAnswer,
        timing: StepClock,
        ngrams: NgramDrafts | None = None,
    ) -> None:
        """A strategy calls `_meet_peer` when it is ready to."""
        self._config, self._tree, self._decoder, self._ngrams = config, tree, decoder, ngrams
        self._answer, self._timing = answer, timing
        self._epoch, self._linked = config.seat.epoch, config.seat.joined
        self._now = 0.0
        self._rtt, self._bandwidth = config.seat.rtt, config.seat.bandwidth
        self._watch = PeerWatch(config, decoder)
        self._next_sync: float | None = None  # s, when to look next at what may be lost; None: not begun with this peer
        self._started = self._finished = False
        self._alone = 0  # targets that this side has decided without its peer

    # ---- what a strategy adds ---------------------------------------------------------------------------------------
    @abstractmethod
    def _meet_peer(self) -> None:
        """Forget everything about the peer: `_epoch` and `_linked` are new."""

    @abstractmethod
    def _advance(self) -> list[Effect]:
        """Do everything that has become possible."""

    @abstractmethod
    def _computed(self, event: Scored | Sampled, nodes: Sequence[PrefixNode]) -> list[Effect]:
        """A forward is answered, which is known to the end: the rows after these nodes."""

    @abstractmethod
    def _brings_on(self, message: SessionMessage) -> bool:
        """The message brings the answer on, and is no mere sign of life."""

    @abstractmethod
    def _received(self, message: SessionMessage) -> list[Effect]:
        """A message of the peer's present session."""

    @abstractmethod
    def _synchronise(self, *, progressed: bool) -> list[Effect]:
        """About a second has passed: send, or ask for, what may have been lost. progressed: targets have come, or may
        be on their way for the first time."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """As of `Machine`."""

    def _begin(self, branches: tuple[Branch, ...], max_new_tokens: int | None) -> list[Effect]:
        """The prompts are known: prefill them."""
        if self._ngrams is not None:
            self._ngrams.start(branches, self._answer.targets)
        return self._decoder.start(branches, self._answer.targets, self._tree.head, max_new_tokens)

    def _alone_dist(self, node: PrefixNode) -> Dist | None:
        """What is told of the distribution after a node, where this side decides alone."""
        return node.plain

    def _greet(self, *, again: bool) -> list[Effect]:  # noqa: ARG002  # a hook
        """What the peer is told once the prompts are known, or when its session is opened again."""
        return []

    # ---- events -----------------------------------------------------------------------------------------------------
    def on(self, event: Event) -> Sequence[Effect]:
        if self._finished:
            return []
        effects = self._on(event)
        self._watch.observe(len(self._answer.targets), self._now, linked=self._linked)
        if self._watch.returns and not self._finished:
            return [*effects, *self._open_again()]
        return effects

    def _on(self, event: Event) -> list[Effect]:
        match event:
            case Started(now):
                self._started, self._now = True, now
                opens = self._config.seat.faces_client and self._linked
                opening = [OpenPeer(tuple(self._answer.targets), self._epoch)] if opens else []
                return [Retrieve(), *opening, self._next_wake()]
            case Retrieved(branches, max_new_tokens):
                return [*self._begin(branches, max_new_tokens), *self._greet(again=False), *self._advance()]
            case Scored() | Sampled():
                self._now = max(self._now, event.now)
                nodes = self._decoder.take(event)
                if nodes and self._decoder.timed is not None:
                    self._timing.add(*self._decoder.timed)
                return self._computed(event, nodes)
            case Received(message, now):
                self._now = max(self._now, now)
                if message.epoch != self._epoch:
                    return []
                if self._watch.passed_over:
                    self._watch.heard(works=self._brings_on(message))
                return self._received(message) if self._linked else []
            case TimerFired(now, rtt, bandwidth, silence):
                self._now, self._rtt, self._bandwidth = now, self._rtt if rtt is None else rtt, bandwidth
                effects = self._wake(silence)
                return effects if self._finished else [*effects, self._next_wake()]
            case LinkLost():
                if not self._config.seat.faces_client:
                    return [self._finish("cancelled")]
                self._watch.lost()
                self._meet(self._epoch, linked=False)
                return self._advance()
            case LinkBack():
                return self._back()
            case Cancelled(reason):
                return [self._finish(reason)]
            case FromDraftModel() | DraftModelLost():
                return []  # it asks none

    def _meet(self, epoch: int, *, linked: bool) -> None:
        self._epoch, self._linked, self._next_sync = epoch, linked, None
        self._meet_peer()

    def _back(self) -> list[Effect]:
        """The link is back, and the peer with it."""
        if self._linked or not self._config.seat.faces_client:
            return []
        if self._started:
            return self._open_again()
        self._meet(self._epoch, linked=True)
        return []  # `Started` will open the session

    def _open_again(self) -> list[Effect]:
        """Open a session with the peer again, from the last target on."""
        self._watch.opened()
        self._meet(self._epoch + 1, linked=True)
        return [OpenPeer(tuple(self._answer.targets), self._epoch), *self._greet(again=True), *self._advance()]

    def _wake(self, silence: float) -> list[Effect]:
        """Time has passed: go on without a peer that is silent or stuck, or see to what may have been lost."""
        if self._config.seat.faces_client and self.watches:
            if self._watch.wake(self._now, silence, self._rtt, linked=self._linked):
                reason = self._watch.pass_over()
                self._meet(self._epoch, linked=False)
                return [PassOver(reason), *self._advance()]
            if self._watch.too_long and self._linked:
                return [ClosePeer()]
        if self._next_sync is not None and self._now < self._next_sync:
            return []
        progressed, self._answer.progressed = self._answer.progressed or self._next_sync is None, False
        self._next_sync = self._now + 0.9 * SYNC_INTERVAL_S  # wake-ups may come a little early
        return self._synchronise(progressed=progressed)

    def _next_wake(self) -> WakeAt:
        listens = self._config.seat.faces_client and self._linked
        return WakeAt(self._now + (LISTEN_S if listens else SYNC_INTERVAL_S))

    # ---- targets ----------------------------------------------------------------------------------------------------
    def _append(self, token: int, lane: Side | None, dist: Dist | None) -> list[Effect]:
        return self._answer.append(token, lane, dist)

    def _decide_alone(self) -> list[Effect]:
        """Every target that this side's own rows decide, while it has no peer."""
        effects: list[Effect] = []
        config, answer = self._config, self._answer
        while not (answer.ended or config.seat.awaited) and (own := self._tree.head.own_dist) is not None:
            self._alone += 1
            lane = None if self._decoder.log_evidence is None else config.seat.side
            token = own.token(config.output.sampling, len(answer.targets))
            effects += self._append(token, lane, self._alone_dist(self._tree.head))
        return effects

    def _write_alone(self) -> list[Effect]:
        """Everything that this side can do without its peer: targets of its own rows, and the next forward."""
        effects = self._decide_alone()
        decoder, head, length = self._decoder, self._tree.head, len(self._answer.targets)
        if self._answer.ended:
            return [*effects, *self._end()]
        if decoder.started and not decoder.fits(length):
            return [*effects, self._finish("length")]
        if self._config.seat.awaited or not decoder.idle:
            return effects
        effects += decoder.commit_to(head)
        rows = decoder.missing_rows(head)
        return [*effects, *decoder.append_rows(rows, head, self._now)] if rows else effects

    def _end(self, end: Emit | None = None) -> list[Effect]:
        """All targets are known. The side that faces the client finishes; the other waits to be closed. end: as of
        `Finish`."""
        if not self._config.seat.faces_client:
            return []
        return [self._finish("stop" if self._answer.stopped else "length", end)]

    def _finish(self, reason: FinishReason, end: Emit | None = None) -> Finish:
        """end: as of `Finish`."""
        self._finished = True
        return Finish(reason, self.stats(), end)
