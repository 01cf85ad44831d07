"""Machines of strategies: events in, effects out. A machine never waits.

Guarantees every machine gives, tested by `tests/strategies/conformance/` and `tests/strategies/test_fuzz.py`: `Emit`
never retracts; after `Finish` nothing; every `Forward` is answered by one `Scored` or `Sampled`; the same events, seed
and statistics give the same effects; no message from a peer raises.

Events and effects are msgspec's structs: a step of many answers makes hundreds of them, each in an eighth of the time
that a frozen dataclass takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from paceline.core.aggregation.weights import BranchMixture
from paceline.core.batching.segment import UNKNOWN, Segment, SeqId, StepSize
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.energy import NOT_KNOWN, Spent
from paceline.core.estimation import PeerRecord
from paceline.core.offloading import EnergyQueue
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import RowSampling, SampledRow
from paceline.core.sampling.sampler import Mask, SamplingParams
from paceline.core.side import SIDES as SIDES
from paceline.core.side import Side as Side
from paceline.core.side import other as other
from paceline.wire.messages import SessionMessage
from paceline.wire.options import DEFAULT_OPTIONS, Options

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Branch:
    """One prompt this side continues: a retrieved document followed by the conversation, or the conversation alone."""

    prompt: tuple[int, ...]
    score: float | None  # R: relevance / temperature of relevance, one scale on both sides; None: no document


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a machine takes part: its side, and from where on. One that joins, or joins again, in mid-answer has
    non-empty `targets` or an `epoch` above 0."""

    side: Side
    faces_client: bool  # this side emits
    targets: tuple[int, ...] = ()  # output tokens already decided
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What decides the answer's tokens, given the models' distributions."""

    sampling: SamplingParams
    max_tokens: int
    eos_ids: frozenset[int]
    vocab_size: int  # of the tokenizer, equal on both sides; an engine's logits may be padded beyond
    mask: Mask | None = None  # the constraint of the answer; used only after `Retrieved`
    needs_dists: bool = True  # `Emit` has the distribution, for logprobs; else it may have none


@dataclass(frozen=True, slots=True)
class PeerTerms:
    """The peer of an answer, and how the machine stands to it."""

    joined: bool = False  # the answer is written with it; a lost link is reported by `LinkLost`
    awaited: bool = False  # without it no target is decided
    private: bool = True  # the device never sends distributions that it computes from its documents
    rtt: float | None = None  # s, between the sides, where it is known
    bandwidth: float | None = None  # bytes a second towards it; None: no limit has been measured
    record: PeerRecord | None = None  # of earlier answers with it; read and written


@dataclass(frozen=True, slots=True)
class DraftingMeans:
    """What a machine drafts by: what this side has learnt, may spend and runs."""

    stats: OnlineStats | None = None  # of earlier answers; None: begin without any
    table: LookupTable | None = None  # n-grams of the client's earlier answers; read and written
    energy: EnergyQueue | None = None  # with this answer's energy budget, read and written; None: it has none
    depth: int = 1  # forwards that this side's engine has under way at once: above 1 for a pipeline of stages
    draft_positions: int = 0  # context of this side's draft model, tokens; 0: there is none, see `OnDraftModel`


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """Facts about a request that a machine needs before the first event."""

    seat: Seat
    output: OutputRules
    options: Options = DEFAULT_OPTIONS  # of the strategy's own type, see `Strategy.options`
    peer: PeerTerms = PeerTerms()
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
    bandwidth: float | None = None  # as in `PeerTerms`, as measured last
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


Event = (
    Started
    | Retrieved
    | Scored
    | Sampled
    | FromDraftModel
    | DraftModelLost
    | Received
    | TimerFired
    | LinkLost
    | LinkBack
    | Cancelled
)


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
