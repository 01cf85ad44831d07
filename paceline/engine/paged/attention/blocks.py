"""Attention on a CPU over the blocks where they lie, by the kernel in C: short segments, each as it is.

Neither copies of blocks nor padding, and masks for trees alone. Long segments, which are prompts, go the way of
`gathered`, where matrix products pay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.engine.paged import layer_kernel
from paceline.engine.paged.attention.gathered import SHORT_ROWS, GatheredAttention
from paceline.engine.paged.attention.interface import LayerAttention
from paceline.engine.paged.flat_batch import SegmentSlots
from paceline.engine.paged.kv_storage import KvStorage


class BlockAttention:
    """Slots, block tables and masks of the rows of one batch. Valid for one forward."""

    def __init__(self, storage: KvStorage, segments: Sequence[SegmentSlots], slots: Tensor) -> None:
        """slots: (rows,) where to store K and V of each row"""
        self._storage = storage
        self._slots = slots
        self._short = [each for each in segments if each.num_rows <= SHORT_ROWS]
        long = [each for each in segments if each.num_rows > SHORT_ROWS]
        self._long = GatheredAttention(storage, long, slots, is_whole=not self._short) if long else None
        self._tables = [np.ascontiguousarray(each.blocks) for each in self._short]
        self._masks: list[NDArray[np.uint8]] = []  # kept for their addresses
        self._items: dict[int | None, NDArray[np.int64]] = {}  # by window
        self.rotary: tuple[Tensor, Tensor] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: LayerAttention) -> Tensor:
        if self._long is not None and not self._short:
            return self._long.attend(layer, query, key, value, params)
        keys, values = self._storage.by_layer[layer]
        keys.index_copy_(0, self._slots, key)
        values.index_copy_(0, self._slots, value)
        if query.stride()[1:] != (query.shape[2], 1):
            query = query.contiguous()
        mixed = query.new_empty(*query.shape[:2], value.shape[-1])
        layer_kernel.attend(
            self._storage,
            layer,
            query,
            self._items_of(params.window),
            mixed,
            scale=params.scale,
            window=params.window,
            softcap=params.softcap,
        )
        if self._long is not None:
            self._long.mix_into(mixed, layer, query, params)
        return mixed

    def _items_of(self, window: int | None) -> NDArray[np.int64]:
        if window not in self._items:
            items = np.zeros((len(self._short), layer_kernel.ITEM_FIELDS), dtype=np.int64)
            for item, slots, table in zip(items, self._short, self._tables, strict=True):
                columns = slots.segment.start + slots.num_rows
                item[:4] = slots.first, slots.num_rows, columns, table.ctypes.data
                if slots.segment.parents is not None:
                    mask = np.ascontiguousarray(slots.segment.attention_mask(window)).view(np.uint8)
                    self._masks.append(mask)
                    item[4] = mask.ctypes.data
            self._items[window] = items
        return self._items[window]
