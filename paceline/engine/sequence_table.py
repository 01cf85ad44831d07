"""Sequence table: the cached rows and the open tree of each sequence, and the bases of engines that keep one.

All engines share these checks, so they refuse the same segments with the same error messages. Knows no tensors.

A prune may overtake segments: those that were sent before it and arrive after it are *late*. Which ids were sent before
it is known by its horizon, so the order in which both arrive changes nothing: rows of late segments that the prune
dropped are left out, those on its path are committed as they come, and the others grow the tree.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from paceline.core.batching.block_manager import KvPrefix, OutOfBlocks
from paceline.core.batching.segment import ROOT, Batch, PlacedSegment, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SampledRow
from paceline.engine.base import ModelInfo, Output, SampleRequest
from paceline.errors import EngineError

log = logging.getLogger("paceline.engine")


class OpenTree(NamedTuple):
    """Provisional rows: the last rows of their sequence, in the order of writing."""

    tokens: tuple[int, ...] = ()  # (m,)
    parents: tuple[int, ...] = ()  # (m,) parents[i] < i, -1 = the committed prefix
    ids: tuple[int, ...] = ()  # (m,) rising

    @property
    def parent_ids(self) -> tuple[int, ...]:
        """(m,) as a `Segment` names them"""
        return tuple(self.ids[parent] if parent >= 0 else ROOT for parent in self.parents)


NOTHING_OPEN = OpenTree()


class KeptRows(NamedTuple):
    """Rows of an open tree that remain after a prune; the engine must move them."""

    first: int  # the tree's first row in its sequence
    size: int  # rows of the tree before the prune
    order: tuple[int, ...]  # remaining rows of the tree, to be stored in this order from `first` on
    committed: tuple[int, ...]  # tokens added to the committed chain


@dataclass(slots=True)
class CachedRows:
    """Cached rows of one sequence, and what is known of rows that are still to come."""

    tokens: list[int] = field(default_factory=list)  # of the committed rows
    tree: OpenTree = NOTHING_OPEN
    last_id: int = ROOT  # greatest id that has arrived
    anchor: int = ROOT  # id of the last committed row, for late children of it
    horizon: int = ROOT  # ids up to here were sent before the last prune
    late_path: tuple[int, ...] = ()  # ids of rows that are committed as soon as they arrive
    late_live: frozenset[int] = frozenset()  # ids up to the horizon that grow the tree when they arrive

    @property
    def length(self) -> int:
        """Rows written, provisional ones included."""
        return len(self.tokens) + len(self.tree.tokens)


_NO_ROWS = CachedRows()


class SequenceTable:
    """Cached rows of all sequences, with the tokens from which they can be computed again. `place` only checks;
    `written` records a forward.

    A refusal raises EngineError and leaves everything unchanged.
    """

    def __init__(self, *, vocab_size: int, max_positions: int) -> None:
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._rows: dict[SeqId, CachedRows] = {}

    def place(self, batch: Batch, *, first_stage: bool = True) -> tuple[PlacedSegment, ...]:
        """What is to be computed. Raises unless every segment continues its sequence's rows or grows its open tree.

        first_stage: False of later stages of a pipeline, where rows never arrive that an earlier stage knew to be
        dropped, so that `start` counts more of a tree than there are.
        """
        return tuple(self._place(segment, first_stage) for segment in batch.segments)

    def _place(self, segment: Segment, first_stage: bool) -> PlacedSegment:
        rows = self._rows.get(segment.seq, _NO_ROWS)
        if segment.parents is None:
            if rows.tree.tokens:
                raise EngineError(
                    f"sequence {segment.seq} has an open tree with the rows {rows.tree.ids}: a segment must grow it, "
                    "or a prune or truncate close it first; this one is a chain"
                )
            self._check_start(segment, rows)
            placed = PlacedSegment(
                segment.seq,
                rows.length,
                segment.tokens,
                None,
                segment.logits_rows(),
                committed=len(segment.tokens),
            )
            last = segment.start + len(segment.tokens) - 1
        else:
            placed = _placed_tree(segment, rows)
            if first_stage and segment.node_ids[0] > rows.horizon:
                self._check_start(segment, rows)
            last = max(placed.positions(), default=0)
        if last >= self._max_positions:
            raise EngineError(
                f"sequence {segment.seq} would reach position {last}; the model has {self._max_positions}"
            )
        if not (min(segment.tokens) >= 0 and max(segment.tokens) < self._vocab_size):
            raise EngineError(f"sequence {segment.seq} holds a token outside 0..{self._vocab_size - 1}")
        return placed

    @staticmethod
    def _check_start(segment: Segment, rows: CachedRows) -> None:
        if segment.start != rows.length:
            raise EngineError(
                f"sequence {segment.seq} has {rows.length} rows, but the segment starts at {segment.start}"
            )

    def write(self, segment: Segment) -> PlacedSegment:
        """Place and record a segment."""
        (placed,) = self.place(Batch((segment,)))
        self.written((placed,))
        return placed

    def written(self, placed: Sequence[PlacedSegment]) -> None:
        for segment in placed:
            rows = self._rows.setdefault(segment.seq, CachedRows())
            rows.tokens += segment.tokens[: segment.committed]
            rows.last_id = max(rows.last_id, segment.last_id)
            if segment.parents is None:
                continue
            first = segment.committed
            if first:
                rows.anchor, rows.late_path = segment.ids[first - 1], rows.late_path[first:]
            tokens, parents, ids = rows.tree.tokens + segment.tokens, segment.parents, rows.tree.ids + segment.ids
            rows.tree = OpenTree(tokens[first:], tuple(max(-1, each - first) for each in parents[first:]), ids[first:])

    def path(self, segment: PlacedSegment, row: int) -> list[int]:
        """Tokens from a root of the tree to `row` of this segment, which is not yet written."""
        tokens = self.tree(segment.seq).tokens + segment.tokens
        return [token for token, is_on_path in zip(tokens, segment.mask()[row], strict=True) if is_on_path]

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> KeptRows:
        """Raise unless `keep` is a path from a root, and every row of `live` hangs below its end. See `Engine`."""
        rows = self._rows.get(seq, CachedRows())
        if horizon is None and not rows.tree.tokens:
            raise EngineError(f"sequence {seq} has no tree to prune")
        last = rows.last_id if horizon is None else max(horizon, rows.horizon)
        tokens, parents, ids = rows.tree
        row_of = {name: row for row, name in enumerate(ids)}
        here = [row_of[name] for name in keep if name in row_of]
        late_path = tuple(keep[len(here) :])
        end = -1
        for row in here:
            if parents[row] != end:
                raise EngineError(f"rows {list(keep)} are not a path from a root of the tree of sequence {seq}")
            end = row
        if tuple(ids[row] for row in here) != tuple(keep[: len(here)]) or not _are_late(late_path, rows, last):
            raise EngineError(f"rows {list(keep)} are not a path from a root of the tree of sequence {seq}")
        index = {end: -1}  # row → its index in the remaining tree
        late_live: list[int] = []
        before = ROOT
        for name in live:
            at = row_of.get(name)
            is_below = _are_late((name,), rows, last) if at is None else not late_path and parents[at] in index
            if name <= before or not is_below:
                raise EngineError(
                    f"rows {list(live)} of sequence {seq} cannot stay open: they must rise, and each must hang below "
                    f"another of them or below row {keep[-1] if keep else ROOT}"
                )
            if at is None:
                late_live.append(name)
            else:
                index[at] = len(index) - 1
            before = name
        rest = [row for row in index if row != end]
        kept = KeptRows(len(rows.tokens), len(tokens), (*here, *rest), tuple(tokens[row] for row in here))
        self._rows[seq] = rows  # which a prune may have overtaken as a whole
        rows.tokens += kept.committed
        rows.tree = OpenTree(
            tuple(tokens[row] for row in rest),
            tuple(index[parents[row]] for row in rest),
            tuple(ids[row] for row in rest),
        )
        rows.anchor = ids[end] if here else rows.anchor
        rows.horizon, rows.late_path, rows.late_live = last, (*rows.late_path, *late_path), frozenset(late_live)
        if horizon is None and not rest:
            self._rows[seq] = CachedRows(rows.tokens)  # ids may begin anew
        return kept

    def truncate(self, seq: SeqId, length: int) -> None:
        """Raise for rows that were never written, and for a length inside an open tree."""
        tokens = self._rows.get(seq, _NO_ROWS).tokens
        if not 0 <= length <= len(tokens):
            raise EngineError(f"sequence {seq} cannot be truncated to {length} rows: it has {len(tokens)}")
        if seq in self._rows:
            del tokens[length:]
            self._rows[seq] = CachedRows(tokens)

    def export(self, seq: SeqId, num_rows: int) -> None:
        """Raise unless the first `num_rows` rows are committed."""
        committed = len(self._rows.get(seq, _NO_ROWS).tokens)
        if not 0 < num_rows <= committed:
            raise EngineError(f"sequence {seq} cannot export {num_rows} rows: it has {committed}")

    def adopt(self, seq: SeqId, tokens: Sequence[int]) -> None:
        """Record a new sequence that starts with the rows of these tokens."""
        if seq in self._rows:
            raise EngineError(f"sequence {seq} exists already")
        if len(tokens) > self._max_positions or not all(0 <= token < self._vocab_size for token in tokens):
            raise EngineError(f"sequence {seq} cannot adopt {len(tokens)} rows: too many, or of unknown tokens")
        self._rows[seq] = CachedRows(list(tokens))

    def release(self, seq: SeqId) -> None:
        self._rows.pop(seq, None)

    def __contains__(self, seq: SeqId) -> bool:
        return seq in self._rows

    def tokens(self, seq: SeqId) -> tuple[int, ...]:
        """Those of the committed rows."""
        return tuple(self._rows.get(seq, _NO_ROWS).tokens)

    def tree(self, seq: SeqId) -> OpenTree:
        return self._rows.get(seq, _NO_ROWS).tree

    def is_settled(self, seq: SeqId) -> bool:
        """No row of its is open, and none is still to come that a prune has overtaken."""
        rows = self._rows.get(seq, _NO_ROWS)
        return not rows.tree.tokens and rows.horizon == ROOT

    def last_id(self, seq: SeqId) -> int:
        """The greatest id of its rows that has come."""
        return self._rows.get(seq, _NO_ROWS).last_id

    def anchor(self, seq: SeqId) -> int:
        """The id of its last committed row, if a later segment may name it; else `ROOT`."""
        return self._rows.get(seq, _NO_ROWS).anchor

    def num_open_rows(self, seq: SeqId) -> int:
        return len(self._rows[seq].tree.tokens)

    def length(self, seq: SeqId) -> int:
        return self._rows.get(seq, _NO_ROWS).length

    def lengths(self) -> dict[SeqId, int]:
        return {seq: rows.length for seq, rows in self._rows.items()}

    def check(self) -> None:
        for tokens, parents, ids in (rows.tree for rows in self._rows.values()):
            assert len(tokens) == len(parents) == len(ids) and list(ids) == sorted(ids), ids
            assert all(-1 <= parent < row for row, parent in enumerate(parents)), parents


def _are_late(names: Sequence[int], rows: CachedRows, horizon: int) -> bool:
    """Rows of these ids have been sent and have not arrived, and no prune has dropped them."""
    return all(rows.last_id < name <= horizon and (name > rows.horizon or name in rows.late_live) for name in names)


def _placed_tree(segment: Segment, rows: CachedRows) -> PlacedSegment:
    """Raises EngineError for ids that have arrived, unknown parents, and late rows out of their path's order."""
    assert segment.parents is not None
    ids, horizon = segment.node_ids, rows.horizon
    if ids[0] <= rows.last_id:
        raise EngineError(f"sequence {segment.seq} has rows up to id {rows.last_id}: id {ids[0]} cannot be a new one")
    place = {ROOT: -1, rows.anchor: -1}
    place |= {name: row for row, name in enumerate(rows.tree.ids)}
    path = rows.late_path
    kept: list[int] = []  # rows of the segment
    parents = list(rows.tree.parents)
    committed = 0
    for row, (name, parent) in enumerate(zip(ids, segment.parents, strict=True)):
        is_next = committed < len(path) and name == path[committed]
        if name <= horizon and not is_next and name not in rows.late_live:
            continue  # dropped by a prune that overtook it
        if parent not in place or (not is_next and committed < len(path)):
            raise EngineError(
                f"sequence {segment.seq}: the parent {parent} of row {name} is not in the open tree, which has the "
                f"rows {rows.tree.ids}"
            )
        if is_next:
            committed += 1
        place[name] = len(parents)
        parents.append(place[parent])
        kept.append(row)
    wanted = segment.logits_rows()
    last_id = ids[-1]
    if len(kept) == len(ids):
        return PlacedSegment(
            segment.seq, rows.length, segment.tokens, tuple(parents), wanted, tuple(ids), committed, last_id
        )
    new = {row: i for i, row in enumerate(kept)}
    scored = tuple(i for i, row in enumerate(wanted) if row in new)
    return PlacedSegment(
        segment.seq,
        rows.length,
        tuple(segment.tokens[row] for row in kept),
        tuple(parents),
        tuple(new[wanted[i]] for i in scored),
        tuple(ids[row] for row in kept),
        committed,
        last_id,
        scored,
    )


class TableEngine(ABC):
    """Base of engines whose sequences are in a table of their own; of engines without blocks or a fixed bound, unless
    they say otherwise."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._table = SequenceTable(vocab_size=info.vocab_size, max_positions=info.max_positions)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @abstractmethod
    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None: ...

    def _import_longer(self, seq: SeqId, stored: KvPrefix | None, cached: int, num_tokens: int) -> int:
        """Begin with the stored rows where they are more than the cached ones, and fewer than the tokens.

        Returns how many; 0 where they are not, or cannot be imported."""
        if stored is None or not cached < len(stored.tokens) < num_tokens:
            return 0
        try:
            self.import_kv(seq, stored)
        except EngineError as error:
            log.warning("stored KV of a document is computed again: %s", error)
            return 0
        return len(stored.tokens)

    def length(self, seq: SeqId) -> int:
        return self._table.length(seq)

    @property
    def block_size(self) -> int:
        return 1

    def free_rows(self) -> int | None:
        return None


Row = TypeVar("Row")


class RowListEngine(TableEngine, Generic[Row]):
    """Engine that computes on the host from a list of rows for each sequence, one batch after the other: all but
    `_append`, and `export_kv`, `import_kv` and `begin`, which differ."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__(info)
        self._rows: dict[SeqId, list[Row]] = {}
        self._salts: dict[SeqId, str] = {}  # of sequences that have begun with one

    @abstractmethod
    def _append(self, segment: PlacedSegment) -> tuple[Dist, ...]:
        """Write the rows of one segment; returns the distributions of the wanted ones."""

    def _reserve(self, num_rows: int, what: str) -> None:
        """Raises OutOfBlocks where so many rows are not free."""
        free = self.free_rows()
        if free is not None and num_rows > free:
            raise OutOfBlocks(f"out of memory: {num_rows} rows {what}, {free} free")

    def _begin(self, seq: SeqId, salt: str) -> None:
        if seq in self._table or seq in self._salts:
            raise EngineError(f"sequence {seq} exists already")
        self._salts[seq] = salt

    def _committed(self, seq: SeqId) -> list[Row]:
        return self._rows[seq][: self._table.length(seq) - self._table.num_open_rows(seq)]

    def forward(self, batch: Batch) -> Output:
        placed = self._table.place(batch)
        self._reserve(sum(len(segment.tokens) for segment in placed), "asked for")
        try:
            dists = tuple(self._append(segment) for segment in placed)
        except Exception:
            for segment in placed:
                del self._rows.get(segment.seq, [])[segment.start :]
                if segment.seq not in self._table:
                    self._rows.pop(segment.seq, None)
            raise
        self._table.written(placed)
        return Output.dense(dists, tuple(segment.scored for segment in placed))

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        return [request.by_reference() for request in requests]

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        kept = self._table.prune(seq, keep, live, horizon)
        rows = self._rows.setdefault(seq, [])
        rows[kept.first :] = [rows[kept.first + row] for row in kept.order]

    def truncate(self, seq: SeqId, length: int) -> None:
        self._table.truncate(seq, length)
        if seq in self._rows:
            del self._rows[seq][length:]

    def release(self, seq: SeqId) -> None:
        self._table.release(seq)
        self._rows.pop(seq, None)
        self._salts.pop(seq, None)

    def check(self) -> None:
        held = {seq: len(rows) for seq, rows in self._rows.items()}
        assert held == self._table.lengths(), (held, self._table.lengths())
