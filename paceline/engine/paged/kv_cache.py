"""Paged KV cache: sequences, their block tables and the stored rows, as one object.

Knows nothing of models: `PagedEngine` and `Stage` derive from it and add the forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.batching.block_manager import BlockManager, SlotArray
from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.engine.base import ModelInfo
from paceline.engine.paged.attention import AttentionMetadata, SegmentSlots
from paceline.engine.paged.kv_storage import KvStorage
from paceline.engine.sequence_table import SequenceTable
from paceline.engine.tensors import kv_from_tensors, kv_to_tensors
from paceline.errors import EngineError


class PagedKvCache:
    """KV cache of a model, or of a span of its layers: the engine contract without `forward`.

    A forward is `_allocate`, the model's computation, then `_written`; `_roll_back` if the computation fails.
    """

    def __init__(self, info: ModelInfo, storage: KvStorage, *, kv_model: str) -> None:
        """kv_model: identity of the exported rows; that of another model or span of layers is refused at import."""
        self._info, self._kv_model = info, kv_model
        self._storage = storage
        self._blocks = BlockManager(storage.num_blocks, storage.block_size)
        self._table = SequenceTable(vocab_size=info.vocab_size, max_positions=info.max_positions)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def _allocate(self, batch: Batch) -> AttentionMetadata:
        """Reserve slots for the batch's rows. Raises EngineError and leaves everything unchanged."""
        self._table.validate(batch)
        segments: list[SegmentSlots] = []
        slots: list[SlotArray] = []
        first = 0
        try:
            for segment in batch.segments:
                n = len(segment.tokens)
                self._storage.copy_blocks(self._blocks.reserve(segment.seq, n))
                slots.append(self._blocks.slot_mapping(segment.seq, segment.start, segment.start + n))
                block_table = np.array(self._blocks.block_table(segment.seq), dtype=np.int64)
                segments.append(SegmentSlots(segment, first, block_table))
                first += n
        except EngineError:
            self._roll_back(batch)
            raise
        return AttentionMetadata(self._storage, segments, np.concatenate(slots))

    def _roll_back(self, batch: Batch) -> None:
        """Release the slots that `_allocate` reserved."""
        for segment in batch.segments:
            if segment.seq in self._table:
                self._blocks.truncate(segment.seq, segment.start)
            else:
                self._blocks.release(segment.seq)

    def _written(self, batch: Batch) -> None:
        """Record that the forward has written the batch's rows."""
        self._table.written(batch)

    def commit(self, seq: SeqId, keep: Sequence[int], rest: Sequence[int] = ()) -> None:
        kept = self._table.commit(seq, keep, rest)
        if kept.order != tuple(range(len(kept.order))):
            # No other sequence shares these slots: this one wrote them, and an open tree is never forked.
            slots = self._blocks.slot_mapping(seq, kept.first, kept.first + kept.size)
            self._storage.move_rows(slots[list(kept.order)], slots[: len(kept.order)])
        self._blocks.truncate(seq, kept.first + len(kept.order))

    def truncate(self, seq: SeqId, length: int) -> None:
        old_length = self._table.length(seq)
        self._table.truncate(seq, length)
        if length < old_length:
            self._blocks.truncate(seq, length)

    def fork(self, seq: SeqId, into: SeqId) -> None:
        self._table.fork(seq, into)
        self._blocks.fork(seq, into)

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        self._table.export(seq, len(tokens))
        keys, values = self._storage.read_rows(self._blocks.slot_mapping(seq, 0, len(tokens)))
        return kv_from_tensors(self._kv_model, tokens, keys, values)

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        num_rows, storage = len(rows.tokens), self._storage
        shapes = ((len(tensor), num_rows, *tensor.shape[2:]) for tensor in (storage.keys, storage.values))
        keys, values = kv_to_tensors(rows, self._kv_model, *shapes, dtype=storage.keys.dtype)
        self._table.adopt(seq, rows.tokens)
        try:
            self._blocks.reserve(seq, num_rows)
        except EngineError:
            self._table.release(seq)
            raise
        storage.write_rows(self._blocks.slot_mapping(seq, 0, num_rows), keys, values)

    def release(self, seq: SeqId) -> None:
        self._table.release(seq)
        self._blocks.release(seq)

    def length(self, seq: SeqId) -> int:
        return self._table.length(seq)

    @property
    def block_size(self) -> int:
        return self._storage.block_size

    def free_rows(self) -> int:
        return self._blocks.free_rows()

    def check(self) -> None:
        self._blocks.check()
        for seq, rows in self._table.lengths().items():
            assert self._blocks.length(seq) == rows, (seq, self._blocks.length(seq), rows)
