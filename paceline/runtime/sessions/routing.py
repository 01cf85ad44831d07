"""Choice of the strategy that writes an answer, with its reason. Pure.

Two steps: `candidates` before retrieval, from request and peer; `choose` after it, when each candidate in turn may
decline because of the number of retrieved passages. `AUTO_RULES` is the order in which `auto` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import RequestError
from paceline.runtime.service import GenerateRequest
from paceline.strategies.base import JOINT_LEVELS, RoutingContext, Side, SideFacts, Wish, other
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import DEFAULT_OPTIONS, Options

AUTO = "auto"
ALONE = "lookup_tree"  # without a second side
PLAIN = "autoregressive"  # likewise, where drafts are of no use
VERIFIED = "draft_verify"  # the cloud's text, where nothing private is in the context


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    strategy: str
    reason: str  # a sentence
    missing: bool = False  # a wanted peer is not linked
    options: Options = field(default=DEFAULT_OPTIONS)  # of the strategy's own type, once it is chosen


@dataclass(frozen=True, slots=True)
class Rule:
    """Makes a strategy a candidate where `applies`, with a reason."""

    applies: Callable[[RoutingContext], bool]
    strategy: str
    reason: str  # a format string with {peer}, {documents} and {barred}
    missing: Callable[[RoutingContext], bool] = lambda _: False

    def choice(self, context: RoutingContext) -> StrategyChoice:
        documents = context.own.documents + context.peer.documents
        reason = self.reason.format(peer=other(context.side), documents=documents, barred=context.barred)
        strategy = self.strategy
        if strategy == ALONE != context.wish.strategy:
            strategy = alone_by(context.own)
        return StrategyChoice(strategy, reason, self.missing(context))


def alone_by(own: SideFacts) -> str:
    """The strategy of a side that writes alone."""
    return ALONE if own.drafts else PLAIN


def _always(context: RoutingContext) -> bool:  # noqa: ARG001  # a predicate's signature
    return True


def _search_missing(context: RoutingContext) -> bool:
    """True if a wanted search is impossible: at `answer-private` the other side is searched for every strategy."""
    searches = context.wish.privacy == "answer-private" and context.wish.documents > 0 and not context.wish.raw_prompt
    return searches and context.expected and not context.linked


def _verifying_gains(context: RoutingContext) -> bool:
    """A device's cloud has a larger model, and is no slower with it than the device is alone. It is asked after
    retrieval whether something private was found. At a cloud the text would be the same: there drafting on a device
    saves forwards only where the cloud waits for drafts, and then costs time."""
    if context.side == "cloud" or VERIFIED not in context.common:
        return False
    if context.own.decode_s is None or context.peer.decode_s is None:
        return False
    return context.larger == "cloud" and context.peer.decode_s <= context.own.decode_s


def _cloud_writes(context: RoutingContext) -> bool:
    """Where the device finds nothing, the text is the cloud's, whether that does or not: `draft_verify` is the fastest
    way to it. Where answers search again, the device may find something later."""
    verifies = context.side == "device" and VERIFIED in context.common and not context.wish.options.get("search_every")
    return verifies and context.larger == "cloud"


def _budget_asked(context: RoutingContext) -> bool:
    asked = any(context.wish.options.get(name) is not None for name in ("joules_per_token", "joules_per_step"))
    return asked and VERIFIED in context.common


BARRED = Rule(lambda c: bool(c.barred), ALONE, "the {peer} is not asked: {barred}", lambda c: c.expected)
AUTO_RULES: tuple[Rule, ...] = (
    Rule(lambda c: c.wish.raw_prompt, ALONE, "raw tokens are continued by one side alone"),
    Rule(
        lambda c: c.wish.privacy not in JOINT_LEVELS,
        ALONE,
        "the request's privacy level has this side alone write",
        _search_missing,
    ),
    Rule(
        lambda c: c.wish.logprobs and c.side == "cloud",
        ALONE,
        "logprobs of a joint answer would need the device's distributions",
    ),
    BARRED,
    Rule(lambda c: not c.linked and c.expected, ALONE, "the {peer} is not linked", _always),
    Rule(lambda c: not c.linked, ALONE, "no {peer} takes part"),
    Rule(_budget_asked, VERIFIED, "the request has an energy budget, and nothing private is in the context"),
    Rule(
        _verifying_gains, VERIFIED, "nothing private is in the context, and the {peer}'s model is larger and no slower"
    ),
    Rule(lambda c: "aggregate" not in c.common, ALONE, "the {peer} does not know 'aggregate'", _always),
    Rule(lambda c: c.wish.documents == 0, ALONE, "the request wants no documents"),
    Rule(lambda c: c.own.documents + c.peer.documents == 0, ALONE, "neither side has documents"),
    Rule(_cloud_writes, VERIFIED, "nothing private is in the context, and the {peer}'s model is larger"),
    Rule(_always, "aggregate", "the {peer} is linked and the two sides hold {documents} documents"),
    Rule(_always, ALONE, "no strategy of both sides takes what was retrieved"),
)


def asked_rules(name: str) -> tuple[Rule, ...]:
    """Rules for a request that names its strategy."""
    if not STRATEGIES[name].needs_peer:
        return (Rule(_always, name, "the request asks for it", _search_missing),)
    return (
        replace(BARRED, missing=_always),
        Rule(lambda c: not c.linked, ALONE, "the {peer} is not linked", _always),
        Rule(lambda c: name not in c.common, ALONE, f"the {{peer}} does not know '{name}'", _always),
        Rule(_always, name, "the request asks for it"),
        Rule(_always, ALONE, f"'{name}' does not take what was retrieved"),
    )


def wish_of(request: GenerateRequest) -> Wish:
    return Wish(
        request.strategy.name,
        request.sampling,
        request.joining.privacy,
        request.strategy.options,
        request.sources.documents,
        raw_prompt=request.prompt.tokens is not None,
        logprobs=request.output.top_logprobs is not None,
        seeded=request.strategy.seeded,
    )


def candidates(context: RoutingContext) -> tuple[StrategyChoice, ...]:
    """Strategies that may write the answer, in order of preference; the last one never declines.

    Raises RequestError for options of the request that cannot be fulfilled.
    """
    _refuse(context)
    asked = context.wish.strategy
    found: list[StrategyChoice] = []
    for rule in AUTO_RULES if asked == AUTO else asked_rules(asked):
        if rule.applies(context):
            found.append(rule.choice(context))
            if not STRATEGIES[rule.strategy].needs_peer:
                break  # a strategy without a peer never declines
    for name in [each.strategy for each in found] if asked == AUTO else [asked]:
        if (check := STRATEGIES[name].check) is not None:
            check(context)
    return tuple(found)


def choose(found: Sequence[StrategyChoice], context: RoutingContext) -> StrategyChoice:
    """The first candidate that does not decline after retrieval, with its options."""
    for candidate in found:
        options = STRATEGIES[candidate.strategy].options_for(context)
        if options is not None:
            return StrategyChoice(candidate.strategy, candidate.reason, candidate.missing, options)
    raise AssertionError(f"every candidate declined: {found}")


def peer_missing(peer: Side, why: str = "") -> RequestError:
    """Error of a request that requires a peer which is not linked. why: the end of its sentence, if it is not that."""
    return RequestError(
        f"The {peer} is not there, and the request does not want an answer without it{why}.",
        status=503,
        type="server_error",
        code=f"{peer}_missing",
    )


def peer_apart(peer: Side, why: str) -> RequestError:
    """Error of a request that requires a peer, of a model that writes without one."""
    return RequestError(
        f"The {peer} takes no part: {why}. Name that model, or leave paceline.device out and have on_device_loss "
        "'continue'.",
        code="model_writes_alone",
        param="model",
    )


def peer_barred(name: str, why: str) -> RequestError:
    """Error of a request that requires a device which may not be asked."""
    return RequestError(
        f"The device {name} may not be asked for this: {why}. Ask at the device itself, or have its owner allow it "
        "with --cloud-may-ask; without paceline.device, and with on_device_loss 'continue', the answer is written "
        "without the device.",
        status=403,
        code="device_may_not_be_asked",
        param="paceline.device",
    )


def _refuse(context: RoutingContext) -> None:
    name, peer = context.wish.strategy, other(context.side)
    if name != AUTO and name not in STRATEGIES:
        known = ", ".join((AUTO, *STRATEGIES))
        raise RequestError(f"Unknown strategy '{name}'. Known: {known}.", param="paceline.strategy")
    if context.wish.privacy == "answer-private" and context.side == "cloud":
        raise RequestError(
            "The privacy level 'answer-private' keeps the conversation from the cloud, which has read it now: ask the "
            "device.",
            param="paceline.privacy",
        )
    if name == AUTO or not STRATEGIES[name].needs_peer:
        return
    if context.wish.raw_prompt:
        raise RequestError(
            f"The strategy '{name}' reads documents into a conversation; raw tokens are continued by one side alone.",
            param="paceline.strategy",
        )
    if context.wish.privacy not in STRATEGIES[name].privacy_levels:
        raise RequestError(
            f"The strategy '{name}' needs the {peer}, which the privacy level '{context.wish.privacy}' forbids.",
            param="paceline.privacy",
        )
