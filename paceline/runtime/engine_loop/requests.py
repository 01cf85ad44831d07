"""What callers ask of an engine: forwards, alone or joined with those of other branches, and changes of sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.aggregation.weights import BranchMixture
from paceline.core.batching.pending import Group
from paceline.core.batching.segment import Segment, SeqId
from paceline.core.energy import NONE, Energy
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import RowSampling, SampledRow
from paceline.engine.base import Logits, SampleRequest
from paceline.errors import EngineError
from paceline.runtime.engine_loop.prefix_reuse import StoredPrefix
from paceline.runtime.engine_loop.sequence_records import Sequences

Rows = tuple[Dist, ...] | tuple[SampledRow, ...]
Answer = Callable[[Rows | EngineError], None]


@dataclass(frozen=True, slots=True)
class SequenceOp:
    """A change of a sequence between two steps. Pending rows from `from_row` on are cancelled.

    from_row None: no row is cancelled. The change runs after its sequence's pending rows and before its later changes.
    """

    seq: SeqId
    from_row: int | None
    act: Callable[[Sequences, int | None], None]  # with the greatest id of rows under way, see `Engine.prune`

    @staticmethod
    def truncate(seq: SeqId, length: int) -> SequenceOp:
        def act(sequences: Sequences, _: int | None) -> None:
            if sequences.length(seq) > length:  # the forward that writes these rows may have been cancelled
                sequences.truncate(seq, length)

        return SequenceOp(seq, length, act)

    @staticmethod
    def prune(seq: SeqId, keep: tuple[int, ...], live: tuple[int, ...] = ()) -> SequenceOp:
        def act(sequences: Sequences, horizon: int | None) -> None:
            sequences.prune(seq, keep, live, horizon)

        return SequenceOp(seq, None, act)

    @staticmethod
    def release(seq: SeqId) -> SequenceOp:
        return SequenceOp(seq, 0, lambda sequences, _: sequences.release(seq))


@dataclass(slots=True, eq=False)
class ForwardRequest:
    segment: Segment
    answer: Answer
    prefix: StoredPrefix | None = None  # prefix of the segment, if it is a whole prompt
    group: Group | None = None  # sequences of one answer, released together
    sampling: tuple[RowSampling, ...] | None = None  # of each wanted row, whose token is the answer; None: its `Dist`
    path_only: bool = False  # of a tree whose rows are all wanted: see `SampleRequest.tree`
    salt: str | None = None  # owner within which the KV of a prompt is shared; None: it is not
    join: BranchJoin | None = None  # with the forwards of other branches, in place of `sampling`
    branch: int = 0  # its number in `join`
    energy: Energy = NONE  # its share of the steps that computed it, by rows; set before the answer
    cached_rows: int = 0  # first rows of a prompt that were not computed; set before the answer
    scored: tuple[int, ...] | None = None  # wanted rows that are in the answer; None: none was pruned under way


class BranchJoin:
    """Forwards of one row range on several branches, whose rows are sampled from their mixture once all have run.

    Not handled: rows that are pruned while such a forward is under way. It fails.
    """

    def __init__(
        self, sampling: tuple[RowSampling, ...], mixture: BranchMixture, answer: Answer, num_branches: int
    ) -> None:
        self.sampling, self.mixture, self.answer = sampling, mixture, answer
        self._missing = num_branches
        self._parts: dict[int, tuple[Logits, ...]] = {}
        self._failed = False

    def add(self, branch: int, parts: tuple[Logits, ...]) -> SampleRequest | None:
        """A branch has run: what to sample, once it was the last."""
        self._parts[branch] = parts
        self._missing -= 1
        if self._missing or self._failed:
            return None
        branches = tuple(self._parts[index] for index in range(len(self._parts)))
        most = max(sum(map(len, parts)) for parts in branches)  # rows of a cached prefix are not computed
        return SampleRequest(branches, self.sampling[-most:], self.mixture)

    def fail(self, error: Rows | EngineError) -> None:
        """A branch has failed: answer once."""
        if not self._failed:
            self._failed = True
            self.answer(error)
