"""What a strategy is: a machine that is told facts and answers with wishes. It never waits.

Guarantees every machine gives, held by `tests/strategies/test_conformance.py`: `Emit` never retracts; after `Finish`
nothing; every `Forward` is answered by one `Scored`; the same events, seed and experience give the same effects; no
message from a peer raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from paceline.core.aggregation.registry import AggregatorName
from paceline.core.batching.segment import UNKNOWN, Segment, SeqId, StepSize
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.drafting.online_stats import OnlineStats
from paceline.core.sampling.constraint import Mask
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import SIDES as SIDES
from paceline.core.side import Side as Side
from paceline.core.side import other as other
from paceline.wire.messages import SessionMessage

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Branch:
    """One prompt this side continues: a retrieved document followed by the conversation, or the conversation alone."""

    prompt: tuple[int, ...]
    score: float | None  # R: relevance / temperature of relevance, one scale on both sides; None: no document


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How far and how broadly a side drafts."""

    width: int = 4  # guesses for each next token; 1 makes chains, which is DRAGON as published
    rows: int = 16  # in one forward of one branch
    ahead: int = 32  # tokens beyond the last target; 0: both sides wait for every target (token-wise)
    burst: bool = False  # ship chains of `ahead` drafts as a whole (sequence-wise)


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """What a machine must know of a request before anything happens.

    `targets` and `epoch` are not empty when a side joins (again) in mid-answer.
    """

    side: Side
    faces_client: bool  # this side faces the client: it emits
    sampling: SamplingParams
    max_tokens: int
    eos_ids: frozenset[int]
    vocab_size: int  # ids both sides give the same meaning; an engine may pad beyond
    targets: tuple[int, ...] = ()  # output tokens already decided
    epoch: int = 0
    linked: bool = False  # a peer takes part
    waits_for_peer: bool = False  # without the peer nothing is decided: it is waited for
    aggregator: AggregatorName = "mixture"  # of aggregation
    needs_dists: bool = False  # distributions are wanted for logprobs, not for the choice alone
    private: bool = True  # distributions that the device computes from its documents never go up
    rescoring: bool = False  # scores of documents follow the text, see `aggregation.evidence`; not under `coin`
    drafting: DraftLimits = DraftLimits()
    rtt: float | None = None  # s, between the sides, where it is known
    bandwidth: float | None = None  # bytes a second towards the peer; None: nothing has shown a limit
    stats: OnlineStats | None = None  # of earlier answers; None: begin without any
    mask: Mask | None = None  # what the answer is held to; asked only after `Retrieved`
    table: LookupTable | None = None  # what the client's earlier answers have shown; read and written

    @property
    def pinned_side(self) -> Side | None:
        """Where the decision must stay: with the device, if what it computes may not leave it. None: anywhere.

        Also for logprobs: only the side that decides has the distributions.
        """
        return "device" if self.needs_dists or (self.private and self.aggregator != "coin") else None

    @property
    def own_drafting(self) -> DraftLimits:
        """A device that may only ship choices ships one a position: several would tell of the law behind them."""
        choices = self.private and self.side == "device" and self.aggregator == "coin"
        return replace(self.drafting, width=1) if choices else self.drafting


# ---- events: facts --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Started:
    """The first event."""

    now: float  # s, any origin


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Answer to `Retrieve`: at least one branch. All sequences of one machine are its own: it names them 0, 1, …"""

    branches: tuple[Branch, ...]
    max_new_tokens: int | None = None  # output tokens that fit the context behind the longest prompt; None: no bound


@dataclass(frozen=True, slots=True)
class Scored:
    """Answer to `Forward`: distributions of the wanted rows, in row order, at temperature 1, before any warping."""

    ticket: int
    dists: tuple[Dist, ...]
    now: float = 0.0  # s
    step: StepSize = UNKNOWN


@dataclass(frozen=True, slots=True)
class Received:
    message: SessionMessage
    now: float = 0.0  # s


@dataclass(frozen=True, slots=True)
class TimerFired:
    now: float
    rtt: float | None = None  # s, between the sides, as measured last
    bandwidth: float | None = None  # as in `Task`, as measured last


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The peer is gone, for now or for good."""


@dataclass(frozen=True, slots=True)
class LinkBack:
    """The peer can be asked again. Only the side that faces the client is told."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client left, a stop string was found ("stop"), or the session was closed by the peer."""

    reason: FinishReason = "cancelled"


Event = Started | Retrieved | Scored | Received | TimerFired | LinkLost | LinkBack | Cancelled


# ---- effects: wishes ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Retrieve:
    """Find this side's documents for the request and build its branches."""


@dataclass(frozen=True, slots=True)
class Forward:
    ticket: int
    segment: Segment


@dataclass(frozen=True, slots=True)
class Commit:
    """Done after the forwards of this sequence that were asked for before it: both count the rows of all of them."""

    seq: SeqId
    keep: tuple[int, ...]
    rest: tuple[int, ...] = ()  # rows of the open tree that stay open, see `Engine.commit`


@dataclass(frozen=True, slots=True)
class Truncate:
    """Drop rows from `length` on. Forwards of this sequence that have not run are dropped with them."""

    seq: SeqId
    length: int


@dataclass(frozen=True, slots=True)
class Send:
    message: SessionMessage


@dataclass(frozen=True, slots=True)
class OpenPeer:
    """Ask the peer to take part (again), from these targets on. The driver adds what the peer needs of the request."""

    targets: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class ClosePeer:
    """The peer is of no use any more: close its session. `LinkLost` follows."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Woke` at this time. A later `WakeAt` replaces an earlier one."""

    time: float


@dataclass(frozen=True, slots=True)
class Emit:
    """One output token, in order, once."""

    token: int
    dist: Dist | None = None  # the target distribution it was chosen from, where this side has it
    lane: Side | None = None  # whose documents it came from; None where no document took part


@dataclass(frozen=True, slots=True)
class Finish:
    """Last, once. The driver releases every sequence and closes the session with the peer."""

    reason: FinishReason
    stats: Mapping[str, float] = field(default_factory=dict)
    end: Emit | None = None  # the end-of-text token, where one was chosen and its law is known: no part of the answer


Effect = Retrieve | Forward | Commit | Truncate | Send | OpenPeer | ClosePeer | WakeAt | Emit | Finish


class Machine(Protocol):
    """One side of one generation. Told what happened, answers with what to do. Never waits."""

    def on(self, event: Event) -> Sequence[Effect]: ...


class MachineFactory(Protocol):
    def __call__(self, task: MachineConfig) -> Machine: ...


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy's record: what the CLI, the API's enum, the docs and the conformance suite read."""

    name: str
    summary: str
    machine: MachineFactory
    needs_peer: bool  # without a peer, `lookup_tree` serves in its place
    reference: Literal["target", "mixture"]  # what its text must equal, see DESIGN 4
