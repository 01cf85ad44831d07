"""`pipeline` (FlowSpec): a draft tree flows through an engine that has several forwards under way.

The tree is sent in segments, the best nodes first. When one comes back, the walk goes on from the last decided token
through all that is known. Then the tree is pruned to what hangs below the new head, rows under way included; it is
expanded with a tree drafted from the new context, or, where nothing was accepted, with more nodes of the same; and the
next segment is sent. Where nothing under way is left, all of it is dropped and a new tree begins. On an engine with one
forward under way it is step-wise tree speculation.

What the paper's stages do in lockstep happens here when an answer comes: empty segments need no place in the pipe.

Where the drafts come from is `strategies.drafting`'s; with a draft model a segment waits for its next forward as long
as that is expected to pay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.strategies.base import Effect, FinishReason, MachineConfig, Strategy, WakeAt
from paceline.strategies.decoding.branch_decoder import MAX_OPEN_ROWS, BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree, TreeDrafter
from paceline.strategies.decoding.table_drafts import may_follow
from paceline.strategies.drafting import AnswerDrafter, DraftingSolo

TREE_NODES: Final = 80  # of a tree that is drafted: L
MAX_GROWTH: Final = 4  # trees' worth of nodes that one context is asked for at most


@dataclass(eq=False, repr=False)
class TreeGrowth:
    """The tree of one answer."""

    config: MachineConfig
    tree: PrefixTree
    decoder: BranchDecoder
    drafter: AnswerDrafter
    nodes: int = TREE_NODES  # of a tree
    is_new_round: bool = True  # the head is none of the nodes that were drafted
    rounds: int = 0  # trees begun
    _drafted: int = 0  # nodes asked for since the head moved

    def advance(self, *, drafted: bool) -> None:
        """A token is decided; the head has moved. drafted: it was in the tree."""
        self.is_new_round = not drafted
        self._drafted = 0

    def read(self, output: Iterable[int], sequences: int) -> None:
        """The tokens of a walk, for tables, which learn from the rows answered too. sequences: of the last step."""
        feed, decoder = self.drafter.feed, self.decoder
        feed.append(output)
        goes_on = feed.take_rows(decoder.pop_branch_dists(), self.tree.head, decoder.mixer.plain, sequences)
        decoder.num_top = NUM_SUCCESSORS if goes_on else 0

    def waits(self, room: int, now: float) -> bool:
        """The next segment waits for better drafts. Call after `expand`. room: rows it may have."""
        return self.drafter.waits([node.score for node in self.tree.best(room)], room, now)

    @property
    def wanted(self) -> int:
        """Nodes of the draft model's tree: what has been sent, and more than the next segment takes."""
        return min(self.tree.num_sent + 2 * self.config.options.drafting.rows, MAX_GROWTH * self.nodes)

    def expand(self, room: int) -> None:
        """Draft, where the tree is to grow: as much as the next segment takes, the rest while that is on its way.
        room: rows of the next segment."""
        if not self.config.options.drafting.ahead:
            return
        if self.drafter.model is not None:
            self._draft(self.wanted)
            return
        waiting = len(self.tree.waiting)
        wanted = min(self.tree.num_sent + room, MAX_GROWTH * self.nodes)
        if self._drafted == 0 or (waiting < room and self._drafted < wanted):
            self._draft(wanted)

    def _draft(self, count: int) -> None:
        """Merge a tree of the present context into the tree. Drafts that still wait are of an older one."""
        if self._drafted == 0 or self.drafter.model is not None:
            self.tree.drop_waiting()
        self.rounds += self.is_new_round and self._drafted == 0
        admits = partial(may_follow, self.config, self.decoder)
        self.tree.merge(self.drafter.draft(count, self.tree.head.position), admits)
        self._drafted = count


# The machine: what is under way of the tree, and what is sent next.


LEAST_GAIN: Final = 0.1  # expected tokens of a segment that is worth sending


class Pipeline(DraftingSolo):
    """As many segments of the tree under way as the engine takes."""

    def __init__(
        self,
        config: MachineConfig,
        *,
        drafter: TreeDrafter | AnswerDrafter | None = None,
        tree: type[PrefixTree] = PrefixTree,
        growth: type[TreeGrowth] = TreeGrowth,
        nodes: int = TREE_NODES,
        least_gain: float = LEAST_GAIN,
    ) -> None:
        """For baselines: drafter, in place of its own; tree, growth; nodes of a tree."""
        drafts = drafter if isinstance(drafter, AnswerDrafter) else AnswerDrafter(config, drafter)
        super().__init__(config, drafts, tree(len(config.seat.targets)), several=True)
        self._growth = growth(config, self._tree, self._decoder, drafts, nodes=nodes)
        # One fewer than the engine asks for, which waits at its first stage: what it would hold is better chosen when
        # the stage is free, from what has come by then.
        self._max_under_way = max(1, config.means.depth - 1)
        self._max_rows = max(1, min(config.options.drafting.rows, MAX_OPEN_ROWS))
        self._least_gain = least_gain
        self._counts = {"drafted": 0.0, "accepted": 0.0, "segments": 0.0}

    # ---- a segment comes back ---------------------------------------------------------------------------------------
    def _advanced(self, token: int, *, drafted: bool) -> None:
        self._counts["accepted"] += drafted
        super()._advanced(token, drafted=drafted)
        self._growth.advance(drafted=drafted)

    def _walked(self, output: list[int], reason: FinishReason | None) -> None:  # noqa: ARG002
        self._growth.read(output, self._step_size.sequences)

    # ---- segments are sent ------------------------------------------------------------------------------------------
    @property
    def _wanted(self) -> int:
        return self._growth.wanted

    def _next_segment(self) -> list[PrefixNode]:
        """The head, or what is worth it. None while they wait for drafts."""
        growth = self._growth
        room = min(self._max_rows, self._decoder.spare_rows(()))
        if room <= 0:
            return []
        growth.expand(room)
        if self._waits and growth.waits(room, self._now):
            return []
        while chosen := self._tree.best(room):
            if self._tree.head.cached and sum(node.score for node in chosen) < self._least_gain:
                break
            if nodes := self._admitted(chosen):
                growth.is_new_round = False
                self._counts["segments"] += 1
                self._counts["drafted"] += len(nodes)
                return nodes
        return []

    # ---- meanwhile --------------------------------------------------------------------------------------------------
    @property
    def _is_due(self) -> bool:
        return self._drafter.feed.is_due

    def _learn(self) -> list[Effect]:
        return [WakeAt(self._now)] if self._drafter.feed.slice(self._step_size.sequences) else []

    def stats(self) -> dict[str, float]:
        decoder = self._decoder
        counted = {"rounds": self._growth.rounds, "draft_forwards": self._drafter.forwards}
        counted |= {"forwards": decoder.forwards, "rows": decoder.rows, "dropped": decoder.dropped}
        return {**self._counts, **{name: float(value) for name, value in counted.items()}}


pipeline = Strategy(
    name="pipeline",
    machine=Pipeline,
    text_of="front",
    uses_draft_model=True,
)
