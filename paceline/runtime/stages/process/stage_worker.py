"""The thread of a stage's process that owns its span of layers: runs what the head has sent, in order.

A prune overtakes the batches before it that have not begun, unless another change of its sequence is among them; rows
are sampled as soon as they are there. Nothing else leaves the order in which the head has sent it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

from paceline.core.batching.segment import Batch, SeqId
from paceline.engine.stages.history import scored_of
from paceline.engine.stages.stage import Stage
from paceline.errors import EngineError, EngineLost, PacelineError
from paceline.runtime.stages.process.last_rows import LastRows, Parts
from paceline.runtime.stages.process.outlet import Outlet
from paceline.runtime.stages.process.stage_changes import (
    Change,
    Taken,
    change_rows,
    check_rows,
    export_rows,
    import_rows,
)
from paceline.wire.fields import Frame
from paceline.wire.stages.messages import (
    MAX_SENTENCE,
    CheckRows,
    ExportRows,
    Failed,
    FetchScores,
    Forget,
    ForkRows,
    HiddenRows,
    ImportRows,
    KvRows,
    PruneRows,
    ReleaseRows,
    RunBatch,
    TruncateRows,
    batch_from_wire,
    kept_of,
    without_others,
)
from paceline.wire.stages.pipe import MAX_BULK_BYTES, Bulk
from paceline.wire.stages.rows import RowFormat, pack_rows, unpack_rows
from paceline.wire.stages.sampling import BatchDone, SampleAhead, SampleRows

log = logging.getLogger("paceline.stage")

Ordered = Change | RunBatch | ExportRows | ImportRows | CheckRows
Urgent = SampleRows | FetchScores


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
        self._overtaking: deque[PruneRows] = deque()
        self._urgent: deque[Urgent] = deque()
        self._hidden: dict[int, tuple[Bulk, Taken]] = {}  # by ticket
        self._kv: dict[int, tuple[Bulk, Taken]] = {}  # by request
        self._last = LastRows()
        self._known: set[SeqId] = set()  # sequences that may hold rows
        self._epoch = 0
        self._format: RowFormat = "float32"
        self._width = 0
        self._is_first = self._is_last = False
        self._stopping = False

    # ---- on any thread ----------------------------------------------------------------------------------------------
    def call(self, act: Callable[[], None]) -> None:
        """Run on the worker's thread before anything else that waits."""
        with self._changed:
            self._calls.append(act)
            self._changed.notify()

    def assign(self, epoch: int, format: RowFormat, width: int, *, is_first: bool, is_last: bool) -> None:
        """Drop everything, and begin anew as this stage of a pipeline. What is being computed is dropped too."""
        with self._changed:
            for _, taken in (*self._hidden.values(), *self._kv.values()):
                taken()
            for waiting in (self._ordered, self._changing, self._overtaking, self._urgent, self._hidden, self._kv):
                waiting.clear()
            self._last.clear()
            self._epoch, self._format, self._width = epoch, format, width
            self._is_first, self._is_last = is_first, is_last
            self._calls.append(self._release_all)
            self._changed.notify()

    def put(self, message: Frame) -> None:
        """A command of the head, in its order."""
        with self._changed:
            match message:
                case PruneRows(horizon=horizon, seq=seq) if horizon is not None and not self._changing[seq]:
                    self._overtaking.append(message)
                case PruneRows() | TruncateRows() | ForkRows() | ReleaseRows() | ImportRows():
                    self._changing[_changed(message)] += 1
                    self._ordered.append(message)
                case RunBatch() | ExportRows() | CheckRows():
                    self._ordered.append(message)
                case SampleAhead() | Forget():
                    self._last.tell(message)
                case SampleRows() | FetchScores():
                    self._urgent.append(message)
                case _:
                    raise TypeError(f"no command: {type(message).__name__}")
            self._changed.notify()

    def put_hidden(self, bulk: Bulk, taken: Taken) -> None:
        """Hidden rows of the stage before. Those of another epoch are dropped."""
        assert isinstance(bulk.header, HiddenRows)
        with self._changed:
            if bulk.header.epoch == self._epoch and bulk.header.ticket not in self._hidden:
                self._hidden[bulk.header.ticket] = bulk, taken
                self._changed.notify()
                return
        taken()

    def put_kv(self, bulk: Bulk, taken: Taken) -> None:
        """Rows of an import that has been put. Others are dropped: their import was, with an assignment."""
        assert isinstance(bulk.header, KvRows)
        request = bulk.header.request
        with self._changed:
            if any(isinstance(item, ImportRows) and item.request == request for item in self._ordered):
                self._kv[request] = bulk, taken
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
        if self._overtaking:
            prune = self._overtaking.popleft()
            return lambda: change_rows(self._stage(), self._known, prune)
        for number, asked in enumerate(self._urgent):
            if self._last.has(asked) or not self._is_coming(asked):
                del self._urgent[number]
                return lambda: self._last.answer(asked, self._stage(), self._outlet)
        if not self._ordered:
            return None
        first = self._ordered[0]
        if isinstance(first, RunBatch) and not self._is_first and first.ticket not in self._hidden:
            return None
        if isinstance(first, ImportRows) and first.request not in self._kv:
            return None
        self._ordered.popleft()
        epoch = self._epoch
        match first:
            case RunBatch():
                found = self._hidden.pop(first.ticket, None)
                return lambda: self._run(first, found, epoch)
            case ImportRows():
                self._settled(first)
                rows = self._kv.pop(first.request)
                return self._answered(
                    first.request, lambda: import_rows(self._stage(), self._known, first, rows, self._outlet)
                )
            case ExportRows():
                return self._answered(first.request, lambda: export_rows(self._stage(), first, self._outlet))
            case CheckRows():
                return self._answered(
                    first.request, lambda: check_rows(self._stage(), self._known, first, self._outlet)
                )
            case _:
                self._settled(first)
                return lambda: change_rows(self._stage(), self._known, first)

    def _answered(self, request: int, act: Callable[[], None]) -> Callable[[], None]:
        """act, and a failure of this request whatever it raises: the head waits for an answer."""

        def acting() -> None:
            try:
                act()
            except EngineLost:
                raise
            except Exception as error:
                log.exception("a request could not be answered")
                reason = str(error)[:MAX_SENTENCE] or type(error).__name__
                self._outlet.to_head(Failed(request, reason))

        return acting

    def _is_coming(self, asked: Urgent) -> bool:
        """Batches that are to run yet hold what is asked for."""
        waiting = {item.ticket for item in self._ordered if isinstance(item, RunBatch)}
        return bool(waiting & LastRows.tickets(asked))

    def _settled(self, message: Change | ImportRows) -> None:
        seq = _changed(message)
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

    # ---- batches ----------------------------------------------------------------------------------------------------
    def _run(self, message: RunBatch, given: tuple[Bulk, Taken] | None, epoch: int) -> None:
        error: str | None = None
        payload = b""
        done: Parts | None = None
        left = asked = Batch(())
        try:
            left = asked = batch_from_wire(message)
            hidden = None
            if given is not None:
                bulk, _ = given
                header = bulk.header
                assert isinstance(header, HiddenRows)
                if header.error is not None:
                    raise EngineError(header.error)
                left = without_others(asked, header.kept)
                hidden = unpack_rows(bulk.payload, self._format, left.num_rows, self._width)
            self._known.update(segment.seq for segment in left.segments)
            result = self._stage().forward(left, hidden)
            if result.output is not None:
                done = scored_of(asked, left, result.output)
            else:
                assert result.hidden is not None
                left = result.batch
                payload = pack_rows(result.hidden, self._format)
                if len(payload) > MAX_BULK_BYTES:
                    raise EngineError(f"{left.num_rows} rows are too many for the link; give fewer with --step-rows")
        except EngineLost:
            raise
        except PacelineError as fault:
            error = str(fault)[:MAX_SENTENCE]
        except Exception as fault:
            log.exception("a step failed")
            error = f"a stage failed: {fault}"[:MAX_SENTENCE]
        finally:
            if given is not None:
                given[1]()
        if epoch != self._epoch:
            return  # nobody waits for it any more
        if not self._is_last:
            kept = [[] for _ in asked.segments] if error else kept_of(asked, left)
            self._outlet.to_next(HiddenRows(epoch, message.ticket, kept, error), b"" if error else payload)
        elif done is None:
            self._last.failed(message.ticket)
            self._outlet.to_head(BatchDone(epoch, message.ticket, [], [], [], error))
        else:
            self._outlet.to_head(self._last.done(epoch, message.ticket, done))


def _changed(message: Change | ImportRows) -> int:
    """The sequence that a later prune must not overtake."""
    return message.into if isinstance(message, ForkRows) else message.seq
