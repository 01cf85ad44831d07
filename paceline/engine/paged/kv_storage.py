"""Tensors of the paged KV cache: K and V of every layer in fixed-size blocks, with copies between slots.

Knows nothing of sequences or of the owners of a block; `core.batching.block_manager` assigns blocks and slots.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from paceline.core.batching.block_manager import BlockCopy, SlotArray


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
