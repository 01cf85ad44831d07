"""Triton kernels of tiled attention, see `tile_plan` for what they read.

A program computes one item for one K/V head: its rows of all query heads against its columns, whose K and V it reads
where they are, through the block table. The softmax is computed on the way, in float32 and base 2 (FlashAttention, Dao
et al. 2022); parts of a row are weighted by their norms afterwards (Flash-Decoding, Dao et al. 2023). Products of
float32 are exact, not TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.engine.paged.attention.tile_plan import LayerAttention, Operands, StepTensors

_LOG2_E = 1.4426950408889634
_FIELDS = tl.constexpr(12)  # of an item


@triton.jit
def attend_kernel(
    query,
    keys,
    values,
    output,
    partial,
    norms,
    items,
    pool,
    positions,
    scale,
    softcap,
    query_row,
    query_head,
    key_slot,
    key_head,
    value_slot,
    value_head,
    output_row,
    output_head,
    heads,
    GROUP: tl.constexpr,  # query heads of each K/V head
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,  # rows
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    item = items + tl.program_id(0) * _FIELDS
    kv_head = tl.program_id(1)
    num_rows = tl.load(item + 1)
    if num_rows == 0:
        return
    first = tl.load(item)
    table = tl.load(item + 2)
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    full = tl.load(item + 5)
    tree = tl.load(item + 6)
    mask = tl.load(item + 7)
    words = tl.load(item + 8)
    places = tl.load(item + 9)
    slot = tl.load(item + 10)
    least = tl.load(item + 11)
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(least - WINDOW + 1, 0) // COLUMNS * COLUMNS)

    line = tl.arange(0, HEIGHT)  # a row and one of its query heads
    row = line // GROUP
    head = kv_head * GROUP + line % GROUP
    used = row < num_rows
    position = tl.load(positions + first + row, mask=used, other=0).to(tl.int32)
    key_dims = tl.arange(0, KEY_PADDED)
    value_dims = tl.arange(0, VALUE_PADDED)
    query_at = query + (first + row)[:, None].to(tl.int64) * query_row + head[:, None] * query_head + key_dims[None, :]
    q = tl.load(query_at, mask=used[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0)
    best = tl.full([HEIGHT], float("-inf"), tl.float32)
    total = tl.zeros([HEIGHT], tl.float32)
    mixed = tl.zeros([HEIGHT, VALUE_PADDED], tl.float32)

    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_stored = column < end
        block = tl.load(pool + table + column // BLOCK, mask=is_stored, other=0)
        place = block.to(tl.int64) * BLOCK + column % BLOCK
        key_at = keys + place[None, :] * key_slot + kv_head * key_head + key_dims[:, None]
        k = tl.load(key_at, mask=is_stored[None, :] & (key_dims < KEY_DIM)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:  # tanh(x) = 2 sigmoid(2x) - 1; in base 2 as all scores
            scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap * 1.4426950408889634
        visible = used[:, None] & is_stored[None, :]
        column_position = column
        if start + COLUMNS > full:
            if words == 0:
                visible = visible & (column[None, :] <= position[:, None])
            else:
                own = column - tree
                is_own = (own >= 0) & is_stored
                word_at = pool + mask + row[:, None] * words + (own >> 5)[None, :]
                word = tl.load(word_at, mask=used[:, None] & is_own[None, :], other=-1)
                visible = visible & (((word >> (own & 31)[None, :]) & 1) == 1)
                if WINDOW > 0:
                    column_position = tl.load(pool + places + own, mask=is_own, other=0)
                    column_position = tl.where(is_own, column_position, column)
        if WINDOW > 0:
            visible = visible & (position[:, None] - column_position[None, :] < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        finite = tl.where(better == float("-inf"), 0.0, better)  # a row may see none of these columns
        weights = tl.exp2(scores - finite[:, None])
        decay = tl.exp2(best - finite)
        total = total * decay + tl.sum(weights, 1)
        value_at = values + place[:, None] * value_slot + kv_head * value_head + value_dims[None, :]
        v = tl.load(value_at, mask=is_stored[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
        mixed = mixed * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = better

    total = tl.where(total == 0.0, 1.0, total)  # only where `best` is -inf
    mixed = mixed / total[:, None]
    written = used[:, None] & (value_dims < VALUE_DIM)[None, :]
    if slot < 0:
        output_at = (first + row)[:, None].to(tl.int64) * output_row + head[:, None] * output_head + value_dims[None, :]
        tl.store(output + output_at, mixed.to(output.dtype.element_ty), mask=written)
    else:
        part = (slot + row) * heads + head
        tl.store(partial + part[:, None].to(tl.int64) * VALUE_DIM + value_dims[None, :], mixed, mask=written)
        tl.store(norms + part, best + tl.log2(total), mask=used)


@triton.jit
def combine_kernel(
    partial,
    norms,
    output,
    splits,
    output_row,
    output_head,
    heads,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(splits + row * 3)
    stride = tl.load(splits + row * 3 + 1)
    count = tl.load(splits + row * 3 + 2)
    if count == 0:
        return
    value_dims = tl.arange(0, VALUE_PADDED)
    within = value_dims < VALUE_DIM
    best = -1.0e30
    total = 0.0
    mixed = tl.zeros([VALUE_PADDED], tl.float32)
    for part in range(count):
        at = (first + part * stride) * heads + head
        norm = tl.load(norms + at)
        better = tl.maximum(best, norm)
        decay = tl.exp2(best - better)
        weight = tl.exp2(norm - better)
        found = tl.load(partial + at.to(tl.int64) * VALUE_DIM + value_dims, mask=within, other=0.0)
        mixed = mixed * decay + found * weight
        total = total * decay + weight
        best = better
    output_at = output + row.to(tl.int64) * output_row + head * output_head + value_dims
    tl.store(output_at, (mixed / total).to(output.dtype.element_ty), mask=within)


class TritonKernels:
    name = "triton"

    def attend(self, operands: Operands, step: StepTensors, items: Tensor, height: int, params: LayerAttention) -> None:
        query, keys, values, output = operands.query, operands.keys, operands.values, operands.output
        heads, key_dim = query.shape[1:]
        kv_heads, value_dim = values.shape[1:]
        assert query.stride(2) == keys.stride(2) == values.stride(2) == output.stride(2) == 1
        has_softcap = params.softcap is not None
        attend_kernel[(len(items), kv_heads)](
            query,
            keys,
            values,
            output,
            operands.partial,
            operands.norms,
            items,
            step.pool,
            step.positions,
            float(params.scale if has_softcap else params.scale * _LOG2_E),
            float(params.softcap or 1.0),
            *query.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            *output.stride()[:2],
            heads,
            GROUP=heads // kv_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_PADDED=max(16, triton.next_power_of_2(key_dim)),
            VALUE_PADDED=max(16, triton.next_power_of_2(value_dim)),
            BLOCK=operands.block_size,
            HEIGHT=height,
            COLUMNS=columns(keys.dtype, max(key_dim, value_dim)),
            WINDOW=params.window or 0,
            HAS_SOFTCAP=has_softcap,
            PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=2,
        )

    def combine(self, operands: Operands, step: StepTensors) -> None:
        rows, heads, value_dim = operands.output.shape
        combine_kernel[(rows, heads)](
            operands.partial,
            operands.norms,
            operands.output,
            step.splits,
            *operands.output.stride()[:2],
            heads,
            VALUE_DIM=value_dim,
            VALUE_PADDED=max(16, triton.next_power_of_2(value_dim)),
            num_warps=1,
        )


def columns(dtype: torch.dtype, dim: int) -> int:
    """Columns that are read at a time: K and V of them, twice, must fit in the memory of a multiprocessor."""
    size = dtype.itemsize * dim
    return 64 if size <= 256 else 32 if size <= 512 else 16
