"""A model cut into stages, each on a thread of its own, as one engine with several batches under way.

While a stage computes one batch, the stage before it computes the next. Changes of sequences travel behind the batches;
a prune is told to every stage at once, so that rows it drops are not computed by the stages they have not reached.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from paceline.core.batching.block_manager import OutOfBlocks
from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.core.sampling.row import SampledRow
from paceline.engine.base import DenseLogits, Logits, ModelInfo, Output, SampleRequest, Ticket
from paceline.engine.pipeline_stage import Stage
from paceline.engine.sampling.device_logits import DeviceSampler
from paceline.engine.sequence_table import SequenceTable
from paceline.engine.stage_thread import Change, LatePrune, StageThread, Work
from paceline.errors import EngineError

_NO_ROWS = DenseLogits(())


class StagePipeline:
    """An asynchronous engine on stages in order, which it owns; `close` ends their threads.

    A step that fails at one stage has changed those before it: its sequences must be released, and every batch that
    holds them fails. Prefixes are imported but not shared between sequences.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Raises EngineError for stages of different models or block sizes."""
        if len({(stage.info.fingerprint, stage.block_size) for stage in stages}) != 1:
            raise EngineError("the stages of a pipeline are of one model and have one block size")
        self._stages = tuple(stages)
        info = stages[0].info
        self._table = SequenceTable(vocab_size=info.vocab_size, max_positions=info.max_positions)  # as of what was sent
        self._capacity = min(stage.free_rows() for stage in stages)
        self._layers = [stage.num_layers for stage in stages]
        self._sampler = DeviceSampler()
        self._lock = threading.Lock()
        self._changing: Counter[SeqId] = Counter()  # changes on their way; guarded by `_lock`
        self._results: deque[Work] = deque()  # finished; guarded by `_lock`
        self._finished = threading.Condition(self._lock)
        self._callbacks: list[Callable[[], None]] = []
        self._last = 0
        self._failed: set[SeqId] = set()  # to be released
        inboxes: list[SimpleQueue[Work | Change | None]] = [SimpleQueue() for _ in stages]
        self._inbox = inboxes[0]
        forwards = [*(inbox.put for inbox in inboxes[1:]), self._arrived]
        self._threads = [
            StageThread(number, stage, inbox, forward)
            for number, (stage, inbox, forward) in enumerate(zip(stages, inboxes, forwards, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads once everything sent has run."""
        self._inbox.put(None)
        for thread in self._threads:
            thread.join()

    # ---- batches ----------------------------------------------------------------------------------------------------
    @property
    def info(self) -> ModelInfo:
        return self._stages[0].info

    @property
    def depth(self) -> int:
        """One batch more than stages: it waits at the first one."""
        return len(self._stages) + 1

    def submit(self, batch: Batch) -> Ticket:
        if failed := {segment.seq for segment in batch.segments} & self._failed:
            raise EngineError(f"sequences {sorted(failed)} were lost with a step that failed")
        placed = self._table.place(batch)
        rows = {segment.seq: len(segment.tokens) for segment in placed}
        if self._blocks(rows) > self._num_blocks:
            raise OutOfBlocks(f"out of memory: {batch.num_rows} rows asked for, {self.free_rows()} free")
        self._table.written(placed)
        self._last += 1
        self._inbox.put(Work(Ticket(self._last), batch, batch))
        return Ticket(self._last)

    def is_ready(self, ticket: Ticket) -> bool:
        with self._lock:
            return bool(self._results) and self._results[0].ticket == ticket

    def collect(self, ticket: Ticket) -> Output:
        with self._finished:
            self._finished.wait_for(lambda: self._results)
            work = self._results.popleft()
        assert work.ticket == ticket, f"batch {work.ticket} comes before {ticket}"
        seqs = {segment.seq for segment in work.asked.segments}
        if work.error is None and seqs & self._failed:
            work.error = EngineError(f"sequences {sorted(seqs & self._failed)} were lost with a step that failed")
        if work.error is not None:
            self._failed |= seqs
            raise work.error
        return _output_of(work)

    def notify(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        return self._sampler(requests)

    def _arrived(self, item: Work | Change | None) -> None:
        """Behind the last stage, on its thread."""
        if isinstance(item, Change):
            item.done()
        elif item is not None:
            with self._finished:
                self._results.append(item)
                self._finished.notify_all()
            for callback in self._callbacks:
                callback()

    # ---- changes ----------------------------------------------------------------------------------------------------
    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        sent = self._table.last_id(seq)
        self._table.prune(seq, keep, live, horizon)
        with self._lock:
            may_overtake = not self._changing[seq]  # nothing is left of what it must not overtake
        if horizon is not None and may_overtake:
            for thread in self._threads:
                thread.tell(LatePrune(seq, tuple(keep), tuple(live), max(horizon, sent)))
            return
        self._change(seq, lambda _, stage: stage.prune(seq, keep, live, horizon))

    def truncate(self, seq: SeqId, length: int) -> None:
        self._table.truncate(seq, length)
        self._change(seq, lambda _, stage: stage.truncate(seq, length))

    def fork(self, seq: SeqId, into: SeqId) -> None:
        self._table.fork(seq, into)
        self._change(into, lambda _, stage: stage.fork(seq, into))

    def release(self, seq: SeqId) -> None:
        self._table.release(seq)
        self._failed.discard(seq)
        self._change(seq, lambda _, stage: stage.release(seq))

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:  # noqa: ARG002  # shares nothing
        if seq in self._table:
            raise EngineError(f"sequence {seq} exists already")
        if stored is None or not len(stored.tokens) < len(tokens):
            return 0
        self.import_kv(seq, stored)
        return len(stored.tokens)

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        """Waits for everything under way, because stages check the rows."""
        parts = self._split(rows)
        self._table.adopt(seq, rows.tokens)
        try:
            self._wait(seq, lambda number, stage: stage.import_kv(seq, parts[number]))
        except EngineError:
            self.release(seq)
            raise

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        """Waits for everything under way."""
        self._table.export(seq, len(tokens))
        parts: dict[int, KvPrefix] = {}

        def export(number: int, stage: Stage) -> None:
            parts[number] = stage.export_kv(seq, tokens)

        self._wait(seq, export)
        ordered = [parts[number] for number in range(len(self._stages))]
        keys, values = (np.concatenate([getattr(part, name) for part in ordered]) for name in ("keys", "values"))
        return KvPrefix(self.info.fingerprint, ordered[0].dtype, tuple(tokens), keys, values)

    def _split(self, rows: KvPrefix) -> list[KvPrefix]:
        if rows.model != self.info.fingerprint or len(rows.keys) != sum(self._layers):
            raise EngineError("these rows are of another model")
        parts: list[KvPrefix] = []
        first = 0
        for stage, layers in zip(self._stages, self._layers, strict=True):
            span = slice(first, first + layers)
            parts.append(KvPrefix(stage.kv_model, rows.dtype, rows.tokens, rows.keys[span], rows.values[span]))
            first += layers
        return parts

    def _change(self, seq: SeqId, act: Callable[[int, Stage], None], done: Callable[[], None] | None = None) -> None:
        def finished() -> None:
            with self._lock:
                self._changing[seq] -= 1
                if not self._changing[seq]:
                    del self._changing[seq]
            if done is not None:
                done()

        with self._lock:
            self._changing[seq] += 1
        self._inbox.put(Change(seq, act, finished))

    def _wait(self, seq: SeqId, act: Callable[[int, Stage], None]) -> None:
        """Change the sequence at every stage, and wait until it has been. Raises what a stage raised first."""
        done = threading.Event()
        errors: list[Exception] = []

        def attempt(number: int, stage: Stage) -> None:
            if not errors:
                try:
                    act(number, stage)
                except Exception as error:
                    errors.append(error)

        self._change(seq, attempt, done.set)
        done.wait()
        if errors:
            raise errors[0]

    # ---- memory -----------------------------------------------------------------------------------------------------
    def length(self, seq: SeqId) -> int:
        return self._table.length(seq)

    @property
    def block_size(self) -> int:
        return self._stages[0].block_size

    @property
    def _num_blocks(self) -> int:
        return self._capacity // self.block_size

    def free_rows(self) -> int:
        """As if forks shared nothing."""
        return (self._num_blocks - self._blocks({})) * self.block_size

    def _blocks(self, more: dict[SeqId, int]) -> int:
        """Blocks in use with so many rows more of each sequence."""
        lengths = Counter(self._table.lengths())
        lengths.update(more)
        return sum(-(-rows // self.block_size) for rows in lengths.values())

    def check(self) -> None:
        """Waits for everything under way."""
        lengths = self._table.lengths()

        def compare(_: int, stage: Stage) -> None:
            stage.check()
            assert {seq: stage.length(seq) for seq in lengths} == lengths, "a stage has other rows than were sent"

        self._wait(SeqId(-1), compare)


def _output_of(work: Work) -> Output:
    """The last stage's output by the segments that were asked for."""
    assert work.output is not None
    scored = work.output.scored or (None,) * len(work.left.segments)
    found = {
        segment.seq: (segment, logits, rows)
        for segment, logits, rows in zip(work.left.segments, work.output.logits, scored, strict=True)
    }
    parts: list[Logits] = []
    kept: list[tuple[int, ...] | None] = []
    for asked in work.asked.segments:
        if asked.seq not in found:
            parts.append(_NO_ROWS)
            kept.append(())
            continue
        segment, logits, rows = found[asked.seq]
        parts.append(logits)
        if rows is None and segment is asked:
            kept.append(None)
            continue
        wanted = [segment.node_ids[row] for row in segment.logits_rows()]
        names = set(wanted if rows is None else (wanted[row] for row in rows))
        kept.append(tuple(i for i, row in enumerate(asked.logits_rows()) if asked.node_ids[row] in names))
    return Output(tuple(parts), tuple(kept))
