"""Engine contract: protocols and values shared by `fake`, `hf`, `paged`, `llama_cpp` and pipeline stages.

Eleven properties, verified for every engine by `tests/engine/test_contract.py`: (1) splitting a chain changes nothing;
(2) a tree row scores as the chain along its path; (3) commit then continue equals a fresh prefill; (4) truncate then
continue likewise; (5) the other sequences of a batch do not change a sequence's scores, up to the dtype's tolerance;
(6) stages composed equal the whole; (7) a tree scored in parts equals the tree scored at once; (8) a tree that grows
after a partial commit scores as the chains along its paths; (9) exported and imported rows, then continued, equal a
fresh prefill; (10) sampled rows have the reference's tokens; (11) a prune commutes with the segments that were sent
before it and arrive after it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NewType, Protocol, runtime_checkable

import msgspec

from paceline.core.aggregation.weights import BranchMixture, sample_mixed_rows
from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.core.offloading import ModelShape
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import (
    NO_DEFAULTS,
    NOT_SAMPLED,
    RowSampling,
    RowTree,
    SampledRow,
    SamplingDefaults,
    sample_row,
)
from paceline.errors import EngineError

NO_FIELDS: Final[Mapping[str, object]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Public description of a model, for peers and clients."""

    name: str
    fingerprint: str  # sha256 hex over config and samples of the weights, see `hub.gguf.sampled`
    vocab_size: int
    max_positions: int  # rows one sequence may have
    dtype: str
    backend: str  # "fake", "hf", "llama_cpp", "paged" or "reader"
    sampling: SamplingDefaults = NO_DEFAULTS  # the makers' recommendation
    system: str = ""  # system message of conversations that bring none: this side's setting
    num_weights: int = 0  # of the whole model; 0: unknown
    shape: ModelShape | None = None  # for models of its energy; None: not known
    accelerated: bool = False  # by a device that computes on while its caller does not wait
    doubt: str = ""  # why a row's token may depend on more than its tokens, as on rows computed with it; empty: exact
    refusals: tuple[str, ...] = ()  # what it says of its own, as where no document answers: such an answer cites none
    thinking: tuple[str, str] | None = None  # marks between which it thinks before it answers; None: it does not
    tools: str = "hermes"  # name of the format in which it writes calls
    kept_as: str = ""  # see `hub.gguf.kept_as`; empty for a model that has no files here

    @property
    def is_exact(self) -> bool:
        return not self.doubt

    @property
    def is_on_host(self) -> bool:
        """True for engines that do not compute on torch here."""
        return self.backend in ("fake", "http", "llama_cpp", "reader")


class Logits(Protocol):
    """Logits of one segment's scored rows, kept where the model computed them as long as this object lives."""

    def __len__(self) -> int: ...

    def dists(self) -> tuple[Dist, ...]:
        """Dense distributions at temperature 1. Moves a vocabulary's probabilities to the host for every row."""


@dataclass(frozen=True, slots=True)
class DenseLogits:
    """Rows that are distributions already, of engines that compute on the host."""

    rows: tuple[Dist, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def dists(self) -> tuple[Dist, ...]:
        return self.rows


@dataclass(frozen=True, slots=True)
class Output:
    """Result of one forward: the logits of each segment's `logits_rows()`, in batch order, without rows that a prune
    had dropped before they came."""

    logits: tuple[Logits, ...]
    scored: tuple[tuple[int, ...] | None, ...] = ()  # by segment, which of its `logits_rows()`; None, or (): all

    @staticmethod
    def dense(dists: Iterable[tuple[Dist, ...]], scored: tuple[tuple[int, ...] | None, ...] = ()) -> Output:
        return Output(tuple(DenseLogits(rows) for rows in dists), scored)

    @property
    def dists(self) -> tuple[tuple[Dist, ...], ...]:
        """The distributions of every row."""
        return tuple(logits.dists() for logits in self.logits)


class SampleRequest(msgspec.Struct, frozen=True):
    """Rows to sample: `branches` holds them in order, in parts where the scheduler has cut their segment.

    mixture: of several branches, whose rows are mixed; the last branch may have more rows, see `sample_mixed_rows`.
    tree: of one branch's rows; those to which no token leads need not be sampled, and may be `NOT_SAMPLED`.
    """

    branches: tuple[tuple[Logits, ...], ...]
    rows: tuple[RowSampling, ...]
    mixture: BranchMixture | None = None
    tree: RowTree | None = None

    def by_reference(self) -> tuple[SampledRow, ...]:
        """The definition of the answer, from the rows' distributions."""
        branches = [[dist for part in parts for dist in part.dists()] for parts in self.branches]
        if self.mixture is not None:
            return sample_mixed_rows(branches, self.rows, self.mixture)
        return self.row_by_row(lambda row: sample_row(branches[0][row], self.rows[row]))

    def row_by_row(self, sampled: Callable[[int], SampledRow]) -> tuple[SampledRow, ...]:
        """The rows of one branch; of a tree those to which its tokens lead."""
        if self.tree is None:
            return tuple(map(sampled, range(len(self.rows))))
        found = [NOT_SAMPLED] * len(self.rows)
        for root in self.tree.roots:
            row: int | None = root
            while row is not None:
                found[row] = sampled(row)
                row = self.tree.child(row, found[row].token)
        return tuple(found)


class Sequences(Protocol):
    """Rows of sequences that begin, change and end between two forwards."""

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> object:
        """Commit the rows `keep` of the open tree, leave the rows `live` open, and drop all others. Rows are named by
        their ids, which they keep.

        keep: a path from a root, or empty. live: rising; the parent of each row is in `live` too or is the last of
        `keep` (if `keep` is empty, a root has none). horizon: the greatest id that has been sent, where segments may
        still be on their way; `keep` and `live` may name rows of these, and their other rows are dropped when they
        come. None: none are; then ids may begin anew once nothing is left open.
        """

    def truncate(self, seq: SeqId, length: int) -> None:
        """Drop rows from `length` on, and the open tree. Raises EngineError for a length inside the open tree."""

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        """Copy the first rows of `seq`. The caller guarantees that they hold these tokens.

        Raises EngineError for rows that are not committed, and where layers differ in the shapes of their rows.
        """

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        """Start the new sequence `seq` with these rows, as if they had been prefilled.

        Raises EngineError, and leaves everything unchanged, for a sequence that exists, rows of another model, span of
        layers, shape or number format, and lack of free blocks. The values of the rows are not checked.
        """

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:
        """Start the new sequence `seq` with rows that need not be computed; return how many, at least one row fewer
        than there are tokens.

        The rows are the longest prefix of `tokens` that sequences of the same salt have cached, or those of `stored`
        (a prefix of `tokens`) if there are more of them and they can be imported. The sequence's own rows are cached
        for later ones: full blocks as soon as they are committed, the rest when it is released. With 0 rows the
        sequence begins with its first segment, as ever. Raises EngineError for a sequence that exists.
        """

    def release(self, seq: SeqId) -> None:
        """Free the sequence. Unknown ids are ignored: a request may be cancelled before its first forward."""

    def length(self, seq: SeqId) -> int:
        """Rows cached, provisional ones included; 0 for an unknown sequence."""


class SequenceEngine(Sequences, Protocol):
    """What all engines have in common: everything but how a batch is run.

    Owned by one thread; no method may be called from another. The caller chooses sequence ids; a sequence begins with
    its first segment (start 0). A chain's rows are committed. A tree's rows are provisional, and the tree stays open
    until a `prune` leaves nothing of it or a `truncate` drops it. Until then each segment of that sequence must grow
    the tree. Raises EngineError for a row that was never written, a position beyond `max_positions`, or no free blocks.
    """

    @property
    def info(self) -> ModelInfo: ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        """Tokens of rows that forwards have returned, in one pass over all of them; the reference's on every row."""

    @property
    def block_size(self) -> int:
        """Rows per block of KV cache; 1 for engines without blocks."""

    def free_rows(self) -> int | None:
        """Rows that can still be allocated; None without a fixed bound."""

    def check(self) -> None:
        """Assert the engine's invariants. Called by tests after every step and by the worker when idle."""


class Engine(SequenceEngine, Protocol):
    """Runs one batch after the other."""

    def forward(self, batch: Batch) -> Output:
        """Run one batch to its end. The worker calls it through `ImmediateRunner`. Raises EngineError."""


Ticket = NewType("Ticket", int)


@runtime_checkable
class BatchRunner(Protocol):
    """Runs batches; their results come in the order of submission."""

    @property
    def depth(self) -> int:
        """Batches that should be under way so that no part of the engine waits; more may be."""

    def submit(self, batch: Batch) -> Ticket:
        """Returns before the batch has run, unless the engine has nothing to run it beside. Raises EngineError, without
        effect, for a batch that cannot run."""

    def is_ready(self, ticket: Ticket) -> bool:
        """`collect` of the oldest ticket returns at once."""

    def collect(self, ticket: Ticket) -> Output:
        """The result of the oldest batch under way. Waits for it. Raises EngineError for one that failed: its sequences
        are then to be released, and batches behind it that hold them fail as well."""

    def notify(self, callback: Callable[[], None]) -> None:
        """`callback` is called, on any thread, whenever a batch has become ready."""


@runtime_checkable
class SamplesAhead(Protocol):
    """A runner that is far from its caller, and samples rows where they are as soon as they are computed."""

    gone: str | None  # why no batch can run now, though one may later; read on any thread

    def sample_ahead(self, ticket: Ticket, rows: Sequence[tuple[RowSampling, ...] | None]) -> None:
        """How the rows of a batch just submitted will be sampled: of each segment its `logits_rows()`, or None where
        that is unknown. `sample` of these very objects then need not ask. Never changes an answer."""


class AsyncEngine(SequenceEngine, BatchRunner, Protocol):
    """An engine with several batches under way, such as a pipeline of stages or one on another machine.

    The caller sees its sequences as if every batch it has submitted had run: `length`, `free_rows` and the checks of a
    batch count what was sent, and changes of a sequence take effect behind the batches submitted before them. A prune
    alone may overtake them, so that rows nobody waits for any more are not computed (`SequenceTable`).
    """


@runtime_checkable
class Rotates(Protocol):
    """An engine whose exported keys can be turned to other positions."""

    @property
    def frequencies(self) -> Sequence[float]:
        """Of the rotary embedding of every layer, as in `core.batching.block_manager.turned`; empty: they cannot."""


class TextModel(Protocol):
    """Tokenizer with its chat template, as the rest of the program uses it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def fingerprint(self) -> str:
        """Equal iff two models give every id the same meaning."""

    @property
    def one_document(self) -> bool:
        """The model was trained to read a single one: several are read apart, see `wire.messages.Options`."""

    @property
    def thinking(self) -> tuple[str, str] | None:
        """As in `ModelInfo`."""

    @property
    def tools(self) -> str:
        """As in `ModelInfo`."""

    def encode(self, text: str, *, own: bool = False) -> list[int]:
        """Encode plain text, in which names of special tokens are text. own: it is of the model's own format, such as a
        mark, and they are these tokens."""

    def raw(self, text: str) -> list[int]:
        """Encode a prompt that is not a conversation, to at least one token.

        Names of special tokens in it are parsed as special, and the model's own beginning (BOS) is prepended.
        """

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_name(self, token: int) -> str:
        """Printable form of a token; for a special token its name."""

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token adds to the text; empty for special tokens that are no marks of thinking or calls."""

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        template_kwargs: Mapping[str, object] = NO_FIELDS,
    ) -> list[int]:
        """Render the conversation with the chat template, up to where the assistant's answer begins, and encode it.

        A last message of the assistant is the answer's beginning; an empty one begins a new turn. template_kwargs:
        further variables of the template.
        """

    def document_prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        document: str,
        *,
        template_kwargs: Mapping[str, object] = NO_FIELDS,
    ) -> tuple[list[int], list[int], list[int]]:
        """(preamble, document, tail) ids, encoded separately so that a document's KV can be reused; likewise."""


class FarModel(Protocol):
    """A model of which no row is kept here, so that it is no engine: see `engine.remote`."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def block_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine of any kind and its tokenizer: what a node answers with."""

    engine: Engine | AsyncEngine | FarModel
    tokenizer: TextModel


@dataclass(frozen=True, slots=True)
class LoadedModel(ServedModel):
    """Likewise, of this process: its engine runs one batch after the other."""

    engine: Engine


class ImmediateRunner:
    """Runs each batch of an engine when it is submitted."""

    depth = 1

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last = 0
        self._outputs: deque[tuple[Ticket, Output]] = deque()

    def submit(self, batch: Batch) -> Ticket:
        output = self._engine.forward(batch)
        self._last += 1
        self._outputs.append((Ticket(self._last), output))
        return Ticket(self._last)

    def is_ready(self, ticket: Ticket) -> bool:
        return bool(self._outputs) and self._outputs[0][0] == ticket

    def collect(self, ticket: Ticket) -> Output:
        oldest, output = self._outputs.popleft()
        assert oldest == ticket, f"batch {oldest} comes before {ticket}"
        return output

    def notify(self, callback: Callable[[], None]) -> None:
        """Never calls: every batch is ready when `submit` returns."""


def runner_of(engine: Engine | AsyncEngine) -> BatchRunner:
    return engine if isinstance(engine, BatchRunner) else ImmediateRunner(engine)


def delay_forwards(engine: Engine, forward_s: float, row_s: float = 0.0) -> Engine:
    """The engine itself, whose forwards from now on take at least forward_s + row_s * (scored rows - 1) seconds, as on
    a slower machine: it sleeps on its thread, and computes what it did. Raises EngineError for a negative time.

    Only scored rows count: those of decodes and trees. A prefill scores one row or none, so each of its chunks costs
    one forward, however long. Prunes and other operations are not delayed, nor is a batch that is refused.
    """
    if min(forward_s, row_s) < 0:
        raise EngineError(f"a forward takes no negative time: {forward_s} s and {row_s} s a row were asked for")
    run = engine.forward

    def forward(batch: Batch) -> Output:
        start = time.perf_counter()
        output = run(batch)
        num_scored = sum(map(len, output.logits))
        remaining = start + forward_s + row_s * max(0, num_scored - 1) - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        return output

    engine.forward = forward  # type: ignore[method-assign]  # of this one
    return engine
