"""The one place that chooses how a model attends: `gathered`, or `tiled` with Triton's kernels or their torch twin."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from paceline.engine.paged.attention.gathered import GatheredAttention
from paceline.engine.paged.attention.interface import Attending, LayerAttention
from paceline.engine.paged.attention.step_layout import StepShape, StepTensors, fill, size_of, views
from paceline.engine.paged.attention.tile_plan import TilePlan, TileShape, plan_tiles
from paceline.engine.paged.attention.tiled import Kernels, TiledAttention
from paceline.engine.paged.attention.torch_kernels import TorchKernels
from paceline.engine.paged.flat_batch import FlatBatch
from paceline.engine.paged.kv_storage import KvStorage
from paceline.engine.paged.staging import Staging

log = logging.getLogger("paceline.engine")

AttentionName = Literal["gathered", "triton", "twin"]

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
    name: AttentionName

    def prepare(self, flat: FlatBatch) -> DeviceStep: ...


class Gathered:
    name: AttentionName = "gathered"

    def __init__(self, storage: KvStorage) -> None:
        self._storage = storage

    def prepare(self, flat: FlatBatch) -> DeviceStep:
        device = self._storage.keys.device
        rows = flat.tokens, flat.positions, flat.slots, flat.logits_rows
        tokens, positions, slots, logits_rows = (torch.from_numpy(each).to(device) for each in rows)
        attending = GatheredAttention(self._storage, flat.segments, slots)
        return DeviceStep(tokens[None], positions[None], logits_rows, attending)


class Tiled:
    """`plan`, `send` and `attending` are the steps of `prepare`, for who sends to memory of its own."""

    def __init__(self, name: AttentionName, storage: KvStorage, kernels: Kernels, tiles: TileShape) -> None:
        self.name, self.tiles = name, tiles
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
        return "gathered"
    if dtype not in _TRITON_DTYPES or head_dim > _MAX_DIM:
        reason = f"Triton's kernels are for heads of up to {_MAX_DIM} numbers in float32, bfloat16 or float16"
    elif importlib.util.find_spec("triton") is None:
        reason = "triton is not installed"
    else:
        return "triton"
    log.warning("attention copies K and V and builds masks, slower on a GPU: %s", reason)
    return "gathered"


def make_attention(name: AttentionName, storage: KvStorage, model: ModelAttention) -> AttentionBackend:
    """Raises ValueError where the model's attention is not of a kind that `name` computes."""
    if name == "gathered":
        return Gathered(storage)
    kv_heads = storage.keys.shape[2]
    if model.query_heads is None or not model.is_grouped(kv_heads):
        raise ValueError("its layers differ in their query heads")
    kernels, spread = _kernels(name, storage.keys.device, kv_heads)
    return Tiled(name, storage, kernels, TileShape(model.query_heads // kv_heads, spread, model.window))


def _kernels(name: AttentionName, device: torch.device, kv_heads: int) -> tuple[Kernels, int]:
    """The kernels, and how many items occupy the device."""
    if name == "twin":
        return TorchKernels(), _CPU_SPREAD
    from paceline.engine.paged.attention.triton_kernels import TritonKernels  # only CUDA's builds of torch bring it

    if device.type != "cuda":  # Triton's interpreter
        return TritonKernels(), _CPU_SPREAD
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return TritonKernels(), -(-_PROGRAMS * processors // kv_heads)
