"""One side's branches: a prompt per document, continued by the same tokens, mixed into one distribution a position.

The part of a machine that talks to the engine. It knows nothing of targets, drafts or the peer. Positions count
output tokens: position 0 follows the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.core.aggregation import log_weight, mix
from paceline.core.dist import Dist
from paceline.core.sampling import SamplingParams, warp
from paceline.core.segments import Segment, SeqId
from paceline.strategies.machine import Branch, Effect, Forward, Truncate


class Branches:
    """Sequences 0..n-1 of a machine, in step: each holds its own prompt and then `fed`.

    `dist(p)` is the distribution of position p given `fed[:p]`, every branch warped, then mixed with weights
    exp(R) (DRAGON eq. 2): known once all branches have answered. A rollback voids forwards under way by forgetting
    their tickets.
    """

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        self.started = False  # the prompts are known
        self.room: int | None = None  # output tokens that fit the context
        self.fed: list[int] = []  # output tokens the sequences hold, or will when forwards under way have run
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._branches: tuple[Branch, ...] = ()
        self._weights: tuple[float, ...] = ()
        self._counts: Counter[int] = Counter()
        self._ticket = 0
        self._asked: dict[int, tuple[int, int]] = {}  # ticket -> (branch, position)
        self._rows: dict[int, dict[int, Dist]] = {}  # position -> branch -> warped distribution
        self._mixed: dict[int, Dist] = {}

    @property
    def log_h(self) -> float | None:
        """Log of the summed exp(R) of this side's documents (DRAGON 1.1), or None when it found none."""
        scores = [branch.score for branch in self._branches if branch.score is not None]
        return log_weight(scores) if scores else None

    def start(self, branches: Sequence[Branch], prefix: Sequence[int], room: int | None) -> list[Effect]:
        """Prefill every prompt, followed by the output tokens of `prefix`. Before this, nothing may be fed."""
        assert not self.fed
        self.started, self.room = True, room
        self._branches = tuple(branches)
        self._weights = tuple(0.0 if branch.score is None else branch.score for branch in branches)
        effects: list[Effect] = []
        for index, branch in enumerate(self._branches):
            effects.append(self._forward(index, 0, (*branch.prompt, *prefix), len(prefix)))
        self.fed.extend(prefix)
        self._counts.update(prefix)
        return effects

    def feed(self, tokens: Sequence[int]) -> list[Effect]:
        """Append output tokens to every branch. Asks for the distribution after the last of them."""
        if not tokens or not self.started:
            return []
        start = len(self.fed)
        self.fed.extend(tokens)
        self._counts.update(tokens)
        return [
            self._forward(index, len(branch.prompt) + start, tuple(tokens), len(self.fed))
            for index, branch in enumerate(self._branches)
        ]

    def rollback(self, length: int) -> list[Effect]:
        """Keep `fed[:length]`. Forwards under way that saw more are void."""
        if length >= len(self.fed):
            return []
        self._counts.subtract(self.fed[length:])
        del self.fed[length:]
        self._asked = {ticket: asked for ticket, asked in self._asked.items() if asked[1] <= length}
        for kept in (self._rows, self._mixed):
            for position in [position for position in kept if position > length]:
                del kept[position]
        return [Truncate(SeqId(index), len(branch.prompt) + length) for index, branch in enumerate(self._branches)]

    def scored(self, ticket: int, dists: Sequence[Dist]) -> None:
        """A forward has been answered; a void one is ignored."""
        asked = self._asked.pop(ticket, None)
        if asked is None:
            return
        branch, position = asked
        rows = self._rows.setdefault(position, {})
        # A void ticket never gets here, so `fed` still begins with the tokens this row has seen.
        dist = dists[-1]
        if len(dist.ids) and dist.ids[-1] >= self._vocab_size:
            dist = dist.kept(dist.ids < self._vocab_size)  # what the engine's vocabulary is padded with means nothing
        rows[branch] = warp(dist, self._sampling, self._counts_at(position))
        if len(rows) == len(self._branches):
            del self._rows[position]
            self._mixed[position] = mix([rows[index] for index in range(len(rows))], self._weights)

    def fits(self, length: int) -> bool:
        """Can this side hold so many output tokens?"""
        return self.room is None or length <= self.room

    @property
    def busy(self) -> bool:
        """A forward is under way that has not been rolled back."""
        return bool(self._asked)

    def dist(self, position: int) -> Dist | None:
        return self._mixed.get(position)

    def forget(self, position: int) -> None:
        """Distributions before `position` will not be asked for again."""
        for old in [old for old in self._mixed if old < position]:
            del self._mixed[old]

    def _counts_at(self, position: int) -> Counter[int]:
        if position == len(self.fed):
            return self._counts
        return Counter(self.fed[:position])

    def _forward(self, index: int, start: int, tokens: tuple[int, ...], position: int) -> Forward:
        self._ticket += 1
        self._asked[self._ticket] = (index, position)
        return Forward(self._ticket, Segment(SeqId(index), start, tokens))
