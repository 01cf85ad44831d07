"""What holds for an answer once its strategy is chosen: energy budget, weights of documents, who writes where nothing
is found or where a device may begin by itself, whether it is searched for again, and for how long what it teaches is
kept. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from paceline.errors import RequestError
from paceline.runtime.energy import SideEnergy
from paceline.runtime.link.connection import Link
from paceline.runtime.lookup_tables.store import Lifetime
from paceline.runtime.resources import Resources
from paceline.runtime.service import AUTO, GenerateRequest
from paceline.runtime.sessions.handoff import Watch
from paceline.runtime.sessions.prepared import PreparedRequest
from paceline.runtime.sessions.prompts import PeerScales, PromptSet
from paceline.runtime.sessions.routing import ALONE, PLAIN, StrategyChoice, alone_by, may_find
from paceline.strategies.base import RoutingContext, Side, SideFacts, Strategy
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Options

UNANSWERED_REASON: Final = "documents were found, and none answers the question"
_ASKING = frozenset({"system", "user"})  # roles of messages that no model has written


def check_budget(request: GenerateRequest, choice: StrategyChoice, energy: SideEnergy | None) -> None:
    """Raises RequestError for an energy budget that the chosen strategy, or this device, does not keep. energy: of this
    device; None at the cloud, whose device refuses for itself."""
    if all(request.strategy.options.get(name) is None for name in ("joules_per_token", "joules_per_step")):
        return
    budget = choice.options.energy_budget
    if budget is None:
        raise RequestError(
            f"An energy budget is kept by the strategy 'draft_verify' alone, and '{choice.strategy}' is to write "
            f"({choice.reason}).",
            param="paceline.energy",
            code="energy_budget_not_kept",
        )
    if energy is None:
        return
    if energy.meter is None:
        raise RequestError(
            "This device neither measures nor models its energy: its setting energy.meter is off.",
            param="paceline.energy",
            code="energy_budget_not_kept",
        )
    if energy.budget is not None and energy.budget[1] != budget[1]:
        raise RequestError(
            f"This device's own energy budget is in joules a {energy.budget[1]}: name joules_per_{energy.budget[1]}.",
            param="paceline.energy",
            code="energy_budget_not_kept",
        )


def answered_alone(prepared: PreparedRequest, own: SideFacts) -> PreparedRequest | None:
    """The same answer as this side writes it where the peer has found nothing; None where the text is not this side's
    then, or the peer may still find something later."""
    side, options, passages = prepared.side, prepared.options, prepared.prompts.passages
    if prepared.request.strategy.name != AUTO or not STRATEGIES[prepared.strategy].needs_peer:
        return None
    says_so = prepared.prompts.unanswered and prepared.unanswered_mask is not None
    writes = prepared.writer == side or passages
    if options.stretch or options.energy_budget is not None or not (says_so or writes):
        return None
    strategy, compared = alone_by(own)
    reason = f"the {side} alone has found something" if passages else prepared.nothing_found
    if says_so:
        reason = UNANSWERED_REASON
    plain = Options(rescoring=options.rescoring, drafting=options.drafting)
    reason = "; ".join(filter(None, (reason, compared)))
    return replace(
        prepared,
        strategy=strategy,
        reason=reason,
        options=plain,
        peer_name=None,
        nothing_found="",
        mask=prepared.unanswered_mask if says_so else prepared.mask,
    )


def nothing_found(context: RoutingContext, strategy: Strategy) -> str:
    """Who writes where neither side has found anything, and why; empty where the strategy's own reason says so."""
    side, writer = context.side, context.larger
    if strategy.text_of != "both" and (context.wish.strategy != AUTO or writer != side or not strategy.needs_peer):
        return ""
    if context.wish.strategy != AUTO:
        return "neither side has found anything, and both write, as the request asks"
    why = "no other model is known to be larger" if writer == side else "its model is larger"
    return f"neither side has found anything, and the {writer} writes: {why}"


def weighed(
    strategy: Strategy, prompts: PromptSet, side: Side, scales: PeerScales, difference: str
) -> tuple[PromptSet, str]:
    """Prompts with the weights of their documents, and why those of both sides weigh the same, if they do. difference:
    of the scales of relevance of both sides; empty: none."""
    if strategy.needs_peer and side == "device":  # as where the cloud's client asks, for the same text
        prompts = prompts.without_relevance(scales.temperature)
    weighed = strategy.text_of == "both" or (prompts.passages and prompts.peer_passages)
    return (prompts.with_equal_sides(), difference) if weighed and difference else (prompts, "")


def searched_once(request: GenerateRequest, options: Options) -> str:
    """Why documents are not searched for again although the request wants it, else empty."""
    if not request.strategy.options.get("search_every") or options.stretch:
        return ""
    if not request.sources.documents:
        return "no documents are searched for"
    by = "a workflow searches" if request.sources.passages is not None else "only 'aggregate' searches again"
    return f"documents are searched for once ({by})"


def lifetime_of(request: GenerateRequest, prompts: PromptSet, strategy: Strategy, side: Side) -> Lifetime:
    """What the rows that the answer teaches may outlive. A conversation with earlier answers may hold the text of
    documents even where none is found.

    A device keeps those of joint answers: its user has read them, and the next one shows the cloud none of its drafts
    that the models would not have drafted by themselves.
    """
    if strategy.text_of == "both" and side == "device" and not request.account.guest_key:
        return "documents"
    if strategy.needs_peer or prompts.peer_passages or request.account.guest_key:
        return "answer"
    is_first = all(message["role"] in _ASKING for message in request.prompt.messages)
    return "owner" if is_first and not prompts.passages else "documents"


def begun_alone(
    prepared: PreparedRequest, context: RoutingContext, resources: Resources, link: Link | None
) -> PreparedRequest | None:
    """What the other side's larger model is to write, as this device begins it by itself; None where it may not: where
    a document was read or may be found there, the text has a form, or it is to wait for the other side."""
    prompts, options, joining = prepared.prompts, prepared.options, prepared.request.joining
    level = joining.handoff or resources.parts.company.handoff
    theirs = context.larger != context.side and STRATEGIES[prepared.strategy].needs_peer
    looked = prepared.request.sources.passages is not None or may_find(context.wish, context.peer)
    read = prompts.num_passages or prompts.unanswered or looked
    waits = prepared.missing is not None or joining.on_loss != "continue"
    formed = prepared.mask is not None or options.stretch or options.energy_budget is not None
    tries = context.side == "device" and context.wish.strategy == AUTO
    if level == "off" or link is None or not (tries and theirs) or read or waits or formed:
        return None
    pair = f"{resources.info.fingerprint[:16]} {link.peer.model[:16]}"
    return replace(
        prepared,
        strategy=ALONE if context.own.drafts else PLAIN,  # of each token the head of its row is known
        reason=f"{prepared.reason}; the {prepared.side} begins by itself, and is sure enough of what it writes",
        options=Options(rescoring=options.rescoring, drafting=options.drafting),
        peer_name=None,
        nothing_found="",
        unanswered_mask=None,
        costs=None,  # its rows have heads, which take time
        watch=Watch(resources.outcomes, pair, level, prompts.longest),
    )


def handed_over(prepared: PreparedRequest, begun: PreparedRequest, at: int) -> PreparedRequest:
    """An answer that was begun alone, as the other side's model writes it on. at: tokens of it that have been told."""
    watch = begun.watch
    assert watch is not None, "it has been watched"
    told = watch.told("cloud", at)
    where = f"hands over behind token {at}" if at else "leaves it to the cloud"
    reason = f"the {prepared.side} is unsure and {where}: {told.score:.2f} sure, {1.0 - told.threshold:.2f} wanted"
    return replace(prepared, reason=f"{prepared.reason}; {reason}", handoff=told, outcome=watch.learn)
