"""Choice of the strategy that writes an answer, with its reason. Pure.

An answer is owed one of three texts: this side's own, the other side's, or that of both. `AUTO_RULES` says which, by
what each side can have found: what one side alone has found is answered by that side, what both have found by both, and
where nothing was found the larger model writes. Never do two models average what neither has read. Every way to the
same text writes the same tokens for a seed, so among those the fastest is taken (`alone_by`).

Two steps: `candidates` before retrieval, from request and peer; `choose` after it, when each candidate in turn may
decline because of the number of retrieved passages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from paceline.core.clock import MovingAverage
from paceline.errors import RequestError
from paceline.strategies.base import AUTO, JOINT_LEVELS, RoutingContext, Side, SideFacts, Wish, other
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import DEFAULT_OPTIONS, Options

ALONE = "lookup_tree"  # without a second side
PLAIN = "autoregressive"  # likewise, where drafts are of no use
STAGED = "pipeline"  # likewise, where the model is cut into stages
VERIFIED = "draft_verify"  # the cloud's text, where nothing private is in the context
JOINT = "aggregate"  # both sides' text, or that of the one that has found something
NEARLY: Final = 1.25  # times the fastest
MEASURED: Final = 3  # answers by which a strategy that is nearly as fast is judged
EXPLORED: Final = 128  # answers with one text, of which one is for measuring


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    strategy: str
    reason: str  # a sentence
    missing: bool = False  # a wanted peer is not linked
    options: Options = field(default=DEFAULT_OPTIONS)  # of the strategy's own type, once it is chosen
    takes: Callable[[RoutingContext], bool] | None = field(default=None, compare=False)  # see `Rule`
    compared: Mapping[str, float] = field(default_factory=dict, compare=False)  # s a token of the ways to its text


@dataclass(frozen=True, slots=True)
class Rule:
    """Makes a strategy a candidate where `applies`, with a reason; after retrieval it declines unless `takes`."""

    applies: Callable[[RoutingContext], bool]
    strategy: str
    reason: str  # a format string with {peer}, {documents}, {barred}, {absent} and {unlinked}
    missing: Callable[[RoutingContext], bool] = lambda _: False
    takes: Callable[[RoutingContext], bool] | None = None  # None: it always does

    def choice(self, context: RoutingContext) -> StrategyChoice:
        peer, absent = other(context.side), context.absent
        reason = self.reason.format(
            peer=peer,
            documents=context.own.documents + context.peer.documents,
            barred=context.barred,
            absent=absent,
            unlinked=f"no {peer} takes part{absent}" if absent else f"the {peer} is not linked",
        )
        strategy, compared, costs = self.strategy, "", {}
        if strategy == ALONE != context.wish.strategy:
            strategy, compared = alone_by(context.own)
            costs = dict(context.own.costs)
        elif strategy == VERIFIED and self.takes is not None:  # no energy budget asks for it
            costs = {name: seconds for name, seconds in context.peer.costs.items() if name in context.common}
            strategy, compared = fastest(costs, strategy)
        reason = "; ".join(filter(None, (reason, compared)))
        return StrategyChoice(
            strategy, reason, self.missing(context), takes=self.takes, compared=costs if compared else {}
        )


def alone_by(own: SideFacts) -> tuple[str, str]:
    """The fastest strategy of a side that writes alone, and what it was compared with, if it was with anything."""
    return fastest(own.costs, ALONE) if own.drafts else (PLAIN, "")


def fastest(costs: Mapping[str, float], otherwise: str) -> tuple[str, str]:
    """The strategy that costs least, and what it was compared with, if it was. otherwise: where none has a cost."""
    if len(costs) < 2:
        return next(iter(costs), otherwise), ""
    best = min(costs, key=lambda name: costs[name])
    if not costs[best]:
        return best, f"'{best}' is to be measured"
    compared = ", ".join(f"'{name}' {1e3 * seconds:.3g}" for name, seconds in costs.items())
    return best, f"ms a token: {compared}"


class Costs:
    """Seconds a token of the answers with one side's text, by strategy and by how many are written at once.

    What has not been measured among so many answers is taken to cost its first ratio of what has been. Of strategies
    that seem nearly as fast as the fastest each is measured a few times, and one answer in `EXPLORED` is written by the
    one measured least recently.
    """

    def __init__(self, ratios: Mapping[str, float]) -> None:
        """ratios: of each strategy's seconds to each other's, before any is measured."""
        self._ratios = ratios
        self._measured: defaultdict[int, dict[str, MovingAverage]] = defaultdict(dict)  # the least recent first
        self._answers: Counter[tuple[int, str]] = Counter()

    def add(self, strategy: str, answers: int, seconds: float) -> None:
        """Record an answer. answers: under way with it. seconds: a token."""
        if strategy in self._ratios:
            size = answers.bit_length()
            self._answers[size, strategy] += 1
            measured = self._measured[size]
            average = measured[strategy] = measured.pop(strategy, MovingAverage(0.3))
            average.add(seconds)

    def among(self, answers: int) -> dict[str, float]:
        """Of every strategy, for a new answer with which so many are under way; 0 of the one to be measured. Before any
        was, of the first alone."""
        size, ratios = answers.bit_length(), self._ratios
        known = {name: each.value or 0.0 for name, each in self._measured[size].items()}
        if not known:
            return {min(ratios, key=lambda name: ratios[name]): 1.0}
        scale = min(seconds / ratios[name] for name, seconds in known.items())
        costs = {name: known.get(name, scale * ratio) for name, ratio in ratios.items()}
        counts, order = Counter({name: self._answers[size, name] for name in ratios}), [*known]
        due = [name for name in ratios if counts[name] < MEASURED and costs[name] <= NEARLY * min(costs.values())]
        if len(due) < len(ratios) and counts.total() % EXPLORED == EXPLORED - 1:
            due = [min(ratios, key=lambda name: order.index(name) if name in known else -1)]
        return costs | ({min(due, key=lambda name: counts[name]): 0.0} if due else {})


def _always(context: RoutingContext) -> bool:  # noqa: ARG001  # a predicate's signature
    return True


def _search_missing(context: RoutingContext) -> bool:
    """True if a wanted search is impossible: at `answer-private` the other side is searched for every strategy."""
    searches = context.wish.privacy == "answer-private" and context.wish.documents > 0 and not context.raw_prompt
    return searches and context.expected and not context.linked


def _cloud_may_write(context: RoutingContext) -> bool:
    """At a device: where it finds nothing, the text is the cloud's, if that finds something or its model is larger.
    At a cloud the same text would be its own anyway, and a device's drafts would cost that device energy and a question
    of its owner's. Where answers search again, the device may find something later."""
    if context.side != "device" or VERIFIED not in context.common or context.wish.options.get("search_every"):
        return False
    return context.larger == "cloud" or may_find(context.wish, context.peer)


def may_find(wish: Wish, facts: SideFacts) -> bool:
    """The side may find passages for this request."""
    return wish.documents > 0 and facts.documents > 0


def _nothing_found(context: RoutingContext) -> bool:
    return not context.passages


def _own_alone(context: RoutingContext) -> bool:
    """The other side cannot find anything, and this one has found something, or may write without."""
    if may_find(context.wish, context.peer):
        return False
    return bool(context.passages) or context.larger == context.side or not may_find(context.wish, context.own)


def _budget_asked(context: RoutingContext) -> bool:
    asked = any(context.wish.options.get(name) is not None for name in ("joules_per_token", "joules_per_step"))
    return asked and VERIFIED in context.common


UNLIKE = "the two models have different vocabularies"
BARRED = Rule(lambda c: bool(c.barred), ALONE, "the {peer} is not asked: {barred}", lambda c: c.expected)
AUTO_RULES: tuple[Rule, ...] = (
    Rule(lambda c: c.raw_prompt, ALONE, "raw tokens are continued by one side alone"),
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
    Rule(lambda c: not c.linked and c.expected, ALONE, "{unlinked}", _always),
    Rule(lambda c: not c.linked, ALONE, "no {peer} takes part{absent}"),
    Rule(
        lambda c: not c.common and c.side == "device",
        ALONE,
        f"{UNLIKE}, so this one writes, from whatever both sides find",
    ),
    Rule(lambda c: not c.common, ALONE, f"{UNLIKE}, and the {{peer}}'s documents stay there", _always),
    Rule(_budget_asked, VERIFIED, "the request has an energy budget, and nothing private is in the context"),
    Rule(
        lambda c: _cloud_may_write(c) and c.larger == "cloud",
        VERIFIED,
        "nothing private is in the context, and the {peer}'s model is larger",
        takes=_nothing_found,
    ),
    Rule(
        _cloud_may_write,
        VERIFIED,
        "nothing private is in the context, and the {peer} may find something",
        takes=_nothing_found,
    ),
    Rule(lambda c: JOINT not in c.common, ALONE, "the {peer} does not know 'aggregate'", _always),
    Rule(lambda c: c.wish.documents == 0, ALONE, "the request wants no documents"),
    Rule(lambda c: c.own.documents + c.peer.documents == 0, ALONE, "neither side has documents"),
    Rule(
        lambda c: not (may_find(c.wish, c.peer) or c.wish.options.get("search_every")),
        ALONE,
        "the {peer} has no documents",
        takes=_own_alone,
    ),
    Rule(_always, JOINT, "the {peer} is linked and the two sides hold {documents} documents"),
    Rule(_always, ALONE, "no strategy of both sides takes what was retrieved"),
)


def asked_rules(name: str) -> tuple[Rule, ...]:
    """Rules for a request that names its strategy."""
    if not STRATEGIES[name].needs_peer:
        return (Rule(_always, name, "the request asks for it", _search_missing),)
    return (
        replace(BARRED, missing=_always),
        Rule(lambda c: not c.linked, ALONE, "{unlinked}", _always),
        Rule(lambda c: not c.common, ALONE, UNLIKE, _always),
        Rule(lambda c: name not in c.common, ALONE, f"the {{peer}} does not know '{name}'", _always),
        Rule(_always, name, "the request asks for it"),
        Rule(_always, ALONE, f"'{name}' does not take what was retrieved"),
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
            if not STRATEGIES[rule.strategy].needs_peer and rule.takes is None:
                break  # it never declines
    for name in [each.strategy for each in found] if asked == AUTO else [asked]:
        if (check := STRATEGIES[name].check) is not None:
            check(context)
    return tuple(found)


def choose(found: Sequence[StrategyChoice], context: RoutingContext) -> StrategyChoice:
    """The first candidate that does not decline after retrieval, with its options."""
    for candidate in found:
        if candidate.takes is not None and not candidate.takes(context):
            continue
        options = STRATEGIES[candidate.strategy].options_for(context)
        if options is not None:
            return replace(candidate, options=options)
    raise AssertionError(f"every candidate declined: {found}")


def peer_missing(peer: Side, why: str = "", how: str = "is not there") -> RequestError:
    """Error of a request that requires a peer which is not linked. why: the end of its sentence, if it is not that."""
    return RequestError(
        f"The {peer} {how}, and the request does not want an answer without it{why}.",
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
    if context.raw_prompt:
        raise RequestError(
            f"The strategy '{name}' reads documents into a conversation; raw tokens are continued by one side alone.",
            param="paceline.strategy",
        )
    if context.wish.privacy not in STRATEGIES[name].privacy_levels:
        raise RequestError(
            f"The strategy '{name}' needs the {peer}, which the privacy level '{context.wish.privacy}' forbids.",
            param="paceline.privacy",
        )
