"""Random ragged batches for attention: segments, block tables in no order, and the scores that softmax defines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from paceline.core.batching.segment import PlacedSegment, SeqId
from paceline.engine.paged.attention.tile_plan import LayerAttention
from paceline.engine.paged.kv_cache import FlatBatch, KvStorage, SegmentSlots

BLOCK = 16
Kind = Literal["prompt", "decode", "chain", "tree", "part"]


@dataclass
class Case:
    """A batch on a storage whose rows are all random, those that no segment may see included."""

    storage: KvStorage
    flat: FlatBatch
    query: Tensor  # (rows, heads, dim)
    key: Tensor
    value: Tensor
    params: LayerAttention

    def expected(self) -> Tensor:
        """(rows, heads, value dim), by definition, row by row; after the attention has stored K and V."""
        found = torch.empty(*self.query.shape[:2], self.value.shape[2])
        keys, values = (tensor.cpu().double() for tensor in self.storage.by_layer[0])
        group = self.query.shape[1] // keys.shape[1]
        for slots in self.flat.segments:
            n, segment = slots.num_rows, slots.segment
            columns = np.arange(segment.start + n)
            at = torch.from_numpy(slots.blocks[columns // BLOCK] * BLOCK + columns % BLOCK)
            k, v = (tensor[at].repeat_interleave(group, 1) for tensor in (keys, values))
            query = self.query[slots.first : slots.first + n].cpu().double()
            scores = torch.einsum("rhd,chd->hrc", query, k) * self.params.scale
            if self.params.softcap is not None:
                scores = torch.tanh(scores / self.params.softcap) * self.params.softcap
            hidden = ~torch.from_numpy(segment.attention_mask(self.params.window))
            probs = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
            found[slots.first : slots.first + n] = torch.einsum("hrc,chd->rhd", probs, v)
        return found


def case(
    kinds: list[Kind],
    seed: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    value_dim: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    longest: int = 200,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Case:
    draw = np.random.default_rng(seed)
    device = device or torch.device("cpu")
    segments = [_segment(SeqId(number), kind, draw, longest) for number, kind in enumerate(kinds)]
    needed = [-(-(each.start + len(each.tokens)) // BLOCK) for each in segments]
    order = draw.permutation(sum(needed) + 3)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    like, value_dim = torch.zeros(1, dtype=dtype, device=device), value_dim or dim
    storage = KvStorage(len(order), BLOCK, layers=1, kv_heads=kv_heads, key_dim=dim, value_dim=value_dim, like=like)
    for tensor in (storage.keys, storage.values):
        tensor.copy_(random(*tensor.shape))
    placed: list[SegmentSlots] = []
    slots: list[np.ndarray] = []
    row = used = 0
    for segment, count in zip(segments, needed, strict=True):
        blocks = order[used : used + count].astype(np.int64)
        placed.append(SegmentSlots(segment, row, blocks))
        new = np.arange(segment.start, segment.start + len(segment.tokens))
        slots.append(blocks[new // BLOCK] * BLOCK + new % BLOCK)
        row, used = row + len(new), used + count
    flat = FlatBatch.of(placed, np.concatenate(slots))
    params = LayerAttention(dim**-0.5, window, softcap)
    query, key, value = random(row, heads, dim), random(row, kv_heads, dim), random(row, kv_heads, value_dim)
    return Case(storage, flat, query, key, value, params)


def _segment(seq: SeqId, kind: Kind, draw: np.random.Generator, longest: int) -> PlacedSegment:
    start = int(draw.integers(0, longest))
    if kind == "decode":
        return PlacedSegment(seq, start, (1,), None, (0,))
    if kind == "prompt":
        rows = int(draw.integers(20, 90))
        return PlacedSegment(seq, start // 3, (1,) * rows, None, (rows - 1,))
    if kind == "chain":
        rows = int(draw.integers(2, 9))
        return PlacedSegment(seq, start, (1,) * rows, None, tuple(range(rows)))
    size = int(draw.integers(1, 45))  # more than one word of a mask
    parents = tuple(int(draw.integers(-1, row)) if row else -1 for row in range(size))
    new = int(draw.integers(1, size + 1)) if kind == "part" else size
    return PlacedSegment(seq, start + size - new, (1,) * new, parents, tuple(range(new)))
