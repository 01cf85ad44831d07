"""The one place that chooses how a model attends: `gathered`, or tiled with kernels."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paceline.engine import layer_kernel
from paceline.engine.paged.attention.tile_plan import (
    Attending,
    Kernels,
    LayerAttention,
    Operands,
    Staging,
    StepShape,
    StepTensors,
    TiledAttention,
    TilePlan,
    TileShape,
    fill,
    most_items,
    plan_tiles,
    size_of,
    views,
)
from paceline.engine.paged.kv_cache import FlatBatch, KvStorage, SegmentSlots

# Attention over copies of the blocks, with masks: the CPU's way, and the reference of `tiled`.
#
# Segments are grouped: short ones are padded into one call of scaled dot-product attention, long ones run alone.
# Blocks that are not adjacent are gathered first. Masks have a column for every cached row.


_SHORT_ROWS = 32  # a segment of up to this many rows is padded to the longest of its group; longer ones run alone
_MAX_PADDING = 2.0  # padded rows x columns of a call over the used ones; beyond it the group is split


@dataclass(slots=True)
class SegmentGroup:
    """Segments padded to the same numbers of rows and columns, for one attention call."""

    segments: Sequence[SegmentSlots]
    max_rows: int  # rows of each segment after padding
    num_columns: int  # cached rows of each segment after padding, a multiple of the block size
    gather: Tensor | None  # (segments * max_rows,) rows of the flat row to read; None: all of them, in order
    unpad: Tensor | None  # (rows,) index of each row in the padded output; None: nothing is padded
    scatter: Tensor | None  # (rows,) rows of the flat row to write; None: all of them, in order
    blocks: Tensor | None  # (segments * blocks each,); None: `slot_range` holds
    slot_range: tuple[int, int] | None  # first and last slot + 1 of a single segment whose blocks are adjacent
    masks: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)  # by (window, query group size)


class GatheredAttention:
    """Slots and masks of the rows of one batch. Valid for one forward."""

    def __init__(self, storage: KvStorage, segments: Sequence[SegmentSlots], slots: Tensor) -> None:
        """slots: (rows,) where to store K and V of each row"""
        self._storage = storage
        self._device = storage.keys.device
        self._dtype = storage.keys.dtype
        self._slots = slots
        self._groups = [self._group(part, is_whole=len(segments) == len(part)) for part in _partition(segments)]
        self.rotary: tuple[Tensor, Tensor] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: LayerAttention) -> Tensor:
        keys, values = self._storage.by_layer[layer]
        keys.index_copy_(0, self._slots, key)
        values.index_copy_(0, self._slots, value)
        if len(self._groups) == 1:
            return self._attend_group(self._groups[0], layer, query, params)
        mixed = query.new_empty(*query.shape[:2], value.shape[-1])
        for group in self._groups:
            assert group.scatter is not None
            mixed[group.scatter] = self._attend_group(group, layer, query, params)
        return mixed

    def _attend_group(self, group: SegmentGroup, layer: int, query: Tensor, params: LayerAttention) -> Tensor:
        """(rows of the group, heads, value dim)"""
        heads, batch_size = query.shape[1], len(group.segments)
        if group.slot_range is not None:
            first, stop = group.slot_range
            keys, values = (tensor[None, first:stop] for tensor in self._storage.by_layer[layer])
        else:
            assert group.blocks is not None
            keys, values = self._storage.gather_blocks(layer, group.blocks, batch_size)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # (segments, kv heads, columns, dim)
        kv_heads = keys.shape[1]
        group_size = heads // kv_heads
        padded = query if group.gather is None else query.index_select(0, group.gather)
        # grouped-query attention: the heads that share a K/V head become rows of one head, so K and V are not repeated
        padded = padded.view(batch_size, group.max_rows, kv_heads, group_size, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = self._mask(group, params.window, group_size)
        if params.softcap is None:
            mixed = functional.scaled_dot_product_attention(padded, keys, values, attn_mask=mask, scale=params.scale)
        else:
            scores = torch.matmul(padded * params.scale, keys.transpose(2, 3))
            scores = torch.tanh(scores / params.softcap) * params.softcap
            if mask is not None:
                scores = scores + mask
            mixed = torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype), values)
        mixed = mixed.view(batch_size, kv_heads, group_size, group.max_rows, -1).permute(0, 3, 1, 2, 4)
        mixed = mixed.reshape(batch_size * group.max_rows, heads, -1)
        return mixed if group.unpad is None else mixed.index_select(0, group.unpad)

    def _mask(self, group: SegmentGroup, window: int | None, group_size: int) -> Tensor | None:
        """(segments, 1, group_size * max_rows, columns), added to the scores; shared by layers with equal arguments."""
        if (window, group_size) not in group.masks:
            visible = np.zeros((len(group.segments), group.max_rows, group.num_columns), dtype=np.bool_)
            for i, slots in enumerate(group.segments):
                own = slots.segment.attention_mask(window)
                visible[i, : slots.num_rows, : own.shape[1]] = own
                visible[i, slots.num_rows :, 0] = True  # padding rows attend to one column, to avoid NaN
            mask = torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf))).to(self._device, self._dtype)
            shape = (len(group.segments), group_size, group.max_rows, group.num_columns)
            mask = mask[:, None].expand(shape).reshape(len(group.segments), 1, -1, group.num_columns)
            group.masks[window, group_size] = mask
        return group.masks[window, group_size]

    def _group(self, segments: Sequence[SegmentSlots], *, is_whole: bool) -> SegmentGroup:
        """is_whole: the group holds all segments of the batch, in order."""
        size = self._storage.block_size
        max_rows = max(slots.num_rows for slots in segments)
        max_blocks = max(len(slots.blocks) for slots in segments)
        blocks = np.zeros((len(segments), max_blocks), dtype=np.int64)
        for i, slots in enumerate(segments):
            blocks[i, : len(slots.blocks)] = slots.blocks
        is_adjacent = len(segments) == 1 and bool(np.all(np.diff(blocks[0]) == 1))
        is_even = all(slots.num_rows == max_rows for slots in segments)
        gather = np.concatenate([np.minimum(np.arange(max_rows), each.num_rows - 1) + each.first for each in segments])
        unpad = np.concatenate([np.arange(slots.num_rows) + i * max_rows for i, slots in enumerate(segments)])
        scatter = np.concatenate([np.arange(slots.first, slots.first + slots.num_rows) for slots in segments])
        first = int(blocks[0, 0]) * size
        return SegmentGroup(
            segments=segments,
            max_rows=max_rows,
            num_columns=max_blocks * size,
            gather=None if is_whole and is_even else torch.from_numpy(gather).to(self._device),
            unpad=None if is_even else torch.from_numpy(unpad).to(self._device),
            scatter=None if is_whole else torch.from_numpy(scatter).to(self._device),
            blocks=None if is_adjacent else torch.from_numpy(blocks.ravel()).to(self._device),
            slot_range=(first, first + max_blocks * size) if is_adjacent else None,
        )


def _partition(segments: Sequence[SegmentSlots]) -> list[list[SegmentSlots]]:
    """Groups without too much padding: one group in the given order if it suffices, else grouped after sorting."""
    parts = _group_neighbours(segments)
    if len(parts) > 1:
        by_size = sorted(segments, key=lambda each: (each.num_rows > _SHORT_ROWS, each.num_rows, len(each.blocks)))
        parts = _group_neighbours(by_size)
        if len(parts) == 1:
            return [list(segments)]  # rows of a whole batch are neither gathered nor scattered: they stay in order
    return parts


def _group_neighbours(segments: Sequence[SegmentSlots]) -> list[list[SegmentSlots]]:
    """Group neighbours up to the padding limit. Long segments are alone."""
    parts: list[list[SegmentSlots]] = []
    rows = columns = used = 0  # of the last part: most rows, most columns, and their products summed
    for slots in segments:
        own_rows, own_columns = slots.num_rows, len(slots.blocks)
        if parts and max(rows, own_rows) <= _SHORT_ROWS:
            most_rows, most_columns = max(rows, own_rows), max(columns, own_columns)
            total = used + own_rows * own_columns
            if (len(parts[-1]) + 1) * most_rows * most_columns <= _MAX_PADDING * total + 64:
                parts[-1].append(slots)
                rows, columns, used = most_rows, most_columns, total
                continue
        parts.append([slots])
        rows, columns, used = own_rows, own_columns, own_rows * own_columns
    return parts


log = logging.getLogger("paceline.engine")

AttentionName = Literal["gathered", "triton", "c"]
Attention = AttentionName | Kernels

_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_DIM = 256  # of K and V: more would not fit in a multiprocessor's memory
_PROGRAMS = 4  # of one launch, for each multiprocessor of the device
_CPU_SPREAD = 6  # items, so that tests split tiles


@dataclass(frozen=True, slots=True)
class ModelAttention:
    """What a model asks of attention, as its trial forward has shown."""

    layers: Sequence[LayerAttention]
    query_heads: int | None  # None: layers differ

    @property
    def window(self) -> int | None:
        """The longest; None if a layer has none."""
        windows = [layer.window for layer in self.layers if layer.window is not None]
        return max(windows) if len(windows) == len(self.layers) else None

    def is_grouped(self, kv_heads: int) -> bool:
        """True if each K/V head has the same number of query heads in all layers, as tiles need."""
        return self.query_heads is not None and self.query_heads % kv_heads == 0


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A batch on the device, ready for the model."""

    tokens: Tensor  # (1, rows)
    positions: Tensor  # (1, rows)
    logits_rows: Tensor  # (wanted,) rows to score
    attending: Attending


class AttentionBackend(Protocol):
    @property
    def name(self) -> str: ...

    def prepare(self, flat: FlatBatch) -> DeviceStep: ...


class Gathered:
    name = "gathered"

    def __init__(self, storage: KvStorage) -> None:
        self._storage = storage

    def prepare(self, flat: FlatBatch) -> DeviceStep:
        device = self._storage.keys.device
        rows = flat.tokens, flat.positions, flat.slots, flat.logits_rows
        tokens, positions, slots, logits_rows = (torch.from_numpy(each).to(device) for each in rows)
        attending = GatheredAttention(self._storage, flat.segments, slots)
        return DeviceStep(tokens[None], positions[None], logits_rows, attending)


class CpuKernels:
    """`Kernels` in C. Tiles are not split here: parts of a row would depend on the rows beside it. The kernel does."""

    name = "c"

    def attend(self, operands: Operands, step: StepTensors, items: Tensor, height: int, params: LayerAttention) -> None:
        del height
        tensors = operands.query, operands.keys, operands.values, operands.output
        layer_kernel.attend(
            *tensors,
            items,
            step.pool,
            step.positions,
            block_size=operands.block_size,
            window=params.window,
            scale=params.scale,
            softcap=params.softcap,
        )

    def combine(self, operands: Operands, step: StepTensors) -> None:
        """Nothing is left to do."""


class Tiled:
    """`plan`, `send` and `attending` are the steps of `prepare`, for who sends to memory of its own."""

    def __init__(self, storage: KvStorage, kernels: Kernels, tiles: TileShape) -> None:
        self.name, self.tiles = kernels.name, tiles
        self._storage, self._kernels = storage, kernels
        self.staging = Staging(storage.keys.device)

    def prepare(self, flat: FlatBatch) -> DeviceStep:
        plan = self.plan(flat)
        return self.step(self.send(flat, plan, StepShape.of(flat, plan)))

    def plan(self, flat: FlatBatch) -> TilePlan:
        return plan_tiles(flat.segments, flat.num_rows, self.tiles)

    def send(self, flat: FlatBatch, plan: TilePlan, shape: StepShape, into: Tensor | None = None) -> StepTensors:
        size = size_of(shape, len(plan.pool))
        fill(self.staging.buffer(size), shape, flat, plan, self._storage.spare_slot)
        return views(self.staging.send(size, into), shape)

    def step(self, tensors: StepTensors) -> DeviceStep:
        attending = TiledAttention(self._storage, self._kernels, self.tiles.heights, tensors)
        return DeviceStep(tensors.tokens, tensors.positions, tensors.logits_rows, attending)


def choose_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionName:
    """head_dim: the larger one of K and V."""
    if device.type != "cuda":
        can_run = (
            layer_kernel.can_run(torch.empty(0, dtype=dtype, device=device)) and head_dim <= layer_kernel.MOST_DIMS
        )
        return "c" if can_run else "gathered"
    if dtype not in _TRITON_DTYPES or head_dim > _MAX_DIM:
        reason = f"Triton's kernels are for heads of up to {_MAX_DIM} numbers in float32, bfloat16 or float16"
    elif importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    else:
        return "triton"
    log.warning("attention copies K and V and builds masks, slower on a GPU: %s", reason)
    return "gathered"


def make_attention(chosen: Attention | None, storage: KvStorage, model: ModelAttention) -> AttentionBackend:
    """chosen: a way by its name, or kernels for tiles; None: what suits the device. Raises ValueError where the model's
    attention is of no kind that they compute."""
    device, kv_heads = storage.keys.device, storage.keys.shape[2]
    if chosen is None and model.is_grouped(kv_heads):
        chosen = choose_attention(device, storage.keys.dtype, max(storage.keys.shape[3], storage.values.shape[3]))
    if chosen is None or chosen == "gathered":
        return Gathered(storage)
    if model.query_heads is None or not model.is_grouped(kv_heads):
        raise ValueError("its layers differ in their query heads")
    spread = _CPU_SPREAD
    if chosen == "c":
        if not layer_kernel.can_run(storage.keys):
            raise ValueError("the kernel in C does not compute with its K and V")
        chosen, spread = CpuKernels(), 1
    if isinstance(chosen, str):
        from paceline.engine.paged.attention.triton_kernels import TritonKernels  # only CUDA's builds of torch bring it

        chosen = TritonKernels()
    if device.type == "cuda":
        spread = -(-_PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count // kv_heads)
    return Tiled(storage, chosen, TileShape(model.query_heads // kv_heads, spread, model.window))


# Forwards of few rows, padded to a few shapes in memory of their own, so that a CUDA graph can replay them.
#
# Launching a model's kernels takes the host longer than the device needs to run them when rows are few. A graph
# launches all of them at once, but repeats addresses and shapes: so steps are padded to the next row count of
# `buckets`, their integers are copied to the same places, and only these decide what each program does
# (`tile_plan.StepShape`). Chains, trees and the ends of prompts are alike; what is longer runs as it is.
#
# The first step of a shape runs as it is padded, which compiles its kernels; the second is captured. Where a graph
# cannot be captured, all further steps run unpadded. `capture` of the CPU is a plain call.


Forward = Callable[[DeviceStep], Tensor]  # returns (wanted, vocab)
Run = Callable[[], Tensor]
Capture = Callable[[Run], Run]  # what replays a run that is captured now; its tensor is the same one each time

MAX_ROWS = 256  # beyond it the device computes longer than the host launches
_POOL = 1 << 18  # integers: block tables of four million rows


def buckets(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 12, 16, 24, 32, 48 and so on: a third is padding at most, from 4 rows on half."""
    rows = [1, 2, 4, 8]
    while rows[-1] < most:
        rows.append(rows[-1] + (1 << (rows[-1].bit_length() - 2)))
    return (*(each for each in rows if each < most), most)


class StepGraphs:
    """Valid as long as the model and the KV storage stay where they are."""

    def __init__(self, attention: Tiled, forward: Forward, capture: Capture, max_rows: int = MAX_ROWS) -> None:
        self._attention, self._forward, self._capture = attention, forward, capture
        self._buckets = buckets(max_rows)
        self._buffer: Tensor | None = None  # integers of the step, on the device
        self.replays: dict[StepShape, Run | None] = {}  # None: has run once
        self._disabled = False

    def run(self, flat: FlatBatch) -> Tensor:
        """(wanted, vocab) of the batch, which the caller may keep."""
        plan = self._attention.plan(flat)
        shape = None if self._disabled else self._shape(flat, plan)
        if shape is None:
            return self._forward(self._attention.step(self._attention.send(flat, plan, StepShape.of(flat, plan))))
        tensors = self._send(flat, plan, shape)
        wanted = len(flat.logits_rows)
        if shape not in self.replays:
            self.replays[shape] = None
            return self._forward(self._attention.step(tensors))[:wanted]
        replay = self.replays[shape] or self._captured(shape, tensors)
        if replay is None:  # the rows that were written will be written again
            return self._forward(self._attention.step(tensors))[:wanted]
        return replay()[:wanted].clone()  # the next step overwrites it, and rows may be sampled later

    def _shape(self, flat: FlatBatch, plan: TilePlan) -> StepShape | None:
        rows = next((each for each in self._buckets if each >= flat.num_rows), None)
        if rows is None or len(flat.logits_rows) > rows or len(plan.pool) > _POOL:
            return None
        return StepShape.padded(rows, plan, self._attention.tiles)

    def _send(self, flat: FlatBatch, plan: TilePlan, shape: StepShape) -> StepTensors:
        if self._buffer is None:
            rows, tiles = self._buckets[-1], self._attention.tiles
            largest = StepShape(rows, rows, (most_items(rows, tiles),) * len(tiles.heights), 0)
            device = self._attention.staging.device
            self._buffer = torch.zeros(size_of(largest, _POOL), dtype=torch.uint8, device=device)
        self._attention.send(flat, plan, shape, self._buffer)
        return views(self._buffer, shape)

    def _captured(self, shape: StepShape, tensors: StepTensors) -> Run | None:
        def run() -> Tensor:
            return self._forward(self._attention.step(tensors))

        try:
            replay = self._capture(run)
        except RuntimeError as error:
            log.warning("steps are not replayed as CUDA graphs: %s", error)
            self._disabled = True
            self.replays.clear()
            return None
        self.replays[shape] = replay
        return replay


def plain_call(run: Run) -> Run:
    """`Capture` of devices without graphs: the same buffers and shapes, computed anew each time."""
    return run


class CudaGraphs:
    """`Capture` of one GPU. All graphs share their memory, as only one runs at a time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def capture_of(device: torch.device, graphs: bool | None) -> Capture | None:
    """How steps are captured, if they are; graphs None: on a GPU."""
    if device.type == "cuda":
        return None if graphs is False else CudaGraphs()
    return plain_call if graphs else None
