"""Records of strategies: everything that the program around a strategy reads of it.

A strategy is one file or folder: its machines, and a `Strategy` at the bottom, which `registry` lists. Options and
messages of its own are there too, or in `wire.messages` like those of `aggregate`. Link, codec, egress, limits,
simulator and the conformance tests read the record and the base structs in `wire.messages`, and name no strategy.
Routing names those that `auto` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import SIDES, Side, other
from paceline.strategies.base import Machine, MachineConfig
from paceline.wire.messages import OpenSession, SessionMessage
from paceline.wire.options import Options

Privacy = Literal["open", "document-private", "answer-private", "local-only"]
PRIVACY_LEVELS: tuple[Privacy, ...] = get_args(Privacy)
JOINT_LEVELS: tuple[Privacy, ...] = ("open", "document-private")  # at which two sides may write together

O = TypeVar("O", bound=Options)  # noqa: E741


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks for, as far as it matters to the choice of a strategy."""

    strategy: str  # "auto": any
    sampling: SamplingParams
    privacy: Privacy = "document-private"
    options: Mapping[str, Any] = field(default_factory=dict)  # by field of `Options`
    documents: int = 2  # passages that each side reads at most
    raw_prompt: bool = False  # tokens are continued: no conversation, no documents
    logprobs: bool = False
    seeded: bool = True  # the client named the seed: the same one must give the same text


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What one side has to write with."""

    documents: int = 0
    num_weights: int = 0  # of its model; 0: unknown
    # A token decoded by this side alone, without drafts; of the peer, a token of an answer that its model writes.
    decode_s: float | None = None  # None: unknown


@dataclass(frozen=True, slots=True)
class PeerPresence:
    expected: bool = False  # a peer belongs to this request, whether it is linked now or not
    linked: bool = False
    barred: str = ""  # why the linked peer may not be asked for this request, as the end of a sentence
    common: tuple[str, ...] = ()  # strategies both sides know


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """Facts by which a strategy is chosen: of the request, of this side, and of its peer."""

    side: Side
    wish: Wish
    presence: PeerPresence = PeerPresence()
    own: SideFacts = SideFacts()
    peer: SideFacts = SideFacts()
    passages: int | None = None  # that this side has retrieved; None: before retrieval

    @property
    def larger(self) -> Side:
        """The side of the larger model; this one, unless the peer's is known to be."""
        return other(self.side) if self.peer.num_weights > self.own.num_weights > 0 else self.side


def asked_options(kind: type[O], context: RoutingContext) -> O:
    """Options of this type as the request asks for them, and the defaults for the rest."""
    return kind(**{name: context.wish.options[name] for name in kind.__struct_fields__ if name in context.wish.options})


def _no_check(context: RoutingContext) -> None:
    """Accept every request."""


def _accept(opening: OpenSession, options: Options) -> str | None:  # noqa: ARG001  # a hook's signature
    return None


@dataclass(frozen=True, slots=True)
class Strategy:
    """Record of one strategy.

    check: raises RequestError for what a request asks of this strategy and it cannot keep. Called for every request,
    whichever strategy the request names: a check for this strategy alone compares `Wish.strategy` first.

    choose: called after retrieval for a strategy that routing proposes: the options to write with, or None where the
    strategy declines and the next one is asked. Absent: it never declines, and the options are those asked for.

    accepts: called at the peer for an opening whose options could be decoded: None, or why it does not take part.
    """

    name: str
    machine: Callable[[MachineConfig], Machine]
    participants: Literal["one side", "both sides"]
    text_of: Literal["front", "cloud", "both"]  # whose distributions the text is sampled from; read by tests
    uses_draft_model: bool = False  # its machine asks this side's draft model, where there is one
    joins_with_documents: tuple[Side, ...] = SIDES  # sides that, as a peer, read documents of their own
    options: type[Options] = Options
    messages: tuple[type[SessionMessage], ...] = ()
    privacy_levels: tuple[Privacy, ...] = PRIVACY_LEVELS
    check: Callable[[RoutingContext], None] = _no_check
    choose: Callable[[RoutingContext], Options | None] | None = None
    accepts: Callable[[OpenSession, Options], str | None] = _accept

    @property
    def needs_peer(self) -> bool:
        return self.participants == "both sides"

    def options_for(self, context: RoutingContext) -> Options | None:
        """Options to write this request with, or None where the strategy declines it."""
        return asked_options(self.options, context) if self.choose is None else self.choose(context)
