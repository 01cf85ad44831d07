"""How long an answer waits for the other side of it, and what of that is remembered for the next answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.estimation.running import MovingAverage

PACES = 8  # gaps between an answer's deliveries that a peer may let pass
SILENCE_S = 1.0  # of the link; a live peer answers at once, whatever its engine does
# Without a target while the link lives: where a third of the messages is lost, it takes that long to have what is
# missing sent again, and a peer short of memory has its turns.
STALL_S = 15.0
AGAIN_S = 5.0  # likewise, of a peer that has not contributed in an earlier answer
FIRST_S = 20.0  # likewise before its pace is known: a peer may have a long prompt to read
LONGEST_FIRST_S = 60.0


@dataclass(slots=True)
class DeliveryPace:
    """Mean gap between deliveries of one answer, seconds. What arrives at one time is one delivery."""

    _gaps: MovingAverage = field(default_factory=lambda: MovingAverage(0.2))
    _last: float | None = None

    def delivered(self, now: float) -> None:
        if self._last is not None:
            self._gaps.add(max(now - self._last, 0.0))
        self._last = now

    def interrupt(self) -> None:
        """The gap before the next delivery says nothing about the pace."""
        self._last = None

    def allows(self, least: float, rtt: float | None) -> float:
        """Longest wait, seconds. rtt: s; its own answers take a peer as long."""
        return max(least, PACES * (self._gaps.value or 0.0)) + (rtt or 0.0)


@dataclass(slots=True)
class PeerRecord:
    """Longest wait for a peer before its pace in an answer is known, over all answers with this peer.

    It may have to read a long prompt, so the wait is long. A peer that let it pass gets a short one, until it takes
    part again.
    """

    first_s: float = FIRST_S

    def took_part(self, waited: float) -> None:
        """waited: s, for one of its first targets."""
        self.first_s = min(max(FIRST_S, 2.0 * waited), LONGEST_FIRST_S)

    def did_not(self) -> None:
        self.first_s = AGAIN_S
