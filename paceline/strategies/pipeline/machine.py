"""`pipeline` (FlowSpec): a draft tree flows through an engine that has several forwards under way.

The tree is sent in segments, the best nodes first. When one comes back, the walk goes on from the last decided token
through all that is known. Then the tree is pruned to what hangs below the new head, rows under way included; it is
expanded with a tree drafted from the new context, or, where nothing was accepted, with more nodes of the same; and the
next segment is sent. Where nothing under way is left, all of it is dropped and a new tree begins. On an engine with one
forward under way it is step-wise tree speculation.

What the paper's stages do in lockstep happens here when an answer comes: empty segments need no place in the pipe.
"""

from __future__ import annotations

from typing import Final

from paceline.strategies.base import (
    Branch,
    DraftModelLost,
    Effect,
    FinishReason,
    FromDraftModel,
    MachineConfig,
    Strategy,
    WakeAt,
)
from paceline.strategies.decoding.branch_decoder import MAX_OPEN_ROWS
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree, TreeDrafter
from paceline.strategies.pipeline.growth import TREE_NODES, TreeGrowth
from paceline.strategies.solo import Solo

LEAST_GAIN: Final = 0.1  # expected tokens of a segment that is worth sending


class Pipeline(Solo):
    """As many segments of the tree under way as the engine takes."""

    drafts = True

    def __init__(
        self,
        config: MachineConfig,
        *,
        drafter: TreeDrafter | None = None,
        tree: type[PrefixTree] = PrefixTree,
        growth: type[TreeGrowth] = TreeGrowth,
        nodes: int = TREE_NODES,
        least_gain: float = LEAST_GAIN,
    ) -> None:
        """drafter: in place of its own, which drafts from a model where there is one, else from look-up tables. The
        other arguments are for baselines; nodes: of a tree."""
        super().__init__(config, tree(len(config.seat.targets)), several=True)
        self._growth = growth(config, self._tree, self._decoder, drafter, nodes=nodes)
        # One fewer than the engine asks for, which waits at its first stage: what it would hold is better chosen when
        # the stage is free, from what has come by then.
        self._max_under_way = max(1, config.means.depth - 1)
        self._max_rows = max(1, min(config.options.drafting.rows, MAX_OPEN_ROWS))
        self._least_gain = least_gain
        self._waits = True  # the next segment, for drafts of the draft model, where that pays
        self._counts = {"drafted": 0.0, "accepted": 0.0, "segments": 0.0}

    def _begin(self, branches: tuple[Branch, ...], max_new_tokens: int | None) -> list[Effect]:
        return [*super()._begin(branches, max_new_tokens), *self._growth.begin(branches, max_new_tokens)]

    # ---- a segment comes back ---------------------------------------------------------------------------------------
    def _step(self) -> list[Effect]:
        self._growth.answered(self._now, self._step_size)
        return super()._step()

    def _advanced(self, token: int, *, drafted: bool) -> None:
        self._counts["accepted"] += drafted
        self._growth.advance(token, drafted=drafted)

    def _walked(self, output: list[int], reason: FinishReason | None) -> None:  # noqa: ARG002
        self._growth.read(output)

    # ---- segments are sent ------------------------------------------------------------------------------------------
    def _fill(self, *, waits: bool = True) -> list[Effect]:
        growth, self._waits = self._growth, waits
        growth.deadline = None
        effects = growth.compute(self._now)
        if self._decoder.forwards == 0:
            return effects  # the prompts have not been computed yet
        effects += super()._fill()
        effects += growth.compute(self._now)
        return effects if growth.deadline is None else [*effects, WakeAt(growth.deadline)]

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
        return self._growth.is_due

    def _wake(self) -> list[Effect]:
        if self._growth.deadline is not None:
            return self._fill(waits=self._now < self._growth.deadline)
        return [WakeAt(self._now)] if self._growth.learn() else []

    def _hear(self, event: FromDraftModel | DraftModelLost) -> list[Effect]:
        if isinstance(event, FromDraftModel):
            self._now = event.answer.now
            self._growth.model_answered(event.answer)
        else:
            self._growth.model_lost()
        return self._fill()

    def _stats(self) -> dict[str, float]:
        decoder, growth = self._decoder, self._growth
        counted = {"rounds": growth.rounds, "draft_forwards": growth.draft_forwards}
        counted |= {"forwards": decoder.forwards, "rows": decoder.rows, "dropped": decoder.dropped}
        return {**self._counts, **{name: float(value) for name, value in counted.items()}}


pipeline = Strategy(
    name="pipeline",
    machine=Pipeline,
    participants="one side",
    text_of="front",
    uses_draft_model=True,
)
