"""Machines of strategies: events in, effects out; and the records of strategies. A machine never waits.

Guarantees every machine gives, tested by `tests/strategies/conformance/` and `tests/strategies/test_fuzz.py`: `Emit`
never retracts; after `Finish` nothing; every `Forward` is answered by one `Scored` or `Sampled`; the same events, seed
and statistics give the same effects; no message from a peer raises.

Events and effects are msgspec's structs: a step of many answers makes hundreds of them, each in an eighth of the time
that a frozen dataclass takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol, TypeVar

import msgspec

from paceline.core.aggregation.weights import BranchMixture
from paceline.core.batching.segment import UNKNOWN, GoesOn, Segment, SeqId, StepSize
from paceline.core.clock import PeerRecord
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable, TextMemory
from paceline.core.energy import NOT_KNOWN, Spent
from paceline.core.offloading import EnergyQueue
from paceline.core.policy import PRIVACY_LEVELS as PRIVACY_LEVELS
from paceline.core.policy import Privacy as Privacy
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import Mask, RowSampling, SampledRow, SamplingParams
from paceline.core.side import SIDES as SIDES
from paceline.core.side import Side as Side
from paceline.core.side import other as other
from paceline.wire.messages import DEFAULT_OPTIONS, OpenSession, Options, SessionMessage

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Branch:
    """One prompt this side continues: a retrieved document followed by the conversation, or the conversation alone."""

    prompt: tuple[int, ...]
    score: float | None  # R: relevance / temperature of relevance, one scale on both sides; None: no document


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a machine takes part: its side, from where on, and with which peer. One that joins, or joins again, in
    mid-answer has non-empty `targets` or an `epoch` above 0."""

    side: Side
    faces_client: bool  # this side emits
    targets: tuple[int, ...] = ()  # output tokens already decided
    epoch: int = 0
    joined: bool = False  # the answer is written with a peer; a lost link is reported by `LinkLost`
    awaited: bool = False  # without it no target is decided
    private: bool = True  # the device never sends distributions that it computes from its documents
    rtt: float | None = None  # s, between the sides, where it is known
    bandwidth: float | None = None  # bytes a second towards the peer; None: no limit has been measured
    record: PeerRecord | None = None  # of earlier answers with it; read and written


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What decides the answer's tokens, given the models' distributions."""

    sampling: SamplingParams
    max_tokens: int
    eos_ids: frozenset[int]
    vocab_size: int  # of the tokenizer, equal on both sides; an engine's logits may be padded beyond
    mask: Mask | None = None  # the constraint of the answer; used only after `Retrieved`
    needs_dists: bool = True  # `Emit` has the distribution, for logprobs; else it may have none
    num_top: int = 0  # without it: ids of the distribution's head that `Emit` has, at least, of one side alone


@dataclass(frozen=True, slots=True)
class DraftingMeans:
    """What a machine drafts by: what this side has learnt, may spend and runs."""

    stats: OnlineStats | None = None  # of earlier answers; None: begin without any
    table: LookupTable | None = None  # n-grams of the client's earlier answers; read and written
    energy: EnergyQueue | None = None  # with this answer's energy budget, read and written; None: it has none
    depth: int = 1  # forwards that this side's engine has under way at once: above 1 for a pipeline of stages
    predicted: TextMemory | None = None  # what the client expects the text to be
    draft_positions: int = 0  # context of this side's draft model, tokens; 0: there is none, see `OnDraftModel`


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """Facts about a request that a machine needs before the first event."""

    seat: Seat
    output: OutputRules
    options: Options = DEFAULT_OPTIONS  # of the strategy's own type, see `Strategy.options`
    means: DraftingMeans = DraftingMeans()

    @property
    def takes_tokens(self) -> bool:
        """True if tokens that the engine samples suffice. A resumed answer needs distributions of its prefix."""
        return not self.output.needs_dists and not self.seat.targets


# ---- events: facts --------------------------------------------------------------------------------------------------
class Started(msgspec.Struct, frozen=True):
    """The first event."""

    now: float  # s, any origin


class Retrieved(msgspec.Struct, frozen=True):
    """Answer to `Retrieve`: at least one branch. The machine numbers its own sequences 0, 1, …"""

    branches: tuple[Branch, ...]
    max_new_tokens: int | None = None  # output tokens that fit the context behind the longest prompt; None: no bound


class Scored(msgspec.Struct, frozen=True):
    """Answer to `Forward` without `sampling`: distributions of the wanted rows, in row order, at temperature 1, before
    any processing."""

    ticket: int
    dists: tuple[Dist, ...]
    now: float = 0.0  # s
    step: StepSize = UNKNOWN
    spent: Spent = NOT_KNOWN
    scored: tuple[int, ...] | None = None  # which of the wanted rows these are; None: all, no prune has dropped one


class Sampled(msgspec.Struct, frozen=True):
    """Answer to `Forward` with `sampling`: the wanted rows' tokens, in row order."""

    ticket: int
    rows: tuple[SampledRow, ...]
    now: float = 0.0  # s
    step: StepSize = UNKNOWN
    spent: Spent = NOT_KNOWN
    scored: tuple[int, ...] | None = None  # as in `Scored`


class Received(msgspec.Struct, frozen=True):
    message: SessionMessage
    now: float = 0.0  # s


class TimerFired(msgspec.Struct, frozen=True):
    now: float
    rtt: float | None = None  # s, between the sides, as measured last
    bandwidth: float | None = None  # as in `Seat`, as measured last
    silence: float = 0.0  # s that nothing has come over the link although the peer was asked; to the front alone


class LinkLost(msgspec.Struct, frozen=True):
    """The peer is gone, for now or for good."""


class LinkBack(msgspec.Struct, frozen=True):
    """The peer can be reached again. Sent only to the side that faces the client."""


class Cancelled(msgspec.Struct, frozen=True):
    """The client left, a stop string was found ("stop"), or the session was closed by the peer."""

    reason: FinishReason = "cancelled"


class FromDraftModel(msgspec.Struct, frozen=True):
    """Answer to an `OnDraftModel(Forward)`."""

    answer: Scored | Sampled


class DraftModelLost(msgspec.Struct, frozen=True):
    """The draft model has failed in this answer: no forward on it is answered any more."""


OfPeer = Received | LinkLost | LinkBack
Event = Started | Retrieved | Scored | Sampled | FromDraftModel | DraftModelLost | TimerFired | Cancelled | OfPeer


# ---- effects -------------------------------------------------------------------------------------------------------
class Retrieve(msgspec.Struct, frozen=True):
    """Ask for the branches of this side's prompts, which the driver holds ready or builds."""


class Forward(msgspec.Struct, frozen=True):
    ticket: int
    segment: Segment
    sampling: tuple[RowSampling, ...] | None = None  # of each wanted row, see `Sampled`; None: distributions are wanted
    others: tuple[Segment, ...] = ()  # further branches with the same wanted rows; `segment` is the first one's
    mixture: BranchMixture | None = None  # of these branches, from which the rows are sampled
    path_only: bool = False  # rows of a tree to which no sampled token leads may be answered with `NOT_SAMPLED`
    goes_on: GoesOn | None = None  # None: it is not known what follows


class Prune(msgspec.Struct, frozen=True):
    """Commit rows of the open tree, leave some open, and drop the rest, those of forwards under way included. See
    `Engine.prune`."""

    seq: SeqId
    keep: tuple[int, ...]  # ids
    live: tuple[int, ...] = ()


class OnDraftModel(msgspec.Struct, frozen=True):
    """Carry out on the engine of this side's draft model, which there is with `DraftingMeans.draft_positions` alone.
    Its sequences and tickets are named apart from the target's."""

    effect: Forward | Prune


class Send(msgspec.Struct, frozen=True):
    message: SessionMessage


class OpenPeer(msgspec.Struct, frozen=True):
    """Ask the peer to take part (again), from these targets on. The driver adds the request, and closes an earlier
    session of the same answer."""

    targets: tuple[int, ...]
    epoch: int


class PassOver(msgspec.Struct, frozen=True):
    """The answer goes on without a peer that is silent or stuck. Its session stays open: what it still sends there is
    delivered, and shows that it is back; `OpenPeer` then replaces that session."""

    reason: str  # the end of a sentence


class ClosePeer(msgspec.Struct, frozen=True):
    """Close the session of a peer that takes too long, or has broken a rule of the answer. `LinkLost` follows."""

    fault: str = ""  # the rule, as the end of a sentence; a peer that has broken one does not come back


class WakeAt(msgspec.Struct, frozen=True):
    """Send `TimerFired` at this time. A later `WakeAt` replaces an earlier one."""

    time: float


class Emit(msgspec.Struct, frozen=True):
    """One output token, in order, once."""

    token: int
    # Where logprobs are wanted and this side has it: the model's own distribution, at temperature 1 before any
    # processing; of a mixture of both sides the one that the token was chosen from.
    dist: Dist | None = None
    lane: Side | None = None  # side whose documents it came from; None: neither clearly, or no document was read
    # This side's branches that decided it, where some did not; None: all of them alike, or it is not known.
    branches: frozenset[int] | None = None
    rest: float = 0.0  # mass of the tokens that `dist` lacks and that may have been chosen, where it is a head


class Finish(msgspec.Struct, frozen=True):
    """Last, once. The driver releases every sequence and closes the session with the peer."""

    reason: FinishReason
    stats: Mapping[str, float] = msgspec.field(default_factory=dict)
    end: Emit | None = None  # the end-of-text token, where one was sampled from a known distribution: not in the answer


Effect = Retrieve | Forward | Prune | OnDraftModel | Send | OpenPeer | PassOver | ClosePeer | WakeAt | Emit | Finish


class Machine(Protocol):
    """One side of one generation. `on` takes an event and returns the effects to carry out, in order."""

    def on(self, event: Event) -> Sequence[Effect]: ...

    def stats(self) -> Mapping[str, float]:
        """The figures that `Finish` has, so far."""


# Records of strategies: everything that the program around a strategy reads of it. How one is added is in
# docs/architecture.md.


JOINT_LEVELS: tuple[Privacy, ...] = ("open", "document-private")  # at which two sides may write together

O = TypeVar("O", bound=Options)  # noqa: E741


AUTO: Final = "auto"  # whichever strategy is right


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks for, as far as it matters to the choice of a strategy."""

    strategy: str = AUTO
    sampling: SamplingParams = field(default_factory=SamplingParams)
    privacy: Privacy = "document-private"
    options: Mapping[str, Any] = field(default_factory=dict)  # by field of `Options`
    documents: int = 2  # passages that each side reads at most; 0: none
    top_logprobs: int | None = None  # None: no logprobs
    seeded: bool = True  # the client named the seed: the same one must give the same text

    @property
    def logprobs(self) -> bool:
        return self.top_logprobs is not None

    def nth(self, index: int) -> Wish:
        """Of one of several texts, see `SamplingParams.nth`."""
        return replace(self, sampling=self.sampling.nth(index))


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What one side has to write with."""

    documents: int = 0
    num_weights: int = 0  # of its model; 0: unknown
    drafts: bool = True  # False where a server writes a plain answer at once, faster than it verifies drafts
    # s a token by strategy, of those that may be the fastest way to the text that is this side's alone.
    costs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """Facts by which a strategy is chosen: of the request, of this side, and of its peer."""

    side: Side
    wish: Wish
    own: SideFacts = SideFacts()
    peer: SideFacts = SideFacts()
    expected: bool = False  # a peer belongs to this request, whether it is linked now or not
    linked: bool = False
    barred: str = ""  # why the linked peer may not be asked for this request, as the end of a sentence
    absent: str = ""  # where no peer is linked: the end of a sentence that says why, if there is more to say
    common: tuple[str, ...] = ()  # strategies both sides know
    raw_prompt: bool = False  # tokens are continued: no conversation, no documents
    passages: int | None = None  # that this side has retrieved; None: before retrieval

    @property
    def larger(self) -> Side:
        """The side of the larger model; this one, unless the peer's is known to be."""
        return other(self.side) if self.peer.num_weights > self.own.num_weights > 0 else self.side


def asked_options(kind: type[O], context: RoutingContext) -> O:
    """Options of this type as the request asks for them, and the defaults for the rest."""
    return kind(**{name: context.wish.options[name] for name in kind.__struct_fields__ if name in context.wish.options})


@dataclass(frozen=True, slots=True)
class Strategy:
    """Record of one strategy.

    check: raises RequestError for what a request asks of this strategy and it cannot keep. Called for a request that
    names the strategy, and where `auto` makes it a candidate. Absent: it keeps what any request asks.

    choose: called after retrieval for a strategy that routing proposes: the options to write with, or None where the
    strategy declines and the next one is asked. Absent: it never declines, and the options are those asked for.

    accepts: called at the peer for an opening whose options could be decoded: None, or why it does not take part.
    Absent: it takes part in any.
    """

    name: str
    machine: Callable[[MachineConfig], Machine]
    text_of: Literal["front", "cloud", "both"]  # whose distributions the text is sampled from; read by tests
    needs_peer: bool = False  # both sides write
    uses_draft_model: bool = False  # its machine asks this side's draft model, where there is one
    joins_with_documents: tuple[Side, ...] = SIDES  # sides that, as a peer, read documents of their own
    options: type[Options] = Options
    messages: tuple[type[SessionMessage], ...] = ()
    privacy_levels: tuple[Privacy, ...] = PRIVACY_LEVELS
    check: Callable[[RoutingContext], None] | None = None
    choose: Callable[[RoutingContext], Options | None] | None = None
    accepts: Callable[[OpenSession, Options], str | None] = lambda _, __: None

    def options_for(self, context: RoutingContext) -> Options | None:
        """Options to write this request with, or None where the strategy declines it."""
        return asked_options(self.options, context) if self.choose is None else self.choose(context)
