"""The rows that the last stage has scored, until the head forgets them; sampled there."""

from __future__ import annotations

import logging
import threading

import numpy as np

from paceline.core.sampling.row import RowSampling
from paceline.engine.base import Logits, SampleRequest
from paceline.engine.sampling.device_logits import DeviceLogits, DeviceSampler
from paceline.engine.stages.stage import Stage
from paceline.errors import EngineError, EngineLost
from paceline.runtime.stages.process.outlet import Outlet
from paceline.wire.stages.messages import MAX_SENTENCE, Failed, FetchScores, Forget, ScoreRows
from paceline.wire.stages.sampling import (
    BatchDone,
    SampleAhead,
    Sampled,
    SampledToken,
    SampleRows,
    Wanted,
    mixture_from_wire,
    row_from_wire,
    sampled_to_wire,
)

log = logging.getLogger("paceline.stage")

Parts = list[tuple[Logits | None, tuple[int, ...] | None]]  # by segment: logits, and which of the wanted rows


class LastRows:
    """`clear`, `tell` and `has` may be called on any thread, the others on the worker's."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Logits | None]] = {}  # by ticket, of each segment
        self._ahead: dict[int, SampleAhead] = {}
        self._forgotten: set[int] = set()  # tickets of batches that are to run yet
        self._lock = threading.Lock()  # of these three
        self._sampler = DeviceSampler()

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()
            self._ahead.clear()
            self._forgotten.clear()

    def tell(self, message: SampleAhead | Forget) -> None:
        with self._lock:
            if isinstance(message, SampleAhead):
                self._ahead[message.ticket] = message
                return
            for ticket in message.tickets:
                if self._rows.pop(ticket, None) is None:
                    self._forgotten.add(ticket)
                self._ahead.pop(ticket, None)

    def failed(self, ticket: int) -> None:
        with self._lock:
            self._ahead.pop(ticket, None)
            self._forgotten.discard(ticket)

    @staticmethod
    def tickets(asked: SampleRows | FetchScores) -> set[int]:
        if isinstance(asked, FetchScores):
            return {asked.ticket}
        return {ticket for wanted in asked.wanted for parts in wanted.branches for ticket, _ in parts}

    def has(self, asked: SampleRows | FetchScores) -> bool:
        with self._lock:
            return self.tickets(asked) <= self._rows.keys()

    # ---- on the worker's thread -------------------------------------------------------------------------------------
    def done(self, epoch: int, ticket: int, parts: Parts) -> BatchDone:
        """Keep the rows of a batch that has run, and sample those of which it is known how."""
        with self._lock:
            ahead = self._ahead.pop(ticket, None)
            if ticket in self._forgotten:
                self._forgotten.discard(ticket)
            else:
                self._rows[ticket] = [logits for logits, _ in parts]
        kept = [None if rows is None else list(rows) for _, rows in parts]
        sizes = [0 if logits is None else len(logits) for logits, _ in parts]
        sampled: list[list[SampledToken] | None] = [None] * len(parts)
        if ahead is not None and len(ahead.rows) == len(parts):
            try:
                self._sample_ahead(ahead, parts, sampled)
            except EngineLost:
                raise
            except Exception as error:  # asked for, it is answered with the error
                log.warning("rows could not be sampled as soon as they were computed: %s", error)
        return BatchDone(epoch, ticket, kept, sizes, sampled, None)

    def _sample_ahead(self, ahead: SampleAhead, parts: Parts, sampled: list[list[SampledToken] | None]) -> None:
        places: list[int] = []
        requests: list[SampleRequest] = []
        for place, (wanted, (logits, kept)) in enumerate(zip(ahead.rows, parts, strict=True)):
            if wanted is None or not logits:
                continue
            rows: list[RowSampling] = [row_from_wire(row) for row in wanted]
            rows = rows if kept is None else [rows[row] for row in kept]
            if len(rows) == len(logits):
                places.append(place)
                requests.append(SampleRequest(((logits,),), tuple(rows)))
        for place, found in zip(places, self._sampler(requests) if requests else (), strict=True):
            sampled[place] = [sampled_to_wire(row) for row in found]

    def answer(self, asked: SampleRows | FetchScores, stage: Stage, outlet: Outlet) -> None:
        try:
            if isinstance(asked, SampleRows):
                found = self._sampler([self._request(wanted) for wanted in asked.wanted])
                rows = [[sampled_to_wire(row) for row in answer] for answer in found]
                outlet.to_head(Sampled(asked.request, rows))
            else:
                outlet.to_head_in_bulk(*self._scores(asked, stage.info.vocab_size))
        except EngineLost:
            raise
        except Exception as error:
            outlet.to_head(Failed(asked.request, str(error)[:MAX_SENTENCE] or type(error).__name__))

    def _request(self, wanted: Wanted) -> SampleRequest:
        branches = tuple(tuple(self._logits(*part) for part in parts) for parts in wanted.branches)
        mixture = None if wanted.mixture is None else mixture_from_wire(wanted.mixture)
        return SampleRequest(branches, tuple(map(row_from_wire, wanted.rows)), mixture)

    def _logits(self, ticket: int, segment: int) -> Logits:
        with self._lock:
            rows = self._rows.get(ticket)
        logits = rows[segment] if rows is not None and segment < len(rows) else None
        if logits is None:
            raise EngineError(f"the scores of batch {ticket} are not kept any more")
        return logits

    def _scores(self, asked: FetchScores, vocab_size: int) -> tuple[ScoreRows, bytes]:
        logits = self._logits(asked.ticket, asked.segment)
        assert isinstance(logits, DeviceLogits)
        if not asked.first <= asked.stop <= len(logits):
            raise EngineError(f"rows {asked.first} to {asked.stop} of {len(logits)}")
        scores = logits.scores[logits.first + asked.first : logits.first + asked.stop]
        found = scores.float().cpu().numpy().astype(np.dtype("<f4"))
        return ScoreRows(asked.request, len(found), vocab_size), found.tobytes()
