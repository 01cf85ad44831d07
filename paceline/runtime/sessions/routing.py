"""Which strategy writes an answer, and why; and what a peer is told of it. Pure: asks nothing and starts nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from paceline.core.aggregation.registry import AggregatorName, default_aggregator
from paceline.errors import RequestError
from paceline.rag.prompt import query_of
from paceline.runtime.service import DraftMode, GenerateRequest
from paceline.strategies.base import DraftLimits, Side, other
from paceline.strategies.registry import STRATEGIES
from paceline.wire import messages
from paceline.wire.codec import constraint_to_wire, sampling_to_wire

AUTO = "auto"
ALONE = "lookup_tree"  # where no second side takes part

DRAFTINGS: dict[DraftMode, DraftLimits] = {
    "tree": DraftLimits(),
    "chain": DraftLimits(width=1, rows=1),  # DRAGON as published
    "sequence": DraftLimits(width=1, rows=1, ahead=20, burst=True),
    "none": DraftLimits(width=1, rows=1, ahead=0),  # token by token
}


RULES: dict[str, AggregatorName] = {name: name for name in get_args(AggregatorName)}


@dataclass(frozen=True, slots=True)
class AggregateSetting:
    """How two sides write together: what both must know of the request besides its text."""

    rule: AggregatorName
    wide: bool
    drafting: DraftLimits


def drafting_from_wire(drafting: messages.DraftLimits) -> DraftLimits:
    """What a peer asks for, as far as this side goes along: every row costs its memory and its time."""
    most = DRAFTINGS["tree"]
    width, rows, ahead = min(drafting.width, most.width), min(drafting.rows, most.rows), min(drafting.ahead, most.ahead)
    return DraftLimits(width, rows, ahead, drafting.burst)


@dataclass(frozen=True, slots=True)
class RoutingContext:
    """What this side knows when a request comes."""

    side: Side
    expected: bool  # a peer belongs to this request, whether it is linked now or not
    linked: bool
    common: tuple[str, ...]  # strategies both sides know
    own_documents: int
    peer_documents: int


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    strategy: str
    why: str  # a sentence
    missing: bool = False  # a peer was wanted and is not there


def choose_aggregator(request: GenerateRequest) -> AggregatorName:
    """How targets are made of both sides' laws. Raises RequestError for a rule that cannot give what is asked for."""
    logprobs = request.top_logprobs is not None
    if request.aggregator == "coin" and logprobs:
        raise RequestError(
            "The aggregator 'coin' exchanges no distributions and so gives no logprobs; 'mixture' does.",
            param="paceline.aggregator",
        )
    return request.aggregator or default_aggregator(request.sampling, logprobs=logprobs, seeded=request.seeded)


def choose_strategy(request: GenerateRequest, situation: RoutingContext) -> StrategyChoice:
    """Raises RequestError for what the request asks for and this program cannot keep."""
    peer = other(situation.side)
    if request.strategy != AUTO and request.strategy not in STRATEGIES:
        known = ", ".join((AUTO, *STRATEGIES))
        raise RequestError(f"Unknown strategy '{request.strategy}'. Known: {known}.", param="paceline.strategy")
    if request.privacy == "answer-private" and situation.side == "cloud":
        raise RequestError(
            "The privacy level 'answer-private' keeps the conversation from the cloud, which has read it now: ask the "
            "device.",
            param="paceline.privacy",
        )
    asked = request.strategy != AUTO and STRATEGIES[request.strategy].needs_peer
    if asked and request.prompt is not None:
        raise RequestError(
            f"The strategy '{request.strategy}' reads documents into a conversation; raw tokens are continued by one "
            "side alone.",
            param="paceline.strategy",
        )
    # At that level the other side is asked for passages, whatever writes the answer.
    searches = request.privacy == "answer-private" and request.documents > 0 and request.prompt is None
    unheard = searches and situation.expected and not situation.linked
    if not asked and request.strategy != AUTO:
        return StrategyChoice(request.strategy, "the request asks for it", missing=unheard)
    if request.prompt is not None:
        return StrategyChoice(ALONE, "raw tokens are continued by one side alone")
    if request.privacy in ("answer-private", "local-only"):
        if asked:
            raise RequestError(
                f"The strategy '{request.strategy}' needs the {peer}, which the privacy level '{request.privacy}' "
                "forbids.",
                param="paceline.privacy",
            )
        return StrategyChoice(ALONE, "the request's privacy level has this side alone write", missing=unheard)
    if request.top_logprobs is not None and situation.side == "cloud":
        if asked:
            raise RequestError(
                f"The strategy '{request.strategy}' gives the cloud no logprobs: the distributions stay on the device. "
                "Ask the device, or leave out 'logprobs'.",
                param="logprobs",
            )
        return StrategyChoice(ALONE, "logprobs of a joint answer would need the device's distributions")
    wanted = request.strategy if asked else "aggregate"
    if not situation.linked:
        if asked or situation.expected:
            return StrategyChoice(ALONE, f"the {peer} is not linked", missing=True)
        return StrategyChoice(ALONE, f"no {peer} takes part")
    if wanted not in situation.common:
        return StrategyChoice(ALONE, f"the {peer} does not know '{wanted}'", missing=True)
    if asked:
        return StrategyChoice(wanted, "the request asks for it")
    if request.documents == 0:
        return StrategyChoice(ALONE, "the request wants no documents")
    if not situation.own_documents and not situation.peer_documents:
        return StrategyChoice(ALONE, "neither side has documents")
    num_documents = situation.own_documents + situation.peer_documents
    return StrategyChoice(wanted, f"the {peer} is linked and the two sides hold {num_documents} documents")


def peer_missing(peer: Side) -> RequestError:
    """For a request that wants no answer without it."""
    return RequestError(
        f"The {peer} is not there, and the request does not want an answer without it.",
        status=503,
        type="server_error",
        code=f"{peer}_missing",
    )


def opening_for(
    request: GenerateRequest, strategy: str, joint: AggregateSetting, max_tokens: int
) -> Callable[[int, tuple[int, ...], int], messages.OpenSession]:
    """What the peer needs of the request; the session, the targets and the epoch come when it is opened."""
    said = [messages.ChatMessage(message["role"], message["content"]) for message in request.messages]
    query, sampling = query_of(request.messages), sampling_to_wire(request.sampling)
    drafting, constraint = joint.drafting, constraint_to_wire(request.constraint)

    def opening(session: int, targets: tuple[int, ...], epoch: int) -> messages.OpenSession:
        return messages.OpenSession(
            session=session,
            strategy=strategy,
            messages=said,
            query=query,
            sampling=sampling,
            max_tokens=max_tokens,
            top_k_documents=request.documents,
            privacy=request.privacy,
            aggregator=joint.rule,
            needs_dists=joint.wide,
            rescoring=request.rescoring,
            drafting=messages.DraftLimits(drafting.width, drafting.rows, drafting.ahead, drafting.burst),
            targets=list(targets),
            epoch=epoch,
            constraint=constraint,
        )

    return opening
