"""How drafts are verified (`core.verification`): the requests that each verifier can keep, one interface, and the
halves of both sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec

from paceline.core.aggregation.aggregators import OwnDist
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams, filter_top
from paceline.core.verification import Coins, TargetParts, VerifierName, draft_dist, prob_of
from paceline.errors import RequestError
from paceline.strategies.base import MachineConfig, RoutingContext, asked_options
from paceline.wire.messages import OpenSession, Options
from paceline.wire.payloads import (
    PROB_BYTES,
    decode_draft_dist,
    decode_places,
    decode_probs,
    encode_draft_dist,
    encode_places,
    encode_prob,
)
from paceline.wire.verify_messages import DraftChain, VerifyOptions


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


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted token, and what its verifier is told of the distribution that it was drawn from."""

    token: int
    drawn_from: bytes = b""  # encoded by `wire.payloads`
    second: int | None = None  # what the target may be where it is not `token`: a leaf beside the chain


# The next target; or, of a rejected draft that the drafter has to replace, the head of the target's distribution, from
# whose residual it draws.
Outcome = int | Dist


class Verifier(ABC):
    """Both sides' halves. A place without a draft has the target model's own token: of the same distribution."""

    reads_dists: ClassVar[bool]  # of rows, on both sides; else tokens that engines sample suffice
    needs_drafts: ClassVar[bool]  # a draft is of use only where the target has not been decided without it
    # The end of the text is a draft like any other: what is drafted may not depend on what was drawn.
    drafts_ends: ClassVar[bool]

    # ---- the drafter's half
    @abstractmethod
    def draft(self, own: OwnDist, position: int, *, second: bool) -> Draft:
        """The next draft. own: the draft model's distribution there. second: with a second guess, where the verifier
        takes them and one is likely."""

    def message(
        self, epoch: int, base: int, offset: int, drafts: Sequence[Draft], *, last: bool, recovered: int | None
    ) -> DraftChain:
        """What is sent of these drafts. The other arguments are fields of `DraftChain`."""
        places = encode_places([(draft.token, draft.second) for draft in drafts])
        if not self.needs_drafts:  # nothing is left to the drafter, and a message without drafts says that it is last
            return DraftChain(0, epoch, base, offset, places, last and bool(drafts))
        return DraftChain(0, epoch, base, offset, places, last, recovered, *self.beside(drafts))

    def beside(self, drafts: Sequence[Draft]) -> tuple[bytes, list[bytes]]:  # noqa: ARG002  # nothing
        """(probabilities, distributions) that are sent beside the tokens."""
        return b"", []

    @abstractmethod
    def recover(self, own: OwnDist | None, head: Dist, position: int) -> int:
        """The target that the cloud has left to the drafter. own: as of `draft`, if it is known; head: as of
        `Outcome`."""

    # ---- the target's half
    @abstractmethod
    def received(self, message: DraftChain) -> list[Draft]:
        """The drafts of a message. Raises RemoteProtocolError for what is no distribution."""

    def decide(self, position: int, final: Dist, draft: Draft) -> Outcome:
        """Decide on a draft, where the verifier needs drafts. final: the target's distribution in its place, after
        top-k, top-p and min-p."""
        raise NotImplementedError


class AcceptOrReject(Verifier):
    """What *rejection* and *truncated* have in common: drafts are drawn from a distribution on the grid, with coins
    that are independent of the common noise."""

    reads_dists = needs_drafts = drafts_ends = True

    def __init__(self, sampling: SamplingParams, *, mass: float = 1.0, max_ids: int | None = None) -> None:
        """mass, max_ids: as of `draft_dist`."""
        self.coins = Coins(sampling.seed)
        self._sampling, self._mass, self._max_ids = sampling, mass, max_ids

    def dist(self, own: OwnDist) -> Dist:
        """The distribution that drafts are drawn from."""
        return draft_dist(filter_top(own.whole, self._sampling), mass=self._mass, max_ids=self._max_ids)

    def recover(self, own: OwnDist | None, head: Dist, position: int) -> int:
        """Without the draft distribution, which an honest target side never brings about, a token of the head."""
        if own is None:
            return self.coins.draw(position, head, "recover")
        return self.coins.recover(position, self.dist(own), head)


SECOND_WITHIN: Final = 2.0  # nats that the second guess may score below the draft: beyond it is hardly ever the target


class Agreement(Verifier):
    reads_dists = needs_drafts = drafts_ends = False

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling

    def draft(self, own: OwnDist, position: int, *, second: bool) -> Draft:
        token = own.token(self._sampling, position)
        other = own.second(self._sampling, position, within=SECOND_WITHIN) if second else None
        return Draft(token, second=other)

    def recover(self, own: OwnDist | None, head: Dist, position: int) -> int:  # noqa: ARG002  # nothing is left to it
        """Of a cloud that breaks the rules."""
        return head.argmax()

    def received(self, message: DraftChain) -> list[Draft]:
        return [Draft(token, second=second) for token, second in decode_places(message.places)]


# *Rejection*: two bytes for each draft, its probability; the drafter recovers the token of a rejected place (DSSD).
#
# The target's distribution there goes to the drafter as a head of some hundred ids; what lies outside it is drawn by
# the target's side with a coin of its own (`core.verification.TargetParts`), so that tokens follow the whole
# distribution.


class Rejection(AcceptOrReject):
    def __init__(self, sampling: SamplingParams, *, precise: bool) -> None:
        """precise: heads in float64, for logprobs."""
        super().__init__(sampling)
        self._precise = precise

    def draft(self, own: OwnDist, position: int, *, second: bool) -> Draft:  # noqa: ARG002  # places are decided by one
        dist = self.dist(own)
        token = self.coins.draw(position, dist, "draft")
        return Draft(token, encode_prob(dist.prob(token)))

    def beside(self, drafts: Sequence[Draft]) -> tuple[bytes, list[bytes]]:
        return b"".join(draft.drawn_from for draft in drafts), []

    def received(self, message: DraftChain) -> list[Draft]:
        probs = [message.probs[at : at + PROB_BYTES] for at in range(0, len(message.probs), PROB_BYTES)]
        return [Draft(token, prob) for (token, _), prob in zip(decode_places(message.places), probs, strict=False)]

    def decide(self, position: int, final: Dist, draft: Draft) -> Outcome:
        parts = TargetParts.of(final, precise=self._precise)
        if self.coins.happens(position, parts.rest_mass):
            return self.coins.draw(position, parts.rest, "rest")
        (draft_prob,) = decode_probs(draft.drawn_from)
        if self.coins.accepts(position, draft_prob, prob_of(parts.head, draft.token)):
            return draft.token
        return parts.head


# *Truncation*: the distribution of each draft goes up, truncated at a top-p mass (GELATO eq. 2); the target's side
# recovers the token of a rejected place itself.
#
# The paper sends the probabilities of the model and draws from the model; here drafts are drawn from exactly what is
# sent, so that tokens follow the target's distribution for any mass.


MAX_IDS: Final = 4096  # of one distribution: a chain of flat ones must fit a frame


class Truncation(AcceptOrReject):
    def __init__(self, sampling: SamplingParams, *, mass: float, vocab_size: int) -> None:
        super().__init__(sampling, mass=mass, max_ids=MAX_IDS)
        self._vocab_size = vocab_size

    def draft(self, own: OwnDist, position: int, *, second: bool) -> Draft:  # noqa: ARG002  # places are decided by one
        dist = self.dist(own)
        return Draft(self.coins.draw(position, dist, "draft"), encode_draft_dist(dist))

    def beside(self, drafts: Sequence[Draft]) -> tuple[bytes, list[bytes]]:
        return b"", [draft.drawn_from for draft in drafts]

    def received(self, message: DraftChain) -> list[Draft]:
        for dist in message.dists:
            decode_draft_dist(dist, self._vocab_size)
        places = decode_places(message.places)
        return [Draft(token, dist) for (token, _), dist in zip(places, message.dists, strict=False)]

    def decide(self, position: int, final: Dist, draft: Draft) -> Outcome:
        dist = decode_draft_dist(draft.drawn_from, self._vocab_size)
        if self.coins.accepts(position, dist.prob(draft.token), prob_of(final, draft.token)):
            return draft.token
        return self.coins.recover(position, dist, final)


def verifier_of(config: MachineConfig) -> Verifier:
    """The verifier of an answer, by its options, the same on both sides."""
    options, sampling = options_of(config), config.output.sampling
    match options.verifier:
        case "rejection":
            return Rejection(sampling, precise=options.needs_dists)
        case "truncated":
            return Truncation(sampling, mass=options.mass, vocab_size=config.output.vocab_size)
        case _:
            return Agreement(sampling)
