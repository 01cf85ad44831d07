"""*Truncated*: the distribution of each draft goes up, truncated at a top-p mass (GELATO eq. 2); the target's side
recovers the token of a rejected place itself.

The paper sends the probabilities of the model and draws from the model; here drafts are drawn from exactly what is
sent, so that tokens follow the target's distribution for any mass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.aggregation.aggregators import OwnDist
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.verification import prob_of
from paceline.strategies.draft_verify.verifiers.base import AcceptOrReject, Draft, Outcome, Row
from paceline.wire.payloads.draft_codec import decode_draft_dist, encode_draft_dist
from paceline.wire.payloads.draft_places import decode_places, encode_places
from paceline.wire.verify_messages import DraftChain, DraftsWithDists

MAX_IDS: Final = 4096  # of one distribution: a chain of flat ones must fit a frame


class Truncated(AcceptOrReject):
    def __init__(self, sampling: SamplingParams, *, mass: float, vocab_size: int) -> None:
        super().__init__(sampling, mass=mass, max_ids=MAX_IDS)
        self._vocab_size = vocab_size

    def draft(self, own: OwnDist, position: int, *, second: bool) -> Draft:  # noqa: ARG002  # places are decided by one
        dist = self.dist(own)
        return Draft(self.drawn(dist, position), encode_draft_dist(dist))

    def message(
        self, epoch: int, base: int, offset: int, drafts: Sequence[Draft], *, last: bool, recovered: int | None
    ) -> DraftChain:
        places = encode_places([(draft.token, None) for draft in drafts])
        dists = [draft.drawn_from for draft in drafts]
        return DraftsWithDists(0, epoch, base, offset, places, last, recovered, b"", dists)

    def received(self, message: DraftChain) -> list[Draft]:
        if not isinstance(message, DraftsWithDists):
            return []
        for dist in message.dists:
            decode_draft_dist(dist, self._vocab_size)
        places = decode_places(message.places)
        return [Draft(token, dist) for (token, _), dist in zip(places, message.dists, strict=False)]

    def decide(self, row: Row, draft: Draft | None) -> Outcome | None:
        final = None if draft is None else row.final()
        if draft is None or final is None:
            return row.own()
        position, dist = row.node.position, decode_draft_dist(draft.drawn_from, self._vocab_size)
        if self.coins.accepts(position, dist.prob(draft.token), prob_of(final, draft.token)):
            return draft.token
        return self.coins.recover(position, dist, final)
