"""The interface of verifiers: what the machines of both sides ask of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.aggregation.aggregators import OwnDist
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams, filter_top
from paceline.core.verification import Coins, draft_dist
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode
from paceline.wire.verify_messages import DraftChain


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted token, and what its verifier is told of the distribution that it was drawn from."""

    token: int
    drawn_from: bytes = b""  # encoded by `wire.payloads.draft_codec`
    second: int | None = None  # what the target may be where it is not `token`: a leaf beside the chain


@dataclass(frozen=True, slots=True)
class LeftToDrafter:
    """The draft is rejected, and the drafter draws the target from the residual of this head of its distribution."""

    head: Dist


Outcome = int | LeftToDrafter  # the next target, or that the drafter draws it


@dataclass(frozen=True, slots=True)
class Row:
    """The target's place behind a prefix."""

    decoder: BranchDecoder
    node: PrefixNode
    sampling: SamplingParams

    def own(self) -> int | None:
        """The target model's own token by the common noise; None where the row has not been computed."""
        return self.decoder.sample(self.node)

    def final(self) -> Dist | None:
        """Its distribution, after top-k, top-p and min-p."""
        dist = self.decoder.dist(self.node)
        return None if dist is None else filter_top(dist, self.sampling)


class Verifier(Protocol):
    """Both sides' halves. A place without a draft has the target model's own token: of the same distribution."""

    reads_dists: bool  # of rows, on both sides; else tokens that engines sample suffice
    needs_drafts: bool  # a draft is of use only where the target has not been decided without it
    drafts_ends: bool  # the end of the text is a draft like any other: what is drafted may not depend on what was drawn

    # ---- the drafter's half
    def draft(self, own: OwnDist, position: int, *, second: bool) -> Draft:
        """The next draft. own: the draft model's distribution there. second: with a second guess, where the verifier
        takes them and one is likely."""

    def message(
        self, epoch: int, base: int, offset: int, drafts: Sequence[Draft], *, last: bool, recovered: int | None
    ) -> DraftChain:
        """What is sent of these drafts. The other arguments are fields of `DraftChain` and `DraftsWithDists`."""

    def recover(self, own: OwnDist | None, head: Dist, position: int) -> int:
        """The target that the cloud has left to the drafter. own: as of `draft`, if it is known; head: as of
        `LeftToDrafter`."""

    # ---- the target's half
    def received(self, message: DraftChain) -> list[Draft]:
        """The drafts of a message. Raises RemoteProtocolError for what is no distribution."""

    def decide(self, row: Row, draft: Draft | None) -> Outcome | None:
        """The next target; None where the row has not been computed."""


class AcceptOrReject:
    """What *rejection* and *truncated* have in common: drafts are drawn from a distribution on the grid, with coins
    that are independent of the common noise."""

    reads_dists = needs_drafts = drafts_ends = True

    def __init__(self, sampling: SamplingParams, *, mass: float = 1.0, max_ids: int | None = None) -> None:
        """mass, max_ids: as of `draft_dist`."""
        self.coins = Coins(sampling.seed)
        self._sampling, self._mass, self._max_ids = sampling, mass, max_ids

    def dist(self, own: OwnDist) -> Dist:
        """The distribution that drafts are drawn from."""
        return draft_dist(filter_top(own.whole, self._sampling), mass=self._mass, max_ids=self._max_ids)

    def drawn(self, dist: Dist, position: int) -> int:
        return self.coins.draw(position, dist, "draft")

    def recover(self, own: OwnDist | None, head: Dist, position: int) -> int:
        """Without the draft distribution, which an honest target side never brings about, a token of the head."""
        if own is None:
            return self.coins.draw(position, head, "recover")
        return self.coins.recover(position, self.dist(own), head)
