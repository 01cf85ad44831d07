"""Links between hosts. Carries callbacks and counts bytes; knows nothing of messages."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lab.simulation.channel import Channel
from lab.simulation.clock import VirtualClock
from paceline.core.clock import LinkClock
from paceline.wire.link import HEARTBEAT_S, PROBED_BYTES


@dataclass(frozen=True, slots=True)
class Network:
    """Properties of a link. By default those of a WebSocket: nothing is lost and each direction keeps its order.

    `reorders`, `loss` and `duplicate` make it worse than any link of the program, for robustness tests. A reordering
    link also delivers, once it is mended, what was sent before it was cut.
    """

    delay: tuple[float, float] = (0.0, 0.0)  # s, one way; drawn for each message between the two
    bandwidth: float | None = None  # bytes a second in each direction; None: unlimited
    channels: Mapping[str, Channel] = field(default_factory=dict)  # by sender: replaces its direction's bandwidth
    reorders: bool = False  # a message may overtake those sent before it
    loss: float = 0.0  # share of messages
    duplicate: float = 0.0  # share of messages

    @property
    def rtt(self) -> float:
        """Mean of a small message, s"""
        return sum(self.delay)


class _Estimate:
    """What a sender knows of the bandwidth of its direction."""

    def __init__(self) -> None:
        self.link = LinkClock()
        self.unprobed = 0.0  # bytes on the link since the last ping
        self.next_ping = 0.0  # s

    def count(self, num_bytes: int, airbytes: float, now: float) -> None:
        self.link.sent(num_bytes, now)
        self.unprobed += airbytes

    def pinged(self, now: float) -> None:
        self.link.pinged(now)
        self.unprobed, self.next_ping = 0.0, now + HEARTBEAT_S


class SimulatedLink:
    """A link between two hosts. Messages of each direction queue for its bandwidth."""

    def __init__(self, clock: VirtualClock, chance: random.Random, network: Network, *, up: bool = True) -> None:
        self.network = network
        self.up = up
        self._clock = clock
        self._chance = chance
        self._connection = 0  # connections before this one
        self._muted_at: float | None = None
        self._held: list[Callable[[], None]] = []  # what has arrived since then
        self._sent: dict[str, float] = {}  # by sender: when its last message has left
        self._arrived: dict[str, float] = {}  # by sender: when its last message arrives
        self.airtime: dict[str, float] = defaultdict(float)  # by sender: s in which it was sending
        self._estimates = {sender: _Estimate() for sender in network.channels}

    def bandwidth(self, sender: str) -> float | None:
        """Bytes a second that a sender knows of: the true one where it is constant; of a channel what the program's
        estimator makes of acknowledged bytes."""
        estimate = self._estimates.get(sender)
        return self.network.bandwidth if estimate is None else estimate.link.rate

    def cut(self) -> None:
        self.up = False
        self._connection += 1
        self._sent.clear()
        self._arrived.clear()

    def mend(self) -> None:
        self.up = True

    def mute(self) -> None:
        """Deliver nothing from now on, and lose nothing: a program that is stopped, a black hole."""
        if self._muted_at is None:
            self._muted_at = self._clock.now

    def unmute(self) -> None:
        """Deliver what has been held, in order."""
        self._muted_at = None
        held, self._held = self._held, []
        for arrive in held:
            self._clock.after(0.0, arrive)

    @property
    def silence(self) -> float:
        """s; no longer than that nothing is delivered, since a live link is asked for a sign of life."""
        return 0.0 if self._muted_at is None else self._clock.now - self._muted_at

    def carry(
        self,
        sender: str,
        num_bytes: int,
        deliver: Callable[[], None],
        *,
        reliable: bool = False,
        airbytes: float | None = None,
    ) -> None:
        """Run `deliver` when the message arrives. reliable: neither lost nor duplicated, unless the link is cut.

        airbytes: size for which the link is occupied, where it is that of another encoding; the estimator counts
        `num_bytes`, as the sender does.
        """
        if not self.up:
            return
        network, size = self.network, num_bytes if airbytes is None else airbytes
        estimate = self._estimates.get(sender)
        if estimate is not None and self._clock.now >= estimate.next_ping:
            self._ping(sender, estimate)
        if estimate is not None:
            estimate.count(num_bytes, size, self._clock.now)
        if reliable:
            self._carry(sender, size, deliver)
        else:
            for _ in range(1 + (self._chance.random() < network.duplicate)):
                if self._chance.random() >= network.loss:
                    self._carry(sender, size, deliver)
        if estimate is not None and estimate.unprobed >= PROBED_BYTES:
            self._ping(sender, estimate)

    def _ping(self, sender: str, estimate: _Estimate) -> None:
        """Measure the link as `wire.link` does. A ping takes no time of its own, nor does its answer."""
        sent_at = self._clock.now
        estimate.pinged(sent_at)
        self._carry(sender, 0, lambda: None)
        back = self._chance.uniform(*self.network.delay)
        self._clock.at(self._arrived[sender] + back, lambda: estimate.link.answered(sent_at, self._clock.now))

    def _carry(self, sender: str, num_bytes: float, deliver: Callable[[], None]) -> None:
        network, connection = self.network, self._connection
        start = sent = max(self._clock.now, self._sent.get(sender, 0.0))
        if sender in network.channels:
            sent = network.channels[sender].finish(start, num_bytes)
        elif network.bandwidth is not None:
            sent += num_bytes / network.bandwidth
        self.airtime[sender] += sent - start
        self._sent[sender] = sent
        arrival = sent + self._chance.uniform(*network.delay)
        if not network.reorders:
            arrival = max(arrival, self._arrived.get(sender, 0.0))
        self._arrived[sender] = arrival

        def arrive() -> None:
            if self._muted_at is not None:
                self._held.append(arrive)
            elif self.up and (network.reorders or connection == self._connection):
                deliver()

        self._clock.at(arrival, arrive)
