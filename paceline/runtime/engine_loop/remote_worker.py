"""The worker of a model behind servers: every forward a call, on the event loop, without a thread or steps.

A sequence is a list of tokens. A plain answer (`ForwardRequest.goes_on`) is one stream, of which each of its forwards
takes the next token; whatever else is asked of a sequence ends its stream. The servers admit and batch by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from paceline.core.aggregation.weights import (
    BranchMixture,
    Evidence,
    masked,
    row_evidence,
    row_log_weights,
    sample_mixed_row,
)
from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import NOT_SAMPLED, RowSampling, SampledRow, process_logits, sample_row
from paceline.engine.base import Logits, SampleRequest
from paceline.engine.remote.rows import HEAD, Settled, ToldRow, head_of, settled, settled_mixture
from paceline.engine.remote.servers import LEAST_HEAD, MOST_BANNED, Drawn, RemoteModel
from paceline.engine.sequence_table import SequenceTable
from paceline.errors import EngineError, EngineLost
from paceline.runtime.engine_loop.executor import done_of
from paceline.runtime.engine_loop.requests import Certainty, ForwardRequest, Rows, SequenceOp
from paceline.runtime.engine_loop.worker import Worker, deliver
from paceline.runtime.service import Load

log = logging.getLogger("paceline.engine")

TRIES: Final = 3  # of a stream that is cut, each from the last token on
Tokens = tuple[int, ...]


class TokenLists(SequenceTable):
    """The sequences of a worker, as `engine.base.Sequences` are changed."""

    def append(self, segment: Segment) -> list[Tokens]:
        """Write the rows of a segment; the tokens up to each wanted row. Raises EngineError."""
        (placed,) = self.place(Batch((segment,)))
        before = self.tokens(placed.seq)
        wanted = [
            (*before, *(placed.tokens[: row + 1] if placed.parents is None else self.path(placed, row)))
            for row in placed.wanted
        ]
        self.written((placed,))
        return wanted

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:  # noqa: ARG002
        return 0

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:  # noqa: ARG002
        raise EngineError("rows of KV cannot be brought to a model's server")

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:  # noqa: ARG002
        raise EngineError("a model's server does not give its rows of KV")


@dataclass(frozen=True, slots=True, eq=False)
class ToldLogits:
    """`Logits` of rows of which ids are told, with what is needed to ask for more."""

    rows: tuple[ToldRow, ...]
    prefixes: tuple[Tokens, ...]
    salt: str

    def __len__(self) -> int:
        return len(self.rows)

    def dists(self) -> tuple[Dist, ...]:
        return tuple(row.dist() for row in self.rows)


@dataclass(slots=True, eq=False)
class _Stream:
    """A plain answer under way."""

    next_start: int  # rows of its sequence when its next token is asked for
    sampling: RowSampling  # as its last token was asked for
    banned: Tokens
    drawn: deque[Drawn] = field(default_factory=deque)
    last: int = -1  # token that was taken last
    ended: bool = False
    fault: EngineError | None = None
    waiting: ForwardRequest | None = None
    task: asyncio.Task[None] | None = None

    def continues(self, tokens: Tokens, start: int, sampling: RowSampling, banned: Tokens) -> bool:
        before = self.sampling
        return (
            tokens == (self.last,)
            and start == self.next_start
            and sampling.params == before.params
            and sampling.position == before.position + 1
            and sampling.num_top == before.num_top
            and banned == self.banned
        )


class RemoteWorker(Worker):
    """See the module. A call fails the answer that it was for, and no other."""

    told = True
    doubt = "the model's server tells only the likeliest tokens"

    def __init__(self, model: RemoteModel) -> None:
        super().__init__()
        self._model = model
        self._sequences = TokenLists(vocab_size=model.info.vocab_size, max_positions=model.info.max_positions)
        self._streams: dict[SeqId, _Stream] = {}
        self._calls: dict[SeqId, set[asyncio.Task[None]]] = {}  # under way
        self._salts: dict[SeqId, str] = {}  # of answers that share no rows
        self._num_calls = self._num_rows = 0

    @property
    def fault(self) -> EngineLost | None:
        """Never: servers come back."""
        return None

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        for seq in [*self._streams, *self._calls]:
            self._cancel(seq)
        await self._model.close()

    def load(self) -> Load:
        return Load(steps=self._num_calls, rows=self._num_rows)

    # ---- requests ---------------------------------------------------------------------------------------------------
    def submit(self, item: SequenceOp | ForwardRequest) -> None:
        seq = item.segment.seq if isinstance(item, ForwardRequest) else item.seq
        if isinstance(item, ForwardRequest):
            self._forward(seq, item)
            return
        if item.from_row is not None:
            self._cancel(seq)  # a sequence has one forward under way at most, and what is cut ends its rows
        try:
            item.act(self._sequences, None)
        except EngineError as error:
            log.warning("could not change sequence %s: %s", seq, error)
        if item.from_row == 0:
            self._salts.pop(seq, None)

    def _forward(self, seq: SeqId, request: ForwardRequest) -> None:
        segment, sampling = request.segment, request.sampling
        stream = self._streams.get(seq)
        try:
            prefixes = self._sequences.append(segment)
        except EngineError as error:
            self._answer(request, error)
            return
        row = sampling[-1] if sampling is not None and len(prefixes) == 1 else None
        plain = request.goes_on is not None and request.goes_on.always
        banned = None if row is None or not plain else self._banned(row)
        if stream is not None:
            if row is not None and banned is not None and stream.continues(segment.tokens, segment.start, row, banned):
                stream.sampling, stream.waiting = row, request
                stream.next_start += 1
                self._feed(seq, stream)
                return
            self._cancel(seq)
        if row is not None and banned is not None and self._streams_exactly(row):
            opened = _Stream(self._sequences.length(seq), row, banned, waiting=request)
            self._streams[seq] = opened
            opened.task = self._run(seq, self._follow(seq, opened, prefixes[0], request))
        elif not self._model.abilities.scores:
            self._answer(
                request,
                EngineError("the model's server writes plain answers alone: it tells no token's log-probability"),
            )
        else:
            self._run(seq, self._call(request, tuple(prefixes), self._salt_of(seq, request)))

    @staticmethod
    def _banned(row: RowSampling) -> Tokens | None:
        """Ids that a constraint excludes; None if they are too many to name."""
        if row.allowed is None:
            return ()
        ids = np.flatnonzero(~row.allowed[: row.vocab_size])
        return tuple(map(int, ids)) if len(ids) <= MOST_BANNED else None

    @staticmethod
    def _streams_exactly(row: RowSampling) -> bool:
        """The servers know no counts of tokens before a stream."""
        return not row.counts or not (row.params.presence_penalty or row.params.frequency_penalty)

    def _salt_of(self, seq: SeqId, request: ForwardRequest) -> str:
        if request.salt is not None:
            return f"paceline {request.salt}"
        return self._salts.setdefault(seq, secrets.token_urlsafe(16))

    def _run(self, seq: SeqId, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        calls = self._calls.setdefault(seq, set())
        calls.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            calls.discard(ended)
            if not calls and self._calls.get(seq) is calls:
                del self._calls[seq]

        task.add_done_callback(done)
        return task

    def _cancel(self, seq: SeqId) -> None:
        """End what is under way for a sequence, without an answer."""
        self._streams.pop(seq, None)
        for task in self._calls.pop(seq, ()):
            task.cancel()

    def _answer(self, request: ForwardRequest, result: Rows | EngineError) -> None:
        """In a later turn of the loop, as answers come."""
        asyncio.get_running_loop().call_soon(deliver, request.answer, result)

    # ---- plain answers ----------------------------------------------------------------------------------------------
    async def _follow(self, seq: SeqId, stream: _Stream, prefix: Tokens, request: ForwardRequest) -> None:
        """Read a stream, from the last token on again where it is cut."""
        salt, model = self._salt_of(seq, request), self._model
        room = model.info.max_positions - len(prefix)
        if request.group is not None and request.group.claim:
            room = min(room, request.group.claim - len(prefix))
        row, tries = stream.sampling, TRIES
        try:
            while room > 0 and tries:
                self._num_calls += 1
                try:
                    async for drawn in model.stream(prefix, row, room, salt, stream.banned):
                        stream.drawn += drawn
                        prefix, room = (*prefix, *(each.token for each in drawn)), room - len(drawn)
                        row = _later(row, drawn)
                        tries = TRIES
                        self._feed(seq, stream)
                    break
                except ConnectionError:
                    tries = tries - 1 if self._streams_exactly(row) else 0
        except EngineError as error:
            stream.fault = error
        except Exception as error:
            log.exception("a stream failed")
            stream.fault = EngineError(f"the model's server sent what cannot be read: {error!r}")
        stream.ended = True
        self._feed(seq, stream)

    def _feed(self, seq: SeqId, stream: _Stream) -> None:
        """Answer the forward that waits, if there is a token for it."""
        request = stream.waiting
        if request is None:
            return
        if stream.drawn:
            drawn = stream.drawn.popleft()
            stream.waiting, stream.last = None, drawn.token
            self._num_rows += 1
            top = None
            if stream.sampling.num_top:
                top = ToldRow.of(drawn.likeliest, self._model.info.vocab_size).head(
                    stream.sampling.num_top, drawn.token
                )
            self._answer(request, (SampledRow(drawn.token, top),))
        elif stream.ended:
            stream.waiting = None
            self._streams.pop(seq, None)
            if stream.fault is not None or not self._model.abilities.scores:
                fault = stream.fault or EngineError("the model's servers ended an answer before it was over")
                self._answer(request, fault)
            else:
                self._run(seq, self._call(request, (self._sequences.tokens(seq),), self._salt_of(seq, request)))

    # ---- rows -------------------------------------------------------------------------------------------------------
    async def _call(self, request: ForwardRequest, prefixes: tuple[Tokens, ...], salt: str) -> None:
        """Score the wanted rows and answer; where they are joined with other branches', once all are there."""
        try:
            rows = await self._rows(prefixes, self._head(request), salt)
            for answer, wanted in done_of(request, (ToldLogits(rows, prefixes, salt),) if prefixes else ()):
                if isinstance(wanted, SampleRequest):
                    answer(await self._sample(wanted, request.certainty))
                elif isinstance(wanted, tuple):
                    request.certainty.approximate |= not all(row.is_whole for row in rows)
                    answer(tuple(dist for part in wanted for dist in part.dists()))
                else:
                    answer(wanted)
        except EngineError as error:
            deliver(request.answer, error)
        except Exception as error:
            log.exception("rows could not be scored")
            deliver(request.answer, EngineError(f"the model's server sent what cannot be read: {error!r}"))

    def _head(self, request: ForwardRequest) -> int:
        """How many of a row's ids are asked for; -1: all."""
        if request.sampling is None and request.join is None:
            return -1 if self._model.abilities.whole else self._model.abilities.head
        most = min(HEAD, self._model.abilities.head)
        if request.sampling is None or any(row.params.temperature or row.changes_logits for row in request.sampling):
            return most
        num_top = max(row.num_top for row in request.sampling)
        return min(most, max(LEAST_HEAD, num_top) if num_top else 1)

    async def _rows(self, prefixes: Sequence[Tokens], head: int, salt: str) -> tuple[ToldRow, ...]:
        if not prefixes:
            return ()
        self._num_calls += 1
        self._num_rows += len(prefixes)
        return tuple(await self._model.rows(prefixes, head, salt))

    async def _sample(self, wanted: SampleRequest, certainty: Certainty) -> tuple[SampledRow, ...]:
        """The reference's tokens (`SampleRequest.by_reference`), as far as they can be made certain."""
        branches = [[row for part in parts for row in _told_of(part)] for parts in wanted.branches]
        if wanted.mixture is not None:
            return await self._sample_mixed(branches, wanted.rows, wanted.mixture, certainty)
        (own,) = branches
        if wanted.tree is None:
            each = (self._sample_row(*told, row, certainty) for told, row in zip(own, wanted.rows, strict=True))
            return tuple(await asyncio.gather(*each))
        found = [NOT_SAMPLED] * len(wanted.rows)
        for root in wanted.tree.roots:
            row: int | None = root
            while row is not None:
                found[row] = await self._sample_row(*own[row], wanted.rows[row], certainty)
                row = wanted.tree.child(row, found[row].token)
        return tuple(found)

    async def _sample_row(
        self, told: ToldRow, prefix: Tokens, salt: str, sampling: RowSampling, certainty: Certainty
    ) -> SampledRow:
        need = settled(told, sampling)
        if need.own_draw:
            certainty.further_calls += 1
            certainty.approximate |= sampling.allowed is not None and not self._model.abilities.allows
            token = await self._model.draw(prefix, sampling, salt)
            return SampledRow(token, told.head(sampling.num_top) if sampling.num_top else None)
        told = await self._lifted(told, prefix, salt, need, certainty)
        return sample_row(told.dist(), sampling)

    async def _lifted(self, told: ToldRow, prefix: Tokens, salt: str, need: Settled, certainty: Certainty) -> ToldRow:
        """The row with the ids that are needed, by a further call."""
        missing = [token for token in need.lifted if token not in told.logprobs]
        certainty.approximate |= not need.is_exact or not self._model.abilities.same_cached
        if not missing:
            return told
        if not self._model.abilities.lists:
            certainty.approximate = True
            return told
        certainty.further_calls += 1
        self._num_calls += 1
        return told.and_also(await self._model.told(prefix, missing, salt))

    async def _sample_mixed(
        self,
        branches: Sequence[Sequence[tuple[ToldRow, Tokens, str]]],
        rows: Sequence[RowSampling],
        mixture: BranchMixture,
        certainty: Certainty,
    ) -> tuple[SampledRow, ...]:
        """As `sample_mixed_rows` does."""
        size = len(mixture.tokens)
        extra = len(rows) - size
        found = [await self._sample_row(*branches[-1][i], rows[i], certainty) for i in range(extra)]
        masked_rows: list[list[Dist]] = []
        evidence: list[Evidence] = []
        for index, sampling in enumerate(rows[extra:]):
            parent, own = mixture.parents[index], mixture.tokens[index]
            probs = [dist.prob(own) for dist in masked_rows[parent]] if parent >= 0 else ()
            evidence.append(row_evidence(mixture, index, evidence, probs))
            log_weights = row_log_weights(mixture.log_weights, evidence[-1])
            parts = [branch[len(branch) - size + index] for branch in branches]
            told = [part[0] for part in parts]
            need = settled(told[0], sampling) if len(told) == 1 else settled_mixture(told, log_weights, sampling)
            certainty.approximate |= need.own_draw  # of one branch whose row is mixed with another side's
            told = [await self._lifted(*part, need, certainty) for part in parts]
            dists = [row.dist() for row in told]
            masked_rows.append([masked(dist, sampling) for dist in dists])
            one = sample_mixed_row(dists, sampling, mixture, evidence[-1])
            if mixture.heads:
                processed = [
                    process_logits(dist, sampling.params, sampling.counts, prompt)
                    for dist, prompt in zip(masked_rows[-1], mixture.prompts, strict=True)
                ]
                head = head_of(told, processed, log_weights, sampling)

                def read(dists: Sequence[Dist] = dists, is_whole: bool = head.whole) -> tuple[Dist, ...]:
                    certainty.approximate |= not is_whole
                    return tuple(dists)

                one = msgspec.structs.replace(one, head=head, dists=read)
            found.append(one)
        return tuple(found)


def _told_of(part: Logits) -> list[tuple[ToldRow, Tokens, str]]:
    assert isinstance(part, ToldLogits), "rows of this worker"
    return [(row, prefix, part.salt) for row, prefix in zip(part.rows, part.prefixes, strict=True)]


def _later(row: RowSampling, drawn: Sequence[Drawn]) -> RowSampling:
    """How the row after these tokens is sampled."""
    counts = Counter(row.counts) + Counter(each.token for each in drawn)
    return msgspec.structs.replace(row, position=row.position + len(drawn), counts=counts)
