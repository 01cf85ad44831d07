"""One answer of `aggregate` replayed in virtual time, event by event, to compare placement rules of the aggregator.

Replayed: the accepted drafts of each side, the time of each decode step, and a link with an oscillating one-way delay.
Simulated: two decoders that draft ahead up to a bound, drafts and targets in flight, rollbacks with epochs, and the
hand-over of the aggregator by a message after the last target. The rules are in `placement_rules`. No tokens, models
or machines: acceptance does not depend on time, aggregation takes no time, and the link keeps the order of its messages
and loses none, like TCP.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.core.clock import DecodeSpeed
from paceline.core.side import SIDES, Side, other


@dataclass(frozen=True, slots=True)
class Link:
    """One-way delay, the same in both directions: a base, uniform noise, and an extra that oscillates by a fifth."""

    extra: float  # s
    base: float = 0.002  # s
    noise: float = 0.006  # s, maximum
    swing: float = 0.2  # of `extra`
    pace: float = 10.0  # s per radian

    def expected(self, now: float) -> float:
        return self.base + self.noise / 2.0 + self.extra * (1.0 + self.swing * math.sin(now / self.pace))

    def delay(self, now: float, rng: np.random.Generator) -> float:
        """Delay of a message sent at `now`."""
        return self.expected(now) + self.noise * (float(rng.random()) - 0.5)


@dataclass(frozen=True, slots=True)
class Trace:
    """Acceptance and decode time of each token of one answer."""

    accepted: Mapping[Side, Sequence[bool]]
    decode: Mapping[Side, Sequence[float]]  # s

    @property
    def tokens(self) -> int:
        return len(self.accepted["cloud"])

    def synchronous(self) -> Trace:
        """The same answer token by token: no draft made before the previous target is accepted."""
        return Trace({side: [False] * self.tokens for side in SIDES}, self.decode)


class Rule(Protocol):
    """Placement rule of the aggregator. Each side calls it with its name and its observations."""

    start: Side  # initial place of the aggregator

    def decoded(self, side: Side, step: int, seconds: float) -> DecodeSpeed:
        """A draft was decoded; returns the side's speed, to be sent with the draft."""

    def received(self, side: Side, speed: DecodeSpeed, delay: float) -> None:
        """A draft of the other side arrived after `delay` seconds."""

    def decided(self, side: Side, accepted: Mapping[Side, bool]) -> None: ...

    def choose(self, side: Side, targets: int, now: float, *, ready: bool) -> Side:
        """New place of the aggregator; called by its holder after each burst of targets. ready: its next draft is
        there."""

    def moved(self, side: Side, holder: Side, targets: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Result:
    seconds: float  # until the last target is made
    hand_overs: int


@dataclass(frozen=True, slots=True)
class Draft:
    side: Side
    step: int
    epoch: int
    speed: DecodeSpeed
    sent: float  # s


@dataclass(frozen=True, slots=True)
class Target:
    step: int


@dataclass(frozen=True, slots=True)
class HandOver:
    targets: int  # made before


@dataclass(frozen=True, slots=True)
class Decoded:
    step: int
    epoch: int
    seconds: float


Event = Draft | Target | HandOver | Decoded


@dataclass(slots=True)
class Node:
    """State of one side, which may lag behind the other."""

    side: Side
    targets: int = 0  # known
    drafted: int = 0  # the next step to decode
    decoding: bool = False
    epoch: dict[Side, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))  # each side's rejections
    drafts: dict[Side, dict[int, int]] = field(default_factory=lambda: {side: {} for side in SIDES})  # step: epoch

    def holds(self, side: Side, step: int) -> bool:
        return self.drafts[side].get(step) == self.epoch[side]

    def receive(self, draft: Draft) -> None:
        """Store a draft. The link keeps the order, so a draft of the newest epoch comes last."""
        self.drafts[draft.side][draft.step] = draft.epoch

    def apply(self, step: int, accepted: Mapping[Side, bool]) -> None:
        """Apply a target: drop the drafts after a rejected token, and stop their decoding."""
        self.targets = step + 1
        for side in SIDES:
            self.drafts[side].pop(step, None)
            self.epoch[side] += not accepted[side]
        if not accepted[self.side]:
            self.drafted, self.decoding = self.targets, False


class Replay:
    """One run. `seed` determines the noise of the link: rules with equal decisions get equal delays."""

    def __init__(
        self,
        trace: Trace,
        link: Link,
        rule: Rule,
        *,
        ahead: int = 10,  # tokens a side drafts beyond the last target it knows
        seed: Sequence[int] = (0,),
    ) -> None:
        self._trace, self._link, self._rule, self._ahead = trace, link, rule, ahead
        self._rng, self._now = np.random.default_rng(seed), 0.0
        self._events: list[tuple[float, int, Side, Event]] = []  # (time, order of creation, side, event)
        self._latest = dict.fromkeys(SIDES, 0.0)  # arrival of the last message to each side
        self._num_events = self._hand_overs = 0
        self._holder: Side | None = rule.start  # None: handed over, in flight
        self._nodes = {side: Node(side) for side in SIDES}
        self._done = False

    def run(self) -> Result:
        for node in self._nodes.values():
            self._decode(node)
        while not self._done:
            self._now, _, side, event = heapq.heappop(self._events)
            self._on(self._nodes[side], event)
        return Result(self._now, self._hand_overs)

    def _on(self, node: Node, event: Event) -> None:
        match event:
            case Decoded(step, epoch, seconds):
                if epoch != node.epoch[node.side]:
                    return  # interrupted by a rollback
                speed = self._rule.decoded(node.side, step, seconds)
                draft = Draft(node.side, step, epoch, speed, self._now)
                node.drafted, node.decoding = step + 1, False
                node.receive(draft)
                self._send(node, draft)
                self._decode(node)
            case Draft():
                node.receive(event)
                self._rule.received(node.side, event.speed, self._now - event.sent)
            case Target(step):
                self._apply(node, step)
            case HandOver(targets):
                self._holder = node.side
                self._rule.moved(node.side, node.side, targets)
        if self._holder == node.side:
            self._aggregate(node)

    def _aggregate(self, node: Node) -> None:
        """Make targets for all available pairs of drafts, then let the rule place the aggregator."""
        before = step = node.targets
        while step < self._trace.tokens and node.holds("cloud", step) and node.holds("device", step):
            self._apply(node, step)
            self._send(node, Target(step))
            step = node.targets
        self._done = step == self._trace.tokens
        if self._done or step == before:
            return
        ready = node.holds(node.side, node.targets)
        if self._rule.choose(node.side, node.targets, self._now, ready=ready) != node.side:
            self._holder, self._hand_overs = None, self._hand_overs + 1
            self._rule.moved(node.side, other(node.side), node.targets)
            self._send(node, HandOver(node.targets))

    def _apply(self, node: Node, step: int) -> None:
        accepted = {side: bool(self._trace.accepted[side][step]) for side in SIDES}
        node.apply(step, accepted)
        self._rule.decided(node.side, accepted)
        self._decode(node)

    def _decode(self, node: Node) -> None:
        """Start decoding the next draft, if the side is idle and within its draft-ahead bound."""
        step = node.drafted
        if node.decoding or step >= self._trace.tokens or step - node.targets >= self._ahead:
            return
        node.decoding = True
        seconds = self._trace.decode[node.side][step]
        self._at(self._now + seconds, node.side, Decoded(step, node.epoch[node.side], seconds))

    def _send(self, node: Node, message: Draft | Target | HandOver) -> None:
        receiver = other(node.side)
        arrival = max(self._latest[receiver], self._now + self._link.delay(self._now, self._rng))
        self._latest[receiver] = arrival
        self._at(arrival, receiver, message)

    def _at(self, time: float, side: Side, event: Event) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, side, event))
