"""How many bytes a second a link carries, seen from the one end that sends: from acknowledged bytes, as TCP's own
congestion control sees it (BBR: Cardwell et al. 2016).

What was sent before a ping has arrived when its answer comes, since a link keeps order. How fast that goes says how
much the link can carry only while the link is full, and it is full while answers take longer than they have to. So
until a queue has shown a limit there is none. No clock: the caller brings times.
"""

from __future__ import annotations

from paceline.core.estimation.running import MovingAverage

QUEUED = 1.5  # times the least round trip, and
QUEUED_S = 0.02  # s more than it: from there on something was waiting
MAX_PINGS = 64  # unanswered ones that are remembered


class Bandwidth:
    """One direction of one link."""

    def __init__(self) -> None:
        self._sent = 0  # bytes, ever
        self._pings: dict[float, int] = {}  # when sent -> bytes sent before it
        self._arrived: tuple[float, int] | None = None  # when, and how many bytes, by the last answer
        self._least: float | None = None  # s, of a round trip that waited for nothing
        self._rate = MovingAverage(0.3)
        self._full = False

    @property
    def rate(self) -> float | None:
        """Bytes a second; None while nothing has shown a limit."""
        return self._rate.value if self._full else None

    def sent(self, num_bytes: int) -> None:
        self._sent += num_bytes

    def pinged(self, now: float) -> None:
        if len(self._pings) < MAX_PINGS:
            self._pings[now] = self._sent

    def answered(self, sent_at: float, now: float, held: float = 0.0) -> None:
        """The answer to the ping of `sent_at`, which the peer took `held` seconds to give."""
        carried = self._pings.pop(sent_at, None)
        if carried is None:
            return
        trip = max(now - sent_at - held, 0.0)
        before, self._arrived = self._arrived, (now, carried)
        was_idle = before is not None and carried == before[1]
        if self._least is None or was_idle or trip < self._least:
            self._least = trip  # behind nothing else a ping shows what the route is like now
        full = trip > QUEUED * self._least and trip > self._least + QUEUED_S
        if full and before is not None and now > before[0] and carried > before[1]:
            self._rate.add((carried - before[1]) / (now - before[0]))
        self._full = full and self._rate.value is not None
