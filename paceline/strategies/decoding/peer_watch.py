"""When the side that faces the client goes on without its peer, and when it takes the peer in again.

Two measures, from the last target on. *Silence* is the link's: a live peer answers the link within a round trip,
however slow its engine is. A *stall* is the session's: this side is ready, and no target comes. Silence beyond
max(1 s, 8 x the answer's own pace) or a stall beyond max(15 s, 8 x that pace) passes the peer over. Its session stays
open, and a word in it opens a new one, from the last target on.
"""

from __future__ import annotations

from paceline.core.clock import LONGEST_FIRST_S, SILENCE_S, STALL_S, DeliveryPace, PeerRecord
from paceline.strategies.base import MachineConfig
from paceline.strategies.decoding.branch_decoder import BranchDecoder

SYNC_INTERVAL_S = 1.0  # between two looks at what the peer may have missed
LISTEN_S = 0.25  # between two looks at the link
FIRST_DELIVERIES = 4  # they may come in a burst, and then slowly: the pace is not known before
MAX_DUE = 1024  # targets


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

    def next_look(self, now: float, *, linked: bool) -> float:
        """When to look again."""
        return now + (LISTEN_S if linked else SYNC_INTERVAL_S)

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
