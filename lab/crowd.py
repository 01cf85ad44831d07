"""A hundred thousand devices in virtual time, on the links that are served: `python -m lab.crowd --devices 100000`.

Both ends of every link are the machine of `paceline.wire.link` with its handshake and heartbeat (signatures alone are
left out), and devices dial as `runtime.link.connection` does. A server is a core that takes `LINK_S` for a link and
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

from paceline.api.http.hop import chosen
from paceline.runtime.link.connection import SPREAD_S, back_off
from paceline.runtime.link.transport import OPEN_TIMEOUT_S
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Authenticate, Connected, Disconnected, Effect, TickAt, Transmit
from paceline.wire.identity import DiallerHandshake, ListenerHandshake
from paceline.wire.link import HEARTBEAT_S, LinkMachine
from paceline.wire.messages import NONCE_BYTES, Introduction

DELAY_S: Final = 0.025  # of a frame
LINK_S: Final = 0.0016  # of a server's core, a link that is made: half of it until it is open, by assumption
FRAME_S: Final = 0.12e-3 * HEARTBEAT_S / 2.0  # a frame of a link at rest, of which two come in a heartbeat
ROW_S: Final = 0.0007  # of PostgreSQL, to record a link
LONGEST_S: Final = 120.0  # until all are linked, or it is told that they are not
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

    def takes(self, now: float, cost: float) -> float:
        """When it has done what comes now and takes so many seconds of it."""
        self.latest = max(self.latest, self.free - now)
        self.free = max(self.free, now) + cost
        self.worked += cost
        return self.free


@dataclass(eq=False)
class Device:
    servers: list[int]  # by place, the one to try next is the first; each device has an order of its own
    tried: int = 0  # servers of this round
    failures: int = 0  # rounds in a row without a link
    attempt: int = 0

    def turn(self) -> None:
        self.servers.append(self.servers.pop(0))


class World:
    def __init__(self, devices: int, servers: int, seed: int = 1) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self.cores = [Core(f"server-{number}") for number in range(servers)]
        self.ended = set[Core]()  # and do not answer a dial
        self.linked = 0
        self.events: Counter[str] = Counter()
        self._number = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        names = [core.name for core in self.cores]
        for number in range(devices):
            first = names.index(chosen(names, "", f"device-{number}"))
            others = self.chance.sample([place for place in range(servers) if place != first], servers - 1)
            self.at(self.chance.random() * HEARTBEAT_S, self.dial, Device([first, *others]))

    def at(self, moment: float, call: Callable[..., None], *values: object) -> None:
        self._number += 1
        heapq.heappush(self._heap, (max(moment, self.now), self._number, call, values))

    def run(self, until: Callable[[], bool], longest: float) -> None:
        end = self.now + longest
        while self._heap and self._heap[0][0] <= end and not until():
            self.now, _, call, values = heapq.heappop(self._heap)
            call(*values)

    def dial(self, device: Device) -> None:
        core = self.cores[device.servers[0]]
        device.attempt += 1
        if core.alive:
            self.at(self.now + DELAY_S, self.asked, device, core, device.attempt)
        if core in self.ended:
            self.at(self.now + 2.0 * DELAY_S, self.failed, device)
        else:
            self.at(self.now + OPEN_TIMEOUT_S, self.given_up, device, device.attempt)

    def asked(self, device: Device, core: Core, attempt: int) -> None:
        if core.alive:
            self.at(core.takes(self.now, LINK_S / 2.0), self.opened, device, core, attempt)

    def opened(self, device: Device, core: Core, attempt: int) -> None:
        if device.attempt != attempt or not core.alive:
            return  # given up meanwhile
        device.attempt += 1
        dialler = DiallerHandshake(
            PEER,
            device="d",
            keys=[Unsigned()],
            pinned=Unsigned.public_key,
            binding=b"",
            nonce=bytes(NONCE_BYTES),
            verify=lambda *_: True,
        )
        cloud = ListenerHandshake(PEER, key=Unsigned(), binding=b"", nonce=bytes(NONCE_BYTES), verify=lambda *_: True)
        ends = End(self, LinkMachine(dialler), core, device), End(self, LinkMachine(cloud), core, device)
        for end, other in (ends, ends[::-1]):
            end.other = other
        core.links.add(ends[0])
        for end in ends:
            end.do(end.machine.connection_made(self.now))

    def given_up(self, device: Device, attempt: int) -> None:
        if device.attempt == attempt:
            self.events["given up"] += 1
            self.failed(device)

    def failed(self, device: Device) -> None:
        """Go on as `Dialer.run` does: to the next server, and wait after each round."""
        device.attempt += 1
        device.tried += 1
        device.turn()
        wait = 0.0
        if device.tried % len(self.cores) == 0:
            device.failures += 1
            wait = back_off(device.failures, self.chance.random())
        self.at(self.now + wait, self.dial, device)

    def lose(self, core: Core, *, hangs: bool) -> None:
        core.alive = False
        if not hangs:
            self.ended.add(core)
        for end in list(core.links) if not hangs else ():
            end.do(end.machine.connection_lost(1006))


class End:
    """One end of a link."""

    other: End

    def __init__(self, world: World, machine: LinkMachine, core: Core, device: Device) -> None:
        self.world, self.machine, self.core, self.device = world, machine, core, device
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
                    self.device.tried = self.device.failures = 0
                    world.linked += 1
                    world.events["links"] += 1
                case Disconnected(code=code) if self.dials:
                    self.lost(code == CloseCode.HEARTBEAT_LOST)
                case _:
                    pass

    def arrived(self, data: bytes) -> None:
        if self.dials:
            self.do(self.machine.received(data, self.world.now))
        elif self.core.alive:
            cost = FRAME_S if self.machine.is_up else LINK_S / 4.0  # hello and proof
            self.world.at(self.core.takes(self.world.now, cost), self.handled, data)

    def handled(self, data: bytes) -> None:
        self.world.events["frames"] += 1
        self.do(self.machine.received(data, self.world.now))

    def tick(self) -> None:
        if self.dials or self.core.alive:
            self.do(self.machine.tick(self.world.now))

    def lost(self, is_silent: bool) -> None:
        world = self.world
        self.core.links.discard(self)
        world.events["lost"] += 1
        world.linked -= self.was_up
        if self.core.alive:
            self.other.do(self.other.machine.connection_lost(1006))
        if self.was_up:
            if is_silent:
                self.device.turn()
            world.at(world.now + world.chance.random() * SPREAD_S, world.dial, self.device)
        else:
            world.failed(self.device)


def told(devices: int, servers: int, rest: float, *, hangs: bool) -> str:
    world, began = World(devices, servers), time.process_time()
    world.run(lambda: world.linked == devices, LONGEST_S)
    lines = [
        f"{devices} devices, {servers} servers: {world.linked} linked after {world.now:.1f} s; "
        f"{world.events['given up'] + world.events['lost']} attempts were given up"
    ]
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
