"""Attention over KV that lives in blocks, for one flat row of tokens from many sequences.

transformers calls `attention` by name (`AttentionInterface.register`) and hands it the plan of the running forward.
A plan says where each row's K and V go, and groups the segments: short ones are padded into one call, long ones run
alone. Knows nothing of models, sequences' ids or who owns a block. Attention sinks are not handled: they raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from paceline.core.batching.block_manager import BlockCopy, SlotArray
from paceline.core.batching.segment import Segment

NAME = "paceline"  # as transformers knows it: `config._attn_implementation`

# A segment of up to this many rows is padded to the longest of its kind and shares a call with them.
_SHORT = 32
# Padding wastes at most this factor of a call's rows x columns; beyond it the group is split.
_WASTE = 2.0


class Attending(Protocol):
    """What `attention` finds under the keyword `plan`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        """query: (rows, heads, dim); key, value: (rows, kv heads, dim). Returns (rows, heads, value dim)."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer asks of attention."""

    scale: float
    window: int | None = None  # positions a row sees, its own included
    softcap: float | None = None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: Attending,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query: (1, heads, rows, dim); key, value: (1, kv heads, rows, dim).

    `attention_mask` is None: transformers makes no mask for a name it has no mask function for.
    """
    if attention_mask is not None or s_aux is not None or position_bias is not None:
        raise NotImplementedError("masks, attention sinks and position biases of a model's own are not handled")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)
    how = LayerAttention(scale, sliding_window, softcap)
    mixed = plan.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), how)
    return mixed[None], None


@dataclass(frozen=True, slots=True)
class SegmentSlots:
    """One segment in the flat row, with the blocks of its sequence."""

    segment: Segment
    first: int  # its first row in the flat row
    blocks: NDArray[np.int64]  # (enough for start + n rows,)

    @property
    def rows(self) -> int:
        return len(self.segment.tokens)


@dataclass(slots=True)
class Group:
    """Segments padded to `longest` rows and `columns` columns, for one attention call."""

    spans: Sequence[SegmentSlots]
    longest: int
    columns: int  # a multiple of the block size
    flat: Tensor | None  # (spans * longest,) rows of the flat row to read; None: all of them, in order
    back: Tensor | None  # (rows,) where in the padded output each row stands; None: as above
    into: Tensor | None  # (rows,) rows of the flat row to write
    blocks: Tensor | None  # (spans * blocks each,); None: `run` holds
    run: tuple[int, int] | None  # first and last slot + 1, when there is one span and its blocks lie side by side
    masks: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)


class KvStorage:
    """K and V of every layer in blocks: (layers, blocks * block size, kv heads, dim) each."""

    def __init__(
        self, blocks: int, block_size: int, *, layers: int, kv_heads: int, key_dim: int, value_dim: int, like: Tensor
    ) -> None:
        self.block_size = block_size
        shape = (layers, blocks * block_size, kv_heads)
        self.keys, self.values = _zeros((*shape, key_dim), like), _zeros((*shape, value_dim), like)
        self._room = [like.new_empty(0), like.new_empty(0)]
        self.by_layer = list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))
        in_blocks = (tensor.view(layers, blocks, block_size * kv_heads, -1) for tensor in (self.keys, self.values))
        self.blocks_by_layer = list(zip(*(tensor.unbind(0) for tensor in in_blocks), strict=True))

    def gathered(self, layer: int, blocks: Tensor, spans: int) -> tuple[Tensor, Tensor]:
        """(spans, columns, kv heads, dim) each, of (spans * blocks each,) block ids. Valid until the next call.

        Both go into memory that is kept: fresh memory of this size costs more in page faults than the copy itself.
        """
        found: list[Tensor] = []
        for i, tensor in enumerate(self.blocks_by_layer[layer]):
            need = len(blocks) * tensor.shape[1] * tensor.shape[2]
            if self._room[i].numel() < need:
                self._room[i] = tensor.new_empty(need + need // 4)
            out = self._room[i][:need].view(len(blocks), tensor.shape[1], tensor.shape[2])
            torch.index_select(tensor, 0, blocks, out=out)
            found.append(out.view(spans, -1, self.keys.shape[2], tensor.shape[2]))
        return found[0], found[1]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the first rows of blocks into others."""
        for source, target, rows in copies:
            at, to = source * self.block_size, target * self.block_size
            for tensor in (self.keys, self.values):
                tensor[:, to : to + rows] = tensor[:, at : at + rows]

    def read_rows(self, slots: SlotArray) -> tuple[Tensor, Tensor]:
        """(layers, slots, kv heads, dim) each: a copy."""
        runs = _runs(slots)
        keys, values = ([tensor[:, at:stop] for at, stop in runs] for tensor in (self.keys, self.values))
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)

    def write_rows(self, slots: SlotArray, keys: Tensor, values: Tensor) -> None:
        """keys, values: (layers, slots, kv heads, dim) each."""
        done = 0
        for at, stop in _runs(slots):
            for tensor, rows in ((self.keys, keys), (self.values, values)):
                tensor[:, at:stop] = rows[:, done : done + stop - at]
            done += stop - at

    def move_rows(self, source: SlotArray, into: SlotArray) -> None:
        """Slots to slots, as if all were read before any is written: the two may overlap in any way."""
        at, to = (torch.from_numpy(slots).to(self.keys.device) for slots in (source, into))
        for tensor in (self.keys, self.values):
            tensor[:, to] = tensor[:, at]  # the right side is a copy


def _runs(slots: SlotArray) -> list[tuple[int, int]]:
    """First and last slot + 1 of each run of neighbours: slices are copied faster than rows that are picked."""
    ends = np.flatnonzero(np.diff(slots) != 1)
    firsts, lasts = np.concatenate(([0], ends + 1)), np.concatenate((ends, [len(slots) - 1]))
    return [(int(slots[first]), int(slots[last]) + 1) for first, last in zip(firsts, lasts, strict=True)]


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros, because a masked column still counts as 0 x its value, which must be a number.

    On a CPU memory that the system hands out as it is touched: room for many rows costs nothing until they are written.
    """
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    count = int(np.prod(shape)) * like.element_size()
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(like.dtype).view(shape)


class AttentionMetadata:
    """Where the rows of one batch go and what each may see. Valid for one forward."""

    def __init__(self, storage: KvStorage, spans: Sequence[SegmentSlots], slots: SlotArray) -> None:
        self._storage = storage
        self._device = storage.keys.device
        self._dtype = storage.keys.dtype
        self._slots = torch.from_numpy(slots).to(self._device)  # (rows,)
        self._groups = [self._group(part, alone=len(spans) == len(part)) for part in _parts(spans)]
        self.rotary: tuple[Tensor, Tensor] | None = None  # made once by the first fused layer, read by the others

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        keys, values = self._storage.by_layer[layer]
        keys.index_copy_(0, self._slots, key)
        values.index_copy_(0, self._slots, value)
        if len(self._groups) == 1:
            return self._one(self._groups[0], layer, query, how)
        mixed = query.new_empty(*query.shape[:2], value.shape[-1])
        for group in self._groups:
            assert group.into is not None
            mixed[group.into] = self._one(group, layer, query, how)
        return mixed

    def _one(self, group: Group, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        """(rows of the group, heads, value dim)"""
        heads = query.shape[1]
        if group.run is not None:
            first, end = group.run
            keys, values = (tensor[None, first:end] for tensor in self._storage.by_layer[layer])
        else:
            assert group.blocks is not None
            keys, values = self._storage.gathered(layer, group.blocks, len(group.spans))
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # (spans, kv heads, columns, dim)
        kv_heads = keys.shape[1]
        share = heads // kv_heads
        asked = query if group.flat is None else query.index_select(0, group.flat)
        # the heads that share a K/V head become rows of one head: nothing is repeated
        asked = asked.view(len(group.spans), group.longest, kv_heads, share, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = self._mask(group, how.window, share)
        if how.softcap is None:
            mixed = functional.scaled_dot_product_attention(asked, keys, values, attn_mask=mask, scale=how.scale)
        else:
            scores = torch.matmul(asked * how.scale, keys.transpose(2, 3))
            scores = torch.tanh(scores / how.softcap) * how.softcap
            if mask is not None:
                scores = scores + mask
            mixed = torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype), values)
        mixed = mixed.view(len(group.spans), kv_heads, share, group.longest, -1).permute(0, 3, 1, 2, 4)
        mixed = mixed.reshape(len(group.spans) * group.longest, heads, -1)
        return mixed if group.back is None else mixed.index_select(0, group.back)

    def _mask(self, group: Group, window: int | None, share: int) -> Tensor | None:
        """(spans, 1, share * longest, columns) added to the scores, made once for all layers that ask alike."""
        if (window, share) not in group.masks:
            seen = np.zeros((len(group.spans), group.longest, group.columns), dtype=np.bool_)
            for i, span in enumerate(group.spans):
                now = span.segment.attention_mask(window)
                seen[i, : span.rows, : now.shape[1]] = now
                seen[i, span.rows :, 0] = True  # a padding row must see something, or its scores are not numbers
            mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))).to(self._device, self._dtype)
            shape = (len(group.spans), share, group.longest, group.columns)
            group.masks[window, share] = mask[:, None].expand(shape).reshape(len(group.spans), 1, -1, group.columns)
        return group.masks[window, share]

    def _group(self, spans: Sequence[SegmentSlots], *, alone: bool) -> Group:
        size = self._storage.block_size
        longest = max(span.rows for span in spans)
        each = max(len(span.blocks) for span in spans)
        blocks = np.zeros((len(spans), each), dtype=np.int64)
        for i, span in enumerate(spans):
            blocks[i, : len(span.blocks)] = span.blocks
        one = len(spans) == 1 and bool(np.all(np.diff(blocks[0]) == 1))
        into = np.concatenate([np.arange(span.first, span.first + span.rows) for span in spans])
        even = all(span.rows == longest for span in spans)
        padded = np.concatenate([np.minimum(np.arange(longest), span.rows - 1) + span.first for span in spans])
        kept = np.concatenate([np.arange(span.rows) + i * longest for i, span in enumerate(spans)])
        return Group(
            spans=spans,
            longest=longest,
            columns=each * size,
            flat=None if alone and even else torch.from_numpy(padded).to(self._device),
            back=None if even else torch.from_numpy(kept).to(self._device),
            into=None if alone else torch.from_numpy(into).to(self._device),
            blocks=None if one else torch.from_numpy(blocks.ravel()).to(self._device),
            run=(int(blocks[0, 0]) * size, (int(blocks[0, 0]) + each) * size) if one else None,
        )


def _parts(spans: Sequence[SegmentSlots]) -> list[list[SegmentSlots]]:
    """Spans in groups of which padding does not waste too much: in their order if one group holds them all."""
    parts = _grouped(spans)
    if len(parts) > 1:
        parts = _grouped(sorted(spans, key=lambda span: (span.rows > _SHORT, span.rows, len(span.blocks))))
    return parts


def _grouped(spans: Sequence[SegmentSlots]) -> list[list[SegmentSlots]]:
    """Neighbours together. Long spans stand alone."""
    parts: list[list[SegmentSlots]] = []
    for span in spans:
        if parts and span.rows <= _SHORT:
            part = [*parts[-1], span]
            rows, columns = max(s.rows for s in part), max(len(s.blocks) for s in part)
            used = sum(s.rows * len(s.blocks) for s in part)
            if rows <= _SHORT and len(part) * rows * columns <= _WASTE * used + 64:
                parts[-1] = part
                continue
        parts.append([span])
    return parts
