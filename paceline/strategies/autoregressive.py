"""`autoregressive`: one side, one token a forward. The baseline, and what remains when a link is lost.

With several documents it is output aggregation on one side: the next token comes from the mixture of the branches
(DRAGON eq. 2 with one side).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.sampling import choose, truncate
from paceline.strategies.branches import Branches
from paceline.strategies.machine import (
    Cancelled,
    Effect,
    Emit,
    Event,
    Finish,
    FinishReason,
    Retrieve,
    Retrieved,
    Scored,
    Started,
    Strategy,
    Task,
)


class Autoregressive:
    """Needs no peer and ignores everything about one."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._branches = Branches(task.sampling, task.vocab_size)
        self._targets = list(task.targets)
        self._finished = False

    def on(self, event: Event) -> Sequence[Effect]:
        if self._finished:
            return []
        match event:
            case Started():
                return [Retrieve()]
            case Retrieved(branches, room):
                return self._branches.start(branches, self._targets, room)
            case Scored(ticket, dists):
                self._branches.scored(ticket, dists)
                return self._step()
            case Cancelled(reason):
                return [self._finish(reason)]
            case _:
                return []

    def _step(self) -> list[Effect]:
        position = len(self._targets)
        dist = self._branches.dist(position)
        if dist is None:
            return []
        if position >= self._task.max_tokens:
            return [self._finish("length")]
        final = truncate(dist, self._task.sampling)
        token = choose(final, self._task.sampling, position)
        if token in self._task.eos_ids:
            return [self._finish("stop")]
        self._targets.append(token)
        self._branches.forget(position + 1)
        lane = None if self._branches.log_h is None else self._task.side
        effects: list[Effect] = [Emit(token, final, lane)]
        if position + 1 >= self._task.max_tokens or not self._branches.fits(position + 1):
            return [*effects, self._finish("length")]
        return [*effects, *self._branches.feed([token])]

    def _finish(self, reason: FinishReason) -> Finish:
        self._finished = True
        return Finish(reason)


autoregressive = Strategy(
    name="autoregressive",
    summary="one side writes the answer token by token from its own documents",
    machine=Autoregressive,
    needs_peer=False,
    reference="target",
)
