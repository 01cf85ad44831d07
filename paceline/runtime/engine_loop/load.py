"""What an engine has done and what waits for it, as the metrics show it."""

from __future__ import annotations

from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.service import Load


def engine_load(worker: EngineWorker) -> Load:
    """The fields that tell of the engine. May be called on any thread."""
    steps = worker.steps
    return Load(
        steps=steps.steps,
        rows=steps.rows,
        cached_rows=steps.adopted,
        preemptions=steps.preemptions,
        kv_rows=worker.capacity,
        kv_free_rows=steps.free_rows,
        waiting=len(steps.short),
    )
