"""`Solo`: one side alone writes an answer. As it is, it is `autoregressive`; strategies that draft are built on it.

Verification is the same whatever was drafted: from the last decided token on, the target's own token is sampled with
the common noise after each node whose row is known, and the walk goes on as long as a draft holds that token. So the
text depends on no draft, at any temperature, with penalties, masks and logprobs. What is drafted, and what is learnt
from the rows, is a subclass's.

`autoregressive` drafts nothing: one token a forward. The baseline of measurements and tests. With several documents it
is output aggregation on one side: the next token comes from the mixture of the branches (DRAGON eq. 2 with one side).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from paceline.core.batching.segment import GoesOn, StepSize
from paceline.strategies.base import (
    Branch,
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
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.strategies.decoding.table_drafts import LEARN_DELAY_S


class Solo:
    """Needs no peer and ignores every event about one."""

    drafts: ClassVar[bool] = False

    def __init__(self, config: MachineConfig, tree: PrefixTree | None = None, *, several: bool = False) -> None:
        """tree: an empty one. several: see `BranchDecoder`."""
        self._config = config
        self._tree = PrefixTree(len(config.seat.targets)) if tree is None else tree
        self._decoder = BranchDecoder(
            config.output,
            rescoring=config.options.rescoring,
            lazy=True,
            keep_plain=config.output.needs_dists,
            samples=config.takes_tokens,
            several=several,
        )
        self._goes_on = GoesOn(config.output.max_tokens, config.output.eos_ids, always=not self.drafts)
        self._decoder.goes_on = None if self.drafts else self._goes_on
        self._decoder.num_top = 0 if self.drafts else config.output.num_top
        self._max_under_way = 1
        self._step_size = StepSize()
        self._now = 0.0  # s, of the last event that says so
        self._finished = False

    def on(self, event: Event) -> Sequence[Effect]:
        if self._finished:
            return []
        match event:
            case Started(now):
                self._now = now
                return [Retrieve()]
            case Retrieved(branches, max_new_tokens):
                return self._begin(branches, max_new_tokens)
            case Scored(now=now, step=step) | Sampled(now=now, step=step):
                self._now, self._step_size = now, step
                return self._step() if self._decoder.take(event) else []
            case TimerFired(now):
                self._now = now
                return self._wake()
            case FromDraftModel() | DraftModelLost():
                return self._hear(event)
            case Cancelled(reason):
                return [self._finish(reason)]
            case _:
                return []

    # ---- a step -----------------------------------------------------------------------------------------------------
    def _step(self) -> list[Effect]:
        """A forward has come back: emit what it decides, then ask for the next one."""
        effects, output, reason, end = self._walk()
        self._walked(output, reason)
        if reason is not None:
            return [*effects, self._finish(reason, end)]
        effects += self._fill()
        return [*effects, WakeAt(self._now + LEARN_DELAY_S)] if self._is_due else effects

    def _walk(self) -> tuple[list[Effect], list[int], FinishReason | None, Emit | None]:
        """Emit the target's tokens as far as they are known, one below the last known node included."""
        config, head, decoder = self._config, self._tree.head, self._decoder
        effects: list[Effect] = []
        output: list[int] = []
        reason: FinishReason | None = "length" if head.position >= config.output.max_tokens else None
        end: Emit | None = None
        lane = None if decoder.log_evidence is None else config.seat.side
        while reason is None and (token := decoder.sample(head)) is not None:
            rest = 0.0 if head.plain is None else head.plain.tail
            emit = Emit(token, head.plain, lane, decoder.mixer.decided_by, rest)
            if token in config.output.eos_ids:
                reason, end = "stop", emit
                break
            effects.append(emit)
            output.append(token)
            drafted = token in head.children
            head = self._tree.advance(token)
            self._advanced(token, drafted=drafted)
            if head.position >= config.output.max_tokens or not decoder.fits(head.position):
                reason = "length"
        return effects, output, reason, end

    def _fill(self) -> list[Effect]:
        """Drop the rows of rejected drafts, then send segments until enough are under way."""
        effects = self._decoder.commit_to(self._tree.head)
        room = self._max_under_way - self._decoder.under_way
        while room > 0 and (nodes := self._next_segment()):
            effects += self._decoder.append_rows(nodes, self._tree.head, self._now)
            room -= 1
        return effects

    def _admitted(self, nodes: Sequence[PrefixNode]) -> list[PrefixNode]:
        """Those of these waiting nodes, parents first, that the answer's constraint allows; other drafts are
        dropped."""
        drafts = [node for node in nodes if node is not self._tree.head]
        admitted = self._decoder.admitted(self._tree.head, drafts)
        for node in set(drafts).difference(admitted):
            if node.alive:
                self._tree.drop(node)
        return admitted if len(drafts) == len(nodes) else [self._tree.head, *admitted]

    def _finish(self, reason: FinishReason, end: Emit | None = None) -> Finish:
        self._finished = True
        return Finish(reason, self.stats(), end)

    # ---- what a strategy that drafts adds ---------------------------------------------------------------------------
    def _begin(self, branches: tuple[Branch, ...], max_new_tokens: int | None) -> list[Effect]:
        """The prompts are known: prefill them."""
        return self._decoder.start(branches, self._config.seat.targets, self._tree.head, max_new_tokens)

    def _advanced(self, token: int, *, drafted: bool) -> None:
        """The head has moved to this token; drafted: it was in the tree."""

    def _walked(self, output: list[int], reason: FinishReason | None) -> None:
        """These tokens are decided, and the rows that decided them may be learnt from."""

    def _next_segment(self) -> list[PrefixNode]:
        """Nodes to compute next, parents first; none: nothing now."""
        return [] if self._tree.head.cached else [self._tree.head]

    @property
    def _is_due(self) -> bool:
        """There is something to learn while the next forward runs."""
        return False

    def _wake(self) -> list[Effect]:
        return []

    def _hear(self, event: FromDraftModel | DraftModelLost) -> list[Effect]:  # noqa: ARG002  # it asks for none
        return []

    def stats(self) -> dict[str, float]:
        return {}


autoregressive = Strategy(
    name="autoregressive",
    machine=Solo,
    text_of="front",
)
