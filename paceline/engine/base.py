"""What every engine is: the contract that `tests/engine/test_laws.py` holds `fake`, `hf`, `paged` and stages to.

Nine laws: (1) splitting a chain changes nothing; (2) a tree row scores as the chain along its path; (3) commit then
continue equals a fresh prefill; (4) truncate likewise; (5) who else is in the batch does not matter, up to the
dtype's tolerance; (6) stages composed equal the whole; (7) a tree scored in parts equals the tree scored at once;
(8) a tree that goes on growing after a commit which left a part of it open scores as the chains along its paths;
(9) rows exported and adopted, then continued, equal a fresh prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import NO_DEFAULTS, SamplingDefaults


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a peer or a client may know of a model."""

    name: str
    fingerprint: str  # sha256 hex over config and weights' identity; equal iff the same model
    vocab_size: int
    max_positions: int  # rows one sequence may have
    dtype: str
    backend: str  # "fake", "hf" or "paged"
    sampling: SamplingDefaults = NO_DEFAULTS  # what its makers recommend


@dataclass(frozen=True, slots=True)
class Output:
    """Result of one forward: for each segment, in batch order, the distributions of its wanted rows."""

    dists: tuple[tuple[Dist, ...], ...]


class Engine(Protocol):
    """Runs batches. Owned by one thread; no method may be called from another.

    The caller chooses sequence ids; a sequence begins with its first segment (start 0). A chain's rows are cached for
    good. A tree's rows are provisional, and the tree stays open until a `commit` leaves nothing of it or a `truncate`
    drops it. Until then each segment of that sequence must grow it, and repeat the parents of its rows; it cannot be
    forked. Raises EngineError for a row that was never written, a position beyond `max_positions`, or no free blocks.
    """

    @property
    def info(self) -> ModelInfo: ...

    def forward(self, batch: Batch) -> Output: ...

    def commit(self, seq: SeqId, keep: Sequence[int], rest: Sequence[int] = ()) -> None:
        """Cached for good are now these rows of the open tree; of the others those of `rest` stay open.

        Both count the open tree's rows from 0, over all segments that wrote it. keep: a path from a root, or nothing.
        rest: rising; the parent of each is in it too, or is the last of `keep` (with nothing kept: a root has none).
        All other rows are dropped. The open tree is now `rest` in its order, its parents renumbered, -1 where the
        parent has been committed.
        """

    def truncate(self, seq: SeqId, length: int) -> None:
        """Drop rows from `length` on, the open tree with them. Raises EngineError for a length inside the open tree."""

    def fork(self, seq: SeqId, into: SeqId) -> None:
        """`into` starts with the rows of `seq`."""

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        """A copy of the first rows of `seq`, which hold these tokens: the caller must know. Raises EngineError for rows
        that are not there for good, and where layers differ so much that their rows have no common shape."""

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        """`seq`, new, starts with these rows, as if they had been prefilled.

        Raises EngineError, and leaves everything as it was, for a sequence that exists, rows of another model, span of
        layers, shape or number format, and lack of room. What the rows hold is not looked at.
        """

    def release(self, seq: SeqId) -> None:
        """Forget the sequence. Unknown ids are ignored: a request may be cancelled before its first forward."""

    def length(self, seq: SeqId) -> int:
        """Rows cached, provisional ones included; 0 for an unknown sequence."""

    @property
    def block_size(self) -> int:
        """Rows that memory is handed out in; 1 where there are no blocks."""

    def free_rows(self) -> int | None:
        """Rows that can still be written before memory runs out; None when there is no fixed bound."""

    def check(self) -> None:
        """Assert the engine's own invariants. Run by tests after every step and by the worker when idle."""


class TextModel(Protocol):
    """A tokenizer with its chat template, as far as the rest of the program needs it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def fingerprint(self) -> str:
        """Equal iff two models give every id the same meaning."""

    def encode(self, text: str) -> list[int]:
        """Plain text; the text of special tokens inside is never parsed as special."""

    def raw(self, text: str) -> list[int]:
        """A prompt that is no conversation, at least one token: the names of special tokens inside are those tokens,
        and what the model wants in front of every text is there."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_name(self, token: int) -> str:
        """How a token is written where every token must be seen; of a special one its name."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text; empty for special tokens."""

    def chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """The conversation rendered with the chat template, ready for the assistant's answer."""

    def document_prompt(
        self, messages: Sequence[Mapping[str, object]], document: str
    ) -> tuple[list[int], list[int], list[int]]:
        """(preamble, document, tail) ids, tokenised separately so that a document's KV can be reused."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine with the tokenizer that goes with it."""

    engine: Engine
    tokenizer: TextModel
