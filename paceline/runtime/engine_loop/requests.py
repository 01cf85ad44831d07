"""What callers ask of an engine: forwards, alone or joined with those of other branches, and changes of sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.aggregation.weights import BranchMixture
from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.pending import Group
from paceline.core.batching.scheduler import ScheduledSegment
from paceline.core.batching.segment import Batch, GoesOn, Segment, SeqId
from paceline.core.energy import NONE, Energy
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import RowSampling, SampledRow
from paceline.engine.base import Logits, SampleRequest, SequenceEngine, Sequences
from paceline.engine.sequence_table import SequenceTable
from paceline.errors import EngineError


@dataclass(slots=True)
class _Record:
    salt: str | None = None  # owner within which its rows are shared; None: they are not
    stored: KvPrefix | None = None  # rows that it may begin with
    later: list[int] = field(default_factory=list)  # tokens of rows that were committed since
    tree: Segment | None = None  # open rows behind them


class SequenceRecords:
    """The sequences of an engine, as if none were ever preempted. Every batch must be reported by `submitted`.

    A preempted sequence is changed here alone: what the engine computes later is what is then left of it. One that is
    being computed again must be preempted once more before it changes.

    Most answers only grow, and are never preempted: their chains, and trees of which a path is kept at once, are noted
    as tokens, and the table learns of them when a sequence is changed otherwise or looked at.
    """

    def __init__(self, engine: SequenceEngine) -> None:
        self._engine = engine
        self._table = SequenceTable(vocab_size=engine.info.vocab_size, max_positions=engine.info.max_positions)
        self._records: dict[SeqId, _Record] = {}

    def submitted(self, batch: Batch) -> None:
        """The engine writes these rows, for the first time."""
        for segment in batch.segments:
            record = self._records.get(segment.seq)
            if record is None:
                record = self._records[segment.seq] = _Record()
            if record.tree is not None or not self._table.is_settled(segment.seq):
                self._settle(segment.seq)
                self._table.write(segment)
            elif segment.parents is None:
                record.later += segment.tokens
            else:
                record.tree = segment

    # ---- preemption -------------------------------------------------------------------------------------------------
    def preempt(self, seq: SeqId) -> None:
        """Release the engine's rows of a sequence. One without rows is as if it had never begun."""
        self._engine.release(seq)
        if not self.length(seq):
            self.release(seq)

    def rows_of(self, seq: SeqId) -> tuple[Segment, ...]:
        """Segments that write all rows of a sequence: the committed ones as a chain, then the open tree."""
        self._settle(seq)
        tree, tokens = self._table.tree(seq), self._table.tokens(seq)
        chain = (Segment(seq, 0, tokens, None, "none"),) if tokens else ()
        if not tree.tokens:
            return chain
        return (*chain, Segment(seq, len(tokens), tree.tokens, tree.parent_ids, "none", tree.ids))

    def begin_again(self, chain: Segment) -> int:
        """Begin a preempted sequence with rows that need not be computed; return how many. Raises EngineError."""
        record = self._records[chain.seq]
        stored = record.stored
        if stored is not None and stored.tokens != chain.tokens[:-1][: len(stored.tokens)]:
            stored = None  # it has been truncated since
        return begin_known(self._engine, chain, record.salt, stored)

    # ---- as of an engine --------------------------------------------------------------------------------------------
    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:
        rows = self._engine.begin(seq, tokens, salt, stored)
        self._begun(seq, tokens[:rows], salt, stored)
        return rows

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        self._engine.import_kv(seq, rows)
        self._begun(seq, rows.tokens, None, rows)

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        """Raises EngineError for a preempted sequence, too."""
        return self._engine.export_kv(seq, tokens)

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        if self._is_resident(seq):
            self._engine.prune(seq, keep, live, horizon)
        record = self._records[seq]
        if record.tree is not None and horizon is None and not live:
            token_of = dict(zip(record.tree.node_ids, record.tree.tokens, strict=True))
            record.later += [token_of[name] for name in keep]
            record.tree = None
        else:
            self._settle(seq)
            self._table.prune(seq, keep, live, horizon)

    def truncate(self, seq: SeqId, length: int) -> None:
        if self._is_resident(seq):
            self._engine.truncate(seq, length)
        self._settle(seq)
        self._table.truncate(seq, length)

    def release(self, seq: SeqId) -> None:
        self._engine.release(seq)
        self._table.release(seq)
        self._records.pop(seq, None)

    def length(self, seq: SeqId) -> int:
        record, known = self._records.get(seq), self._table.length(seq)
        if record is None:
            return known
        return known + len(record.later) + (0 if record.tree is None else len(record.tree.tokens))

    def check(self) -> None:
        for seq in self._records:
            self._settle(seq)
        self._table.check()

    def _settle(self, seq: SeqId) -> None:
        """Tell the table what has only been noted of a sequence."""
        record = self._records.get(seq)
        if record is None:
            return
        if record.later:
            chain = Segment(seq, self._table.length(seq), tuple(record.later), None, "none")
            record.later.clear()
            self._table.write(chain)
        if record.tree is not None:
            tree, record.tree = record.tree, None
            self._table.write(tree)

    def _begun(self, seq: SeqId, tokens: Sequence[int], salt: str | None, stored: KvPrefix | None) -> None:
        self._records[seq] = _Record(salt, stored)
        self._table.adopt(seq, tokens)

    def _is_resident(self, seq: SeqId) -> bool:
        return self._engine.length(seq) == self.length(seq)


def begin_known(sequences: Sequences, chain: Segment, salt: str | None, stored: KvPrefix | None) -> int:
    """Begin a chain's sequence with rows that need not be computed; return how many. salt: None: it shares none."""
    if salt is not None:
        return sequences.begin(chain.seq, chain.tokens, salt, stored)
    if stored is None:
        return 0
    sequences.import_kv(chain.seq, stored)
    return len(stored.tokens)


log = logging.getLogger("paceline.engine")


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Preamble and document at the start of a prompt."""

    tokens: tuple[int, ...]
    rows: KvPrefix | None = None  # stored KV
    keep: Callable[[KvPrefix], None] | None = None  # receives computed KV on the engine's thread; must not wait

    def begins(self, segment: Segment) -> bool:
        """True if the segment starts with this prefix and has rows left to compute."""
        rows = len(self.tokens)
        whole = segment.start == 0 and segment.parents is None and segment.logits != "all"
        return whole and rows < len(segment.tokens) and segment.tokens[:rows] == self.tokens


class PrefixReuse:
    """Prefixes of prompts that need not be computed, by the keys of their requests: cached by the engine, or KV of
    documents that the caller has stored. Runs on the engine's thread, between `StepExecutor` and the engine."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._prompts: dict[int, ForwardRequest] = {}  # that may begin with rows that need not be computed
        self._computing: dict[tuple[str, tuple[int, ...]], int] = {}  # salt and tokens of prompts in progress
        self._computed: list[tuple[SeqId, StoredPrefix]] = []
        self.adopted = 0  # rows not computed

    def add(self, key: int, prompt: ForwardRequest) -> None:
        """Register a segment, whatever it is."""
        segment = prompt.segment
        is_whole = not segment.start and segment.parents is None and segment.logits != "all"
        if is_whole and len(segment.tokens) > 1 and (prompt.salt is not None or prompt.prefix is not None):
            self._prompts[key] = prompt

    def begin(self, key: int, segment: Segment) -> int | None:
        """Start the sequence of a prompt; the number of its rows that need not be computed.

        segment: as it is scheduled; a prompt that has been shortened since `add` is computed whole. None while the same
        prompt of the same owner is being computed: its rows are shared once they are there.
        """
        prompt = self._prompts.get(key)
        if prompt is None or len(segment.tokens) < len(prompt.segment.tokens):
            return 0
        prefix = prompt.prefix
        if prompt.salt is not None and self._computing.setdefault((prompt.salt, segment.tokens), key) != key:
            return None
        stored = prefix.rows if prefix is not None and prefix.begins(segment) else None
        try:
            rows = begin_known(self._sequences, segment, prompt.salt, stored)
        except EngineError as error:
            log.warning("rows of a prompt are computed again: %s", error)
            rows = 0
        self.adopted += rows
        prompt.cached_rows = rows
        return rows

    def done(self, chunk: ScheduledSegment) -> None:
        """Called when the last chunk of a request has run."""
        prompt = self._prompts.get(chunk.key)
        if prompt is not None and (prefix := prompt.prefix) is not None and prefix.begins(prompt.segment):
            self._computed.append((prompt.segment.seq, prefix))

    def export(self) -> None:
        """Export the prefixes computed since the last call. After the answers are sent, before any sequence changes."""
        for seq, prefix in self._computed:
            try:
                if prefix.rows is None and prefix.keep is not None:
                    prefix.keep(self._sequences.export_kv(seq, prefix.tokens))
            except Exception as error:  # the answer does not depend on storing
                log.warning("the rows of a document cannot be kept: %s", error)
        self._computed.clear()

    def interrupt(self, seq: SeqId) -> None:
        """A sequence loses its rows: other prompts no longer wait for them."""
        for ident, key in list(self._computing.items()):
            if self._prompts[key].segment.seq == seq:
                del self._computing[ident]

    def forget(self, key: int) -> None:
        prompt = self._prompts.pop(key, None)
        if prompt is not None and prompt.salt is not None:
            ident = prompt.salt, prompt.segment.tokens
            if self._computing.get(ident) == key:
                del self._computing[ident]


Rows = tuple[Dist, ...] | tuple[SampledRow, ...]
Answer = Callable[[Rows | EngineError], None]


@dataclass(frozen=True, slots=True)
class SequenceOp:
    """A change of a sequence between two steps. Pending rows from `from_row` on are cancelled.

    from_row None: no row is cancelled. The change runs after its sequence's pending rows and before its later changes.
    """

    seq: SeqId
    from_row: int | None
    act: Callable[[Sequences, int | None], None]  # with the greatest id of rows under way, see `Engine.prune`

    @staticmethod
    def truncate(seq: SeqId, length: int) -> SequenceOp:
        def act(sequences: Sequences, _: int | None) -> None:
            if sequences.length(seq) > length:  # the forward that writes these rows may have been cancelled
                sequences.truncate(seq, length)

        return SequenceOp(seq, length, act)

    @staticmethod
    def prune(seq: SeqId, keep: tuple[int, ...], live: tuple[int, ...] = ()) -> SequenceOp:
        def act(sequences: Sequences, horizon: int | None) -> None:
            sequences.prune(seq, keep, live, horizon)

        return SequenceOp(seq, None, act)

    @staticmethod
    def release(seq: SeqId) -> SequenceOp:
        return SequenceOp(seq, 0, lambda sequences, _: sequences.release(seq))


@dataclass(slots=True, eq=False)
class Certainty:
    """How sure an answer's tokens are."""

    approximate: bool = False  # some token might be another one, see `Worker.doubt`
    further_calls: int = 0  # made to be sure


@dataclass(slots=True, eq=False)
class ForwardRequest:
    segment: Segment
    answer: Answer
    prefix: StoredPrefix | None = None  # prefix of the segment, if it is a whole prompt
    group: Group | None = None  # sequences of one answer, released together
    sampling: tuple[RowSampling, ...] | None = None  # of each wanted row, whose token is the answer; None: its `Dist`
    path_only: bool = False  # of a tree whose rows are all wanted: see `SampleRequest.tree`
    goes_on: GoesOn | None = None  # see `Forward`
    certainty: Certainty = field(default_factory=Certainty)  # of its answer, shared by all forwards of one
    salt: str | None = None  # owner within which the KV of a prompt is shared; None: it is not
    join: BranchJoin | None = None  # with the forwards of other branches, in place of `sampling`
    branch: int = 0  # its number in `join`
    energy: Energy = NONE  # its share of the steps that computed it, by rows; set before the answer
    cached_rows: int = 0  # first rows of a prompt that were not computed; set before the answer
    scored: tuple[int, ...] | None = None  # wanted rows that are in the answer; None: none was pruned under way


class BranchJoin:
    """Forwards of one row range on several branches, whose rows are sampled from their mixture once all have run.

    Not handled: rows that are pruned while such a forward is under way. It fails.
    """

    def __init__(
        self, sampling: tuple[RowSampling, ...], mixture: BranchMixture, answer: Answer, num_branches: int
    ) -> None:
        self.sampling, self.mixture, self.answer = sampling, mixture, answer
        self._missing = num_branches
        self._parts: dict[int, tuple[Logits, ...]] = {}
        self._failed = False

    def add(self, branch: int, parts: tuple[Logits, ...]) -> SampleRequest | None:
        """A branch has run: what to sample, once it was the last."""
        self._parts[branch] = parts
        self._missing -= 1
        if self._missing or self._failed:
            return None
        branches = tuple(self._parts[index] for index in range(len(self._parts)))
        most = max(sum(map(len, parts)) for parts in branches)  # rows of a cached prefix are not computed
        return SampleRequest(branches, self.sampling[-most:], self.mixture)

    def fail(self, error: Rows | EngineError) -> None:
        """A branch has failed: answer once."""
        if not self._failed:
            self._failed = True
            self.answer(error)
