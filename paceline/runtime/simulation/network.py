"""Links between hosts. Carries callbacks and counts bytes; knows nothing of messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from paceline.runtime.simulation.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class Network:
    """Properties of a link. By default those of a WebSocket: nothing is lost and each direction keeps its order.

    `reorders`, `loss` and `duplicate` make it worse than any link of the program, for robustness tests. A reordering
    link also delivers, once it is mended, what was sent before it was cut.
    """

    delay: tuple[float, float] = (0.0, 0.0)  # s, one way; drawn for each message between the two
    bandwidth: float | None = None  # bytes a second in each direction; None: unlimited
    reorders: bool = False  # a message may overtake those sent before it
    loss: float = 0.0  # share of messages
    duplicate: float = 0.0  # share of messages

    @property
    def rtt(self) -> float:
        """Mean of a small message, s"""
        return sum(self.delay)


class SimulatedLink:
    """A link between two hosts. Messages of each direction queue for its bandwidth."""

    def __init__(self, clock: VirtualClock, chance: random.Random, network: Network, *, up: bool = True) -> None:
        self.network = network
        self.up = up
        self._clock = clock
        self._chance = chance
        self._connection = 0  # connections before this one
        self._sent: dict[str, float] = {}  # by sender: when its last message has left
        self._arrived: dict[str, float] = {}  # by sender: when its last message arrives

    def cut(self) -> None:
        self.up = False
        self._connection += 1
        self._sent.clear()
        self._arrived.clear()

    def mend(self) -> None:
        self.up = True

    def carry(self, sender: str, num_bytes: int, deliver: Callable[[], None], *, reliable: bool = False) -> None:
        """Run `deliver` when the message arrives. reliable: neither lost nor duplicated, unless the link is cut."""
        if not self.up:
            return
        network = self.network
        if reliable:
            self._carry(sender, num_bytes, deliver)
            return
        for _ in range(1 + (self._chance.random() < network.duplicate)):
            if self._chance.random() >= network.loss:
                self._carry(sender, num_bytes, deliver)

    def _carry(self, sender: str, num_bytes: int, deliver: Callable[[], None]) -> None:
        network, connection = self.network, self._connection
        sent = max(self._clock.now, self._sent.get(sender, 0.0))
        if network.bandwidth is not None:
            sent += num_bytes / network.bandwidth
        self._sent[sender] = sent
        arrival = sent + self._chance.uniform(*network.delay)
        if not network.reorders:
            arrival = max(arrival, self._arrived.get(sender, 0.0))
            self._arrived[sender] = arrival

        def arrive() -> None:
            if self.up and (network.reorders or connection == self._connection):
                deliver()

        self._clock.at(arrival, arrive)
