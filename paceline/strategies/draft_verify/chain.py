"""The drafter's chain: nodes below the head that it has drafted, and how many of them the verifier has been sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.strategies.decoding.prefix_tree import PrefixNode
from paceline.strategies.draft_verify.verifiers.base import Draft
from paceline.wire.verify_messages import MAX_CHAIN


@dataclass(frozen=True, slots=True)
class Examined:
    """What became of a draft in whose place a target is known."""

    nats: float  # entropy of the distribution it was drawn from
    accepted: bool
    second: bool | None  # its second guess is the target; None: it was accepted, or had none


@dataclass(slots=True)
class Chain:
    """`base` targets, then what has been sent of the chain, of which `passed` are targets by now."""

    base: int
    nodes: list[PrefixNode] = field(default_factory=list)  # below the head, in order
    drafts: list[Draft] = field(default_factory=list)  # their tokens, with what is sent beside
    entropies: list[float] = field(default_factory=list)  # nats, of the distribution that each was drawn from
    passed: int = 0
    sent: int = 0  # tokens of this base

    @property
    def unsent(self) -> list[Draft]:
        """Drafts that have not been sent."""
        return self.drafts[max(0, self.sent - self.passed) :]

    @property
    def waiting(self) -> int:
        """Drafts that wait for their verdict or for being sent."""
        return len(self.nodes)

    @property
    def full(self) -> bool:
        """No more tokens can be sent below this base."""
        return self.passed + len(self.nodes) >= MAX_CHAIN

    def add(self, node: PrefixNode, draft: Draft, nats: float) -> None:
        self.nodes.append(node)
        self.drafts.append(draft)
        self.entropies.append(nats)

    def advance(self, head: PrefixNode) -> Examined | None:
        """The next target: the node that is the head now. Returns what became of the draft in its place; None where
        there was no draft.

        Below a target that was not drafted, or not sent in time, another chain begins.
        """
        if not self.nodes:
            self.restart(head.position)
            return None
        nats, second = self.entropies[0], self.drafts[0].second
        if self.nodes[0] is not head:
            self.restart(head.position)
            return Examined(nats, False, None if second is None else second == head.token)
        del self.nodes[0], self.drafts[0], self.entropies[0]
        self.passed += 1
        if self.sent < self.passed:  # the verifier got there by itself
            self.resend(head.position)
        return Examined(nats, True, None)

    def resend(self, base: int) -> None:
        """All that is below so many targets is to be sent again, as another chain."""
        self.base, self.passed, self.sent = base, 0, 0

    def restart(self, base: int) -> None:
        """Forget the chain; the next one hangs below so many targets."""
        self.resend(base)
        self.nodes.clear()
        self.drafts.clear()
        self.entropies.clear()
