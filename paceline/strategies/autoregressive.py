"""`autoregressive`: one side, one token a forward. The baseline of measurements and tests.

With several documents it is output aggregation on one side: the next token comes from the mixture of the branches
(DRAGON eq. 2 with one side).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.strategies.base import (
    Cancelled,
    Effect,
    Emit,
    Event,
    Finish,
    FinishReason,
    MachineConfig,
    Retrieve,
    Retrieved,
    Sampled,
    Scored,
    Started,
    Strategy,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixTree


class Autoregressive:
    """Needs no peer and ignores every event about one."""

    def __init__(self, config: MachineConfig) -> None:
        self._config = config
        self._tree = PrefixTree(len(config.seat.targets))
        self._decoder = BranchDecoder(
            config.output,
            rescoring=config.options.rescoring,
            keep_plain=config.output.needs_dists,
            samples=config.takes_tokens,
            goes_on=True,
        )
        self._decoder.num_top = config.output.num_top
        self._finished = False

    def on(self, event: Event) -> Sequence[Effect]:
        if self._finished:
            return []
        match event:
            case Started():
                return [Retrieve()]
            case Retrieved(branches, max_new_tokens):
                return self._decoder.start(branches, self._config.seat.targets, self._tree.head, max_new_tokens)
            case Scored(now=now) | Sampled(now=now):
                return self._step(now) if self._decoder.take(event) else []
            case Cancelled(reason):
                return [self._finish(reason)]
            case _:
                return []

    def _step(self, now: float) -> list[Effect]:
        """Sample the next token and ask for the forward after it."""
        config, head = self._config, self._tree.head
        if head.position >= config.output.max_tokens:
            return [self._finish("length")]
        token = self._decoder.sample(head)
        assert token is not None, "every branch has answered"
        lane = None if self._decoder.log_evidence is None else config.seat.side
        rest = 0.0 if head.plain is None else head.plain.tail
        emit = Emit(token, head.plain, lane, self._decoder.mixer.decided_by, rest)
        if token in config.output.eos_ids:
            return [self._finish("stop", emit)]
        effects: list[Effect] = [emit]
        head = self._tree.advance(token)
        if head.position >= config.output.max_tokens or not self._decoder.fits(head.position):
            return [*effects, self._finish("length")]
        return [*effects, *self._decoder.append_rows([head], head, now)]

    def _finish(self, reason: FinishReason, end: Emit | None = None) -> Finish:
        self._finished = True
        return Finish(reason, end=end)


autoregressive = Strategy(
    name="autoregressive",
    machine=Autoregressive,
    participants="one side",
    text_of="front",
)
