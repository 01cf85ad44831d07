"""The verifier's copy of the drafter's chain, put together from its messages. Knows no tree and no engine."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.strategies.draft_verify.verifiers.base import Draft
from paceline.wire.verify_messages import DraftChain, DraftsWithDists


class PeerChain:
    """A chain hangs below the first `base` targets. A later base replaces the chain: the drafter has gone another way.

    A message that comes before the one it follows is dropped: the drafter's tokens are a help, never a need.
    """

    def __init__(self) -> None:
        self._base = 0
        self._drafts: list[Draft] = []
        self.ended = False  # the drafter has said that it drafts no more below this base
        self.idle = False  # it has drafted nothing there, and says so again only when it drafts: it is not waited for

    def receive(self, message: DraftChain, drafts: Sequence[Draft]) -> None:
        """drafts: those of the message."""
        if message.base < self._base:
            return
        if message.base > self._base:
            self._base, self._drafts, self.ended = message.base, [], False
        end = message.offset + len(drafts)
        if message.offset <= len(self._drafts) < end:
            self._drafts[message.offset :] = drafts
            self.ended = self.idle = False
        says_so = message.last if isinstance(message, DraftsWithDists) else not drafts
        self.ended = self.ended or (says_so and end == len(self._drafts))
        self.idle = self.idle or (self.ended and not self._drafts)

    def below(self, targets: Sequence[int]) -> list[Draft] | None:
        """Drafts that follow these targets, from the first on; None where the drafter does not know all of them, or
        has drafted others."""
        known = len(targets) - self._base
        if known < 0 or [draft.token for draft in self._drafts[:known]] != list(targets[self._base :]):
            return None
        return self._drafts[known:]
