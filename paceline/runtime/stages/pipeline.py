"""A pipeline of stages in other processes as one asynchronous engine: its head.

Every stage gets every command on its own link, in one order; hidden rows go from stage to stage. The engine's thread
calls; a thread of the pipeline's own runs its connections. When a stage is lost, the others are emptied, and all are
sent what they must hold and what was under way (`history`), so that callers see nothing but a pause. When nobody can
take its place, what was under way fails; later batches fail until the stage is back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import RowSampling, SampledRow, SamplingDefaults
from paceline.engine.base import Logits, ModelInfo, Output, SampleRequest, Ticket
from paceline.engine.sampling.row_kernel import HostLogits
from paceline.errors import EngineError, RemoteProtocolError
from paceline.runtime.stages.history import Imported
from paceline.runtime.stages.members import Members
from paceline.runtime.stages.stage_head import BatchUnderWay, StageHead, StageRequest, away
from paceline.wire.effects import Bulk
from paceline.wire.messages import Frame
from paceline.wire.stages import messages

_ROW_BYTES = 768  # of a wanted row without its mask, prompt and counts


# Of a ticket, a segment, a first and a last row + 1: distributions of rows that the last stage keeps. Waits. Raises
# EngineError.
Fetch = Callable[[int, int, int, int], tuple[Dist, ...]]


@dataclass(frozen=True, eq=False)
class BatchHandle:
    """As long as this object lives, the last stage keeps the scores of the batch."""

    ticket: int


@dataclass(frozen=True, slots=True, eq=False)
class FarLogits:
    """`Logits` of one segment at the last stage."""

    batch: BatchHandle
    segment: int
    size: int
    fetch: Fetch
    rows: tuple[RowSampling, ...] = ()  # how they were sampled as soon as they were computed; (): they were not
    sampled: tuple[SampledRow, ...] = ()

    def __len__(self) -> int:
        return self.size

    def dists(self) -> tuple[Dist, ...]:
        return self.fetch(self.batch.ticket, self.segment, 0, self.size)

    def dist(self, row: int) -> Dist:
        return self.fetch(self.batch.ticket, self.segment, row, row + 1)[0]


def sampled_already(request: SampleRequest) -> tuple[SampledRow, ...] | None:
    """The answer, if it came with the batch."""
    if request.mixture is not None or len(request.branches) != 1:
        return None
    parts = [part for part in request.branches[0] if len(part)]
    if len(parts) != 1 or not isinstance(part := parts[0], FarLogits) or len(part.sampled) != len(request.rows):
        return None
    same = all(a is b for a, b in zip(part.rows, request.rows, strict=True))
    return part.sampled if same else None


def wanted_of(request: SampleRequest) -> messages.Wanted | None:
    """None for rows that are not all at the last stage."""
    branches: list[list[tuple[int, int]]] = []
    for parts in request.branches:
        far = [part for part in parts if isinstance(part, FarLogits)]
        if len(far) < len(parts):
            return None
        branches.append([(part.batch.ticket, part.segment) for part in far if len(part)])
    return messages.Wanted(branches, list(map(messages.row_to_wire, request.rows)), request.mixture)


def in_parts(wanted: Sequence[messages.Wanted]) -> list[list[messages.Wanted]]:
    """As few messages as their sizes allow: masks of large vocabularies take tens of kilobytes a row."""
    parts: list[list[messages.Wanted]] = []
    room = 0
    for each in wanted:
        size = sum(map(_size_of, each.rows))
        if not parts or size > room:
            parts.append([])
            room = messages.MAX_MESSAGE_BYTES // 2
        parts[-1].append(each)
        room -= size
    return parts


def _size_of(row: RowSampling) -> int:
    masked = 0 if row.allowed is None else len(row.allowed) // 8
    prompt = 0 if row.prompt is None else row.prompt.nbytes
    return _ROW_BYTES + masked + prompt + 12 * (len(row.counts) + len(row.params.logit_bias))


def answer_of(request: SampleRequest, rows: Sequence[SampledRow]) -> tuple[SampledRow, ...]:
    found, mixture = tuple(rows), request.mixture
    if mixture is None or not mixture.heads:
        return found
    count = len(mixture.tokens)
    extra = len(found) - count
    mixed = (
        msgspec.structs.replace(row, dists=partial(_dists, request, count - index))
        for index, row in enumerate(found[extra:])
    )
    return (*found[:extra], *mixed)


def _dists(request: SampleRequest, from_end: int) -> tuple[Dist, ...]:
    return tuple(_row_from_end(branch, from_end) for branch in request.branches)


def _row_from_end(parts: Sequence[object], from_end: int) -> Dist:
    left = from_end
    for part in reversed(parts):
        assert isinstance(part, FarLogits)
        if left <= len(part):
            return part.dist(len(part) - left)
        left -= len(part)
    raise IndexError(f"no row {from_end} from the end")


class RemotePipeline(StageHead):
    """The engine contract. Prefixes are imported but not shared between sequences.

    `close` ends its thread and its connections.
    """

    def __init__(self, make: Callable[..., Members], name: str, sampling: SamplingDefaults) -> None:
        """See `StageHead`."""
        super().__init__(make)
        self._last_ticket = 0
        first, *_ = abouts = self.members.abouts
        self._info = ModelInfo(name, first.model, first.vocab_size, first.max_positions, first.dtype, "paged", sampling)
        self._layers = [about.stop - about.first for about in abouts]

    # ---- batches ----------------------------------------------------------------------------------------------------
    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def depth(self) -> int:
        """One batch more than stages: it waits at the first one."""
        return len(self._layers) + 1

    def submit(self, batch: Batch) -> Ticket:
        with self.changed:
            self.flush()
            if self.gone is not None:
                raise away()
            self.sent.table.written(self.sent.place(batch))
            self._last_ticket += 1
            ticket = Ticket(self._last_ticket)
            self.batches.append(BatchUnderWay(ticket, batch))
            self.record(messages.RunBatch(ticket, batch.segments))
        return ticket

    def sample_ahead(self, ticket: Ticket, rows: Sequence[tuple[RowSampling, ...] | None]) -> None:
        """See `base.SamplesAhead`: asked before the batch has run, and answered with it."""
        ahead = {number: each for number, each in enumerate(rows) if each is not None}
        with self.changed:
            under = self.batch(ticket)
            if under is None or not ahead:
                return
            wanted = [
                messages.Wanted([[(ticket, number)]], list(map(messages.row_to_wire, each)), None)
                for number, each in ahead.items()
            ]
            under.ahead, under.questions = ahead, self._questions(wanted)
            self.put(under.questions)

    def _questions(self, wanted: Sequence[messages.Wanted]) -> list[StageRequest]:
        return [StageRequest(-1, messages.SampleRows(next(self.numbers), part)) for part in in_parts(wanted)]

    def is_ready(self, ticket: Ticket) -> bool:
        with self.changed:
            batches = self.batches
            return bool(batches) and batches[0].ticket == ticket and not batches[0].is_open

    def collect(self, ticket: Ticket) -> Output:
        with self.changed:
            while self.batches[0].is_open:
                self.changed.wait()
            under = self.batches.popleft()
            self.settle(under.questions)
            self.history.came(ticket)
            assert under.ticket == ticket, f"batch {under.ticket} comes before {ticket}"
            try:
                if under.error is not None:
                    raise under.error
                self.sent.check_held(under.asked)
            except EngineError:
                self.sent.fail(under.asked)
                self.history.settle(under.ticket)
                raise
        return self._output(under)

    def _output(self, under: BatchUnderWay) -> Output:
        handle, done = BatchHandle(under.ticket), under.done
        assert done is not None
        weakref.finalize(handle, self.forgotten.append, int(under.ticket)).atexit = False
        answers = [question.answer for question in under.questions]
        found = [rows for answer in answers if isinstance(answer, messages.SampledRows) for rows in answer.rows]
        sampled = dict(zip(under.ahead, map(tuple, found), strict=False))
        parts: list[Logits] = []
        for number, (size, scored) in enumerate(zip(done.sizes, done.kept, strict=True)):
            rows = under.ahead.get(number, ())
            rows = rows if scored is None else tuple(rows[row] for row in scored if row < len(rows))
            parts.append(FarLogits(handle, number, size, self._fetch, rows, sampled.get(number, ())))
        return Output(tuple(parts), done.kept)

    def notify(self, callback: Callable[[], None]) -> None:
        self.notified = callback

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        """Those that did not come with their batches are asked for in one round trip."""
        answers = [sampled_already(request) for request in requests]
        wanted = {
            place: asked
            for place, (request, answer) in enumerate(zip(requests, answers, strict=True))
            if answer is None and (asked := wanted_of(request)) is not None
        }
        if wanted:
            found: list[list[SampledRow]] = []
            for answer in self.ask_all(self._questions(list(wanted.values()))):
                if not isinstance(answer, messages.SampledRows):
                    raise EngineError("the last stage answered something else")
                found += answer.rows
            if [len(rows) for rows in found] != [len(each.rows) for each in wanted.values()]:
                raise EngineError("the last stage answered with other rows")
            for place, rows in zip(wanted, found, strict=True):
                answers[place] = answer_of(requests[place], rows)
        return [
            request.by_reference() if answer is None else answer
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _fetch(self, ticket: int, segment: int, first: int, stop: int) -> tuple[Dist, ...]:
        if first == stop:
            return ()
        asked = messages.FetchScores(next(self.numbers), ticket, segment, first, stop)
        (found,) = self.ask_all([StageRequest(-1, asked)])
        if not isinstance(found, Bulk) or not isinstance(found.header, messages.ScoreRows):
            raise EngineError("the last stage answered something else")
        shape = stop - first, self._info.vocab_size
        if len(found.payload) != 4 * shape[0] * shape[1]:
            raise EngineError("the last stage answered with other rows")
        return HostLogits(np.frombuffer(found.payload, "<f4").reshape(shape)).dists()

    # ---- changes ----------------------------------------------------------------------------------------------------
    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        with self.changed:
            sent = self.sent.table.last_id(seq)
            self.sent.table.prune(seq, keep, live, horizon)
            last = None if horizon is None else max(horizon, sent)
            self.record(messages.PruneRows(seq, tuple(keep), tuple(live), last))

    def truncate(self, seq: SeqId, length: int) -> None:
        with self.changed:
            self.sent.table.truncate(seq, length)
            self.record(messages.TruncateRows(seq, length))

    def release(self, seq: SeqId) -> None:
        with self.changed:
            self.flush()
            if seq in self.sent.table or seq in self.sent.failed:
                self.sent.release(seq)
                self.record(messages.ReleaseRows(seq))

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:  # noqa: ARG002  # shares nothing
        if seq in self.sent.table:
            raise EngineError(f"sequence {seq} exists already")
        if stored is None or not len(stored.tokens) < len(tokens):
            return 0
        self.import_kv(seq, stored)
        return len(stored.tokens)

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        """Waits for everything under way, because stages check the rows."""
        if rows.model != self._info.fingerprint or len(rows.keys) != sum(self._layers):
            raise EngineError("these rows are of another model")
        with self.changed:
            self.sent.table.adopt(seq, rows.tokens)
        try:
            requests = []
            first = 0
            for place, layers in enumerate(self._layers):
                span = slice(first, first + layers)
                part = KvPrefix(rows.model, rows.dtype, rows.tokens, rows.keys[span], rows.values[span])
                number = next(self.numbers)
                message = messages.ImportRows(number, seq, rows.tokens)
                requests.append(StageRequest(place, message, messages.kv_to_wire(number, part)))
                first += layers
            self.ask_all(requests, Imported(seq, rows.tokens))
        except EngineError:
            self.release(seq)
            raise

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        """Waits for everything under way."""
        with self.changed:
            self.sent.table.export(seq, len(tokens))
        found = self._ask_each(lambda request: messages.ExportRows(request, seq, tuple(tokens)))
        try:
            parts = [_kv_of(each, self._info.fingerprint, tokens) for each in found]
        except RemoteProtocolError as error:
            raise EngineError(f"a stage exported other rows: {error}") from error
        keys, values = (np.concatenate([getattr(part, name) for part in parts]) for name in ("keys", "values"))
        return KvPrefix(self._info.fingerprint, parts[0].dtype, tuple(tokens), keys, values)

    def _ask_each(self, message: Callable[[int], messages.Numbered]) -> list[Frame | Bulk]:
        """Every stage's answer. message: of a request's number."""
        places = range(len(self._layers))
        return self.ask_all([StageRequest(place, message(next(self.numbers))) for place in places])

    # ---- memory -----------------------------------------------------------------------------------------------------
    def length(self, seq: SeqId) -> int:
        return self.sent.table.length(seq)

    @property
    def block_size(self) -> int:
        return self.sent.block_size

    def free_rows(self) -> int:
        return self.sent.free_rows()

    def check(self) -> None:
        """Waits for everything under way. Passes while no stage can be asked."""
        with self.changed:
            self.flush()
            self.history.check()
            if self.gone is not None:
                return
            lost = set(self.sent.failed)
            lengths = {seq: rows for seq, rows in self.sent.table.lengths().items() if rows and seq not in lost}
        found = self._ask_each(messages.CheckRows)
        for each in found:
            assert isinstance(each, messages.StageHave)
            held = {SeqId(seq): rows for seq, rows in each.lengths if seq not in lost}
            assert held == lengths, f"a stage has other rows than were sent: {held}, {lengths}"


def _kv_of(found: Frame | Bulk, model: str, tokens: Sequence[int]) -> KvPrefix:
    if not isinstance(found, Bulk) or not isinstance(found.header, messages.KvRows):
        raise EngineError("a stage answered something else")
    return messages.kv_from_wire(found.header, found.payload, model, tokens)
