"""Bandwidth of a link, estimated by the sender from acknowledged bytes as in TCP congestion control (BBR: Cardwell et
al. 2016).

A link keeps order, so what was sent before a ping has arrived when its answer comes. The rate of acknowledged bytes is
the bandwidth only while the link is full, that is, while round trips take longer than the least one. There is no
estimate until a queue has built up. No clock: the caller supplies times.
"""

from __future__ import annotations

import math

from paceline.core.estimation.running import MovingAverage

QUEUED = 1.5  # a round trip above this multiple of the least one,
QUEUED_S = 0.02  # and longer by this many seconds, has waited in a queue
MAX_PINGS = 64  # unanswered pings kept


class Bandwidth:
    """One direction of one link."""

    def __init__(self) -> None:
        self._sent = 0  # bytes in total
        self._pings: dict[float, int] = {}  # time sent → bytes sent before
        self._acknowledged: tuple[float, int] | None = None  # time of the last answer, and the bytes it acknowledged
        self._min_trip: float | None = None  # s, round trip without queueing
        self._rate = MovingAverage(0.3)
        self._full = False
        self._resumed = -math.inf  # when the first bytes after an idle time were sent

    @property
    def rate(self) -> float | None:
        """Bytes per second; None while the link is not full."""
        return self._rate.value if self._full else None

    def sent(self, num_bytes: int, now: float | None = None) -> None:
        """Record bytes sent. Without a time, the sender is taken to have had something to send all the while."""
        if now is not None and self._acknowledged is not None and self._acknowledged[1] == self._sent:
            self._resumed = now
        self._sent += num_bytes

    def pinged(self, now: float) -> None:
        if len(self._pings) < MAX_PINGS:
            self._pings[now] = self._sent

    def answered(self, sent_at: float, now: float, held: float = 0.0) -> None:
        """Record the answer to the ping of `sent_at`, which the peer held back for `held` seconds."""
        acknowledged = self._pings.pop(sent_at, None)
        if acknowledged is None:
            return
        trip = max(now - sent_at - held, 0.0)
        before, self._acknowledged = self._acknowledged, (now, acknowledged)
        was_idle = before is not None and acknowledged == before[1]
        if self._min_trip is None or was_idle or trip < self._min_trip:
            self._min_trip = trip  # a ping on an idle link measures the present route
        full = trip > QUEUED * self._min_trip and trip > self._min_trip + QUEUED_S
        if full and before is not None and acknowledged > before[1]:
            # The time in which a sender had nothing to send says nothing of the link.
            began = max(before[0], self._resumed + self._min_trip)
            if now > began:
                self._rate.add((acknowledged - before[1]) / (now - began))
        self._full = full and self._rate.value is not None
