"""Arguments of `Node`, grouped by what they are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.sampling.sampler import NO_DEFAULTS, SamplingDefaults
from paceline.core.side import HandoffLevel
from paceline.rag.prompt import RELEVANCE_TEMPERATURE
from paceline.runtime.energy import SideEnergy
from paceline.runtime.engine_loop.executor import DEFAULT_LIMITS, StepLimits

if TYPE_CHECKING:
    from paceline.engine.base import Engine
    from paceline.rag.document_kv import DocumentKvStore
    from paceline.runtime.asking import CloudAsks
    from paceline.runtime.endpoint import OutsideEndpoint
    from paceline.runtime.lookup_tables.store import TableStore
    from paceline.runtime.policy import PolicyGuard
    from paceline.runtime.questions import Judge
    from paceline.runtime.sessions.handoff import Outcomes
    from paceline.runtime.stimuli import StimulusLog
    from paceline.runtime.tracing import Tracer
    from paceline.runtime.units import NodeUnits


@dataclass(frozen=True, slots=True)
class Offer:
    """How the model is offered to clients."""

    name: str | None = None  # that it is served under; None: its own
    sampling: SamplingDefaults = NO_DEFAULTS  # before those that the model recommends
    system: str = ""  # as in `ModelInfo`
    max_tokens: int | None = None  # of an answer whose request sets none


@dataclass(frozen=True, slots=True)
class Computing:
    limits: StepLimits = DEFAULT_LIMITS  # of the engine's steps
    timed: bool = False  # forwards are measured before the first answer
    draft_engine: Engine | None = None  # of the draft model, whose vocabulary must be the model's
    units: NodeUnits | None = None  # None: those found
    energy: SideEnergy = field(default_factory=SideEnergy)  # by default nothing is known of it
    stimuli: StimulusLog | None = None  # of the machines that write answers


@dataclass(frozen=True, slots=True)
class Kept:
    """What helps to read documents and to draft, and is kept between answers."""

    kv: DocumentKvStore | None = None
    tables: TableStore | None = None  # n-grams for drafts, saved at the end; None: kept in memory only
    relevance_temperature: float = RELEVANCE_TEMPERATURE  # by which cosines are divided
    judge: Judge | None = None  # None: all passages that are found are read
    outcomes: Outcomes | None = None  # of answers that a device has handed over; None: kept in memory only


@dataclass(frozen=True, slots=True)
class Company:
    """Terms on which this side and its peers take part in each other's answers."""

    # An answer without a peer is marked as degraded even if the request names no device; of an agent with a cloud, and
    # of a server with devices, for requests that a linked one would join.
    expects_peer: Callable[[], bool] = bool
    open_to_peer: bool = False  # a device sends distributions of its documents if the cloud's client requests it
    asks: CloudAsks | None = None  # the gate for sessions that a cloud opens at a device; None: none is admitted
    cloud_texts: bool = True  # of a device: its cloud's model may write texts of its workflows' agents
    tracer: Tracer | None = None  # of what this side does for peers' clients
    policy: PolicyGuard | None = None  # of the documents' owner; None: there is none
    handoff: HandoffLevel = "off"  # of a device: what it writes though its cloud's model is larger
    outside: OutsideEndpoint | None = None  # of a stranger, which writes where a request asks for it


@dataclass(frozen=True, slots=True)
class NodeParts:
    offer: Offer = Offer()
    computing: Computing = field(default_factory=Computing)
    kept: Kept = Kept()
    company: Company = Company()
