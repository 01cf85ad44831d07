"""Options of `draft_verify`, and the requests it can keep."""

from __future__ import annotations

import msgspec

from paceline.core.verification import VerifierName
from paceline.errors import RequestError
from paceline.strategies.base import MachineConfig, RoutingContext, asked_options
from paceline.wire.messages import OpenSession, Options
from paceline.wire.verify_messages import VerifyOptions


def options_of(config: MachineConfig) -> VerifyOptions:
    """The machine's options; the defaults where it was given another strategy's. Without drafts where the memory of
    this side has no room for their rows.

    At temperature 0 all verifiers write the same text, and agreement costs least. Above it those that accept or reject
    wait for drafts: of what is decoded meanwhile by chances of its own, a draft hardly ever is a part. *Rejection* is
    for a device in front (`check`); with a cloud in front it is *truncated* on both sides.
    """
    options = config.options if isinstance(config.options, VerifyOptions) else VerifyOptions()
    if options.verifier != "agreement":
        greedy = config.output.sampling.temperature == 0.0
        cloud_in_front = config.seat.faces_client == (config.seat.side == "cloud")
        waiting: VerifierName = "truncated" if cloud_in_front else options.verifier
        options = msgspec.structs.replace(
            options, verifier="agreement" if greedy else waiting, waits=options.waits or not greedy
        )
    return options if options.drafting.ahead else msgspec.structs.replace(options, most=0)


def choose(context: RoutingContext) -> VerifyOptions | None:
    """The request's options. It declines a device's own passages: they are private, and the cloud, which writes the
    text, would have to be sent them."""
    if context.side == "device" and context.passages:
        return None
    return msgspec.structs.replace(asked_options(VerifyOptions, context), needs_dists=context.wish.logprobs)


def check(context: RoutingContext) -> None:
    """With *rejection* the drafter draws tokens, which the side that faces the client has to answer for; and a cloud in
    front that loses the drafter has rejected a draft, and has not what the token in its place must be drawn from."""
    if (
        context.wish.strategy == "draft_verify"
        and context.side == "cloud"
        and context.wish.options.get("verifier") == "rejection"
    ):
        raise RequestError(
            "With the verifier 'rejection' the device draws tokens of the answer: ask the device, or use 'truncated'.",
            param="paceline.debug.verifier",
        )


def accepts(opening: OpenSession, options: Options) -> str | None:  # noqa: ARG001  # a hook's signature
    return None if isinstance(options, VerifyOptions) else "its options are those of another strategy"
