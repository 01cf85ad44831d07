"""A hundred thousand devices in virtual time, on the links that are served: `python -m lab.crowd --devices 100000`.

Both ends of every link are the machine of `paceline.wire.link` with its handshake and heartbeat (signatures alone are
left out), and devices dial as `runtime.link.dialer` does. A server is a core that takes `LINK_S` for a link and
`FRAME_S` for a frame, as `lab.many_links` has measured, one after another; so heartbeats come late where it has too
many. Once all are linked one server is lost: killed, or hanging (`--hangs`), which heartbeats alone can tell.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from paceline.core.rendezvous import chosen
from paceline.runtime.link.dialer import SPREAD_S, back_off
from paceline.wire.effects import Authenticate, Connected, Disconnected, Effect, TickAt, Transmit
from paceline.wire.identity import DiallerHandshake, ListenerHandshake
from paceline.wire.link import HEARTBEAT_S, LinkMachine
from paceline.wire.messages import NONCE_BYTES, Introduction

DELAY_S: Final = 0.025  # of a frame
LINK_S: Final = 0.0016  # of a server's core, a link that is made
FRAME_S: Final = 0.12e-3 * HEARTBEAT_S / 2.0  # a frame of a link at rest, of which two come in a heartbeat
ROW_S: Final = 0.0007  # of PostgreSQL, to record a link
LONGEST_S: Final = 60.0  # until all are linked, or it is told that they are not
PEER: Final = Introduction("0" * 64, "0" * 64, "fake", ["aggregate"], 0)


class Unsigned:
    public_key = bytes(32)

    def sign(self, data: bytes) -> bytes:  # noqa: ARG002  # a signer's
        return bytes(64)


@dataclass(eq=False)
class Core:
    """The core of one server, which does one thing after another."""

    name: str
    alive: bool = True
    free: float = 0.0  # s, when it has done what it has
    worked: float = 0.0
    latest: float = 0.0  # s that something has waited
    links: set[End] = field(default_factory=set)


class World:
    def __init__(self, devices: int, servers: int, seed: int = 1) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self.cores = [Core(f"server-{number}") for number in range(servers)]
        self.linked = 0
        self.events: Counter[str] = Counter()
        self._number = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        names = [core.name for core in self.cores]
        for number in range(devices):
            first = names.index(chosen(names, "", f"device-{number}"))
            self.at(self.chance.random() * HEARTBEAT_S, self.dial, first)

    def at(self, moment: float, call: Callable[..., None], *values: object) -> None:
        self._number += 1
        heapq.heappush(self._heap, (max(moment, self.now), self._number, call, values))

    def run(self, until: Callable[[], bool], longest: float) -> None:
        end = self.now + longest
        while self._heap and self._heap[0][0] <= end and not until():
            self.now, _, call, values = heapq.heappop(self._heap)
            call(*values)

    def dial(self, place: int) -> None:
        """A device dials the server at this place, then the others in their order."""
        core = self.cores[place]
        if not core.alive:
            self.at(self.now + 2.0 * DELAY_S, self.dial, self.after(place))
            return
        device = DiallerHandshake(
            PEER,
            device="d",
            keys=[Unsigned()],
            pinned=Unsigned.public_key,
            binding=b"",
            nonce=bytes(NONCE_BYTES),
            verify=lambda *_: True,
        )
        cloud = ListenerHandshake(PEER, key=Unsigned(), binding=b"", nonce=bytes(NONCE_BYTES), verify=lambda *_: True)
        ends = End(self, LinkMachine(device), core, place), End(self, LinkMachine(cloud), core, place)
        for end, other in (ends, ends[::-1]):
            end.other = other
        core.links.add(ends[0])
        for end in ends:
            end.do(end.machine.connection_made(self.now))

    def after(self, place: int) -> int:
        return (place + 1) % len(self.cores)

    def lose(self, core: Core, *, hangs: bool) -> None:
        core.alive = False
        for end in list(core.links) if not hangs else ():
            end.do(end.machine.connection_lost(1006))


class End:
    """One end of a link."""

    other: End

    def __init__(self, world: World, machine: LinkMachine, core: Core, place: int) -> None:
        self.world, self.machine, self.core, self.place = world, machine, core, place
        self.dials = isinstance(machine.handshake, DiallerHandshake)
        self.was_up = False

    def do(self, effects: Iterable[Effect]) -> None:
        world = self.world
        for effect in effects:
            match effect:
                case Transmit(data):
                    world.events["bytes"] += len(data)
                    world.at(world.now + DELAY_S, self.other.arrived, data)
                case TickAt(moment):
                    world.at(moment, self.tick)
                case Authenticate():
                    self.do(self.machine.authenticated(Unsigned.public_key, world.now))
                case Connected() if self.dials:
                    self.was_up = True
                    world.linked += 1
                    world.events["links"] += 1
                case Disconnected() if self.dials:
                    self.lost()
                case _:
                    pass

    def arrived(self, data: bytes) -> None:
        if self.dials:
            self.do(self.machine.received(data, self.world.now))
        elif self.core.alive:
            core, cost = self.core, FRAME_S if self.machine.is_up else LINK_S / 2.0  # hello and proof
            core.latest = max(core.latest, core.free - self.world.now)
            core.free = max(core.free, self.world.now) + cost
            core.worked += cost
            self.world.at(core.free, self.handled, data)

    def handled(self, data: bytes) -> None:
        self.world.events["frames"] += 1
        self.do(self.machine.received(data, self.world.now))

    def tick(self) -> None:
        if self.dials or self.core.alive:
            self.do(self.machine.tick(self.world.now))

    def lost(self) -> None:
        world, uniform = self.world, self.world.chance.random()
        self.core.links.discard(self)
        world.events["lost"] += 1
        world.linked -= self.was_up
        if self.core.alive:
            self.other.do(self.other.machine.connection_lost(1006))
        wait = uniform * SPREAD_S if self.was_up else back_off(1, uniform)
        world.at(world.now + wait, world.dial, self.place if self.was_up else world.after(self.place))


def told(devices: int, servers: int, rest: float, *, hangs: bool) -> str:
    world, began = World(devices, servers), time.process_time()
    world.run(lambda: world.linked == devices, LONGEST_S)
    lines = [f"{devices} devices, {servers} servers: {world.linked} linked after {world.now:.1f} s"]
    before, worked, start = world.events.copy(), sum(core.worked for core in world.cores), world.now
    world.run(lambda: False, rest)
    took = world.now - start
    frames = (world.events["frames"] - before["frames"]) / took
    busy = (sum(core.worked for core in world.cores) - worked) / took / servers
    lost = world.events["lost"] - before["lost"]
    lines.append(f"at rest: {frames / servers:.0f} frames a second and {busy:.2f} of a core, each server; {lost} lost")
    for core in world.cores:
        core.latest = 0.0
    start, before = world.now, world.events.copy()
    world.lose(world.cores[0], hangs=hangs)
    dead = len(world.cores[0].links) if hangs else world.events["lost"] - before["lost"]
    world.run(lambda: world.linked == devices and world.events["lost"] - before["lost"] >= dead, LONGEST_S)
    rows, beside = world.events["links"] - before["links"], world.events["lost"] - before["lost"] - dead
    latest = max(core.latest for core in world.cores[1:])
    lines.append(
        f"a server {'hangs' if hangs else 'is killed'}: {dead} of its devices, {world.linked} linked after "
        f"{world.now - start:.1f} s; others kept a frame for {latest:.2f} s at most and lost {beside}; {rows} rows are "
        f"{rows * ROW_S:.1f} s of PostgreSQL"
    )
    lines.append(f"{time.process_time() - began:.0f} s of processor for {world.events['frames']} frames")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=100_000)
    parser.add_argument("--servers", type=int, default=20)
    parser.add_argument("--rest", type=float, default=12.0, help="s at rest")
    parser.add_argument("--hangs", action="store_true", help="the server that is lost does not end, but says nothing")
    asked = parser.parse_args()
    sys.stdout.write(told(asked.devices, asked.servers, asked.rest, hangs=asked.hangs) + "\n")


if __name__ == "__main__":
    main()
