"""*Rejection*: two bytes for each draft, its probability; the drafter recovers the token of a rejected place (DSSD).

The target's distribution there goes to the drafter as a head of some hundred ids; what lies outside it is drawn by the
target's side with a coin of its own (`core.verification.target_parts`), so that tokens follow the whole distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.aggregation.aggregators import OwnDist
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.verification import TargetParts, prob_of
from paceline.strategies.draft_verify.verifiers.base import AcceptOrReject, Draft, LeftToDrafter, Outcome, Row
from paceline.wire.payloads.draft_codec import PROB_BYTES, decode_probs, encode_prob
from paceline.wire.payloads.draft_places import decode_places, encode_places
from paceline.wire.verify_messages import DraftChain, DraftsWithDists


class Rejection(AcceptOrReject):
    def __init__(self, sampling: SamplingParams, *, precise: bool) -> None:
        """precise: heads in float64, for logprobs."""
        super().__init__(sampling)
        self._precise = precise

    def draft(self, own: OwnDist, position: int, *, second: bool) -> Draft:  # noqa: ARG002  # places are decided by one
        dist = self.dist(own)
        token = self.drawn(dist, position)
        return Draft(token, encode_prob(dist.prob(token)))

    def message(
        self, epoch: int, base: int, offset: int, drafts: Sequence[Draft], *, last: bool, recovered: int | None
    ) -> DraftChain:
        places = encode_places([(draft.token, None) for draft in drafts])
        probs = b"".join(draft.drawn_from for draft in drafts)
        return DraftsWithDists(0, epoch, base, offset, places, last, recovered, probs)

    def received(self, message: DraftChain) -> list[Draft]:
        if not isinstance(message, DraftsWithDists):
            return []
        probs = [message.probs[at : at + PROB_BYTES] for at in range(0, len(message.probs), PROB_BYTES)]
        return [Draft(token, prob) for (token, _), prob in zip(decode_places(message.places), probs, strict=False)]

    def decide(self, row: Row, draft: Draft | None) -> Outcome | None:
        final = None if draft is None else row.final()
        if draft is None or final is None:
            return row.own()
        position = row.node.position
        parts = TargetParts.of(final, precise=self._precise)
        if self.coins.happens(position, parts.rest_mass):
            return self.coins.draw(position, parts.rest, "rest")
        (draft_prob,) = decode_probs(draft.drawn_from)
        if self.coins.accepts(position, draft_prob, prob_of(parts.head, draft.token)):
            return draft.token
        return LeftToDrafter(parts.head)
