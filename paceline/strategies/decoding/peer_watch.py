"""Machines that write with a peer: its session, and when the side that faces the client goes on without it.

Two measures, from the last target on. *Silence* is the link's: a live peer answers the link within a round trip,
however slow its engine is. A *stall* is the session's: this side is ready, and no target comes. Silence beyond
max(1 s, 8 x the answer's own pace) or a stall beyond max(15 s, 8 x that pace) passes the peer over. Its session stays
open, and a word in it opens a new one, from the last target on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from paceline.core.clock import (
    LONGEST_FIRST_S,
    SILENCE_S,
    STALL_S,
    DeliveryPace,
    PeerRecord,
    StepClock,
)
from paceline.strategies.base import (
    Cancelled,
    ClosePeer,
    DraftModelLost,
    Effect,
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
    Started,
    TimerFired,
    WakeAt,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import NgramDrafts, PrefixNode, PrefixTree
from paceline.wire.messages import SessionMessage

SYNC_INTERVAL_S: Final = 1.0  # between two looks at what the peer may have missed
LISTEN_S = 0.25  # between two looks at the link
FIRST_DELIVERIES = 4  # they may come in a burst, and then slowly: the pace is not known before
MAX_DUE = 1024  # targets
BROKEN_FORM: Final = "it breaks the form that the request asks for"  # the end of a sentence about the peer


class PeerWatch:
    """Lives as long as the answer. Times are seconds of the events' clock."""

    def __init__(self, config: MachineConfig, decoder: BranchDecoder) -> None:
        self.passed_over = False
        self.too_long = False  # a peer that the answer must wait for has held it up for as long as may be
        self._waits_for_peer = config.peer.awaited
        self._record = config.peer.record or PeerRecord()
        self._decoder = decoder
        self._pace = DeliveryPace()
        self._num_targets = len(config.seat.targets)
        self._deliveries = 0  # since the peer's session was opened
        self._longest = 0.0  # s, stall before one of the first of them
        self._gap = 0.0  # s, since the last target
        self._stall = 0.0  # s of it, while this side was ready
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
        if self._waits_for_peer:  # nothing is gained without it; a link that has died is closed by its heartbeat
            self.too_long = self._stall >= LONGEST_FIRST_S
            return False
        self._silent = min(silence, self._gap) > self._pace.allows(SILENCE_S, rtt)  # else nobody waits for the peer
        limit = self._pace.allows(STALL_S if self._steady else self._record.first_s, rtt)
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


def permits(config: MachineConfig, targets: Sequence[int], token: int) -> bool:
    """The request's constraint lets this token follow. Where it lets none follow, the answer ends.

    Of a token that depends on what the peer sent. For the front alone: the peer answers for nothing.
    """
    mask = config.output.mask if config.seat.faces_client else None
    allowed = None if mask is None else mask.allowed(targets)
    if allowed is None:
        return True
    if not allowed.any():
        return token in config.output.eos_ids
    return token < len(allowed) and bool(allowed[token])


class PeeredMachine(ABC):
    """One side of an answer that goes on without its peer, and takes it in again: what such machines do at each event.

    The other side ends with its link. A strategy adds what it does at a target, a message and an answered forward.
    """

    def __init__(
        self,
        config: MachineConfig,
        tree: PrefixTree,
        decoder: BranchDecoder,
        ngrams: NgramDrafts | None,
        timing: StepClock,
        targets: list[int],
    ) -> None:
        """targets: decided so far; the strategy appends to them. It calls `_meet` when it is ready to."""
        self._config, self._tree, self._decoder, self._ngrams = config, tree, decoder, ngrams
        self._timing, self._targets = timing, targets
        self._epoch, self._linked = config.seat.epoch, config.peer.joined
        self._now = 0.0
        self._rtt, self._bandwidth = config.peer.rtt, config.peer.bandwidth
        self._watch = PeerWatch(config, decoder)
        self._started = self._finished = False

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
    def _synchronise(self) -> list[Effect]:
        """Time has passed: send, or ask for, what may have been lost."""

    @abstractmethod
    def _report(self) -> dict[str, float]:
        """Figures of the answer, which ends."""

    def _greet(self, *, again: bool) -> list[Effect]:  # noqa: ARG002  # a hook
        """What the peer is told once the prompts are known, or when its session is opened again."""
        return []

    # ---- events -----------------------------------------------------------------------------------------------------
    def on(self, event: Event) -> Sequence[Effect]:
        if self._finished:
            return []
        effects = self._on(event)
        self._watch.observe(len(self._targets), self._now, linked=self._linked)
        if self._watch.returns and not self._finished:
            return [*effects, *self._open_again()]
        return effects

    def _on(self, event: Event) -> list[Effect]:
        match event:
            case Started(now):
                self._started, self._now = True, now
                opens = self._config.seat.faces_client and self._linked
                opening = [OpenPeer(tuple(self._targets), self._epoch)] if opens else []
                return [Retrieve(), *opening, self._next_wake()]
            case Retrieved(branches, max_new_tokens):
                prefill = self._decoder.start(branches, self._targets, self._tree.head, max_new_tokens)
                if self._ngrams is not None:
                    self._ngrams.start(branches, self._targets)
                return [*prefill, *self._greet(again=False), *self._advance()]
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
        self._epoch, self._linked = epoch, linked
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
        return [OpenPeer(tuple(self._targets), self._epoch), *self._greet(again=True), *self._advance()]

    def _wake(self, silence: float) -> list[Effect]:
        """Time has passed: go on without a peer that is silent or stuck, or see to what may have been lost."""
        if self._config.seat.faces_client:
            if self._watch.wake(self._now, silence, self._rtt, linked=self._linked):
                reason = self._watch.pass_over()
                self._meet(self._epoch, linked=False)
                return [PassOver(reason), *self._advance()]
            if self._watch.too_long and self._linked:
                return [ClosePeer()]
        return self._synchronise()

    def _next_wake(self) -> WakeAt:
        listens = self._config.seat.faces_client and self._linked
        return WakeAt(self._now + (LISTEN_S if listens else SYNC_INTERVAL_S))

    def _finish(self, reason: FinishReason) -> Finish:
        self._finished = True
        return Finish(reason, self._report())
