"""One stage of a pipeline on a thread of its own, and what travels from stage to stage."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from paceline.core.batching.segment import Batch, SeqId
from paceline.engine.base import Output, Ticket
from paceline.engine.pipeline_stage import HiddenArray, Stage
from paceline.errors import EngineError

log = logging.getLogger("paceline.engine")


@dataclass(slots=True)
class Work:
    """A batch on its way from stage to stage."""

    ticket: Ticket
    asked: Batch
    left: Batch  # without rows that were dropped on the way
    hidden: HiddenArray | None = None
    output: Output | None = None  # of `left` as it reached the last stage
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a sequence at every stage, in the order of the batches."""

    seq: SeqId
    act: Callable[[int, Stage], None]  # with the number of the stage
    done: Callable[[], None]  # after the last stage


@dataclass(frozen=True, slots=True)
class LatePrune:
    """A prune that overtakes the segments before it."""

    seq: SeqId
    keep: tuple[int, ...]
    live: tuple[int, ...]
    horizon: int

    def act(self, stage: Stage) -> None:
        stage.prune(self.seq, self.keep, self.live, self.horizon)


class StageThread(threading.Thread):
    """Runs what comes in through one stage, and passes it on."""

    def __init__(
        self,
        number: int,
        stage: Stage,
        inbox: SimpleQueue[Work | Change | None],
        forward: Callable[[Work | Change | None], None],
    ) -> None:
        super().__init__(name=f"paceline-stage-{number}", daemon=True)
        self._number, self._stage = number, stage
        self._inbox, self._forward = inbox, forward
        self._prunes: deque[LatePrune] = deque()  # that overtake what is in the inbox

    def tell(self, prune: LatePrune) -> None:
        """On any thread; what is put into the first inbox afterwards comes behind it."""
        self._prunes.append(prune)

    def run(self) -> None:
        while True:
            item = self._inbox.get()
            while self._prunes:
                prune = self._prunes.popleft()
                self._attempt(prune.act)
            if isinstance(item, Work):
                self._run(item)
            elif item is not None:
                self._attempt(partial(item.act, self._number))
            self._forward(item)
            if item is None:
                return

    def _run(self, work: Work) -> None:
        if work.error is not None:
            return
        try:
            result = self._stage.forward(work.left, work.hidden)
        except EngineError as error:
            work.error = error
            return
        except Exception as fault:  # the thread must survive
            work.error = EngineError(f"stage {self._number} failed: {fault}")
            return
        if result.output is not None:
            work.output = result.output
        else:
            work.left, work.hidden = result.batch, result.hidden

    def _attempt(self, act: Callable[[Stage], None]) -> None:
        try:
            act(self._stage)
        except Exception as error:  # of a sequence that was lost with a failed step
            log.warning("stage %d could not change a sequence: %s", self._number, error)
