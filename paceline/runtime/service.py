"""What the HTTP surface asks of the program behind it, and nothing of how it is done.

`paceline.api` knows this protocol only; the server and the device agent each provide one (`runtime.node.Node`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.constraint import Constraint
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import ModelInfo
from paceline.rag.records import DEFAULT_COLLECTION, MIN_SCORE
from paceline.strategies.base import FinishReason, Side
from paceline.strategies.strategy import Privacy
from paceline.wire.messages import DraftLimits

if TYPE_CHECKING:
    from paceline.rag.store.library import Library

OnLoss = Literal["continue", "pause", "fail"]
DraftMode = Literal["tree", "chain", "sequence", "none"]  # how far and how broadly the sides draft
DRAFT_MODES: dict[DraftMode, DraftLimits] = {
    "tree": DraftLimits(),
    "chain": DraftLimits(width=1, rows=1),  # DRAGON as published
    "sequence": DraftLimits(width=1, rows=1, ahead=20, whole_sequences=True),
    "none": DraftLimits(width=1, rows=1, ahead=0),  # token by token
}


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One answer to write. `n` choices are `n` of these."""

    messages: tuple[Mapping[str, str], ...]  # role and content, parts already joined
    sampling: SamplingParams
    max_tokens: int | None  # None: up to the context
    stop: tuple[str, ...] = ()
    strategy: str = "auto"
    device: str | None = None  # server only: which device joins; None: the one bound to the key, or the only one
    documents: int = 2  # how many passages each side reads at most; 0: none
    on_loss: OnLoss = "continue"
    privacy: Privacy = "document-private"
    top_logprobs: int | None = None  # None: no logprobs
    seeded: bool = True  # the client named the seed: the same one must give the same text
    options: Mapping[str, object] = field(default_factory=dict)  # of strategies, by the fields of their options structs
    owner: str = ""  # whose request: what it teaches about text serves the same owner alone. A name, never a secret
    constraint: Constraint | None = None  # what the text must look like
    collections: tuple[str, ...] = (DEFAULT_COLLECTION,)  # this side's documents that are read; the peer reads its own
    min_score: float = MIN_SCORE  # the least cosine of a passage of this side that is read
    document_ids: frozenset[str] | None = None  # of those collections only these documents, by id; None: all
    prompt: tuple[int, ...] | None = None  # continue these tokens; then `messages` is empty and no document is read


@dataclass(frozen=True, slots=True)
class Citation:
    """A passage of which an answer was written. A device's text stays there: a cloud's client gets none of it."""

    side: Side
    document: str  # file name or title
    passage: str  # its text; empty where it may not leave its side
    score: float
    file_id: str = ""  # as `Passage.file_id`; empty where the document lies at the other side
    store: str = ""  # the collection it was found in; empty likewise


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: str
    logprob: float
    bytes: tuple[int, ...]


Logprobs = tuple[TokenLogprob, tuple[TokenLogprob, ...]]  # a token, and the most probable ones in its place


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is final: never half a character, never the beginning of a stop string, never taken back."""

    text: str
    tokens: int  # how many output tokens it took since the last piece
    lane: Side | None = None  # whose documents decided it
    logprobs: tuple[Logprobs, ...] = ()  # of each of those tokens


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The last event of every generation that did not fail."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    strategy: str  # the one that wrote it
    why: str  # why it was chosen, a sentence
    degraded: str | None = None  # "device_lost", "cloud_lost", "device_missing", "cloud_missing"
    citations: tuple[Citation, ...] = ()
    found: tuple[Citation, ...] = ()  # all that this side read for it, whether it decided a token or not
    stats: Mapping[str, float] = field(default_factory=dict)
    end: Logprobs | None = None  # of the token that ended the answer, where logprobs are asked for and one did


GenerateEvent = TextDelta | GenerationResult


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    detail: Mapping[str, str | int | bool]  # shown by /readyz: model, documents, link


@dataclass(frozen=True, slots=True)
class EmbedderInfo:
    """What turns texts into vectors here, as clients know it."""

    name: str  # as it is served
    dimensions: int
    max_tokens: int | None  # of a text; what is beyond is not read. None: no bound


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    vectors: NDArray[np.float32]  # (texts, dimensions), unit norm
    tokens: int  # of all texts together


class Service(Protocol):
    """One side of the program, as its HTTP surface sees it."""

    @property
    def side(self) -> Side: ...

    @property
    def library(self) -> Library | None:
        """Files and vector stores of this side; None where it keeps no documents."""

    def models(self) -> Sequence[ModelInfo]:
        """Models by the name they are served under; the first is the default."""

    def embedders(self) -> Sequence[EmbedderInfo]:
        """What `embed` can be asked for; none where this side keeps no documents."""

    def strategies(self) -> Sequence[str]: ...

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw prompt, at least one. Raises RequestError."""

    async def token_bytes(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """What each token of a raw prompt stands for in its text; special tokens by their names."""

    def check(self, request: GenerateRequest, *, room: int) -> None:
        """Raises RequestError for what `prepare` would not do to raw tokens, without doing anything: also for a prompt
        that is empty, that holds unknown ids, or behind which the context has not room for so many tokens."""

    async def score(self, prompt: Sequence[int], top: int) -> Sequence[Logprobs]:
        """Of every token of a raw prompt but the first, given those before it, with the `top` most probable ones.

        The prompt must have been checked. Raises PacelineError. Cancelling it frees its rows.
        """

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        """Raises RequestError where there is no embedder or a text is too long."""

    async def prepare(self, request: GenerateRequest) -> Generation:
        """Check, retrieve, tokenize and admit. Raises RequestError; nothing has started if it does."""

    def readiness(self) -> Readiness: ...


class Generation(Protocol):
    """An admitted request. Must be run or closed, exactly once."""

    def run(self) -> AsyncIterator[GenerateEvent]:
        """Pieces, then one Done. Closing the iterator cancels the generation and frees its blocks.

        Raises PacelineError when the answer cannot go on.
        """

    async def aclose(self) -> None: ...
