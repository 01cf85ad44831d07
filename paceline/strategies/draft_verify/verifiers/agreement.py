"""*Agreement*: the target's own token by the common noise; a draft is accepted where it is that token.

Any draft will do. Drafted with the same noise from a distribution that is nearly the target's, most are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.aggregation.aggregators import OwnDist
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.draft_verify.verifiers.base import Draft, Outcome, Row
from paceline.wire.payloads.draft_places import decode_places, encode_places
from paceline.wire.verify_messages import DraftChain

SECOND_WITHIN: Final = 2.0  # nats that the second guess may score below the draft: beyond it is hardly ever the target


class Agreement:
    reads_dists = needs_drafts = drafts_ends = False

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling

    def draft(self, own: OwnDist, position: int, *, second: bool) -> Draft:
        token = own.token(self._sampling, position)
        other = own.second(self._sampling, position, within=SECOND_WITHIN) if second else None
        return Draft(token, second=other)

    def message(
        self,
        epoch: int,
        base: int,
        offset: int,
        drafts: Sequence[Draft],
        *,
        last: bool,  # noqa: ARG002  # an empty message says so
        recovered: int | None,  # noqa: ARG002  # nothing is left to the drafter
    ) -> DraftChain:
        return DraftChain(0, epoch, base, offset, encode_places([(draft.token, draft.second) for draft in drafts]))

    def recover(self, own: OwnDist | None, head: Dist, position: int) -> int:  # noqa: ARG002  # nothing is left to it
        """Of a cloud that breaks the rules."""
        return head.argmax()

    def received(self, message: DraftChain) -> list[Draft]:
        return [Draft(token, second=second) for token, second in decode_places(message.places)]

    def decide(self, row: Row, draft: Draft | None) -> Outcome | None:  # noqa: ARG002  # it is compared, not used
        return row.own()
