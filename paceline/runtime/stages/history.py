"""History from which a pipeline's head builds lost stages up again: the tokens of every sequence, and what was sent.

The *base* is every sequence as it was before the oldest batch whose result is still needed; the log has all that was
sent since. Stages that have computed the base and then the log hold what they would hold had none been lost: batches
keep their tickets, rows of trees their ids. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from paceline.core.batching.block_manager import OutOfBlocks
from paceline.core.batching.segment import ROOT, Batch, PlacedSegment, Segment, SeqId
from paceline.engine.sequence_table import SequenceTable
from paceline.errors import EngineError
from paceline.wire.stages.messages import Change, PruneRows, ReleaseRows, RunBatch, TruncateRows

MAX_LOG = 512  # entries; beyond, results that are there and still needed are not computed again
CHUNK_ROWS = 512  # of a prompt that is computed again
AGAIN = 1 << 52  # first ticket of batches that are computed again and whose results nobody needs


@dataclass(frozen=True, slots=True)
class Imported:
    """Rows that were not computed; they are when they are lost."""

    seq: SeqId
    tokens: tuple[int, ...]


Entry = RunBatch | Imported | Change


class History:
    def __init__(self, vocab_size: int, max_positions: int) -> None:
        self._log = deque[Entry]()
        self._needed = set[int]()  # tickets in the log whose results are
        self._open = set[int]()  # those of them whose results have not come
        self._lost = set[SeqId]()  # with a step that failed
        self._again = count(AGAIN)
        self._base = SequenceTable(vocab_size=vocab_size, max_positions=max_positions)

    def sent(self, entry: Entry) -> None:
        self._log.append(entry)
        if isinstance(entry, RunBatch):
            self._needed.add(entry.ticket)
            self._open.add(entry.ticket)
        while len(self._log) > MAX_LOG:
            first = self._log[0]
            if isinstance(first, RunBatch):
                if first.ticket in self._open:
                    break  # somebody waits for it; what may be under way bounds the log
                self._needed.discard(first.ticket)
            self._apply(self._log.popleft())
        self._advance()

    def came(self, ticket: int) -> None:
        """The result of this batch has been collected."""
        self._open.discard(ticket)

    def settle(self, ticket: int) -> None:
        """The result of this batch is not needed any more."""
        self._open.discard(ticket)
        self._needed.discard(ticket)
        self._advance()

    def replay(self) -> Iterator[RunBatch | Change]:
        """What builds the sequences up in empty stages. Batches whose results nobody needs have tickets of their own,
        from `AGAIN` on."""
        for seq in self._base.lengths():
            yield from self._rows_of(seq)
        for entry in self._log:
            if isinstance(entry, Imported):
                yield from self._chain(entry.seq, entry.tokens)
            elif isinstance(entry, RunBatch) and entry.ticket not in self._needed:
                yield self._anew(*entry.segments)
            else:
                yield entry

    def _advance(self) -> None:
        while self._log:
            first = self._log[0]
            if isinstance(first, RunBatch) and first.ticket in self._needed:
                return
            self._apply(self._log.popleft())

    def _anew(self, *segments: Segment) -> RunBatch:
        return RunBatch(next(self._again), segments)

    def _chain(self, seq: SeqId, tokens: tuple[int, ...]) -> Iterator[RunBatch]:
        for first in range(0, len(tokens), CHUNK_ROWS):
            yield self._anew(Segment(seq, first, tokens[first : first + CHUNK_ROWS], None, "none"))

    def _rows_of(self, seq: SeqId) -> Iterator[RunBatch | Change]:
        """The committed rows as a chain, then the open tree. Below a committed row that has an id, later segments may
        name it, so it is committed once more by a prune."""
        tokens, tree, anchor = self._base.tokens(seq), self._base.tree(seq), self._base.anchor(seq)
        if anchor == ROOT or not tokens:
            yield from self._chain(seq, tokens)
            if tree.tokens:
                yield self._anew(Segment(seq, len(tokens), tree.tokens, tree.parent_ids, "none", tree.ids))
            return
        yield from self._chain(seq, tokens[:-1])
        parents = tuple(anchor if parent == ROOT else parent for parent in tree.parent_ids)
        rows = Segment(seq, len(tokens) - 1, (tokens[-1], *tree.tokens), (ROOT, *parents), "none", (anchor, *tree.ids))
        yield self._anew(rows)
        yield PruneRows(seq, (anchor,), tree.ids, max(anchor, self._base.last_id(seq)))

    def _apply(self, entry: Entry) -> None:
        """To the base. What a stage would refuse loses its sequence, as there."""
        for each in entry.segments if isinstance(entry, RunBatch) else (entry,):
            seq = SeqId(each.seq)
            if isinstance(each, ReleaseRows):
                self._base.release(seq)
                self._lost.discard(seq)
            elif seq not in self._lost:
                try:
                    self._change(seq, each)
                except EngineError:
                    self._base.release(seq)
                    self._lost.add(seq)

    def _change(self, seq: SeqId, change: Segment | Imported | Change) -> None:
        match change:
            case Segment():
                self._base.write(change)
            case PruneRows(keep=keep, live=live, horizon=horizon):
                self._base.prune(seq, keep, live, horizon)
            case TruncateRows(length=length):
                self._base.truncate(seq, length)
            case Imported(tokens=tokens):
                self._base.adopt(seq, tokens)

    def check(self) -> None:
        self._base.check()


class SentRows:
    """A pipeline's sequences as its caller sees them, as if everything that was sent had run.

    With the memory they take at each stage, and which of them were lost with a step that failed.
    """

    def __init__(self, vocab_size: int, max_positions: int, capacity: int, block_size: int) -> None:
        """capacity: rows of the KV cache of the stage that has fewest."""
        self.table = SequenceTable(vocab_size=vocab_size, max_positions=max_positions)
        self.failed: set[SeqId] = set()  # to be released
        self.capacity, self.block_size = capacity, block_size

    def place(self, batch: Batch) -> tuple[PlacedSegment, ...]:
        """Segments of a batch, placed. Raises EngineError for one that cannot run."""
        self.check_held(batch)
        placed = self.table.place(batch)
        rows = {segment.seq: len(segment.tokens) for segment in placed}
        if self._blocks(rows) > self._num_blocks:
            raise OutOfBlocks(f"out of memory: {batch.num_rows} rows asked for, {self.free_rows()} free")
        return placed

    def fail(self, batch: Batch) -> None:
        """The batch has failed: its sequences are lost, but for those released meanwhile."""
        self.failed.update(segment.seq for segment in batch.segments if segment.seq in self.table)

    def check_held(self, batch: Batch) -> None:
        """Raise EngineError for a batch with a sequence that an earlier one has lost."""
        if lost := {segment.seq for segment in batch.segments} & self.failed:
            raise EngineError(f"sequences {sorted(lost)} were lost with a step that failed")

    def release(self, seq: SeqId) -> None:
        self.table.release(seq)
        self.failed.discard(seq)

    @property
    def _num_blocks(self) -> int:
        return self.capacity // self.block_size

    def free_rows(self) -> int:
        return max(0, self._num_blocks - self._blocks({})) * self.block_size

    def _blocks(self, more: dict[SeqId, int]) -> int:
        """Blocks in use with so many rows more of each sequence."""
        lengths = Counter(self.table.lengths())
        lengths.update(more)
        return sum(-(-rows // self.block_size) for rows in lengths.values())
