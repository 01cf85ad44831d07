"""Requests played from start to end on simulated hosts and links. Deterministic given the seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lab.simulation.clock import VirtualClock
from lab.simulation.host import Accelerator, SimulatedHost, StepTime, Watts
from lab.simulation.network import Network, SimulatedLink
from lab.simulation.session import SimulatedRequest, SimulatedSession
from lab.simulation.stages import StageTimes
from paceline.engine.base import Engine
from paceline.wire.codec import decode, encode
from paceline.wire.messages import OpenSession, SessionFrame


@dataclass(frozen=True, slots=True)
class SentMessage:
    time: float  # s
    sender: str  # host
    receiver: str  # host
    message: SessionFrame
    num_bytes: int


class Simulation:
    """Hosts by name, links between those that send to each other, and requests that share the hosts' engines.

    Every message goes through the codec and is addressed to a host, whose machine of the same request receives it. In
    an unreliable network the opening of a session still arrives, once, unless the link is cut.
    """

    def __init__(
        self,
        requests: SimulatedRequest | Sequence[SimulatedRequest],
        engines: Mapping[str, Engine],
        *,
        seed: int = 0,
        network: Network | None = None,
        links: Mapping[tuple[str, str], Network] | None = None,
        forward: Mapping[str, StepTime] | None = None,
        stages: Mapping[str, StageTimes] | None = None,
        drafts: Mapping[str, tuple[Engine, StepTime]] | None = None,
        search: Mapping[str, float] | None = None,
        watts: Mapping[str, Watts] | None = None,
        linked: bool = True,
        accelerators: Mapping[str, Accelerator] | None = None,
        airbytes: Callable[[SessionFrame], float | None] | None = None,
    ) -> None:
        """engines: one a host. network: of every link that `links` does not name by its two hosts, in either order.
        forward, search, watts: times of a host's forward passes and retrievals and its powers, see `SimulatedHost`.
        stages: of hosts whose engine is cut into stages, in place of `forward`. drafts: by host, its draft
        model and the time of a forward pass of that. accelerators: by host, those that hosts share, draft
        models included. airbytes: size on the links of a message in another encoding than the program's; None: the
        program's."""
        self._airbytes = airbytes
        self.requests = (requests,) if isinstance(requests, SimulatedRequest) else tuple(requests)
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.events = 0
        self.messages: list[SentMessage] = []  # also those that a link has lost
        self.hosts = {
            name: SimulatedHost(
                self.clock,
                name,
                engine,
                forward=(forward or {}).get(name, 0.01),
                stages=(stages or {}).get(name),
                search=(search or {}).get(name, 0.0),
                watts=(watts or {}).get(name),
                accelerator=(accelerators or {}).get(name),
            )
            for name, engine in engines.items()
        }
        self._drafts = {
            name: SimulatedHost(
                self.clock,
                f"{name}'s draft model",
                engine,
                forward=seconds,
                accelerator=(accelerators or {}).get(name),
            )
            for name, (engine, seconds) in (drafts or {}).items()
        }
        given = {frozenset(pair): conditions for pair, conditions in (links or {}).items()}
        self.links: dict[frozenset[str], SimulatedLink] = {}
        for request in self.requests:
            for pair in map(frozenset, request.routes.items()):
                if pair <= self.hosts.keys() and pair not in self.links:
                    conditions = given.get(pair, network or Network())
                    self.links[pair] = SimulatedLink(self.clock, self.random, conditions, up=linked)
        self._sessions = [self._sessions_of(request) for request in self.requests]
        self._by_number: dict[int, dict[str, SimulatedSession]] = {}  # by session number: the request's sessions

    def _sessions_of(self, request: SimulatedRequest) -> dict[str, SimulatedSession]:
        routes = {sender: to for sender, to in request.routes.items() if {sender, to} <= self.hosts.keys()}
        return {
            name: SimulatedSession(
                request,
                self.hosts[name],
                self.clock,
                self,
                routes.get(name),
                self.links[frozenset((name, routes[name]))] if name in routes else None,
                self._drafts.get(name),
            )
            for name in dict.fromkeys((request.front, *routes))
        }

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def front(self) -> SimulatedSession:
        """Of the first request, at the host that faces its client."""
        return self.session(self.requests[0].front)

    @property
    def answers(self) -> list[SimulatedSession]:
        """Of each request, at the host that faces its client."""
        return [self.session(request.front, index) for index, request in enumerate(self.requests)]

    def session(self, host: str, request: int = 0) -> SimulatedSession:
        return self._sessions[request][host]

    @property
    def sent(self) -> Counter[str]:
        """Messages by the names of their structs."""
        return Counter(type(each.message).__name__ for each in self.messages)

    def run(
        self, before: Callable[[Simulation], None] | None = None, *, limit: float = 100_000.0, checks: bool = True
    ) -> SimulatedSession:
        """Play until every machine has ended, and check that no sequence is left. Returns `front`.

        before: called ahead of each event; may cut, mend, kill, cancel and change speeds. checks: every engine's
        invariants after each event, which takes most of the time where there are many hosts.
        """
        for request, answer in zip(self.requests, self.answers, strict=True):
            if request.start > 0.0:
                self.clock.at(request.start, answer.start)
            else:
                answer.start()
        while not self.clock.idle and not self._ended:
            self.events += 1
            if before is not None:
                before(self)
            self.clock.advance()
            assert self.now < limit, f"no end after {self.now} s and {len(self.front.tokens)} tokens"
            for host in self._engines if checks else ():
                host.steps.engine.check()
        for answer in self.answers:
            assert answer.finished is not None, "nothing is left to happen, and an answer has not ended"
        for host in self._engines:
            host.check_released()
        return self.front

    @property
    def _engines(self) -> list[SimulatedHost]:
        return [*self.hosts.values(), *self._drafts.values()]

    @property
    def _ended(self) -> bool:
        return (
            all(answer.finished is not None for answer in self.answers)
            and all(session.ended for sessions in self._sessions for session in sessions.values())
            and all(host.idle for host in self._engines)
        )

    # ---- the links --------------------------------------------------------------------------------------------------
    @property
    def linked(self) -> bool:
        """Every link is up."""
        return all(link.up for link in self.links.values())

    def cut(self, *between: str, kill: str | None = None) -> None:
        """Cut the link between two hosts, or with no hosts named every link.

        kill: a host whose program dies, and with it its links: none of its machines ends in order.
        """
        if kill is not None:
            for sessions in self._sessions:
                if kill in sessions:
                    assert not sessions[kill].faces_client, "an answer cannot outlive the host that faces the client"
                    sessions[kill].die()
        for pair in self._named(between):
            if self.links[pair].up and (kill is None or kill in pair):
                self.links[pair].cut()
                for session in self._at(pair):
                    session.link_lost()

    def mend(self, *between: str) -> None:
        """Bring the link between two hosts up again, or with no hosts named every link."""
        for pair in self._named(between):
            if not self.links[pair].up:
                self.links[pair].mend()
                for session in self._at(pair):
                    if session.faces_client:
                        session.link_back()

    def _named(self, between: tuple[str, ...]) -> list[frozenset[str]]:
        return [frozenset(between)] if between else list(self.links)

    def _at(self, pair: frozenset[str]) -> list[SimulatedSession]:
        """Sessions at both ends of a link, of the requests that use it."""
        return [
            sessions[name]
            for request, sessions in zip(self.requests, self._sessions, strict=True)
            if pair in map(frozenset, request.routes.items())
            for name in sorted(pair)
        ]

    # ---- exchange ---------------------------------------------------------------------------------------------------
    def new_session(self, opener: SimulatedSession) -> int:
        number = len(self._by_number) + 1
        self._by_number[number] = next(each for each in self._sessions if opener in each.values())
        return number

    def post(self, sender: SimulatedSession, receiver: str, message: SessionFrame) -> None:
        data = encode(message)
        sender.egress.sent(message, len(data))
        self.messages.append(SentMessage(self.now, sender.host.name, receiver, message, len(data)))

        def arrive() -> None:
            arrived = decode(data)
            assert isinstance(arrived, SessionFrame)
            self._by_number[arrived.session][receiver].receive(arrived)

        link = self.links[frozenset((sender.host.name, receiver))]
        airbytes = None if self._airbytes is None else self._airbytes(message)
        reliable = isinstance(message, OpenSession)
        sender.energy.send(len(data), link.bandwidth(sender.host.name))
        link.carry(sender.host.name, len(data), arrive, reliable=reliable, airbytes=airbytes)
