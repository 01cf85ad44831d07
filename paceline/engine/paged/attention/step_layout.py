"""All integers of a step in one buffer, at places that depend on the step's shape alone.

A step as it is has a shape of its own; steps that a graph replays are padded to a few shapes, so that every kernel
finds its numbers at the same addresses. Padding rows are token 0 at position 0, store their K and V in the spare block,
and belong to no tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.engine.paged.attention.tile_plan import Item, Split, TilePlan, TileShape, most_items, most_slots
from paceline.engine.paged.flat_batch import FlatBatch
from paceline.engine.paged.staging import Bytes

_LONG, _INT = 8, 4  # bytes
_ALIGNED = 16  # bytes: Triton compiles kernels anew for pointers that are not
_WIDTH = len(Item)


@dataclass(frozen=True, slots=True)
class StepShape:
    rows: int
    wanted: int
    items: tuple[int, ...]  # of each height of tile
    num_slots: int
    is_padded: bool = False

    @classmethod
    def of(cls, flat: FlatBatch, plan: TilePlan) -> StepShape:
        """The step as it is."""
        return cls(flat.num_rows, len(flat.logits_rows), tuple(map(len, plan.items)), plan.num_slots)

    @classmethod
    def padded(cls, rows: int, plan: TilePlan, tiles: TileShape) -> StepShape:
        """For any step of at most `rows` rows with tiles of the same heights: all rows are scored."""
        items = tuple(most_items(rows, tiles) if len(each) else 0 for each in plan.items)
        return cls(rows, rows, items, most_slots(rows, tiles), is_padded=True)

    def sizes(self) -> list[int]:
        """Bytes of tokens, positions, slots, rows to score, the items of each height, and splits."""
        longs = [self.rows * _LONG] * 3 + [self.wanted * _LONG]
        return longs + [count * _WIDTH * _INT for count in self.items] + [self.rows * len(Split) * _INT]

    def offsets(self) -> list[int]:
        """Bytes before each of `sizes`, and before the pool."""
        return [0, *accumulate(-(-size // _ALIGNED) * _ALIGNED for size in self.sizes())]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Views of a step's buffer on the device."""

    tokens: Tensor  # (1, rows) int64, as are the next three
    positions: Tensor  # (1, rows)
    slots: Tensor  # (rows,)
    logits_rows: Tensor  # (wanted,)
    items: tuple[Tensor, ...]  # (items, fields) int32 of each height, as are the next two
    splits: Tensor  # (rows, fields)
    pool: Tensor
    num_slots: int
    is_padded: bool


def size_of(shape: StepShape, pool: int) -> int:
    """Bytes of a step whose pool has so many integers."""
    return shape.offsets()[-1] + pool * _INT


def fill(buffer: Bytes, shape: StepShape, flat: FlatBatch, plan: TilePlan, spare_slot: int) -> None:
    """Write a step, padded to the shape. buffer: `size_of` bytes"""
    *places, pool = shape.offsets()
    rows = (flat.tokens, 0), (flat.positions, 0), (flat.slots, spare_slot), (flat.logits_rows, 0)
    for (values, padding), at, stop in zip(rows, places, places[1:], strict=False):
        into: NDArray[np.int64] = buffer[at:stop].view(np.int64)
        into[: len(values)] = values
        into[len(values) :] = padding
    for values_of, at, stop in zip((*plan.items, plan.splits), places[4:], [*places[5:], pool], strict=True):
        ints: NDArray[np.int32] = buffer[at:stop].view(np.int32)
        ints[: values_of.size] = values_of.ravel()
        ints[values_of.size :] = 0
    buffer[pool:].view(np.int32)[:] = plan.pool


def views(buffer: Tensor, shape: StepShape) -> StepTensors:
    """The step's tensors in a buffer on the device, of which the pool is all that is left."""
    *places, pool = shape.offsets()
    parts = [buffer[at : at + size] for at, size in zip(places, shape.sizes(), strict=True)]
    longs, ints = [part.view(torch.int64) for part in parts[:4]], [part.view(torch.int32) for part in parts[4:]]
    return StepTensors(
        tokens=longs[0][None],
        positions=longs[1][None],
        slots=longs[2],
        logits_rows=longs[3],
        items=tuple(each.view(-1, _WIDTH) for each in ints[:-1]),
        splits=ints[-1].view(-1, len(Split)),
        pool=buffer[pool : len(buffer) // _INT * _INT].view(torch.int32),
        num_slots=shape.num_slots,
        is_padded=shape.is_padded,
    )
