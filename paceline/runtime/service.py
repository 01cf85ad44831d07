"""The protocol between the HTTP surface and the program behind it, with its requests, events and results.

`paceline.api` generates and embeds through this protocol, and reaches files and vector stores through
`Service.library`. Server and device agent implement it with `runtime.node.Node`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.energy import EnergyUse
from paceline.core.policy import Budget, Decision
from paceline.core.sampling.sampler import Constraint, SamplingParams
from paceline.core.side import HandoffLevel
from paceline.engine.base import ModelInfo
from paceline.rag.records import MANAGED, MIN_SCORE, Passage, Selection
from paceline.strategies.base import AUTO as AUTO
from paceline.strategies.base import FinishReason, Side, Wish
from paceline.workflow.flows import WorkflowName

if TYPE_CHECKING:
    from paceline.rag.store.library import Library

OnLoss = Literal["continue", "pause", "fail"]
ModelState = Literal["loaded", "loading", "unloaded"]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    state: ModelState
    is_joint: bool  # it may write together with the other side


T = TypeVar("T")


class SharedPrompt:
    """Of requests that differ in their sampling alone: what the first of them that is prepared finds out for all."""

    documents: tuple[int, int] | None = None  # selected ones of this side, and removals of any
    prompts: Any = None  # as `runtime.preparation` has read them


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """What is continued: a conversation, or raw tokens."""

    messages: tuple[Mapping[str, str], ...] = ()  # role and content, parts already joined
    tokens: tuple[int, ...] | None = None  # raw tokens to continue; then `messages` is empty and no document is used
    template: Mapping[str, object] = field(default_factory=dict)  # further variables of the chat template
    predicted: str = ""  # what the answer may turn out to be: drafts alone, which change no token
    shared: SharedPrompt | None = field(default=None, compare=False)  # with other choices of one call


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Which form the text has, where it ends, and what is told of its tokens."""

    max_tokens: int | None = None  # None: up to the context
    default_tokens: int | None = None  # limit where neither the request nor a setting has one; None: the context
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # that end the answer as the model's own do
    constraint: Constraint | None = None  # on the text and its end
    thinking_tokens: int | None = None  # of what the model thinks before, at most; None: no bound but that of all
    timeline: bool = False  # the result has one


@dataclass(frozen=True, slots=True)
class Sources:
    """Which documents the answer reads, and who looks for them."""

    selection: Selection = MANAGED  # of this side's documents; the peer searches its own
    min_score: float = MIN_SCORE  # minimum cosine similarity of a passage of this side
    passages: tuple[Passage, ...] | None = None  # of this side, to be read instead of what a search finds
    other_passages: tuple[Passage, ...] = ()  # with them, of the other side
    workflow: WorkflowName | None = None  # agents that search before the answer; None: one search
    steps: bool = False  # the client is told of each of their steps as it ends


@dataclass(frozen=True, slots=True)
class Joining:
    """The other side's part in the answer."""

    on_loss: OnLoss = "continue"
    device: str | None = None  # server only: device to join, named by the request or bound to its key
    names_device: bool = False  # the request itself names `device`, and is refused where that may not be asked
    handoff: HandoffLevel | None = None  # of a device that may answer by itself; None: as its settings say
    any_device: bool = True  # without `device`, the only linked one joins; not for a key that is bound to none


@dataclass(frozen=True, slots=True)
class Account:
    """For whom the answer is written."""

    owner: str = ""  # a name, never a secret; n-grams and cached KV blocks are shared within one owner
    asker: str = ""  # server only: name of the key, which a device is told
    guest_key: str = ""  # of a text for a peer: KV is shared within it, and n-grams are forgotten with the text
    criticality: float = 0.0  # s of a workflow that wait for this text; 0 without one
    # Id of the client's request, in the logs of both sides; random, and says nothing of what is asked for.
    trace: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request of one answer; `n` choices are `n` requests."""

    prompt: AskedPrompt
    wish: Wish = field(default_factory=Wish)
    output: OutputForm = OutputForm()
    sources: Sources = Sources()
    joining: Joining = Joining()
    account: Account = Account()
    model: str = ""  # its served name; empty: the default


@dataclass(frozen=True, slots=True)
class Citation:
    """A passage behind an answer. The text of a device's passage is never sent to a cloud's client."""

    side: Side
    document: str  # file name or title
    passage: str  # text; empty where it may not leave its side
    score: float
    file_id: str = ""  # as `Passage.file_id`; empty for a document of the other side
    store: str = ""  # its collection; empty likewise
    chunk_id: int | None = None  # as `Passage.chunk_id`; None likewise
    url: str = ""  # of a page of the web, which the side has read and is of neither
    place: str = ""  # as `Passage.place`; empty where it may not leave its side
    peer_chunk: int | None = None  # id of a chunk of the other side, which shows it under that


def each_once(citations: Iterable[Citation]) -> tuple[Citation, ...]:
    """Each passage as it was found first."""
    known: dict[Hashable, Citation] = {}
    for each in citations:
        known.setdefault((each.side, each.document, each.chunk_id, each.peer_chunk, each.passage, each.url), each)
    return tuple(known.values())


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: str
    logprob: float
    bytes: tuple[int, ...]


Logprobs = tuple[TokenLogprob, tuple[TokenLogprob, ...]]  # a token, and the most probable ones in its place


@dataclass(frozen=True, slots=True)
class WorkflowStep:
    """A stage of a workflow that has ended."""

    stage: str  # rewrite, search, ...
    state: Literal["done", "failed"]  # failed: what the workflow did instead is in `text`
    unit: str  # that it ran on, the last one of several; empty if on none
    seconds: float  # s, from its first launch to its end
    text: str  # what came of it, a line or more


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Final text: whole characters, without a suffix that may begin a stop string."""

    text: str
    tokens: int  # output tokens since the last delta
    lane: Side | None = None  # side whose documents decided the last token
    logprobs: tuple[Logprobs, ...] = ()  # of each of those tokens
    step: WorkflowStep | None = None  # instead of text, where a request wants `steps`
    thinking: bool = False  # the text is what the model thinks before it answers


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened in an answer at one side, or several alike that were near in time, see
    `runtime.sessions.driver`."""

    ms: float  # since the answer was asked for
    side: Side
    kind: str
    of: str  # which message, or which strategy; empty for other kinds
    number: float
    took_ms: float  # 0 where it took no time


class ReadPassage(msgspec.Struct, frozen=True):
    """A passage of the other side, as this side was told of it."""

    chunk: int  # its id there; 0 for one that stays there
    score: float
    text: str  # hash of it


class AnswerRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer, or one part or stretch of it, was written from, so that it can be computed again. Kept with it:
    no text of a document is in it, nor of the conversation."""

    side: Side
    model: str  # fingerprint, number format and backend
    strategy: str
    options: str  # JSON of the strategy's
    sampling: SamplingParams
    constraint: Constraint | None
    messages: int  # of the conversation
    limit: int  # output tokens of the answer, at most
    prompts: list[tuple[str, float | None]]  # of this side's branches: hash of each, and R
    tokens: list[int]  # those within the stop string that ended it included
    start: int = 0  # output tokens of stretches before this one
    ends: bool = False  # a token that ends the text follows
    passages: list[int] = []  # of this side's documents: ids of chunks
    others: list[ReadPassage] = []  # read by the other side
    borrowed: list[ReadPassage] = []  # of the other side, read by this one
    peer_model: str = ""  # fingerprint
    fault: str = ""  # why it cannot be computed again, as a sentence


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that is not the one which the strategy gives after the tokens before it."""

    index: int  # in the answer
    token: int | None  # None: the text ends there
    owed: int
    names: tuple[str, str]  # of both


@dataclass(slots=True)
class AnswerProof:
    """An answer computed again, token by token, each after those that are recorded."""

    tokens: int = 0  # the end counts as one, where a token decided it
    asked: int = 0  # of them, judged by what both sides have written once more
    differing: list[Difference] = field(default_factory=list)
    unproven: dict[str, int] = field(default_factory=dict)  # tokens by the reason why not, a sentence

    @property
    def proven(self) -> int:
        return self.tokens - len(self.differing) - sum(self.unproven.values())


@dataclass(frozen=True, slots=True)
class Handoff:
    """Who wrote an answer that a device has begun by itself."""

    decided: Side
    at: int | None  # tokens of the device's before the cloud's; None: all are the device's
    score: float  # chance that the device's answer would be as good as the cloud's, as it was seen last
    threshold: float  # most risk that was to be taken, for the tokens that the cloud was thought to write
    saved_cloud_tokens: int  # that the device has written
    risk: float  # that was taken: chance that what the device has written is worse


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Last event of every generation that did not fail."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    strategy: str
    strategy_reason: str  # for the choice of the strategy, a sentence
    stop: str = ""  # the stop string that ended the text, if one did
    degraded: str | None = None  # "device_lost", "device_missing", "device_refused", and likewise for the cloud
    citations: tuple[Citation, ...] = ()
    found: tuple[Citation, ...] = ()  # all passages of this side's prompts, whether they decided a token or not
    stats: Mapping[str, float] = field(default_factory=dict)
    energy: Mapping[Side, EnergyUse] = field(default_factory=dict)  # of the sides whose energy is known here
    end: Logprobs | None = None  # of the token that ended the answer, if one did and logprobs are requested
    steps: tuple[WorkflowStep, ...] = ()  # of the workflow before it, if there was one
    timeline: tuple[Moment, ...] = ()  # where the request wants it
    policy: Decision | None = None  # where a rule decided, or a document waits for its owner's word
    handoff: Handoff | None = None  # of an answer that a device has begun by itself
    records: tuple[AnswerRecord, ...] = ()  # of its parts and stretches


GenerateEvent = TextDelta | GenerationResult


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    detail: Mapping[str, str | int | bool]  # shown by /readyz: model, documents, link


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine has done since the start, and what is under way; shown by /metrics."""

    answers: int = 0  # whose client is on this side
    steps: int = 0  # forward passes
    rows: int = 0  # in them
    cached_rows: int = 0  # not computed, because they were cached or stored
    preemptions: int = 0  # of groups
    kv_rows: int | None = None  # of the engine's memory; None without a bound
    kv_free_rows: int | None = None  # that no sequence holds
    waiting: int = 0  # groups of answers that wait for memory
    links: int = 0  # that are up
    rtt_s: float | None = None  # the longest of theirs; None before one is measured
    sent_bytes: int = 0  # on all links since the start, in frames
    received_bytes: int = 0
    # Bytes of messages to other sides since midnight or the start, by hour of this machine's day and kind of message.
    sent_today: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """A link that is up, as `/v1/status` shows it."""

    peer: str  # the device's name; of the cloud `cloud`
    rtt_s: float | None  # s, smoothed; None: not measured yet
    bandwidth: float | None  # bytes a second towards the peer; None: never the limit
    sent: Mapping[str, int]  # bytes of answers and searches since the link is up, by kind of message
    received: int = 0  # bytes of frames, likewise
    asked: int = 0  # answers, searches and texts that this side has asked the peer to take part in, likewise
    asks: int = 0  # that the peer has asked for here
    protocol: int = 0  # version of the link's


@dataclass(frozen=True, slots=True)
class EmbedderInfo:
    """Embedder of this side, as shown to clients."""

    name: str  # served name
    dimensions: int
    max_tokens: int | None  # of a text, which is truncated beyond; None: no bound


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    vectors: NDArray[np.float32]  # (texts, dimensions), unit norm
    tokens: int  # of all texts together


@dataclass(frozen=True, slots=True)
class Reranked:
    relevance: tuple[float, ...]  # of each passage: a probability from a cross-encoder, else a mean of cosines
    tokens: int  # of query and passages, in the embedder's vocabulary


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would happen to a question, and why; nothing of it is sent."""

    decision: Decision
    strategy: str
    why: str
    leaves: str  # what would go to the other side
    documents: Sequence[tuple[str, Sequence[str]]]  # names of those found, with their rules
    left: Mapping[Budget, float]  # of budgets, today


class Service(Protocol):
    """One side of the program, as its HTTP surface sees it."""

    side: Side
    library: Library | None  # files and vector stores of this side; None where it keeps no documents
    # Further names for clients, with the name of a chat model, or of an embedder, that each stands for.
    aliases: Mapping[str, str]
    debug_options: bool  # requests may choose forms of strategies that are for measurements

    async def find(self, work: Callable[[], T], owner: str) -> T:
        """Call `work`, a search of this side's documents, on its units and off the event loop, in its owner's turn."""

    def models(self) -> Sequence[ModelInfo]:
        """Models by the name they are served under; the first is the default. Of one that is not loaded, number format,
        backend and number of weights may not be known. Everywhere else an empty name is the default's."""

    def model_status(self, name: str) -> ModelStatus:
        """Of one of `models`. One that is not loaded is loaded by the first call that needs it."""

    def embedders(self) -> Sequence[EmbedderInfo]:
        """Embedders for `embed`; none where this side keeps no documents."""

    def strategies(self) -> Sequence[str]: ...

    def workflows(self) -> Sequence[WorkflowName]:
        """Those that can run here: `research` only where the web can be searched."""

    def of(self, model: str) -> AbstractAsyncContextManager[OneModel]:
        """One of `models`, which is there as long as this context. Raises RequestError where it cannot be loaded."""

    async def embed(self, texts: Sequence[str], owner: str) -> Embeddings:
        """Embed texts. Raises RequestError where there is no embedder or a text is too long."""

    def rerankers(self) -> Sequence[str]:
        """Names for `rerank`: of the one there is, or none."""

    async def rerank(self, query: str, passages: Sequence[str], owner: str) -> Reranked:
        """Raises RequestError where there is no reranker."""

    async def wait_for_room(self, owner: str) -> None:
        """Raises RequestError (429) where `prepare` would refuse any request of this owner for some time: what must be
        refused is not read first."""

    async def prepare(self, request: GenerateRequest) -> Generation:
        """Check, retrieve, tokenize and admit. Raises RequestError before anything has started."""

    async def confirm(self, owner: str, document: str) -> str:
        """Confirm a document that the policy asks for, by its id. Returns its name. Raises RequestError for an owner
        who may not."""

    async def forget_answers(self, owner: str) -> None:
        """Erase what this owner's answers have taught look-up tables, which hold the latest of them word for word."""

    def readiness(self) -> Readiness: ...

    def load(self) -> Load: ...

    def links(self) -> Sequence[LinkStatus]: ...


class OneModel(Protocol):
    """What a loaded model does for requests besides answers."""

    async def tokenize(self, text: str, owner: str) -> tuple[int, ...]:
        """Tokens of a raw prompt, at least one. Raises RequestError."""

    async def tokenize_chat(self, messages: Sequence[Mapping[str, str]], owner: str) -> tuple[int, ...]:
        """Tokens of a conversation without documents, up to the start of its answer. Raises RequestError."""

    async def token_bytes(self, tokens: Sequence[int], owner: str) -> tuple[bytes, ...]:
        """Bytes of each token of a raw prompt; the name of a special token."""

    async def check(self, request: GenerateRequest, *, room: int) -> None:
        """Raises RequestError for a raw-token request that `prepare` would refuse, or whose prompt is empty, has
        unknown ids or leaves fewer than `room` positions of the context. Starts nothing."""

    async def score(self, prompt: Sequence[int], top: int, owner: str) -> Sequence[Logprobs]:
        """Logprobs of every token of a raw prompt but the first, given its prefix, with the `top` most probable tokens.

        The prompt must have been checked. Cancellation releases its KV rows. Raises PacelineError.
        """

    async def explain(self, request: GenerateRequest, key: str | None) -> Explanation:
        """What `prepare` would do. key: the name of another than the one that asks, for an owner alone. Raises
        RequestError as `prepare` does."""

    async def prove(self, request: GenerateRequest, records: Sequence[AnswerRecord]) -> AnswerProof:
        """Compute an answer again from what it was written from. request: as it was asked for, of which the
        conversation, the sources and the account count. Raises RequestError (429) where there is no room."""


class Generation(Protocol):
    """An admitted request. Must be run or closed, exactly once."""

    @property
    def prompt_tokens(self) -> int:
        """Of the longest prompt, as the result will say; 0 where it is not known before the answer."""

    def run(self) -> AsyncGenerator[GenerateEvent]:
        """Yield text deltas, then one GenerationResult. Closing the iterator cancels the generation and frees its
        blocks.

        Raises PacelineError when the answer cannot continue.
        """

    async def aclose(self) -> None: ...
