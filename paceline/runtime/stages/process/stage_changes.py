"""Changes of a stage's sequences, and requests about them, on the worker's thread.

known: sequences that may hold rows, kept up to date.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.core.batching.segment import SeqId
from paceline.engine.stages.stage import Stage
from paceline.errors import EngineError, PacelineError
from paceline.runtime.stages.process.outlet import Outlet
from paceline.runtime.stages.stage_kv import kv_from_wire, kv_to_wire
from paceline.wire.stages.messages import (
    MAX_SENTENCE,
    Answered,
    CheckRows,
    ExportRows,
    Failed,
    ForkRows,
    ImportRows,
    KvRows,
    PruneRows,
    ReleaseRows,
    StageHave,
    TruncateRows,
)
from paceline.wire.stages.pipe import Bulk

log = logging.getLogger("paceline.stage")

Change = PruneRows | TruncateRows | ForkRows | ReleaseRows
Taken = Callable[[], None]  # to be called once a bulk message has been taken, on any thread


def change_rows(stage: Stage, known: set[SeqId], change: Change) -> None:
    """A change of a sequence that was lost with a failed step is of no consequence."""
    seq = SeqId(change.seq)
    try:
        match change:
            case PruneRows():
                known.add(seq)  # it may have overtaken all of the sequence
                stage.prune(seq, change.keep, change.live, change.horizon)
            case TruncateRows():
                stage.truncate(seq, change.length)
            case ForkRows():
                stage.fork(seq, SeqId(change.into))
                known.add(SeqId(change.into))
            case ReleaseRows():
                stage.release(seq)
                known.discard(seq)
    except EngineError as error:
        log.warning("a sequence could not be changed: %s", error)


def export_rows(stage: Stage, asked: ExportRows, outlet: Outlet) -> None:
    try:
        rows = stage.export_kv(SeqId(asked.seq), asked.tokens)
    except EngineError as error:
        outlet.to_head(Failed(asked.request, str(error)[:MAX_SENTENCE]))
        return
    outlet.to_head_in_bulk(*kv_to_wire(asked.request, rows))


def import_rows(stage: Stage, known: set[SeqId], asked: ImportRows, given: tuple[Bulk, Taken], outlet: Outlet) -> None:
    bulk, taken = given
    try:
        assert isinstance(bulk.header, KvRows)
        stage.import_kv(SeqId(asked.seq), kv_from_wire(bulk.header, bulk.payload, stage.kv_model, asked.tokens))
        known.add(SeqId(asked.seq))
    except PacelineError as error:
        outlet.to_head(Failed(asked.request, str(error)[:MAX_SENTENCE]))
    else:
        outlet.to_head(Answered(asked.request))
    finally:
        taken()


def check_rows(stage: Stage, known: set[SeqId], asked: CheckRows, outlet: Outlet) -> None:
    try:
        stage.check()
    except AssertionError as error:
        outlet.to_head(Failed(asked.request, f"the invariants do not hold: {error}"[:MAX_SENTENCE]))
        return
    lengths = [(int(seq), stage.length(seq)) for seq in sorted(known) if stage.length(seq)]
    outlet.to_head(StageHave(asked.request, lengths))
