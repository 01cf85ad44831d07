"""The measurement of one side: its engine, its host threads, its documents."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Final

import psutil

from paceline.engine.base import LoadedModel
from paceline.rag.rerank import Reranker
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.engine_loop.executor import StepLimits
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.profiling.loads import CopyingProcesses
from paceline.runtime.profiling.measurement import Measurement, Progress
from paceline.runtime.profiling.operations import EngineLanes, engine_operations, host_operations
from paceline.runtime.units.registry import NodeUnits
from paceline.runtime.workflows.kept_profiles import KeptProfiles, StoredProfiles
from paceline.runtime.workflows.service import own_reranker
from paceline.strategies.base import Side

BUSY: Final = 0.5  # processors that others keep busy, from which on a note says so


async def measure_side(
    side: Side,
    model: LoadedModel,
    store: DocumentStore,
    kept: KeptProfiles,
    units: NodeUnits,
    reranker: Reranker | None,
    *,
    limits: StepLimits,
    budget: float,
    progress: Progress,
) -> StoredProfiles:
    """Measure for so many seconds. Nothing is written. reranker: None for that of the store's own embedder, if it is
    one. Raises PacelineError."""
    others = psutil.getloadavg()[0]
    registry = units.registry(side, shared=kept.shared)
    worker = EngineWorker(model.engine, limits, cores=units.engine_cores)
    await worker.start()
    lanes = EngineLanes(worker, time.perf_counter, model.engine.info.max_positions)
    try:
        operations = [
            *engine_operations(lanes, registry),
            *host_operations(registry, store, reranker or own_reranker(store), time.perf_counter),
        ]
        measurement = Measurement(operations, kept.demand, budget, time.perf_counter, progress)
        async with CopyingProcesses(kept.conditions.threads) as copying:
            loads = await copying.loads(time.perf_counter)
            profiles = await measurement.run(loads)
    finally:
        lanes.close()
        await worker.stop()
        registry.close()
    notes = [
        f"{budget:g} s of measurement; medians; copies of memory on core {', '.join(map(str, copying.cores))} move "
        f"{' / '.join(f'{load.bandwidth:.3g}' for load in loads)} GB/s.",
        "GB/s of operations are estimates, from bytes of weights, keys and values over seconds; 0: unknown.",
    ]
    if copying.shared:
        notes.append("The engine's threads use every core, so slowdowns hold lost processor time, too.")
    if others > BUSY:
        notes.append(f"The machine was busy with other work: its load was {others:.1f} before.")
    if not store.count():
        notes.append("There are no documents, so searches were not measured.")
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    return StoredProfiles(kept.conditions, profiles, stamp, (*notes, *measurement.notes))
