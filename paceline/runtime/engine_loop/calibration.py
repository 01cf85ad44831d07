"""How long forwards take, measured before the first answer: what drafts are worth is known from its first step on.

Live measurements take over as they come (`core.drafting.budget.Record`, `core.estimation.timing.Profile`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from paceline.core.batching.segment import Segment
from paceline.errors import EngineError
from paceline.runtime.engine_loop.executor import SequenceOp
from paceline.runtime.engine_loop.worker import EngineWorker

log = logging.getLogger("paceline.engine")

PREFIX: Final = 16  # rows before those that are timed
ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
TIMES: Final = 3  # each; the first warms up and is left out
MOST_S: Final = 1.5  # in all, so that a start waits no longer for a slow engine; checked between two row counts
_TOKEN: Final = 1

Timed = tuple[int, float]


async def forward_times(worker: EngineWorker) -> list[Timed]:
    """(rows, seconds) of forwards of one sequence, by rising rows; fewer of a slow engine, none of one that refuses.

    On the loop of the worker, which should have nothing else to do.
    """
    loop = asyncio.get_running_loop()
    seq = worker.allocate()
    found: list[Timed] = []
    began = loop.time()
    try:
        await worker.compute(Segment(seq, 0, (_TOKEN,) * PREFIX))
        for rows in ROWS:
            for turn in range(TIMES):
                asked = loop.time()
                await worker.compute(Segment(seq, PREFIX, (_TOKEN,) * rows, logits="all"))
                if turn:
                    found.append((rows, loop.time() - asked))
                worker.control(SequenceOp.truncate(seq, PREFIX))
            if loop.time() - began > MOST_S:
                break
    except EngineError as error:
        log.info("forwards could not be timed: %s", error)
    finally:
        worker.control(SequenceOp.release(seq))
    return found
