"""Bytes that a launch moves between memory and processor, estimated from sizes: nothing here is measured.

A decoded token reads the weights once and the keys and values before it; a prompt reads the weights once a step. Caches
of the processor are not counted, so small models ask for more than their memory sees. Where a size is not known (the
fake engine, a search, other embedders than MiniLM), the launch counts for nothing: no slowdown is learnt of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from paceline.engine.base import ModelInfo
from paceline.rag.embedder import DEFAULT
from paceline.workflow.units import WorkflowModels

NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
MINILM_BYTES: Final = 90_852_864.0  # 22.7 million numbers of 4 bytes, read once for a batch
BATCH: Final = 16  # texts of a batch of the encoder
CONTEXT: Final = 256  # cached rows that a decoded token reads, as assumed


@dataclass(frozen=True, slots=True)
class LaunchBytes:
    """By operation, kind of unit and shape, as `LearningProfiles` asks."""

    weights: float  # bytes of the model; 0: unknown
    kv_row: float  # bytes of a row of keys and values
    step_rows: int  # rows of a prompt that a step computes
    encoder: float  # bytes of the embedder; 0: unknown
    models: WorkflowModels = field(default_factory=WorkflowModels)

    def __call__(self, operation: str, kind: str, shape: int) -> float:  # noqa: ARG002
        model, _, phase = operation.partition("/")
        if model in (self.models.embed, self.models.rerank):
            return self.encoder * math.ceil(shape / BATCH)
        if model not in (self.models.agent, self.models.chat) or not self.weights:
            return 0.0
        if phase == "prefill":
            return math.ceil(shape / self.step_rows) * self.weights + shape * self.kv_row
        return shape * (self.weights + CONTEXT * self.kv_row)


def launch_bytes(info: ModelInfo, step_rows: int, embedder: str | None) -> LaunchBytes:
    """embedder: its name; None: this side has none."""
    number = NUMBER_BYTES.get(info.dtype, 4)
    shape = info.shape
    row = 0.0 if shape is None else 2.0 * shape.layers * shape.hidden * shape.kv_share * number
    encoder = MINILM_BYTES if embedder == DEFAULT else 0.0
    return LaunchBytes(float(info.num_weights * number), row, step_rows, encoder)
