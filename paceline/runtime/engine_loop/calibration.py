"""Forward times measured at start, so that the draft budget is known from the first step of the first answer.

Replaced gradually by live measurements (`core.drafting.online_stats`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from paceline.core.batching.segment import Segment
from paceline.errors import EngineError
from paceline.runtime.engine_loop.requests import SequenceOp
from paceline.runtime.engine_loop.worker import EngineWorker

log = logging.getLogger("paceline.engine")

PREFIX: Final = 16  # rows before the timed ones
ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
REPEATS: Final = 3  # forwards per row count; the first is a warm-up and not reported
MAX_S: Final = 1.5  # in all, so that a slow engine does not delay the start; checked between two row counts
_TOKEN: Final = 1

Timed = tuple[int, float]


async def forward_times(worker: EngineWorker) -> list[Timed]:
    """Measure (rows, seconds) of forwards of one sequence, in order of rows; fewer on a slow engine, none on an
    EngineError.

    Runs on the loop of the worker, which should be idle.
    """
    loop = asyncio.get_running_loop()
    seq = worker.allocate()
    times: list[Timed] = []
    started = loop.time()
    try:
        await worker.compute(Segment(seq, 0, (_TOKEN,) * PREFIX))
        for rows in ROWS:
            for repeat in range(REPEATS):
                submitted = loop.time()
                await worker.compute(Segment(seq, PREFIX, (_TOKEN,) * rows, logits="all"))
                if repeat:
                    times.append((rows, loop.time() - submitted))
                worker.control(SequenceOp.truncate(seq, PREFIX))
            if loop.time() - started > MAX_S:
                break
    except EngineError as error:
        log.info("forwards could not be timed: %s", error)
    finally:
        worker.control(SequenceOp.release(seq))
    return times
