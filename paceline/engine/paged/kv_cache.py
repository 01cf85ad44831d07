"""Paged KV cache: sequences, their block tables and the stored rows, as one object.

Knows nothing of models: `PagedEngine` and `Stage` derive from it and add the forward.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.batching.block_manager import BlockCopy, BlockHasher, BlockManager, KvPrefix, SlotArray
from paceline.core.batching.segment import PlacedSegment, SeqId
from paceline.engine.base import ModelInfo
from paceline.engine.sequence_table import TableEngine
from paceline.engine.tensors import engine_error, kv_from_tensors, kv_to_tensors
from paceline.errors import EngineError

RowArray = NDArray[np.int64]


class SegmentSlots(msgspec.Struct, frozen=True):
    """One segment in the flat row, with the block table of its sequence."""

    segment: PlacedSegment
    first: int  # its first row in the flat row
    blocks: NDArray[np.int64]  # (enough for start + n rows,)

    @property
    def num_rows(self) -> int:
        return len(self.segment.tokens)


@dataclass(frozen=True, slots=True)
class FlatBatch:
    segments: Sequence[SegmentSlots]
    tokens: RowArray  # (rows,)
    positions: RowArray  # (rows,)
    slots: SlotArray  # (rows,) where to store K and V of each row
    logits_rows: RowArray  # (wanted,) rows to score

    @classmethod
    def of(cls, segments: Sequence[SegmentSlots], slots: SlotArray) -> Self:
        tokens, positions = np.empty(len(slots), dtype=np.int64), np.empty(len(slots), dtype=np.int64)
        logits_rows: list[int] = []
        for each in segments:
            segment, rows = each.segment, slice(each.first, each.first + each.num_rows)
            tokens[rows] = segment.tokens
            if segment.parents is None:
                positions[rows] = np.arange(segment.start, segment.start + each.num_rows)
            else:
                positions[rows] = segment.positions()
            logits_rows += [each.first + row for row in segment.wanted]
        return cls(segments, tokens, positions, slots, np.array(logits_rows, dtype=np.int64))

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


class KvStorage:
    """K and V of every layer in blocks: (layers, blocks * block size, kv heads, dim) each.

    One block more than `num_blocks` is never assigned: rows that pad a batch are stored in it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        layers: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        like: Tensor,
        max_unused: int | None = None,
    ) -> None:
        """like: a tensor of the device and dtype to allocate. max_unused: see `BlockManager`."""
        self.num_blocks, self.block_size, self.max_unused = num_blocks, block_size, max_unused
        self.spare_slot = num_blocks * block_size
        shape = (layers, self.spare_slot + block_size, kv_heads)
        self.keys, self.values = _zeros((*shape, key_dim), like), _zeros((*shape, value_dim), like)
        self._buffers = [like.new_empty(0), like.new_empty(0)]  # of `gather_blocks`, for K and for V
        self.by_layer = list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))
        in_blocks = (
            tensor.view(layers, num_blocks + 1, block_size * kv_heads, -1) for tensor in (self.keys, self.values)
        )
        self._blocks_by_layer = list(zip(*(tensor.unbind(0) for tensor in in_blocks), strict=True))

    def gather_blocks(self, layer: int, blocks: Tensor, num_segments: int) -> tuple[Tensor, Tensor]:
        """Copy of the blocks with these ids, (segments * blocks each,): (segments, columns, kv heads, dim) for K and V.

        Valid until the next call: the buffers are reused, since fresh memory of this size costs more in page faults
        than the copy itself.
        """
        gathered: list[Tensor] = []
        for i, tensor in enumerate(self._blocks_by_layer[layer]):
            size = len(blocks) * tensor.shape[1] * tensor.shape[2]
            if self._buffers[i].numel() < size:
                self._buffers[i] = tensor.new_empty(size + size // 4)
            out = self._buffers[i][:size].view(len(blocks), tensor.shape[1], tensor.shape[2])
            torch.index_select(tensor, 0, blocks, out=out)
            gathered.append(out.view(num_segments, -1, self.keys.shape[2], tensor.shape[2]))
        return gathered[0], gathered[1]

    def clear(self) -> None:
        """Zero all rows: masked columns must be finite. On a CPU this takes the memory of all of them."""
        self.keys.zero_()
        self.values.zero_()

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the first rows of blocks to other blocks."""
        for source, target, num_rows in copies:
            start, to = source * self.block_size, target * self.block_size
            for tensor in (self.keys, self.values):
                tensor[:, to : to + num_rows] = tensor[:, start : start + num_rows]

    def read_rows(self, slots: SlotArray) -> tuple[Tensor, Tensor]:
        """Copy of the rows in `slots`: (layers, slots, kv heads, dim) each."""
        runs = _runs(slots)
        keys, values = ([tensor[:, start:stop] for start, stop in runs] for tensor in (self.keys, self.values))
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)

    def write_rows(self, slots: SlotArray, keys: Tensor, values: Tensor) -> None:
        """keys, values: (layers, slots, kv heads, dim) each."""
        num_written = 0
        for start, stop in _runs(slots):
            for tensor, rows in ((self.keys, keys), (self.values, values)):
                tensor[:, start:stop] = rows[:, num_written : num_written + stop - start]
            num_written += stop - start

    def move_rows(self, source: SlotArray, target: SlotArray) -> None:
        """Copy rows between slots. All rows are read before any is written, so source and target may overlap."""
        read, write = (torch.from_numpy(slots).to(self.keys.device) for slots in (source, target))
        for tensor in (self.keys, self.values):
            tensor[:, write] = tensor[:, read]  # the right side is a copy


def _runs(slots: SlotArray) -> list[tuple[int, int]]:
    """First and last slot + 1 of each run of adjacent slots: slices are copied faster than single rows."""
    breaks = np.flatnonzero(np.diff(slots) != 1)
    firsts, lasts = np.concatenate(([0], breaks + 1)), np.concatenate((breaks, [len(slots) - 1]))
    return [(int(slots[first]), int(slots[last]) + 1) for first, last in zip(firsts, lasts, strict=True)]


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros, because a masked column still contributes 0 x its value, which must be finite.

    On a CPU the system commits pages when they are first touched, so unwritten rows use no memory. The mapping is made
    here because numpy asks for huge pages, of which a first row commits 2 MiB for K and for V of every layer.
    """
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    num_bytes = int(np.prod(shape)) * like.element_size()
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux, where the administrator may have made them the default
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype).view(shape)


class PagedKvCache(TableEngine):
    """KV cache of a model, or of a span of its layers: the engine contract without `forward`.

    A forward is `place` of the sequence table, then `_computed`.
    """

    def __init__(self, info: ModelInfo, storage: KvStorage, *, kv_model: str) -> None:
        """kv_model: identity of the exported rows; that of another model or span of layers is refused at import."""
        super().__init__(info)
        self.kv_model = kv_model
        self._storage = storage
        self._blocks = BlockManager(storage.num_blocks, storage.block_size, storage.max_unused)
        self._hashers: dict[SeqId, BlockHasher] = {}  # of sequences whose blocks are cached for later ones

    def _computed(self, placed: Sequence[PlacedSegment], width: int, run: Callable[[FlatBatch], Tensor]) -> Tensor:
        """What `run` makes of these rows, which it writes: (its rows, width). Raises EngineError, and has no effect."""
        device = self._storage.keys.device
        if not any(segment.tokens for segment in placed):  # all were dropped before they came
            self._written(placed)
            return torch.empty(0, width, device=device)
        flat = self._allocate(placed)
        try:
            with torch.inference_mode():
                found = run(flat)
        except Exception as error:
            self._roll_back(placed)
            if isinstance(error, RuntimeError):  # torch raises it when memory runs out
                raise engine_error(error, device) from error
            raise  # of Triton, which has errors of its own
        self._written(placed)
        return found

    def _allocate(self, placed: Sequence[PlacedSegment]) -> FlatBatch:
        """Reserve slots for these rows, at least one. Raises EngineError and leaves everything unchanged."""
        segments: list[SegmentSlots] = []
        slots: list[SlotArray] = []
        first = 0
        try:
            for segment in placed:
                n = len(segment.tokens)
                if not n:
                    continue
                self._storage.copy_blocks(self._blocks.reserve(segment.seq, n))
                slots.append(self._blocks.slot_mapping(segment.seq, segment.start, segment.start + n))
                segments.append(SegmentSlots(segment, first, self._blocks.block_array(segment.seq)))
                first += n
        except EngineError:
            self._roll_back(placed)
            raise
        return FlatBatch.of(segments, np.concatenate(slots))

    def _roll_back(self, placed: Sequence[PlacedSegment]) -> None:
        """Release the slots that `_allocate` reserved."""
        for segment in placed:
            if segment.seq in self._table:
                self._blocks.truncate(segment.seq, segment.start)
            else:
                self._blocks.release(segment.seq)

    def _written(self, placed: Sequence[PlacedSegment]) -> None:
        """Record that the forward has written these rows."""
        self._table.written(placed)
        for segment in placed:
            if segment.committed:
                self._cache(segment.seq, segment.tokens[: segment.committed])

    def _cache(self, seq: SeqId, committed: Sequence[int]) -> None:
        """Offer the blocks that these tokens have filled to later sequences."""
        hasher = self._hashers.get(seq)
        if hasher is None:
            return
        known = len(hasher.full)
        hasher.append(committed)
        for place in range(known, len(hasher.full)):
            self._blocks.register(seq, place, hasher.full[place])

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:
        if seq in self._table or seq in self._hashers:
            raise EngineError(f"sequence {seq} exists already")
        names = BlockHasher(salt, self.block_size, tokens[:-1]).names  # the last row is always computed
        hasher = self._hashers[seq] = BlockHasher(salt, self.block_size)
        if imported := self._import_longer(seq, stored, self._blocks.num_cached(names), len(tokens)):
            return imported
        rows, copies = self._blocks.adopt(seq, names)
        if rows:
            self._storage.copy_blocks(copies)
            self._table.adopt(seq, tokens[:rows])
            hasher.append(tokens[:rows])
        return rows

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        kept = self._table.prune(seq, keep, live, horizon)
        if not kept.size:
            return  # all of it is still on its way
        if kept.order != tuple(range(len(kept.order))):
            # No other sequence shares these slots: this one wrote them, and an open tree is never shared.
            slots = self._blocks.slot_mapping(seq, kept.first, kept.first + kept.size)
            self._storage.move_rows(slots[list(kept.order)], slots[: len(kept.order)])
        self._blocks.truncate(seq, kept.first + len(kept.order))
        self._cache(seq, kept.committed)

    def truncate(self, seq: SeqId, length: int) -> None:
        old_length = self._table.length(seq)
        self._table.truncate(seq, length)
        if length < old_length:
            self._blocks.truncate(seq, length)
        if seq in self._hashers:
            self._hashers[seq].truncate(length)

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        self._table.export(seq, len(tokens))
        keys, values = self._storage.read_rows(self._blocks.slot_mapping(seq, 0, len(tokens)))
        return kv_from_tensors(self.kv_model, tokens, keys, values)

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        num_rows, storage = len(rows.tokens), self._storage
        shapes = ((len(tensor), num_rows, *tensor.shape[2:]) for tensor in (storage.keys, storage.values))
        try:
            keys, values = kv_to_tensors(rows, self.kv_model, *shapes, dtype=storage.keys.dtype)
        except RuntimeError as error:
            raise engine_error(error, storage.keys.device) from error
        self._table.adopt(seq, rows.tokens)
        try:
            self._blocks.reserve(seq, num_rows)
        except EngineError:
            self._table.release(seq)
            raise
        storage.write_rows(self._blocks.slot_mapping(seq, 0, num_rows), keys, values)
        self._cache(seq, rows.tokens)

    def release(self, seq: SeqId) -> None:
        self._table.release(seq)
        hasher = self._hashers.pop(seq, None)
        if hasher is not None:
            for name in hasher.rest:  # of a block that this sequence fills no further
                self._blocks.register(seq, len(hasher.full), name)
        self._blocks.release(seq)

    @property
    def block_size(self) -> int:
        return self._storage.block_size

    def free_rows(self) -> int:
        return self._blocks.free_rows()

    def check(self) -> None:
        self._blocks.check()
        for seq, rows in self._table.lengths().items():
            assert self._blocks.length(seq) == rows, (seq, self._blocks.length(seq), rows)
            if seq in self._hashers:
                committed = rows - self._table.num_open_rows(seq)
                assert len(self._hashers[seq]) == committed, (seq, len(self._hashers[seq]), committed)
