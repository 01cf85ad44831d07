"""The thread of a stage's process that owns its span of layers: runs what the head has sent, in order.

A prune overtakes the batches before it that have not begun, unless another change of its sequence is among them; rows
are sampled as soon as they are there. Nothing else leaves the order in which the head has sent it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from paceline.core.batching.segment import Batch, SeqId
from paceline.engine.base import Logits, Output, SampleRequest
from paceline.engine.sampling.sampler import DeviceLogits, DeviceSampler
from paceline.engine.stage import Stage, rows_from_bytes, rows_to_bytes
from paceline.errors import EngineError, EngineLost, PacelineError
from paceline.wire.effects import Bulk
from paceline.wire.messages import Frame
from paceline.wire.stages import messages
from paceline.wire.stages.messages import Change, HiddenRows, ImportRows, RowFormat, RunBatch, kv_to_wire

log = logging.getLogger("paceline.stage")


class Outlet(Protocol):
    """Where results go: the stage's server. Called on the worker's thread."""

    def to_head(self, message: Frame, payload: bytes = b"") -> None: ...

    def to_next(self, header: HiddenRows, payload: bytes) -> None: ...

    def lost(self, error: EngineLost) -> None: ...


Answer = Frame | tuple[messages.KvRows | messages.ScoreRows, bytes]  # the latter: header and payload of a bulk message
Urgent = messages.SampleRows | messages.FetchScores
Parts = list[tuple[Logits | None, tuple[int, ...] | None]]  # by segment: logits, and which of the wanted rows


class LastRows:
    """The rows that the last stage has scored, until the head forgets them; sampled there.

    `clear`, `forget` and `has` may be called on any thread, the others on the worker's.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Parts] = {}  # by ticket
        self._forgotten: set[int] = set()  # tickets of batches that are to run yet
        self._lock = threading.Lock()  # of these two
        self._sampler = DeviceSampler()

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()
            self._forgotten.clear()

    def forget(self, tickets: Sequence[int]) -> None:
        with self._lock:
            for ticket in tickets:
                if self._rows.pop(ticket, None) is None:
                    self._forgotten.add(ticket)

    @staticmethod
    def tickets(asked: Urgent) -> set[int]:
        if isinstance(asked, messages.FetchScores):
            return {asked.ticket}
        return {ticket for wanted in asked.wanted for parts in wanted.branches for ticket, _ in parts}

    def has(self, asked: Urgent) -> bool:
        with self._lock:
            return self.tickets(asked) <= self._rows.keys()

    # ---- on the worker's thread -------------------------------------------------------------------------------------
    def keep(self, ticket: int, parts: Parts | None) -> None:
        """What a batch has scored that has run; None: it has failed."""
        with self._lock:
            if ticket in self._forgotten:
                self._forgotten.discard(ticket)
            elif parts is not None:
                self._rows[ticket] = parts

    def answer(self, asked: Urgent, vocab_size: int) -> Answer:
        if isinstance(asked, messages.FetchScores):
            return self._scores(asked, vocab_size)
        found = self._sampler([self._request(wanted) for wanted in asked.wanted])
        return messages.SampledRows(asked.request, [list(map(messages.sampled_to_wire, rows)) for rows in found])

    def _request(self, wanted: messages.Wanted) -> SampleRequest:
        found = [[self._part(*part) for part in parts] for parts in wanted.branches]
        rows = tuple(wanted.rows)
        if len(found) == len(found[0]) == 1 and (kept := found[0][0][1]) is not None and len(rows) > len(kept):
            rows = tuple(rows[row] for row in kept)  # asked before the batch had run
        branches = tuple(tuple(logits for logits, _ in parts if logits is not None) for parts in found)
        return SampleRequest(branches, rows, wanted.mixture)

    def _part(self, ticket: int, segment: int) -> tuple[Logits | None, tuple[int, ...] | None]:
        with self._lock:
            parts = self._rows.get(ticket)
        if parts is None or segment >= len(parts):
            raise EngineError(f"the scores of batch {ticket} are not kept any more")
        return parts[segment]

    def _scores(self, asked: messages.FetchScores, vocab_size: int) -> tuple[messages.ScoreRows, bytes]:
        logits, _ = self._part(asked.ticket, asked.segment)
        assert isinstance(logits, DeviceLogits)
        if not asked.first <= asked.stop <= len(logits):
            raise EngineError(f"rows {asked.first} to {asked.stop} of {len(logits)}")
        scores = logits.scores[logits.first + asked.first : logits.first + asked.stop]
        found = scores.float().cpu().numpy().astype(np.dtype("<f4"))
        return messages.ScoreRows(asked.request, len(found), vocab_size), found.tobytes()


Taken = Callable[[], None]  # to be called once a bulk message has been taken, on any thread
Ordered = Change | RunBatch | messages.ExportRows | ImportRows | messages.CheckRows


class StageWorker(threading.Thread):
    """Between `start` and `stop`. All methods but `run` may be called on any thread."""

    def __init__(self, load: Callable[[int, int], Stage], outlet: Outlet) -> None:
        super().__init__(name="paceline-stage", daemon=True)
        self.stage: Stage | None = None
        self._load, self._outlet = load, outlet
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()  # before everything else
        self._ordered: deque[Ordered] = deque()
        self._changing: Counter[int] = Counter()  # changes among them, by sequence
        self._urgent: deque[Urgent] = deque()
        self._bulks: dict[tuple[type[Frame], int], tuple[Bulk, Taken]] = {}  # by kind, and ticket or request
        self._last = LastRows()
        self._known: set[SeqId] = set()  # sequences that may hold rows
        self._epoch = 0
        self._format: RowFormat = "float32"
        self._is_first = self._is_last = False
        self._stopping = False

    # ---- on any thread ----------------------------------------------------------------------------------------------
    def call(self, act: Callable[[], None]) -> None:
        """Run on the worker's thread before anything else that waits."""
        with self._changed:
            self._calls.append(act)
            self._changed.notify()

    def answer(self, request: int, act: Callable[[], Answer]) -> None:
        """Likewise, and send what it returns, or a failure of this request."""
        self.call(self._answered(request, act))

    def assign(self, place: messages.Assign | None) -> None:
        """Drop everything, what is being computed too, and begin anew in this place of a pipeline; None: in none."""
        with self._changed:
            for _, taken in self._bulks.values():
                taken()
            for waiting in (self._ordered, self._changing, self._urgent, self._bulks):
                waiting.clear()
            self._last.clear()
            self._epoch = 0
            if place is not None:
                self._epoch, self._format = place.epoch, place.format
                self._is_first, self._is_last = place.previous_key is None, place.next_address is None
            self._calls.append(self._release_all)
            self._changed.notify()

    def put(self, message: Frame) -> None:
        """A command of the head, in its order."""
        with self._changed:
            match message:
                case messages.PruneRows(horizon=horizon, seq=seq) if horizon is not None and not self._changing[seq]:
                    self._calls.append(partial(self._change, message))  # overtakes what waits
                case messages.PruneRows() | messages.TruncateRows() | messages.ReleaseRows() | ImportRows():
                    self._changing[message.seq] += 1
                    self._ordered.append(message)
                case RunBatch() | messages.ExportRows() | messages.CheckRows():
                    self._ordered.append(message)
                case messages.Forget(tickets=tickets):
                    self._last.forget(tickets)
                case messages.SampleRows() | messages.FetchScores():
                    self._urgent.append(message)
                case _:
                    raise TypeError(f"no command: {type(message).__name__}")
            self._changed.notify()

    def put_bulk(self, bulk: Bulk, taken: Taken) -> None:
        """Hidden rows of the stage before, or rows of an import. Those that no command waits for are dropped: they are
        of an earlier assignment."""
        with self._changed:
            match bulk.header:
                case HiddenRows(epoch=epoch, ticket=number):
                    is_wanted = epoch == self._epoch
                case messages.KvRows(request=number):
                    is_wanted = any(isinstance(item, ImportRows) and item.request == number for item in self._ordered)
                case _:
                    raise TypeError(f"no rows: {type(bulk.header).__name__}")
            key = type(bulk.header), number
            if is_wanted and key not in self._bulks:
                self._bulks[key] = bulk, taken
                self._changed.notify()
                return
        taken()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    # ---- on the thread ----------------------------------------------------------------------------------------------
    def run(self) -> None:
        while True:
            with self._changed:
                while (act := self._next()) is None:
                    self._changed.wait()
            if self._stopping:
                return
            try:
                act()
            except EngineLost as error:
                self._outlet.lost(error)
                return
            except Exception:  # the thread must survive
                log.exception("a command could not be carried out")

    def _next(self) -> Callable[[], None] | None:
        """What to do now; None: wait."""
        if self._stopping:
            return lambda: None
        if self._calls:
            return self._calls.popleft()
        for number, asked in enumerate(self._urgent):
            if self._last.has(asked) or not self._is_coming(asked):
                del self._urgent[number]
                return self._answered(asked.request, partial(self._sample, asked))
        if not self._ordered:
            return None
        first = self._ordered[0]
        found: tuple[Bulk, Taken] | None = None
        if (key := self._rows_key(first)) is not None:
            found = self._bulks.pop(key, None)
            if found is None:
                return None
        self._ordered.popleft()
        match first:
            case RunBatch():
                return partial(self._run, first, found, self._epoch)
            case ImportRows():
                assert found is not None
                self._settled(first)
                return self._answered(first.request, partial(self._import, first, *found))
            case messages.ExportRows():
                return self._answered(first.request, partial(self._export, first))
            case messages.CheckRows():
                return self._answered(first.request, partial(self._check, first))
            case _:
                self._settled(first)
                return partial(self._change, first)

    def _rows_key(self, command: Ordered) -> tuple[type[Frame], int] | None:
        """Of the rows that a command needs, None for one that needs none."""
        if isinstance(command, RunBatch):
            return None if self._is_first else (HiddenRows, command.ticket)
        return (messages.KvRows, command.request) if isinstance(command, ImportRows) else None

    def _answered(self, request: int, act: Callable[[], Answer]) -> Callable[[], None]:
        """Sends the answer of act, or a failure of this request whatever it raises: the head waits for one."""

        def acting() -> None:
            try:
                answer = act()
            except EngineLost:
                raise
            except Exception as error:
                log.warning("a request could not be answered: %s", error, exc_info=not isinstance(error, PacelineError))
                answer = messages.RequestFailed(request, str(error)[: messages.MAX_SENTENCE] or type(error).__name__)
            self._outlet.to_head(*(answer if isinstance(answer, tuple) else (answer,)))

        return acting

    def _is_coming(self, asked: Urgent) -> bool:
        """Batches that are to run yet hold what is asked for."""
        waiting = {item.ticket for item in self._ordered if isinstance(item, RunBatch)}
        return bool(waiting & LastRows.tickets(asked))

    def _settled(self, message: Change | ImportRows) -> None:
        seq = message.seq
        self._changing[seq] -= 1
        if not self._changing[seq]:
            del self._changing[seq]

    def _stage(self) -> Stage:
        if self.stage is None:
            raise EngineError("no layers are loaded")
        return self.stage

    def load(self, first: int, stop: int) -> Stage:
        """On the worker's thread."""
        if self.stage is None or (self.stage.first, self.stage.stop) != (first, stop):
            self.stage = None  # so that both are never in memory
            self.stage = self._load(first, stop)
        return self.stage

    def _release_all(self) -> None:
        for seq in self._known:
            self._stage().release(seq)
        self._known.clear()

    def _change(self, change: Change) -> None:
        """A change of a sequence that was lost with a failed step is of no consequence."""
        stage, seq = self._stage(), SeqId(change.seq)
        try:
            match change:
                case messages.PruneRows():
                    self._known.add(seq)  # it may have overtaken all of the sequence
                    stage.prune(seq, change.keep, change.live, change.horizon)
                case messages.TruncateRows():
                    stage.truncate(seq, change.length)
                case messages.ReleaseRows():
                    stage.release(seq)
                    self._known.discard(seq)
        except EngineError as error:
            log.warning("a sequence could not be changed: %s", error)

    def _sample(self, asked: Urgent) -> Answer:
        return self._last.answer(asked, self._stage().info.vocab_size)

    def _export(self, asked: messages.ExportRows) -> Answer:
        return kv_to_wire(asked.request, self._stage().export_kv(SeqId(asked.seq), asked.tokens))

    def _import(self, asked: ImportRows, bulk: Bulk, taken: Taken) -> messages.RequestDone:
        stage = self._stage()
        try:
            assert isinstance(bulk.header, messages.KvRows)
            stage.import_kv(
                SeqId(asked.seq), messages.kv_from_wire(bulk.header, bulk.payload, stage.kv_model, asked.tokens)
            )
        finally:
            taken()
        self._known.add(SeqId(asked.seq))
        return messages.RequestDone(asked.request)

    def _check(self, asked: messages.CheckRows) -> messages.StageHave:
        stage = self._stage()
        try:
            stage.check()
        except AssertionError as error:
            raise EngineError(f"the invariants do not hold: {error}") from error
        lengths = tuple((int(seq), stage.length(seq)) for seq in sorted(self._known) if stage.length(seq))
        return messages.StageHave(asked.request, lengths)

    # ---- batches ----------------------------------------------------------------------------------------------------
    def _run(self, message: RunBatch, given: tuple[Bulk, Taken] | None, epoch: int) -> None:
        error: str | None = None
        payload = b""
        done: Parts | None = None
        left = asked = Batch(())
        try:
            left = asked = Batch(message.segments)
            hidden = None
            if given is not None:
                header = given[0].header
                assert isinstance(header, HiddenRows)
                if header.error is not None:
                    raise EngineError(header.error)
                left = messages.without_others(asked, header.kept)
                hidden = rows_from_bytes(given[0].payload, self._format, left.num_rows, self._stage().width)
            self._known.update(segment.seq for segment in left.segments)
            result = self._stage().forward(left, hidden)
            if result.output is not None:
                done = _scored_of(asked, left, result.output)
            else:
                assert result.hidden is not None
                left = result.batch
                payload = rows_to_bytes(result.hidden, self._format)
                if len(payload) > messages.MAX_BULK_BYTES:
                    raise EngineError(f"{left.num_rows} rows are too many for the link: lower step_rows")
        except EngineLost:
            raise
        except Exception as fault:
            known = isinstance(fault, PacelineError)
            if not known:
                log.exception("a step failed")
            error = f"{'' if known else 'a stage failed: '}{fault}"[: messages.MAX_SENTENCE]
        finally:
            if given is not None:
                given[1]()
        if epoch != self._epoch:
            return  # nobody waits for it any more
        if not self._is_last:
            kept = ((),) * len(asked.segments) if error else messages.kept_of(asked, left)
            self._outlet.to_next(HiddenRows(epoch, message.ticket, kept, error), b"" if error else payload)
        else:
            self._last.keep(message.ticket, done)
            scored = tuple(rows for _, rows in done or ())
            sizes = tuple(0 if logits is None else len(logits) for logits, _ in done or ())
            self._outlet.to_head(messages.BatchDone(epoch, message.ticket, scored, sizes, error))


def _scored_of(asked: Batch, left: Batch, output: Output) -> Parts:
    """Of each segment of `asked`, the logits and which of its `logits_rows()` they are of; None: all.

    left, output: what of the batch the last stage was given, and has returned. No logits: nothing of the segment came.
    """
    scored: Sequence[tuple[int, ...] | None] = output.scored or (None,) * len(left.segments)
    found = {
        segment.seq: (segment, logits, rows)
        for segment, logits, rows in zip(left.segments, output.logits, scored, strict=True)
    }
    parts: Parts = []
    for each in asked.segments:
        if each.seq not in found:
            parts.append((None, ()))
            continue
        segment, logits, rows = found[each.seq]
        if rows is None and len(segment.tokens) == len(each.tokens):
            parts.append((logits, None))
            continue
        wanted = [segment.node_ids[row] for row in segment.logits_rows()]
        names = set(wanted if rows is None else (wanted[row] for row in rows))
        parts.append((logits, tuple(i for i, row in enumerate(each.logits_rows()) if each.node_ids[row] in names)))
    return parts
