"""`pipeline` (FlowSpec): a draft tree flows through an engine that has several forwards under way.

The tree is sent in segments, the best nodes first. When one comes back, the walk goes on from the last decided token
through all that is known: at each node the target's own token is sampled with the common noise, so the text is
`autoregressive`'s at any temperature, whatever was drafted. Then the tree is pruned to what hangs below the new head,
rows under way included; it is expanded with a tree drafted from the new context, or, where nothing was accepted, with
more nodes of the same; and the next segment is sent. Where nothing under way is left, all of it is dropped and a new
tree begins. On an engine with one forward under way it is step-wise tree speculation.

What the paper's stages do in lockstep happens here when an answer comes: empty segments need no place in the pipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.strategies.base import (
    Cancelled,
    DraftModelLost,
    Effect,
    Emit,
    Event,
    Finish,
    FinishReason,
    FromDraftModel,
    MachineConfig,
    Retrieve,
    Retrieved,
    Sampled,
    Scored,
    Started,
    Strategy,
    TimerFired,
    WakeAt,
)
from paceline.strategies.decoding.branch_decoder import MAX_OPEN_ROWS, BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree, TreeDrafter
from paceline.strategies.pipeline.growth import TREE_NODES, TreeGrowth

LEAST_GAIN: Final = 0.1  # expected tokens of a segment that is worth sending
LEARN_DELAY_S: Final = 0.001  # before lessons compete with the engine's thread for the interpreter


class Pipeline:
    """Needs no peer and ignores every event about one."""

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
        self._config = config
        self._tree = tree(len(config.seat.targets))
        self._decoder = BranchDecoder(
            config.output,
            rescoring=config.options.rescoring,
            lazy=True,
            keep_plain=config.output.needs_dists,
            samples=config.takes_tokens,
            several=True,
        )
        self._growth = growth(config, self._tree, self._decoder, drafter, nodes=nodes)
        # One fewer than the engine asks for, which waits at its first stage: what it would hold is better chosen when
        # the stage is free, from what has come by then.
        self._max_under_way = max(1, config.means.depth - 1)
        self._max_rows = max(1, min(config.options.drafting.rows, MAX_OPEN_ROWS))
        self._least_gain = least_gain
        self._started = False  # the prompts have been computed
        self._now = 0.0  # s, of the last event that says so
        self._stats = {"drafted": 0.0, "accepted": 0.0, "segments": 0.0}
        self._finished = False

    def on(self, event: Event) -> Sequence[Effect]:
        if self._finished:
            return []
        match event:
            case Started():
                return [Retrieve()]
            case Retrieved(branches, max_new_tokens):
                targets, head = self._config.seat.targets, self._tree.head
                started = self._decoder.start(branches, targets, head, max_new_tokens)
                return [*started, *self._growth.begin(branches, max_new_tokens)]
            case Scored() | Sampled():
                return self._answered(event)
            case FromDraftModel(answer):
                self._now = answer.now
                self._growth.model_answered(answer)
                return self._fill()
            case DraftModelLost():
                self._growth.model_lost()
                return self._fill()
            case TimerFired(now):
                self._now = now
                if self._growth.deadline is not None:
                    return self._fill(waits=now < self._growth.deadline)
                return [WakeAt(now)] if self._growth.learn() else []
            case Cancelled(reason):
                return [self._finish(reason)]
            case _:
                return []

    # ---- a segment comes back ---------------------------------------------------------------------------------------
    def _answered(self, answer: Scored | Sampled) -> Sequence[Effect]:
        self._now = answer.now
        self._growth.answered(answer.now, answer.step)
        if not self._decoder.take(answer):
            return []
        self._started = True
        effects, reason, end = self._walk()
        if reason is not None:
            return [*effects, self._finish(reason, end)]
        effects += self._fill()
        return [*effects, WakeAt(answer.now + LEARN_DELAY_S)] if self._growth.is_due else effects

    def _walk(self) -> tuple[list[Effect], FinishReason | None, Emit | None]:
        """Emit the target's tokens as far as they are known, one below the last known node included."""
        config, head, decoder = self._config, self._tree.head, self._decoder
        effects: list[Effect] = []
        output: list[int] = []
        reason: FinishReason | None = "length" if head.position >= config.output.max_tokens else None
        end: Emit | None = None
        lane = None if decoder.log_evidence is None else config.seat.side
        while reason is None and (token := decoder.sample(head)) is not None:
            emit = Emit(token, head.plain, lane)
            if token in config.output.eos_ids:
                reason, end = "stop", emit
                break
            effects.append(emit)
            output.append(token)
            drafted = token in head.children
            self._stats["accepted"] += drafted
            head = self._tree.advance(token)
            self._growth.advance(token, drafted=drafted)
            if head.position >= config.output.max_tokens or not decoder.fits(head.position):
                reason = "length"
        self._growth.read(output)
        return effects, reason, end

    # ---- segments are sent ------------------------------------------------------------------------------------------
    def _fill(self, *, waits: bool = True) -> list[Effect]:
        """Prune, then send segments until enough are under way. waits: for the draft model, where that pays."""
        growth, now = self._growth, self._now
        growth.deadline = None
        effects = growth.compute(now)
        if not self._started:
            return effects
        effects += self._decoder.commit_to(self._tree.head)
        while self._decoder.under_way < self._max_under_way:
            nodes = self._next_segment(waits=waits)
            if not nodes:
                break
            growth.is_new_round = False
            self._stats["segments"] += 1
            self._stats["drafted"] += len(nodes)
            effects += self._decoder.append_rows(nodes, self._tree.head, now)
        effects += growth.compute(now)
        return effects if growth.deadline is None else [*effects, WakeAt(growth.deadline)]

    def _next_segment(self, *, waits: bool) -> list[PrefixNode]:
        """Waiting nodes, parents first: the head, or what is worth it. None while they wait for drafts."""
        growth, head = self._growth, self._tree.head
        room = min(self._max_rows, self._decoder.spare_rows(()))
        if room <= 0:
            return []
        growth.expand(room)
        if waits and growth.waits(room, self._now):
            return []
        while chosen := self._tree.best(room):
            if head.cached and sum(node.score for node in chosen) < self._least_gain:
                break
            if admitted := self._admitted(chosen):
                return admitted
        return []

    def _admitted(self, nodes: list[PrefixNode]) -> list[PrefixNode]:
        """Those that the answer's constraint allows; the others are dropped."""
        head = self._tree.head
        drafts = [node for node in nodes if node is not head]
        admitted = self._decoder.admitted(head, drafts)
        for node in set(drafts).difference(admitted):
            if node.alive:
                self._tree.drop(node)
        return admitted if head.cached else [head, *admitted]

    def _finish(self, reason: FinishReason, end: Emit | None = None) -> Finish:
        self._finished = True
        decoder = self._decoder
        growth = self._growth
        counted = {"rounds": growth.rounds, "draft_forwards": growth.draft_forwards}
        counted |= {"forwards": decoder.forwards, "rows": decoder.rows, "dropped": decoder.dropped}
        return Finish(reason, {**self._stats, **{name: float(value) for name, value in counted.items()}}, end)


pipeline = Strategy(
    name="pipeline",
    machine=Pipeline,
    participants="one side",
    text_of="front",
    uses_draft_model=True,
)
