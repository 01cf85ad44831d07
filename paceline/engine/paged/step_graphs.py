"""Forwards of few rows, padded to a few shapes in memory of their own, so that a CUDA graph can replay them.

Launching a model's kernels takes the host longer than the device needs to run them when rows are few. A graph launches
all of them at once, but repeats addresses and shapes: so steps are padded to the next row count of `buckets`, their
integers are copied to the same places, and only these decide what each program does (`attention.step_layout`). Chains,
trees and the ends of prompts are alike; what is longer runs as it is.

The first step of a shape runs as it is padded, which compiles its kernels; the second is captured. Where a graph cannot
be captured, all further steps run unpadded. `capture` of the CPU is a plain call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.engine.paged.attention.backends import DeviceStep, Tiled
from paceline.engine.paged.attention.step_layout import StepShape, StepTensors, size_of, views
from paceline.engine.paged.attention.tile_plan import TilePlan, most_items
from paceline.engine.paged.flat_batch import FlatBatch

log = logging.getLogger("paceline.engine")

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
        self._replays: dict[StepShape, Run | None] = {}  # None: has run once
        self._disabled = False
        self.replayed = 0  # steps

    @property
    def num_graphs(self) -> int:
        return sum(replay is not None for replay in self._replays.values())

    def run(self, flat: FlatBatch) -> Tensor:
        """(wanted, vocab) of the batch, which the caller may keep."""
        plan = self._attention.plan(flat)
        shape = None if self._disabled else self._shape(flat, plan)
        if shape is None:
            return self._forward(self._attention.step(self._attention.send(flat, plan, StepShape.of(flat, plan))))
        tensors = self._send(flat, plan, shape)
        wanted = len(flat.logits_rows)
        if shape not in self._replays:
            self._replays[shape] = None
            return self._forward(self._attention.step(tensors))[:wanted]
        replay = self._replays[shape] or self._captured(shape, tensors)
        if replay is None:  # the rows that were written will be written again
            return self._forward(self._attention.step(tensors))[:wanted]
        self.replayed += 1
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
            self._replays.clear()
            return None
        self._replays[shape] = replay
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
