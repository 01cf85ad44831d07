"""Which tokens the distributions of an answer's sides give after tokens that are known: an answer computed again.

Rows come from whoever computes them; `runtime.proof` holds the result against what is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.aggregation.aggregators import LAST_LEVEL, Aggregator, OwnDist
from paceline.core.aggregation.weights import side_weights
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import filter_top, sample
from paceline.core.side import Side
from paceline.strategies.base import Branch, OutputRules
from paceline.strategies.decoding.branch_decoder import BranchMixer, log_h_of
from paceline.strategies.decoding.prefix_tree import PrefixTree


class Share:
    """One side's part: its branches, which go on with the recorded tokens."""

    def __init__(
        self, rules: OutputRules, branches: Sequence[Branch], prefix: Sequence[int], *, rescoring: bool
    ) -> None:
        """prefix: output tokens of earlier stretches."""
        self.branches = tuple(branches)
        self._mixer = BranchMixer(rules, rescoring=rescoring, keep_heads=False)
        self._tree = PrefixTree(len(prefix))
        self._mixer.start(self.branches, tuple(prefix), self._tree.head)
        self.first = len(prefix) - self._mixer.num_prefix_rows  # position of the first row that is needed

    def take(self, rows: Sequence[Dist], text: Sequence[int], position: int) -> None:
        """The next position's rows, one of each branch."""
        tree = self._tree
        if position < tree.head.position:
            for branch, row in enumerate(rows):
                self._mixer.take_prefix_rows(branch, (row,))
            return
        while tree.head.position < position:
            tree.advance(text[tree.head.position])
        self._mixer.score(tree.head, rows, text[:position] if self._mixer.needs_path else ())

    @property
    def dist(self) -> OwnDist:
        """This side's distribution after the rows taken so far."""
        own = self._tree.head.own_dist
        assert own is not None, "its rows have been taken"
        return own

    @property
    def log_h(self) -> float | None:
        """Of its documents there."""
        known = self._tree.head.log_evidence  # where scores follow the text
        return log_h_of(self.branches) if known is None else known


@dataclass(frozen=True, slots=True)
class TargetRule:
    """Which token follows from the distributions of the sides that count."""

    rules: OutputRules
    aggregator: Aggregator | None  # None: one side writes
    log_h: Mapping[Side, float | None]  # of both sides, where both write and scores do not follow the text

    def owed(self, shares: Mapping[Side, Share], position: int) -> int:
        sampling, (side, *rest) = self.rules.sampling, shares
        own = shares[side].dist
        if self.aggregator is None:
            return sample(filter_top(own.whole, sampling), sampling, position)
        log_h = {each: share.log_h for each, share in shares.items()} if rest else self.log_h
        theirs = self.aggregator.to_wire(rest[0], shares[rest[0]].dist, position, LAST_LEVEL) if rest else None
        target = self.aggregator.decide(side, own, theirs, side_weights(log_h), position)
        assert target is not None, "all is known"
        return target.token


def tokens_owed(
    rule: TargetRule,
    shares: Mapping[Side, Share],
    text: Sequence[int],
    first: int,
    rows: Sequence[Sequence[Dist]],
    start: int,
) -> list[int]:
    """The tokens at the next positions, from `start` on. text: the recorded tokens. rows: of each branch of each share,
    from the position `first` on."""
    found: list[int] = []
    for position in range(first, first + len(rows[0])):
        branches = iter(rows)
        for share in shares.values():
            share.take([next(branches)[position - first] for _ in share.branches], text, position)
        if position >= start:
            found.append(rule.owed(shares, position))
    return found
