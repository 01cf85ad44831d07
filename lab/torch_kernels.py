"""The twin of `paged.attention.triton_kernels` in torch: the same plan, read tile by tile, for tests on a CPU. Slow.

It follows the kernels in what they read and what they hide; sums are not in their order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.engine.paged.attention.tile_plan import COLUMNS, WORD, Item, LayerAttention, Operands, StepTensors


class TorchKernels:
    name = "twin"

    def attend(self, operands: Operands, step: StepTensors, items: Tensor, height: int, params: LayerAttention) -> None:
        for item in items.tolist():
            if item[Item.NUM_ROWS]:
                _attend_item(operands, step, item, height, params)

    def combine(self, operands: Operands, step: StepTensors) -> None:
        for row, (first, stride, count) in enumerate(step.splits.tolist()):
            if not count:
                continue
            slots = torch.arange(count, device=operands.norms.device) * stride + first
            norms = operands.norms[slots]  # (parts, heads)
            weights = torch.exp2(norms - norms.amax(0))
            mixed = (operands.partial[slots] * weights[:, :, None]).sum(0) / weights.sum(0)[:, None]
            operands.output[row] = mixed.to(operands.output.dtype)


def _attend_item(operands: Operands, step: StepTensors, item: list[int], height: int, params: LayerAttention) -> None:
    kv_heads, dim = operands.keys.shape[1:]
    group, rows = operands.query.shape[1] // kv_heads, item[Item.NUM_ROWS]
    assert rows <= height // group, "the tile holds all query heads of its rows"
    first, begin = item[Item.ROW], item[Item.BEGIN]
    if params.window is not None:
        begin = max(begin, (item[Item.LEAST] - params.window + 1) // COLUMNS * COLUMNS)
    columns = torch.arange(begin, max(begin, item[Item.END]), device=step.pool.device)
    blocks = step.pool[item[Item.TABLE] + columns // operands.block_size]
    slots = blocks * operands.block_size + columns % operands.block_size
    query = operands.query[first : first + rows].view(rows, kv_heads, group, dim).float()
    scores = torch.einsum("rhgd,chd->rhgc", query, operands.keys[slots].float()) * params.scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    hidden = ~_visible(step, item, columns, params.window)
    scores = (scores * math.log2(math.e)).masked_fill(hidden[:, None, None], -torch.inf)
    best = scores.amax(3) if len(columns) else scores.new_full(scores.shape[:3], -torch.inf)
    weights = torch.exp2(scores - best.clamp(min=torch.finfo(torch.float32).min)[..., None])
    total = weights.sum(3)
    mixed = torch.einsum("rhgc,chd->rhgd", weights, operands.values[slots].float())
    mixed = (mixed / total.clamp(min=1.0)[..., None]).flatten(1, 2)  # a sum is 0, or at least 1: the best's own weight
    if item[Item.SLOT] < 0:
        operands.output[first : first + rows] = mixed.to(operands.output.dtype)
    else:
        own = slice(item[Item.SLOT], item[Item.SLOT] + rows)
        operands.partial[own] = mixed
        operands.norms[own] = (best + torch.log2(total)).flatten(1, 2)


def _visible(step: StepTensors, item: list[int], columns: Tensor, window: int | None) -> Tensor:
    """(rows, columns)"""
    rows, words = item[Item.NUM_ROWS], item[Item.WORDS]
    positions = step.positions[0, item[Item.ROW] : item[Item.ROW] + rows, None]
    column_positions = columns
    if words:
        own = columns - item[Item.OWN]
        is_own, own = own >= 0, own.clamp(min=0)
        at = item[Item.MASK] + torch.arange(rows, device=columns.device)[:, None] * words + own // WORD
        visible = ~is_own | ((step.pool[at] >> (own % WORD)) & 1 == 1)
        column_positions = torch.where(is_own, step.pool[item[Item.POSITIONS] + own], columns)
    else:
        visible = columns <= positions
    assert visible[:, columns < item[Item.FULL]].all(), "the kernel does not look at masks of these columns"
    return visible if window is None else visible & (positions - column_positions < window)
