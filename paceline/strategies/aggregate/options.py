"""Options of `aggregate`: the requests it can keep, the aggregator of an answer, and the side that decides."""

from __future__ import annotations

from typing import cast, get_args

import msgspec

from paceline.core.aggregation.aggregators import AggregatorName, default_aggregator
from paceline.core.side import Side, other
from paceline.errors import RequestError
from paceline.strategies.base import MachineConfig, RoutingContext, asked_options
from paceline.wire.messages import MIN_STRETCH, AggregateOptions, DraftLimits, OpenSession, Options

AGGREGATORS: tuple[AggregatorName, ...] = get_args(AggregatorName)


def check(context: RoutingContext) -> None:
    """Raises RequestError for an aggregator that is not known, and for logprobs that it, or the cloud as the front,
    cannot give."""
    aggregator = asked_options(AggregateOptions, context).aggregator
    if aggregator not in ("", *AGGREGATORS):
        raise RequestError(
            f"The aggregator '{aggregator}' is not known; known: {', '.join(AGGREGATORS)}.",
            param="paceline.debug.aggregator",
        )
    if context.wish.logprobs and aggregator == "coin":
        raise RequestError(
            "The aggregator 'coin' exchanges no distributions and so gives no logprobs; 'mixture' does.",
            param="paceline.debug.aggregator",
        )
    if context.wish.logprobs and context.side == "cloud" and context.wish.strategy == "aggregate":
        raise RequestError(
            "The strategy 'aggregate' gives the cloud no logprobs: the distributions stay on the device. "
            "Ask the device, or leave out 'logprobs'.",
            param="logprobs",
        )


def choose(context: RoutingContext) -> AggregateOptions:
    """The request's options with the aggregator filled in, and with what its logprobs need. A request that names the
    strategy is written by both sides even where neither has found a document."""
    asked = asked_options(AggregateOptions, context)
    aggregator = asked.aggregator or default_aggregator(
        context.wish.sampling, logprobs=context.wish.logprobs, seeded=context.wish.seeded
    )
    writer = None if context.wish.strategy == "aggregate" else context.larger
    return msgspec.structs.replace(asked, aggregator=aggregator, needs_dists=context.wish.logprobs, writer=writer)


def accepts(opening: OpenSession, options: Options) -> str | None:  # noqa: ARG001  # a hook's signature
    aggregator = options.aggregator if isinstance(options, AggregateOptions) else ""
    if aggregator not in AGGREGATORS:
        return f"it does not know the aggregator '{aggregator}'"
    return f"it does not search again after {options.stretch} tokens" if 0 < options.stretch < MIN_STRETCH else None


def options_of(config: MachineConfig) -> AggregateOptions:
    """The machine's options; the defaults where it was given another strategy's."""
    return config.options if isinstance(config.options, AggregateOptions) else AggregateOptions()


def aggregator_of(config: MachineConfig) -> AggregatorName:
    return cast("AggregatorName", options_of(config).aggregator or "mixture")


def pinned_side(config: MachineConfig) -> Side | None:
    """Side where the decision must stay: the device, if what it computes may not leave it. None: it may move.

    Also for logprobs: only the side that decides has the distributions. Where scores follow the text: each would say
    how probable a token is after private documents. And for the cloud's clients at any level but `open`: a cloud that
    decided could continue texts of its choice, and would be sent the weight of the documents.
    """
    options = options_of(config)
    front = config.seat.side if config.seat.faces_client else other(config.seat.side)
    may_follow = aggregator_of(config) == "coin" and not options.rescoring and front == "device"
    stays = config.seat.private and not may_follow
    return "device" if options.needs_dists or stays else None


def sends_both_ways(config: MachineConfig) -> bool:
    """Either side sends what it computes, whichever decides, so that the places of the decision are alike. Only trees:
    the holder's chains stay with it, as in the paper."""
    return pinned_side(config) is None and config.options.drafting.rows > 1


def announces(config: MachineConfig) -> bool:
    """A device that decides shows the cloud the tokens it expects, so that the cloud computes what will be needed.

    Only for its own clients, and with trees: chains are those of the paper.
    """
    front = config.seat.side if config.seat.faces_client else other(config.seat.side)
    return pinned_side(config) == "device" and front == "device" and config.options.drafting.rows > 1


def draft_limits(config: MachineConfig) -> DraftLimits:
    """Limits of this side's drafts. A device that may send choices alone sends one a position: several would reveal
    the distribution behind them."""
    limits = config.options.drafting
    only_choices = config.seat.private and config.seat.side == "device" and pinned_side(config) is None
    return msgspec.structs.replace(limits, width=1) if only_choices else limits
