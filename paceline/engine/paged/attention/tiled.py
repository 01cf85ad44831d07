"""Attention by kernels that read K and V through the block tables, without gathering them or building masks of rows
and columns.

One launch for each height of tile, and one that combines the parts of split tiles. The kernels are Triton's on a GPU;
their torch twin has the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.engine.paged.attention.interface import LayerAttention
from paceline.engine.paged.attention.step_layout import StepTensors
from paceline.engine.paged.kv_storage import KvStorage


@dataclass(frozen=True, slots=True)
class Operands:
    """Tensors of one attention call."""

    query: Tensor  # (rows, heads, key dim)
    keys: Tensor  # (slots, kv heads, key dim)
    values: Tensor  # (slots, kv heads, value dim)
    output: Tensor  # (rows, heads, value dim)
    partial: Tensor  # (slots, heads, value dim) float32: softmax-weighted means of parts
    norms: Tensor  # (slots, heads) float32: base-2 logarithms of the parts' sums of exponentials
    block_size: int


class Kernels(Protocol):
    def attend(self, operands: Operands, step: StepTensors, items: Tensor, height: int, params: LayerAttention) -> None:
        """Write the output of the items' rows, or their parts. height: rows of a tile, query heads of a K/V head
        counted one by one."""

    def combine(self, operands: Operands, step: StepTensors) -> None:
        """Write the output of rows whose parts were written."""


class TiledAttention:
    """Attention of one step. The step's shape decides what is launched, not its contents: a graph may replay it."""

    def __init__(self, storage: KvStorage, kernels: Kernels, heights: tuple[int, ...], step: StepTensors) -> None:
        self._storage, self._kernels, self._heights, self._step = storage, kernels, heights, step
        self.rotary: tuple[Tensor, Tensor] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: LayerAttention) -> Tensor:
        step = self._step
        keys, values = self._storage.by_layer[layer]
        keys.index_copy_(0, step.slots, key)
        values.index_copy_(0, step.slots, value)
        shape = (*query.shape[:2], value.shape[-1])
        # Padding rows belong to no tile; what they hold must be finite for models whose rows meet later.
        output = query.new_zeros(shape) if step.is_padded else query.new_empty(shape)
        partial = query.new_empty((step.num_slots, *shape[1:]), dtype=torch.float32)
        norms = query.new_empty((step.num_slots, shape[1]), dtype=torch.float32)
        operands = Operands(query, keys, values, output, partial, norms, self._storage.block_size)
        for items, height in zip(step.items, self._heights, strict=True):
            if len(items):
                self._kernels.attend(operands, step, items, height, params)
        if step.num_slots:
            self._kernels.combine(operands, step)
        return output
