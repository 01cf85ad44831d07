"""Engine contract: protocols and values shared by `fake`, `hf`, `paged` and pipeline stages.

Ten properties, verified for every engine by `tests/engine/test_contract.py`: (1) splitting a chain changes nothing;
(2) a tree row scores as the chain along its path; (3) commit then continue equals a fresh prefill; (4) truncate then
continue likewise; (5) the other sequences of a batch do not change a sequence's scores, up to the dtype's tolerance;
(6) stages composed equal the whole; (7) a tree scored in parts equals the tree scored at once; (8) a tree that grows
after a partial commit scores as the chains along its paths; (9) exported and imported rows, then continued, equal a
fresh prefill; (10) sampled rows have the reference's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.aggregation.branches import BranchMixture, sample_mixed_rows
from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import RowSampling, SampledRow, sample_row
from paceline.core.sampling.sampler import NO_DEFAULTS, SamplingDefaults


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Public description of a model, for peers and clients."""

    name: str
    fingerprint: str  # sha256 hex over config and weights' identity; equal iff the same model
    vocab_size: int
    max_positions: int  # rows one sequence may have
    dtype: str
    backend: str  # "fake", "hf" or "paged"
    sampling: SamplingDefaults = NO_DEFAULTS  # the makers' recommendation


class Logits(Protocol):
    """Logits of one segment's `logits_rows()`, kept where the model computed them as long as this object lives."""

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
    """Result of one forward: the logits of each segment's `logits_rows()`, in batch order."""

    logits: tuple[Logits, ...]

    @staticmethod
    def dense(dists: Iterable[tuple[Dist, ...]]) -> Output:
        return Output(tuple(DenseLogits(rows) for rows in dists))

    @property
    def dists(self) -> tuple[tuple[Dist, ...], ...]:
        """The distributions of every row."""
        return tuple(logits.dists() for logits in self.logits)


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Rows to sample: `branches` holds them in order, in parts where the scheduler has cut their segment.

    mixture: of several branches, whose rows are mixed; the last branch may have more rows, see `sample_mixed_rows`.
    """

    branches: tuple[tuple[Logits, ...], ...]
    rows: tuple[RowSampling, ...]
    mixture: BranchMixture | None = None

    def by_reference(self) -> tuple[SampledRow, ...]:
        """The definition of the answer, from the rows' distributions."""
        branches = [[dist for part in parts for dist in part.dists()] for parts in self.branches]
        if self.mixture is not None:
            return sample_mixed_rows(branches, self.rows, self.mixture)
        return tuple(sample_row(dist, row) for dist, row in zip(branches[0], self.rows, strict=True))


class Engine(Protocol):
    """Runs batches. Owned by one thread; no method may be called from another.

    The caller chooses sequence ids; a sequence begins with its first segment (start 0). A chain's rows are committed.
    A tree's rows are provisional, and the tree stays open until a `commit` leaves nothing of it or a `truncate` drops
    it. Until then each segment of that sequence must grow the tree and repeat the parents of its rows; the sequence
    cannot be forked. Raises EngineError for a row that was never written, a position beyond `max_positions`, or no
    free blocks.
    """

    @property
    def info(self) -> ModelInfo: ...

    def forward(self, batch: Batch) -> Output: ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        """Tokens of rows that forwards have returned, in one pass over all of them; the reference's on every row."""

    def commit(self, seq: SeqId, keep: Sequence[int], rest: Sequence[int] = ()) -> None:
        """Commit the rows `keep` of the open tree, leave the rows `rest` open, and drop all others.

        Both index the open tree's rows from 0, over all segments that wrote it. keep: a path from a root, or empty.
        rest: ascending; the parent of each row is in `rest` too or is the last of `keep` (if `keep` is empty, a root
        has none). Afterwards the open tree is `rest` in its order, its parents renumbered, -1 where the parent has
        been committed.
        """

    def truncate(self, seq: SeqId, length: int) -> None:
        """Drop rows from `length` on, and the open tree. Raises EngineError for a length inside the open tree."""

    def fork(self, seq: SeqId, into: SeqId) -> None:
        """Start the new sequence `into` with the rows of `seq`."""

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
        (a prefix of `tokens`) if there are more of them and they can be imported. Full blocks of the sequence are
        cached from now on, for later ones. With 0 rows the sequence begins with its first segment, as ever. Raises
        EngineError for a sequence that exists.
        """

    def release(self, seq: SeqId) -> None:
        """Free the sequence. Unknown ids are ignored: a request may be cancelled before its first forward."""

    def length(self, seq: SeqId) -> int:
        """Rows cached, provisional ones included; 0 for an unknown sequence."""

    @property
    def block_size(self) -> int:
        """Rows per block of KV cache; 1 for engines without blocks."""

    def free_rows(self) -> int | None:
        """Rows that can still be allocated; None without a fixed bound."""

    def check(self) -> None:
        """Assert the engine's invariants. Called by tests after every step and by the worker when idle."""


class TextModel(Protocol):
    """Tokenizer with its chat template, as the rest of the program uses it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def fingerprint(self) -> str:
        """Equal iff two models give every id the same meaning."""

    def encode(self, text: str) -> list[int]:
        """Encode plain text; the names of special tokens in it are never parsed as special."""

    def raw(self, text: str) -> list[int]:
        """Encode a prompt that is not a conversation, to at least one token.

        Names of special tokens in it are parsed as special, and the model's own beginning (BOS) is prepended.
        """

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_name(self, token: int) -> str:
        """Printable form of a token; for a special token its name."""

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token adds to the text; empty for special tokens."""

    def chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Render the conversation with the chat template, up to the start of the assistant's answer, and encode it."""

    def document_prompt(
        self, messages: Sequence[Mapping[str, object]], document: str
    ) -> tuple[list[int], list[int], list[int]]:
        """(preamble, document, tail) ids, encoded separately so that a document's KV can be reused."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine and its tokenizer."""

    engine: Engine
    tokenizer: TextModel
