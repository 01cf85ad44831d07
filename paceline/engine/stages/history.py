"""History from which a pipeline's head builds lost stages up again: the tokens of every sequence, and what was sent.

The *base* is every sequence as it was before the oldest batch whose result is still needed; the log has all that was
sent since. Stages that have computed the base and then the log hold what they would hold had none been lost: batches
keep their tickets, rows of trees their ids. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.core.batching.segment import ROOT, Batch, Segment, SeqId
from paceline.engine.sequence_table import SequenceTable
from paceline.errors import EngineError

MAX_LOG = 512  # entries; beyond, results that are there and still needed are not computed again
CHUNK_ROWS = 512  # of a prompt that is computed again


@dataclass(frozen=True, slots=True)
class Ran:
    """A batch. Its result is not needed if the ticket is None."""

    batch: Batch
    ticket: int | None = None


@dataclass(frozen=True, slots=True)
class Pruned:
    seq: SeqId
    keep: tuple[int, ...]
    live: tuple[int, ...]
    horizon: int | None


@dataclass(frozen=True, slots=True)
class Truncated:
    seq: SeqId
    length: int


@dataclass(frozen=True, slots=True)
class Forked:
    seq: SeqId
    into: SeqId


@dataclass(frozen=True, slots=True)
class Released:
    seq: SeqId


@dataclass(frozen=True, slots=True)
class Imported:
    """Rows that were not computed; they are when they are lost."""

    seq: SeqId
    tokens: tuple[int, ...]


Entry = Ran | Pruned | Truncated | Forked | Released | Imported


@dataclass(slots=True)
class History:
    vocab_size: int
    max_positions: int
    _log: deque[Entry] = field(default_factory=deque)
    _needed: set[int] = field(default_factory=set)  # tickets in the log whose results are
    _open: set[int] = field(default_factory=set)  # those of them whose results have not come
    _tokens: dict[SeqId, list[int]] = field(default_factory=dict)  # of the committed rows of the base
    _lost: set[SeqId] = field(default_factory=set)  # with a step that failed
    _table: SequenceTable = field(init=False)

    def __post_init__(self) -> None:
        self._table = SequenceTable(vocab_size=self.vocab_size, max_positions=self.max_positions)

    def sent(self, entry: Entry) -> None:
        self._log.append(entry)
        if isinstance(entry, Ran) and entry.ticket is not None:
            self._needed.add(entry.ticket)
            self._open.add(entry.ticket)
        while len(self._log) > MAX_LOG:
            first = self._log[0]
            if isinstance(first, Ran) and first.ticket is not None:
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

    def clear(self) -> None:
        """No stage holds anything that is needed."""
        self._log.clear()
        self._needed.clear()
        self._open.clear()
        self._tokens.clear()
        self._lost.clear()
        self.__post_init__()

    def has(self, ticket: int) -> bool:
        """The result of this batch would be computed again."""
        return ticket in self._needed

    def replay(self) -> Iterator[Entry]:
        """Entries that build the sequences up in empty stages."""
        for seq in self._tokens:
            yield from self._rows_of(seq)
        for entry in self._log:
            if isinstance(entry, Imported):
                yield from _chain(entry.seq, 0, entry.tokens)
            elif isinstance(entry, Ran) and entry.ticket not in self._needed:
                yield Ran(entry.batch)
            else:
                yield entry

    def _advance(self) -> None:
        while self._log:
            first = self._log[0]
            if isinstance(first, Ran) and first.ticket in self._needed:
                return
            self._apply(self._log.popleft())

    def _rows_of(self, seq: SeqId) -> Iterator[Entry]:
        """The committed rows as a chain, then the open tree. Below a committed row that has an id, later segments may
        name it, so it is committed once more by a prune."""
        tokens, tree, anchor = tuple(self._tokens[seq]), self._table.tree(seq), self._table.anchor(seq)
        if anchor == ROOT or not tokens:
            yield from _chain(seq, 0, tokens)
            if tree.tokens:
                yield Ran(Batch((Segment(seq, len(tokens), tree.tokens, tree.parent_ids, "none", tree.ids),)))
            return
        yield from _chain(seq, 0, tokens[:-1])
        parents = tuple(anchor if parent == ROOT else parent for parent in tree.parent_ids)
        rows = Segment(seq, len(tokens) - 1, (tokens[-1], *tree.tokens), (ROOT, *parents), "none", (anchor, *tree.ids))
        yield Ran(Batch((rows,)))
        yield Pruned(seq, (anchor,), tree.ids, max(anchor, self._table.last_id(seq)))

    def _apply(self, entry: Entry) -> None:
        """To the base. What a stage would refuse loses its sequence, as there."""
        if isinstance(entry, Ran):
            for segment in entry.batch.segments:
                self._apply_segment(segment)
            return
        seq = entry.seq
        try:
            match entry:
                case Released():
                    self._table.release(seq)
                    self._tokens.pop(seq, None)
                    self._lost.discard(seq)
                case _ if seq in self._lost:
                    return
                case Pruned(keep=keep, live=live, horizon=horizon):
                    kept = self._table.prune(seq, keep, live, horizon)
                    self._tokens.setdefault(seq, []).extend(kept.committed)
                case Truncated(length=length):
                    self._table.truncate(seq, length)
                    del self._tokens.get(seq, [])[length:]
                case Forked(into=into):
                    self._table.fork(seq, into)
                    self._tokens[into] = list(self._tokens[seq])
                case Imported(tokens=tokens):
                    self._table.adopt(seq, tokens)
                    self._tokens[seq] = list(tokens)
        except EngineError:
            self._lose(seq)

    def _apply_segment(self, segment: Segment) -> None:
        seq = segment.seq
        if seq in self._lost:
            return
        try:
            placed = self._table.place(Batch((segment,)))
        except EngineError:
            self._lose(seq)
            return
        self._table.written(placed)
        self._tokens.setdefault(seq, []).extend(placed[0].tokens[: placed[0].committed])

    def _lose(self, seq: SeqId) -> None:
        self._table.release(seq)
        self._tokens.pop(seq, None)
        self._lost.add(seq)

    def check(self) -> None:
        """Assert the invariants."""
        for seq, length in self._table.lengths().items():
            assert len(self._tokens[seq]) + self._table.num_open_rows(seq) == length, (seq, length)


def _chain(seq: SeqId, start: int, tokens: tuple[int, ...]) -> Iterator[Ran]:
    for first in range(0, len(tokens), CHUNK_ROWS):
        yield Ran(Batch((Segment(seq, start + first, tokens[first : first + CHUNK_ROWS], None, "none"),)))
